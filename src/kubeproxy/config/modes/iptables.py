"""iptables mode in the configuration: its block, of which other modes use parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kubeproxy.config.fields import ConfigurationFields
from kubeproxy.config.messages import Mistake
from kubeproxy.config.modes.description import LoopbackNodePorts, ModeConfig


class IptablesMode(ModeConfig, frozen=True, kw_only=True):
    """The only mode with NodePorts on loopback."""

    def loopback_nodeports(self, config: ConfigurationFields) -> LoopbackNodePorts:
        """IPv4 only: the kernel has no route_localnet for IPv6."""
        return "ipv4" if config.iptables.localhost_node_ports else "never"


def bit_mistakes(path: str, bit: int) -> Iterator[Mistake]:
    """What is wrong with a masqueradeBit: a mark has 32."""
    if not 0 <= bit <= 31:
        yield Mistake(path, f"must be from 0 to 31, got {bit}")


FLAGS: Final = {
    "iptables-sync-period": ("iptables.syncPeriod",),
    "iptables-min-sync-period": ("iptables.minSyncPeriod",),
    "masquerade-all": ("iptables.masqueradeAll",),
}

MODE: Final = IptablesMode(
    name="iptables",
    syncs="iptables",
    masquerades="iptables",
    flags=FLAGS,
    unset_when_empty=frozenset(("iptables.syncPeriod", "iptables.minSyncPeriod")),
)
