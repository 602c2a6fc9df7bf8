"""The command line: `python -m prove` from the repository's root, as root; `make prove` with its variables."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import secrets
import signal
import sys
from collections.abc import Sequence

from prove import crashes, forking, launcher, mutations, running
from prove.mutating import MUTATIONS
from support.guest.guest import run_module_in_guest
from support.modes import GUEST, translate_bridged_packets

MODES = ("nftables", "iptables-nft", "iptables-legacy", "userspace")
IPVS = "ipvs"
"""Modes that run in a guest, which is slow; they run only on request."""
GUEST_SECONDS = 3600.0
WORLDS = 1 if GUEST else 4 * (os.cpu_count() or 1)
"""Number of worlds for a mutation; each begins with a different sequence of aimed.py."""
MUTATED = 5
"""Number of worlds for a mutation; each begins with a different aimed sequence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code: 0 if no fault was found."""
    given = _parse(argv)
    if given.mode == IPVS and not GUEST:
        return run_module_in_guest("prove", sys.argv[1:] if argv is None else argv, GUEST_SECONDS)
    if GUEST:
        translate_bridged_packets()
    if (given.share or given.points) and launcher.MUTATION not in os.environ:
        forking.prepare()
    return asyncio.run(_until_told(given))


async def _until_told(given: argparse.Namespace) -> int:
    """Run; remove everything after SIGTERM or SIGINT."""
    work, loop = asyncio.create_task(_run(given)), asyncio.get_running_loop()

    def end() -> None:
        """Only the first signal counts: a second signal would interrupt the removal."""
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        return await work
    except asyncio.CancelledError:
        return running.ENDED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prove", description="Random histories; see docs/reliability.md.")
    parser.add_argument("--seed", default="", help="of the run, or of one history; a random one if none is given")
    parser.add_argument("--minutes", type=float, help="duration (2; with --mutation 1 for each)")
    parser.add_argument("--histories", type=int, default=0, help="number of histories, instead of minutes")
    parser.add_argument("--steps", type=int, default=10, help="approximate number of steps in a history (10)")
    parser.add_argument(
        "--worlds", type=int, help=f"how many are played side by side ({WORLDS}; with --mutation {MUTATED})"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--points", help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="nftables", choices=(*MODES, IPVS, "all"), help="the mode, or all (nftables)")
    parser.add_argument("--crashes", type=int, metavar="N", help="instead: kill it at N points of a start, 0 for all")
    parser.add_argument(
        "--refusals", type=int, metavar="N", help="instead: refuse calls at N points of a start, 0 for all"
    )
    parser.add_argument(
        *["--mutation"], metavar="NAME", choices=[*MUTATIONS, "all"], help="instead: break this line, or all in turn"
    )
    given = parser.parse_args(argv)
    given.worlds = given.worlds or (MUTATED if given.mutation else WORLDS)
    given.minutes = given.minutes or (1.0 if given.mutation else 2.0)
    return given


async def _run(given: argparse.Namespace) -> int:
    if given.share:
        return await running.share(given.share)
    if given.points:
        return await running.points(given.points)
    seed = given.seed or str(secrets.randbelow(10**6))
    if given.mutation:
        names = list(MUTATIONS) if given.mutation == "all" else [given.mutation]
        tell = functools.partial(print, flush=True)
        return min(1, await mutations.run(names, seed, given.steps, given.minutes * 60, given.worlds, tell))
    kinds = MODES if given.mode == "all" else (given.mode,)
    if given.crashes is None and given.refusals is None:
        return await running.run(
            kinds, running.Share("", seed, given.steps, given.minutes * 60, given.histories), given.worlds
        )
    kind, share = ("deaths", given.crashes) if given.crashes is not None else ("refusals", given.refusals)
    worlds = min(given.worlds, share or given.worlds)
    code = 0
    for mode in kinds:
        print(f"{mode}: SEED={seed}", flush=True)
        parts = [crashes.Part(mode, kind, share, seed, number, worlds) for number in range(worlds)]
        code = max(code, await running.run_crashes(parts))
    return code


if __name__ == "__main__":
    sys.exit(main())
