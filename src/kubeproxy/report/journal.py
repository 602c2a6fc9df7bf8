"""The last changes and problems of this proxy, and its figures for each second of the last 15 minutes. They are in
memory only, with at most MOST entries and BYTES bytes, so that questions about the past cost a sync nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from kubeproxy.engine.observer import Audience
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Event, Upserted, ZonedSlice
from kubeproxy.model.objects import EndpointSlice, Service
from kubeproxy.model.plan import ServiceName
from kubeproxy.model.planner import Change, Planner
from kubeproxy.report.metrics import NETFILTER, conntrack
from kubeproxy.server.text import redact

if TYPE_CHECKING:  # a command that decodes entries does not load this
    from kubeproxy.engine.engine import Engine

MOST: Final = 1000
BYTES: Final = 1 << 20
SECONDS: Final = 900
FEW: Final = 20
"""Changes without a time of arrival, in one call, and problems of objects, in one second, that get entries each."""
_ARRIVALS: Final = 2048  # maximum number of Services with a stored time of arrival
_LONGEST: Final = 500  # characters of a text
_FIXED: Final = 250  # bytes of an entry without its texts


Kind = Literal["change", "problem", "end"]


class Happened(Struct, frozen=True, gc=False):
    """A settled change, or the beginning or end of a problem. `service` is NAMESPACE/NAME, '' for the node or for many
    Services. `ms` is the delay of a change from the event's arrival to the kernel, None if unknown.
    """

    number: int
    at: float  # seconds since the epoch
    kind: Kind
    service: str
    what: str
    ms: float | None = None


class Second(Struct, frozen=True, gc=False):
    """Figures of the second that began at `t` since the epoch: changes, their delays (ms), entries of conntrack."""

    t: int
    changes: int
    p50: float | None
    p99: float | None
    max: float | None
    conntrack: int | None


class Past(Struct, frozen=True):
    """Entries of the journal, the oldest first. All entries after `kept_since` (since the epoch) are still stored."""

    entries: Sequence[Happened]
    kept_since: float


class Journal:
    """Records changes and problems; an observer.Audience, which passes its reports to `audience`, the open pages.

    `unreachable` returns the reason why the API server cannot be reached, '' if it can.
    """

    def __init__(
        self,
        engine: Engine,
        unreachable: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.audience: Audience | None = None
        self.changes = 0
        self.began: dict[str, float] = {}
        """The time since the epoch at which each present problem began, by subject: a family's label or api."""
        self.number = int(wall_clock() * 1000)  # of the last entry; a restarted proxy continues above
        self.seconds: deque[Second] = deque(maxlen=SECONDS)
        self._engine = engine
        self._unreachable = unreachable
        self._clock = clock
        self._wall_clock = wall_clock
        self._entries: deque[Happened] = deque()
        self._bytes = 0
        self._kept_since = wall_clock()
        self._arrivals: dict[ServiceName, float] = {}
        self._texts: dict[str, str] = {}  # of the present problems
        self._delays: deque[float] = deque(maxlen=MOST)  # since the last second
        self._counted = 0  # changes until the last second
        self._unusable = 0  # problems of objects since the last second

    def watched_by(self, audience: Audience | None) -> None:
        """Set the audience of open pages, None for none."""
        self.audience = audience

    def after(self, number: int, since: float = 0.0) -> list[Happened]:
        """Return the entries after this number and this time, the oldest first."""
        newest = []
        for entry in reversed(self._entries):
            if entry.number <= number or entry.at < since:
                break
            newest.append(entry)
        return newest[::-1]

    def past(self, number: int, since: float) -> Past:
        """Return the entries after this number and this time."""
        return Past(self.after(number, since), self._kept_since)

    async def run(self) -> None:
        """Record figures once a second until cancelled."""
        while True:
            await asyncio.sleep(1 - self._wall_clock() % 1)
            self.tick()

    def arrived(self, events: Sequence[Event]) -> None:
        """See observer.Audience."""
        now, planner, queued = self._clock(), self._engine.planner, self._engine.queued
        for name in services_of(events, planner):
            # An earlier event of a Service that does not wait now has changed no plan.
            waits = name in self._arrivals and (planner.is_dirty(name) or name in queued)
            if not waits and len(self._arrivals) < _ARRIVALS:
                self._arrivals[name] = now
        if self.audience is not None:
            self.audience.arrived(events)

    def settled(self, changes: Sequence[Change]) -> None:
        """See observer.Audience."""
        now = self._clock()
        self.changes += len(changes)
        taken = [(change, self._arrivals.pop(change.name, None)) for change in changes]
        if (others := sum(arrival is None for _, arrival in taken)) > FEW:
            taken = [pair for pair in taken if pair[1] is not None]
            self._add("change", "", f"{others} Services, by a list of objects or a change of the node")
        for change, arrival in taken[-MOST:]:
            ms = None if arrival is None else round((now - arrival) * 1e3, 2)
            if ms is not None:
                self._delays.append(ms)
            self._add("change", "/".join(change.name), what(change), ms)
        if self.audience is not None:
            self.audience.settled(changes)

    def refused(self, family: Family, error: ApplyError) -> None:
        """See observer.Audience."""
        self.look()
        if self.audience is not None:
            self.audience.refused(family, error)

    def unusable(self, service: str, text: str) -> None:
        """Record a field or an object that cannot be used."""
        self._unusable += 1
        if self._unusable <= FEW:
            self._add("problem", service, redact(text[:_LONGEST]))

    def look(self) -> None:
        """Record the problems of the kernel and the API server that began or ended."""
        found = {one.family.label: one.problem for one in self._engine.standings if one.problem}
        if trouble := self._unreachable():
            found["api"] = redact(f"the API server cannot be reached at {trouble}")
        for subject in self._texts.keys() - found.keys():
            seconds = self._wall_clock() - self.began.pop(subject)
            self._add("end", "", f"after {seconds:.1f} s: {self._texts.pop(subject)}")
        for subject, text in found.items():
            if subject not in self._texts:
                self.began[subject] = self._add("problem", "", text)
                self._texts[subject] = text

    def tick(self) -> None:
        """Record the figures since the last call, and the problems that began or ended."""
        p50, p99, most = spread(self._delays) or (None, None, None)
        used = fullness()
        changes, self._counted = self.changes - self._counted, self.changes
        self.seconds.append(Second(int(self._wall_clock() - 0.5), changes, p50, p99, most, used[0] if used else None))
        self._delays.clear()
        if self._unusable > FEW:
            self._add("problem", "", f"{self._unusable - FEW} more objects or fields that cannot be used")
        self._unusable = 0
        if not self._engine.queued and not self._engine.planner.dirty:
            self._arrivals.clear()  # arrivals that changed no plan
        self.look()

    def _add(self, kind: Kind, service: str, text: str, ms: float | None = None) -> float:
        """Add an entry, remove the oldest ones above the limits, and return the time of the entry."""
        self.number += 1
        entry = Happened(self.number, self._wall_clock(), kind, service, text[:_LONGEST], ms)
        self._entries.append(entry)
        self._bytes += _size(entry)
        while len(self._entries) > MOST or self._bytes > BYTES:
            oldest = self._entries.popleft()
            self._bytes -= _size(oldest)
            self._kept_since = oldest.at
        return entry.at


def _size(entry: Happened) -> int:
    return _FIXED + sys.getsizeof(entry.service) + sys.getsizeof(entry.what)


def services_of(events: Iterable[Event], planner: Planner) -> Iterator[ServiceName]:
    """Yield the Service that each event concerns, if any; lists concern none."""
    for event in events:
        if isinstance(event, Upserted | ZonedSlice):
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
    """Return a short text about a change."""
    before, after = change.before.plans, change.after.plans
    if not before or not after:
        return "added" if after else "removed" if before else "changed"
    if [plan.frontends for plan in before] != [plan.frontends for plan in after]:
        return "addresses or ports"
    old, new = ({one for plan in plans for one in (*plan.cluster, *plan.local)} for plans in (before, after))
    if words := _difference(old, new):
        return f"endpoints {words}, {len(new)} now"
    old, new = ({one for plan in plans for one in plan.serving} for plans in (before, after))
    if words := _difference(old, new):
        return f"endpoints out of use {words}"
    return "policy" if before != after else "health check port"


def _difference(old: set[bytes], new: set[bytes]) -> str:
    return " ".join(f"{sign}{len(some)}" for sign, some in (("+", new - old), ("-", old - new)) if some)


def spread(delays: Iterable[float]) -> tuple[float, float, float] | None:
    """Return the median, the 99th percentile and the maximum, None without a value."""
    ordered = sorted(delays)
    if not ordered:
        return None
    p50, p99 = (ordered[max(0, ceil(len(ordered) * share) - 1)] for share in (0.5, 0.99))
    return p50, p99, ordered[-1]


def fullness() -> tuple[int, int] | None:
    """Return the number of connection tracking's entries and its limit, None if the kernel does not tell them."""
    values = [int(value) for _, _, _, value in conntrack(NETFILTER)]
    return (values[0], values[1]) if len(values) == 2 else None
