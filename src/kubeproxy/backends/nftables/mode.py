"""Operations of nftables mode: checks, and construction of backends and examiners."""

from __future__ import annotations

from collections.abc import Sequence

from kubeproxy.backends.mode import Backend, Operations, Registry
from kubeproxy.backends.nftables import forwarding, localhost, probe
from kubeproxy.backends.nftables.affinity import ClientGauges, rooms
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.counting import ConnectionMetrics, Counting, KernelCounters
from kubeproxy.backends.nftables.examine import NftablesExaminer
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.nftables.view import NftablesView
from kubeproxy.backends.nftables.weight import weigh
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.features import CONNECTION_COUNTERS, FAST_FORWARDING
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink
from kubeproxy.kernel.route.links import ethernet_interfaces, interface_changes
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals


def _check(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:  # noqa: ARG001 - needs neither
    probe.check()


def _open(config: KubeProxyConfiguration, world: Globals, registry: Registry) -> Sequence[Backend]:
    backends = _backends(world, registry)
    if config.of_mode.loopback_nodeports(config) != "relayed":
        return backends
    localhost.count_refusals(registry, world.families)
    return localhost.relaying(backends, registry, world)


def _backends(world: Globals, registry: Registry) -> Sequence[NftablesBackend]:
    metrics = ConnectionMetrics(registry) if CONNECTION_COUNTERS.value(world) else None
    clients = ClientGauges(registry)
    return [
        NftablesBackend(
            KernelTable.open(family),
            world,
            Counting(family, KernelCounters.open(family), metrics) if metrics is not None else None,
            _devices(family) if FAST_FORWARDING.value(world).protocols else None,
            clients,
        )
        for family in world.families
    ]


def _devices(family: Family) -> forwarding.Devices:
    return forwarding.Devices(family, interface_changes(), ethernet_interfaces)


def _examine(
    config: KubeProxyConfiguration,  # noqa: ARG001 - see Operations
    world: Globals,
    families: Sequence[Family],
) -> list[NftablesExaminer]:
    # One socket for all: closing one delays the next transaction of the proxy (see table.KernelTable).
    link = Netlink.open(NETLINK_NETFILTER)
    return [NftablesExaminer(NftablesView(family, link), world) for family in families]


OPERATIONS = Operations(_check, _check, weigh, _open, _examine, within=forwarding.within, rooms=rooms)
