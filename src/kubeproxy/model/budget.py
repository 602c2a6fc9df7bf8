"""The limit of entries for weights and hash tables on a node: the Services within it, and the order of their changes.

A Service of two kilobytes may request 65,536 elements of the kernel on every node, and a namespace may have a thousand
such Services. See docs/balancing.md "What a node gives". Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, KeysView, Mapping
from typing import Final, NamedTuple

from kubeproxy.model.plan import ROOM, ServiceName

SHARES: Final = 4  # a namespace gets at most this fraction of the entries: one in four
TURN: Final = ROOM
"""Number of entries to change in one sync; they cost about 0.25 s of CPU time."""


class _Asker(NamedTuple):
    """A Service that requests entries; the smaller one comes first."""

    created: str  # RFC 3339 timestamps sort by age as text
    name: ServiceName


class NodeBudget:
    """Grants entries to Services by age, then name, as long as the older Services leave enough.

    The result is the same on every node with the same Services, and after a restart.
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
        """Estimate the entries of a Service that has not requested any yet."""
        if name not in self._asked:
            self.ask(name, created, entries)

    def ask(self, name: ServiceName, created: str, entries: int) -> None:
        """Replace the number of entries that a Service requests."""
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
        """Return whether the last `settle` granted a Service its entries."""
        return name not in self._denied

    def costs(self, names: KeysView[ServiceName]) -> dict[ServiceName, int]:
        """Return the entries granted to each of these Services, the oldest first; Services without any are left out."""
        found = sorted(self._asked[name] for name in names & self._asked.keys() if self.has(name))
        return {asker.name: entries for asker, entries in found}

    def settle(self) -> Iterable[ServiceName]:
        """Grant entries again, if a request changed; return the Services that gained or lost theirs."""
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
    """Orders costly changes by namespace in turn, so that no namespace waits for all changes of another.

    Waiting changes precede new ones. A namespace that returns gets the same turn as if it had waited.
    """

    def __init__(self) -> None:
        self._waiting: list[ServiceName] = []
        self._served: dict[str, int] = {}
        self._turn = 0

    def deferred(self, costs: Mapping[ServiceName, int]) -> Iterable[ServiceName]:
        """Return the Services whose changes wait, in order; `costs` has the entries of each changed Service."""
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
