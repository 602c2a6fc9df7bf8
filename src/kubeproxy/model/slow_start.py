"""Slow start: the new endpoints of each Service, and the present part of their share. Pure: time is a parameter.

The share of a new endpoint grows in steps, and all new endpoints of a Service take a step at once, so that a Service
costs at most one change a step. The first endpoints of a Service are not new: a restart of the proxy begins no slow
start.
"""

from __future__ import annotations

from collections.abc import Collection
from math import floor
from typing import Final

from msgspec import Struct

from kubeproxy.model.balancing import GROWN, Growth
from kubeproxy.model.endpoints import FULL
from kubeproxy.model.plan import ServiceName

STEPS: Final = 10  # the number of steps in which a share grows
_SURELY: Final = 0.001  # seconds added to the time of a step, so that rounding does not put it before the step


class _Ages(Struct):
    """Endpoints of a Service (packed addresses): all of them, and the step in which each new one was added."""

    step: float  # seconds
    known: frozenset[bytes]
    since: dict[bytes, int]


class SlowStart:
    """The Services with a slow start. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ages: dict[ServiceName, _Ages] = {}
        self._growing: set[ServiceName] = set()  # Services that have new endpoints

    def growth(self, name: ServiceName) -> Growth:
        """Return the share of their weight, in percent, that the new endpoints of a Service currently get."""
        if name not in self._growing:
            return GROWN
        ages = self._ages[name]
        at = floor(self.now / ages.step)
        return {
            address: (1 + at - since) * FULL // STEPS for address, since in ages.since.items() if at - since < STEPS - 1
        }

    def seen(self, name: ServiceName, endpoints: Collection[bytes], seconds: int) -> bool:
        """Record the endpoints of a Service; return whether its shares change."""
        step = seconds / STEPS
        at = floor(self.now / step)
        before = self._ages.get(name)
        if before is None or before.step != step:
            self._note(name, _Ages(step, frozenset(endpoints), {}))
            return before is not None and bool(before.since)
        fresh = before.known.symmetric_difference(endpoints).intersection(endpoints)
        since = {a: since for a, since in before.since.items() if a in endpoints and at - since < STEPS - 1}
        self._note(name, _Ages(step, frozenset(endpoints), since | dict.fromkeys(fresh, at)))
        return bool(fresh)

    def _note(self, name: ServiceName, ages: _Ages) -> None:
        self._ages[name] = ages
        if ages.since:
            self._growing.add(name)
        else:
            self._growing.discard(name)

    def forget(self, name: ServiceName) -> None:
        """Remove a Service that was deleted or has no slow start."""
        if self._ages:
            self._ages.pop(name, None)
            self._growing.discard(name)

    def advance(self, now: float) -> Collection[ServiceName]:
        """Set the time; return the Services with a share that grew."""
        before, self.now = self.now, now
        steps = ((name, self._ages[name].step) for name in self._growing)
        return [name for name, step in steps if floor(before / step) != floor(now / step)]

    def next_step(self) -> float | None:
        """Return the time at which the next share grows, None without new endpoints."""
        steps = {self._ages[name].step for name in self._growing}
        return min([(floor(self.now / step) + 1) * step + _SURELY for step in steps], default=None)
