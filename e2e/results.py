"""The verdict of each test in a JSON file: one file for each program and mode, in `e2e/results`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

RESULTS: Final = Path(__file__).parent / "results"
SOME: Final = Path("/tmp/kpe2e-results")  # noqa: S108 - files to read
"""The folder of results of a run that chose some of the tests."""

GOOD: Final = ("passed", "skipped")


class Verdict(msgspec.Struct, omit_defaults=True, frozen=True):
    """A test's state in its last try (passed, failed, skipped, timedout), and the first line of a failure's reason."""

    state: str
    reason: str = ""
    seconds: int = 0
    tries: int = 1
    first: str = ""
    """Why the first try failed, where a later one, alone in the cluster, passed."""

    @property
    def good(self) -> bool:
        """Whether it passed, or skipped itself."""
        return self.state in GOOD

    def after(self, earlier: Verdict | None) -> Verdict:
        """Return this verdict as that of one more try."""
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
    """More than one when an interrupted run was resumed with another commit."""
    versions: dict[str, str]
    seconds: int
    focus: str
    """The regular expression that chose the tests; "" for all that a kube-proxy decides."""
    tests: dict[str, Verdict]
    pending: list[str]
    """Chosen tests without a verdict: the run was interrupted."""
    left_out: dict[str, str]
    """Tests that were not chosen, with the reason."""

    @property
    def failed(self) -> list[str]:
        """The names of tests that did not pass, skipped ones apart."""
        return [name for name, verdict in self.tests.items() if not verdict.good]

    def count(self, state: str) -> int:
        """Return how many tests ended in a state."""
        return sum(verdict.state == state for verdict in self.tests.values())


def verdict(report: Iterable[Mapping[str, Any]], seconds: float = 0) -> Verdict | None:
    """Read Ginkgo's JSON report of a run of one test; None when no test ran."""
    for suite in report:
        for spec in suite.get("SpecReports") or ():
            reason = _first(spec.get("Failure", {}).get("Message", ""))
            if spec["LeafNodeType"] == "It" and not (spec["State"] == "skipped" and not reason):
                return Verdict(spec["State"], reason, round(seconds))
            if spec["LeafNodeType"] != "It" and spec["State"] == "failed":
                return Verdict("failed", f"{spec['LeafNodeType']}: {reason}", round(seconds))
    return None


def names_in(report: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the full names of all tests in Ginkgo's JSON report, those of a dry run too."""
    return [
        " ".join([*(spec.get("ContainerHierarchyTexts") or ()), spec["LeafNodeText"]])
        for suite in report
        for spec in suite.get("SpecReports") or ()
        if spec["LeafNodeType"] == "It"
    ]


def _first(message: str) -> str:
    """Return the first line of a message without what differs in each run: names with random ends."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return re.sub(r"\b([a-z-]+)-[0-9a-z]{5}\b(?=[\s/\"]|$)", r"\1-*", line)[:160]


def file_of(proxy: str, mode: str, folder: Path = RESULTS) -> Path:
    """Return the path of the results of a program and mode."""
    return folder / f"{proxy}-{mode}.json"


def write(result: Result, folder: Path = RESULTS) -> Path:
    """Write a run's file, in place of the last one of this program and mode; return its path."""
    ordered = msgspec.structs.replace(result, tests=dict(sorted(result.tests.items())))
    return save(ordered, file_of(result.proxy, result.mode, folder))


def save(value: msgspec.Struct, path: Path) -> Path:
    """Write a value as JSON into a file, in one step; return its path."""
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
