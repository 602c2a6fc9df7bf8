"""resets: the cost of --reset-gone-endpoints: the same measurements with and without it, in one run.

Measures full sync and changes through planner and backend, a deleted endpoint whose address is used again, the memory
of the process, and a connection through a Service.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

from bench import change, objects, path, proxy
from bench.charts import Chart
from bench.figures import median, spreads
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.features import RESETS
from kubeproxy.model.addresses import Family
from kubeproxy.model.gone import Departed, Departures
from kubeproxy.model.planner import Planner

SIZES = ("1kx10", "10kx10")
KINDS: tuple[str, ...] = ("left", "reset")

COLUMNS = (
    Column("full sync ms", "full", 0),
    Column("index MB", "index", 1),
    Column("endpoint replaced us", "replaced", 0),
    Column("endpoint added us", "added", 0),
    Column("gone us", "gone", 0),
    Column("taken again us", "taken", 0),
    Column("connect p50 us", "service_p50", 1),
    Column("conn/s", "service_rate", 0),
    Column("Gbit/s", "service_stream", 2),
)


def measure(size: str, orphans: str, pairs: int) -> dict[str, float]:
    """Measure one table: ms, MB, us by kind of change."""
    wanted, world = objects.parse_size(size), RESETS.on(proxy.world(), orphans == "reset")
    proxy.collect_as_the_proxy_does()
    departures = Departures() if orphans == "reset" else None
    planner, backend = Planner(world, departures), NftablesBackend(KernelTable.open(Family.IPV4), world)
    lists = change.lists(wanted)
    began = time.perf_counter()
    planner.apply(lists)
    plans = {each.name: each.after.plans for each in planner.take()}
    _tell(planner, backend)
    for _ in backend.resync(plans):
        pass
    full = time.perf_counter() - began
    proxy.settled()
    found = {"full": full * 1e3, "index": _index(planner), **_changes(wanted, planner, backend, pairs)}
    found |= _departures(planner, backend, pairs) if departures is not None else {}
    backend.close()
    return found


def _tell(planner: Planner, backend: NftablesBackend) -> None:
    """Do the engine's work after compilation."""
    if planner.departures is not None:
        departed = planner.departures.look(time.monotonic(), planner.services)
        backend.depart(departed, planner.departures.in_use)


def _index(planner: Planner) -> float:
    """Return the MB of the index from addresses to slices."""
    tracemalloc.start()
    departures = Departures()
    for name, pieces in planner.slices.items() if planner.departures is not None else ():
        for piece in pieces.values():
            departures.replace(name, None, piece)
    departures.look(0.0, ())
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / 1e6


def _changes(size: objects.Size, planner: Planner, backend: NftablesBackend, pairs: int) -> dict[str, float]:
    decoders = change.Decoders()

    def once(lines: change.Lines) -> None:
        planner.apply(decoders.events(lines))
        changed = [(each.name, each.after.plans) for each in planner.take()]
        _tell(planner, backend)
        for _ in backend.sync(changed):
            pass

    return change.timed(change.steps(size, pairs), once)


def _departures(planner: Planner, backend: NftablesBackend, pairs: int) -> dict[str, float]:
    """Delete one endpoint after the other, and use its address again."""
    seconds: dict[str, list[float]] = {"gone": [], "taken": []}
    in_use = planner.departures.in_use if planner.departures is not None else bool
    for turn in range(pairs):
        address = bytes((10, 200, turn >> 8, turn & 255))
        for case, departed in (
            ("gone", Departed((address + b"\x06\x1f\x90",))),
            ("taken", Departed((), frozenset((address,)))),
        ):
            began = time.perf_counter()
            backend.depart(departed, in_use)
            for _ in backend.sync(()):
                pass
            seconds[case].append(time.perf_counter() - began)
    return {case: median(times) * 1e6 for case, times in seconds.items()}


def run(with_: Run) -> Report:
    """Measure with and without, in turns."""
    sizes, count, pairs = (SIZES[-1:], 2, 100) if with_.quick else (SIZES, 5, 300)
    rows = []
    for size in sizes:

        def once(kind: str, what: str, size: str = size) -> dict[str, float]:
            found: dict[str, float] = with_.measure(what, measure, size=size, orphans=kind, pairs=pairs)
            connecting: dict[str, Any] = {"size": size, "rounds": 4, "connections": 1000, "seconds": 0.2}
            found |= with_.measure(f"{what}, connections", path.measure, **connecting, resets=kind == "reset")
            return found

        runs = with_.in_turns(KINDS, count, once, size)
        rows += [Row(f"{size} {kind}", dict(spreads(runs[kind]))) for kind in KINDS]
    notes = ("index: from addresses to slices, in the proxy. gone, taken again: each is a separate transaction.",)
    return Report("resets", "The cost of resets for deleted endpoints", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    along = "Services x endpoints"
    return Chart(
        "With and without resets for deleted endpoints",
        (
            panel_by_kind("Full sync", "ms", along, rows, {"full": "all of it"}),
            panel_by_kind("One change", "us", along, rows, {"replaced": "replaced", "added": "added"}),
            panel_by_kind("Connect latency, median", "us", along, rows, {"service_p50": "through a Service"}),
        ),
    )
