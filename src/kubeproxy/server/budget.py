"""Limits the time of the event loop that HTTP answers take, by client and for all remote clients together.

The kernel is programmed on the same loop, and every pod can reach the health ports. Pure but for the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SHARE: Final = 0.1
"""Of each second, for one client; a scrape of /metrics takes some 10 ms."""

REMOTE_SHARE: Final = 0.2
"""Of each second, for all clients of pods and other nodes together: the kubelet's probes are answered beside them."""

BURST: Final = 1.0
"""Seconds whose share may be used at once."""

LEAST: Final = 1e-4
"""Seconds that an answer is taken to need before it is measured."""

_ALL: Final = b"remote"
_MOST: Final = 4096  # clients with a debt


class Budget:
    """Time that each client has used ahead of its share; the clients are admission.peer_of's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at: dict[bytes, float] = {}

    def delay(self, peer: bytes) -> float:
        """Return the seconds until a client's next request would be answered."""
        return max(0.0, self._free_at.get(peer, 0.0) - self._clock())

    def reserve(self, peer: bytes, *, remote: bool) -> float:
        """Take the time of a small answer from a client's share; return the seconds until it may be made."""
        delay = self.delay(peer)
        if remote:
            delay = max(delay, self.delay(_ALL))
        self._charge(peer, LEAST, remote)
        return delay

    def spend(self, peer: bytes, seconds: float, *, remote: bool) -> None:
        """Take the time that a reserved answer needed beyond a small one."""
        if seconds > LEAST:
            self._charge(peer, seconds - LEAST, remote)

    def _charge(self, peer: bytes, seconds: float, remote: bool) -> None:
        oldest = self._clock() - BURST
        if len(self._free_at) > _MOST:
            self._free_at = {key: at for key, at in self._free_at.items() if at > oldest}
        self._free_at[peer] = max(oldest, self._free_at.get(peer, oldest)) + seconds / SHARE
        if remote:
            self._free_at[_ALL] = max(oldest, self._free_at.get(_ALL, oldest)) + seconds / REMOTE_SHARE
