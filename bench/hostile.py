"""hostile: the effect of attackers that can write a Service, or reach a port of the proxy, on all other users.

Engine, nftables backend and health server in one process, as in a proxy, with 1,000 Services of which one changes each
50 ms. It measures a quiet run, then a run with the attack. The figures are the longest time for which the event loop
was blocked, and the delay of another Service's change: from its due time until it is in the kernel, so waiting is
included. While another program loads elements, the kernel itself delays transactions: this limit is measured before the
attack."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench import flood, objects, proxy
from bench.charts import Chart
from bench.companion import Companion
from bench.figures import ratio, spreads
from bench.hostile_objects import Wide
from bench.network import configure
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from bench.yardstick import Yardstick
from kubeproxy.api.decode import WatchDecoder
from kubeproxy.kernel.nftables.messages import table_message
from kubeproxy.kernel.nftables.nfnetlink import Transactions
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from kubeproxy.model.objects import Resource
from kubeproxy.model.plan import ServiceName
from kubeproxy.model.planner import Change
from kubeproxy.report.health import ProxyHealth
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.server.http import routes
from kubeproxy.server.server import HttpServer

SIZE = "1kx10"
EVERY = 0.05  # seconds between changes of other Services
TICK = 0.002  # seconds between checks of the event loop
TIMEOUT = 30.0  # seconds for pending changes at the end of an attack
GOAL_HOLD, GOAL_DELAY = 50.0, 100.0  # ms; the second one is relative to a quiet run
STRANGERS = 50_000  # elements that another program loads at once
HEALTH = ("10.9.0.1", 10256)
CONNECTIONS = 100

COLUMNS = (
    Column("hold ms", "hold", 1),
    Column("quiet", "quiet_hold", 1, spread=False),
    Column("without waiting for a CPU", "kept", 1),
    Column("CPU of the loop in it", "busy", 1),
    Column("own", "own", 0),
    Column("delay ms", "delay", 1),
    Column("quiet", "quiet_delay", 1, spread=False),
    Column("CPU of the process in it", "spent", 1),
    Column("late", "late", 0),
    Column("limit ms", "limit", 1, spread=False),
    Column("beyond", "beyond", 1),
    Column("attacks/s", "done", 1, spread=False),
)


class Seen(NamedTuple):
    """The results of one period, in seconds: longest hold of the loop, with and without its thread's wait for a CPU,
    most CPU time of its thread in one turn, delays of other Services' changes.

    A delay is a pair: its length, and the CPU time of the process during it.
    """

    hold: float
    kept: float
    busy: float
    delays: Sequence[tuple[float, float]]


class Scene:
    """An engine with 1,000 Services, and the waiters for each change."""

    def __init__(self) -> None:
        self.listener = proxy.Listener(self._on_settled)
        self.engine, self._backend = proxy.engine(self.listener)
        self._decoders: dict[Resource, WatchDecoder] = {}
        self._waiting: dict[ServiceName, tuple[float, float, asyncio.Future[tuple[float, float]]]] = {}
        self._running = asyncio.create_task(self.engine.run())
        self._version = 1000

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        self._backend.close()

    async def fill(self, size: objects.Size) -> None:
        self.engine.arrive([Replaced("services", proxy.decoded("services", objects.service_pages(size)))])
        self.engine.arrive([Replaced("endpointslices", proxy.decoded("endpointslices", objects.slice_pages(size)))])
        await self.engine.ready.wait()
        proxy.settled()

    def say(self, *lines: tuple[Resource, bytes]) -> None:
        """Deliver watch lines."""
        for resource, line in lines:
            decoder = self._decoders.setdefault(resource, WatchDecoder(resource))
            self.engine.arrive(decoder.feed(line).events)

    def settling(self, name: ServiceName, due: float = 0.0) -> asyncio.Future[tuple[float, float]]:
        """Return the seconds from `due` to the next change of a Service in the kernel, and the CPU time from now."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[name] = due, time.process_time(), future
        return future

    def _on_settled(self, changes: Sequence[Change]) -> None:
        now, spent = time.perf_counter(), time.process_time()
        for change in changes:
            if waiting := self._waiting.pop(change.name, None):
                due, before, future = waiting
                future.set_result((now - due, spent - before))

    def version(self) -> int:
        """Return a new version."""
        self._version += 1
        return self._version

    async def watch(self, seconds: float, size: objects.Size) -> Seen:
        """Change other Services for some seconds."""
        stop = asyncio.Event()
        held = asyncio.create_task(_holds(stop))
        waiting: list[asyncio.Future[tuple[float, float]]] = []
        began = time.perf_counter()
        for turn in range(int(seconds / EVERY)):
            due = began + turn * EVERY
            await asyncio.sleep(due - time.perf_counter())
            version = self.version()
            number = version % size.services
            addresses = [objects.spare(version), *objects.endpoints_of(number, size.endpoints)[1:]]
            waiting.append(self.settling(objects.names(number), due))
            self.say(("endpointslices", objects.slice_line("MODIFIED", number, addresses, version)))
        done, _ = await asyncio.wait(waiting, timeout=TIMEOUT)
        stop.set()
        return Seen(*await held, [future.result() if future in done else (TIMEOUT, TIMEOUT) for future in waiting])


async def _holds(stop: asyncio.Event) -> tuple[float, float, float]:
    """Return the longest delay of a timer on the loop, the longest delay without its thread's wait for a CPU, and the
    most CPU time of its thread in one turn.
    """
    longest = kept = busiest = 0.0
    schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    while not stop.is_set():
        spent, queued, due = time.thread_time(), _queued(schedule), time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        late = time.perf_counter() - due
        longest, busiest = max(longest, late), max(busiest, time.thread_time() - spent)
        if late > kept:
            kept = max(kept, late - _queued(schedule) + queued)
    return longest, kept, busiest


def _queued(schedule: Path) -> float:
    """Return the seconds for which a runnable thread has waited for a processor."""
    return int(schedule.read_text().split()[1]) / 1e9


Attack = Callable[[Scene], AsyncIterator[None]]
"""Prepares an attack, then performs one action at each step."""


async def pipelining(_: Scene) -> AsyncIterator[None]:
    """Send requests without pause on 100 connections from another address to the health port."""
    metrics = ProxyMetrics()
    server = HttpServer("healthz", routes(ProxyHealth(metrics, 30.0).routes()))
    server.start(HEALTH)
    loop, clients = asyncio.get_running_loop(), Companion("bench.flood", *map(str, HEALTH), str(CONNECTIONS))
    try:
        while True:
            yield
            await loop.run_in_executor(None, partial(clients.ask, "flood", seconds=0.5))
    finally:
        clients.close()
        await server.stop()


async def flips(scene: Scene, wide: Wide) -> AsyncIterator[None]:
    """Make one endpoint of a large Service ready and unready in turn, each time after the kernel has the previous
    change."""
    arrived = scene.settling(wide.name)
    scene.say(*wide.added())
    await arrived
    ready = True
    while True:
        yield
        ready = not ready
        changed = scene.settling(wide.name)
        scene.say(wide.slice_line(scene.version(), wide.endpoints, ready=ready))
        await changed


async def counts(scene: Scene, wide: Wide) -> AsyncIterator[None]:
    """Remove one endpoint of a Service at each step."""
    arrived = scene.settling(wide.name)
    scene.say(*wide.added())
    await arrived
    left = wide.endpoints
    while True:
        yield
        left -= 1
        changed = scene.settling(wide.name)
        scene.say(wide.slice_line(scene.version(), left))
        await changed


async def waves(scene: Scene, kind: Wide, services: int) -> AsyncIterator[None]:
    """Add a number of Services together, and remove them together."""
    all_of_them = [kind._replace(number=kind.number + turn) for turn in range(services)]
    while True:
        for lines in ([wide.added() for wide in all_of_them], [wide.removed() for wide in all_of_them]):
            yield
            changed = [scene.settling(wide.name) for wide in all_of_them]
            for one in lines:
                scene.say(*one)
            await asyncio.gather(*changed)


async def _limit(seconds: float) -> float:
    """Return the longest time, in seconds, that a transaction without any change takes in the kernel."""
    loop, longest, end = asyncio.get_running_loop(), 0.0, time.perf_counter() + seconds
    with closing(Transactions.open()) as link:
        while (began := time.perf_counter()) < end:
            await loop.run_in_executor(None, link.commit, [table_message(Family.IPV4, "limit")])
            longest = max(longest, time.perf_counter() - began)
            await asyncio.sleep(TICK)
    return longest


class Case(NamedTuple):
    """An attack; during some attacks another program loads elements into a separate table."""

    attack: Attack
    neighbour: bool = False


MAGLEV = Wide(20_000, ports=16, endpoints=10, annotations={"kube-proxy-py/algorithm": "maglev-4093"})
CASES = {
    "100 connections pipeline": Case(pipelining),
    "200 ports x 20 addresses x 300 flip": Case(
        partial(flips, wide=Wide(20_000, ports=200, endpoints=300, addresses=20))
    ),
    "1,000 ports x 100 flip": Case(partial(flips, wide=Wide(20_000, ports=1000, endpoints=100))),
    "40 Services x 16 ports of Maglev": Case(partial(waves, kind=MAGLEV, services=40)),
    "affinity, 1,000 endpoints": Case(partial(counts, wide=Wide(20_000, endpoints=1000, affinity=True)), True),
    "affinity, 5,000 endpoints": Case(partial(counts, wide=Wide(20_000, endpoints=5000, affinity=True)), True),
}
GATED = tuple(CASES)[:5]


def measure(case: str, seconds: float) -> dict[str, float]:
    """Measure a quiet run and an attack in this process; times in ms."""
    return asyncio.run(_measure(CASES[case], seconds))


async def _measure(case: Case, seconds: float) -> dict[str, float]:
    yardstick, size = Yardstick(), objects.parse_size(SIZE)
    proxy.collect_as_the_proxy_does()
    configure({"lines": [f"address add {address}/32 dev lo" for address in (HEALTH[0], flood.SOURCE)]})
    scene = Scene()
    try:
        await scene.fill(size)
        await scene.watch(0.5, size)
        for _ in range(50):
            yardstick.measure()
        quiet = await scene.watch(seconds, size)
        async with AsyncExitStack() as stack:
            if case.neighbour:
                await stack.enter_async_context(_beside())
            limit = await _limit(max(seconds, 3.0) if case.neighbour else 0.1)
            done = await stack.enter_async_context(_attacking(case.attack(scene)))
            seen = await scene.watch(seconds, size)
        # The report that Services exceed the node's budget for tables is expected: it is the defence.
        failures = [failure for failure in scene.listener.failures if "--balancing-entries" not in failure]
        if failures:
            raise RuntimeError("; ".join(failures[:5]))
    finally:
        await scene.close()
    beyond = max(0.0, max(seen.delays)[0] - max(quiet.delays)[0])
    return {
        "limit": limit * 1e3,
        "beyond": beyond / max(limit, GOAL_DELAY / 1e3),
        "hold": seen.hold * 1e3,
        "kept": seen.kept * 1e3,
        "busy": seen.busy * 1e3,
        "quiet_hold": quiet.hold * 1e3,
        "delay": max(seen.delays)[0] * 1e3,
        "spent": max(spent for _, spent in seen.delays) * 1e3,
        "quiet_delay": max(quiet.delays)[0] * 1e3,
        "done": done() / seconds,
        "yardstick": yardstick.seconds * 1e3,
    }


@asynccontextmanager
async def _attacking(steps: AsyncIterator[None]) -> AsyncIterator[Callable[[], int]]:
    """Run an attack during the body, which gets the attack's number of steps."""
    await anext(steps)
    done = 0

    async def go() -> None:
        nonlocal done
        async for _ in steps:
            done += 1

    task = asyncio.create_task(go())
    try:
        yield lambda: done
        if task.done():
            task.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _beside() -> AsyncIterator[None]:
    """Let another program repeatedly load many elements into another table."""
    stranger = Companion("bench.stranger", str(STRANGERS))
    try:
        yield
    finally:
        stranger.close()


def run(with_: Run) -> Report:
    """Measure all attacks; in a quick run, only those of the gate."""
    count, seconds = (2, 1.0) if with_.quick else (3, 5.0)
    rows = []
    for case in GATED if with_.quick else CASES:
        runs = [
            with_.measure(f"{case}, run {turn + 1}/{count}", measure, case=case, seconds=seconds)
            for turn in range(count)
        ]
        figures: dict[str, Any] = dict(spreads(runs))
        for name, of in (("own", "busy"), ("late", "spent")):
            figures[name] = ratio([run[of] for run in runs], [run["yardstick"] for run in runs])
        rows.append(Row(case, figures))
    notes = (
        f"{SIZE}; one other Service changes each {EVERY * 1e3:.0f} ms, {seconds} s quiet and {seconds} s attacked.",
        "delay: from a change's due time to the kernel's acknowledgement. own, late: the CPU times, counted in",
        "yardsticks (bench/yardstick.py): in these units other work of the machine has less effect.",
        "limit: the longest transaction without any change, while only the other program runs. beyond: delay minus the",
        f"quiet delay, in units of {GOAL_DELAY:.0f} ms or of the limit, if that is longer.",
        f"goal: hold under {GOAL_HOLD:.0f} ms, beyond at most 1.",
    )
    chart = Chart(
        "Under attack, compared with a quiet run",
        (
            panel_by_kind("Longest hold of the loop", "ms", "", rows, {"quiet_hold": "quiet", "hold": "attacked"}),
            panel_by_kind("Latest change", "ms", "", rows, {"quiet_delay": "quiet", "delay": "attacked"}),
        ),
    )
    return Report("hostile", "Attacks, and their effect on other clients", COLUMNS, rows, chart, notes)
