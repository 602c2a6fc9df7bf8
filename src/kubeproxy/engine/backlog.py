"""What one address family still has to get into the kernel, and how that stands. Knows no loop and no kernel.

A family that the kernel refuses has its own pace of retries, so that the other one's changes, and all that follows from
them, do not wait for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from kubeproxy.engine.pacing import Backoff
from kubeproxy.engine.standing import FamilyStanding
from kubeproxy.model.addresses import Family
from kubeproxy.model.balancing import entries
from kubeproxy.model.plan import NOTHING, Compiled, Frontend, ServiceName, ServicePlan
from kubeproxy.model.planner import Change

FIRST_RETRY = 0.05
SLOWEST_RETRY = 10.0
_UDP = socket.IPPROTO_UDP
PART = 2000  # Services that are looked at at once: 2 ms
LARGE = 40_000
"""Endpoints before and after, counted for each frontend, above which changes of Services wait for each other: 20 ms."""
MOST_TRIGGERS = 100  # of one Service, while the kernel refuses: more would say nothing new of the latency


def retries() -> Backoff:
    """Return the pace at which the kernel is asked again."""
    return Backoff(FIRST_RETRY, SLOWEST_RETRY)


class Backlog:
    """The changes that are queued for one family: all since its kernel was last known to be right.

    `stale` says that everything is to be compared with the kernel, `besides` that there is something to write beside
    what changed of Services, `resting` that it refused and its time has not come.
    """

    def __init__(self, family: Family, clock: Callable[[], float] = time.time) -> None:
        self.family = family
        self.changes: dict[ServiceName, Change] = {}
        self.stale = True
        self.besides = False
        self.resting = False
        self._let_go = False  # whether the last portion left large changes out, for others to go first
        self._backoff = retries()
        self._clock = clock
        self._inspected_at: float | None = None
        self._sound_since: float | None = None
        self._refusal: str | None = None
        self._difference: str | None = None

    @property
    def standing(self) -> FamilyStanding:
        """Return what is known of this family's kernel."""
        return FamilyStanding(
            self.family,
            self._inspected_at,
            self._sound_since,
            self._refusal,
            self._difference,
            len(self.changes),
        )

    def portion(self) -> list[Change]:
        """Return what to commit next: the changes but for large ones, and then these one after the other, oldest first.

        A large one lets others go before it once, and takes with it what has come since: so neither waits for more than
        one of the other kind. Where an address changes hands it is all of them, as that is one transaction.
        """
        changes = list(self.changes.values())
        large = [change.name for change in changes if weight(change, self.family) > LARGE]
        if len(large) == len(changes) == 1 or (large and _hand_over(changes, self.family)):
            large = []
        self._let_go = not self._let_go and 0 < len(large) < len(changes)
        later = set(large if self._let_go else large[1:])
        return [change for change in changes if change.name not in later]

    def committed(self, changes: Sequence[Change]) -> None:
        """Take that the kernel has these changes of what was queued, and all that was queued before them."""
        now = self._clock()
        self._refusal = None
        if not self.stale:  # else something was seen when this sync was under way already
            self._difference = None
            if self._sound_since is None:  # so this was a full sync
                self._sound_since = self._inspected_at = now
        for change in changes:
            del self.changes[change.name]
        self.besides = False
        self._backoff.succeeded()

    def refused(self, why: str) -> float:
        """Take that the kernel refused what was queued; return how many seconds to let it rest."""
        self._refusal, self._sound_since = why, None
        self.stale = self.resting = True
        return self._backoff.failed()

    def inspected(self) -> None:
        """Take that a thorough look at the kernel showed nothing that differs."""
        self._inspected_at = self._clock()

    def differs(self, what: str) -> None:
        """Take that another program changed something."""
        self._difference, self._sound_since = what, None
        self.stale = True

    def add(self, changes: Sequence[Change]) -> None:
        """Take changes in; those of one Service become one."""
        for change in changes:
            note(self.changes, change)

    def plans(self, changes: Iterable[Change]) -> list[tuple[ServiceName, tuple[ServicePlan, ...]]]:
        """Return what each changed Service is to be."""
        return [(change.name, self._of(change.after)) for change in changes]

    def all_plans(self, compiled: Mapping[ServiceName, Compiled]) -> dict[ServiceName, tuple[ServicePlan, ...]]:
        """Return what every Service is to be; those that changed come first, in their order."""
        ordered = {name: change.after for name, change in self.changes.items() if name in compiled}
        ordered.update(compiled)
        return {name: self._of(entry) for name, entry in ordered.items()}

    def committed_plans(self, name: ServiceName, compiled: Compiled) -> tuple[ServicePlan, ...]:
        """Return what the kernel has of a Service that is now to be as compiled."""
        change = self.changes.get(name)
        return self._of(compiled if change is None else change.before)

    def everything(self, fresh: Sequence[Change], compiled: Mapping[ServiceName, Compiled]) -> Iterator[list[Change]]:
        """Yield what changed since the kernel was known to be right, and all Services that did not change; UDP's alone.

        What is fresh is in it on its own as well: the kernel may have got the change before that one. Comes in parts,
        some of them empty, as there may be 100,000 Services to look at.
        """
        parts = (change for change in fresh if self.changes.get(change.name) is not change)
        same = (Change(name, entry, entry) for name, entry in compiled.items() if name not in self.changes)
        found = chain(parts, self.changes.values(), same)
        while some := list(islice(found, PART)):
            yield [change for change in some if change.after.has(_UDP) or change.before.has(_UDP)]

    def triggers(self, changes: Iterable[Change]) -> Iterator[str]:
        """Yield the times at which changes of this family were triggered, as its EndpointSlices have them."""
        for change in changes:
            if change.triggers and self._of(change.after):
                yield from (trigger.time for trigger in change.triggers if trigger.family is self.family)

    def _of(self, compiled: Compiled) -> tuple[ServicePlan, ...]:
        plans, family = compiled.plans, self.family  # family by family
        if plans and plans[0].key.family is family is plans[-1].key.family:
            return plans
        return tuple([plan for plan in plans if plan.key.family is family])


def weight(change: Change, family: Family) -> int:
    """Return how much a change may be to commit: endpoints, and what weights and tables enter, for each frontend."""
    total = 0
    for entry in (change.before, change.after):
        for plan in entry.plans:
            if plan.key.family is family:
                total += len(plan.frontends) * (len(plan.cluster) + len(plan.local))
                if plan.balance is not None:
                    total += entries((plan,))
    return total


def _hand_over(changes: Iterable[Change], family: Family) -> bool:
    """Return whether a Service has a frontend that another one had before."""
    frontends = [
        [
            [plan.frontends for plan in entry.plans if plan.key.family is family]
            for entry in (change.before, change.after)
        ]
        for change in changes
    ]
    moved = [(before, after) for before, after in frontends if before != after]
    lost: set[bytes] = set()
    for before, after in moved:
        if before:
            lost |= _keys(before) - _keys(after)
    return bool(lost) and any(not lost.isdisjoint(_keys(after) - _keys(before)) for before, after in moved)


def _keys(frontends: Iterable[Sequence[Frontend]]) -> frozenset[bytes]:
    return frozenset(frontend.key for each in frontends for frontend in each)


def note(known: dict[ServiceName, Change], change: Change) -> None:
    """Add a change to those that are known: of each Service one, and none of a Service that came and is gone again.

    A kernel may refuse for months, while Services with ever new names come and go.
    """
    earlier = known.get(change.name)
    if earlier is None:
        known[change.name] = change
    elif earlier.before == change.after == NOTHING:
        del known[change.name]
    else:
        known[change.name] = joined(earlier, change)


def joined(earlier: Change, later: Change) -> Change:
    """Return two changes of a Service as one."""
    return Change(
        later.name, earlier.before, later.after, later.uid, (earlier.triggers + later.triggers)[-MOST_TRIGGERS:]
    )
