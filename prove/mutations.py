"""Lines that matter, each broken on request in the proxy under test alone: a history must find every one of them.

Otherwise the judges are blind. The lines are in mutating.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from prove import crashes, running
from prove.launcher import MUTATION
from prove.mutating import MUTATIONS


async def run(names: list[str], seed: str, steps: int, seconds: float, worlds: int, tell: Callable[[str], None]) -> int:
    """Try mutations one after the other, each in so many worlds side by side; return how many no history found.

    What is told includes the making of the worlds, and says what CPU was used: half of that is how long it takes on
    two cores that do nothing else.
    """
    missed = 0
    for name in names:
        os.environ[MUTATION] = name  # worlds are processes of their own
        began = time.monotonic()
        said: list[str] = []
        parts: list[running.Share | crashes.Part]
        if MUTATIONS[name].by == "answers":
            parts = [crashes.Part("nftables", "answers", 0, seed, number, worlds) for number in range(worlds)]
        else:
            share = running.Share("nftables", f"{seed} {name}", steps, seconds)
            parts = list(running.shares(["nftables"], share, worlds))
        _, tallies = await running.side_by_side(parts, said.append)
        took = f"{time.monotonic() - began:.0f} s, {tallies['nftables']['cpu']:.0f} s of CPU"
        complaint = _complaint("".join(said))
        missed += not complaint
        tell(f"{name}: {complaint[:140] or 'NOT FOUND'} ({took})")
    del os.environ[MUTATION]
    tell(f"{len(names) - missed} of {len(names)} found")
    return missed


def _complaint(said: str) -> str:
    """Return what a history, or a point, complains of first; '' for nothing. Before it stands how to play it again,
    unless a world did not come so far.
    """
    first, _, rest = said.partition("\n")
    return " ".join((rest.partition("\n")[0] or first).split())
