"""What became of each test in a run, as a JSON file: one for each program and mode, in `e2e/results`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

RESULTS: Final = Path(__file__).parent / "results"


class Verdict(msgspec.Struct, omit_defaults=True, frozen=True):
    """A test's state (passed, failed, skipped or another word of Ginkgo), with the first line of a failure's reason."""

    state: str
    reason: str = ""


class Result(msgspec.Struct, frozen=True):
    """A run: program (ours or go), mode, day, the project's commit, versions, duration, and each test's verdict."""

    proxy: str
    mode: str
    date: str
    commit: str
    versions: dict[str, str]
    seconds: int
    part: bool
    """Whether a FOCUS chose the tests."""
    tests: dict[str, Verdict]

    @property
    def failed(self) -> list[str]:
        """The names of tests that did not pass, skipped ones apart."""
        return [name for name, verdict in self.tests.items() if verdict.state not in ("passed", "skipped")]


def verdicts(report: Iterable[Mapping[str, Any]]) -> dict[str, Verdict]:
    """Read Ginkgo's JSON report: tests that ran, or that skipped themselves with a reason."""
    found = {}
    for suite in report:
        for spec in suite.get("SpecReports") or ():
            reason = _first(spec.get("Failure", {}).get("Message", ""))
            if (
                spec["LeafNodeType"] != "It"
                or spec["State"] == "pending"
                or (spec["State"] == "skipped" and not reason)
            ):
                continue
            name = " ".join([*(spec.get("ContainerHierarchyTexts") or ()), spec["LeafNodeText"]])
            found[name] = Verdict(spec["State"], reason)
    return found


def _first(message: str) -> str:
    """Return the first line of a message without what differs in each run: names with random ends."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return re.sub(r"\b([a-z-]+)-[0-9a-z]{5}\b(?=[\s/\"]|$)", r"\1-*", line)[:160]


def write(result: Result, folder: Path = RESULTS) -> Path:
    """Write a run's file, in place of the last one of this program and mode; return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{result.proxy}-{result.mode}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def read(folder: Path = RESULTS) -> list[Result]:
    """Read all runs of a folder."""
    return [msgspec.json.decode(path.read_bytes(), type=Result) for path in sorted(folder.glob("*.json"))]
