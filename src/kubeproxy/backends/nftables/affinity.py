"""ClientIP affinity across changes: when an endpoint moves to another slot, its clients move with it.

The kernel keeps a set of clients for each slot; only it knows who they are, so a move reads those sets. Slots move only
when a Service with affinity loses more endpoints than it gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kubeproxy.backends.nftables.layout import TABLE, SetId, client_set, service_key
from kubeproxy.backends.nftables.render import Placed, pools
from kubeproxy.backends.nftables.table import Table
from kubeproxy.kernel import nfnetlink, nft_elements
from kubeproxy.model.plan import Pool


class Move(NamedTuple):
    """The clients of a frontend go from one slot to another, among those of one map; `key` is the frontend's."""

    endpoint_map: SetId
    source: int
    target: int
    key: bytes


def moves(before: Sequence[Placed], after: Sequence[Placed]) -> Iterator[Move]:
    """Yield the moves that new places ask for."""
    earlier = {item.plan.key: item for item in before}
    for item in after:
        old = earlier.get(item.plan.key)
        if old is None or not item.plan.affinity or old.plan.affinity != item.plan.affinity:
            continue
        known = {frontend.key: frontend for frontend in old.plan.frontends}
        for frontend in item.plan.frontends:
            was = pools(old, known[frontend.key]) if frontend.key in known else {}
            for endpoint_map, members in pools(item, frontend).items():
                for source, target in _moved(was.get(endpoint_map, ()), members):
                    yield Move(endpoint_map, source, target, service_key(frontend.key))


def _moved(was: Pool, now: Pool) -> list[tuple[int, int]]:
    if was == now[: len(was)]:
        return []
    slots = {destination: slot for slot, destination in enumerate(was)}
    return [(slots[d], slot) for slot, d in enumerate(now) if slots.get(d, slot) != slot]


def messages(wanted: Iterable[Move], table: Table) -> list[bytes]:
    """Return the messages that copy the clients, with the time that each has left.

    A client may be in the sets of several slots, as it stays in that of a slot that its endpoint left: it is served by
    the first of them, and moves with that one alone.
    """
    clients = _Clients(table)
    packed: dict[str, list[bytes]] = {}
    for move in wanted:
        target = client_set(move.endpoint_map, move.target)
        if target not in clients.sets:
            continue
        moved = clients.of(client_set(move.endpoint_map, move.source), move.key)
        for slot in range(move.source):
            if moved:
                before = clients.of(client_set(move.endpoint_map, slot), move.key)
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
    """The clients of each set by the frontend that they use. A set is read when it is asked for, and once."""

    def __init__(self, table: Table) -> None:
        self.sets = table.sets()
        self._table = table
        self._read: dict[str, dict[bytes, dict[bytes, nfnetlink.Element]]] = {}

    def of(self, name: str, frontend: bytes) -> dict[bytes, nfnetlink.Element]:
        """Return a frontend's clients in a set, by the element's key; none where there is no such set."""
        if name not in self._read:
            by_frontend = self._read[name] = {}
            for client in self._table.elements(name) if name in self.sets else ():
                if client.expires > 0:
                    # A client of a NodePort has the address that it used in between, which is no part of the frontend.
                    by_frontend.setdefault(client.key[-len(frontend) :], {})[client.key] = client
        return self._read[name].get(frontend, {})
