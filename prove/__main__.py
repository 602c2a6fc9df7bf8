"""The command line: `python -m prove` from the repository's root, as root; `make prove` with its variables."""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import time
from collections.abc import Sequence

from prove import crashes, judges, mutations
from prove.crashes import DEATHS, REFUSALS
from prove.generate import Generator
from prove.mutating import MUTATIONS
from prove.play import play, shrunk
from prove.steps import Step, as_test
from prove.world import World
from support.guest.guest import run_in_guest
from support.modes import GUEST, translate_bridged_packets

MODES = ("nftables", "iptables-nft", "iptables-legacy", "userspace")
IPVS = "ipvs"
"""Runs in a guest, which is slow: only where it is asked for."""
GUEST_SECONDS = 3600.0
SHRINK = 180.0
"""Seconds for making a failing history small."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 0 when nothing was found."""
    given = _parse(argv)
    if given.mode == IPVS and not GUEST:
        return _in_guest(sys.argv[1:] if argv is None else argv)
    if GUEST:
        translate_bridged_packets()
    return asyncio.run(_run(given))


def _in_guest(argv: Sequence[str]) -> int:
    """Run the same under the guest's kernel, which has IPVS; return its exit code."""
    command = [sys.executable, "-m", "prove", *argv]
    done = run_in_guest(command, GUEST_SECONDS, environment={"KUBEPROXY_GUEST": "1"}, echo=sys.stdout)
    return done.status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prove", description="Random histories; see docs/reliability.md.")
    parser.add_argument("--seed", default="", help="of the first history; a random one if none is given")
    parser.add_argument("--minutes", type=float, default=2.0, help="how long (2)")
    parser.add_argument("--histories", type=int, default=0, help="so many histories instead")
    parser.add_argument("--steps", type=int, default=60, help="of a history, about (60)")
    parser.add_argument("--mode", default="nftables", choices=(*MODES, IPVS, "all"), help="the mode, or all (nftables)")
    parser.add_argument("--crashes", type=int, metavar="N", help="die at N points of a start, 0 for all, instead")
    parser.add_argument(
        "--refusals", type=int, metavar="N", help="be refused at N points of a start, 0 for all, instead"
    )
    parser.add_argument("--mutation", metavar="NAME", help="break this line of the proxy, or all in turn, instead")
    return parser.parse_args(argv)


async def _run(given: argparse.Namespace) -> int:
    seed = given.seed or str(secrets.randbelow(10**6))
    if given.mutation:
        names = list(MUTATIONS) if given.mutation == "all" else [given.mutation]
        return min(1, await mutations.run(names, seed, lambda text: print(text, flush=True)))
    kinds = MODES if given.mode == "all" else (given.mode,)
    for mode in kinds:
        if given.crashes is not None or given.refusals is not None:
            words, share = (DEATHS, given.crashes) if given.crashes is not None else (REFUSALS, given.refusals)
            print(f"{mode}: SEED={seed}", flush=True)
            wrong = await crashes.run(mode, words, share, seed, lambda text: print(text, flush=True))
            if wrong:
                return 1
            continue
        status = await _histories(given, seed, mode, given.minutes / len(kinds))
        if status:
            return status
    return 0


async def _histories(given: argparse.Namespace, seed: str, mode: str, minutes: float) -> int:
    """Play histories of one mode one after the other, in one world, until the time is over or one fails."""
    print(f"{mode}: SEED={seed} STEPS={given.steps}", flush=True)
    began, count, steps = time.monotonic(), 0, 0
    args = ("--reset-gone-endpoints",) if random.Random(seed).random() < 0.3 and mode == "nftables" else ()
    async with World(mode, args=args) as world:
        wrong = await judges.quiet(world, random.Random(seed)) or await judges.nothing_left(world)
        history: list[Step] = []
        name = seed
        while not wrong:
            over = count >= given.histories if given.histories else time.monotonic() - began > 60 * minutes
            if over:
                rate = count / (time.monotonic() - began) * 3600
                print(f"{mode}: {count} histories, {steps} steps, nothing found; {rate:.0f} an hour", flush=True)
                return 0
            name = seed if count == 0 else f"{seed}.{count}"
            history = Generator(name, mode).history(given.steps)
            wrong = await play(world, history, name)
            count, steps = count + 1, steps + len(history)
    await _report(given, mode, name, args, history, wrong)
    return 1


async def _report(
    given: argparse.Namespace, mode: str, seed: str, args: Sequence[str], history: list[Step], wrong: list[str]
) -> None:
    print(f"FAILED: make prove MODE={mode} SEED={seed} STEPS={given.steps}", *wrong, sep="\n  ", flush=True)
    small, said = await shrunk(history, mode, args, seed, SHRINK, lambda text: print(f"  {text}", flush=True))
    if not said:
        print("It does not fail in a world of its own: it takes what was before it, or luck.")
    print(as_test(small, mode, (said or wrong)[0]), *(said or wrong), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
