"""Operations of nftables mode: checks, and construction of backends and examiners."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kubeproxy.backends.mode import Backend, Operations, Weight
from kubeproxy.backends.nftables import forwarding, localhost
from kubeproxy.backends.nftables.affinity import ClientGauges, rooms
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.counting import ConnectionMetrics, Counting
from kubeproxy.backends.nftables.examine import NftablesExaminer, NftablesView
from kubeproxy.backends.nftables.render import Numbers, Parts, place_all
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import Plans, of_family
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.features import CONNECTION_COUNTERS, FAST_FORWARDING
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink
from kubeproxy.kernel.nftables.messages import require
from kubeproxy.kernel.route import ethernet_interfaces, interface_changes
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals
from kubeproxy.registry import MetricRegistry

KERNEL: Final = (5, 13)
"""Minimum Linux version, as in the Go kube-proxy's nftables mode."""

SKIP_KERNEL: Final = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"
"""Environment variable of the Go kube-proxy that allows older kernels to which a distribution backported nf_tables."""


def _weigh(world: Globals, family: Family, wanted: Plans, local: Sequence[bytes]) -> Weight:  # noqa: ARG001
    numbers = Numbers()
    parts = Parts(item for plans in of_family(wanted, family).values() for item in place_all(plans, (), numbers))
    return Weight(sum(map(len, parts.elements.values())) + sum(map(len, parts.pools.values())), "elements")


def check(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:  # noqa: ARG001 - needs neither
    """Raise Unsupported, with the fix, if this node cannot run the mode."""
    kernel = (0, 0) if os.environ.get(SKIP_KERNEL) else KERNEL
    require("nftables", kernel, f"use iptables mode, or upgrade; if nf_tables is backported, set {SKIP_KERNEL}=1")


def _open(config: KubeProxyConfiguration, world: Globals, registry: MetricRegistry) -> Sequence[Backend]:
    metrics = ConnectionMetrics(registry) if CONNECTION_COUNTERS.value(world) else None
    clients, relays = ClientGauges(registry), dict[Family, localhost.LocalhostRelay]()
    if config.of_mode.loopback_nodeports(config) == "relayed":
        localhost.count_refusals(registry, world.families)
        relays = localhost.relays(registry, world.families)
    tables = [KernelTable.open(family) for family in world.families]
    forwards = FAST_FORWARDING.value(world).protocols
    return [
        NftablesBackend(
            table,
            world,
            Counting(table.family, table.counters, metrics) if metrics is not None else None,
            forwarding.Devices(table.family, interface_changes(), ethernet_interfaces) if forwards else None,
            clients,
            relays.get(table.family),
        )
        for table in tables
    ]


def _examine(config: KubeProxyConfiguration, world: Globals, families: Sequence[Family]) -> list[NftablesExaminer]:  # noqa: ARG001
    # One socket for all requests: closing a socket delays the proxy's next transaction (see table.KernelTable).
    link = Netlink.open(NETLINK_NETFILTER)
    return [NftablesExaminer(NftablesView(family, link), world) for family in families]


OPERATIONS = Operations(check, check, _weigh, _open, _examine, within=forwarding.within, rooms=rooms)
