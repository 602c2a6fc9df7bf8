"""path: the cost of a connection through a Service at different numbers of Services, compared with a direct connection
to the endpoint.

The proxy's planner and backend program the table. Straight means the same route without a Service; once with the table
loaded, and once before.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from bench import objects, proxy
from bench.charts import Chart, Panel
from bench.figures import median, percentile, spreads
from bench.network import Network
from bench.pods import PORT, SINK_PORT
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.features import CONNECTION_COUNTERS, RESETS
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced, Upserted
from kubeproxy.model.plan import Globals
from kubeproxy.model.planner import Planner

SIZES = ("10x10", "1kx10", "10kx10", "44kx10")
KINDS = ("service", "straight", "bare")

COLUMNS = (
    Column("Service p50 us", "service_p50", 1),
    Column("straight p50 us", "straight_p50", 1),
    Column("no table us", "bare_p50", 1),
    Column("Service p99 us", "service_p99", 1),
    Column("straight p99 us", "straight_p99", 1),
    Column("Service conn/s", "service_rate", 0),
    Column("straight conn/s", "straight_rate", 0),
    Column("Service Gbit/s", "service_stream", 2),
    Column("straight Gbit/s", "straight_stream", 2),
)

Target = tuple[str, int]


def measure(
    size: str,
    rounds: int,
    connections: int,
    seconds: float,
    *,
    counters: bool = False,
    resets: bool = False,
    ejects: bool = False,
) -> dict[str, float]:
    """Measure one size: us, connections per second, Gbit/s."""
    wanted = objects.parse_size(size)
    network = Network()
    try:
        network.pods.ask("accept")
        endpoint = objects.endpoints_of(0, wanted.endpoints)[0]
        straight = {"straight": ((endpoint, PORT), (endpoint, SINK_PORT))}
        bare = _measured(network, {"bare": straight["straight"]}, rounds, connections, seconds)
        world = structs.replace(RESETS.on(CONNECTION_COUNTERS.on(proxy.world(), counters), resets), ejects=ejects)
        backend = _program(wanted, world)
        service = {"service": ((objects.cluster_ip(0), 80), (objects.cluster_ip(wanted.services), 80))}
        found = _measured(network, service | straight, rounds, connections, seconds)
        backend.close()
        return bare | found
    finally:
        network.close()


def _program(size: objects.Size, world: Globals) -> NftablesBackend:
    """Program all Services, and one more that leads to the stream's port."""
    planner, backend = Planner(world), NftablesBackend(KernelTable.open(Family.IPV4), world)
    services = proxy.decoded("services", objects.service_pages(size))
    slices = proxy.decoded("endpointslices", objects.slice_pages(size))
    last, addresses = size.services, objects.endpoints_of(0, size.endpoints)
    stream = proxy.decoded_object("services", objects.service(last))
    behind = proxy.decoded_object("endpointslices", objects.endpoint_slice(last, addresses, port=SINK_PORT))
    planner.apply([Replaced("services", services), Replaced("endpointslices", slices)])
    planner.apply([Upserted("services", stream), Upserted("endpointslices", behind)])
    for _ in backend.resync({change.name: change.after.plans for change in planner.take()}):
        pass
    return backend


def _measured(
    network: Network, targets: dict[str, tuple[Target, Target]], rounds: int, connections: int, seconds: float
) -> dict[str, float]:
    """Measure the targets in turns, so that disturbances by the machine affect all alike."""
    times: dict[str, list[float]] = {kind: [] for kind in targets}
    rates: dict[str, list[float]] = {kind: [] for kind in targets}
    streams: dict[str, list[float]] = {kind: [] for kind in targets}
    for turn in range(rounds):
        for kind, (connect, stream) in targets.items():
            taken = network.client.ask("connect", address=connect[0], port=connect[1], count=connections)
            if turn == 0:
                continue  # warms up
            times[kind] += taken["seconds"]
            rates[kind].append(connections / taken["took"])
            address, port = stream
            streams[kind].append(network.client.ask("stream", address=address, port=port, seconds=seconds)["rate"])
    found = {}
    for kind in targets:
        found[f"{kind}_p50"] = percentile(times[kind], 50) * 1e6
        found[f"{kind}_p99"] = percentile(times[kind], 99) * 1e6
        found[f"{kind}_rate"] = median(rates[kind])
        found[f"{kind}_stream"] = median(streams[kind]) * 8 / 1e9
    return found


def run(with_: Run) -> Report:
    """Measure all sizes."""
    sizes, count, rounds = (("10x10", "10kx10"), 2, 4) if with_.quick else (SIZES, 3, 6)
    rows = []
    for size in sizes:
        runs = [
            with_.measure(
                f"{size} run {turn + 1}/{count}", measure, size=size, rounds=rounds, connections=1000, seconds=0.2
            )
            for turn in range(count)
        ]
        rows.append(Row(size, dict(spreads(runs))))
    notes = (
        "One process connects from a pod's address to a TCP port behind the node, with one connection at a time.",
        "*Straight* connections go to the endpoint's own address; with *no table*, our table is not loaded yet.",
    )
    return Report("path", "The cost of a connection through a Service", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    labels = {"service": "through a Service", "straight": "straight to the endpoint", "bare": "straight, no table"}

    def panel(heading: str, unit: str, figure: str) -> Panel:
        figures = {f"{kind}_{figure}": labels[kind] for kind in KINDS}
        return panel_by_kind(heading, unit, "Services x endpoints", rows, figures)

    return Chart(
        "Connections through a Service",
        (
            panel("Connect latency, median", "us", "p50"),
            panel("Connect latency, 99th percentile", "us", "p99"),
            panel("Connections of one client", "a second", "rate"),
            panel("One TCP stream", "Gbit/s", "stream"),
        ),
    )
