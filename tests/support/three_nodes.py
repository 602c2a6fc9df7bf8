"""Three nodes, each with a proxy, for `kubectl kubeproxy`: the plugin runs as on a laptop with a kubeconfig.

kubectl sends its requests to the lab's API server; `kubectl exec` enters the network namespace of the pod's node.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from lab import objects
from lab.proxyprocess import Proxy
from lab.topology import NODE_A, NODE_B, NodeNet
from support import forking
from support.live import TIMEOUT, Json, Live
from support.programs import program

NODE_C = NodeNet("node-c", "zone-c", "192.168.100.4", "fd00:100::4", "172.31.0.4", "10.244.2.0/24", "fd00:244:2::/64")
NODES = {node.name: node for node in (NODE_A, NODE_B, NODE_C)}
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
exec $run $command --control-socket $socket "$@"
"""
"""Implements `kubectl exec --namespace=… --container=… POD -- kube-proxy COMMAND …`."""


class ThreeNodes:
    """The cluster: a proxy on each node, with the pod by which the plugin finds it."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.cluster = live.cluster
        self.proxies: dict[str, Proxy] = {}

    async def up(self) -> None:
        """Add the third node, and start all proxies."""
        await asyncio.to_thread(self.cluster.topology.add_node, NODE_C)
        self.cluster.store.put("nodes", objects.node(NODE_C))
        await asyncio.gather(*map(self.start, NODES))

    async def start(self, name: str, overrides: Mapping[str, Any] | None = None) -> None:
        """Start the proxy of a node, so that `kubectl exec` finds it."""
        config = {**self.live.mode.config, **(overrides or {})}
        self.proxies[name] = await self.cluster.start_proxy(config, node=NODES[name], ready_within=TIMEOUT)
        self.live.proxies = list(self.proxies.values())
        self.cluster.store.put("pods", _pod(NODES[name]))
        file = self.cluster.folder / "bin/kubectl"
        file.parent.mkdir(exist_ok=True)
        pods = "\n".join(
            f"kube-proxy-py-{name}) run='{forking.client(proxy.namespace)}' socket={proxy.control} ;;"
            for name, proxy in self.proxies.items()
        )
        file.write_text(_KUBECTL.format(kubectl=program("kubectl"), pods=pods))
        file.chmod(0o755)

    async def run(self, name: str, *command: str) -> None:
        """Run a command on a node."""
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", self.proxies[name].namespace, *command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        text, _ = await process.communicate()
        assert process.returncode == 0, f"{command}: {text.decode()}"

    async def drop(self, name: str, hook: str, rule: str) -> None:
        """Make table inet firewall of a node drop packets in its chain guard."""
        head = "add table inet firewall; add chain inet firewall guard"
        await self.run(name, "nft", f"{head} {{ type filter hook {hook} priority 0; }}")
        await self.run(name, "nft", f"add rule inet firewall guard {rule} drop")

    async def admit(self, name: str) -> None:
        """Remove the table of `drop`."""
        await self.run(name, "nft", "delete table inet firewall")

    async def ask(self, *words: str) -> tuple[int, str]:
        """Run the plugin; return its exit code and output."""
        path = f"{self.cluster.folder / 'bin'}:{os.environ['PATH']}"
        environment = {"PATH": path, "KUBECONFIG": str(self.cluster.kubeconfig)}
        return await forking.ask("", [forking.PLUGIN, *words], 4 * TIMEOUT, environment)

    async def until(self, status: int, said: str, *words: str) -> str:
        """Run the plugin until it ends with this exit code and prints this text; return its output."""
        text = ""

        async def check() -> str:
            nonlocal text
            found, text = await self.ask(*words)
            return "" if found == status and said in text else f"{said!r} and {status} expected, got {found}:\n{text}"

        await self.live.eventually(check)
        return text


def _pod(node: NodeNet) -> Json:
    name = f"kube-proxy-py-{node.name}"
    labels = {"k8s-app": "kube-proxy-py"}
    return {
        "metadata": {"name": name, "namespace": "kube-system", "uid": name, "labels": labels, "creationTimestamp": NOW},
        "spec": {"nodeName": node.name, "hostNetwork": True, "containers": [{"name": "kube-proxy"}]},
        "status": {"phase": "Running", "podIPs": [{"ip": node.ip}]},
    }


def ip(nodes: ThreeNodes, place: str) -> str:
    """Return the IPv4 address of a place."""
    return nodes.live.ips[place]["IPv4"]
