"""`kubectl kubeproxy` over three nodes with real proxies, one of which is cut off from the API server.

kubectl reads the lab's API server itself; `kubectl exec` enters the network namespace of the pod's node.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from lab import objects
from lab.proxyprocess import Proxy, proxy_command
from lab.topology import NODE_A, NODE_B, NodeNet
from support.answers import valid
from support.live import TIMEOUT, Live
from support.programs import program

NODE_C = NodeNet("node-c", "zone-c", "192.168.100.4", "fd00:100::4", "172.31.0.4", "10.244.2.0/24", "fd00:244:2::/64")
NOW = "2026-11-26T16:00:00Z"
_KUBECTL = """\
#!/bin/sh
case "$1" in
exec) pod=$4; shift 6 ;;
*) exec {kubectl} "$@" ;;
esac
case "$pod" in
{pods}
*) echo "pods \\"$pod\\" not found" >&2; exit 1 ;;
esac
command=$1
shift
exec ip netns exec $namespace {proxy} $command --control-socket $socket "$@"
"""
"""`kubectl exec --namespace=… --container=… POD -- kube-proxy COMMAND …`."""


class ThreeNodes:
    """The cluster: a proxy on each node, with a pod to find it by."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.cluster = live.cluster
        self.proxies: dict[str, Proxy] = {}

    async def start(self) -> None:
        """Add the third node, and start all proxies."""
        await asyncio.to_thread(self.cluster.topology.add_node, NODE_C)
        self.cluster.store.put("nodes", objects.node(NODE_C))
        for node in (NODE_A, NODE_B, NODE_C):
            started = await self.cluster.start_proxy(self.live.mode.config, node=node, ready_within=TIMEOUT)
            self.proxies[node.name] = started
            self.cluster.store.put("pods", _pod(node))
        program_file = self.cluster.folder / "bin/kubectl"
        program_file.parent.mkdir()
        pods = "\n".join(
            f"kube-proxy-py-{name}) namespace={proxy.namespace} socket={proxy.control} ;;"
            for name, proxy in self.proxies.items()
        )
        text = _KUBECTL.format(kubectl=program("kubectl"), pods=pods, proxy=proxy_command())
        program_file.write_text(text)
        program_file.chmod(0o755)

    async def ask(self, *words: str) -> tuple[int, str]:
        """Run the plugin; its exit code and what it printed."""
        path = f"{self.cluster.folder / 'bin'}:{os.environ['PATH']}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kubeproxy.cluster.main", *words),
            env={**os.environ, "PATH": path, "KUBECONFIG": str(self.cluster.kubeconfig)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        text, _ = await process.communicate()
        return await process.wait(), text.decode()

    async def until(self, status: int, said: str, *words: str) -> str:
        """Run the plugin until it ends with this exit code and says this; what it printed."""
        text = ""

        async def check() -> str:
            nonlocal text
            found, text = await self.ask(*words)
            return "" if found == status and said in text else f"{said!r} and {status} expected, got {found}:\n{text}"

        await self.live.eventually(check)
        return text


def _pod(node: NodeNet) -> dict[str, Any]:
    name = f"kube-proxy-py-{node.name}"
    labels = {"k8s-app": "kube-proxy-py"}
    return {
        "metadata": {"name": name, "namespace": "kube-system", "uid": name, "labels": labels, "creationTimestamp": NOW},
        "spec": {"nodeName": node.name, "hostNetwork": True, "containers": [{"name": "kube-proxy"}]},
        "status": {"phase": "Running", "podIPs": [{"ip": node.ip}]},
    }


async def test_the_node_that_differs_is_named(bare: Live) -> None:
    bare.service("web", "a1 b1")
    nodes = ThreeNodes(bare)
    await nodes.start()

    text = await nodes.until(0, "3 of 3 nodes answered", "services", "svc/web")
    assert "default/web: programmed" in text
    assert text.count(f"endpoint {bare.ips['b1']['IPv4']}:3000") == 2  # by TCP and by UDP
    status, text = await nodes.ask("why", "pod/a1", "svc/web:tcp")
    assert status == 0, text
    assert "asked on node-a, pod kube-system/kube-proxy-py-node-a (0." in text
    assert f"{bare.ips['a1']['IPv4']} (default/a1) -> " in text
    assert "kube-proxy forwards it" in text

    _, text = await nodes.ask("doctor")
    assert "3 of 3 nodes answered, 3 in nftables mode" in text

    # No change reaches node-c: packets of the API server are dropped there.
    drop = "add table inet cut; add chain inet cut input { type filter hook input priority 0; }; "
    drop += f"add rule inet cut input tcp sport {objects.API_PORT} drop"
    run = await asyncio.create_subprocess_exec("ip", "netns", "exec", nodes.proxies["node-c"].namespace, "nft", drop)
    assert await run.wait() == 0
    bare.endpoints("web", "a1 b1 b2")
    lacking = f"1 of 3 nodes lacks endpoint {bare.ips['b2']['IPv4']}:3000 (tcp TCP IPv4): node-c"
    text = await nodes.until(1, lacking, "services", "default/web")
    assert "1 of 3 nodes alone: slice web-ipv4 in version" in text
    status, text = await nodes.ask("services", "default/web", "--node", "node-a", "--node", "node-b")
    assert (status, "2 of 2 nodes answered" in text) == (0, True), text
    status, text = await nodes.ask("verify", "default/web", "-o", "json")
    whole = valid("cluster", text)
    for row in whole["nodes"]:
        valid("verify", json.dumps(row["answer"]))
    assert [row["node"] for row in whole["nodes"] if row["status"]] == ["node-c"]

    bare.proxies.append(nodes.proxies["node-b"])
    await nodes.proxies["node-b"].kill()
    status, text = await nodes.ask("services")
    assert status != 0
    assert "no answer of node-b: no kube-proxy answers at " in text
