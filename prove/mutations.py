"""Lines that matter, each broken on request in the proxy under test alone: a history must find every one of them.

Otherwise the judges are blind. The lines are in mutating.py.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from prove import judges
from prove.generate import Generator
from prove.launcher import MUTATION, command
from prove.play import play
from prove.world import World

SECONDS = 60.0
"""Within which each is found."""


async def found(name: str, seed: str) -> tuple[float, str]:
    """Return after how many seconds of histories a mutation is found, and by which complaint: '' for not in time."""
    began = time.monotonic()
    os.environ[MUTATION] = name  # of proxies that are started with a fault as well
    async with World("nftables", command=command("none", 0)) as world:
        count = 0
        while time.monotonic() - began < SECONDS:
            wrong = await play(world, Generator(f"{seed}.{count}", "nftables").history(60), f"{seed}.{count}")
            if wrong:
                return time.monotonic() - began, wrong[0].splitlines()[0]
            count += 1
    return time.monotonic() - began, ""


async def run(names: list[str], seed: str, tell: Callable[[str], None]) -> int:
    """Try mutations; return how many no history found."""
    patience, judges.PATIENCE = judges.PATIENCE, 8.0
    missed = 0
    for name in names:
        seconds, complaint = await found(name, seed)
        missed += not complaint
        tell(f"{name}: {f'{seconds:.0f} s, {complaint[:160]}' if complaint else 'NOT FOUND'}")
        await asyncio.sleep(0)
    judges.PATIENCE = patience
    return missed
