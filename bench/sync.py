"""sync: the time from both lists in memory to the last committed Service, compared with the same bytes pre-encoded.

The engine, its planner and the nftables backend do the work as in a real proxy; each run has a separate process.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from bench import kernel, objects, proxy
from bench.charts import Chart, Panel, Series
from bench.figures import Spread, median, ratio, spreads
from bench.report import Column, Report, Row, series
from bench.runs import Run
from bench.worker import enter_new_namespace
from bench.yardstick import Yardstick
from kubeproxy.model.events import Replaced
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Settings

DUAL = "10kx10 dual-stack"
SIZES = ("100x10", "1kx10", "10kx10", DUAL, "44kx10", "100kx10", "5kx50", "1x5000")
GOALS: Mapping[str, float] = {"10kx10": 3.0, "44kx10": 4.0, "5kx50": 4.0}
LINEAR = 5.5  # 44kx10 over 10kx10, at most
BOTH = 1.3  # both families over one, at most
REPLAYS = 3
YARDSTICKS = 100  # before a sync, and after it

COLUMNS = (
    Column("ours ms", "ours"),
    Column("from JSON ms", "from_json"),
    Column("limit ms", "limit"),
    Column("ratio", "ratio", 2),
    Column("ratio JSON", "ratio_json", 2),
    Column("ratio CPU", "ratio_cpu", 2),
    Column("own", "own", 2),
    Column("goal", "goal", 1),
    Column("held ms", "held", 0, spread=False),
    Column("MB", "megabytes", 1, spread=False),
)
STEPS = ("decode", "apply", "compile", "render", "commit")


def measure(size: str) -> dict[str, float]:
    """Measure one full sync and its limit; times in ms."""
    wanted = objects.parse_size(size)
    pages = list(objects.service_pages(wanted)), list(objects.slice_pages(wanted))
    gc.collect()
    proxy.collect_as_the_proxy_does()
    yardstick = Yardstick()
    for _ in range(YARDSTICKS):
        yardstick.measure(time.process_time)
    services = proxy.listed("services", pages[0])
    slices = proxy.listed("endpointslices", pages[1])
    decode, keep = services.decoding + slices.decoding, services.keeping + slices.keeping
    keep_cpu = services.keeping_cpu + slices.keeping_cpu
    events = Replaced("services", services.objects), Replaced("endpointslices", slices.objects)
    del services, slices
    apply, take = proxy.StepWatch(Planner, "applying"), proxy.StepWatch(Planner, "taking")
    spent = time.process_time()
    with kernel.recorded() as recording:
        ours, held = asyncio.run(_sync(events, proxy.SETTINGS if wanted.families == 1 else proxy.DUAL_STACK))
    ours, spent = ours + keep, time.process_time() - spent + keep_cpu
    for _ in range(YARDSTICKS):
        yardstick.measure(time.process_time)
    replays = []
    for _ in range(REPLAYS):
        enter_new_namespace()
        replays.append(kernel.replay(recording))
    limit, limit_cpu = (median(r[n] for r in replays) for n in (0, 1))
    commit = recording.seconds()
    found = {
        "ours": ours,
        "from_json": decode + ours,
        "limit": limit,
        "ours_cpu": spent,
        "limit_cpu": limit_cpu,
        "own_cpu": (spent - limit_cpu) / wanted.services,
        "yardstick": yardstick.seconds,
        "held": held,
        "longest_commit": max(batch.seconds for batch in recording.batches),
        "decode": decode,
        "apply": keep + apply.seconds,
        "compile": take.seconds,
        "commit": commit,
        # The kernel commits while the next batch is rendered, so this is the remaining wait.
        "render": max(0.0, ours - keep - apply.seconds - take.seconds - commit),
    }
    if wanted.families == 2:
        enter_new_namespace()
        found["limit_beside"] = kernel.replay_side_by_side(recording)
    return {name: seconds * 1e3 for name, seconds in found.items()} | {"megabytes": recording.bytes() / 1e6}


async def _sync(events: tuple[Replaced, Replaced], settings: Settings) -> tuple[float, float]:
    """Return the duration of the sync, and the longest hold of the event loop; in seconds."""
    listener = proxy.Listener()
    engine, backends = proxy.engine_of(settings, listener)
    running = asyncio.create_task(engine.run())
    done = asyncio.Event()
    watching = asyncio.create_task(proxy.longest_hold(done))
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    for event in events:
        engine.arrive([event])
        await asyncio.sleep(0)  # the lists arrive one after the other
    await engine.ready.wait()
    seconds = time.perf_counter() - began
    done.set()
    held = await watching
    running.cancel()
    for backend in backends:
        backend.close()
    if listener.failures:
        raise RuntimeError("; ".join(listener.failures[:5]))
    return seconds, held


def run(with_: Run) -> Report:
    """Measure all sizes."""
    sizes = ("1kx10", "10kx10") if with_.quick else SIZES
    rows = []
    for size in sizes:
        count = 3 if with_.quick or objects.parse_size(size).services > 20_000 else 5
        rows.append(
            summarised(size, [with_.measure(f"{size} run {n + 1}/{count}", measure, size=size) for n in range(count)])
        )
    notes = [
        "*Ours* is the time from the decoded pages to the last acknowledgement;",
        "the limit is the kernel's time for the same messages.",
        "`ratio CPU` is the ratio of CPU times, which other programs on the machine hardly change.",
        "`own` is a Service's CPU time outside the kernel, in units of a fixed piece of Python (bench/yardstick.py).",
        "`held` is the longest delay of a timer on the event loop, as the median of the runs.",
    ]
    notes += _compared({row.case: row.figures for row in rows})
    return Report("sync", "Full sync: both lists in memory to committed", COLUMNS, rows, _chart(rows), notes)


def _compared(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the notes that compare rows with each other, by their cases."""

    def times(figure: str, case: str, of: str, of_case: str) -> float | None:
        one, other = rows.get(case, {}).get(figure), rows.get(of_case, {}).get(of)
        return one.median / other.median if isinstance(one, Spread) and isinstance(other, Spread) else None

    found = []
    if larger := times("ours", "44kx10", "ours", "10kx10"):
        length = f"{larger:.2f} times as long as one of 10,000 (goal: at most {LINEAR})"
        found.append(f"A sync of 44,000 Services takes {length}.")
    both, beside = times("ours", DUAL, "ours", "10kx10"), times("limit_beside", DUAL, "limit", DUAL)
    if both and beside:
        found.append(f"Both families take {both:.2f} times one (goal: at most {BOTH}); their limit, replayed from two")
        found.append(f"threads at once, {beside:.2f} times what it takes in one.")
    return found


def summarised(size: str, runs: list[dict[str, float]]) -> Row:
    """Return the row of one size."""
    figures: dict[str, Any] = dict(spreads(runs))
    limits = [r["limit"] for r in runs]
    figures["ratio"] = ratio([r["ours"] for r in runs], limits)
    figures["ratio_json"] = ratio([r["from_json"] for r in runs], limits)
    figures["ratio_cpu"] = ratio([r["ours_cpu"] for r in runs], [r["limit_cpu"] for r in runs])
    figures["own"] = ratio([r["own_cpu"] for r in runs], [r["yardstick"] for r in runs])
    figures["goal"] = GOALS.get(size)
    return Row(size, figures)


def _chart(rows: list[Row]) -> Chart:
    sizes = [row.case for row in rows]
    colour = partial(series, rows)
    along = "Services x endpoints of each"
    times = (colour("from JSON", "from_json"), colour("from objects", "ours"), colour("limit", "limit"))
    shares = [Series(step, [_share(row, step) for row in rows]) for step in STEPS]
    return Chart(
        "Full sync of the nftables mode",
        (
            Panel(
                "Time to commit everything, and the kernel's own part of it",
                "ms",
                along,
                sizes,
                times,
                logarithmic=True,
            ),
            Panel("Where the time goes, from JSON", "% of the total", along, sizes, shares, stacked=True),
        ),
    )


def _share(row: Row, step: str) -> Spread | None:
    """Return a step's part of all steps, in percent."""
    parts = {name: v for name in STEPS if isinstance(v := row.figures.get(name), Spread)}
    return parts[step].scaled(100 / sum(v.median for v in parts.values())) if step in parts else None
