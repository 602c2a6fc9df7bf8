"""Stores the verdict of each test in a JSON file per program and mode, in `e2e/results`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

RESULTS: Final = Path(__file__).parent / "results"
SOME: Final = Path("/tmp/kpe2e-results")  # noqa: S108 - files to read
"""The folder for the results of a run that selected some of the tests."""

GOOD: Final = ("passed", "skipped")


class Verdict(msgspec.Struct, omit_defaults=True, frozen=True):
    """A test's state in its last attempt (passed, failed, skipped, timedout), and the first line of the failure."""

    state: str
    reason: str = ""
    seconds: int = 0
    tries: int = 1
    first: str = ""
    """The reason why the first attempt failed, if a later one, alone in the cluster, passed."""

    @property
    def good(self) -> bool:
        """Return whether the test passed, or skipped itself."""
        return self.state in GOOD

    def after(self, earlier: Verdict | None) -> Verdict:
        """Return this verdict as that of one more attempt."""
        if earlier is None:
            return self
        first = earlier.first or (earlier.reason if self.good else "")
        return Verdict(self.state, self.reason, self.seconds, earlier.tries + 1, first)


class Result(msgspec.Struct):
    """A run: program (ours or go), mode, days, the project's commits, versions, duration, and each test's verdict."""

    proxy: str
    mode: str
    dates: list[str]
    commits: list[str]
    """Several commits if an interrupted run was resumed with another commit."""
    versions: dict[str, str]
    seconds: int
    focus: str
    """The regular expression that selected the tests; "" for all that a kube-proxy decides."""
    tests: dict[str, Verdict]
    pending: list[str]
    """Selected tests without a verdict, because the run was interrupted."""
    left_out: dict[str, str]
    """Tests that were not selected, with the reason."""

    @property
    def failed(self) -> list[str]:
        """Return the names of tests that neither passed nor were skipped."""
        return [name for name, verdict in self.tests.items() if not verdict.good]

    def count(self, state: str) -> int:
        """Return the number of tests that ended in a state."""
        return sum(verdict.state == state for verdict in self.tests.values())


def verdict(report: Iterable[Mapping[str, Any]], seconds: float = 0) -> Verdict | None:
    """Read Ginkgo's JSON report of a run of one test; None if no test ran."""
    for suite in report:
        for spec in suite.get("SpecReports") or ():
            reason = _first(spec.get("Failure", {}).get("Message", ""))
            if spec["LeafNodeType"] == "It" and not (spec["State"] == "skipped" and not reason):
                return Verdict(spec["State"], reason, round(seconds))
            if spec["LeafNodeType"] != "It" and spec["State"] == "failed":
                return Verdict("failed", f"{spec['LeafNodeType']}: {reason}", round(seconds))
    return None


def names_in(report: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the full names of all tests in Ginkgo's JSON report, including those of a dry run."""
    return [
        " ".join([*(spec.get("ContainerHierarchyTexts") or ()), spec["LeafNodeText"]])
        for suite in report
        for spec in suite.get("SpecReports") or ()
        if spec["LeafNodeType"] == "It"
    ]


def _first(message: str) -> str:
    """Return the first line of a message without the parts that differ in each run: names with random ends."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return re.sub(r"\b([a-z-]+)-[0-9a-z]{5}\b(?=[\s/\"]|$)", r"\1-*", line)[:160]


def file_of(proxy: str, mode: str, folder: Path = RESULTS) -> Path:
    """Return the path of the results of a program and mode."""
    return folder / f"{proxy}-{mode}.json"


def write(result: Result, folder: Path = RESULTS) -> Path:
    """Write a run's file, which replaces the previous one of this program and mode; return its path."""
    ordered = msgspec.structs.replace(result, tests=dict(sorted(result.tests.items())))
    return save(ordered, file_of(result.proxy, result.mode, folder))


def save(value: msgspec.Struct, path: Path) -> Path:
    """Write a value as JSON into a file, atomically; return the file's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    part.replace(path)
    return path


def read_file(path: Path) -> Result:
    """Read the results of one program and mode."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


def read(folder: Path = RESULTS) -> list[Result]:
    """Read all results of a folder."""
    return [read_file(path) for path in sorted(folder.glob("*.json"))]
