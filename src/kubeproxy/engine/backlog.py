"""Queues the changes of one address family that are not in the kernel yet, records the state of the family's rules, and
inspects the rules. Every second, each backend does its periodic work and checks the kernel for changes by other
programs. Each family has its own retries, so that it does not wait while the kernel refuses the other family's changes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, Final

from msgspec import Struct, structs

from kubeproxy.backends.mode import Backend, Depth, ForeignChange
from kubeproxy.engine.pacing import Backoff, to_its_end
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.model.balancing import entries
from kubeproxy.model.plan import NOTHING, Compiled, Frontend, ServiceName, ServicePlan
from kubeproxy.model.planner import Change
from kubeproxy.server.text import timestamp

FIRST_RETRY = 0.05
SLOWEST_RETRY = 10.0
_UDP = socket.IPPROTO_UDP
PART = 2000  # changes per step of `everything`; a step takes 2 ms
LARGE = 10_000
"""A change is committed in parts if its size (see `is_large`) exceeds this number."""
PART_SIZE = 6000
"""The number of elements in a part of a large change (30 ms of CPU time), unless a single port has more elements."""
PORT, FRONTEND = 8, 4  # the costs of comparing one port, and of comparing one frontend, in elements
POOL = 16  # comparing this number of endpoints costs as much as one element
MOST_TRIGGERS = 100  # the maximum number of stored trigger times per Service while the kernel refuses

WORST_FIRST: Final = ("refused", "differs", "pending")
"""The states of a family in which the kernel may lack plans, the worst state first."""


class FamilyStanding(Struct):
    """The state of one family's rules in the kernel. Times are seconds since the epoch; None means never."""

    family: Family
    inspected_at: float | None = None  # the time of the last complete comparison without a remaining difference
    sound_since: float | None = None  # the start of the current period without a found difference
    refusal: str | None = None  # the reason why the kernel refused the queued changes
    difference: str | None = None  # a change by another program that is not repaired yet
    queued: int = 0  # the number of Services with waiting changes

    @property
    def trouble(self) -> tuple[str, str] | None:
        """The state (one of WORST_FIRST) and its reason; None if the kernel has all committed plans."""
        if self.refusal is not None:
            return "refused", self.refusal
        if self.difference is not None:
            return "differs", self.difference
        return None if self.sound_since is not None else ("pending", "not yet compared with the kernel")

    @property
    def problem(self) -> str:
        """A sentence about the refusal or the difference; '' without both."""
        if self.refusal is not None:
            return f"the kernel refuses changes of {self.family.label}: {self.refusal}"
        return f"another program changed rules of {self.family.label}: {self.difference}" if self.difference else ""

    def shown(self) -> dict[str, Any]:
        """Return the family's fields in /debug/state."""
        since, seen = self.sound_since, self.inspected_at
        return {
            "state": self.trouble[0] if self.trouble else "whole",
            "wholeSince": None if since is None else timestamp(since),
            "lastSeenWhole": None if seen is None else timestamp(seen),
            "refused": self.refusal,
            "differs": self.difference,
        }


Plans = dict[ServiceName, tuple[ServicePlan, ...]]


class LatestPlans(Mapping[ServiceName, tuple[ServicePlan, ...]]):
    """The plans of each Service; `take` computes the plans at the first access, on the accessing thread. Reading the
    kernel takes a tenth of a second or more. In this time another kube-proxy may write newer plans, so plans computed
    before the reading could restore an endpoint that the other proxy has removed."""

    def __init__(self, take: Callable[[], Plans]) -> None:
        self._take = take

    @cached_property
    def _plans(self) -> Plans:
        return self._take()

    def __getitem__(self, name: ServiceName) -> tuple[ServicePlan, ...]:
        return self._plans[name]

    def __iter__(self) -> Iterator[ServiceName]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    def items(self) -> ItemsView[ServiceName, tuple[ServicePlan, ...]]:
        """Return names and plans, as fast as dict.items."""
        return self._plans.items()


def retries() -> Backoff:
    """Return the delays between attempts to write a change that the kernel refused."""
    return Backoff(FIRST_RETRY, SLOWEST_RETRY)


class Backlog:
    """The queued changes of one family: all changes since the last commit."""

    def __init__(self, family: Family, clock: Callable[[], float] = time.time) -> None:
        self.family = family
        self.changes: dict[ServiceName, Change] = {}
        self.stale = True  # the next sync compares everything with the kernel
        self.other_changes = False  # the backend has queued changes that are in no plan, such as gone endpoints
        self.resting = False  # the kernel has refused, and the next attempt is not due yet
        self._let_go = False  # whether the last portion omitted large changes
        self.backoff = retries()
        self._clock = clock
        self._standing = FamilyStanding(family)

    @property
    def standing(self) -> FamilyStanding:
        """The state of this family's rules in the kernel."""
        return structs.replace(self._standing, queued=len(self.changes))

    def portion(self) -> list[Change]:
        """Return the next changes to commit. While large and small changes are queued, portions alternate: the small
        changes alone, then one part of a large change with the small changes that have arrived in the meantime. So
        neither kind waits for more than one commit of the other kind. If a frontend moves from one Service to another,
        all changes are returned, because the move must be one transaction."""
        changes = list(self.changes.values())
        large = [change for change in changes if is_large(change, self.family)]
        if large and _hand_over((self._of(change.before), self._of(change.after)) for change in changes):
            large = []
        self._let_go = not self._let_go and 0 < len(large) < len(changes)
        later = {change.name for change in large}
        now = [change for change in changes if change.name not in later]
        return [*now, first_part(large[0], self.family)] if large and not self._let_go else now

    def committed(self, changes: Sequence[Change]) -> None:
        """Record that the kernel has these queued changes (or parts of them), and all earlier changes."""
        standing = self._standing
        standing.refusal = None
        if not self.stale:  # a stale backlog means that a difference was found during this sync
            standing.difference = None
            if standing.sound_since is None:  # only after the start, a refusal or a difference, so this was a full sync
                standing.sound_since = standing.inspected_at = self._clock()
        for change in changes:
            queued = self.changes.pop(change.name)
            if change.after is not queued.after:
                self.changes[change.name] = structs.replace(queued, before=change.after)
        self.other_changes = False
        self.backoff.succeeded()

    def refused(self, why: str) -> float:
        """Record that the kernel refused a change; return the seconds until the next attempt."""
        self._standing.refusal, self._standing.sound_since = why, None
        self.stale = self.resting = True
        return self.backoff.failed()

    def inspected(self) -> None:
        """Record a complete inspection without a difference."""
        self._standing.inspected_at = self._clock()

    def differs(self, what: str) -> None:
        """Record a change by another program."""
        self._standing.difference, self._standing.sound_since = what, None
        self.stale = True

    def add(self, changes: Sequence[Change]) -> None:
        """Queue changes; several changes of one Service become one."""
        for change in changes:
            note(self.changes, change)

    def plans(self, changes: Iterable[Change]) -> list[tuple[ServiceName, tuple[ServicePlan, ...]]]:
        """Return the desired plans of each changed Service."""
        return [(change.name, self._of(change.after)) for change in changes]

    def all_plans(self, compiled: Mapping[ServiceName, Compiled]) -> Plans:
        """Return the desired plans of all Services: first the changed Services, in the order of their changes."""
        ordered = {name: change.after for name, change in self.changes.items() if name in compiled}
        ordered.update(compiled)
        return {name: self._of(entry) for name, entry in ordered.items()}

    def committed_plans(self, name: ServiceName, compiled: Compiled) -> tuple[ServicePlan, ...]:
        """Return the plans of a Service that the kernel last accepted; `compiled` are the Service's present plans."""
        change = self.changes.get(name)
        return self._of(compiled if change is None else change.before)

    def everything(self, fresh: Sequence[Change], compiled: Mapping[ServiceName, Compiled]) -> Iterator[list[Change]]:
        """Yield, in parts, the changes since the last commit, and for each unchanged Service a Change with equal plans
        before and after. Services without UDP ports are omitted. A fresh change that was merged into an earlier change
        is also yielded alone, because the kernel may have accepted the earlier change. A part covers up to PART
        changes, and is empty if none of them concerns UDP ports."""
        parts = (change for change in fresh if self.changes.get(change.name) is not change)
        same = (Change(name, entry, entry) for name, entry in compiled.items() if name not in self.changes)
        found = chain(parts, self.changes.values(), same)
        while some := list(islice(found, PART)):
            yield [change for change in some if change.after.has(_UDP) or change.before.has(_UDP)]

    def triggers(self, changes: Iterable[Change]) -> Iterator[str]:
        """Yield the trigger times of this family's changes; the times come from EndpointSlices."""
        for change in changes:
            if change.triggers and self._of(change.after):
                yield from (trigger.time for trigger in change.triggers if trigger.family is self.family)

    def _of(self, compiled: Compiled) -> tuple[ServicePlan, ...]:
        return _plans(compiled, self.family)


def _plans(compiled: Compiled, family: Family) -> tuple[ServicePlan, ...]:
    plans = compiled.plans  # family by family
    if plans and plans[0].key.family is family is plans[-1].key.family:
        return plans
    return tuple([plan for plan in plans if plan.key.family is family])


def is_large(change: Change, family: Family) -> bool:
    """Return whether the size of a change exceeds LARGE. The size of a plan is its number of frontends times its number
    of endpoints, plus its number of entries for weights and Maglev tables. The size of a change is the sum over the
    plans before and after the change."""
    total = 0
    for plan in chain(_plans(change.before, family), _plans(change.after, family)):
        total += len(plan.frontends) * (len(plan.cluster) + len(plan.local))
        total += entries((plan,)) if plan.balance is not None else 0
        if total > LARGE:
            return True
    return False


def first_part(change: Change, family: Family) -> Change:
    """Return the part of a change that is committed first: the first ports that differ, with up to PART_SIZE elements,
    but at least one port. A change that fits into one part is returned whole, and so is a change in which a frontend
    moves from one port to another. After each part a port has either its old or its new elements."""
    # The keys are the port's name and protocol, because hashing a whole ServicePortKey takes a microsecond.
    old, new = ({plan.key[2:4]: plan for plan in _plans(entry, family)} for entry in (change.before, change.after))
    ports = [(old.get(key), new.get(key)) for key in new | old]
    left, done, is_begun = PART_SIZE, 0, False
    for was, now in ports:
        if was is not now and was != now:
            left -= _elements(was, now)
            if left < 0 and is_begun:
                break
            is_begun = True
        done += 1
    else:
        return change
    if _hand_over(([was] if was is not None else [], [now] if now is not None else []) for was, now in ports):
        return change
    mixed = [now for _, now in ports[:done]] + [was for was, _ in ports[done:]]
    plans = tuple([plan for plan in mixed if plan is not None])
    return Change(change.name, change.before, structs.replace(change.before, plans=plans), change.uid)


def _elements(*sides: ServicePlan | None) -> int:
    plans = [plan for plan in sides if plan is not None]
    pools = [{*plan.cluster, *plan.local} for plan in plans]
    fresh = len(pools[0].symmetric_difference(pools[1] if len(pools) > 1 else ()))
    total = 0
    for plan, pool in zip(plans, pools, strict=True):
        total += PORT + len(pool) // POOL + len(plan.frontends) * (FRONTEND + (0 if plan.affinity else fresh)) + fresh
        total += entries((plan,)) if plan.balance is not None else 0
    return total


def _hand_over(changes: Iterable[tuple[Iterable[ServicePlan], Iterable[ServicePlan]]]) -> bool:
    """Return whether a frontend moves between Services or ports. A change is a pair: the old plans, the new plans."""
    frontends = [[[plan.all_frontends for plan in plans] for plans in both] for both in changes]
    moved = [(before, after) for before, after in frontends if before != after]
    lost: set[bytes] = set()
    for before, after in moved:
        if before:
            lost |= _only(before, after)
    return bool(lost) and any(not lost.isdisjoint(_only(after, before)) for before, after in moved)


def _only(some: Iterable[Sequence[Frontend]], others: Iterable[Sequence[Frontend]]) -> set[bytes]:
    return {frontend.handover_key for frontend in {*chain.from_iterable(some)}.difference(*others)}


def note(known: dict[ServiceName, Change], change: Change) -> None:
    """Merge a change into the earlier change of the same Service. A Service that was added and then deleted has no
    change, so that the queue does not grow without limit while the kernel refuses changes."""
    earlier = known.get(change.name)
    if earlier is None:
        known[change.name] = change
    elif earlier.before == change.after == NOTHING:
        del known[change.name]
    else:
        triggers = (earlier.triggers + change.triggers)[-MOST_TRIGGERS:]
        known[change.name] = Change(change.name, earlier.before, change.after, change.uid, triggers)


log = logging.getLogger("kubeproxy.engine")

INTERVAL = 1.0  # seconds between inspections; each runs in a thread, because it may read all rules


class RepairPolicy(Struct):
    """Decides when to repair, and when an inspection is thorough: every `period` seconds, and after an uncertain
    difference. `unfinished`: an inspection broke off, so the present state of the rules is unknown."""

    period: float
    thorough_at: float  # the time of the last thorough inspection, initially the present time
    unfinished: bool = False
    _in_doubt: bool = False

    def depth(self, now: float) -> Depth:
        """Return the depth of an inspection at `now`."""
        if now - self.thorough_at >= self.period:
            self.thorough_at = now
            return Depth.THOROUGH
        return Depth.THOROUGH if self._in_doubt else Depth.QUICK

    def to_repair(self, found: ForeignChange | None) -> ForeignChange | None:
        """Return the difference to repair after an inspection: a certain difference at once, an uncertain one if found
        twice in a row. The first success after an unfinished inspection leads to a repair."""
        difference = found or (UNFINISHED if self.unfinished else None)
        self.unfinished = False
        repair = difference is not None and (difference.certain or self._in_doubt)
        self._in_doubt = difference is not None and not repair
        return difference if repair else None

    def reset(self, now: float) -> None:
        """Record that a full sync will compare everything."""
        self.thorough_at = now
        self._in_doubt = self.unfinished = False


class Inspector(Struct):
    """Inspects the backends between syncs; inspections and syncs hold the lock `kernel`. `repair` gets each difference
    to repair."""

    backends: Sequence[Backend]
    backlogs: Mapping[Family, Backlog]
    policies: Mapping[Family, RepairPolicy]
    kernel: asyncio.Lock
    repair: Callable[[Family, ForeignChange], None]

    async def run(self) -> None:
        """Inspect until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            for backend in self.backends:
                await self._inspect(backend)

    async def _inspect(self, backend: Backend) -> None:
        backlog, policy = self.backlogs[backend.family], self.policies[backend.family]
        async with self.kernel:
            if backlog.stale:
                policy.reset(time.monotonic())
                return
            depth = policy.depth(time.monotonic())
            found = await to_its_end(look_after, backend, depth)
        if found is UNFINISHED:
            log.error("Cannot inspect the rules, trying again family=%s error=%r", backend.family.label, found.what)
            for each in self.policies.values():  # the backends share the announcements of changes
                each.unfinished = True
            return
        if found is None and depth is Depth.THOROUGH:  # a quick inspection does not read all elements
            backlog.inspected()
        if difference := policy.to_repair(found):
            log.warning("Repairing: %s", difference.what)
            backlog.differs(difference.what)
            self.repair(backend.family, difference)


UNFINISHED: Final = ForeignChange("an inspection ran out of memory")


def look_after(backend: Backend, depth: Depth) -> ForeignChange | None:
    """Do a backend's periodic work and inspect its rules. An unreadable kernel counts as a difference. The result is
    UNFINISHED if the inspection, which changes no rules of Services, ran out of memory."""
    try:
        backend.upkeep()
        try:
            return backend.inspect(depth)
        except MemoryError:
            return UNFINISHED
    except ApplyError as error:
        return ForeignChange(f"the kernel cannot be read: {error}")
