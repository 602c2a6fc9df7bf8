"""flowtable: packets per second and CPU time per packet, with all rules and with fast forwarding, in one emulated
machine.

The host's kernel need not have flowtables. The processor is emulated: the columns of one row can be compared, but the
figures do not apply to a real machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.charts import Chart
from bench.figures import spreads
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run

CASES = ("TCP IPv4", "UDP IPv4", "TCP IPv6", "UDP IPv6")
TIMEOUT = 1500.0  # seconds

COLUMNS = (
    Column("by the rules, packets/s", "rules_rate", 0),
    Column("past them, packets/s", "fast_rate", 0),
    Column("by the rules, CPU us", "rules_cpu", 1),
    Column("past them, CPU us", "fast_cpu", 1),
    Column("lowest to lowest", "ratio", 2),
)


def measure(count: int, turns: int) -> list[dict[str, object]]:
    """Return the figures of all turns."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from support.guest.machine import run_in_machine  # noqa: PLC0415 - the machine belongs to the tests

    done = run_in_machine([sys.executable, "-m", "bench.flowtable_ground", str(count), str(turns)], TIMEOUT)
    if done.status:
        raise RuntimeError(done.output)
    return [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]


def run(with_: Run) -> Report:
    """Measure all figures in one machine."""
    count, turns = (1000, 2) if with_.quick else (3000, 5)
    figures = with_.measure("in the machine", measure, count=count, turns=turns)
    if wrong := [each for each in figures if each["offloaded"] != (each["kind"] == "fast")]:
        raise RuntimeError(f"not forwarded as requested: {wrong[0]}")
    rows = []
    for case in CASES:
        of_case = [each for each in figures if each["case"] == case]
        runs = [
            {
                f"{each['kind']}_{name}": each[name]
                for each in of_case
                if each["turn"] == turn
                for name in ("rate", "cpu")
            }
            for turn in range(turns)
        ]
        # Other work of the machine makes a run slower, never faster.
        ratio = min(each["fast_cpu"] for each in runs) / min(each["rules_cpu"] for each in runs)
        rows.append(Row(case, dict(spreads(runs)) | {"ratio": ratio}))
    notes = (
        "CPU: of both ends of a connection and the node between them, in one process, sockets included.",
        "An emulated processor (QEMU without KVM) under Debian's kernel: compare only figures of one row.",
    )
    return Report("flowtable", "What fast forwarding saves", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    return Chart(
        "By all rules, and past them",
        (panel_by_kind("CPU a packet", "us", "", rows, {"rules_cpu": "by the rules", "fast_cpu": "past them"}),),
    )
