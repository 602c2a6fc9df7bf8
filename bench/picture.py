"""The chart of the README: what one change takes as the cluster grows, here, in the kernel, and in the Go kube-proxy.

`python -m bench picture` draws docs/pictures/change.svg from the last figures of `python -m bench change`. What the Go
kube-proxy took is not measured by that: each point says where it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.objects import parse_size
from bench.report import OUT, ROOT
from bench.worker import BenchmarkFailed

CASE = "endpoint replaced"
FIGURES = OUT / "change.json"
PLACE = ROOT / "docs/pictures/change.svg"
OURS, KERNEL, GO = "#1f6f8b", "#7a9e4e", "#a04860"


class Point(NamedTuple):
    """Seconds at so many Services: the median, the lowest and the highest that was seen."""

    services: int
    middle: float
    low: float
    high: float


MEASURED = (Point(1000, 0.193, 0.193, 0.193), Point(5000, 1.65, 1.4, 1.9), Point(10000, 4.35, 4.1, 4.6))
"""One endpoint changes, nftables mode of v1.36, ten endpoints a Service: on a machine of the same kind, not in the same
run. At 1,000 Services from the API write to the first packet, which has the way there in it."""
PUBLISHED = ((10000, 0.141, "141 ms, PR 126013 (2024)"), (44128, 60.0, "over a minute, PR 139878 (2026)"))
"""Services, seconds, and the pull request of Kubernetes that says so; machines, endpoints and versions are theirs."""


def ours(path: Path = FIGURES) -> tuple[list[Point], list[Point]]:
    """Return our points and those of the kernel alone. Raises BenchmarkFailed without figures of all sizes."""
    if not path.exists():
        raise BenchmarkFailed(f"no figures in {path}: run make bench WHAT=change first")
    here, kernel = [], []
    for row in json.loads(path.read_bytes())["rows"]:
        size, _, case = row["case"].partition(" ")
        if case == CASE:
            figures, services = row["figures"], parse_size(size).services
            here.append(_point(services, figures["p50"]))
            kernel.append(_point(services, figures["limit_p50"]))
    if len(here) < 3:
        raise BenchmarkFailed("the last figures are of one size only: run make bench WHAT=change, without --quick")
    return here, kernel


def _point(services: int, figure: dict[str, float]) -> Point:
    return Point(services, *(figure[name] / 1e6 for name in ("median", "low", "high")))


def words(seconds: float) -> str:
    """Return a time as people say it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds * 1e9:.0f} ns"


def draw(path: Path = PLACE, figures: Path = FIGURES) -> Path:
    """Draw the chart; return where it is. Raises BenchmarkFailed."""
    from matplotlib import rcParams  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    here, kernel = ours(figures)
    rcParams["svg.hashsalt"] = "change"  # the same figures give the same file
    figure = Figure(figsize=(8.6, 4.5), layout="constrained")
    axes = figure.subplots()
    _line(axes, MEASURED, GO, "Go kube-proxy v1.36, measured on such a machine")
    at, seconds, notes = zip(*PUBLISHED, strict=True)
    axes.plot(at, seconds, "D", mfc="white", mec=GO, ms=7, label="Go kube-proxy, published")
    for number, place in enumerate(zip(at, seconds, strict=True)):
        side = {"xytext": (9, -4)} if number == 0 else {"xytext": (-9, -4), "ha": "right"}
        axes.annotate(notes[number], place, textcoords="offset points", fontsize=9, color=GO, **side)
    _line(axes, here, OURS, "this kube-proxy")
    _line(axes, kernel, KERNEL, "the kernel's own time: the limit", above=False)
    _axes(axes)
    figure.supxlabel(_footer(figures), fontsize=8, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return path


def _axes(axes: Any) -> None:
    axes.set(xscale="log", yscale="log", ylim=(1e-6, 300), xlim=(700, 90000))
    axes.set_xticks([1000, 5000, 10000, 44000], ["1,000", "5,000", "10,000", "44,000"])
    axes.set_xticks([], minor=True)
    axes.set_yticks([10.0**power for power in range(-6, 3)], list(map(words, (10.0**power for power in range(-6, 3)))))
    axes.set_yticks([], minor=True)
    axes.set_xlabel("Services in the cluster")
    axes.set_title("One endpoint changes: how long until the kernel has it", loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(0.0, 0.44))


def _footer(figures: Path) -> str:
    about = json.loads(figures.read_bytes())["circumstances"]
    machine = f"{about['machine']}, {about['cpus']} CPUs, Linux {about['kernel'].partition('-')[0]}"
    return f"Medians of `{about['command']}`, ten endpoints a Service; {machine}, {about['started'][:10]}"


def _line(axes: Any, points: Sequence[Point], colour: str, label: str, *, above: bool = True) -> None:
    at, middle = [point.services for point in points], [point.middle for point in points]
    spread = [[point.middle - point.low for point in points], [point.high - point.middle for point in points]]
    axes.errorbar(at, middle, yerr=spread, color=colour, marker="o", ms=6, lw=2, capsize=3, label=label)
    offset = (0, 8) if above else (0, -15)
    style = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "color": colour}
    for x, value in zip(at, middle, strict=True):
        axes.annotate(words(value), (x, value), xytext=offset, **style)
