"""start: the time from exec to ready, and to the last programmed Service; the cost of imports; memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from bench import objects, sync
from bench.apiserver import ApiProcess
from bench.charts import Chart, Panel, Series
from bench.contestant import OURS, Contestant
from bench.figures import Spread, ratio, spread
from bench.report import Column, Report, Row
from bench.runs import Run
from kubeproxy.backends.nftables.layout import TABLE, SetId
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.model.addresses import Family

FILLED = "10kx10"
GOAL_READY, GOAL_TIMES_LIMIT, GOAL_MEMORY = 500.0, 12.0, 180.0  # ms, times the limit of sync, MB
QUIET = 0.7  # seconds without a transaction that end a measurement

COLUMNS = (
    Column("median", "value", 1),
    Column("unit", "unit"),
    Column("goal", "goal", 0),
    Column("limit", "limit", 1),
    Column("ratio", "ratio", 2),
)
_IMPORT = (
    "import sys, time; began = time.perf_counter(); import {0}; took = time.perf_counter() - began; "
    "rss = [l for l in open('/proc/self/status') if l.startswith('VmRSS')][0].split()[1]; "
    "print(took * 1e3, int(rss) / 1024)"
)


def measure_import(module: str) -> dict[str, float]:
    """Import a module in a new interpreter: return ms, and MB of resident memory."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT.format(module)], capture_output=True, text=True, check=True, timeout=60
    )
    took, memory = done.stdout.split()
    return {"ms": float(took), "mb": float(memory)}


def measure_ready() -> dict[str, float]:
    """Start on an empty cluster: return the ms to the first 200 of /readyz, and the resident MB then."""
    api = ApiProcess()
    try:
        proxy = Contestant(OURS, "nftables", api.url)
        try:
            return {"ready": proxy.wait("/readyz", 30) * 1e3, "rss": proxy.memory()[0]}
        finally:
            proxy.close()
    finally:
        api.close()


def measure_filled(size: str) -> dict[str, float]:
    """Start with a full API server: return the ms to the last transaction; the resident MB then, and the maximum."""
    wanted = objects.parse_size(size)
    api = ApiProcess()
    try:
        api.load(wanted)
        proxy = Contestant(OURS, "nftables", api.url)
        try:
            programmed = _programmed(proxy, wanted)
            now, most = proxy.memory()
            return {"programmed": programmed * 1e3, "cpu": proxy.cpu_seconds() * 1e3, "rss": now, "peak": most}
        finally:
            proxy.close()
    finally:
        api.close()


def _programmed(proxy: Contestant, size: objects.Size) -> float:
    """Return the seconds from the start to the last transaction, when the kernel has every endpoint."""

    def complete() -> bool:
        return proxy.answers("/readyz") and _endpoints() >= size.services * size.endpoints

    return last_transaction(proxy, 120, complete, str(size))


def last_transaction(proxy: Contestant, limit: float, complete: Callable[[], bool], what: str) -> float:
    """Return the seconds from a proxy's start to its last transaction: no further transaction followed, and the start
    is `complete`.

    Raises RuntimeError if this does not happen within `limit` seconds.
    """
    with closing(nfnetlink.Transactions.open()) as link:
        generation, changed = 0, proxy.started
        while proxy.running and time.monotonic() - proxy.started < limit:
            time.sleep(0.002)
            now, at = link.generation(), time.monotonic()
            if now != generation:
                generation, changed = now, at
                continue
            # The query itself takes time.
            if at - changed > QUIET and complete() and link.generation() == generation:
                return changed - proxy.started
    raise RuntimeError(f"the proxy did not program {what}:\n{proxy.said()}")


def _endpoints() -> int:
    with TableReader(Family.IPV4, TABLE, Netlink.open()) as reader:
        return sum(1 for _ in reader.all_elements(SetId.ENDPOINTS.value))


def run(with_: Run) -> Report:
    """Measure starts."""
    count = 3 if with_.quick else 5
    imports = [with_.measure("import", measure_import, module="kubeproxy.program.app") for _ in range(count)]
    bare = [with_.measure("bare interpreter", measure_import, module="sys") for _ in range(count)]
    ready = [with_.measure(f"empty cluster, run {n + 1}/{count}", measure_ready) for n in range(count)]
    filled = [with_.measure(f"{FILLED}, run {n + 1}/3", measure_filled, size=FILLED) for n in range(3)]
    limits = [with_.measure(f"limit of {FILLED}, run {n + 1}/3", sync.measure, size=FILLED)["limit"] for n in range(3)]
    rows = [
        _row("import kubeproxy.program.app", [r["ms"] for r in imports], "ms"),
        _row("RSS after this import", [r["mb"] for r in imports], "MB"),
        _row("RSS of a bare interpreter", [r["mb"] for r in bare], "MB"),
        _row("exec to ready, empty cluster", [r["ready"] for r in ready], "ms", GOAL_READY),
        _row("RSS when ready, empty cluster", [r["rss"] for r in ready], "MB"),
        _row(
            f"exec to last Service, {FILLED}",
            [r["programmed"] for r in filled],
            "ms",
            None,
            {"limit": spread(limits), "ratio": ratio([r["programmed"] for r in filled], limits)},
        ),
        _row(f"CPU time to last Service, {FILLED}", [r["cpu"] for r in filled], "ms"),
        _row(f"RSS after last Service, {FILLED}", [r["rss"] for r in filled], "MB", GOAL_MEMORY),
        _row(f"highest RSS, {FILLED}", [r["peak"] for r in filled], "MB"),
    ]
    notes = (
        "The times include the lab's API server, a Python process on the same CPUs.",
        f"The goal of *exec to last Service* is {GOAL_TIMES_LIMIT:.0f} times the limit of *sync* at {FILLED}.",
    )
    return Report("start", "From exec to ready, and to everything programmed", COLUMNS, rows, _chart(rows), notes)


def _row(
    case: str, values: list[float], unit: str, goal: float | None = None, more: dict[str, Any] | None = None
) -> Row:
    return Row(case, {"value": spread(values), "unit": unit, "goal": goal, **(more or {})})


def _chart(rows: list[Row]) -> Chart:
    def panel(heading: str, unit: str) -> Panel:
        chosen = [row for row in rows if row.figures["unit"] == unit]
        values = [v if isinstance(v := row.figures["value"], Spread) else None for row in chosen]
        labels = [
            row.case.replace(", ", ",\n").replace(" after", "\nafter").replace(" of a", "\nof a") for row in chosen
        ]
        return Panel(heading, unit, "", labels, (Series("median", values),))

    return Chart("Start of kube-proxy", (panel("Time", "ms"), panel("Memory", "MB")))
