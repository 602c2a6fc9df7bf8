"""Charts: their contents as plain values, and their drawing with matplotlib: panels of grouped bars with their spread.

matplotlib is loaded only to draw.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.figures import Spread

COLOURS = ("#1f6f8b", "#e0a030", "#7a9e4e", "#a04860", "#6b5b95", "#707070")
WIDTH = 11.0  # inches
PANEL_HEIGHT = 3.9


class Series(Struct, frozen=True):
    """The bars of one colour: a value per category, None for no bar. `pale`: a paler shade of the previous colour."""

    label: str
    values: Sequence[Spread | None]
    pale: bool = False


class Panel(Struct, frozen=True):
    """One pair of axes. `goal` is a horizontal line, with its text."""

    heading: str
    unit: str
    along: str
    categories: Sequence[str]
    series: Sequence[Series]
    logarithmic: bool = False
    goal: float | None = None
    goal_label: str = "goal"
    stacked: bool = False


class Chart(Struct, frozen=True):
    """The picture of one benchmark."""

    heading: str
    panels: Sequence[Panel]


def places(categories: int, series: int) -> list[list[float]]:
    """Return the positions of the bars of each series: categories are 1 apart, and the bars of a category fill 0.8 of
    this."""
    width = 0.8 / series
    return [[c - 0.4 + width * (s + 0.5) for c in range(categories)] for s in range(series)]


def label(value: float) -> str:
    """Return a bar's value with at most three significant digits, without an exponent."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}" if value < 1 else f"{value:.2f}".rstrip("0").rstrip(".")


def shades(series: Sequence[Series]) -> list[tuple[str, float]]:
    """Return the colour and the opacity of each series."""
    found: list[tuple[str, float]] = []
    used = 0
    for one in series:
        if one.pale and found:
            found.append((found[-1][0], 0.45))
        else:
            found.append((COLOURS[used % len(COLOURS)], 1.0))
            used += 1
    return found


def draw(chart: Chart, path: Path, footer: str) -> None:
    """Write the chart as SVG or PNG, depending on the path's suffix."""
    os.environ.setdefault("MPLCONFIGDIR", str(path.parent / ".matplotlib"))
    from matplotlib import rcParams  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    rcParams["svg.hashsalt"] = chart.heading  # the same figures give the same file
    count = len(chart.panels)
    figure = Figure(figsize=(WIDTH, PANEL_HEIGHT * count + 1.0), layout="constrained")
    figure.suptitle(chart.heading, fontsize=14, fontweight="bold")
    axes = figure.subplots(count, 1, squeeze=False)
    for panel, row in zip(chart.panels, axes, strict=True):
        _panel(row[0], panel)
    figure.supxlabel(f"Bars: median; whiskers: lowest and highest run. {footer}", fontsize=8, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.heading, fontsize=11, loc="left")
    axes.set_ylabel(panel.unit)
    axes.set_xlabel(panel.along)
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    if panel.stacked:
        _stacked(axes, panel)
    else:
        _grouped(axes, panel)
    if panel.goal is not None:
        axes.axhline(panel.goal, color="#c03030", linestyle="--", linewidth=1.2, label=panel.goal_label)
    axes.set_xticks(range(len(panel.categories)), panel.categories)
    axes.margins(y=0.18)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(panel.series) > 1 or panel.goal is not None:
        axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _grouped(axes: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    stands = places(len(panel.categories), len(panel.series))
    for series, at, (colour, opacity) in zip(panel.series, stands, shades(panel.series), strict=True):
        known = [(x, v) for x, v in zip(at, series.values, strict=True) if v is not None]
        if not known:
            continue
        xs, values = [x for x, _ in known], [v for _, v in known]
        medians = [v.median for v in values]
        errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
        axes.bar(xs, medians, width * 0.92, color=colour, alpha=opacity, label=series.label)
        axes.errorbar(xs, medians, yerr=errors, fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
        for x, value in zip(xs, values, strict=True):
            axes.annotate(
                label(value.median), (x, value.high), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8
            )


def _stacked(axes: Any, panel: Panel) -> None:
    bottoms = [0.0] * len(panel.categories)
    for number, series in enumerate(panel.series):
        values = [v.median if v is not None else 0.0 for v in series.values]
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(range(len(values)), values, 0.6, bottom=bottoms, color=colour, label=series.label)
        bottoms = [b + v for b, v in zip(bottoms, values, strict=True)]
