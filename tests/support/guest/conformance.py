"""Runs the conformance cases in ipvs mode, in several guests at once.

    python -m support.guest.conformance FOLDER [CASE.json ...]

FOLDER contains cases/; they are distributed to guests and run by tests/conformance/run.py. The exit status is 1 if a
probe had an unexpected outcome (differences.py), after a line that names the folder with the proxies' logs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.guest.differences import Judge, summary
from support.guest.guest import GuestError, run_in_guest
from support.places import ROOT

WORK = "kubeproxy-conformance"  # folder of run.py in TMPDIR
SECONDS_A_CASE = 60


class Printer:
    """Prints the lines of a guest's output that a judge keeps, with the guest's name: guests share a terminal."""

    _lock = threading.Lock()

    def __init__(self, judge: Judge, name: str) -> None:
        self._judge = judge
        self._name = name

    def write(self, line: str) -> None:
        text = self._judge.read(line)
        with self._lock:
            sys.stdout.write("".join(f"{self._name}: {each}\n" for each in text.splitlines() if each.strip()))

    def flush(self) -> None:
        sys.stdout.flush()


def inside(mode: str, like: str, logs: Path, cases: list[str]) -> int:
    """Run cases in this guest.

    The guest's own file system contains the configuration, because the proxy watches the file.
    """
    # Pods of one bridge reach each other directly over it; on a node their packets still pass its netfilter hooks.
    subprocess.run(["modprobe", "br_netfilter"], check=True)
    with tempfile.TemporaryDirectory() as temporary:
        proxy = f"{ROOT}/.venv/bin/kube-proxy --config {{config}}"
        runner = str(ROOT / "tests/conformance/run.py")
        command = [sys.executable, runner, "--mode", mode, "--like", like, "--proxy", proxy, *cases]
        done = subprocess.run(command, check=False, env={**os.environ, "TMPDIR": temporary})
        for log in Path(temporary, WORK).glob("*.log"):
            shutil.copy(log, logs)
    return done.returncode


def outside(folder: Path, mode: str, like: str, guests: int, cases: list[str]) -> int:
    """Distribute the cases to guests, print their progress, and return the common exit status.

    Failed cases run once more, alone: for agent.py 0.25 s without an answer is a timeout, and a guest on a busy machine
    may be slower.
    """
    logs = Path(tempfile.mkdtemp(prefix="kubeproxy-conformance-ipvs-"))

    def one(name: str, dealt: list[str]) -> Judge:
        judge = Judge(folder / "cases")
        myself = [sys.executable, "-m", "support.guest.conformance"]
        argv = [*myself, "--inside", str(logs), "--mode", mode, "--like", like, str(folder), *dealt]
        try:
            run_in_guest(argv, 120 + SECONDS_A_CASE * len(dealt), writable=[logs], echo=Printer(judge, name))
        except GuestError as error:
            print(f"{name}: {error}", file=sys.stderr)
        return judge

    with ThreadPoolExecutor(guests) as pool:
        first = [pool.submit(one, f"guest {n + 1}", cases[n::guests]) for n in range(guests)]
    judges = [each.result() for each in first]
    held = {name for judge in judges for name in judge.held}
    if again := [case for case in cases if Path(case).name not in held]:
        print(f"once more, alone: {', '.join(Path(case).name for case in again)}", flush=True)
        judges.append(one("again", again))
    text, holds = summary(judges, mode, len(cases))
    print(text)
    if holds:
        shutil.rmtree(logs)
        return 0
    print(f"the proxies' logs are in {logs}", file=sys.stderr)
    return 1


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--mode", default="ipvs")
    parser.add_argument("--like", default="iptables")
    parser.add_argument("--guests", type=int, default=2)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.inside:
        return inside(given.mode, given.like, given.inside, given.cases)
    cases = [str(Path(case).resolve()) for case in given.cases] or sorted(map(str, folder.glob("cases/*.json")))
    if not cases:
        print(f"no conformance cases below {folder}", file=sys.stderr)
        return 1
    return outside(folder, given.mode, given.like, min(given.guests, len(cases)), cases)


if __name__ == "__main__":
    sys.exit(main())
