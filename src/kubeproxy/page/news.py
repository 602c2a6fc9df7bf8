"""Collects the changes since the last message to the pages into the next message, with rows for the list of Services.
It does not use the event loop or the pages. The size is limited, regardless of the number of changes between two
messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any, Final, NamedTuple

from kubeproxy.ask.listing import addresses, changed_at, endpoints, flags, unserved
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Event, Replaced, Upserted, ZonedSlice
from kubeproxy.model.objects import EndpointSlice, Service
from kubeproxy.model.plan import NOTHING, ServiceName
from kubeproxy.model.planner import Change
from kubeproxy.report.metrics import NETFILTER, conntrack

MOST_ROWS: Final = 200
"""Maximum number of rows in a message; if more Services changed, the page loads all Services again."""
MOST_CHANGES: Final = 20
MOST_ARRIVALS: Final = 1 << 16  # maximum number of Services with a stored time of arrival
Message = dict[str, Any]


class Happened(NamedTuple):
    """A settled change: its time (since the epoch), its delay since arrival in milliseconds, and its revision."""

    at: float
    change: Change
    ms: float | None
    revision: int


class News:
    """Collects changes; `revision` counts settled ones, from an unused number: pages with another reload."""

    def __init__(
        self,
        snapshot: Snapshot,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.revision = 0
        self._snapshot = snapshot
        self._planner = snapshot.planner
        self._clock = clock
        self._wall_clock = wall_clock
        self._arrivals: dict[ServiceName, float] = {}
        self._seen: dict[ServiceName, float] = {}
        self.begin()

    def begin(self) -> None:
        """Discard all changes, because no page was open."""
        self.revision = max(self.revision + 1, int(self._wall_clock() * 1000))
        self._arrivals.clear()
        self._seen.clear()
        self._touched: dict[ServiceName, None] = {}
        self._recent: deque[Happened] = deque(maxlen=MOST_CHANGES)
        self._lags: list[float] = []
        self._count = 0
        self._reload = False
        self._since = self._clock()
        self.troubles = self._trouble()  # the states of the families in the last message, for comparison

    def arrived(self, events: Iterable[Event]) -> None:
        """See observer.Audience."""
        now = self._clock()
        for event in events:
            if isinstance(event, Replaced):
                self._reload = True
            elif (name := self._service(event)) is not None:
                self._touch(name)
                if len(self._arrivals) < MOST_ARRIVALS:
                    self._arrivals.setdefault(name, now)

    def _service(self, event: Event) -> ServiceName | None:
        """Return the Service that an event concerns, None for none."""
        if isinstance(event, Upserted | ZonedSlice):
            about, namespace = event.object, event.object.metadata.namespace or ""
            if isinstance(about, Service):
                return (namespace, about.metadata.name)
            labels = about.metadata.labels
            owner = labels.service_name if isinstance(about, EndpointSlice) and labels is not None else None
            return (namespace, owner) if owner else None
        if isinstance(event, Deleted):
            name = (event.namespace, event.name)
            if event.resource == "services":
                return name
            return self._planner.service_of(name) if event.resource == "endpointslices" else None
        return None

    def settled(self, changes: Sequence[Change]) -> None:
        """See observer.Audience."""
        now, at = self._clock(), self._wall_clock()
        self.revision += 1
        self._count += len(changes)
        for change in changes:
            name = change.name
            self._touch(name)
            arrival = self._arrivals.pop(name, None)
            ms = None if arrival is None else (now - arrival) * 1e3
            if ms is not None and len(self._lags) < MOST_ARRIVALS:
                self._lags.append(ms)
            self._seen[name] = at
            self._recent.append(Happened(at, change, ms, self.revision))

    def _touch(self, name: ServiceName) -> None:
        # MOST_ROWS + 1 means that there are too many.
        if len(self._touched) <= MOST_ROWS:
            self._touched[name] = None

    def take(self) -> Message:
        """Return the message for pages, and reset."""
        now, at = self._clock(), self._wall_clock()
        waiting = self._snapshot.pending
        if not waiting:
            self._arrivals.clear()  # arrivals that changed no plan
        seconds, self._since = max(now - self._since, 1e-3), now
        lags, self._lags = sorted(self._lags), []
        count, self._count = self._count, 0
        recent = [self._change(one) for one in self._recent]
        self._recent.clear()
        message: Message = {
            "at": at,
            "queued": waiting,
            "changes": recent,
            "left": count - len(recent),
            "perSecond": round(count / seconds, 1),
            "lagMs": _spread(lags),
            "conntrack": _conntrack(),
            "unready": self._snapshot.health.unready(),
            "families": [_family(standing) for standing in self._snapshot.engine.standings],
        }
        return message | self._take_rows() | {"revision": self.revision}

    @staticmethod
    def _change(one: Happened) -> Message:
        return {
            "at": one.at,
            "service": "/".join(one.change.name),
            "what": what(one.change),
            "ms": None if one.ms is None else round(one.ms, 2),
            "revision": one.revision,
        }

    def _take_rows(self) -> Message:
        """Return the rows of changed Services, or the request to load all of them."""
        touched, troubles = self._touched, self._trouble()
        self._touched = {}
        reload = self._reload or len(touched) > MOST_ROWS or troubles != self.troubles
        self._reload, self.troubles = False, troubles
        if reload:
            return {"rows": [], "gone": [], "reload": True}
        rows, gone = [], []
        for name in touched:
            if self._planner.is_dirty(name):  # a later message, after compilation, has its row
                self._touched[name] = None
            elif (row := row_of(self._snapshot, name, self.seen(name))) is not None:
                rows.append(row)
            else:
                gone.append("/".join(name))
                self._seen.pop(name, None)
        return {"rows": rows, "gone": gone}

    def seen(self, name: ServiceName) -> float:
        """Return the time of a Service's last change while pages were open, 0 for none."""
        return self._seen.get(name, 0.0)

    def _trouble(self) -> tuple[tuple[Family, bool, bool, bool], ...]:
        """Return for each family whether it is refused, differs or is complete: states of Services depend on this."""
        return tuple(
            (one.family, one.refusal is not None, one.difference is not None, one.sound_since is not None)
            for one in self._snapshot.engine.standings
        )


def _spread(lags: Sequence[float]) -> Message | None:
    if not lags:
        return None
    p50, p99 = (lags[max(0, ceil(len(lags) * share) - 1)] for share in (0.5, 0.99))
    return {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(lags[-1], 2)}


def _family(standing: FamilyStanding) -> Message:
    return {
        "family": standing.family.label,
        "refusal": standing.refusal,
        "difference": standing.difference,
        "soundSince": standing.sound_since,
        "queued": standing.queued,
    }


def _conntrack() -> Message | None:
    values = [int(value) for _, _, _, value in conntrack(NETFILTER)]
    return {"count": values[0], "max": values[1]} if len(values) == 2 else None


Row = tuple[str, str, int, int, str, str, list[str], float, list[str]]
"""Name, state, numbers of ready and of all endpoints, type, letters of `flags` and T if terminating endpoints alone
serve, addresses, time of the last change, ports without an available endpoint."""

_LEAVING: Final = {"deleting": "pending"}  # states of /debug/state that the page shows as one state


def row_of(snapshot: Snapshot, name: ServiceName, seen: float = 0.0) -> Row | None:
    """Return the short row of a Service, None if deleted; `seen` is the time of its last observed change, or 0."""
    verdict = snapshot.verdict(name)
    if verdict is None:
        return None
    planner = snapshot.planner
    service = planner.services.get(name)
    slices = planner.slices.get(name, {}).values()
    plans = planner.compiled.get(name, NOTHING).plans
    count = endpoints(slices)
    return (
        f"{name[0]}/{name[1]}",
        _LEAVING.get(verdict[0], verdict[0]),
        count.ready,
        count.total,
        (service.spec.type or "ClusterIP") if service is not None else "",
        flags(plans, slices) + "T" * (not count.ready and any(plan.serving for plan in plans)),
        list(addresses(plans)),
        max(seen, changed_at(service, slices)),
        list(unserved(plans)),
    )


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
