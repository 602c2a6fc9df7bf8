"""The results of a benchmark: rows of figures, and their output as table, JSON file and chart.

This module measures nothing. Figures are Spreads in the unit that their column names.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

from bench.charts import Chart, Panel, Series
from bench.figures import Spread

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"

Value = Spread | float | int | str | bool | None


class Column(NamedTuple):
    """A column of the table: its heading (with the unit), its figure, and the digits after the point."""

    heading: str
    figure: str
    digits: int = 1
    spread: bool = True


class Row(Struct, frozen=True):
    """The figures of one case."""

    case: str
    figures: dict[str, Value]


class Report(Struct, frozen=True):
    """The results of one benchmark. `notes` are sentences that a reader of the figures needs."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    chart: Chart
    notes: Sequence[str] = ()


def series(rows: Sequence[Row], label: str, figure: str, *, pale: bool = False) -> Series:
    """Return the bars of one figure of the rows, in one colour; a row without the figure has no bar."""
    return Series(label, [v if isinstance(v := row.figures.get(figure), Spread) else None for row in rows], pale)


def panel_by_kind(heading: str, unit: str, axis: str, rows: Sequence[Row], labels: Mapping[str, str]) -> Panel:
    """Return a panel with a colour for each figure of the rows, given with its label; `axis` describes the cases."""
    each = [series(rows, label, figure) for figure, label in labels.items()]
    return Panel(heading, unit, axis, [row.case for row in rows], each)


class Circumstances(Struct, frozen=True):
    """The place, time and conditions of the measurement."""

    started: str
    seconds: float
    command: str
    quick: bool
    revision: str
    machine: str
    cpus: int
    memory_gb: float
    kernel: str
    python: str
    nft: str


def circumstances(started: float, seconds: float, quick: bool) -> Circumstances:
    """Describe this machine and this run; times in seconds of the epoch."""
    return Circumstances(
        started=dt.datetime.fromtimestamp(started, dt.UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        command=" ".join(["python", "-m", _program(), *sys.argv[1:]]),
        quick=quick,
        revision=_said("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
        machine=_processor(),
        cpus=len(os.sched_getaffinity(0)),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        nft=_said("nft", "--version"),
    )


def _program() -> str:
    """Return the name of the running module or package."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec is not None else "bench"


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(report: Report, about: Circumstances) -> Path:
    """Write the figures to bench/out/NAME.json; return the path."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{report.name}.json"
    found = {
        "benchmark": report.name,
        "title": report.title,
        "circumstances": about,
        "columns": report.columns,
        "rows": report.rows,
        "notes": list(report.notes),
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return path


class Written(Struct, frozen=True):
    """A file of figures, loaded again."""

    title: str
    circumstances: Circumstances
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str]


def markdown() -> str:
    """Return the figures of the last run of each benchmark as Markdown tables."""
    parts = []
    for path in sorted(OUT.glob("*.json")):
        found = msgspec.json.decode(path.read_bytes(), type=Written)
        lines = [f"### {found.title}", "", _line(["", *(column.heading for column in found.columns)])]
        lines.append("|---" + "|---:" * len(found.columns) + "|")
        lines += (
            _line([row.case, *(shown(row.figures.get(c.figure), c.digits, c.spread) for c in found.columns)])
            for row in found.rows
        )
        about = found.circumstances
        where = f"{about.machine}, {about.cpus} CPUs, Linux {about.kernel}, Python {about.python}, {about.revision}"
        lines += ["", *found.notes, f"`{about.command}` ran on {where}."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(report: Report) -> Table:
    """Return the figures as a table."""
    found = Table(title=report.title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    found.add_column("case", no_wrap=True)
    for column in report.columns:
        found.add_column(column.heading, justify="right", no_wrap=True)
    for row in report.rows:
        found.add_row(row.case, *(shown(row.figures.get(c.figure), c.digits, c.spread) for c in report.columns))
    return found


def shown(value: Value, digits: int, with_spread: bool = True) -> str:
    """Return a figure as text: the median, and in parentheses the lowest and the highest run."""
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    if not isinstance(value, Spread):
        return f"{value:,.{digits}f}"
    text = f"{value.median:,.{digits}f}"
    if with_spread and value.runs > 1:
        text += f" ({value.low:,.{digits}f}..{value.high:,.{digits}f})"
    return text


def show(console: Console, report: Report) -> None:
    """Print the table and the notes."""
    console.print()
    console.print(table(report))
    for note in report.notes:
        console.print(f"  {note}", highlight=False)
