"""ejection: connections that fail or are late when one of three endpoints vanishes or its process dies, with and
without --eject-failing-endpoints; and the cost of the flag while no endpoint fails, and under a flood of suspects.

The engine, the ejector and the backend of the proxy run in the process of the measurement, among 10,000 Services.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from bench import lasting, objects, path, proxy, unsteady
from bench.charts import Chart
from bench.companion import Companion
from bench.figures import ratio, spreads
from bench.network import Network
from bench.pods import PORT
from bench.report import Column, Report, Row, Value, panel_by_kind
from bench.runs import Run
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.engine.ejecting import Ejector
from kubeproxy.engine.engine import Engine
from kubeproxy.features import EJECTION
from kubeproxy.model.events import Event, Replaced, Upserted

OTHERS: Final = objects.Size(10_000, 10)
FAULTS: Final = {"vanishes": "drop", "process dies": "reject with tcp reset"}
KINDS: Final = ("without", "with")
PATIENCE: Final = 5.0  # seconds after which a connection counts as failed
BEFORE: Final = 2.0  # seconds of connections before the fault

COLUMNS = (
    Column("failed", "failed", 0),
    Column("to without", "ratio", 3),
    Column("delayed", "delayed", 0),
    Column("longest s", "longest", 2),
    Column("ejected after s", "after", 2),
    Column("ejected", "ejected", 0),
    Column("connections", "count", 0),
    Column("proxy CPU %", "cpu", 2),
    Column("connect p50 us", "service_p50", 1),
    Column("conn/s", "service_rate", 0),
)


def measure(
    kind: str, fault: str, rate: int, seconds: float, before: float = BEFORE, *, flood: bool = False
) -> dict[str, float]:
    """Measure one fault after some seconds: counts of connections, and seconds."""
    return asyncio.run(_measured(kind, fault, rate, seconds, before, flood))


@contextlib.asynccontextmanager
async def running(engine: Engine, backends: Sequence[NftablesBackend]) -> AsyncIterator[None]:
    """Run an engine that ejects failing endpoints; close its backends at the end."""
    readers = [read for each in backends if (read := each.abilities.suspects) is not None]
    work = [asyncio.create_task(each) for each in (engine.run(), Ejector(engine, readers).run())]
    try:
        yield
    finally:
        for task in work:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for backend in backends:
            backend.close()


async def _measured(kind: str, fault: str, rate: int, seconds: float, before: float, flood: bool) -> dict[str, float]:
    lasting.allow_files()
    network, ejected = Network(), list[float]()
    network.pods.ask("nft", text=_fault(f"ip saddr {unsteady.DROPPED} drop"))
    settings = EJECTION.on(proxy.SETTINGS, "always" if kind == "with" else "never")
    engine, backends = proxy.engine_of(settings, proxy.Listener(lambda _: ejected.append(time.monotonic())))
    try:
        async with running(engine, backends):
            network.pods.ask("accept")
            engine.arrive(_lists())
            await engine.ready.wait()
            if flood:
                await asyncio.to_thread(_flood, network)
            await asyncio.sleep(3)
            ejected.clear()
            cpu = time.process_time()
            target: dict[str, Any] = {"address": objects.cluster_ip(OTHERS.services), "port": 80}
            network.client.tell("knock", **target, rate=rate, limit=seconds, patience=PATIENCE)
            await asyncio.sleep(before)
            spent = time.process_time() - cpu
            if fault:
                network.pods.ask("nft", text=_fault(f"ip daddr {_endpoints()[0]} tcp dport {PORT} {FAULTS[fault]}"))
            began = time.monotonic()
            found: dict[str, float] = await asyncio.to_thread(network.client.answer)
            after = ejected[0] - began if ejected else 0.0
            return {
                **found,
                "after": after,
                "cpu": 100 * spent / before,
                "ejected": len(engine.planner.ejections.failures),
            }
    finally:
        network.close()


def _lists() -> list[Event]:
    number, addresses = OTHERS.services, _endpoints()
    service = proxy.decoded_object("services", objects.service(number))
    piece = proxy.decoded_object("endpointslices", objects.endpoint_slice(number, addresses))
    return [
        Replaced("nodes", []),
        Replaced("services", proxy.decoded("services", objects.service_pages(OTHERS))),
        Replaced("endpointslices", proxy.decoded("endpointslices", objects.slice_pages(OTHERS))),
        Upserted("services", service),
        Upserted("endpointslices", piece),
    ]


def _endpoints() -> list[str]:
    return objects.endpoints_of(OTHERS.services * OTHERS.endpoints, 3)


def _flood(network: Network) -> None:
    """Make a client that all endpoints drop send SYNs to all Services until this process ends."""
    network.client.ask("configure", lines=[f"address add {unsteady.DROPPED}/24 dev eth0"])
    Companion("bench.unsteady", str(network.client.pid), "scan", str(OTHERS.services))


def _fault(rule: str) -> str:
    """Return rules by which endpoints drop or refuse packets."""
    chain = "add table ip fault\nadd chain ip fault input { type filter hook input priority 0 ; }\n"
    return f"{chain}add rule ip fault input {rule}\n"


def run(with_: Run) -> Report:
    """Measure both kinds in turns: each fault, and connections while nothing fails."""
    rate, seconds, count = (200, 8.0, 1) if with_.quick else (500, 12.0, 3)
    rows = []
    cases: dict[str, dict[str, Any]] = {each: {"fault": each, "rate": rate, "seconds": seconds} for each in FAULTS}
    cases["5,000 a second"] = {"fault": "", "rate": 5000, "seconds": 2.5 * seconds, "before": 2.5 * seconds}
    cases["flood of suspects"] = {"fault": "vanishes", "rate": rate, "seconds": 2 * seconds, "before": seconds}
    cases["flood of suspects"]["flood"] = True
    for case, arguments in cases.items():
        rows += _rows(with_, count, case, lambda kind, what: with_.measure(what, measure, kind=kind, **arguments))  # noqa: B023 - called at once
    connecting: dict[str, Any] = {"size": "10kx10", "rounds": 4, "connections": 1000, "seconds": 0.2}
    rows += _rows(
        with_,
        count + 2,
        "no fault",
        lambda kind, what: with_.measure(what, path.measure, **connecting, ejects=kind == "with"),
    )
    notes = (
        f"flood of suspects: a client that all endpoints drop sends {unsteady.SCANS} SYNs a second to all Services.",
        f"{rate} connections a second for {seconds:.0f} s; one of three endpoints fails after {BEFORE:.0f} s.",
        f"failed: not connected within {PATIENCE:.0f} s, or refused; delayed: connected after 0.5 s or more.",
    )
    return Report("ejection", "Connections when an endpoint fails", COLUMNS, rows, _chart(rows), notes)


def _rows(with_: Run, count: int, case: str, once: Callable[[str, str], dict[str, float]]) -> list[Row]:
    runs = with_.in_turns(KINDS, count, once, case)
    rows = []
    for kind in KINDS:
        figures: dict[str, Value] = {**spreads(runs[kind])}
        if kind == "with" and all(one.get("failed") for one in runs["without"]):
            figures["ratio"] = ratio(*([one["failed"] for one in runs[each]] for each in ("with", "without")))
        rows.append(Row(f"{case}, {kind}", figures))
    return rows


def _chart(rows: Sequence[Row]) -> Chart:
    faults = [row for row in rows if "failed" in row.figures]
    return Chart(
        "One of three endpoints fails",
        (panel_by_kind("Connections", "", "fault", faults, {"failed": "failed", "delayed": "delayed"}),),
    )
