"""ipvs: full sync and one change in ipvs mode, in a guest kernel with IPVS, compared with the same messages
pre-encoded.

The guest (tests/guest) is user-mode Linux: system calls cost several times more than on a real machine, so compare the
ratios to the kernel's time, not the times. Run as a program, this module measures inside the guest.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from bench import change, objects, proxy
from bench.charts import Chart, Panel
from bench.figures import ratio, spreads, summary
from bench.report import ROOT, Column, Report, Row, series
from bench.runs import Run
from bench.worker import enter_new_namespace
from kubeproxy.backends.ipvs.backend import IpvsBackend
from kubeproxy.backends.ipvs.layout import scheduler_named
from kubeproxy.backends.ipvs.mode import used_commands
from kubeproxy.backends.ipvs.wire import NodeKernel
from kubeproxy.kernel import ipvs
from kubeproxy.kernel.netlink.protocol import HEADER, NLM_F_DUMP, NLMSG_ERROR, Netlink, messages
from kubeproxy.kernel.proc import modules
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from kubeproxy.model.planner import Planner
from kubeproxy.registry import CounterMetric

SIZES = ("100x10", "1kx10", "5kx10")
_SO_PROTOCOL = 38
_REPLAYS = 3
_PLAIN = "rr"

COLUMNS = (
    Column("sync ms", "sync", 0),
    Column("limit ms", "limit", 0),
    Column("ratio", "ratio", 2),
    Column("without iptables", "ratio_own", 2),
    Column("iptables ms", "iptables", 0, spread=False),
    Column("same again ms", "again", 0),
    Column("change p50 us", "change_p50", 0),
    Column("change p99 us", "change_p99", 0, spread=False),
    Column("limit p50 us", "least_p50", 0),
)


class Sent(msgspec.Struct):
    """One send: the netlink protocol, the messages, and the last one's sequence number."""

    protocol: int
    data: bytes
    last: int


@contextmanager
def recorded() -> Iterator[tuple[list[Sent], list[float]]]:
    """Record the netlink messages to the kernel, without dumps, and the duration of each call of iptables (seconds)."""
    sends: list[Sent] = []
    calls: list[float] = []
    link: Any = Netlink
    send, run = link._send, xtables._running

    def recording_send(self: Any, data: bytes, what: str) -> None:
        if HEADER.unpack_from(data)[2] & NLM_F_DUMP != NLM_F_DUMP:
            *_, last = messages(data)
            sends.append(Sent(self._socket.getsockopt(socket.SOL_SOCKET, _SO_PROTOCOL), data, last.sequence))
        send(self, data, what)

    @contextmanager
    def recording_run(*arguments: Any, **how: Any) -> Iterator[Any]:
        began = time.perf_counter()
        try:
            with run(*arguments, **how) as running:
                yield running
        finally:
            calls.append(time.perf_counter() - began)

    link._send, xtables._running = recording_send, recording_run
    try:
        yield sends, calls
    finally:
        link._send, xtables._running = send, run


def replay(sends: Sequence[Sent]) -> float:
    """Send a recording in the namespace of the caller; return the duration in seconds."""
    links: dict[int, Any] = {protocol: Netlink.open(protocol) for protocol in {sent.protocol for sent in sends}}
    began = time.perf_counter()
    for sent in sends:
        link = links[sent.protocol]
        link._send(sent.data, "a recording")
        waiting = True
        while waiting:
            data = link._read("a recording")
            waiting = not any(at.kind == NLMSG_ERROR and at.sequence == sent.last for at in messages(data))
    seconds = time.perf_counter() - began
    for link in links.values():
        link.close()
    return seconds


def inside(size: objects.Size, pairs: int) -> dict[str, float]:
    """Measure in the present kernel; syncs in ms, changes in us."""
    modules.require(modules.ipvs_modules(modules.release()), "the benchmark")
    proxy.collect_as_the_proxy_does()
    planner = Planner(proxy.world())
    planner.apply(
        [
            Replaced("services", proxy.decoded("services", objects.service_pages(size))),
            Replaced("endpointslices", proxy.decoded("endpointslices", objects.slice_pages(size))),
        ]
    )
    plans = {one.name: one.after.plans for one in planner.take()}
    warm = _backend()
    _resync(warm, {})  # loads the modules
    warm.close()
    backend = _backend()
    syncs: list[tuple[float, float]] = []
    for turn in range(_REPLAYS):
        if turn:
            backend.close()
            backend = _backend()
        with recorded() as (sends, calls):
            seconds = _resync(backend, plans)
        syncs.append((seconds, sum(calls)))
    sync, iptables = min(syncs)
    again = _resync(backend, plans)
    changes = _changes(planner, backend, size, pairs)
    backend.close()
    least = _least(pairs)
    limits = []
    for _ in range(_REPLAYS):
        enter_new_namespace()
        limits.append(replay(sends))
    found = {"sync": sync, "limit": min(limits), "iptables": iptables, "own": sync - iptables, "again": again}
    return {name: seconds * 1e3 for name, seconds in found.items()} | {
        **{f"change_{name}": value for name, value in summary(changes, 1e6).items()},
        **{f"least_{name}": value for name, value in summary(least, 1e6).items()},
    }


def _backend() -> IpvsBackend:
    enter_new_namespace()
    scheduler = scheduler_named(_PLAIN)
    kernel = NodeKernel.open(used_commands(Family.IPV4), CounterMetric())
    return IpvsBackend(Family.IPV4, proxy.world(), kernel, scheduler)


def _resync(backend: IpvsBackend, plans: Any) -> float:
    began = time.perf_counter()
    for _ in backend.resync(plans):
        pass
    return time.perf_counter() - began


def _changes(planner: Planner, backend: IpvsBackend, size: objects.Size, pairs: int) -> list[float]:
    decoders, seconds = change.Decoders(), []
    for step in [*change.steps(size, 5, seed=2), *change.steps(size, pairs)]:
        began = time.perf_counter()
        planner.apply(decoders.events(step.lines))
        for _ in backend.sync([(one.name, one.after.plans) for one in planner.take()]):
            pass
        seconds.append(time.perf_counter() - began)
    return seconds[-len(list(change.steps(size, pairs))) :]


def _least(count: int) -> list[float]:
    """Return the duration of one pre-encoded message about a real server."""
    with ipvs.Ipvs.open() as kernel:
        server = next(one for one in kernel.servers() if len(one.key) == 7)
        real = next(iter(kernel.destinations(server.key).values()))
        with recorded() as (sends, _):
            kernel.apply([ipvs.ServerChange(ipvs.Verb.SET_SERVER, server, real)])
    return [replay(sends) for _ in range(count)]


def in_guest(size: str, pairs: int) -> dict[str, float]:
    """Measure in a guest."""
    command = [sys.executable, "-m", "support.guest.guest", sys.executable, "-m", "bench.ipvs", size, str(pairs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found: dict[str, float] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return found


def run(with_: Run) -> Report:
    """Measure all sizes."""
    rows = []
    for size in SIZES[1:2] if with_.quick else SIZES:
        count = 3
        runs = [with_.measure(f"{size} run {n + 1}/{count}", in_guest, size=size, pairs=60) for n in range(count)]
        figures: dict[str, Any] = spreads(runs)
        figures["ratio"] = ratio([one["sync"] for one in runs], [one["limit"] for one in runs])
        figures["ratio_own"] = ratio([one["own"] for one in runs], [one["limit"] for one in runs])
        rows.append(Row(size, figures))
    notes = [
        "The guest is user-mode Linux with one CPU: compare a figure with the limit in its row, not with other tables.",
        "`sync` is the time to the last acknowledgement, with iptables-restore; `limit` is the time of its netlink",
        "messages alone.",
        "Sync and limit are the fastest of three runs in new namespaces.",
        "`iptables` is the time of three iptables processes, each of which takes at least 30 ms.",
        "`same again` is a full comparison that finds no difference. `change` is measured from the event's bytes; its",
        "limit is the time of one message about one real server.",
    ]
    return Report("ipvs", "ipvs mode: full sync and one change, in a guest kernel", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    cases = [row.case for row in rows]
    panels = (
        Panel(
            "Full sync",
            "ms",
            "size",
            cases,
            [series(rows, "ours", "sync"), series(rows, "limit", "limit", pale=True)],
            logarithmic=True,
        ),
        Panel(
            "One change",
            "us",
            "size",
            cases,
            [series(rows, "median", "change_p50"), series(rows, "limit", "least_p50", pale=True)],
            logarithmic=True,
        ),
    )
    return Chart("ipvs mode, in a guest kernel", panels)


if __name__ == "__main__":
    print(msgspec.json.encode(inside(objects.parse_size(sys.argv[1]), int(sys.argv[2]))).decode())
