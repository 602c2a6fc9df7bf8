"""Tests the proxy with the kernels, nft, iptables and Python of other Debians: `make matrix`, docs/support.md.

    python -m support.guest.matrix run [ROW ...] [--check NAME ...]     as root; a row takes an hour or more
    python -m support.guest.matrix page                                 renders the results into docs/support.md again

A row is a Debian in a folder (tools/system) and a kernel: one of Debian (tools/guest-kernel) in an emulated machine, or
this machine's. A check is a command in that Debian under that kernel; the unit tests always run under this machine's
kernel. matrix.json in the same folder contains the results; it is written after each check.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from support.guest.differences import Judge, summary
from support.guest.guest import Done, GuestError
from support.guest.machine import System, run_in_machine
from support.places import ROOT

RESULTS: Final = Path(__file__).with_name("matrix.json")
PAGE: Final = ROOT / "docs/support.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
SYSTEMS: Final = Path("/var/tmp/kube-proxy-matrix")
PLACE: Final = Path("/repository")
CASES: Final = ("0001", "0005", "0009", "0013")
SECONDS: Final = 3600.0
"""Longest duration of one check in an emulated machine."""
SLOW: Final = ("env", "PATIENCE=2.5", "JOBS=1", "KUBEPROXY_GUEST=1")
"""The emulated machine is ten times slower: its probes wait longer for an answer, one case runs at a time."""
HERE: Final = "this-machine"
"""The kernel of a row without an emulated machine: for nft, iptables and Python of the row's Debian."""
LACKING: Final = ("ipvs", "fast forwarding")
"""Checks whose requirements this machine's kernel may lack."""
_ENTER: Final = """
cd "$1"
mount --bind . . && cd "$1"
mount --bind /proc proc; mount --rbind /dev dev; mount -t sysfs sys sys; mount -t tmpfs run run; mount -t tmpfs tmp tmp
shift
ip link set lo up
exec chroot . env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 JOBS=1 \\
    sh -euc 'cd "$0"; exec "$@"' "$@"
"""


class Row(NamedTuple):
    """A Debian, and the release of its kernel, or HERE."""

    suite: str
    kernel: str


ROWS: Final = (
    Row("trixie", HERE),
    Row("forky", HERE),
    Row("bookworm", "bookworm"),
    Row("bookworm", "bookworm-backports"),
    Row("trixie", "trixie"),
    Row("forky", "forky"),
)
_VERSIONS: Final = "nft --version; iptables --version; /venv/bin/python -V"
_PYTEST: Final = ("-m", "pytest", "-pno:cacheprovider", "-pno:randomly", "-pno:cov", "-pno:xdist")
_SLOWLY: Final = ("--color=no", "--timeout=1200")


def _conformance(kind: str) -> tuple[str, ...]:
    return ("tools/conformance", "tests/conformance", kind, *(f"{case}.json" for case in CASES))


def _prove(*words: str) -> tuple[str, ...]:
    return ("-m", "prove", "--seed", "1", "--mode", "nftables", *words)


_INSIDE: Final = ("-m", "support.guest.conformance", "--inside", "/tmp", "tests/conformance")
CHECKS: Final[Mapping[str, tuple[str, ...]]] = {
    "nftables": _conformance("nftables"),
    "iptables-nft": _conformance("iptables-nft"),
    "iptables-legacy": _conformance("iptables-legacy"),
    "userspace": _conformance("userspace"),
    "ipvs": (*_INSIDE, *(f"tests/conformance/cases/{case}.json" for case in CASES)),
    "rules": (*_PYTEST, *_SLOWLY, "tests/kernel/nftables/test_rules_as_values.py"),
    "crashes": _prove("--crashes", "3"),
    "histories": _prove("--minutes", "1", "--worlds", "1"),
    "fast forwarding": (*_PYTEST, *_SLOWLY, "--noconftest", "tests/guest/machine"),
}
"""The arguments of Python, by the name of a check."""
UNIT: Final = "unit tests"


class Verdict(msgspec.Struct, frozen=True):
    """A check's verdict, the last line of its output, and its duration in seconds."""

    holds: bool
    line: str
    seconds: int


class Result(msgspec.Struct):
    """A row's versions, the project's commit and the day of each last run, and the verdicts by check."""

    suite: str
    kernel: str
    versions: list[str]
    commit: str
    date: str
    checks: dict[str, Verdict]


def read() -> list[Result]:
    """Return the recorded results."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[Result]) if RESULTS.exists() else []


def run(rows: Sequence[Row], checks: Sequence[str]) -> int:
    """Run checks of rows, record each result, and return the exit code: 1 if a check fails."""
    wrong = 0
    for row in rows:
        folder = SYSTEMS / row.suite
        SYSTEMS.mkdir(mode=0o700, exist_ok=True)
        subprocess.run([ROOT / "tools/system", row.suite, folder], check=True)
        system = System(folder, folder / "kernel" / row.kernel, PLACE)
        kernel = platform.release().partition("-")[0]
        if row.kernel != HERE:
            subprocess.run([ROOT / "tools/guest-kernel", folder, row.kernel], check=True)
            kernel = (system.kernel / "stamp").read_text()
        shown = subprocess.run(["chroot", folder, "sh", "-c", _VERSIONS], stdout=subprocess.PIPE, text=True, check=True)
        versions = [kernel, *shown.stdout.splitlines()]
        for name in (each for each in checks if row.kernel != HERE or each not in LACKING):
            began = time.monotonic()
            holds, printed = _unit(row.suite, folder) if name == UNIT else _check(name, row, system)
            verdict = Verdict(holds, _last(printed), round(time.monotonic() - began))
            _record(row, versions, name, verdict)
            print(f"{row.suite}, kernel of {row.kernel}: {name}: {verdict.line} ({verdict.seconds} s)", flush=True)
            if not holds:
                wrong = 1
                print(printed, flush=True)
    return wrong


def _check(name: str, row: Row, system: System) -> tuple[bool, str]:
    """Run a check under the row's kernel; return whether it holds, and its output."""
    command = ("/venv/bin/python", *CHECKS[name])
    try:
        if row.kernel == HERE:
            done = _run_here(command, system)
        else:
            done = run_in_machine([*SLOW, *command], SECONDS, memory=2048, system=system)
    except GuestError as error:
        return False, str(error)
    if name != "ipvs":
        return done.status == 0, done.output
    judge = Judge(ROOT / "tests/conformance/cases")
    printed = "".join(judge.read(line) for line in done.output.splitlines())
    text, holds = summary([judge], name, len(CASES))
    return holds, f"{printed}{text.partition(',')[0]}"


def _run_here(command: Sequence[str], system: System) -> Done:
    """Run a command in a Debian's folder, with separate mounts and a separate network."""
    entered = ["unshare", "--mount", "--net", "sh", "-euc", _ENTER, "sh", str(system.root), str(system.place), *command]
    done = subprocess.run(entered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return Done(done.returncode, done.stdout)


@cache
def _unit(suite: str, folder: Path) -> tuple[bool, str]:
    """Run the unit tests under this machine's kernel."""
    command = [str(ROOT / "tools/test-python"), suite, str(folder), "-m", "not slow"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode == 0, done.stdout


def _last(printed: str) -> str:
    """Return the last line with letters, without pytest's frame."""
    lines = [line.strip("= \t\r") for line in printed.splitlines() if re.search("[a-z]", line)]
    return re.sub(r" in [\d.]+s.*|, \d+ s$", "", lines[-1]) if lines else "no output"


def _record(row: Row, versions: list[str], name: str, verdict: Verdict) -> None:
    results = {(each.suite, each.kernel): each for each in read()}
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    checks = results[row].checks if row in results else {}
    results[row] = Result(*row, versions, commit, time.strftime("%Y-%m-%d"), {**checks, name: verdict})
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(list(results.values()))) + b"\n")
    publish()


def publish() -> None:
    """Write the tables into docs/support.md; a unit test compares both, also in the last check of a row."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render(read())}\n{END}{rest.partition(END)[2]}")


def render(results: Sequence[Result]) -> str:
    """Return the tables: versions, then a line for each check."""
    if not results:
        return "No run is recorded."
    lines = ["| Debian | kernel | nft | iptables | Python | date | commit |", "|---|---|---|---|---|---|---|"]
    for each in results:
        kernel, *programs = each.versions
        found = [re.search(r"\d+(?:\.\d+)+", line) for line in programs]
        words = [match[0] if match else "?" for match in found]
        lines.append(f"| {each.suite} | {kernel} | {' | '.join(words)} | {each.date} | {each.commit} |")
    titles = [f"{each.suite}, {each.versions[0].partition('-')[0].partition('+')[0]}" for each in results]
    lines += ["", f"| check | {' | '.join(titles)} |", "|---" * (len(results) + 1) + "|"]
    for name in (*CHECKS, UNIT):
        cells = [_cell(each.checks.get(name)) for each in results]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not run"
    return verdict.line if verdict.holds else f"**fails**: {verdict.line}"


def main() -> int:
    """Run the command line."""
    names = {f"{row.suite}/{row.kernel}": row for row in ROWS}
    parser = argparse.ArgumentParser(prog="python -m support.guest.matrix", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run the checks")
    runs.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(names))
    runs.add_argument("--check", action="append", choices=(*CHECKS, UNIT), help="only these")
    commands.add_parser("page", help="render the results into docs/support.md")
    given = parser.parse_args()
    if given.command == "run":
        if unknown := set(given.rows) - names.keys():
            parser.error(f"no row {', '.join(sorted(unknown))}; rows are {', '.join(names)}")
        return run([names[name] for name in given.rows or names], given.check or (*CHECKS, UNIT))
    publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
