"""counters: the cost of counting the connections of each endpoint; measures tables with and without counters in one
run.

Measures full sync and changes through planner and backend, the kernel's memory, one reading of all counters (every
30 s, in turns of 5 ms), and the effect of this reading on a client.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from bench import change, kernel, memory, objects, path, proxy
from bench.charts import Chart
from bench.figures import spreads
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.layout import ENDPOINT_MAPS
from kubeproxy.backends.nftables.render import Numbers, place_all, render
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.features import CONNECTION_COUNTERS
from kubeproxy.model.addresses import Family
from kubeproxy.model.planner import Planner

SIZES = ("1kx10", "10kx10")
KINDS: tuple[str, ...] = ("uncounted", "counted")

COLUMNS = (
    Column("full sync ms", "full", 0),
    Column("its commits ms", "commits", 0),
    Column("endpoint replaced us", "replaced", 0),
    Column("endpoint added us", "added", 0),
    Column("slab MB", "slab", 1),
    Column("per CPU kB", "percpu", 0),
    Column("pass CPU ms", "read", 0),
    Column("connect p50 us", "service_p50", 1),
    Column("conn/s", "service_rate", 0),
)


def measure(size: str, connections: str, pairs: int) -> dict[str, float]:
    """Measure one table: ms, us by kind of change, MB and kB of the kernel's memory."""
    wanted, world = objects.parse_size(size), CONNECTION_COUNTERS.on(proxy.world(), connections == "counted")
    proxy.collect_as_the_proxy_does()
    planner, backend = Planner(world), NftablesBackend(KernelTable.open(Family.IPV4), world)
    planner.apply(change.lists(wanted))
    plans = {each.name: each.after.plans for each in planner.take()}
    proxy.settled()
    before = memory.machine()
    with kernel.recorded() as recording:
        began = time.perf_counter()
        for _ in backend.resync(plans):
            pass
        full = time.perf_counter() - began
    time.sleep(0.5)  # hash tables grow in the background
    after = memory.machine()
    decoders = change.Decoders()
    changes = change.timed(change.steps(wanted, pairs), lambda lines: change.one(decoders, planner, backend, lines))
    with closing(KernelTable.open(Family.IPV4)) as table:
        began = time.process_time()
        for each in plans.values():
            elements = render(place_all(each, (), Numbers()))
            for name in ENDPOINT_MAPS:
                table.counters(name, list(elements.get(name, ())))
        read = time.process_time() - began
    backend.close()
    return {
        "full": full * 1e3,
        "commits": recording.seconds() * 1e3,
        "slab": (after["Slab"] - before["Slab"]) / 1e3,
        "percpu": float(after["Percpu"] - before["Percpu"]),
        "read": read * 1e3,
        **changes,
    }


def run(with_: Run) -> Report:
    """Measure both kinds in turns."""
    sizes, count, pairs = (SIZES[-1:], 2, 100) if with_.quick else (SIZES, 5, 300)
    rows = []
    for size in sizes:

        def once(kind: str, what: str, size: str = size) -> dict[str, float]:
            found: dict[str, float] = with_.measure(what, measure, size=size, connections=kind, pairs=pairs)
            connecting: dict[str, Any] = {"size": size, "rounds": 4, "connections": 1000, "seconds": 0.1}
            found |= with_.measure(f"{what}, connections", path.measure, **connecting, counters=kind == "counted")
            return found

        runs = with_.in_turns(KINDS, count, once, size)
        rows += [Row(f"{size} {kind}", dict(spreads(runs[kind]))) for kind in KINDS]
    notes = (
        "In *per CPU*, each counter has 16 bytes for each possible processor of the machine.",
        "pass: a read of every element of the endpoint maps; uncounted: of the same elements without counters.",
    )
    return Report("counters", "What counting connections costs", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    along = "Services x endpoints"
    return Chart(
        "With and without counters of connections",
        (
            panel_by_kind("Full sync", "ms", along, rows, {"full": "all of it", "commits": "the kernel's part"}),
            panel_by_kind("One change", "us", along, rows, {"replaced": "replaced", "added": "added"}),
            panel_by_kind("Connect latency, median", "us", along, rows, {"service_p50": "through a Service"}),
        ),
    )
