"""e2e: the time from a write to the API server to the first packet at the new endpoint, compared with another
kube-proxy.

The proxy is a process that watches the lab's API server; packets come from a client's namespace through the node's
namespace to a third. Each change moves a Service with one endpoint to another address.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from bench import objects
from bench.apiserver import ApiProcess
from bench.charts import Chart, Panel
from bench.contestant import OURS, Contestant
from bench.figures import percentile, spreads
from bench.network import Network
from bench.report import Column, Report, Row, series
from bench.runs import Run

SIZES = ("1kx10", "10kx10")
GOAL_P50, GOAL_P99, GOAL_CPU = 5.0, 20.0, 2.0  # ms
SETTLE = 0.05  # seconds between changes
AT_LEAST, LONGEST = 10, 40.0  # changes of a Service, and seconds after which no more changes follow
TIMEOUT = 600.0  # seconds until the first packet gets through; other proxies need minutes at 10,000 Services

COLUMNS = (
    Column("UDP p50 ms", "udp_p50", 2),
    Column("UDP p99 ms", "udp_p99", 2),
    Column("TCP p50 ms", "tcp_p50", 2),
    Column("TCP p99 ms", "tcp_p99", 2),
    Column("UDP CPU ms", "udp_cpu", 2),
    Column("TCP CPU ms", "tcp_cpu", 2),
    Column("RSS MB", "rss", 0, spread=False),
    Column("start s", "first", 2, spread=False),
)


class Probed(NamedTuple):
    """A probed Service: its number, its protocol, and its two alternate addresses."""

    number: int
    protocol: str
    addresses: tuple[str, str]

    def slice(self, at: int, version: int) -> str:
        return objects.endpoint_slice(self.number, [self.addresses[at]], version, protocol=self.protocol, port=8080)


def measure(size: str, command: str, mode: str, changes: int) -> dict[str, float]:
    """Measure one proxy at one size: latencies and CPU time in ms."""
    wanted = objects.parse_size(size)
    probed = [
        Probed(wanted.services, "UDP", (objects.spare(1), objects.spare(2))),
        Probed(wanted.services + 1, "TCP", (objects.spare(3), objects.spare(4))),
    ]
    network, api = Network(), ApiProcess()
    try:
        network.pods.ask("answer", addresses=[address for p in probed for address in p.addresses])
        api.load(wanted)
        for item in probed:
            api.put("services", objects.service(item.number, protocol=item.protocol))
            api.put("endpointslices", item.slice(0, 1))
        proxy = Contestant(command, mode, api.url)
        try:
            return _measured(network, api, proxy, probed, changes)
        finally:
            proxy.close()
    finally:
        api.close()
        network.close()


def _measured(
    network: Network, api: ApiProcess, proxy: Contestant, probed: Sequence[Probed], changes: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in probed:
        awaited(network, proxy, item)
    found["first"] = time.monotonic() - proxy.started
    time.sleep(1)
    for item in probed:
        before = proxy.cpu_seconds()
        latencies: list[float] = []
        began = time.monotonic()
        while len(latencies) < changes and (len(latencies) < AT_LEAST or time.monotonic() - began < LONGEST):
            latencies.append(move(network, api, proxy, item, len(latencies) + 1))
        name = item.protocol.lower()
        found |= {f"{name}_p50": percentile(latencies, 50), f"{name}_p99": percentile(latencies, 99)}
        time.sleep(SETTLE)  # work after a change is attributed to this change
        found[f"{name}_cpu"] = (proxy.cpu_seconds() - before) * 1e3 / len(latencies)
    found["rss"] = proxy.memory()[0]
    return found


def awaited(network: Network, proxy: Contestant, item: Probed) -> None:
    """Wait until a Service answers."""
    while not _probe(network, item, item.addresses[0], 1.0).answer()["at"]:
        if not proxy.running or time.monotonic() - proxy.started > TIMEOUT:
            raise RuntimeError(f"no packet got through {item}:\n{proxy.said()}")


def move(network: Network, api: ApiProcess, proxy: Contestant, item: Probed, turn: int) -> float:
    """Move a Service to its other address; return the ms from the write to the first packet at this address."""
    time.sleep(SETTLE)
    client = _probe(network, item, item.addresses[turn % 2], 60.0)
    time.sleep(0.002)  # The probes are on their way before the write.
    written = api.put("endpointslices", item.slice(turn % 2, turn + 1))
    landed = int(client.answer()["at"])
    if not landed:
        raise RuntimeError(f"change {turn} of {item} never reached the kernel:\n{proxy.said()}")
    return (landed - written) / 1e6


def _probe(network: Network, item: Probed, expected: str, limit: float) -> Any:
    target = objects.cluster_ip(item.number)
    network.client.tell("probe", protocol=item.protocol, address=target, port=80, expected=expected, limit=limit)
    return network.client


def run(with_: Run) -> Report:
    """Measure our proxy and the peer in turn."""
    contestants = [("kube-proxy", OURS, "nftables")]
    if with_.peer is not None:
        contestants.append((f"peer ({with_.peer_mode})", with_.peer, with_.peer_mode))
    sizes, count, changes = (("1kx10",), 2, 30) if with_.quick else (SIZES, 2 if with_.peer else 3, 100)
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for size in sizes:
        for turn in range(count):
            for name, command, mode in contestants:
                what = f"{name} {size} run {turn + 1}/{count}"
                found = with_.measure(what, measure, size=size, command=command, mode=mode, changes=changes)
                runs.setdefault((size, name), []).append(found)
    rows = [Row(f"{size} {name}", dict(spreads(found))) for (size, name), found in runs.items()]
    notes = (
        "The endpoint's clock measures the first packet; clients send a probe about every 100 us, each as a new flow.",
        f"A run has {changes} changes of each Service, or at least {AT_LEAST} if it would take over {LONGEST:.0f} s.",
        f"The goals: p50 under {GOAL_P50:.0f} ms, p99 under {GOAL_P99:.0f} ms, CPU under {GOAL_CPU:.0f} ms a change.",
    )
    title = "API write to the first packet on the new endpoint"
    return Report("e2e", title, COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    cases = [row.case for row in rows]
    colour = partial(series, rows)
    latencies = [colour(f"{p.upper()} {q}", f"{p}_{q}") for p in ("udp", "tcp") for q in ("p50", "p99")]
    along = "Services x endpoints"
    return Chart(
        "API write to the first packet on the new endpoint",
        (
            Panel("Latency", "ms", along, cases, latencies, goal=GOAL_P50, goal_label="goal p50", logarithmic=True),
            Panel(
                "CPU time of the proxy",
                "ms a change",
                along,
                cases,
                (colour("UDP", "udp_cpu"), colour("TCP", "tcp_cpu")),
                goal=GOAL_CPU,
            ),
        ),
    )
