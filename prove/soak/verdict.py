"""Checks that the samples do not grow: compares the second sixth of a soak with the last sixth. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from bench.figures import median, percentile

ALLOWED: Final = 0.05
"""Permitted growth from the second sixth to the last one; the first sixth of an hour is for warming up."""

SIXTHS: Final = 6


def low(values: Sequence[float]) -> float:
    """Return the lowest tenth of the values: other work of the machine only increases values of this kind."""
    return percentile(values, 10)


_THREADS: Final = 3 + min(32, (os.cpu_count() or 1) + 4)
"""Maximum number of threads: the main thread, a relay, a thread for commits, and the event loop's pool."""


class Kind(NamedTuple):
    """A figure that must stay constant: its unit, the value that represents a sixth, and whether other work increases
    it.

    It may grow up to `bound`.
    """

    unit: str
    of: Callable[[Sequence[float]], float]
    shared: bool = False
    bound: float = 0.0


KINDS: Final[Mapping[str, Kind]] = {
    "rss": Kind("MB", median),
    "descriptors": Kind("", median),
    "threads": Kind("", median, bound=_THREADS),
    "children": Kind("", median),
    "parts": Kind("", median),
    "slab": Kind("MB", low, shared=True),
    "lag": Kind("ms", low, shared=True),
    "landing": Kind("ms", low, shared=True),
    "cpu": Kind("ms a change", low, shared=True),
}
"""`parts` are elements or rules of the tables; `lag` is from the proxy's metric, `landing` from packets."""


class Line(NamedTuple):
    """A figure at the beginning and at the end of a soak."""

    name: str
    unit: str
    second: float
    last: float
    judged: bool = True
    bound: float = 0.0

    @property
    def growth(self) -> float:
        """Return the fraction by which it grew."""
        return self.last / self.second - 1 if self.second else 0.0

    @property
    def flat(self) -> bool:
        """Return whether it did not grow, or is not checked."""
        return not self.judged or self.last <= max(self.bound, self.second * (1 + ALLOWED))

    def __str__(self) -> str:
        word = ("ok  " if self.flat else "FAIL") if self.judged else "    "
        return f"{word} {self.name}: {self.second:.2f} to {self.last:.2f} {self.unit} ({self.growth:+.1%})"


def lines(samples: Sequence[Mapping[str, float]], *, beside: bool) -> list[Line]:
    """Return the verdict on each figure of the samples; with other work on the machine, figures that it increases are
    not judged.

    Raises ValueError for fewer than six samples.
    """
    if len(samples) < SIXTHS:
        raise ValueError(f"{len(samples)} samples are too few to judge: {SIXTHS} at least")
    share = len(samples) // SIXTHS
    second, last = samples[share : 2 * share], samples[-share:]
    found = []
    for name, kind in KINDS.items():
        before, after = ([each[name] for each in part if name in each] for part in (second, last))
        if before and after:
            judged = not (beside and kind.shared)
            found.append(Line(name, kind.unit, kind.of(before), kind.of(after), judged, kind.bound))
    return found
