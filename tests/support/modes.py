"""The modes of scenarios: the proxy's configuration for each mode, and the modes that this kernel supports.

A test with the mark `modes(...)` runs once in each supported mode of the list; `live` and `bare` are clusters for
proxies of that mode. Only the guest's kernel supports IPVS; it is slow and runs only that mode.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

GUEST = bool(os.environ.get("KUBEPROXY_GUEST"))
"""Whether this is the guest's kernel: it has IPVS, and one slow CPU."""


class ScenarioMode(NamedTuple):
    """A mode, and its fields of the configuration; `variant` is the variant of iptables that it uses."""

    name: str
    config: Mapping[str, Any]
    variant: str = ""

    def seen(self, answer: str) -> str:
        """Return an expected answer for this mode: if the proxy relays the bytes, endpoints see the node's address."""
        return answer.replace("kept", "masqueraded") if self.name == "userspace" else answer


_AT_ONCE = {"iptables": {"minSyncPeriod": "1ms"}}  # also the variant of userspace mode
NFTABLES = ScenarioMode("nftables", {"mode": "nftables"})
_ALL = (
    NFTABLES,
    ScenarioMode("iptables-nft", {"mode": "iptables"} | _AT_ONCE, "nft"),
    ScenarioMode("iptables-legacy", {"mode": "iptables"} | _AT_ONCE, "legacy"),
    ScenarioMode("userspace", {"mode": "userspace", "udpIdleTimeout": "10s"} | _AT_ONCE),
    ScenarioMode("ipvs", {"mode": "ipvs"}),
)
MODES = {mode.name: mode for mode in _ALL}
HERE = [name for name in MODES if (name == "ipvs") == GUEST]


def translate_bridged_packets() -> None:
    """Make packets between pods of one node pass the node's rules, as on every node of a cluster."""
    if GUEST:
        subprocess.run(["modprobe", "br_netfilter"], check=True)


def modes(*names: str) -> pytest.MarkDecorator:
    """Run a test in those of these modes that this kernel supports; skip it if there are none."""
    assert set(names) <= MODES.keys()
    there = [name for name in names if name in HERE]
    return pytest.mark.parametrize("mode", there, indirect=True, scope="module")
