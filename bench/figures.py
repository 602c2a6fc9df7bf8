"""Medians, spreads and percentiles. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct


class Spread(Struct, frozen=True):
    """The median, minimum and maximum of several runs, and the number of runs."""

    median: float
    low: float
    high: float
    runs: int

    def scaled(self, factor: float) -> Spread:
        """Return the spread in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.runs)


def median(values: Iterable[float]) -> float:
    """Return the median. Raises ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to take a median of")
    middle = len(ordered) // 2
    return float(ordered[middle]) if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value that `percent` of all values do not exceed (nearest rank). Raises ValueError for no values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to take a percentile of")
    rank = -(-len(ordered) * percent // 100)
    return float(ordered[max(0, min(len(ordered), int(rank)) - 1)])


def spread(values: Iterable[float]) -> Spread:
    """Return median, minimum and maximum of the runs. Raises ValueError for no values."""
    found = list(values)
    return Spread(median(found), float(min(found)), float(max(found)), len(found))


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return the spread of every figure that is in all runs."""
    names = [name for name in runs[0] if all(name in run for run in runs)] if runs else []
    return {name: spread(run[name] for run in runs) for name in names}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratios of our figures to the peer's, run by run, because influences on both figures of a run cancel
    out."""
    return spread(a / b for a, b in zip(ours, theirs, strict=True))


def summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return p50, p99 and the maximum, each multiplied by `scale`."""
    measures: dict[str, Callable[[Sequence[float]], float]] = {
        "p50": median,
        "p99": lambda v: percentile(v, 99),
        "max": max,
    }
    return {name: measure(values) * scale for name, measure in measures.items()}
