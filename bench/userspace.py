"""userspace: the cost of a proxy that relays the bytes: requests, added latency, streams; compared with direct
connections.

The data path is the proxy's own, in the measuring process, programmed by its planner and backend. A gigabyte is sent
through it and its checksum compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import objects, proxy
from bench.charts import Chart, Panel
from bench.figures import median, percentile, spreads
from bench.network import Network
from bench.pods import CHECK_PORT, ECHO_PORT, SINK_PORT
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from kubeproxy.backends.relay.datapath import DataPath
from kubeproxy.backends.userspace.backend import UserspaceBackend
from kubeproxy.backends.userspace.listeners import Listeners
from kubeproxy.backends.userspace.udp import Sessions
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from kubeproxy.model.planner import Planner

CONNECTIONS = (1, 16, 128)
KINDS = ("carried", "straight")
REQUEST = 100  # bytes; the answer has the same size
GIGABYTE = 1 << 30

COLUMNS = (
    Column("requests/s", "carried_rate", 0),
    Column("straight /s", "straight_rate", 0),
    Column("p50 us", "carried_p50", 1),
    Column("straight p50", "straight_p50", 1),
    Column("added us", "added_p50", 1),
    Column("p99 us", "carried_p99", 1),
    Column("straight p99", "straight_p99", 1),
    Column("own p50 us", "carried_own", 1),
    Column("straight own", "straight_own", 1),
    Column("Gbit/s", "carried_stream", 2),
    Column("straight Gb", "straight_stream", 2),
    Column("checked Gb", "carried_checked", 2),
)

Target = tuple[str, int]


def measure(connections: int, rounds: int, seconds: float) -> dict[str, float]:
    """Measure with this number of connections: requests per second, us, Gbit/s; with one connection also streams."""
    network = Network()
    path = DataPath.open(0.25)
    try:
        network.pods.ask("accept")
        endpoint = objects.endpoints_of(0, 1)[0]
        ports = (ECHO_PORT, SINK_PORT, CHECK_PORT)
        backend = _program(path, endpoint, ports)
        targets = {
            "carried": {port: (objects.cluster_ip(at), 80) for at, port in enumerate(ports)},
            "straight": {port: (endpoint, port) for port in ports},
        }
        found = _requests(network, targets, connections, rounds, seconds)
        if connections == 1:
            found |= _streams(network, targets, rounds, seconds)
        backend.close()
        return found
    finally:
        path.stop()
        network.close()


def _program(path: DataPath, endpoint: str, ports: Sequence[int]) -> UserspaceBackend:
    """Program a Service that leads to each port of the endpoint."""
    world = proxy.world()
    planner = Planner(world)
    services = [proxy.decoded_object("services", objects.service(at)) for at, _ in enumerate(ports)]
    slices = [
        proxy.decoded_object("endpointslices", objects.endpoint_slice(at, [endpoint], port=port))
        for at, port in enumerate(ports)
    ]
    planner.apply([Replaced("services", services), Replaced("endpointslices", slices)])
    backend = UserspaceBackend.open(Family.IPV4, world, path, Listeners(path, Sessions(path), range(0)))
    for _ in backend.resync({change.name: change.after.plans for change in planner.take()}):
        pass
    return backend


def _requests(
    network: Network, targets: dict[str, dict[int, Target]], connections: int, rounds: int, seconds: float
) -> dict[str, float]:
    """Measure in turns, so that disturbances by the machine affect both alike; the first round warms up."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    own: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(rounds + 1):
        for kind in KINDS:
            address, port = targets[kind][ECHO_PORT]
            where = {"address": address, "port": port, "size": REQUEST}
            taken = network.client.ask("echoes", connections=connections, limit=seconds, **where)["seconds"]
            alone = network.client.ask("requests", count=300, **where)["seconds"]
            if turn:
                times[kind] += taken
                own[kind] += alone
                rates[kind].append(len(taken) / seconds)
    found = {}
    for kind in KINDS:
        found[f"{kind}_p50"] = percentile(times[kind], 50) * 1e6
        found[f"{kind}_p99"] = percentile(times[kind], 99) * 1e6
        found[f"{kind}_own"] = percentile(own[kind], 50) * 1e6
        found[f"{kind}_rate"] = median(rates[kind])
    return found | {"added_p50": found["carried_p50"] - found["straight_p50"]}


def _streams(network: Network, targets: dict[str, dict[int, Target]], rounds: int, seconds: float) -> dict[str, float]:
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            address, port = targets[kind][SINK_PORT]
            rates[kind].append(network.client.ask("stream", address=address, port=port, seconds=seconds)["rate"])
    address, port = targets["carried"][CHECK_PORT]
    checked = network.client.ask("checked", address=address, port=port, size=GIGABYTE)["rate"]
    found = {f"{kind}_stream": median(rates[kind]) * 8 / 1e9 for kind in KINDS}
    return found | {"carried_checked": checked * 8 / 1e9}


def run(with_: Run) -> Report:
    """Measure with each number of connections."""
    count, rounds = (1, 2) if with_.quick else (3, 5)
    rows = []
    for connections in CONNECTIONS:
        case = f"{connections} connection{'s' if connections > 1 else ''}"
        runs = [
            with_.measure(
                f"{case}, run {turn + 1}/{count}", measure, connections=connections, rounds=rounds, seconds=0.5
            )
            for turn in range(count)
        ]
        rows.append(Row(case, dict(spreads(runs))))
    notes = (
        f"A request and its answer have {REQUEST} bytes each; each connection has one outstanding request.",
        "In *own*, each request opens its own connection. In *checked*, length and checksum of 1 GB are checked.",
        "Client, proxy and endpoint share the CPUs.",
    )
    return Report("userspace", "The cost of a proxy that relays the bytes", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    labels = {"carried": "relayed by the proxy", "straight": "straight to the endpoint"}

    def panel(heading: str, unit: str, figure: str) -> Panel:
        figures = {f"{kind}_{figure}": labels[kind] for kind in KINDS}
        return panel_by_kind(heading, unit, "connections", rows, figures)

    return Chart(
        "Requests through userspace mode",
        (
            panel("Requests", "a second", "rate"),
            panel("Request latency, median", "us", "p50"),
            panel("Request latency, 99th percentile", "us", "p99"),
            panel("Request with a connection of its own, median", "us", "own"),
        ),
    )
