"""change: the time from the bytes of one watch event to the kernel's acknowledgement, compared with one pre-encoded
batch.

Each case is applied and reverted on random Services, so that the last state equals the first, and the same transactions
can be replayed. Once through decoder, planner and backend; once through the engine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bench import kernel, objects, proxy
from bench.charts import Chart, Panel, Series
from bench.figures import Spread, median, percentile, ratio, spreads, summary
from bench.report import Column, Report, Row
from bench.runs import Run
from bench.yardstick import Yardstick
from kubeproxy.api.decode import WatchDecoder
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.engine.engine import Engine
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event, Replaced
from kubeproxy.model.objects import Resource
from kubeproxy.model.planner import Change, Planner

SIZES = ("100x10", "1kx10", "10kx10", "44kx10", "100kx10")
CASES = ("endpoint replaced", "endpoint added", "endpoint removed", "Service added", "Service removed")
GOAL_P50, GOAL_P99 = 300.0, 2000.0  # us, at every size
GROWTH = 1.5  # 44k over 1k, at most
YARDSTICK_EVERY = 10  # changes
QUARTILE = 25  # per cent

COLUMNS = (
    Column("p50 us", "p50", 0),
    Column("p99 us", "p99", 0, spread=False),
    Column("limit p50 us", "limit_p50", 0),
    Column("limit p99 us", "limit_p99", 0, spread=False),
    Column("ratio p50", "ratio", 2),
    Column("own", "own", 2),
    Column("engine p50 us", "engine_p50", 0),
    Column("engine p99 us", "engine_p99", 0, spread=False),
)

Lines = tuple[tuple[Resource, bytes], ...]


class Step(NamedTuple):
    """One measured change: its case and its watch lines."""

    case: str
    lines: Lines


def steps(size: objects.Size, pairs: int, seed: int = 1) -> Iterator[Step]:
    """Yield for each kind `pairs` of a change and its reversal, on random Services; versions always grow."""
    draw = random.Random(seed)
    version = 1000
    for turn in range(pairs):
        number = draw.randrange(size.services)
        before = objects.endpoints_of(number, size.endpoints)
        new = objects.spare(turn)
        replaced = [new, *before[1:]]
        for case, addresses in (
            ("endpoint replaced", replaced),
            ("endpoint replaced", before),
            ("endpoint added", [*before, new]),
            ("endpoint removed", before),
        ):
            version += 1
            yield Step(case, (("endpointslices", objects.slice_line("MODIFIED", number, addresses, version)),))
        fresh = size.services + turn
        addresses = objects.endpoints_of(fresh, size.endpoints)
        for case, change in (("Service added", "ADDED"), ("Service removed", "DELETED")):
            version += 1
            services: tuple[Resource, bytes] = ("services", objects.service_line(change, fresh, version))
            slices: tuple[Resource, bytes] = (
                "endpointslices",
                objects.slice_line(change, fresh, addresses, version),
            )
            yield Step(case, (services, slices))


def lists(size: objects.Size) -> list[Event]:
    """Return the lists at the beginning of a full sync."""
    return [
        Replaced("services", proxy.decoded("services", objects.service_pages(size))),
        Replaced("endpointslices", proxy.decoded("endpointslices", objects.slice_pages(size))),
    ]


class Decoders:
    """One stream for each resource."""

    def __init__(self) -> None:
        self._streams: dict[Resource, WatchDecoder] = {
            "services": WatchDecoder("services"),
            "endpointslices": WatchDecoder("endpointslices"),
        }

    def events(self, lines: Lines) -> list[Event]:
        found: list[Event] = []
        for resource, line in lines:
            found += self._streams[resource].feed(line).events
        return found


def measure(size: str, pairs: int) -> dict[str, dict[str, float]]:
    """Measure every case without the engine, then a replay of the same transactions; return times in us by case."""
    wanted = objects.parse_size(size)
    proxy.collect_as_the_proxy_does()
    planner, backend = Planner(proxy.world()), NftablesBackend(KernelTable.open(Family.IPV4), proxy.world())
    planner.apply(lists(wanted))
    plans = {change.name: change.after.plans for change in planner.take()}
    for _ in backend.resync(plans):
        pass
    del plans
    proxy.settled()
    planned = list(steps(wanted, pairs))
    decoders = Decoders()
    warm = steps(wanted, 5, seed=2)
    for step in warm:
        one(decoders, planner, backend, step.lines)
    seconds: list[float] = []
    yardstick = Yardstick()
    with kernel.recorded() as recording:
        for turn, step in enumerate(planned):
            if turn % YARDSTICK_EVERY == 0:
                yardstick.measure()
            before = len(recording.batches)
            began = time.perf_counter()
            one(decoders, planner, backend, step.lines)
            seconds.append(time.perf_counter() - began)
            if len(recording.batches) != before + 1:
                raise RuntimeError(f"{step.case}: {len(recording.batches) - before} transactions instead of one")
    backend.close()
    return _by_case(planned, seconds, _limits(recording), yardstick)


def one(decoders: Decoders, planner: Planner, backend: NftablesBackend, lines: Lines) -> None:
    """Decode watch lines, and commit the changes."""
    planner.apply(decoders.events(lines))
    for _ in backend.sync([(change.name, change.after.plans) for change in planner.take()]):
        pass


def timed(
    planned: Iterable[Step], once: Callable[[Lines], None], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median us of `replaced` and `added` endpoints, as `once` does them, by a clock of seconds."""
    seconds: dict[str, list[float]] = {}
    for step in planned:
        began = clock()
        once(step.lines)
        seconds.setdefault(step.case, []).append(clock() - began)
    return {name: median(seconds[f"endpoint {name}"]) * 1e6 for name in ("replaced", "added")}


def _limits(recording: kernel.Recording) -> list[float]:
    """Replay the transactions in order; the table has the state before the first."""
    batches = [kernel.encoded(batch.parts) for batch in recording.batches]
    replayer = kernel.Replayer()
    try:
        return [replayer.send(batch) for batch in batches]
    finally:
        replayer.close()


def _by_case(
    planned: Sequence[Step], ours: Sequence[float], limits: Sequence[float], yardstick: Yardstick
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        mine = [s for step, s in zip(planned, ours, strict=True) if step.case == case]
        least = [s for step, s in zip(planned, limits, strict=True) if step.case == case]
        found[case] = summary(mine, 1e6) | {f"limit_{k}": v for k, v in summary(least, 1e6).items()}
        found[case]["own"] = own(mine, least, yardstick)
    return found


def own(ours: Sequence[float], limits: Sequence[float], yardstick: Yardstick) -> float:
    """Return the time outside the kernel in yardsticks.

    The lower quartile of each, because other programs slow down some changes and yardsticks, and hardly the same share
    of both. Two busy loops on two processors increased the ratio of the medians by up to a half, that of the quartiles
    by up to a tenth.
    """
    return (percentile(ours, QUARTILE) - percentile(limits, QUARTILE)) / percentile(yardstick.taken, QUARTILE)


def measure_engine(size: str, pairs: int) -> dict[str, dict[str, float]]:
    """Measure every case through the engine, from the bytes to the observer's call after the commit; return us by
    case."""
    return asyncio.run(_engine(objects.parse_size(size), pairs))


async def _engine(size: objects.Size, pairs: int) -> dict[str, dict[str, float]]:
    settled = asyncio.Event()
    finished = [0.0]

    def on_settled(_: Sequence[Change]) -> None:
        finished[0] = time.perf_counter()
        settled.set()

    listener = proxy.Listener(on_settled)
    proxy.collect_as_the_proxy_does()
    engine, backend = proxy.engine(listener)
    running = asyncio.create_task(engine.run())
    engine.arrive(lists(size))
    await engine.ready.wait()
    proxy.settled()
    planned = [*steps(size, 5, seed=2), *steps(size, pairs)]
    seconds = await _through(engine, planned, settled, finished)
    running.cancel()
    backend.close()
    if listener.failures:
        raise RuntimeError("; ".join(listener.failures[:5]))
    warm = len(planned) - pairs * (len(CASES) + 1)
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for step, taken in zip(planned[warm:], seconds[warm:], strict=True):
        found[step.case].append(taken)
    return {case: {f"engine_{k}": v for k, v in summary(values, 1e6).items()} for case, values in found.items()}


async def _through(
    engine: Engine, planned: Sequence[Step], settled: asyncio.Event, finished: list[float]
) -> list[float]:
    decoders, seconds = Decoders(), []
    for step in planned:
        await asyncio.sleep(0.0005)
        settled.clear()
        began = time.perf_counter()
        engine.arrive(decoders.events(step.lines))
        await settled.wait()
        seconds.append(finished[0] - began)
    return seconds


def run(with_: Run) -> Report:
    """Measure all sizes and cases."""
    rows = []
    for size in ("10kx10",) if with_.quick else SIZES:
        rows += measured(with_, size)
    notes = [
        "The times begin with the event's bytes; the columns of `engine` also include the event loop.",
        "`own` is the time outside the kernel, in units of a fixed piece of Python (bench/yardstick.py).",
        f"The goal is a p50 under {GOAL_P50:.0f} us and a p99 under {GOAL_P99:.0f} us at every size,",
        f"and a p50 with 44,000 Services that is at most {GROWTH} times the p50 with 1,000 Services.",
    ]
    notes += _growth(rows)
    return Report("change", "One change: event bytes to kernel acknowledgement", COLUMNS, rows, _chart(rows), notes)


def measured(with_: Run, size: str) -> list[Row]:
    """Return the rows of one size."""
    count, pairs = (3, 150) if with_.quick else (3, 300)
    direct: list[Any] = []
    engine: list[Any] = []
    for turn in range(count):
        direct.append(with_.measure(f"{size} run {turn + 1}/{count}", measure, size=size, pairs=pairs))
        what = f"{size} through the engine, run {turn + 1}/{count}"
        engine.append(with_.measure(what, measure_engine, size=size, pairs=pairs))
    rows = []
    for case in CASES:
        mine = [run[case] for run in direct]
        figures: dict[str, Any] = {**spreads(mine), **spreads([run[case] for run in engine])}
        figures["ratio"] = ratio([run["p50"] for run in mine], [run["limit_p50"] for run in mine])
        rows.append(Row(f"{size} {case}", figures))
    return rows


def _growth(rows: Sequence[Row]) -> Iterator[str]:
    for case in CASES:
        found = {row.case: row.figures["p50"] for row in rows}
        small, large = found.get(f"1kx10 {case}"), found.get(f"44kx10 {case}")
        limits = {row.case: row.figures["limit_p50"] for row in rows}
        if isinstance(small, Spread) and isinstance(large, Spread):
            least, most = limits[f"1kx10 {case}"], limits[f"44kx10 {case}"]
            kernel_ = most.median / least.median if isinstance(least, Spread) and isinstance(most, Spread) else 0.0
            yield (
                f"The case *{case}* takes {large.median / small.median:.2f} times as long with 44,000 Services "
                f"as with 1,000; the kernel's part (the limit) takes {kernel_:.2f} times as long."
            )


def _chart(rows: Sequence[Row]) -> Chart:
    sizes = list(dict.fromkeys(row.case.partition(" ")[0] for row in rows))
    figures = {row.case: row.figures for row in rows}

    def series(label: str, size: str, figure: str, *, pale: bool = False) -> Series:
        values = [figures[f"{size} {case}"].get(figure) for case in CASES]
        return Series(label, [v if isinstance(v, Spread) else None for v in values], pale)

    def panel(heading: str, percent: str, goal: float) -> Panel:
        found = [
            s
            for size in sizes
            for s in (series(size, size, percent), series(f"{size}, limit", size, f"limit_{percent}", pale=True))
        ]
        return Panel(heading, "us", "what changes", CASES, found, logarithmic=True, goal=goal)

    return Chart(
        "One change, event bytes to kernel acknowledgement",
        (panel("Median", "p50", GOAL_P50), panel("99th percentile", "p99", GOAL_P99)),
    )
