"""nftables mode in the configuration: its block, and what an empty `mode` takes from the block of iptables."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

from msgspec.structs import replace

from kubeproxy.config.blocks import IPTables
from kubeproxy.config.fields import ConfigurationFields
from kubeproxy.config.gates import gate_enabled
from kubeproxy.config.messages import Mistake
from kubeproxy.config.modes.description import PRIMARY_ADDRESS, C, LoopbackNodePorts, ModeConfig
from kubeproxy.config.modes.iptables import bit_mistakes
from kubeproxy.config.struct import json_name

LOCALHOST_GATE: Final = "KubeProxyNFTablesLocalhostNodePorts"
INHERITED: Final = ("masquerade_bit", "sync_period", "min_sync_period")


class NftablesMode(ModeConfig, frozen=True, kw_only=True):
    """With `mode` empty, settings that are not given come from the iptables block where it differs from its defaults.

    So a configuration that was made for the Go kube-proxy's default mode keeps its meaning.
    """

    def path(self, config: ConfigurationFields, attribute: str) -> str:
        """The JSON path where the user wrote an attribute, in the iptables block if it was inherited."""
        usual, written = getattr(IPTables(), attribute), getattr(config.iptables, attribute)
        inherited = not config.mode and getattr(config.nftables, attribute) == written != usual
        return f"{'iptables' if inherited else 'nftables'}.{json_name(attribute)}"

    def mistakes(self, config: ConfigurationFields) -> Iterator[Mistake]:
        """The bit out of range, unless that of iptables is the one that was written: it is checked in any mode."""
        path = self.path(config, "masquerade_bit")
        if path.startswith("nftables."):
            yield from bit_mistakes(path, config.nftables.masquerade_bit)

    def completed(self, config: C, given: AbstractSet[str]) -> C:
        """The configuration with what is inherited."""
        usual = IPTables()
        values = {
            attribute: getattr(config.iptables, attribute)
            for attribute in INHERITED
            if f"nftables.{json_name(attribute)}" not in given
            and getattr(config.iptables, attribute) != getattr(usual, attribute)
        }
        everything = config.nftables.masquerade_all or config.iptables.masquerade_all
        return replace(config, nftables=replace(config.nftables, **values, masquerade_all=everything))

    def loopback_nodeports(self, config: ConfigurationFields) -> LoopbackNodePorts:
        """By a relay, with the gate of Kubernetes 1.37: rules of this mode lead no packet away from loopback."""
        return "relayed" if gate_enabled(config.feature_gates, LOCALHOST_GATE) else "never"


MODE: Final = NftablesMode(
    name="nftables",
    syncs="nftables",
    masquerades="nftables",
    # There are no flags of its own: it takes those of iptables.
    flags={
        "iptables-sync-period": ("iptables.syncPeriod", "nftables.syncPeriod"),
        "iptables-min-sync-period": ("iptables.minSyncPeriod", "nftables.minSyncPeriod"),
        "masquerade-all": ("nftables.masqueradeAll",),
    },
    unset_when_empty=frozenset(("nftables.syncPeriod", "nftables.minSyncPeriod")),
    nodeport_addresses=PRIMARY_ADDRESS,
)
