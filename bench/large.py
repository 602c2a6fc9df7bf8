"""large: 100,000 Services of ten endpoints, from executing the proxy; the same figures as restart."""

from __future__ import annotations

from bench import restart
from bench.report import Report
from bench.runs import Run

SIZE = "100kx10"


def run(with_: Run) -> Report:
    """Measure it: minutes, and 10 GB of memory for the API server's side."""
    rows = [restart.row(with_, SIZE, 1)]
    title = "A million endpoints: a start, and a restart onto what is there"
    return Report("large", title, restart.COLUMNS, rows, restart.chart(rows), restart.NOTES)
