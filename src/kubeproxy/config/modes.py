"""The proxy modes in the configuration: each mode's blocks and flags, and the checks of its settings. A mode consists
of a ModeConfig in the list below, its block (a struct in fields.py), and the folder kubeproxy/backends/NAME with the
code that programs the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import ConfigurationFields, IPTables, json_name, value_at
from kubeproxy.config.gates import gate_enabled
from kubeproxy.config.messages import Mistake, negative, not_positive
from kubeproxy.model.addresses import parse_cidr

C = TypeVar("C", bound=ConfigurationFields)

LoopbackNodePorts = Literal["never", "ipv4", "relayed"]
"""Whether NodePorts can be reached on loopback addresses: never, on IPv4 addresses (the kernel has no route_localnet
for IPv6), or through a relay in the proxy (no rules of nftables mode translate packets from loopback)."""

EVERY_ADDRESS = ("0.0.0.0/0", "::/0")
PRIMARY_ADDRESS = ("primary",)
NODEPORT_WORDS = {"primary": PRIMARY_ADDRESS, "localhost": ("127.0.0.0/8", "::1/128"), "all": EVERY_ADDRESS}
"""The networks that words in nodePortAddresses mean, as in Kubernetes 1.37 (KEP-6032); 1.36 accepts only `primary`."""

_GATE: Final = "KubeProxyNFTablesLocalhostNodePorts"
LOOPBACK_SWITCHES: Final = "iptables.localhostNodePorts", f"featureGates.{_GATE}"
"""The fields that disable NodePorts on loopback in iptables mode and in nftables mode."""
_INHERITED: Final = ("masquerade_bit", "sync_period", "min_sync_period")
_SCHEDULER: Final = re.compile(r"[a-z0-9_]{0,15}")
"""The name of an ipvs scheduler, which is part of a kernel module's name, and shorter than IP_VS_SCHEDNAME_MAXLEN."""


def spelled_out(addresses: Iterable[str]) -> tuple[str, ...]:
    """Replace words in nodePortAddresses, except "primary", by networks."""
    return tuple([network for part in addresses for network in NODEPORT_WORDS.get(part, (part,))])


def bit_mistakes(path: str, bit: int) -> Iterator[Mistake]:
    """Yield a mistake if a masqueradeBit is not a bit of a packet's mark, which has 32 bits."""
    if not 0 <= bit <= 31:
        yield Mistake(path, f"must be from 0 to 31, got {bit}")


def parse_port_range(text: str) -> range | None:
    """Parse "low-high", "low+count" or "port". Return an empty range for "" and "0" (any port); return None if the text
    is invalid."""
    match = re.fullmatch(r"([0-9]{1,5})(?:([-+])([0-9]{1,5}))?", text.strip())
    if text.strip() in ("", "0", "0-0"):
        return range(0)
    if match is None:
        return None
    low = int(match[1])
    high = {"-": int(match[3] or 0), "+": low + int(match[3] or 0), None: low}[match[2]]
    return range(low, high + 1) if 0 < low <= high <= 65535 else None


class ModeConfig(Struct, frozen=True, kw_only=True):
    """One mode in the configuration. The methods implement defaults; a subclass overrides a method if the default does
    not fit the mode."""

    name: str
    syncs: str  # the field of KubeProxyConfiguration that contains the sync periods
    masquerades: str  # the field that contains the masquerade settings
    flags: Mapping[str, tuple[str, ...]]  # flags that depend on the mode, with the paths that they set in this mode
    flag_defaults: Mapping[str, Any] = {}  # the values of these flags if they are not given
    unset_when_empty: frozenset[str] = frozenset()  # paths of fields in which 0 means unset
    nodeport_addresses: tuple[str, ...] = EVERY_ADDRESS  # the meaning of an unset nodePortAddresses
    loopback: LoopbackNodePorts = "never"  # whether NodePorts can be reached on loopback if the switch is on
    switch: str = ""  # the path of the field or gate that switches NodePorts on loopback; '' for none

    def path(self, config: ConfigurationFields, attribute: str) -> str:  # noqa: ARG002 - see NftablesMode
        """Return the JSON path at which the user sets an attribute of the sync block."""
        return f"{self.syncs}.{json_name(attribute)}"

    def mistakes(self, config: ConfigurationFields) -> Iterator[Mistake]:  # noqa: ARG002
        """Yield the mistakes in the mode's settings. Called only for the mode to run."""
        yield from ()

    def completed(self, config: C, given: AbstractSet[str]) -> C:  # noqa: ARG002
        """Complete the configuration for this mode if `mode` is empty; `given` are the paths of the fields that are
        set."""
        return config

    def loopback_nodeports(self, config: ConfigurationFields) -> LoopbackNodePorts:
        """Return whether NodePorts can be reached on loopback addresses."""
        return "never" if self.loopback_switch(config) else self.loopback

    def loopback_switch(self, config: ConfigurationFields) -> str:
        """Return the path of the field or gate that disables NodePorts on loopback; '' if none does so."""
        if not self.switch:
            return ""
        is_gate = self.switch == LOOPBACK_SWITCHES[1]
        on = gate_enabled(config.feature_gates, _GATE) if is_gate else value_at(config, self.switch)
        return "" if on else self.switch


class NftablesMode(ModeConfig, frozen=True, kw_only=True):
    """nftables mode. If `mode` is empty, a setting that is unset in the nftables block inherits the value in the
    iptables block, unless that value is the default. So a configuration for the Go kube-proxy's default mode keeps its
    meaning."""

    def path(self, config: ConfigurationFields, attribute: str) -> str:
        """Return the JSON path of an attribute; the path is in the iptables block for an inherited value."""
        usual, written = getattr(IPTables(), attribute), getattr(config.iptables, attribute)
        inherited = not config.mode and getattr(config.nftables, attribute) == written != usual
        return f"{'iptables' if inherited else 'nftables'}.{json_name(attribute)}"

    def mistakes(self, config: ConfigurationFields) -> Iterator[Mistake]:
        """Yield a mistake for an invalid masqueradeBit. (The check of the iptables block covers an inherited value.)"""
        path = self.path(config, "masquerade_bit")
        if path.startswith("nftables."):
            yield from bit_mistakes(path, config.nftables.masquerade_bit)

    def completed(self, config: C, given: AbstractSet[str]) -> C:
        """Return the configuration with inherited values."""
        usual = IPTables()
        values = {
            attribute: getattr(config.iptables, attribute)
            for attribute in _INHERITED
            if f"nftables.{json_name(attribute)}" not in given
            and getattr(config.iptables, attribute) != getattr(usual, attribute)
        }
        everything = config.nftables.masquerade_all or config.iptables.masquerade_all
        return replace(config, nftables=replace(config.nftables, **values, masquerade_all=everything))


class IpvsMode(ModeConfig, frozen=True, kw_only=True):
    """ipvs mode, which uses the masquerade settings of the iptables block."""

    def mistakes(self, config: ConfigurationFields) -> Iterator[Mistake]:
        """Yield a mistake if the gate is off, and for an invalid scheduler, negative timeouts and invalid networks."""
        if not gate_enabled(config.feature_gates, "KubeProxyIPVS"):
            yield Mistake("mode", "ipvs needs the feature gate KubeProxyIPVS=true")
        block = config.ipvs
        if not _SCHEDULER.fullmatch(block.scheduler):
            message = f'expected the name of a scheduler like lc, or "" for rr, got "{block.scheduler}"'
            yield Mistake("ipvs.scheduler", message)
        timeouts = ("ipvs.tcpTimeout", "ipvs.tcpFinTimeout", "ipvs.udpTimeout")
        yield from negative((path, value_at(config, path)) for path in timeouts)
        for index, part in enumerate(block.exclude_cidrs):
            if parse_cidr(part) is None:
                yield Mistake(f"ipvs.excludeCIDRs[{index}]", f'expected a CIDR like 192.0.2.0/24, got "{part}"')


class UserspaceMode(ModeConfig, frozen=True, kw_only=True):
    """userspace mode, which has no block. Only this mode reads portRange and udpIdleTimeout."""

    def mistakes(self, config: ConfigurationFields) -> Iterator[Mistake]:
        """Yield a mistake for an invalid portRange, and for a udpIdleTimeout that is not positive."""
        if parse_port_range(config.port_range) is None:
            yield Mistake("portRange", f'expected ports like 300-2000, 300+1700 or 300, got "{config.port_range}"')
        yield from not_positive([("udpIdleTimeout", config.udp_idle_timeout)])


_IPTABLES_FLAGS: Final = {
    "iptables-sync-period": ("iptables.syncPeriod",),
    "iptables-min-sync-period": ("iptables.minSyncPeriod",),
    "masquerade-all": ("iptables.masqueradeAll",),
}
DEFAULT: Final = NftablesMode(
    name="nftables",
    syncs="nftables",
    masquerades="nftables",
    flags={  # uses the flags of iptables mode
        "iptables-sync-period": ("iptables.syncPeriod", "nftables.syncPeriod"),
        "iptables-min-sync-period": ("iptables.minSyncPeriod", "nftables.minSyncPeriod"),
        "masquerade-all": ("nftables.masqueradeAll",),
    },
    unset_when_empty=frozenset(("nftables.syncPeriod", "nftables.minSyncPeriod")),
    nodeport_addresses=PRIMARY_ADDRESS,
    loopback="relayed",
    switch=LOOPBACK_SWITCHES[1],
)
"""The mode that an empty `mode` selects."""
FALLBACK: Final = ModeConfig(
    name="iptables",
    syncs="iptables",
    masquerades="iptables",
    flags=_IPTABLES_FLAGS,
    unset_when_empty=frozenset(("iptables.syncPeriod", "iptables.minSyncPeriod")),
    loopback="ipv4",
    switch=LOOPBACK_SWITCHES[0],
)
"""The mode that an empty `mode` selects on a node that cannot run DEFAULT, and in the Go kube-proxy before 1.40."""
_IPVS: Final = IpvsMode(
    name="ipvs",
    syncs="ipvs",
    masquerades="iptables",
    flags={
        "ipvs-sync-period": ("ipvs.syncPeriod",),
        "ipvs-min-sync-period": ("ipvs.minSyncPeriod",),
        "masquerade-all": ("iptables.masqueradeAll",),
    },
    flag_defaults={"ipvs-min-sync-period": Duration(1)},  # the default in a file is 0
    unset_when_empty=frozenset(("ipvs.syncPeriod",)),
)
_USERSPACE: Final = UserspaceMode(name="userspace", syncs="iptables", masquerades="iptables", flags=_IPTABLES_FLAGS)

MODES: Final[dict[str, ModeConfig]] = {mode.name: mode for mode in (DEFAULT, FALLBACK, _IPVS, _USERSPACE)}
"""All modes by name."""
