"""ClientIP affinity across changes: when an endpoint moves to another slot, its clients move with it.

The kernel has a set of clients for each slot, so a move reads those sets. An endpoint changes its slot only when a
Service with affinity loses more endpoints than it gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from kubeproxy.backends.mode import Room
from kubeproxy.backends.nftables.layout import TABLE, VERDICT_MAPS, ChainName, client_set, pool_number
from kubeproxy.backends.nftables.packing import chain_names
from kubeproxy.backends.nftables.render import Placed, pools
from kubeproxy.backends.nftables.ruleset import AFFINITY_CLIENTS, slots_with_clients
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import Elements
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.nftables import elements, nfnetlink
from kubeproxy.kernel.nftables.elements import Element, element_messages
from kubeproxy.kernel.nftables.fetch import Fetcher
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Pool
from kubeproxy.registry import MetricRegistry

_FULLEST: Final = client_set(0)
"""Every pool has slot 0, so the set of clients of slot 0 is most probably the fullest."""


def chains_of(elements: Elements) -> set[ChainName]:
    """Return the chains of session affinity to which elements refer."""
    return chain_names({data for set_id in VERDICT_MAPS for data in elements.get(set_id, {}).values()})


def weight(chains: Iterable[ChainName]) -> int:
    """Return the approximate number of rules of these chains: one, and one for each endpoint."""
    return sum([1 + (name.endpoints if name.affinity and name.treatment.endswith("pick") else 0) for name in chains])


class Move(NamedTuple):
    """Clients of a pool move from one slot to another; `pool` is its packed number."""

    source: int
    target: int
    pool: bytes


def moves(before: Sequence[Placed], after: Sequence[Placed]) -> Iterator[Move]:
    """Yield the moves between two placements of a Service."""
    earlier = {item.number: item for item in before if item.number}
    for item in after:
        old = earlier.get(item.number)
        if old is None:
            continue
        was = pools(old)
        for policy, members in pools(item).items():
            for source, target in _moved(was.get(policy, ()), members):
                yield Move(source, target, pool_number(item.number, policy, item.plan.key.family))


def _moved(was: Pool, now: Pool) -> list[tuple[int, int]]:
    """Return pairs of source and target slot: an endpoint that loses a slot moves its clients to its first slot."""
    if was == now[: len(was)]:
        return []
    first: dict[bytes, int] = {}
    for slot, destination in enumerate(now):
        first.setdefault(destination, slot)
    lost = ((slot, d) for slot, d in enumerate(was) if d in first and now[slot : slot + 1] != (d,))
    return sorted(((slot, first[d]) for slot, d in lost), key=lambda move: move[1])


def messages(
    wanted: Sequence[Move], table: KernelTable, chains: AbstractSet[ChainName], missing: AbstractSet[ChainName]
) -> list[bytes]:
    """Return the messages that copy the clients, with the remaining time of each. The sets of clients of `chains`
    exist; the same transaction creates those of `missing` first.

    A client stays in the set of a slot that its endpoint left, so it may be in several sets. The first of these slots
    serves the client, and the client moves only with that slot.
    """
    if not wanted:
        return []
    clients, sets = _Clients(table, _sets(chains)), _sets(chains | missing)
    packed: dict[str, list[bytes]] = {}
    for move in wanted:
        target = client_set(move.target)
        if target not in sets:
            continue
        moved = clients.of(client_set(move.source), move.pool)
        for slot in range(move.source):
            if moved:
                before = clients.of(client_set(slot), move.pool)
                moved = {key: client for key, client in moved.items() if key not in before}
        packed.setdefault(target, []).extend(
            elements.timed_element(client.key, client.timeout, client.expires) for client in moved.values()
        )
    return [
        message
        for name, elements in packed.items()
        for message in element_messages(nfnetlink.NEW_ELEMENT, table.family, TABLE, name, elements)
    ]


def _sets(chains: Iterable[ChainName]) -> set[str]:
    return set(map(client_set, slots_with_clients(chains)))


class _Clients:
    """The clients of each set, by pool. A set is read once, on first use."""

    def __init__(self, table: KernelTable, sets: AbstractSet[str]) -> None:
        self._table = table
        self._sets = sets
        self._read: dict[str, dict[bytes, dict[bytes, Element]]] = {}

    def of(self, name: str, pool: bytes) -> dict[bytes, Element]:
        """Return a pool's clients in a set by element key; {} if the set does not exist."""
        if name not in self._read:
            by_pool = self._read[name] = {}
            for client in self._table.elements(name) if name in self._sets else ():
                if client.expires > 0:
                    by_pool.setdefault(client.key[-len(pool) :], {})[client.key] = client
        return self._read[name].get(pool, {})


class ClientGauges:
    """Metrics of the number of clients in the fullest set. They need Linux 6.16 or newer."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._clients = registry.gauge(
            "kubeproxy_session_affinity_clients",
            "Clients in the fullest set of session affinity (not in the Go kube-proxy)",
            "ip_family",
        )
        self._limit = registry.gauge(
            "kubeproxy_session_affinity_clients_limit",
            "Capacity of a set of session affinity in clients (not in the Go kube-proxy)",
            "ip_family",
        )

    def look(self, table: KernelTable) -> None:
        """Update the metrics: one short request to the kernel."""
        try:
            clients = table.count(_FULLEST)
        except ApplyError:  # the table is missing: an inspection reports it
            return
        if clients is not None:
            self._clients.labels(table.family.label).set(clients)
            self._limit.labels(table.family.label).set(AFFINITY_CLIENTS)


def rooms(families: Sequence[Family]) -> Sequence[Room]:
    """Return the use of the sets of clients, read with a separate socket. Raises NetlinkError."""
    with Fetcher.open() as fetcher:
        counts = [(family, fetcher.count(family, TABLE, _FULLEST)) for family in families]
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
