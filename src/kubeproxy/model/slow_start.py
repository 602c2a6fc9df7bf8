"""Slow start: which endpoints of a Service are new, and how much of their share they have by now. Pure: time is told.

The share of a new endpoint grows in steps, and all new endpoints of a Service take a step at once, so that a Service
costs a change a step at most. Who is there when a Service is looked at for the first time is not new: a restart of the
proxy begins nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from math import floor
from typing import Final

from msgspec import Struct

from kubeproxy.model.balancing import GROWN, Growth
from kubeproxy.model.endpoints import FULL
from kubeproxy.model.plan import ServiceName

STEPS: Final = 10
"""In how many steps a share grows: by a tenth each."""

_SURELY: Final = 0.001
"""Seconds after a step, so that rounding does not take the moment for one before it."""


class _Ages(Struct):
    """Endpoints of a Service (packed addresses): all that are known, and when the new ones came, in steps."""

    step: float  # seconds
    known: frozenset[bytes]
    since: dict[bytes, int]


class SlowStart:
    """The Services whose new endpoints begin slowly. `now` is in seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ages: dict[ServiceName, _Ages] = {}
        self._growing: set[ServiceName] = set()  # those that have new endpoints

    def growth(self, name: ServiceName) -> Growth:
        """Return how much of their weight the new endpoints of a Service have."""
        if name not in self._growing:
            return GROWN
        ages = self._ages[name]
        at = floor(self.now / ages.step)
        return {
            address: (1 + at - since) * FULL // STEPS for address, since in ages.since.items() if at - since < STEPS - 1
        }

    def seen(self, name: ServiceName, endpoints: Collection[bytes], seconds: int) -> bool:
        """Take note of the endpoints that a Service has; return whether some of them are new."""
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
        """Let go of a Service that is gone, or has no slow start."""
        if self._ages:
            self._ages.pop(name, None)
            self._growing.discard(name)

    def advance(self, now: float) -> Collection[ServiceName]:
        """Take note of the time; return the Services of which a share has grown since."""
        before, self.now = self.now, now
        steps = ((name, self._ages[name].step) for name in self._growing)
        return [name for name, step in steps if floor(before / step) != floor(now / step)]

    def next_step(self) -> float | None:
        """Return when the next share grows, None while there is no new endpoint."""
        steps = {self._ages[name].step for name in self._growing}
        return min([(floor(self.now / step) + 1) * step + _SURELY for step in steps], default=None)
