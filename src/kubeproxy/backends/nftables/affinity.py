"""Session affinity: the chains that it needs, and the use of the map of clients."""

from __future__ import annotations

from collections.abc import Sequence

from kubeproxy.backends.mode import Room
from kubeproxy.backends.nftables.layout import CLIENTS, TABLE, VERDICT_MAPS, ChainName
from kubeproxy.backends.nftables.packing import chain_names
from kubeproxy.backends.nftables.ruleset import AFFINITY_CLIENTS
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import Elements
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.nftables.fetch import Fetcher
from kubeproxy.model.addresses import Family
from kubeproxy.registry import MetricRegistry


def chains_of(elements: Elements) -> set[ChainName]:
    """Return the chains of session affinity and consistent hashing to which elements refer."""
    return chain_names({data for set_id in VERDICT_MAPS for data in elements.get(set_id, {}).values()})


class ClientGauges:
    """Metrics of the number of clients. These need Linux 6.16 or newer."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._clients = registry.gauge(
            "kubeproxy_session_affinity_clients",
            "Clients that session affinity remembers (not in the Go kube-proxy)",
            "ip_family",
        )
        self._limit = registry.gauge(
            "kubeproxy_session_affinity_clients_limit",
            "Clients that session affinity has room for (not in the Go kube-proxy)",
            "ip_family",
        )

    def look(self, table: KernelTable) -> None:
        """Update the metrics: one short request to the kernel."""
        try:
            clients = table.count(CLIENTS)
        except ApplyError:  # the table is missing: an inspection reports it
            return
        if clients is not None:
            self._clients.labels(table.family.label).set(clients)
            self._limit.labels(table.family.label).set(AFFINITY_CLIENTS)


def rooms(families: Sequence[Family]) -> Sequence[Room]:
    """Return the use of the maps of clients, read with a separate socket. Raises NetlinkError."""
    with Fetcher.open() as fetcher:
        counts = [(family, fetcher.count(family, TABLE, CLIENTS)) for family in families]
    return [
        Room(
            f"session affinity ({family.label})",
            used=clients,
            limit=AFFINITY_CLIENTS,
            why="when it is full, new clients of all Services are served without affinity",
            fix="lower sessionAffinityConfig.clientIP.timeoutSeconds of Services with many clients; check for a flood "
            "from forged addresses",
        )
        for family, clients in counts
        if clients is not None
    ]
