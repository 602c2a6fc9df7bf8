"""The command line: `python -m prove.soak` from the repository's root, as root; `make soak` with its variables."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bench import objects
from bench.report import OUT, Circumstances, circumstances
from bench.worker import enter_new_namespace
from prove.soak import verdict
from prove.soak.chart import draw
from prove.soak.ground import Ground
from prove.soak.samples import COUNTED, IPVS, Sample
from support.guest.guest import run_module_in_guest
from support.modes import GUEST

EVERY = 10.0
"""Seconds between two samples."""

_GUEST_MARGIN = 900.0
"""Seconds for the start, the load and the final checks in a guest."""


class Soak(msgspec.Struct):
    """The results of a soak. `asked` are the numbers of requests by kind; `wrong` is empty without a fault."""

    mode: str
    size: str
    rate: float
    seed: int
    beside: bool
    circumstances: Circumstances | None = None
    samples: list[Sample] = []
    asked: dict[str, int] = {}
    lines: list[verdict.Line] = []
    wrong: list[str] = []

    def judge(self, ground: Ground) -> None:
        """Make the final checks, and judge the samples."""
        report = ground.report()
        self.asked = report["asked"]
        self.wrong += report["first"]
        self.wrong += ground.wrong()
        try:
            self.lines = verdict.lines(self.samples, beside=self.beside)
        except ValueError as error:
            self.wrong.append(str(error))
        self.wrong += [str(line) for line in self.lines if not line.flat]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 0 if all figures stayed constant and no connection was lost."""
    given = _parse(argv)
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    if given.mode == IPVS and not GUEST:
        words, seconds = sys.argv[1:] if argv is None else argv, 60 * given.minutes + _GUEST_MARGIN
        return run_module_in_guest("prove.soak", words, seconds, writable=[out.absolute()])
    path = out / f"soak-{given.mode}.json"
    started = time.time()
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    enter_new_namespace()
    with Ground(given.mode, objects.parse_size(given.size), given.rate, given.seed) as ground:
        run = Soak(mode=given.mode, size=given.size, rate=given.rate, seed=given.seed, beside=given.beside)
        try:
            for sample in sampled(ground, given.minutes * 60, given.every, over):
                run.samples.append(sample)
                print(" ".join(f"{name}={value:.6g}" for name, value in sample.items()), flush=True)
                run.circumstances = circumstances(started, time.time() - started, False)
                path.write_bytes(msgspec.json.encode(run))  # write the samples even after an error
        except (RuntimeError, OSError) as error:
            run.wrong.append(f"ended early: {error}")
        run.judge(ground)
    path.write_bytes(msgspec.json.encode(run))
    draw(run.samples, f"{given.mode}, {given.size}, {given.rate:g} changes a second", path.with_suffix(".svg"))
    print(*run.lines, f"asked: {run.asked}", f"written: {path}, and a chart", sep="\n")
    if run.wrong:
        print("FAILED", *run.wrong, sep="\n  ")
    return int(bool(run.wrong))


def sampled(ground: Ground, seconds: float, every: float, over: threading.Event) -> Iterator[Sample]:
    """Yield a sample at each interval, for a number of seconds or until it is `over`.

    Raises the errors of Ground.sample.
    """
    began = time.monotonic()
    for turn in range(1, int(seconds / every) + 1):
        if over.wait(max(0.0, began + turn * every - time.monotonic())):
            return
        yield ground.sample()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prove.soak", description="A long run; see docs/reliability.md.")
    parser.add_argument("--mode", default="nftables", choices=COUNTED, help="the mode (nftables)")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--size", default="10kx10", help="Services x endpoints (10kx10)")
    parser.add_argument("--rate", type=float, default=200.0, help="changes a second (200)")
    parser.add_argument("--every", type=float, default=EVERY, help=f"seconds between two samples ({EVERY:.0f})")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="other work runs on this machine: times and the kernel's memory are shown, and not judged",
    )
    parser.add_argument("--out", default=str(OUT), help="the folder for figures and chart (bench/out)")
    parser.add_argument("--seed", type=int, default=1, help="of the random changes (1)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
