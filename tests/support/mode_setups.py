"""The modes that scenarios run in, by name: what of the configuration makes each, and which kernel has them."""

from __future__ import annotations

import os
import subprocess

from support.live import Json, Live

GUEST = bool(os.environ.get("KUBEPROXY_GUEST"))
"""Whether this runs under the guest's kernel: IPVS is there, and one slow CPU."""
_QUICK = {"minSyncPeriod": "1ms"}
MODES: dict[str, Json] = {
    "nftables": {"mode": "nftables"},
    "iptables-nft": {"mode": "iptables", "iptables": _QUICK},
    "iptables-legacy": {"mode": "iptables", "iptables": _QUICK},
    "userspace": {"mode": "userspace", "udpIdleTimeout": "10s", "iptables": _QUICK},
}
"""Of this machine's kernel."""
IN_GUEST: dict[str, Json] = {"ipvs": {"mode": "ipvs"}}
"""Of the guest's kernel, which runs a selection."""


def configuration(mode: str) -> Json:
    """What of the proxy's configuration makes a mode."""
    return (MODES | IN_GUEST)[mode]


def translate_bridged_packets() -> None:
    """Have what pods of one node send each other pass the node's rules, as on every node of a cluster."""
    if GUEST:
        subprocess.run(["modprobe", "br_netfilter"], check=True)


async def choose(live: Live, variant: str, place: str = "node") -> None:
    """Leave the hint by which a variant of iptables is chosen, as a kubelet does."""
    await run(live, f"iptables-{variant}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT", place=place)


async def prepare(live: Live, mode: str, place: str = "node") -> None:
    """Have the mode's variant of iptables be the node's, if it is of one."""
    if mode.startswith("iptables-"):
        await choose(live, mode.removeprefix("iptables-"), place)


async def run(live: Live, *command: str, place: str = "node") -> str:
    """Run a command, which must succeed; returns what it printed."""
    status, out, err = await live.cluster.exec(place, list(command))
    assert status == 0, f"{command}: {err}"
    return out
