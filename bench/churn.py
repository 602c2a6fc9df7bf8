"""churn: endpoints that change at a steady rate, through decoder, engine and backend in one process, as in a proxy.

Another process writes the watch lines into a pipe. The lag of a change is the time from the write to the observer's
call after the commit.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from bench import objects, proxy
from bench.charts import Chart, Panel
from bench.companion import Companion
from bench.figures import percentile, spreads
from bench.report import Column, Report, Row, series
from bench.runs import Run
from kubeproxy.api.decode import WatchDecoder
from kubeproxy.engine.engine import Engine
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.messages import chain_message
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from support import nft

SIZE = "10kx10"
RATES = (100, 1000, 5000)
GOAL_LAG, GOAL_CPU, GOAL_DRIFT = 50.0, 50.0, 1.0  # ms p99 and % of a core at 1,000 a second; MB
WARM_UP = 3.0  # seconds of warming up, which are not counted
BESIDE = 0.5  # seconds between two transactions of another program
PERIOD = 5.0  # seconds after which the backend compares everything with the kernel, in case it has missed something

COLUMNS = (
    Column("lag p50 ms", "p50", 2),
    Column("lag p99 ms", "p99", 2),
    Column("lag max ms", "max", 1, spread=False),
    Column("CPU %", "cpu", 1),
    Column("commits %", "kernel", 1, spread=False),
    Column("CPU us", "cost", 0, spread=False),
    Column("syncs/s", "syncs", 0, spread=False),
    Column("RSS MB", "rss", 0, spread=False),
    Column("drift MB", "drift", 2),
)


class _Lags:
    """Stores lags in constant memory, so that the stored lags are not taken for a leak of the proxy."""

    def __init__(self, room: int) -> None:
        self._values = array.array("d", [1.0]) * room
        self.count = 0

    def append(self, seconds: float) -> None:
        self._values[self.count % len(self._values)] = seconds
        self.count += 1

    def since(self, count: int) -> list[float]:
        return list(self._values[count : self.count])


def measure(rate: int, seconds: float, neighbour: bool) -> dict[str, float]:
    """Measure one rate: lags in ms, CPU in % of a core, MB. A `neighbour` writes to another table at the same time."""
    return asyncio.run(_churn(objects.parse_size(SIZE), rate, seconds, neighbour))


async def _churn(size: objects.Size, rate: int, seconds: float, neighbour: bool) -> dict[str, float]:
    proxy.collect_as_the_proxy_does()
    lags = _Lags(int(rate * (seconds + WARM_UP)) + 1000)
    listener = proxy.Listener()
    listener.lags = lags
    engine, backend = proxy.engine(listener, PERIOD)
    running = asyncio.create_task(engine.run())
    await _fill(engine, size)
    beside = asyncio.create_task(_commit_beside()) if neighbour else None
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)  # the size of a socket's buffer
    feeder = Companion("bench.feeder", str(writer), inherit=(writer,))
    os.close(writer)
    _connect(engine, reader)
    loop, commits = asyncio.get_running_loop(), proxy.Stopwatch(nfnetlink.Transactions, "commit")
    try:
        await loop.run_in_executor(None, lambda: feeder.ask("prepare", size=str(size)))
        warm = (await loop.run_in_executor(None, lambda: feeder.ask("feed", rate=rate, seconds=WARM_UP)))["sent"]
        await _settled(lags, warm)
        seen, spent, rss = lags.count, time.process_time(), resident()
        in_kernel, syncs, began = commits.seconds, commits.calls, time.perf_counter()
        sent = (await loop.run_in_executor(None, lambda: feeder.ask("feed", rate=rate, seconds=seconds)))["sent"]
        await _settled(lags, seen + sent)
        took = time.perf_counter() - began
        spent, in_kernel = time.process_time() - spent, commits.seconds - in_kernel
        found = [lag * 1e3 for lag in lags.since(seen)]
        after = resident()
    finally:
        loop.remove_reader(reader)
        os.close(reader)
        feeder.close()
        running.cancel()
        if beside is not None:
            beside.cancel()
        backend.close()
    if listener.failures or len(found) != sent:
        raise RuntimeError(f"{sent} changes, {len(found)} programmed; {listener.failures[:5]}")
    return {
        "p50": percentile(found, 50),
        "p99": percentile(found, 99),
        "max": max(found),
        "cpu": spent / took * 100,
        "kernel": in_kernel / took * 100,
        "cost": spent / sent * 1e6,
        "syncs": (commits.calls - syncs) / took,
        "rss": after,
        "drift": after - rss,
    }


async def _fill(engine: Engine, size: objects.Size) -> None:
    engine.arrive([Replaced("services", proxy.decoded("services", objects.service_pages(size)))])
    engine.arrive([Replaced("endpointslices", proxy.decoded("endpointslices", objects.slice_pages(size)))])
    await engine.ready.wait()
    proxy.settled()


async def _commit_beside() -> None:
    """Write transactions to a separate table, like another program."""
    with closing(nfnetlink.Transactions.open()) as link:
        nft.run("add table ip elsewhere\n")
        for number in itertools.count():
            await asyncio.sleep(BESIDE)
            link.commit([chain_message(Family.IPV4, "elsewhere", f"chain-{number}")])


def _connect(engine: Engine, reader: int) -> None:
    """Let the event loop read lines like the API client: decode the available lines, and pass their events on
    together."""
    decoder = WatchDecoder("endpointslices")

    def readable() -> None:
        data = os.read(reader, 1 << 18)
        if data and (events := decoder.feed(data).events):
            engine.arrive(events)

    asyncio.get_running_loop().add_reader(reader, readable)


async def _settled(lags: _Lags, count: int) -> None:
    """Wait until this number of changes is programmed, at most thirty seconds."""
    for _ in range(15_000):
        if lags.count >= count:
            return
        await asyncio.sleep(0.002)


def resident() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(with_: Run) -> Report:
    """Measure all rates."""
    count, seconds = (1, 5.0) if with_.quick else (2, 20.0)
    rows = []
    for rate, neighbour in (*((rate, False) for rate in RATES), (RATES[0], True)):
        case = f"{rate:,} a second" + ", another program commits" * neighbour
        runs = [
            with_.measure(f"{case}, run {turn + 1}/{count}", measure, rate=rate, seconds=seconds, neighbour=neighbour)
            for turn in range(count)
        ]
        rows.append(Row(case, dict(spreads(runs))))
    notes = (
        f"Each rate ran for {seconds:.0f} s at {SIZE}, after {WARM_UP:.0f} s of warming up.",
        "A change replaces one endpoint of ten.",
        f"Another program: a transaction of its own each {BESIDE} s; all would be compared after {PERIOD:.0f} s.",
        f"The goals at 1,000 a second: a p99 of {GOAL_LAG:.0f} ms, {GOAL_CPU:.0f} % of a core, no growth of RSS.",
    )
    return Report("churn", "Endpoints that change at a steady rate", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    cases = [row.case for row in rows]
    colour = partial(series, rows)
    lags = (colour("p50", "p50"), colour("p99", "p99"))
    along = "endpoint changes"
    return Chart(
        f"Endpoints that change at a steady rate, {SIZE}",
        (
            Panel(
                "Lag from event to kernel",
                "ms",
                along,
                cases,
                lags,
                goal=GOAL_LAG,
                goal_label="goal p99",
                logarithmic=True,
            ),
            Panel(
                "CPU",
                "% of a core",
                along,
                cases,
                (colour("all", "cpu"), colour("in commits", "kernel")),
                goal=GOAL_CPU,
            ),
            Panel("Resident memory", "MB", along, cases, (colour("at the end", "rss"), colour("drift", "drift"))),
        ),
    )
