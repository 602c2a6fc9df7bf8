"""Stores the last changes and problems of this proxy in memory (at most MOST entries and BYTES bytes), and figures for
each second of the last 15 minutes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from kubeproxy.engine.observer import Audience
from kubeproxy.model.events import Deleted, Event, Upserted
from kubeproxy.model.objects import EndpointSlice, Service
from kubeproxy.model.plan import Pool, ServiceName, ServicePlan
from kubeproxy.model.planner import Change, Planner
from kubeproxy.report.metrics import NETFILTER, conntrack
from kubeproxy.server.text import redact, timestamp
from kubeproxy.wording import counted

if TYPE_CHECKING:  # not loaded by a command that decodes entries
    from kubeproxy.engine.engine import Engine

MOST: Final = 1000
BYTES: Final = 1 << 20  # of the entries
SECONDS: Final = 900
FEW: Final = 20
"""The maximum number of entries that a call of `settled` adds for changes without a recorded event; more such changes
share one entry. Also the maximum number of entries per second for unusable objects."""
LARGE: Final = 400  # the endpoints of a change are not compared if there are more than this number
_ARRIVALS: Final = 2048  # the maximum number of stored arrivals
_NOTICED: Final = 2.0  # if a problem began more than this number of seconds ago, its text contains the time
_LONGEST: Final = 500  # characters of a text
_FIXED: Final = 250  # bytes of an entry without its texts


class Happened(Struct, frozen=True, gc=False):
    """An entry: a settled `change`, the beginning of a `problem`, or its `end`. `service` is NAMESPACE/NAME, or '' for
    the node or for many Services. `ms` is the time in milliseconds from an event's arrival to the kernel's commit, or
    None."""

    number: int
    at: float  # seconds since the epoch
    kind: str
    service: str
    what: str
    ms: float | None = None


class Past(NamedTuple):
    """Entries in order of time, and the time (seconds since the epoch) after which no entry is missing."""

    kept_since: float
    entries: list[Happened]


class Journal:
    """Records changes and problems, and passes each report of the engine on to `audience`, the open pages.

    `contact` returns the reason why the API server cannot be reached ('' if it can be reached), the seconds since its
    last bytes, and Reach.failing. The owner sets `engine` before the first report."""

    engine: Engine
    audience: Audience | None = None

    def __init__(
        self,
        contact: Callable[[], tuple[str, float, str]],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.changes = 0
        self.number = int(wall_clock() * 1000)  # of the last entry; larger than all numbers before a restart
        self.seconds: deque[dict[str, float | None]] = deque(maxlen=SECONDS)  # see `tick`
        self._contact = contact
        self._clock = clock
        self._wall_clock = wall_clock
        self._entries: deque[Happened] = deque()
        self._bytes = 0
        self._kept_since = wall_clock()
        self.problems: dict[str, Happened] = {}  # by family label, or 'api' or 'lists'
        self.began: dict[str, float] = {}  # when each problem began, which may be before its entry
        self._since: dict[str, float] = {}  # as times of `clock`
        self._arrivals: dict[ServiceName, float] = {}
        self._listed: set[ServiceName] | None = None  # not yet settled Services of the first lists
        self._delays: deque[float] = deque(maxlen=MOST)  # since the last tick
        self._counted = 0  # `changes` at the last tick
        self._unusable = 0  # objects' problems since the last tick

    def past(self, number: int = 0, since: float = 0.0) -> Past:
        """Return the entries after this number and this time."""
        newer = takewhile(lambda entry: entry.number > number and entry.at >= since, reversed(self._entries))
        return Past(self._kept_since, [*newer][::-1])

    async def run(self) -> None:
        """Record figures once a second until cancelled."""
        while True:
            await asyncio.sleep(1 - self._wall_clock() % 1)
            self.tick()

    def arrived(self, events: Sequence[Event]) -> None:
        """Store the time of arrival of each Service's event."""
        now, planner, queued = self._clock(), self.engine.planner, self.engine.queued
        for name in services_of(events, planner):
            # If a Service does not wait, its earlier event changed no plan: this event's time replaces the stored time.
            waits = name in self._arrivals and (planner.is_dirty(name) or name in queued)
            if not waits and len(self._arrivals) < _ARRIVALS:
                self._arrivals[name] = now
        if self.audience is not None:
            self.audience.arrived(events)

    def settled(self, changes: Sequence[Change]) -> None:
        """Record these changes as entries."""
        now = self._clock()
        self.changes += len(changes)
        arrivals = [self._arrivals.pop(change.name, None) for change in changes]
        listed = self._begin() if self._listed is None else self._listed
        names = [change.name for change, arrival in zip(changes, arrivals, strict=True) if arrival is None]
        others = sum(name not in listed for name in names)
        if others > FEW:
            text = f"{counted(others, 'Service')}, by a list of objects or a change of the node"
            self._add("change", "", text)
        for change, arrival in zip(changes[-MOST:], arrivals[-MOST:], strict=True):
            if arrival is not None:
                self._delays.append(ms := round((now - arrival) * 1e3, 2))
                self._add("change", "/".join(change.name), what(change), ms)
            elif others <= FEW and change.name not in listed:
                self._add("change", "/".join(change.name), what(change))
        listed.difference_update(change.name for change in changes)
        if self.audience is not None:
            self.audience.settled(changes)

    def _begin(self) -> set[ServiceName]:
        """Record all first lists in a single entry; return the Services of these lists."""
        planner = self.engine.planner
        services, slices = planner.objects.services, planner.objects.endpoints
        self._add("change", "", f"{counted(services, 'Service')} and {counted(slices, 'EndpointSlice')} listed")
        self._listed = {*planner.services, *planner.slices}
        return self._listed

    def unusable(self, service: str, text: str) -> None:
        """Record that a field or an object cannot be used."""
        self._unusable += 1
        if self._unusable <= FEW:
            self._add("problem", service, redact(text))

    def look(self) -> None:
        """Record problems of the kernel and of the API server that have begun or ended."""
        found = {one.family.label: one.problem for one in self.engine.standings if one.problem}
        trouble, silent, failing = self._contact()
        if trouble:
            found["api"] = redact(f"the API server cannot be reached at {trouble}")
        elif failing:
            found["lists"] = redact(failing)
        now = self._wall_clock()
        for subject in self.problems.keys() - found.keys():
            entry = self.problems.pop(subject)
            del self.began[subject]
            lasted = self._clock() - self._since.pop(subject)  # the wall clock may have been set
            self._add("end", "", f"after {lasted:.1f} s: {entry.what}")
        for subject in found.keys() - self.problems.keys():
            before = silent if subject == "api" else 0.0
            self.began[subject] = began = now - before
            self._since[subject] = self._clock() - before
            since = f", since {timestamp(began)[11:19]} UTC" if now - began > _NOTICED else ""
            self.problems[subject] = self._add("problem", "", found[subject] + since)

    def tick(self) -> None:
        """Record the figures of the last second: the beginning `t` (seconds since the epoch), the number of changes,
        the delays of these changes, and the entries of connection tracking."""
        delays = spread(self._delays) or dict.fromkeys(("p50", "p99", "max"))
        changes, self._counted = self.changes - self._counted, self.changes
        used = (fullness() or {}).get("count")
        self.seconds.append({"t": int(self._wall_clock() - 0.5), "changes": changes, **delays, "conntrack": used})
        self._delays.clear()
        self._unusable = 0
        if not self.engine.queued and not self.engine.planner.dirty:
            self._arrivals.clear()  # these events have changed no plan
        self.look()

    def _add(self, kind: str, service: str, text: str, ms: float | None = None) -> Happened:
        self.number += 1
        entry = Happened(self.number, self._wall_clock(), kind, service, text[:_LONGEST], ms)
        self._entries.append(entry)
        self._bytes += _size(entry)
        while len(self._entries) > MOST or self._bytes > BYTES:
            oldest = self._entries.popleft()
            self._bytes -= _size(oldest)
            self._kept_since = oldest.at
        return entry


def _size(entry: Happened) -> int:
    return _FIXED + sys.getsizeof(entry.service) + sys.getsizeof(entry.what)


def services_of(events: Iterable[Event], planner: Planner) -> Iterator[ServiceName]:
    """Yield the Service of each event about a Service or an EndpointSlice."""
    for event in events:
        if isinstance(event, Upserted):
            about, namespace = event.object, event.object.metadata.namespace or ""
            if isinstance(about, Service):
                yield (namespace, about.metadata.name)
            elif isinstance(about, EndpointSlice) and (labels := about.metadata.labels) and labels.service_name:
                yield (namespace, labels.service_name)
        elif isinstance(event, Deleted):
            name = (event.namespace, event.name)
            if event.resource == "services":
                yield name
            elif event.resource == "endpointslices" and (owner := planner.service_of(name)) is not None:
                yield owner


def what(change: Change) -> str:
    """Return a short description of a change."""
    before, after = change.before.plans, change.after.plans
    if not before or not after:
        return "added" if after else "removed" if before else "changed"
    if [plan.all_frontends for plan in before] != [plan.all_frontends for plan in after]:
        return "addresses or ports"
    used, new = ([pool for plan in plans for pool in (plan.cluster, plan.local)] for plans in (before, after))
    if sum(map(len, used)) > LARGE and used != new:
        return f"endpoints, {max(map(len, new))} now"
    for name, pools in _POOLS.items():
        if words := _difference(before, after, pools, counted_now=not name):
            return f"endpoints {name}{words}"
    return "policy" if before != after else "health check port"


_POOLS: Final[Mapping[str, Callable[[ServicePlan], Iterable[Pool]]]] = {
    "": lambda plan: (plan.cluster, plan.local),
    "ejected ": lambda plan: (plan.ejected or (),),
    "out of use ": lambda plan: (plan.serving,),
}


def _difference(
    before: Sequence[ServicePlan],
    after: Sequence[ServicePlan],
    pools: Callable[[ServicePlan], Iterable[Pool]],
    *,
    counted_now: bool,
) -> str:
    """Return the numbers of new and removed endpoints; by family, unless all families have the same numbers."""
    families, texts = {plan.key.family for plan in (*before, *after)}, {}
    for family in sorted(families):
        of_family = [[plan for plan in plans if plan.key.family is family] for plans in (before, after)]
        old, new = ({one for plan in plans for pool in pools(plan) for one in pool} for plans in of_family)
        if words := [f"{sign}{len(some)}" for sign, some in (("+", new - old), ("-", old - new)) if some]:
            texts[family.label] = " ".join(words) + f", {len(new)} now" * counted_now
    if len(texts) == len(families) and len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{text} ({label})" for label, text in texts.items())


def spread(delays: Iterable[float]) -> dict[str, float] | None:
    """Return the median, the 99th percentile and the maximum, or None without values."""
    ordered = sorted(delays)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[ceil(len(ordered) * share) - 1] for name, share in shares.items()} if ordered else None


def fullness() -> dict[str, int] | None:
    """Return the number of entries of connection tracking, and the limit; None if the kernel does not report them."""
    values = [int(value) for _, _, _, value in conntrack(NETFILTER)]
    return {"count": values[0], "max": values[1]} if len(values) == 2 else None
