"""The capabilities of a proxy that was started as root are minimal, and sufficient for all later work.

The test reads the capabilities from /proc/PID/status; then Services change, another program damages the rules, a
Service needs a port below 1024, and a token rotates in a file of another user.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from kubeproxy.kernel.proc.capability import Capability
from lab.netns import run_in_async
from lab.probes import http_get
from lab.proxyprocess import METRICS_PORT, proxy_command
from support.live import Live
from support.modes import modes

HARM = {  # by mode: another program's change of a Service's rules
    "nftables": ["nft", "delete", "table", "ip", "kube-proxy"],
    "userspace": ["nft", "delete", "table", "ip", "kube-proxy-userspace"],
    "iptables-nft": ["iptables-nft", "-t", "nat", "-F", "KUBE-SERVICES"],
    "iptables-legacy": ["iptables-legacy", "-t", "nat", "-F", "KUBE-SERVICES"],
    "ipvs": ["ipset", "flush", "KUBE-CLUSTER-IP"],
}
NOBODY = 65534
LOW_PORT = 97
SYNC_PERIOD = "1s"


def rights(live: Live) -> dict[str, str]:
    """Return the lines of the proxy's /proc/PID/status by their names."""
    lines = Path(f"/proc/{live.proxy.pid}/status").read_text(encoding="ascii").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def bits(*capabilities: Capability) -> str:
    return f"{sum(1 << one for one in capabilities):016x}"


def others_kubeconfig(live: Live, folder: Path, token: str) -> tuple[Path, Path]:
    """A kubeconfig, and its token file, which belongs to another user than the proxy's."""
    file = folder / "token"
    file.touch(mode=0o400)
    os.chown(file, NOBODY, NOBODY)
    file.write_text(token)
    config = yaml.safe_load(live.cluster.node_kubeconfig.read_text(encoding="utf-8"))
    config["users"] = [{"name": "lab", "user": {"tokenFile": str(file)}}]
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path, file


@modes(*HARM)
async def test_little_is_kept_and_it_is_enough(bare: Live, tmp_path: Path) -> None:
    token = bare.cluster.server.tokens.issue("system:kube-proxy")
    kubeconfig, token_file = others_kubeconfig(bare, tmp_path, token)
    bare.service("web", "a1 b1", type="NodePort")
    block = bare.mode.config["mode"] if bare.mode.name != "userspace" else "iptables"
    periods = {block: {"syncPeriod": SYNC_PERIOD, "minSyncPeriod": "1ms"}}
    await bare.start({"clientConnection": {"kubeconfig": str(kubeconfig)}, **periods})
    wanted = {Capability.NET_ADMIN, Capability.NET_BIND_SERVICE, Capability.NET_RAW, Capability.DAC_READ_SEARCH}
    found = rights(bare)
    names = ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb", "NoNewPrivs")
    assert [found[name] for name in names] == [bits(*wanted)] * 3 + [bits()] * 2 + ["1"]
    assert bare.logged("Dropped all capabilities .*CAP_DAC_READ_SEARCH,CAP_NET_BIND_SERVICE,CAP_NET_ADMIN,CAP_NET_RAW")

    await bare.expect(bare.front("web", "nodeport"), {"outside": "a1 b1"}, "tcp")
    bare.endpoints("web", "a2")
    await bare.expect(bare.front("web"), {"pod": "a2"})
    await bare.run(*HARM[bare.mode.name])
    await bare.until(lambda: bare.logged("Repairing|changed by another program"), "a repair")
    await bare.expect(bare.front("web"), {"pod": "a2", "node": "a2"})

    await a_health_check_is_answered_on_a_low_port(bare)
    token_file.write_text(bare.cluster.server.tokens.issue("system:kube-proxy"))
    bare.cluster.server.tokens.end(token, 0.0)
    bare.cluster.server.end_watches()
    await bare.until(lambda: bare.cluster.server.tokens.refused, "the old token refused")
    bare.endpoints("web", "b2")
    await bare.expect(bare.front("web"), {"pod": "b2"}, "tcp")
    assert not bare.logged("not permitted|Permission denied|more rights than|Cannot remove|Traceback")


async def a_health_check_is_answered_on_a_low_port(live: Live) -> None:
    made = live.service("low", "a1", type="LoadBalancer", externalTrafficPolicy="Local")
    made["spec"]["healthCheckNodePort"] = LOW_PORT  # with a --service-node-port-range that contains it
    live.cluster.store.put("services", made)

    async def answers() -> str:
        try:
            ask = lambda: http_get(live.ips["node"]["IPv4"], LOW_PORT, "/", 5.0)  # noqa: E731
            status, _ = await run_in_async(live.proxy.namespace, ask)
        except OSError as error:
            return str(error)
        return "" if status == 200 else f"status {status}"

    await live.eventually(answers)


async def test_only_files_of_others_need_a_capability(bare: Live) -> None:
    await bare.start({"metricsBindAddress": f"127.0.0.1:{METRICS_PORT}"})
    effective = bits(Capability.NET_ADMIN, Capability.NET_BIND_SERVICE, Capability.NET_RAW)
    assert rights(bare)["CapEff"] == effective


@pytest.mark.slow("a credential plugin beside the proxy")
async def test_a_plugin_with_rights_of_its_own_keeps_them(bare: Live, tmp_path: Path) -> None:
    """Otherwise it would fail on a node where it worked together with the Go kube-proxy."""
    token = bare.cluster.server.tokens.issue("system:kube-proxy")
    plugin = tmp_path / "plugin"
    credential = (
        f'{{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{{"token":"{token}"}}}}'
    )
    plugin.write_text(
        f"#!/bin/sh\ngrep -E 'NoNewPrivs|CapEff' /proc/self/status >{tmp_path}/rights\necho '{credential}'\n"
    )
    exec_config = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}
    config = yaml.safe_load(bare.cluster.node_kubeconfig.read_text(encoding="utf-8"))
    config["users"] = [{"name": "lab", "user": {"exec": exec_config}}]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    connection = {"clientConnection": {"kubeconfig": str(kubeconfig)}}
    for mode, kept in ((0o755, False), (0o4755, True)):
        plugin.chmod(mode)
        proxy = await bare.start(connection, command=["env", proxy_command()])
        found = dict(line.split() for line in (tmp_path / "rights").read_text(encoding="ascii").splitlines())
        assert found["NoNewPrivs:"] == ("0" if kept else "1")
        few = bits(*Capability) == found["CapEff:"] or int(found["CapEff:"], 16) < 1 << 14
        assert few is not kept
        assert bool(bare.logged("Keeping all capabilities: the credential plugin would lose rights of its own")) is kept
        await proxy.stop()
