"""Tests the judges by mutations of important lines in the tested proxy: a history must find every mutation.

The mutations are in mutating.py.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

from prove import crashes, running
from prove.launcher import MUTATION
from prove.mutating import MUTATIONS


async def run(names: list[str], seed: str, steps: int, seconds: float, worlds: int, tell: Callable[[str], None]) -> int:
    """Try mutations one after the other, each in several worlds at once; return the number of mutations that no history
    found.

    The printed times include the creation of the worlds, and the used CPU time: on two idle cores a mutation takes half
    of it.
    """
    missed = 0
    for name in names:
        began, cpu, complaint, attempt = time.monotonic(), 0.0, "", 0
        while not complaint and (left := began + seconds - time.monotonic()) > 0:
            part = running.Share("nftables", f"{seed} {name}" + f" {attempt}" * (attempt > 0), steps, left)
            said, used = await _tried(name, part, worlds)
            cpu += used
            attempt += 1
            complaint = _complaint(said, MUTATIONS[name].complaint)
            if not complaint and said:
                tell(f"{name}: another complaint: {_complaint(said)[:140]}")
            if MUTATIONS[name].by == "answers":
                break
        took = f"{time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU"
        missed += not complaint
        tell(f"{name}: {complaint[:140] or 'NOT FOUND'} ({took})")
    tell(f"{len(names) - missed} of {len(names)} found")
    return missed


async def _tried(name: str, part: running.Share, worlds: int) -> tuple[str, float]:
    """Try a mutation in this number of worlds; return their reports, and the seconds of CPU."""
    os.environ[MUTATION] = name  # each world is a separate process
    said: list[str] = []
    parts: list[running.Share | crashes.Part]
    if MUTATIONS[name].by == "answers":
        parts = [crashes.Part("nftables", "answers", 0, part.seed, number, worlds) for number in range(worlds)]
    else:
        parts = list(running.shares(["nftables"], part, worlds))
    try:
        _, tallies = await running.side_by_side(parts, said.append)
    finally:
        del os.environ[MUTATION]
    return "".join(said), tallies["nftables"]["cpu"]


def _complaint(said: str, pattern: str = "") -> str:
    """Return the first complaint of a history, or of a point, that a pattern matches; '' for none. Before the complaint
    is the command to play the history again, unless the world could not start.
    """
    lines = said.splitlines()
    lines = lines[1:] or lines
    return next((" ".join(line.split()) for line in lines if re.search(pattern, line)), "")
