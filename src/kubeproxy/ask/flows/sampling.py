"""Bounds the cost of listening to connection tracking: of too many it reads one in so many.

The processor's time is measured, with all that is done about an event. The kernel leaves the others out, so they cost
nothing here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kubeproxy.kernel.conntrack.events import Event, Events


class ProcessorShare(NamedTuple):
    """Shares of one processor: above `busy` half as many connections are read as before, below `idle`
    twice as many are.
    """

    busy: float
    idle: float


COMMAND: Final = ProcessorShare(0.4, 0.12)
"""The share for a command whose user waits for it."""
LOOK: Final = 0.25
"""Seconds between looks at the processor's time."""
_MOST: Final = 1 << 16


class Sampled:
    """Sampled events, each with the number that it stands for. `left_out` is about how many were not read."""

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
        self.heard = 0

    @property
    def lost(self) -> int:
        """Return how often the kernel had to drop events, since they came faster than they were read."""
        return self._events.lost

    def for_a_while(self, end: float) -> Iterator[tuple[Event, int]]:
        """Yield events for LOOK seconds, or until an earlier `end` of time.monotonic(), with what each stands for."""
        began, spent, lost = time.monotonic(), self._spent(), self.lost
        one_in = self._events.one_in
        for event in self._events.until(min(began + LOOK, end)):
            self.heard += 1
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
