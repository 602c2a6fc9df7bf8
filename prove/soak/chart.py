"""Draws the samples over time, with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.charts import COLOURS
from prove.soak.samples import Sample

PANELS: Final = (
    ("rss", "resident memory, MB"),
    ("slab", "kernel memory of rules and sets,\nwhole machine, MB"),
    ("parts", "elements or rules"),
    ("descriptors", "descriptors"),
    ("lag", "mean from change to kernel, ms"),
    ("cpu", "CPU time a change, ms"),
)


def draw(samples: Sequence[Sample], heading: str, path: Path) -> None:
    """Write the chart as SVG or PNG, depending on the path's suffix."""
    os.environ.setdefault("MPLCONFIGDIR", str(path.parent / ".matplotlib"))
    from matplotlib import rcParams  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    rcParams["svg.hashsalt"] = heading  # the same figures give the same file
    figure = Figure(figsize=(10.0, 5.0), layout="constrained")
    figure.suptitle(heading, fontsize=12, fontweight="bold")
    for (name, what), axes in zip(PANELS, figure.subplots(2, 3).flat, strict=True):
        points = [(one["at"] / 60, one[name]) for one in samples if name in one]
        axes.set_title(what, fontsize=9, loc="left")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if points:
            axes.plot(*zip(*points, strict=True), color=COLOURS[0], linewidth=1)
            axes.set_ylim(0, max(value for _, value in points) * 1.1 or 1)
    figure.supxlabel("minutes", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
