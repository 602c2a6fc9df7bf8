"""Receives events of connection tracking and counts new connections by Service, port and endpoint. Under load the
program receives only a sample of the connections, which limits its CPU time. The kernel sends no events of connections
outside of the sample."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from kubeproxy.ask.flows.owners import Owners, endpoint_text
from kubeproxy.kernel.conntrack.tracked import Event, Events, Tracked


class ProcessorShare(NamedTuple):
    """Shares of one processor; above `busy` the sampling rate is halved, below `idle` it is doubled."""

    busy: float
    idle: float


COMMAND: Final = ProcessorShare(0.4, 0.12)  # for a command that an operator runs
LOOK: Final = 0.25  # seconds between measurements of CPU time
_MOST: Final = 1 << 16


class Sampled:
    """Sampled events, each with its weight. `left_out` estimates the number of connections that were not read."""

    def __init__(
        self,
        events: Events,
        changed: Callable[[int], None] = lambda _: None,
        spent: Callable[[], float] = time.process_time,
        budget: ProcessorShare = COMMAND,
    ) -> None:
        self._events = events
        self._changed = changed
        self._spent = spent
        self._budget = budget
        self.left_out = 0
        self.received = 0

    @property
    def lost(self) -> int:
        """Return how often the kernel dropped events because they were not read fast enough."""
        return self._events.lost

    def for_a_while(self, end: float) -> Iterator[tuple[Event, int]]:
        """Yield (event, weight) for LOOK seconds, but not after `end`, a time of time.monotonic()."""
        began, spent, lost = time.monotonic(), self._spent(), self.lost
        one_in = self._events.one_in
        for event in self._events.events(min(began + LOOK, end)):
            self.received += 1
            self.left_out += one_in - 1
            yield event, one_in
        share = (self._spent() - spent) / max(time.monotonic() - began, 1e-3)
        self._adapt(share, missed=self.lost > lost)

    def _adapt(self, share: float, *, missed: bool) -> None:
        one_in = self._events.one_in
        if missed or share > self._budget.busy:
            one_in = min(one_in * 2, _MOST)
        elif share < self._budget.idle and one_in > 1:
            one_in //= 2
        if one_in != self._events.one_in:
            self._events.sample(one_in)
            self._changed(one_in)


MOST_SERVICES: Final = 200  # Maximum number of Services in an answer; the busiest are included.
MOST_ENDPOINTS: Final = 100
"""Maximum number of endpoints of a Service in an answer; the busiest are included."""


class Beginnings:
    """Counts new connections. `endpoints` is False in modes in which connections end at the proxy; these connections
    are counted only by Service."""

    def __init__(self, owners: Owners, *, endpoints: bool) -> None:
        self._owners = owners
        self._endpoints = endpoints
        self._counts: defaultdict[str, Counter[tuple[str, bytes]]] = defaultdict(Counter)

    def add(self, entry: Tracked, weight: int) -> None:
        """Count a sampled connection `weight` times."""
        owner = self._owners.of(entry.target)
        if owner is not None:
            self._counts[owner.service][owner.port, owner.endpoint(entry.server)] += weight

    def take(self, seconds: float) -> dict[str, Any]:
        """Reset the counts; return, by Service, the new connections per second and their shares by port and
        endpoint."""
        counts, self._counts = self._counts, defaultdict(Counter)
        totals = Counter({service: sum(by_endpoint.values()) for service, by_endpoint in counts.items()})
        return {
            service: {"new": round(total / seconds, 2), "endpoints": self._shares(counts[service], total)}
            for service, total in totals.most_common(MOST_SERVICES)
        }

    def _shares(self, counts: Counter[tuple[str, bytes]], total: int) -> dict[str, dict[str, float]]:
        shares: dict[str, dict[str, float]] = {}
        for (port, endpoint), count in counts.most_common(MOST_ENDPOINTS) if self._endpoints else ():
            shares.setdefault(port, {})[endpoint_text(endpoint)] = round(count / total, 4)
        return shares
