"""udp: the cost of tracked flows after a change of a UDP Service: CPU time of both searches, compared with two walks of
the kernel.

The planner and the cleaner of the proxy do the work, on a real table with flows of other clients and, before each
change, a hundred flows to the endpoints that are removed. The benchmark fails if one of these remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from bench import objects, proxy
from bench.charts import Chart
from bench.figures import median, ratio, spreads
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from kubeproxy.kernel.conntrack.tracked import level, target_of
from kubeproxy.kernel.conntrack.udp_flows import Conntrack
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, NLM_F_CREATE, Netlink, attribute, nested
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event, Replaced, Upserted
from kubeproxy.model.planner import Planner
from kubeproxy.report import flows
from kubeproxy.report.flows import FlowCleaner
from kubeproxy.report.metrics import ProxyMetrics

OTHERS = (0, 1_000, 10_000, 100_000)
KINDS = {"one of ten replaced": 1, "all ten replaced": 10}
FLOWS = 100
"""Flows to the endpoints that are removed, created before each change."""

_LOOKS = 2
_NEW = 1 << 8  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_NEW
_UDP = bytes([socket.IPPROTO_UDP])
_REST = attribute(7, (600).to_bytes(4)) + attribute(3, (14).to_bytes(4))  # timeout; answered, assured, confirmed

COLUMNS = (
    Column("CPU ms", "cpu", 2),
    Column("dumps ms", "limit", 2),
    Column("ratio", "ratio", 2),
    Column("first search ms", "first", 2),
)


class Telling(FlowCleaner):
    """A cleaner that records the ends of its searches."""

    looks: asyncio.Queue[float]
    """The end of each search, by the monotonic clock."""

    async def _clean(self, *arguments: Any) -> float:
        pause = await super()._clean(*arguments)
        self.looks.put_nowait(time.perf_counter())
        return pause


def measure(others: int, going: int, changes: int) -> dict[str, float]:
    """Measure changes of one Service with this number of other flows; times in ms."""
    flows.SECOND_LOOK = 0.02  # only how long it waits  # type: ignore[misc]
    with Netlink.open(NETLINK_NETFILTER) as link:
        _track(link, _unrelated(others))
        return asyncio.run(_measured(link, others, going, changes))


async def _measured(link: Netlink, others: int, going: int, changes: int) -> dict[str, float]:
    planner = Planner(proxy.world())
    cleaner = Telling(ProxyMetrics(), [Family.IPV4], proxy.local_addresses)
    cleaner.looks = asyncio.Queue()
    cleaner.world(proxy.world())
    planner.apply(
        [Replaced("services", [proxy.decoded_object("services", objects.service(1, protocol="UDP"))]), _slices(0, 10)]
    )
    planner.take()
    spent, firsts, limits = [], [], []
    task = asyncio.create_task(cleaner.run())
    for turn in range(1, changes + 1):
        _track(link, _to(_endpoints(turn - 1, going)[:going]))
        cpu, began = time.process_time(), time.perf_counter()
        planner.apply([_slices(turn, going)])
        cleaner.changed(planner.take(), full=False)
        ends = [await cleaner.looks.get() for _ in range(_LOOKS)]
        spent.append(time.process_time() - cpu)
        firsts.append(ends[0] - began)
        if (left := level(link).entries) != others:
            raise RuntimeError(f"{left - others} stale flows are left")
        limits.append(_dumped())
        await asyncio.sleep(0.2)  # the cleaner's own pause
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    found = {"cpu": spent, "first": firsts, "limit": limits}
    return {name: median(values) * 1e3 for name, values in found.items()}


def _dumped() -> float:
    """Return the CPU time of two filtered dumps by the kernel."""
    with Conntrack() as tracking:
        list(tracking.udp_flows(2, {_TARGET: None}))
        began = time.thread_time()
        for _ in range(_LOOKS):
            list(tracking.udp_flows(2, {_TARGET: None}))
        return time.thread_time() - began


_VIP = (socket.inet_aton(objects.cluster_ip(1)), 80)
_TARGET = target_of(_VIP[0], socket.IPPROTO_UDP, _VIP[1])


def _endpoints(turn: int, going: int) -> list[str]:
    """Return the Service's endpoints after this number of changes; those that the next change removes come first."""
    return [objects.spare(10 * turn + i) for i in range(going)] + [objects.spare(10**6 + i) for i in range(10 - going)]


def _slices(turn: int, going: int) -> Event:
    body = objects.endpoint_slice(1, _endpoints(turn, going), turn + 1, protocol="UDP")
    return Upserted("endpointslices", proxy.decoded_object("endpointslices", body))


def _to(endpoints: Sequence[str]) -> Iterator[bytes]:
    client = socket.inet_aton("10.244.0.3")
    for number in range(FLOWS):
        source = (20_000 + number).to_bytes(2)
        endpoint = socket.inet_aton(endpoints[number % len(endpoints)])
        yield (
            _tuple(1, client, source, _VIP[0], _VIP[1].to_bytes(2))
            + _tuple(2, endpoint, (8080).to_bytes(2), client, source)
        )


def _unrelated(count: int) -> Iterator[bytes]:
    client, server = socket.inet_aton("10.244.0.2"), socket.inet_aton("203.0.113.77")
    for first, second in islice(product(range(1024, 65_000), range(1, 100)), count):
        here, there = first.to_bytes(2), second.to_bytes(2)
        yield _tuple(1, client, here, server, there) + _tuple(2, server, there, client, here)


def _tuple(kind: int, source: bytes, source_port: bytes, destination: bytes, destination_port: bytes) -> bytes:
    addresses = nested(1, attribute(1, source), attribute(2, destination))
    return nested(
        kind, addresses, nested(2, attribute(1, _UDP), attribute(2, source_port), attribute(3, destination_port))
    )


def _track(link: Netlink, entries: Iterator[bytes]) -> None:
    payloads = (b"\2\0\0\0" + entry + _REST for entry in entries)
    while chunk := list(islice(payloads, 50_000)):
        link.requests(_NEW, chunk, "entries", NLM_F_CREATE)


def run(with_: Run) -> Report:
    """Measure all kinds of change with all sizes of the table."""
    others, count, changes = (OTHERS[2:3], 2, 10) if with_.quick else (OTHERS, 3, 20)
    rows = []
    for entries in others:
        for kind, going in KINDS.items():
            case = f"{kind}, {entries:,} flows of others"
            runs = [
                with_.measure(f"{case}, run {n + 1}/{count}", measure, others=entries, going=going, changes=changes)
                for n in range(count)
            ]
            figures: dict[str, Any] = dict(spreads(runs))
            figures["ratio"] = ratio([one["cpu"] for one in runs], [one["limit"] for one in runs])
            rows.append(Row(case, figures))
    notes = (
        "The CPU time includes the planner, both searches of the table, and the event loop between them.",
        "`dumps` is the time of two dumps: the kernel searches its table twice for the flows to one destination.",
    )
    panel = panel_by_kind("CPU time of a change", "ms", "change", rows, {"cpu": "ours", "limit": "two dumps"})
    return Report(
        "udp", "Tracked flows after a change of a UDP Service", COLUMNS, rows, Chart("UDP flows", (panel,)), notes
    )
