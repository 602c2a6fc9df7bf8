"""Looks each second for what other programs changed, in one family after the other, and does the backends' upkeep.

How closely one looks, and what is believed of what a look shows, is decided without a loop or a kernel.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kubeproxy.backends.mode import Backend, Depth, ForeignChange
from kubeproxy.engine.backlog import Backlog
from kubeproxy.engine.turns import to_its_end
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family

log = logging.getLogger("kubeproxy.engine")

INTERVAL = 1.0
"""Seconds between inspections. Each is in a thread, as nobody knows before whether it reads a number or all rules; the
thread costs some 70 microseconds."""


class Suspicion:
    """How closely one family is looked at: thoroughly once in `period` seconds, and when the last look left a doubt."""

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._thorough_at = now
        self._in_doubt = False

    def depth(self, now: float) -> Depth:
        """Return how closely to look at `now`."""
        if now - self._thorough_at >= self._period:
            self._thorough_at = now
            return Depth.THOROUGH
        return Depth.THOROUGH if self._in_doubt else Depth.QUICK

    def convicts(self, difference: ForeignChange | None) -> bool:
        """Take what a look showed; return whether that is to be repaired."""
        convicted = difference is not None and (difference.certain or self._in_doubt)
        self._in_doubt = difference is not None and not convicted
        return convicted

    def drop(self, now: float) -> None:
        """Take that everything is about to be compared with the kernel anyway."""
        self._thorough_at = now
        self._in_doubt = False


class Inspector:
    """Inspects the backends beside the syncs, of which none is under way while `kernel` is held.

    A difference leads to a full comparison, which `convicted` is to bring about.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        backlogs: Mapping[Family, Backlog],
        period: float,
        kernel: asyncio.Lock,
        convicted: Callable[[Family, ForeignChange], None],
    ) -> None:
        self._backends = backends
        self._backlogs = backlogs
        self._kernel = kernel
        self._convicted = convicted
        self._suspicions = {backend.family: Suspicion(period, time.monotonic()) for backend in backends}

    async def run(self) -> None:
        """Inspect until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            for backend in self._backends:
                await self._inspect(backend)

    async def _inspect(self, backend: Backend) -> None:
        backlog, suspicion = self._backlogs[backend.family], self._suspicions[backend.family]
        async with self._kernel:
            if backlog.stale:
                suspicion.drop(time.monotonic())
                return
            depth = suspicion.depth(time.monotonic())
            difference = await to_its_end(look_after, backend, depth)
        if difference is None and depth is Depth.THOROUGH:  # a quick one may pass over elements
            backlog.inspected()
        if suspicion.convicts(difference) and difference is not None:
            log.warning("Repairing: %s", difference.what)
            backlog.differs(difference.what)
            self._convicted(backend.family, difference)


def look_after(backend: Backend, depth: Depth) -> ForeignChange | None:
    """Do a backend's upkeep and inspect it. What cannot be read differs."""
    try:
        backend.upkeep()
        return backend.inspect(depth)
    except ApplyError as error:
        return ForeignChange(f"the kernel cannot be read: {error}")
