"""Limits the cost of listening to connection tracking: under load it reads only a sample of the connections.

It measures the process's CPU time, with the handling of events. The kernel filters the other connections, so they cost
nothing here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kubeproxy.kernel.conntrack.events import Event, Events


class ProcessorShare(NamedTuple):
    """Shares of one processor: above `busy` the sample is halved, below `idle` it is doubled."""

    busy: float
    idle: float


COMMAND: Final = ProcessorShare(0.4, 0.12)
"""The shares for a command in the foreground."""
LOOK: Final = 0.25
"""Seconds between measurements of CPU time."""
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
        self.heard = 0

    @property
    def lost(self) -> int:
        """Return the number of times that the kernel dropped events, because they were not read fast enough."""
        return self._events.lost

    def for_a_while(self, end: float) -> Iterator[tuple[Event, int]]:
        """Yield (event, weight) for LOOK seconds, or until `end` of time.monotonic(), if that is earlier."""
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
