"""restart: a start onto an empty table, then another start onto the first one's rules, and the cost of comparing.

tests/scenarios/test_restart.py checks that no packet is lost.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from bench import objects, proxy
from bench.apiserver import ApiProcess
from bench.charts import Chart, Panel
from bench.contestant import HEALTH_PORT, OURS, Contestant
from bench.figures import median, ratio, spreads
from bench.report import Column, Report, Row, series
from bench.runs import Run
from bench.start import last_transaction
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.layout import TABLE, Layout
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.engine.backlog import Backlog
from kubeproxy.kernel.netlink.protocol import (
    NETLINK_NETFILTER,
    Netlink,
    grow_buffer,
    messages,
    netfilter_header,
    text_attribute,
)
from kubeproxy.kernel.nftables import nfnetlink, nfta
from kubeproxy.model.addresses import Family
from kubeproxy.model.planner import Planner

SIZES = ("10kx10", "44kx10")
WRITES = 20
TURNS = 3
_GROUP = 7  # NFNLGRP_NFTABLES
_WRITING = {nfnetlink.NEW_ELEMENT, nfnetlink.DELETE_ELEMENT}
_COMMITTED = re.compile(r"Committed everything family=IPv4 services=(\d+) seconds=([\d.]+)")

COLUMNS = (
    Column("last Service s", "programmed", 2),
    Column("CPU s", "cpu", 2),
    Column("RSS MB", "rss", 0),
    Column("most MB", "peak", 0),
    Column("held ms", "held", 0),
    Column("write ms", "write", 2),
    Column("restart: ready s", "ready", 2),
    Column("elements written", "written", 0, spread=False),
    Column("compared ms CPU", "compared", 0),
    Column("dump ms CPU", "dump", 0),
    Column("ratio CPU", "ratio_cpu", 2),
)


def measure(size: str) -> dict[str, float]:
    """Start twice with a full API server. Seconds, except `held` and `write` (ms); memory in MB."""
    wanted = objects.parse_size(size)
    api = ApiProcess()
    try:
        api.load(wanted)
        first = Contestant(OURS, "nftables", api.url)
        try:
            with _answering() as waits:
                programmed = _programmed(first, wanted)
            now, most = first.memory()
            found = {"programmed": programmed, "cpu": first.cpu_seconds(), "rss": now, "peak": most}
            found |= {"held": max(waits, default=0.0) * 1e3, "write": _write(api, wanted) * 1e3}
        finally:
            first.close()
        with _written() as written:
            second = Contestant(OURS, "nftables", api.url)
            try:
                return found | {"ready": second.wait("/readyz", 120), "written": float(written())}
            finally:
                second.close()
    finally:
        api.close()


def _programmed(running: Contestant, size: objects.Size) -> float:
    """Return the seconds from the start to the last transaction, when the proxy has reported that all is committed."""

    def complete() -> bool:
        said = _COMMITTED.search(running.said())
        if said is not None and int(said[1]) >= size.services:
            return True
        time.sleep(0.05)
        return False

    return last_transaction(running, 300, complete, str(size))


def _write(api: ApiProcess, size: objects.Size) -> float:
    """Return the median of the seconds from a write of a slice to its transaction."""
    seconds = []
    with closing(nfnetlink.Transactions.open()) as link:
        for number in range(WRITES):
            addresses = [*objects.endpoints_of(number, size.endpoints)[1:], objects.spare(number)]
            before = link.generation()
            began = api.put("endpointslices", objects.endpoint_slice(number, addresses, 2))
            while link.generation() == before and time.monotonic_ns() - began < 5e9:
                pass
            seconds.append((time.monotonic_ns() - began) / 1e9)
            time.sleep(0.02)
    return median(seconds)


@contextmanager
def _answering() -> Iterator[list[float]]:
    """Request the health port every few milliseconds; return the duration of each answer."""
    waits: list[float] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.005):
            began = time.monotonic()
            try:
                with socket.create_connection(("127.0.0.1", HEALTH_PORT), timeout=10) as link:
                    link.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    link.recv(64)
            except ConnectionRefusedError:
                continue
            waits.append(time.monotonic() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join()


@contextmanager
def _written() -> Iterator[Any]:
    """Count the messages about elements of the proxy's table in the kernel's announcements."""
    ours = text_attribute(nfta.SET_ELEM_LIST_TABLE, TABLE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as link:
        link.bind((0, 1 << (_GROUP - 1)))
        link.setblocking(False)
        grow_buffer(link, socket.SO_RCVBUF, 256 << 20)
        seen = 0

        def count() -> int:
            nonlocal seen
            while True:
                try:
                    data = link.recv(1 << 16)
                except BlockingIOError:
                    return seen
                seen += sum(at.kind in _WRITING and ours in data[at.start : at.end] for at in messages(data))

        yield count


def compare(size: str) -> dict[str, float]:
    """Compare a correct table, in this process; return the CPU time in ms, and that of the dumps alone."""
    wanted = objects.parse_size(size)
    planner = Planner(proxy.world())
    planner.apply(proxy.lists(wanted))
    backlog = Backlog(Family.IPV4)
    backlog.add(planner.take())
    plans = backlog.all_plans(planner.compiled)
    proxy.collect_as_the_proxy_does()
    names = list(Layout(Family.IPV4).sets)
    compared, dumps = [], []
    for turn in range(1 + TURNS):
        backend = NftablesBackend(KernelTable.open(Family.IPV4), proxy.world())
        began = time.process_time()
        for _ in backend.resync(plans):
            pass
        compared.append(time.process_time() - began)
        backend.close()
        dumps.append(_dump(names))
        if turn == 0:
            compared.clear()  # the table did not exist yet
    return {"compared": min(compared) * 1e3, "dump": min(dumps) * 1e3}


def _dump(names: Sequence[str]) -> float:
    """Return the CPU seconds of the kernel's dumps of these sets, which are read and discarded."""
    with Netlink.open() as link:
        began = time.process_time()
        for name in names:
            where = netfilter_header(Family.IPV4) + nfnetlink.names(TABLE, name)
            link.dump_all(nfnetlink.GET_ELEMENT, where, name)
        return time.process_time() - began


def run(with_: Run) -> Report:
    """Measure all sizes."""
    sizes, count = (SIZES[:1], 1) if with_.quick else (SIZES, 3)
    rows = [row(with_, size, count) for size in sizes]
    return Report("restart", "A start, and a restart onto the existing rules", COLUMNS, rows, chart(rows), NOTES)


def row(with_: Run, size: str, count: int) -> Row:
    """Measure one size."""
    starts = [with_.measure(f"{size} started twice, run {n + 1}/{count}", measure, size=size) for n in range(count)]
    compared = [with_.measure(f"{size} compared, run {n + 1}/{count}", compare, size=size) for n in range(count)]
    figures: dict[str, Any] = dict(spreads(starts)) | dict(spreads(compared))
    figures["ratio_cpu"] = ratio([one["compared"] for one in compared], [one["dump"] for one in compared])
    return Row(size, figures)


NOTES = (
    "The times start at exec. The lab's API server, a Python process, uses the same CPUs.",
    "`write` is the time from the write of a slice to its transaction.",
    "`held` is the time of the slowest answer of /livez. `written` is the number of elements written or removed.",
    "`compared` is the CPU time of a full sync of a correct table; `dump` is the CPU time of a dump of its elements.",
)


def chart(rows: Sequence[Row]) -> Chart:
    """Return the chart of starts and restarts."""
    colour = partial(series, rows)
    sizes = [one.case for one in rows]
    times = (colour("last Service", "programmed"), colour("restart: ready", "ready"))
    along = "Services x endpoints of each"
    return Chart(
        "Start and restart of the nftables mode",
        (Panel("From exec", "s", along, sizes, times), Panel("Memory", "MB", along, sizes, (colour("RSS", "rss"),))),
    )
