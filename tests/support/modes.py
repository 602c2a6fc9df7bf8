"""The modes as scenarios meet them: how a proxy is configured for each, and which of them this kernel has.

A test that is marked with `modes(...)` runs once in each of those modes that are there; `live` and `bare` are clusters
for proxies of that mode then. IPVS is there under the guest's kernel alone, which is slow and runs that mode alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

GUEST = bool(os.environ.get("KUBEPROXY_GUEST"))
"""Whether this runs under the guest's kernel: IPVS is there, and one slow CPU."""


class ScenarioMode(NamedTuple):
    """A mode, and the fields of the configuration for it; `variant` of iptables whose tables it is to use."""

    name: str
    config: Mapping[str, Any]
    variant: str = ""

    def seen(self, answer: str) -> str:
        """An answer as a scenario writes it, in this mode: endpoints see the node where the proxy carries the bytes."""
        return answer.replace("kept", "masqueraded") if self.name == "userspace" else answer


_AT_ONCE = {"iptables": {"minSyncPeriod": "1ms"}}  # that of userspace mode too
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
    """Have what pods of one node send each other pass the node's rules, as on every node of a cluster."""
    if GUEST:
        subprocess.run(["modprobe", "br_netfilter"], check=True)


def modes(*names: str) -> pytest.MarkDecorator:
    """Run a test in those of these modes that this kernel has; where it has none of them the test is skipped."""
    assert set(names) <= MODES.keys()
    there = [name for name in names if name in HERE]
    return pytest.mark.parametrize("mode", there, indirect=True, scope="module")
