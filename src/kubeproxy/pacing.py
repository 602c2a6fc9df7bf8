"""How often something may be tried or done: delays that double after failures, and tokens that come back with time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds that never go back."""


class Backoff:
    """Seconds until something that fails is tried again: `first`, doubling up to `slowest`.

    `spread` is the share by which each is longer or shorter at random, so that nodes do not try all at once. After
    `healthy` seconds without a failure it begins anew. `jitter` gives numbers in [0, 1).
    """

    def __init__(
        self,
        first: float,
        slowest: float,
        *,
        spread: float = 0.25,
        healthy: float = math.inf,
        clock: Clock = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._slowest = slowest
        self._spread = spread
        self._healthy = healthy
        self._clock = clock
        self._jitter = jitter
        self._failures = 0
        self._until = 0.0

    def failed(self) -> float:
        """Count a failure; return how many seconds to wait."""
        now = self._clock()
        if now - self._until > self._healthy:
            self._failures = 0
        delay = min(self._slowest, self._first * 2.0 ** min(self._failures, 32))
        delay *= 1 + self._spread * (2 * self._jitter() - 1)
        self._failures += 1
        self._until = now + delay
        return delay

    def succeeded(self) -> None:
        """Begin anew."""
        self._failures = 0
