"""ClientIP affinity across changes: when an endpoint moves to another slot, its clients move with it.

The kernel keeps a set of clients for each slot; only it knows who they are, so a move reads those sets. Slots move only
when a Service with affinity loses more endpoints than it gains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kubeproxy.backends.mode import Registry, Room
from kubeproxy.backends.nftables.layout import TABLE, client_set, pool_number
from kubeproxy.backends.nftables.render import Placed, pools
from kubeproxy.backends.nftables.ruleset import AFFINITY_CLIENTS
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.nftables import elements, nfnetlink
from kubeproxy.kernel.nftables.fetch import Fetcher
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Pool

_FULLEST: Final = client_set(0)
"""Every pool has clients in it, so but for chance it is the fullest of all sets of clients."""


class Move(NamedTuple):
    """The clients of a pool go from one slot to another; `pool` is its number, packed."""

    source: int
    target: int
    pool: bytes


def moves(before: Sequence[Placed], after: Sequence[Placed]) -> Iterator[Move]:
    """Yield the moves that new places ask for."""
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
    """Return from which slots clients go to which: those of a slot that its endpoint lost, to the first that it has."""
    if was == now[: len(was)]:
        return []
    first: dict[bytes, int] = {}
    for slot, destination in enumerate(now):
        first.setdefault(destination, slot)
    lost = ((slot, d) for slot, d in enumerate(was) if d in first and now[slot : slot + 1] != (d,))
    return sorted(((slot, first[d]) for slot, d in lost), key=lambda move: move[1])


def messages(wanted: Sequence[Move], table: KernelTable) -> list[bytes]:
    """Return the messages that copy the clients, with the time that each has left.

    A client may be in the sets of several slots, as it stays in that of a slot that its endpoint left: it is served by
    the first of them, and moves with that one alone.
    """
    if not wanted:
        return []
    clients = _Clients(table)
    packed: dict[str, list[bytes]] = {}
    for move in wanted:
        target = client_set(move.target)
        if target not in clients.sets:
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
        for message in nfnetlink.element_messages(nfnetlink.NEW_ELEMENT, table.family, TABLE, name, elements)
    ]


class _Clients:
    """The clients of each set by the pool that they use. A set is read when it is asked for, and once."""

    def __init__(self, table: KernelTable) -> None:
        self.sets = table.sets()
        self._table = table
        self._read: dict[str, dict[bytes, dict[bytes, nfnetlink.Element]]] = {}

    def of(self, name: str, pool: bytes) -> dict[bytes, nfnetlink.Element]:
        """Return a pool's clients in a set, by the element's key; none where there is no such set."""
        if name not in self._read:
            by_pool = self._read[name] = {}
            for client in self._table.elements(name) if name in self.sets else ():
                if client.expires > 0:
                    by_pool.setdefault(client.key[-len(pool) :], {})[client.key] = client
        return self._read[name].get(pool, {})


class ClientGauges:
    """How full the sets of clients are, as metrics: from Linux 6.16 on, as older ones do not say it."""

    def __init__(self, registry: Registry) -> None:
        self._clients = registry.gauge(
            "kubeproxy_session_affinity_clients",
            "Clients in the fullest set of session affinity (not in the Go kube-proxy)",
            "ip_family",
        )
        self._limit = registry.gauge(
            "kubeproxy_session_affinity_clients_limit",
            "Clients that a set of session affinity has room for (not in the Go kube-proxy)",
            "ip_family",
        )

    def look(self, table: KernelTable) -> None:
        """Ask the kernel for one number, which it need not count for."""
        try:
            clients = table.count(_FULLEST)
        except ApplyError:  # the table is gone: an inspection says so
            return
        if clients is not None:
            self._clients.labels(table.family.label).set(clients)
            self._limit.labels(table.family.label).set(AFFINITY_CLIENTS)


def rooms(families: Sequence[Family]) -> Sequence[Room]:
    """Return how full the sets of clients are, beside the proxy. Raises NetlinkError."""
    with Fetcher.open() as fetcher:
        counts = [(family, fetcher.count(family, TABLE, _FULLEST)) for family in families]
    return [
        Room(
            f"session affinity ({family.label})",
            used=clients,
            limit=AFFINITY_CLIENTS,
            why="when it is full new clients are served without affinity, of all Services",
            fix="lower sessionAffinityConfig.clientIP.timeoutSeconds of Services with many clients; see whether "
            "somebody floods them from addresses that are made up",
        )
        for family, clients in counts
        if clients is not None
    ]
