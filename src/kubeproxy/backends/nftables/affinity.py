"""ClientIP affinity across changes: when an endpoint moves to another slot, its clients move with it.

The kernel keeps a set of clients for each slot; only it knows who they are, so a move reads that set. Slots move only
when a Service with affinity loses more endpoints than it gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kubeproxy.backends.nftables.layout import TABLE, ChainName, service_key
from kubeproxy.backends.nftables.render import Placed
from kubeproxy.backends.nftables.table import Table
from kubeproxy.kernel import nfnetlink, nft_elements
from kubeproxy.model.plan import Pool


class Move(NamedTuple):
    """The clients of a frontend (a service key, as it ends their keys) go from one slot's set to another's."""

    source: str
    target: str
    suffix: bytes


def moves(before: Sequence[Placed], after: Sequence[Placed]) -> Iterator[Move]:
    """Yield the moves that new places ask for."""
    earlier = {item.plan.key: item for item in before}
    for item in after:
        old = earlier.get(item.plan.key)
        if old is None or not item.plan.affinity or old.plan.affinity != item.plan.affinity:
            continue
        for treatment, was, now in (
            ("pick", old.cluster, item.cluster),
            ("local-pick", old.local, item.local),
            # A cluster IP under internalTrafficPolicy Local picks from the local pool by the map of the others.
            ("pick", old.local, item.local) if item.plan.internal.node.picks_local else ("", (), ()),
        ):
            for source, target in _moved(was, now):
                for frontend in item.plan.frontends:
                    chain = ChainName(not frontend.address, treatment, 0)
                    key = service_key(frontend.key)
                    yield Move(chain.affinity_set(source), chain.affinity_set(target), key)


def _moved(was: Pool, now: Pool) -> list[tuple[int, int]]:
    if was == now[: len(was)]:
        return []
    slots = {destination: slot for slot, destination in enumerate(was)}
    return [(slots[d], slot) for slot, d in enumerate(now) if slots.get(d, slot) != slot]


def messages(wanted: Iterable[Move], table: Table) -> list[bytes]:
    """Return the messages that copy the clients, with the time that each has left."""
    result: list[bytes] = []
    by_source: dict[str, list[Move]] = {}
    sets = table.sets()
    for move in wanted:
        if move.source in sets and move.target in sets:
            by_source.setdefault(move.source, []).append(move)
    for source, group in by_source.items():
        clients = list(table.elements(source))
        for move in group:
            packed = [
                nft_elements.timed_element(client.key, client.timeout, client.expires)
                for client in clients
                if client.key.endswith(move.suffix) and client.expires > 0
            ]
            result += nfnetlink.element_messages(nfnetlink.NEW_ELEMENT, table.family, TABLE, move.target, packed)
    return result
