"""The endpoint of the next connection: round robin, and ClientIP affinity. Pure except for clock and random numbers.

Each round has every endpoint once, in a new random order: with a fixed order, two clients that alternate would each
reach only every other endpoint.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Final

from kubeproxy.model.plan import Pool

CLIENTS: Final = 1 << 16
"""Maximum number of clients in a listener's affinity table; beyond it the one that was idle for longest is removed."""


class Balancer:
    """Round robin over one pool, with affinity of clients."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool: Pool = ()
        self._members: frozenset[bytes] = frozenset()
        self._affinity = 0
        self._round: list[bytes] = []
        self._clients: OrderedDict[str, tuple[bytes, float]] = OrderedDict()

    def retarget(self, pool: Pool, affinity: int) -> None:
        """Replace the pool and the affinity timeout in seconds (0: none). Clients keep endpoints still in the pool."""
        if pool != self._pool:
            self._pool, self._members = pool, frozenset(pool)
            self._round.clear()
        self._affinity = affinity
        if not affinity:
            self._clients.clear()

    def pick(self, client: str, failed: Container[bytes] = ()) -> bytes | None:
        """Return the endpoint for a new connection of a client, None if all are in `failed`."""
        if not self._affinity:
            return self._next(failed)
        now = self._clock()
        endpoint, until = self._clients.get(client, (b"", 0.0))
        if until <= now or endpoint not in self._members or endpoint in failed:
            found = self._next(failed)
            if found is None:
                return None
            endpoint = found
        self._clients[client] = (endpoint, now + self._affinity)
        self._clients.move_to_end(client)
        if len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)
        return endpoint

    def _next(self, failed: Container[bytes]) -> bytes | None:
        # All endpoints that are left in this round may have failed, but the next round has every endpoint.
        for _ in range(2 * len(self._pool)):
            if not self._round:
                self._round = list(self._pool)
                random.shuffle(self._round)
            endpoint = self._round.pop()
            if endpoint not in failed:
                return endpoint
        return None
