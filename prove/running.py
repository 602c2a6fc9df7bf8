"""Plays histories in several worlds at once; each world is a separate process that reports its totals at its end."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from kubeproxy.kernel.nftables import expressions, reader
from prove import crashes, judges, launcher
from prove.forking import Forked, Forking
from prove.generate import Generator
from prove.play import play, shrunk
from prove.steps import Step, as_test
from prove.world import Shares, World

SHRINK = 180.0
"""Seconds for the reduction of a failing history."""
SHARES = Shares(dumps=0.05, pages=0.3, meanings=0.1)
"""nft's listing, the meaning of all rules and a page of metrics take more time than all other judges."""
BEFORE = 3
"""Number of histories before a failing one that are played again with it, if it does not fail alone."""
BRIEFLY = 12.0
"""Seconds to wait for an event that a broken proxy never causes."""
ENDED = 130
"""Exit code of a world that was told to end."""
_TALLY = "played: "
Tally = Counter[str]
"""The totals: number of histories, steps and judged moments, seconds of CPU; number of failed worlds."""


class Share(NamedTuple):
    """The part of one world: histories whose names begin with `seed`, for a number of seconds or of histories."""

    mode: str
    seed: str
    steps: int
    seconds: float
    histories: int = 0


def shares(modes: Sequence[str], whole: Share, worlds: int) -> Iterator[Share]:
    """Yield the part of each world; with several modes each mode has at least one world."""
    if whole.histories == 1:
        yield whole._replace(mode=modes[0])
        return
    worlds = max(worlds, len(modes))
    for number in range(worlds):
        count = whole.histories and max(1, whole.histories // worlds)
        mode = modes[number % len(modes)]
        yield Share(mode, f"{whole.seed}.{number}", whole.steps, whole.seconds, count)


async def run(modes: Sequence[str], whole: Share, worlds: int) -> int:
    """Play; return the exit code: 0 if no fault was found."""
    parts = list(shares(modes, whole, worlds))
    print(f"{', '.join(modes)}: SEED={whole.seed} STEPS={whole.steps}, {len(parts)} worlds", flush=True)
    if len(parts) == 1:
        return await _alone(parts[0])
    began = time.monotonic()
    code, tallies = await side_by_side(parts, lambda text: print(text, end="", flush=True))
    seconds = time.monotonic() - began
    whole_tally = sum(tallies.values(), Tally())
    for mode, tally in [*tallies.items(), *([("altogether", whole_tally)] if len(tallies) > 1 else [])]:
        print(told(mode, tally, seconds), flush=True)
    return code


async def run_crashes(parts: Sequence[crashes.Part]) -> int:
    """Try points of crashes or refusals, each part in a separate world; return the exit code."""
    began = time.monotonic()
    code, tallies = await side_by_side(parts, lambda text: print(text, end="", flush=True))
    for mode, tally in tallies.items():
        tried = ", ".join(f"{count} {name}" for name, count in sorted(tally.items()) if " " in name)
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{mode}: {tally['points']} points ({tried}), {tally['failed']} failed; {took}", flush=True)
    return max(code, *(int(tally["failed"] > 0) for tally in tallies.values()))


async def side_by_side(
    parts: Sequence[Share | crashes.Part], tell: Callable[[str], None]
) -> tuple[int, dict[str, Tally]]:
    """Run each part in a separate process until all have ended, or one has found a failing history.

    Return the exit code, and the totals by mode.
    """
    tallies: dict[str, Tally] = {part.mode: Counter() for part in parts}
    worlds: list[Forked] = []
    async with Forking() as forking:
        try:
            said = [await _begun(part, forking, worlds) for part in parts]
            found = await asyncio.gather(
                *(
                    _follow(lines, one, worlds, tallies[part.mode], tell)
                    for lines, one, part in zip(said, worlds, parts, strict=True)
                )
            )
        finally:
            _end(worlds)
            for one in worlds:
                await one.wait()
    return max(found), tallies


async def _begun(part: Share | crashes.Part, forking: Forking, worlds: list[Forked]) -> asyncio.StreamReader:
    """Start a part in a separate process; return its report."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        argv = ["--points" if isinstance(part, crashes.Part) else "--share", json.dumps(part)]
        output = f"/proc/{os.getpid()}/fd/{theirs}"
        worlds.append(await forking.start("prove.__main__:main", argv, output, errors=False, orphaned=signal.SIGTERM))
    finally:
        os.close(theirs)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb", 0))
    return reader


async def _follow(
    lines: asyncio.StreamReader,
    process: Forked,
    everybody: Sequence[Forked],
    tally: Tally,
    tell: Callable[[str], None],
) -> int:
    """Print the report of one world; if it found a fault, or could not start, end the other worlds and return 1."""

    def fail() -> None:
        _end([one for one in everybody if one is not process])
        tally["failed"] += 1

    failed = False
    while line := (await lines.readline()).decode(errors="replace"):
        if line.startswith(_TALLY):
            tally.update(json.loads(line.removeprefix(_TALLY)))
            continue
        tell(line)
        if line.startswith("FAILED"):
            failed = True
            fail()
    code = await process.wait()
    if code not in {0, ENDED} and not failed:
        tell(f"FAILED: a world ended with status {code}\n")
        fail()
    return int(code not in {0, ENDED})


def _end(running: Sequence[Forked]) -> None:
    for one in running:
        if one.returncode is None:
            with suppress(ProcessLookupError):
                one.send_signal(signal.SIGTERM)


def told(mode: str, tally: Tally, seconds: float) -> str:
    """Return the totals as a line."""
    count = tally["histories"]
    rate = f"{count / seconds * 3600:.0f} an hour, {tally['cpu_ms'] / 1e3 / max(1, count):.2f} s of CPU each"
    played = f"{count} histories, {tally['steps']} steps, {tally['judged']} moments judged"
    return f"{mode}: {played}, {tally['failed'] or 'nothing'} found; {rate}"


async def _alone(share: Share) -> int:
    """Play in this process."""
    began, tally = time.monotonic(), Tally()
    status = await world(share, tally)
    tally.update(cpu_ms=_used(), failed=status)
    print(told(share.mode, tally, time.monotonic() - began), flush=True)
    return status


async def share(text: str) -> int:
    """Play the part of one world; return the exit code."""
    tally = Tally()
    try:
        return await world(Share(*json.loads(text)), tally)
    finally:
        tally["cpu_ms"] = _used()
        print(_TALLY + json.dumps(tally), flush=True)


def _used() -> int:
    """Return the CPU time in ms of this process and of its ended children: all of them, once a world is down."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return round(1e3 * sum(one.ru_utime + one.ru_stime for one in used))


async def points(text: str) -> int:
    """Try the points of one world; return the exit code."""
    if launcher.MUTATION in os.environ:
        judges.TIMEOUT = BRIEFLY
    tally = await crashes.run(crashes.Part(*json.loads(text)), functools.partial(print, flush=True))
    print(_TALLY + json.dumps(tally), flush=True)
    return 0


async def world(share: Share, tally: Tally) -> int:
    """Play histories one after the other, in one world, until the part is finished or one fails.

    Return the exit code.
    """
    until = time.monotonic() + share.seconds
    if launcher.MUTATION in os.environ:
        judges.TIMEOUT = BRIEFLY
    cached = functools.lru_cache(maxsize=1 << 13)  # Most rules never change.
    reader._rule, expressions.parse = cached(reader._rule), cached(expressions.parse)
    recent: list[list[Step]] = []
    async with World(share.mode) as world:
        world.shares = SHARES
        name = share.seed
        wrong = await judges.quiet(world, random.Random(name)) or await judges.nothing_left(world)
        while not wrong:
            if tally["histories"] >= share.histories if share.histories else time.monotonic() > until:
                return 0
            name = share.seed if share.histories == 1 else f"{share.seed}.{tally['histories']}"
            history = Generator(name, share.mode).history(share.steps)
            recent = [*recent[-BEFORE:], [world.settings(), *history]]
            wrong = await play(world, history, name)
            tally.update(histories=1, steps=len(history))
            tally["judged"] = world.judged
    await _report(share, name, recent, wrong)
    return 1


async def _report(share: Share, name: str, recent: list[list[Step]], wrong: list[str]) -> None:
    again = f"make prove MODE={share.mode} SEED={name} STEPS={share.steps} HISTORIES=1"
    print(f"FAILED: {again}", *wrong, sep="\n  ", flush=True)
    if launcher.MUTATION in os.environ:
        return  # the mutation is identified by its name
    history = recent[-1] if recent else []
    longer = [step for one in recent for step in (*one, ("clear",))]
    for steps in (history, longer):
        small, said = await shrunk(steps, share.mode, name, SHRINK, lambda text: print(f"  {text}", flush=True))
        if said:
            break
    else:
        print("It does not fail in a new world: the fault depends on earlier histories, or on chance.")
        small = history
    print("As a test of tests/prove/test_prove_found.py (`ruff format` makes it fit):\n")
    print(as_test(small, share.mode, (said or wrong)[0]), *(said or wrong), sep="\n", flush=True)
