"""lasting: the throughput of long-lived connections through a Service, in each available mode, compared with direct
connections.

The proxy is a process that watches the lab's API server. TCP streams are counted in bytes at the sender, which the
receiver slows down; small datagrams are counted at the receiver, and each of them passes the rules once. It also
measures the kernel's memory for the rules of 10,000 Services.
"""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Sequence

from bench import memory, objects
from bench.apiserver import ApiProcess
from bench.charts import Chart, Panel
from bench.contestant import OURS, Contestant
from bench.figures import median, spreads
from bench.network import Network
from bench.pods import DRAIN_PORT
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run

MODES = ("nftables", "iptables-nft", "iptables-legacy", "userspace")
CONNECTIONS = (1, 64, 1024)
SIZE = "1kx10"
FILLED = "10kx10"
DATAGRAM = 64  # bytes
KINDS = ("service", "straight")
SETTLING, STEADY = 20, 0.5  # readings of the kernel's memory, and their largest difference at the end, in MB

COLUMNS = (
    Column("Gbit/s", "service_TCP", 2),
    Column("straight Gbit/s", "straight_TCP", 2),
    Column("of straight", "ratio_TCP", 2),
    Column("datagrams/s", "service_UDP", 0),
    Column("straight /s", "straight_UDP", 0),
    Column("of straight", "ratio_UDP", 2),
    Column("slab MB", "slab", 1),
    Column("other kernel MB", "other", 1),
)


def measure(mode: str, connections: int, rounds: int, seconds: float) -> dict[str, float]:
    """Measure a mode with this number of connections:

    Gbit/s and datagrams per second, through a Service and directly.
    """
    allow_files()
    wanted = objects.parse_size(SIZE)
    network, api = Network(), ApiProcess()
    try:
        network.pods.ask("accept")
        api.load(wanted)
        endpoint = objects.endpoints_of(wanted.services, 1)
        services = {"TCP": wanted.services, "UDP": wanted.services + 1}
        for protocol, number in services.items():
            api.put("services", objects.service(number, protocol=protocol))
            api.put("endpointslices", objects.endpoint_slice(number, endpoint, protocol=protocol, port=DRAIN_PORT))
        proxy = _started(mode, api)
        try:
            found: dict[str, float] = {}
            for protocol, number in services.items():
                targets = {"service": (objects.cluster_ip(number), 80), "straight": (endpoint[0], DRAIN_PORT)}
                found |= _measured(network, protocol, targets, connections, rounds, seconds)
            return found
        finally:
            proxy.close()
    finally:
        api.close()
        network.close()


def allow_files() -> None:
    """Raise the number of files that this process and its children may open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1 << 16), most))


def hinted(mode: str) -> str:
    """Return the mode's name; announce its variant of iptables as the host's variant, as the kubelet does."""
    name, _, variant = mode.partition("-")
    if variant:
        subprocess.run([f"iptables-{variant}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"], check=True, timeout=30)
    return name


def _started(mode: str, api: ApiProcess) -> Contestant:
    proxy = Contestant(OURS, hinted(mode), api.url)
    try:
        proxy.wait("/readyz", 120)
    except BaseException:
        proxy.close()
        raise
    return proxy


def _measured(
    network: Network,
    protocol: str,
    targets: dict[str, tuple[str, int]],
    connections: int,
    rounds: int,
    seconds: float,
) -> dict[str, float]:
    """Measure service and straight in turns, so that disturbances by the machine affect both alike."""
    client = network.client
    for kind, (address, port) in targets.items():
        client.ask("last", name=kind, address=address, port=port, connections=connections, protocol=protocol)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(rounds + 1):
        for kind in KINDS:
            if protocol == "TCP":
                rate = client.ask("streams", name=kind, seconds=seconds)["rate"] * 8 / 1e9
            else:
                rate = _datagrams(network, kind, seconds)
            if turn:  # the first round warms up
                rates[kind].append(rate)
    for kind in KINDS:
        client.ask("end", name=kind)
    found = {f"{kind}_{protocol}": median(rates[kind]) for kind in KINDS}
    pairs = zip(rates["service"], rates["straight"], strict=True)
    return found | {f"ratio_{protocol}": median(service / straight for service, straight in pairs)}


def _datagrams(network: Network, kind: str, seconds: float) -> float:
    """Return the number of datagrams that arrived per second."""
    before, began = network.pods.ask("arrived")["count"], time.perf_counter()
    network.client.ask("datagrams", name=kind, seconds=seconds, size=DATAGRAM)
    spent = time.perf_counter() - began
    time.sleep(0.05)  # datagrams that a proxy still relays
    return float((network.pods.ask("arrived")["count"] - before) / spent)


def measure_memory(mode: str) -> dict[str, float]:
    """Measure the kernel's memory for the rules of a mode, in MB: slab, and other memory."""
    wanted, api = objects.parse_size(FILLED), ApiProcess()
    try:
        api.load(wanted)
        before = _settled_memory()
        proxy = _started(mode, api)
        after = _settled_memory()
        proxy.close()
    finally:
        api.close()
    return {name: after[name] - before[name] for name in before}


def _settled_memory() -> dict[str, float]:
    """Return the kernel's memory when it is stable: earlier namespaces are removed, and hash tables have grown."""
    found = _kernel_memory()
    for _ in range(SETTLING):
        before = found
        time.sleep(1.0)
        found = _kernel_memory()
        if all(abs(found[name] - before[name]) < STEADY for name in found):
            break
    return found


def _kernel_memory() -> dict[str, float]:
    """Return the kernel's memory in MB: objects of its general caches (rules), and areas of whole pages."""
    machine = memory.machine()
    return {"slab": memory.kmalloc() / 1e6, "other": (machine["VmallocUsed"] + machine["Percpu"]) / 1e3}


def run(with_: Run) -> Report:
    """Measure each mode with each number of connections."""
    count, rounds, numbers = (1, 4, CONNECTIONS[:2]) if with_.quick else (3, 10, CONNECTIONS)
    rows = []
    for connections in numbers:
        measuring = {"connections": connections, "rounds": rounds, "seconds": 0.15}

        def once(mode: str, what: str, measuring: dict[str, float] = measuring) -> dict[str, float]:
            return dict(with_.measure(what, measure, mode=mode, **measuring))

        case = f"{connections} connection{'s' * (connections > 1)}"
        runs = with_.in_turns(MODES, count, once, f"{case},")
        rows += [Row(f"{mode}, {case}", dict(spreads(found))) for mode, found in runs.items()]
    kept = with_.in_turns(MODES, count, lambda mode, what: dict(with_.measure(what, measure_memory, mode=mode)), FILLED)
    rows += [Row(f"{mode}, rules of {FILLED}", dict(spreads(found))) for mode, found in kept.items()]
    notes = (
        f"The connections use a Service with one endpoint, in addition to the Services of {SIZE}.",
        f"A datagram has {DATAGRAM} bytes; the receiver counts the datagrams.",
        "The kernel's memory for the rules consists of kmalloc objects (*slab*) and whole pages (*other*).",
        "Client, endpoint and (in userspace mode) proxy share the CPUs.",
    )
    title = "Throughput of long-lived connections through a Service"
    return Report("lasting", title, COLUMNS, rows, _chart([row for row in rows if "ratio_TCP" in row.figures]), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    labels = {"service": "through a Service", "straight": "straight to the endpoint"}

    def panel(heading: str, unit: str, protocol: str) -> Panel:
        figures = {f"{kind}_{protocol}": labels[kind] for kind in KINDS}
        return panel_by_kind(heading, unit, "", rows, figures)

    return Chart(
        "Connections that last",
        (panel("TCP", "Gbit/s", "TCP"), panel("UDP", "datagrams a second", "UDP")),
    )
