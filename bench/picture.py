"""The charts of the README: the time of one change, and of all changes at once, by the size of the cluster; of this
proxy, of the kernel alone, and of the Go kube-proxy.

`python -m bench picture` draws them from the last figures of `python -m bench change sync`. The Go kube-proxy's times
are not measured in that run: each point names its source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.objects import parse_size
from bench.report import OUT, ROOT
from bench.worker import BenchmarkFailed

FOLDER = ROOT / "docs/pictures"
OURS, KERNEL, GO = "#1f6f8b", "#7a9e4e", "#a04860"


class Point(NamedTuple):
    """Seconds at this number of Services: the median, the lowest and the highest value."""

    services: int
    middle: float
    low: float
    high: float


class Subject(NamedTuple):
    """The contents of a chart: a benchmark, its case and figures, their unit in seconds; and the published figures of
    the Go kube-proxy.

    `case` is the part of a case after its size, '' for nothing. `published` are Services, seconds and source. `span` is
    the lowest and the highest second of the axis.
    """

    benchmark: str
    title: str
    case: str
    ours: str
    limit: str
    unit: float
    measured: Sequence[Point]
    published: Sequence[tuple[int, float, str]]
    span: tuple[float, float]


CHANGE = Subject(
    "change",
    "One endpoint changes: how long until the kernel has it",
    "endpoint replaced",
    "p50",
    "limit_p50",
    1e-6,
    # Nftables mode of v1.36, ten endpoints per Service: on a machine of the same kind, not in the same run. At 1,000
    # Services the time is from the API write to the first packet, and includes the network.
    (Point(1000, 0.193, 0.193, 0.193), Point(5000, 1.65, 1.4, 1.9), Point(10000, 4.35, 4.1, 4.6)),
    ((10000, 0.141, "141 ms, PR 126013 (2024)"), (44128, 60.0, "over a minute, PR 139878 (2026)")),
    (1e-6, 300),
)
SYNC = Subject(
    "sync",
    "Everything at once: how long until the kernel has it",
    "",
    "ours",
    "limit",
    1e-3,
    (Point(10000, 16.2, 16.2, 16.2),),
    ((44128, 1003.0, "16 min 43 s, issue 139513 (2026)"),),
    (3e-4, 3000),
)


def points(subject: Subject, path: Path) -> tuple[list[Point], list[Point]]:
    """Return our points and those of the kernel alone. Raises BenchmarkFailed without figures of several sizes."""
    if not path.exists():
        raise BenchmarkFailed(f"no figures in {path}: run make bench WHAT={subject.benchmark} first")
    here, kernel = [], []
    for row in json.loads(path.read_bytes())["rows"]:
        size, _, case = row["case"].partition(" ")
        if case == subject.case and size.endswith("x10"):
            figures, services = row["figures"], parse_size(size).services
            here.append(_point(services, figures[subject.ours], subject.unit))
            kernel.append(_point(services, figures[subject.limit], subject.unit))
    if len(here) < 3:
        what = f"run make bench WHAT={subject.benchmark}, without --quick"
        raise BenchmarkFailed(f"the last figures have too few sizes: {what}")
    return here, kernel


def _point(services: int, figure: dict[str, float], unit: float) -> Point:
    return Point(services, *(round(figure[name] * unit, 9) for name in ("median", "low", "high")))


def words(seconds: float) -> str:
    """Return a time in a readable unit."""
    if seconds >= 60:
        minutes = seconds / 60
        return f"{minutes:.0f} min" if minutes >= 9.95 else f"{minutes:.1f}".removesuffix(".0") + " min"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds * 1e9:.0f} ns"


def draw(subject: Subject, folder: Path = FOLDER, figures: Path = OUT) -> Path:
    """Draw a chart from a folder of figures; return its path. Raises BenchmarkFailed."""
    from matplotlib import rcParams  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    source = figures / f"{subject.benchmark}.json"
    here, kernel = points(subject, source)
    rcParams["svg.hashsalt"] = subject.benchmark  # the same figures give the same file
    figure = Figure(figsize=(8.6, 4.5), layout="constrained")
    axes = figure.subplots()
    _line(axes, subject.measured, GO, "Go kube-proxy v1.36, earlier, on an AMD EPYC")
    at, seconds, notes = zip(*subject.published, strict=True)
    axes.plot(at, seconds, "D", mfc="white", mec=GO, ms=7, label="Go kube-proxy, published")
    for note, place in zip(notes, zip(at, seconds, strict=True), strict=True):
        side = {"xytext": (9, -4)} if place[0] < 30_000 else {"xytext": (-9, -4), "ha": "right"}
        axes.annotate(note, place, textcoords="offset points", fontsize=9, color=GO, **side)
    _line(axes, here, OURS, "this kube-proxy")
    _line(axes, kernel, KERNEL, "the kernel's own time: the limit", above=False)
    _axes(axes, subject)
    figure.supxlabel(_footer(source), fontsize=8, color="#555555")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{subject.benchmark}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def _axes(axes: Any, subject: Subject) -> None:
    low, high = subject.span
    axes.set(xscale="log", yscale="log", ylim=subject.span, xlim=(70, 150_000))
    sizes = [100, 1000, 10_000, 44_000, 100_000]
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xticks([], minor=True)
    ticks = [second for power in range(-6, 4) if low <= (second := 10.0**power) <= high]
    axes.set_yticks(ticks, [f"{tick:,.0f} s" if tick > 1 else words(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("Services in the cluster")
    axes.set_title(subject.title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False, loc="upper left")


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
