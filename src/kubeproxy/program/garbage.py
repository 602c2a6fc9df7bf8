"""When Python's garbage collector works: not while the first lists come in, rarely afterwards.

What the first sync makes lives on, and has no cycles to find: looking for some takes a tenth of that sync's time at
10,000 Services and more at 44,000.
"""

from __future__ import annotations

import asyncio
import gc

PATIENCE = 300.0
"""Seconds without a first sync after which garbage is collected all the same: failures make cycles of tracebacks."""


def postpone() -> None:
    """Collect nothing until `resume_when`; then at every 50,000th new container instead of every 700th."""
    gc.set_threshold(50_000, 20, 50)
    gc.disable()


async def resume_when(ready: asyncio.Event, patience: float = PATIENCE) -> None:
    """Return when the first sync is done, with what it made out of the collector's sight and the collector at work."""
    try:
        await asyncio.wait_for(ready.wait(), patience)
    except TimeoutError:
        gc.enable()
        await ready.wait()
    gc.freeze()
    gc.enable()
