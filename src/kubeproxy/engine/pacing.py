"""Limits of rates: delays that double after failures, and a bucket of tokens."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds of a monotonic clock."""


class Backoff:
    """Delays in seconds between attempts that fail: `first`, doubling up to `slowest`.

    Each is longer or shorter by up to the share `spread`, at random, so that nodes do not try at the same time. After
    `healthy` seconds without a failure the next delay is `first` again. `jitter` returns numbers in [0, 1). `failures`
    counts those in a row.
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
        self.failures = 0
        self._until = 0.0

    def failed(self) -> float:
        """Count a failure; return the seconds to wait."""
        now = self._clock()
        if now - self._until > self._healthy:
            self.failures = 0
        delay = min(self._slowest, self._first * 2.0 ** min(self.failures, 32))
        delay *= 1 + self._spread * (2 * self._jitter() - 1)
        self.failures += 1
        self._until = now + delay
        return delay

    def succeeded(self) -> None:
        """Make the next delay `first`."""
        self.failures = 0


class TokenBucket:
    """A limit of `burst` at once and `rate` per second."""

    def __init__(self, rate: float, burst: int, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at = clock()

    def take(self) -> bool:
        """Take a token if there is one; return whether one was taken."""
        self._refill()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def reserve(self) -> float:
        """Take a token in advance; return the seconds until it is available."""
        self._refill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
