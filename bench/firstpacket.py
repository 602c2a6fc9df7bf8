"""firstpacket: the time that a Service adds to a connection's first packet, and to connect(), for several numbers of
endpoints.

It is compared with a table of the Go kube-proxy's shape (upstream_shape.py). Both are loaded, with 10,000 more
Services, and one is dormant while the other is measured; straight is to the Service's own endpoints, with the same
table in effect."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any, Final

from bench import objects, proxy, upstream_shape
from bench.charts import Chart
from bench.figures import median, percentile, ratio, spreads
from bench.network import CLIENT, Network
from bench.pods import PORT
from bench.report import Column, Report, Row, Value, panel_by_kind
from bench.runs import Run
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced, Upserted
from kubeproxy.model.planner import Planner

COUNTS: Final = (1, 5, 10, 17, 100, 1000)
OTHERS: Final = objects.Size(10_000, 10)
TABLES: Final = {"ours": "ip kube-proxy", "upstream": upstream_shape.TABLE}

_DROP: Final = """
add table ip sink
add chain ip sink end { type filter hook postrouting priority 150 ; policy drop ; }
"""
"""Connection tracking deletes the entry of a dropped packet, so each packet is the first of its connection."""

COLUMNS = (
    Column("added ns", "ours", 0),
    Column("upstream's shape ns", "upstream", 0),
    Column("ratio", "ratio", 2),
    Column("straight ns", "straight", 0),
    Column("upstream's straight ns", "upstream_straight", 0),
    Column("connect() us", "ours_connect", 2),
    Column("upstream's shape us", "upstream_connect", 2),
)


def _endpoints(place: int) -> list[str]:
    first = OTHERS.services * OTHERS.endpoints + 2 * COUNTS[-1] * (place + 1)
    return objects.endpoints_of(first // COUNTS[place], COUNTS[place])


def _cluster_ips() -> list[str]:
    return [objects.cluster_ip(OTHERS.services + place) for place in range(len(COUNTS))]


def measure(rounds: int, bursts: int, connections: int) -> dict[str, dict[str, float]]:
    """Return the figures for each number of endpoints: ns of a packet, us of connect()."""
    network = Network()
    try:
        network.pods.ask("accept")
        _program()
        services = {ip: _endpoints(place) for place, ip in enumerate(_cluster_ips())}
        _nft(upstream_shape.text(services, [objects.cluster_ip(number) for number in range(OTHERS.services)]))
        for table in TABLES.values():
            _nft(f"add table {table} {{ flags dormant ; }}")
        connecting = _measured(network, "alternate", rounds, connections, 50)
        _nft(_DROP)
        sending = _measured(network, "bursts", rounds, bursts, 20)
    finally:
        network.close()
    found: dict[str, dict[str, float]] = {str(count): {} for count in COUNTS}
    for kind in TABLES:
        for place, figures in enumerate(found.values()):
            straight, through = sending[kind][2 * place : 2 * place + 2]
            prefix = "" if kind == "ours" else f"{kind}_"
            figures |= {kind: (through - straight) * 1e9, f"{prefix}straight": straight * 1e9}
            straight, through = connecting[kind][2 * place : 2 * place + 2]
            figures[f"{kind}_connect"] = (through - straight) * 1e6
    return found


def _program() -> None:
    """Program all Services by the proxy's own planner and backend."""
    world = proxy.world()
    planner, backend = Planner(world), NftablesBackend(KernelTable.open(Family.IPV4), world)
    services = proxy.decoded("services", objects.service_pages(OTHERS))
    slices = proxy.decoded("endpointslices", objects.slice_pages(OTHERS))
    planner.apply([Replaced("services", services), Replaced("endpointslices", slices)])
    for place, count in enumerate(COUNTS):
        number, addresses = OTHERS.services + place, _endpoints(place)
        planner.apply([Upserted("services", proxy.decoded_object("services", objects.service(number)))])
        for start in range(0, count, objects.SLICE):
            some, part = addresses[start : start + objects.SLICE], start // objects.SLICE
            body = objects.endpoint_slice(number, some, part=part)
            planner.apply([Upserted("endpointslices", proxy.decoded_object("endpointslices", body))])
    for _ in backend.resync({change.name: change.after.plans for change in planner.take()}):
        pass
    backend.close()


def _measured(network: Network, do: str, rounds: int, count: int, percent: int) -> dict[str, list[float]]:
    """Return for each table, and straight and through each Service, the median of all rounds, in seconds.

    A percentile of each round counts, because other work of the machine only adds time.
    """
    groups, ports = list[list[str]](), list[int]()
    for place, cluster_ip in enumerate(_cluster_ips()):
        groups += [_endpoints(place), [cluster_ip]]
        ports += [PORT, 80]
    seen: dict[str, list[list[float]]] = {kind: [] for kind in TABLES}
    for turn in range(rounds + 1):
        for kind, table in TABLES.items():
            _nft(f"add table {table}")
            taken = network.client.ask(do, source=CLIENT, groups=groups, ports=ports, count=count)["seconds"]
            _nft(f"add table {table} {{ flags dormant ; }}")
            if turn:  # The first round warms up.
                seen[kind].append([percentile(each, percent) for each in taken])
    return {kind: [median(each) for each in zip(*turns, strict=True)] for kind, turns in seen.items()}


def _nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True, timeout=60)


def run(with_: Run) -> Report:
    """Measure all numbers of endpoints."""
    runs, rounds = (3, 6) if with_.quick else (5, 12)
    found: list[dict[str, dict[str, Any]]] = [
        with_.measure(f"run {turn + 1}/{runs}", measure, rounds=rounds, bursts=20, connections=150)
        for turn in range(runs)
    ]
    rows = []
    for count in map(str, COUNTS):
        each = [one[count] for one in found]
        compared = ratio([one["ours"] for one in each], [one["upstream"] for one in each])
        figures: dict[str, Value] = {**spreads(each), "ratio": compared}
        rows.append(Row(f"{count} endpoint{'s' * (count != '1')}", figures))
    notes = (
        "*Added* is the time that a Service adds to a forwarded SYN, in bursts of 100; *straight* SYNs use no Service.",
        "*Upstream's shape* has the chains and verdict maps of the Go kube-proxy, in the same run.",
        "The goal is a shorter time than with upstream's shape for each number of endpoints.",
    )
    return Report("firstpacket", "What a Service adds to a first packet", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    labels = {"ours": "kube-proxy", "upstream": "the Go kube-proxy's shape"}
    panel = panel_by_kind("Added to a forwarded SYN", "ns", "endpoints", rows, labels)
    return Chart("A connection's first packet", (panel,))
