"""balancing: the cost of weights and Maglev compared with equal shares; in one run, 100 of 1,000 Services have them.

Measures the full sync of these Services and changes of their endpoints, through decoder, planner and backend, and the
first packet of a connection from the node itself to one of the Services. The figures are CPU time, including the
kernel's, because a change is short compared with a time slice."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from bench import change, objects, proxy
from bench.charts import Chart
from bench.figures import median, spreads
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Upserted
from kubeproxy.model.objects import Annotations
from kubeproxy.model.planner import Planner

SIZE: Final = "1kx10"
CHOSEN: Final = objects.Size(100, 10)
KINDS: Final[Mapping[str, Annotations]] = {
    "even": Annotations(),
    "drained: 1 of 10": Annotations(weights="node-0=0"),
    "weights: 1 of 10 has half": Annotations(weights="node-0=50"),
    "Maglev, 251 slots": Annotations(algorithm="maglev-251"),
    "Maglev, 1021 slots": Annotations(algorithm="maglev"),
    "Maglev, 4093 slots": Annotations(algorithm="maglev-4093"),
}
SETTLING: Final = 2.0
"""Seconds in which the kernel's hash table grows to the size of its content; until then each change takes many times as
long."""
GOALS: Final = "goals: weights 1.3 times the even change at most; Maglev with 1021 slots below 2,000 us a change"

COLUMNS = (
    Column("slots", "slots", 0, spread=False),
    Column("full sync of 100 ms", "full", 1),
    Column("a slot us", "slot", 2),
    Column("endpoint replaced us", "replaced", 0),
    Column("endpoint added us", "added", 0),
    Column("to even", "ratio", 2),
    Column("first packet us", "packet", 1),
)


def measure(kind: str, pairs: int) -> dict[str, float]:
    """Measure one way to share connections: ms, us, and the number of slots of a Service."""
    wanted = objects.parse_size(SIZE)
    proxy.collect_as_the_proxy_does()
    planner, backend = Planner(proxy.world()), NftablesBackend(KernelTable.open(Family.IPV4), proxy.world())
    planner.apply(change.lists(wanted))
    chosen = {objects.names(number) for number in range(CHOSEN.services)}
    for name in chosen:
        known = planner.services[name]
        meta = replace(known.metadata, annotations=KINDS[kind])
        planner.apply([Upserted("services", replace(known, metadata=meta))])
    plans = {each.name: each.after.plans for each in planner.take()}
    for _ in backend.resync({name: its for name, its in plans.items() if name not in chosen}):
        pass
    proxy.settled()
    began = time.process_time()
    for _ in backend.sync([(name, plans[name]) for name in chosen]):
        pass
    full = time.process_time() - began
    time.sleep(SETTLING)
    slots = sum(len(item.cluster) for name in chosen for item in backend._placed[name])
    found = {"slots": slots / len(chosen), "full": full * 1e3, "slot": full * 1e6 / slots}
    decoders = change.Decoders()
    steps = (step for step in change.steps(CHOSEN, pairs) if step.case.startswith("endpoint"))
    found |= change.timed(steps, lambda lines: change.one(decoders, planner, backend, lines), time.process_time)
    found["packet"] = _first_packet(1000)
    backend.close()
    return found


def _first_packet(count: int) -> float:
    """Return the us to send the first segment of a connection, including the choice of an endpoint."""
    for words in (("addr", "add", f"{objects.NODE_IP}/32", "dev", "lo"), ("route", "add", "default", "dev", "lo")):
        subprocess.run(["ip", *words], check=True, timeout=10)
    taken = []
    for port in range(20_000, 20_000 + count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.bind((objects.NODE_IP, port))
            client.setblocking(False)
            began = time.process_time()
            client.connect_ex((objects.cluster_ip(port % CHOSEN.services), 80))
            taken.append(time.process_time() - began)
    return median(taken) * 1e6


def run(with_: Run) -> Report:
    """Measure all kinds in turns."""
    count, pairs = (2, 30) if with_.quick else (5, 100)
    runs = with_.in_turns(KINDS, count, lambda kind, what: with_.measure(what, measure, kind=kind, pairs=pairs))
    for each in runs.values():
        for found, even in zip(each, runs["even"], strict=True):
            found["ratio"] = found["replaced"] / even["replaced"]
    rows = [Row(kind, dict(spreads(each))) for kind, each in runs.items()]
    return Report("balancing", "What weights and Maglev cost", COLUMNS, rows, _chart(rows), (GOALS,))


def _chart(rows: list[Row]) -> Chart:
    along = "how connections are shared"
    return Chart(
        "Weights and Maglev",
        (panel_by_kind("One change", "us", along, rows, {"replaced": "replaced", "added": "added"}),),
    )
