"""What weights and tables of consistent hashing may cost a node: which Services have theirs, and in which order changes
of them are taken. Pure.

A Service of two kilobytes may ask for 65,536 elements of the kernel on every node, and a namespace may have a thousand
of them. See docs/balancing.md "What a node gives".
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, KeysView, Mapping
from typing import Final, NamedTuple

from kubeproxy.model.plan import ROOM, ServiceName

SHARES: Final = 4
"""A namespace has one of so many parts of what the node gives."""

TURN: Final = ROOM
"""Entries of which changes are taken at a time: a quarter of a second of a processor."""


class _Asker(NamedTuple):
    """A Service that asks for entries; the smaller one comes first."""

    created: str  # RFC 3339: text order is age
    name: ServiceName


class NodeBudget:
    """Who may have how many entries: Services by age, then name, each of which fits into what the older ones left.

    So it is the same on every node that knows the same Services, and after a restart.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._asked: dict[ServiceName, tuple[_Asker, int]] = {}
        self._by_age: list[_Asker] = []
        self._total = 0
        self._sums: Counter[str] = Counter()  # by namespace
        self._denied: frozenset[ServiceName] = frozenset()
        self._is_settled = True

    def expect(self, name: ServiceName, created: str, entries: int) -> None:
        """Take about how many entries a Service will ask for, unless it has asked already."""
        if name not in self._asked:
            self.ask(name, created, entries)

    def ask(self, name: ServiceName, created: str, entries: int) -> None:
        """Take how many entries a Service asks for, in place of what it asked for before."""
        asker, before = self._asked.get(name, (None, 0))
        if before == entries and (asker is None or asker.created == created):
            return
        self._is_settled = False
        if asker is not None:
            del self._asked[name], self._by_age[bisect_left(self._by_age, asker)]
        if entries:
            asker = _Asker(created, name)
            self._asked[name] = asker, entries
            insort(self._by_age, asker)
        self._total += entries - before
        self._sums[name[0]] += entries - before
        if not self._sums[name[0]]:
            del self._sums[name[0]]

    def has(self, name: ServiceName) -> bool:
        """Return whether a Service has what it asks for, as it was settled last."""
        return name not in self._denied

    def costs(self, names: KeysView[ServiceName]) -> dict[ServiceName, int]:
        """Return how many entries those of these Services have that have any, the oldest first."""
        found = sorted(self._asked[name] for name in names & self._asked.keys() if self.has(name))
        return {asker.name: entries for asker, entries in found}

    def settle(self) -> Iterable[ServiceName]:
        """Decide anew, if anything changed; return the Services that have got or lost theirs. The youngest lose."""
        if self._is_settled:
            return ()
        self._is_settled = True
        before, self._denied = self._denied, frozenset(self._beyond())
        return sorted(before.symmetric_difference(self._denied) & self._asked.keys())

    def _beyond(self) -> Iterable[ServiceName]:
        share, left = self._entries // SHARES, self._entries
        if self._total <= left and all(count <= share for count in self._sums.values()):
            return
        shares = dict.fromkeys(self._sums, share)
        for asker in self._by_age:
            entries, namespace = self._asked[asker.name][1], asker.name[0]
            if entries > min(left, shares[namespace]):
                yield asker.name
                continue
            left -= entries
            shares[namespace] -= entries


class FairOrder:
    """Which of many costly changes are taken now: of each namespace in turn, so that none waits for all of another.

    What waits goes before what comes, and a namespace that comes again has no other turn than if it had waited.
    """

    def __init__(self) -> None:
        self._waiting: list[ServiceName] = []
        self._served: dict[str, int] = {}
        self._turn = 0

    def deferred(self, costs: Mapping[ServiceName, int]) -> Iterable[ServiceName]:
        """Return the Services whose changes are to wait, in their order; `costs` are those that cost any entries."""
        if sum(costs.values()) <= TURN:
            self._waiting.clear()
            self._served.clear()
            return ()
        names = dict.fromkeys([*(name for name in self._waiting if name in costs), *costs])
        waiting: dict[str, list[ServiceName]] = {}
        for name in names:
            waiting.setdefault(name[0], []).append(name)
        left, later = TURN, set(costs)
        while later:
            self._turn += 1
            namespace = min(waiting, key=lambda each: self._served.get(each, 0))
            name = waiting[namespace].pop(0)
            if left < TURN and costs[name] > left:
                break
            later.discard(name)
            left -= costs[name]
            self._served[namespace] = self._turn
            if not waiting[namespace]:
                del waiting[namespace]
        self._waiting = [name for name in names if name in later]
        return tuple(self._waiting)
