"""What the demo holds against its expectations: checks, connections and how long changes took. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One expectation: what it is about, what should be, and what was."""

    name: str
    ok: bool
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, got {self.got}"


class Ledger:
    """Everything that the last line of the demo is about."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.connections = 0
        self.times: dict[str, list[float]] = {}

    def hold(self, name: str, ok: bool, expected: str, got: str) -> bool:
        """Note a check; returns `ok`."""
        self.checks.append(Check(name, ok, expected, got))
        return ok

    def took(self, change: str, seconds: float) -> None:
        """Note how long a kind of change took, from the API write to the first packet that met it."""
        self.times.setdefault(change, []).append(max(0.0, seconds))

    def median(self, change: str) -> float:
        """The p50 of a kind of change, in seconds; 0.0 when there was none."""
        return statistics.median(self.times.get(change) or [0.0])

    @property
    def wrong(self) -> list[Check]:
        """The checks that do not hold."""
        return [c for c in self.checks if not c.ok]
