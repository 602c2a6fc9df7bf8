"""Plays histories in a world and calls the judges; a failing history is reduced to a small one that still fails."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from prove import clients, judges
from prove.shrink import smaller
from prove.steps import Step
from prove.world import World

CLIENTS: Mapping[str, Callable[..., Awaitable[list[str]]]] = {
    "ask": clients.sticky,
    "late": clients.late,
    "health": clients.health,
    "closed": clients.closed,
}
"""Steps of clients, which return complaints."""


async def play(world: World, steps: Sequence[Step], seed: str = "") -> list[str]:
    """Play steps, and remove all objects; return the complaints of the first check that has any."""
    chance, wrong = random.Random(seed), list[str]()
    for at, step in enumerate(steps):
        if step[0] == "quiet":
            wrong = await judges.quiet(world, chance)
        elif step[0] == "settled":
            wrong = await judges.quiet(world, chance, step[1:])
        elif step[0] == "look":
            wrong = judges.look_now(world)
        elif step[0] in CLIENTS:
            wrong = await CLIENTS[step[0]](world, *step[1:])
        else:
            try:
                await world.play(step)
                wrong = []
            except AssertionError as error:
                wrong = [str(error)]
        if wrong:
            return [f"after step {at + 1} of {len(steps)} {step[0]}: {one}" for one in wrong]
    if not steps or steps[-1][0] != "quiet":
        wrong = await judges.quiet(world, chance)
    if not wrong:
        await world.clear()
        wrong = await judges.quiet(world, chance) or await judges.nothing_left(world)
    return [f"at the end: {one}" for one in wrong]


async def played(steps: Sequence[Step], mode: str = "nftables", seed: str = "") -> list[str]:
    """Play steps in a separate world; for tests."""
    async with World(mode) as world:
        wrong = await judges.quiet(world, random.Random(seed)) or await judges.nothing_left(world)
        return wrong or await play(world, steps, seed)


def kind(complaint: str) -> str:
    """Return the kind of a complaint: 'packet', 'verify', 'steady traffic'."""
    said = complaint.partition(": ")[2] if complaint.startswith(("after step", "at the end")) else complaint
    return re.sub(r"\d+", "", said.partition(":")[0])[:40]


async def shrunk(
    steps: Sequence[Step], mode: str, seed: str, seconds: float, tell: Callable[[str], None]
) -> tuple[list[Step], list[str]]:
    """Return the smallest failing history found in the time, and its complaints; each attempt has a new world."""
    until = time.monotonic() + seconds
    said: list[list[str]] = []
    kinds: set[str] = set()

    async def fails(candidate: Sequence[Step]) -> bool:
        if time.monotonic() > until:
            return False
        wrong = await played(candidate, mode, seed)
        found = {kind(one) for one in wrong}
        if not kinds:
            kinds.update(found)
        same = bool(found & kinds)  # another fault means another history
        if same:
            said.append(wrong)
        tell(f"{len(candidate)} steps: {'still fails' if same else 'fine'}")
        return same

    if not await fails(list(steps)):
        return list(steps), []
    found = await smaller(list(steps), fails)
    return found, said[-1]
