"""Records the demo's results: checks, connections and durations of changes. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its subject, the expected and the actual result."""

    name: str
    ok: bool
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, got {self.got}"


class Ledger:
    """All results that the last line of the demo summarises."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.connections = 0
        self.times: dict[str, list[float]] = {}

    def hold(self, name: str, ok: bool, expected: str, got: str) -> bool:
        """Record a check; return `ok`."""
        self.checks.append(Check(name, ok, expected, got))
        return ok

    def took(self, change: str, seconds: float) -> None:
        """Record the duration of a kind of change, from the API write to the first packet that the change affects."""
        self.times.setdefault(change, []).append(max(0.0, seconds))

    def median(self, change: str) -> float:
        """Return the median duration of a kind of change in seconds, or 0.0 without measurements."""
        return statistics.median(self.times.get(change) or [0.0])

    @property
    def wrong(self) -> list[Check]:
        """Return the failed checks."""
        return [c for c in self.checks if not c.ok]
