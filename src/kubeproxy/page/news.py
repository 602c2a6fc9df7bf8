"""Builds the next message to the pages: the changes since the last message, and the changed rows of the list of
Services. The size of a message is limited, however many changes there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import asdict

from kubeproxy.ask.listing import addresses, changed_at, endpoints, flags, unserved
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event, Replaced
from kubeproxy.model.plan import NOTHING, ServiceName
from kubeproxy.model.planner import Change
from kubeproxy.report.journal import Journal, fullness, services_of, spread

MOST_ROWS: Final = 200
"""The maximum number of rows in a message. If more Services have changed, the page loads all Services again."""
MOST_CHANGES: Final = 20
Message = dict[str, Any]


class News:
    """Collects changes for the next message. `revision` starts with a number that was never used before, and increases
    when changes are settled. `journal` contains the changes."""

    # ruff: noqa: D102 - observer.Audience documents arrived() and settled()

    def __init__(
        self,
        snapshot: Snapshot,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.revision = 0
        self._snapshot = snapshot
        self.journal = journal
        self._planner = snapshot.planner
        self._clock = clock
        self._wall_clock = wall_clock
        self._seen: dict[ServiceName, float] = {}
        self.begin()

    def begin(self) -> None:
        """Discard the changes from the time when no page was open."""
        self.revision = max(self.revision + 1, int(self._wall_clock() * 1000))
        self._seen.clear()
        self._touched: dict[ServiceName, None] = {}
        self._number, self._count = self.journal.number, self.journal.changes
        self._reload = False
        self._since = self._clock()
        self.troubles = self._trouble()  # the families' states in the last message

    def arrived(self, events: Sequence[Event]) -> None:
        self._reload |= any(isinstance(event, Replaced) for event in events)
        for name in services_of(events, self._planner):
            self._touch(name)

    def settled(self, changes: Sequence[Change]) -> None:
        at = self._wall_clock()
        self.revision += 1
        for change in changes:
            self._touch(change.name)
            self._seen[change.name] = at

    def _touch(self, name: ServiceName) -> None:
        # With MOST_ROWS + 1 names, the page loads all Services again; more names are not needed.
        if len(self._touched) <= MOST_ROWS:
            self._touched[name] = None

    def take(self) -> Message:
        """Return the next message for pages, and start a new one."""
        now, at = self._clock(), self._wall_clock()
        seconds, self._since = max(now - self._since, 1e-3), now
        (_, fresh), count = self.journal.past(self._number), self.journal.changes - self._count
        self._number, self._count = self.journal.number, self.journal.changes
        recent = [one for one in fresh if one.service or one.kind != "change"][-MOST_CHANGES:]
        message: Message = {
            "at": at,
            "queued": self._snapshot.pending,
            "changes": recent,
            "left": count - sum(one.kind == "change" for one in recent),
            "perSecond": round(count / seconds, 1),
            "lagMs": spread(one.ms for one in fresh if one.ms is not None),
            "conntrack": fullness(),
            "unready": self._snapshot.health.unready(),
            "families": [asdict(one) | {"family": one.family.label} for one in self._snapshot.engine.standings],
        }
        return message | self._take_rows() | {"revision": self.revision}

    def _take_rows(self) -> Message:
        touched, troubles = self._touched, self._trouble()
        self._touched = {}
        reload = self._reload or len(touched) > MOST_ROWS or troubles != self.troubles
        self._reload, self.troubles = False, troubles
        if reload:
            return {"rows": [], "gone": [], "reload": True}
        rows, gone = [], []
        for name in touched:
            if self._planner.is_dirty(name):  # a message after the compilation contains the row
                self._touched[name] = None
            elif (row := self.row(name)) is not None:
                rows.append(row)
            else:
                gone.append("/".join(name))
                self._seen.pop(name, None)
        return {"rows": rows, "gone": gone}

    def row(self, name: ServiceName) -> Row | None:
        """Return the row of a Service, or None if it is deleted."""
        return row_of(self._snapshot, name, self._seen.get(name, 0.0))

    def _trouble(self) -> tuple[tuple[Family, bool, bool, bool], ...]:
        """Return for each family whether the kernel refuses its changes, whether its rules differ from the plans, and
        whether the rules are complete. The states of Services depend on these values."""
        return tuple(
            (one.family, one.refusal is not None, one.difference is not None, one.sound_since is not None)
            for one in self._snapshot.engine.standings
        )


Row = tuple[str, str, int, int, str, str, list[str], float, list[str]]
"""The row of a Service: name, state, numbers of ready and of all endpoints, type, letters of `flags` (and T if only
terminating endpoints serve, N if the policy is Local and all available endpoints are on other nodes), addresses, time
of the last change, ports without an available endpoint."""

_LEAVING: Final = {"deleting": "pending"}  # the name of a state in /debug/state: its name on the page


def row_of(snapshot: Snapshot, name: ServiceName, seen: float = 0.0) -> Row | None:
    """Return the row of a Service, or None if it is deleted. `seen` is the time of the last observed change, or 0."""
    verdict = snapshot.verdict(name)
    if verdict is None:
        return None
    planner = snapshot.planner
    service = planner.services.get(name)
    slices = planner.slices.get(name, {}).values()
    plans = planner.compiled.get(name, NOTHING).plans
    count, is_served = endpoints(slices, plans), any(plan.cluster or plan.local for plan in plans)
    is_elsewhere = not is_served and any(plan.usable for plan in plans)
    return (
        f"{name[0]}/{name[1]}",
        _LEAVING.get(verdict[0], verdict[0]),
        count.ready,
        count.total,
        (service.spec.type or "ClusterIP") if service is not None else "",
        flags(plans, slices) + "N" * is_elsewhere + "T" * (is_served and not count.ready),
        list(addresses(plans, planner.world)),
        max(seen, changed_at(service, slices)),
        list(unserved(plans)),
    )
