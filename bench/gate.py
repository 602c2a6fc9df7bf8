"""The regression gate compares ratios of a quick run with the committed bounds in bounds.toml: `python -m bench gate`.

Ratios, not seconds: a slower machine slows the limit as well. The lowest ratio of several runs counts, because other
work of the machine only increases it. A benchmark with a figure over its bound is measured again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from bench import change, firstpacket, hostile, iptables, restart, sync
from bench.figures import Spread
from bench.report import Report, Row, show
from bench.runs import Run

BOUNDS = Path(__file__).with_name("bounds.toml")
ATTEMPTS = 3
"""Maximum number of measurements of a benchmark: a program that has become slower is slower in all of them."""

Bounds = Mapping[str, Mapping[str, Mapping[str, float]]]
"""The bounds: the highest accepted value, by benchmark, case and figure."""

_MEASURES: Mapping[str, Callable[[Run], Report]] = {
    "sync": sync.run,
    "change": change.run,
    "iptables": iptables.run,
    "restart": restart.run,
    "firstpacket": firstpacket.run,
    "hostile": hostile.run,
}


class Verdict(NamedTuple):
    """One bound and the measured value, or None without a measurement."""

    figure: str
    bound: float
    seen: float | None

    @property
    def holds(self) -> bool:
        """Return whether the figure is within its bound."""
        return self.seen is not None and self.seen <= self.bound

    def __str__(self) -> str:
        seen = "not measured" if self.seen is None else f"seen {self.seen:.2f}"
        return f"{'ok  ' if self.holds else 'FAIL'} {self.figure}: bound {self.bound:.2f}, {seen}"


def load(path: Path = BOUNDS) -> Bounds:
    """Return the bounds. Raises ValueError if the file has another structure."""
    found = tomllib.loads(path.read_text())
    for benchmark, cases in found.items():
        if benchmark not in _MEASURES:
            raise ValueError(f"{path.name}: {benchmark} is no benchmark of the gate ({', '.join(_MEASURES)})")
        for case, figures in cases.items():
            for figure, bound in figures.items():
                if not isinstance(bound, int | float) or bound < 0:
                    raise ValueError(f"{path.name}: {benchmark}.{case}.{figure} must be a number, 0 or above")
    return found


def judge(benchmark: str, cases: Mapping[str, Mapping[str, float]], rows: Sequence[Row]) -> list[Verdict]:
    """Compare the rows of one benchmark with its bounds; a case or a figure that is missing fails."""
    figures = {row.case: row.figures for row in rows}
    verdicts = []
    for case, bounds in cases.items():
        for figure, bound in bounds.items():
            seen = figures.get(case, {}).get(figure)
            value = seen.low if isinstance(seen, Spread) else None
            verdicts.append(Verdict(f"{benchmark} {case} {figure}", bound, value))
    return verdicts


def decide(
    benchmark: str, cases: Mapping[str, Mapping[str, float]], measure: Callable[[], Sequence[Row]]
) -> list[Verdict]:
    """Measure one benchmark until all bounds hold, at most ATTEMPTS times; return the lowest values."""
    lowest: list[Verdict] = []
    for _ in range(ATTEMPTS):
        verdicts = judge(benchmark, cases, measure())
        lowest = [min(pair, key=_seen) for pair in zip(lowest or verdicts, verdicts, strict=True)]
        if all(verdict.holds for verdict in lowest):
            break
    return lowest


def _seen(verdict: Verdict) -> float:
    return float("inf") if verdict.seen is None else verdict.seen


def check(run: Run, out: Console) -> int:
    """Measure, print the verdicts, return the exit code: 0 if every bound holds, else 1."""
    verdicts: list[Verdict] = []
    for benchmark, cases in load().items():

        def measure(benchmark: str = benchmark) -> Sequence[Row]:
            report = _MEASURES[benchmark](run)
            show(out, report)
            return report.rows

        verdicts += decide(benchmark, cases, measure)
    out.print()
    for verdict in verdicts:
        out.print(str(verdict), style="" if verdict.holds else "red", highlight=False)
    failed = sum(not verdict.holds for verdict in verdicts)
    if failed:
        out.print(f"{failed} of {len(verdicts)} figures are over their bound: see docs/performance.md, The gate.")
        return 1
    out.print(f"All {len(verdicts)} figures are within their bounds.")
    return 0
