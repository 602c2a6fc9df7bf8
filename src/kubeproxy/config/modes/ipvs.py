"""ipvs mode in the configuration: its block and what can be wrong with it. What it masquerades is iptables' to say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kubeproxy.config.addresses import parse_cidr
from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import ConfigurationFields
from kubeproxy.config.gates import gate_enabled
from kubeproxy.config.messages import Mistake
from kubeproxy.config.modes.description import ModeConfig

_SCHEDULER: Final = re.compile(r"[a-z0-9_]{0,15}")  # IP_VS_SCHEDNAME_MAXLEN; a module's name as well


class IpvsMode(ModeConfig, frozen=True, kw_only=True):
    """Its block is checked only when it is the mode to run."""

    def mistakes(self, config: ConfigurationFields) -> Iterator[Mistake]:
        """The gate that is off, timeouts below 0, and networks that are none."""
        if not gate_enabled(config.feature_gates, "KubeProxyIPVS"):
            yield Mistake("mode", "ipvs needs the feature gate KubeProxyIPVS=true")
        block = config.ipvs
        if not _SCHEDULER.fullmatch(block.scheduler):
            yield Mistake(
                "ipvs.scheduler", f'expected the name of a scheduler like lc, or "" for rr, got "{block.scheduler}"'
            )
        for path, value in (
            ("ipvs.tcpTimeout", block.tcp_timeout),
            ("ipvs.tcpFinTimeout", block.tcp_fin_timeout),
            ("ipvs.udpTimeout", block.udp_timeout),
        ):
            if value < 0:
                yield Mistake(path, f"must not be negative, got {value}")
        for index, part in enumerate(block.exclude_cidrs):
            if parse_cidr(part) is None:
                yield Mistake(f"ipvs.excludeCIDRs[{index}]", f'expected a CIDR like 192.0.2.0/24, got "{part}"')


MODE: Final = IpvsMode(
    name="ipvs",
    syncs="ipvs",
    masquerades="iptables",
    flags={
        "ipvs-sync-period": ("ipvs.syncPeriod",),
        "ipvs-min-sync-period": ("ipvs.minSyncPeriod",),
        "masquerade-all": ("iptables.masqueradeAll",),
    },
    flag_defaults={"ipvs-min-sync-period": Duration(1)},  # not the 0 that a file would have
    unset_when_empty=frozenset(("ipvs.syncPeriod",)),
)
