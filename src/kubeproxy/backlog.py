"""What one address family still has to get into the kernel. Knows no loop and no kernel.

A family that the kernel refuses has its own pace of retries, so that the other one's changes, and all that follows from
them, do not wait for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import NOTHING, Compiled, ServiceName, ServicePlan
from kubeproxy.model.planner import Change

FIRST_RETRY = 0.05
SLOWEST_RETRY = 10.0
MOST_TRIGGERS = 100  # of one Service, while the kernel refuses: more would say nothing new of the latency


class Retry:
    """Seconds until something that fails is tried again: few at first, doubling."""

    def __init__(self) -> None:
        self._next = FIRST_RETRY

    def after_failure(self) -> float:
        """Return how long to wait this time."""
        wait = self._next * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        self._next = min(self._next * 2, SLOWEST_RETRY)
        return wait

    def succeeded(self) -> None:
        """Begin anew."""
        self._next = FIRST_RETRY


class Backlog:
    """The changes of one family since the kernel was last known to be right.

    `stale` says that everything is to be compared with the kernel, `resting` that it failed and its time has not come.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.changes: dict[ServiceName, Change] = {}
        self.stale = True
        self.resting = False
        self.retry = Retry()

    def add(self, changes: Sequence[Change]) -> None:
        """Take changes in; those of one Service become one."""
        for change in changes:
            note(self.changes, change)

    def plans(self) -> list[tuple[ServiceName, tuple[ServicePlan, ...]]]:
        """Return what each changed Service is to be."""
        return [(change.name, self._of(change.after)) for change in self.changes.values()]

    def all_plans(self, compiled: Mapping[ServiceName, Compiled]) -> dict[ServiceName, tuple[ServicePlan, ...]]:
        """Return what every Service is to be; those that changed come first, in their order."""
        ordered = {name: change.after for name, change in self.changes.items() if name in compiled}
        ordered.update(compiled)
        return {name: self._of(entry) for name, entry in ordered.items()}

    def taken(self, name: ServiceName, compiled: Compiled) -> tuple[ServicePlan, ...]:
        """Return what the kernel last took of a Service that is now to be as compiled."""
        change = self.changes.get(name)
        return self._of(compiled if change is None else change.before)

    def everything(self, fresh: Sequence[Change], compiled: Mapping[ServiceName, Compiled]) -> list[Change]:
        """Return what changed since the kernel was known to be right, and all Services that did not change.

        What is fresh is in it on its own as well: the kernel may have got the change before that one.
        """
        parts = [change for change in fresh if self.changes.get(change.name) is not change]
        same = [Change(name, entry, entry) for name, entry in compiled.items() if name not in self.changes]
        return [*parts, *self.changes.values(), *same]

    def triggers(self) -> Iterator[str]:
        """Yield when what led to the changes of this family happened, as their objects say."""
        for change in self.changes.values():
            if change.triggers and self._of(change.after):
                yield from change.triggers

    def _of(self, compiled: Compiled) -> tuple[ServicePlan, ...]:
        plans, family = compiled.plans, self.family  # family by family
        if plans and plans[0].key.family is family is plans[-1].key.family:
            return plans
        return tuple([plan for plan in plans if plan.key.family is family])


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
