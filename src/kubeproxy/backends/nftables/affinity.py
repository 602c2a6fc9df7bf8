"""ClientIP affinity across changes: when an endpoint moves to another slot, its clients move with it.

The kernel keeps a set of clients for each slot; only it knows who they are, so a move reads those sets. Slots move only
when a Service with affinity loses more endpoints than it gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kubeproxy.backends.nftables.layout import TABLE, client_set, pool_number
from kubeproxy.backends.nftables.render import Placed, pools
from kubeproxy.backends.nftables.table import Table
from kubeproxy.kernel import nfnetlink, nft_elements
from kubeproxy.model.plan import Pool


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


def messages(wanted: Iterable[Move], table: Table) -> list[bytes]:
    """Return the messages that copy the clients, with the time that each has left.

    A client may be in the sets of several slots, as it stays in that of a slot that its endpoint left: it is served by
    the first of them, and moves with that one alone.
    """
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
            nft_elements.timed_element(client.key, client.timeout, client.expires) for client in moved.values()
        )
    return [
        message
        for name, elements in packed.items()
        for message in nfnetlink.element_messages(nfnetlink.NEW_ELEMENT, table.family, TABLE, name, elements)
    ]


class _Clients:
    """The clients of each set by the pool that they use. A set is read when it is asked for, and once."""

    def __init__(self, table: Table) -> None:
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
