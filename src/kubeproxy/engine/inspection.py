"""Inspections: each second, each backend does its periodic work and checks the kernel for changes by other programs.

RepairPolicy decides, without loop or kernel, how deep to inspect and whether to repair.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from kubeproxy.backends.mode import Backend, Depth, ForeignChange
from kubeproxy.engine.backlog import Backlog
from kubeproxy.engine.pacing import to_its_end
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family

log = logging.getLogger("kubeproxy.engine")

INTERVAL = 1.0
"""Seconds between inspections. Seconds between inspections. Each runs in a thread (some 70 microseconds), as it may
read all rules."""


class RepairPolicy:
    """The policy of one family: thorough inspections every `period` seconds, and after an uncertain difference."""

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._thorough_at = now
        self._in_doubt = False

    def depth(self, now: float) -> Depth:
        """Return the depth of an inspection at `now`."""
        if now - self._thorough_at >= self._period:
            self._thorough_at = now
            return Depth.THOROUGH
        return Depth.THOROUGH if self._in_doubt else Depth.QUICK

    def should_repair(self, difference: ForeignChange | None) -> bool:
        """Return whether to repair the result of an inspection: a certain difference, or the second uncertain one."""
        repair = difference is not None and (difference.certain or self._in_doubt)
        self._in_doubt = difference is not None and not repair
        return repair

    def reset(self, now: float) -> None:
        """Record that a full sync is about to compare everything."""
        self._thorough_at = now
        self._in_doubt = False


class Inspector:
    """Inspects the backends between syncs, which hold the lock `kernel`. `repair` is called with a difference."""

    def __init__(
        self,
        backends: Sequence[Backend],
        backlogs: Mapping[Family, Backlog],
        period: float,
        kernel: asyncio.Lock,
        repair: Callable[[Family, ForeignChange], None],
    ) -> None:
        self._backends = backends
        self._backlogs = backlogs
        self._kernel = kernel
        self._repair = repair
        self._policies = {backend.family: RepairPolicy(period, time.monotonic()) for backend in backends}

    async def run(self) -> None:
        """Inspect until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            for backend in self._backends:
                await self._inspect(backend)

    async def _inspect(self, backend: Backend) -> None:
        backlog, policy = self._backlogs[backend.family], self._policies[backend.family]
        async with self._kernel:
            if backlog.stale:
                policy.reset(time.monotonic())
                return
            depth = policy.depth(time.monotonic())
            difference = await to_its_end(look_after, backend, depth)
        if difference is None and depth is Depth.THOROUGH:  # a quick inspection does not read all elements
            backlog.inspected()
        if policy.should_repair(difference) and difference is not None:
            log.warning("Repairing: %s", difference.what)
            backlog.differs(difference.what)
            self._repair(backend.family, difference)


def look_after(backend: Backend, depth: Depth) -> ForeignChange | None:
    """Do a backend's periodic work and inspect its rules. A kernel that cannot be read counts as a difference."""
    try:
        backend.upkeep()
        return backend.inspect(depth)
    except ApplyError as error:
        return ForeignChange(f"the kernel cannot be read: {error}")
