"""page: the cost of an open page while endpoints change continuously: the CPU time of the proxy and its companion
processes, compared with the same proxy without an open page, in alternating periods of one run.
"""

from __future__ import annotations

import http.client
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from bench import memory, objects
from bench.apiserver import ApiProcess
from bench.charts import Chart
from bench.contestant import OURS, Contestant
from bench.figures import percentile, spreads
from bench.network import Network
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from bench.seeing import RATE, SIZE, changing

GOAL = 2.0  # % of a core, of all processes together
SETTLE = 5.0  # seconds after the opening of a page that are not counted
PORT = 10249

COLUMNS = (
    Column("open %", "open", 2),
    Column("without", "closed", 2),
    Column("more", "more", 2),
    Column("processes %", "beside", 2),
    Column("opening ms", "opening", 0),
    Column("KB/s", "bytes", 1),
    Column("messages/s", "messages", 1),
    Column("lag p50 ms", "p50", 2),
    Column("lag p99 ms", "p99", 2),
)


class Reader:
    """A page: reads the events in a thread, and counts them."""

    def __init__(self) -> None:
        self._ended = False
        self.bytes = self.messages = 0
        self.lags: list[float] = []
        self._link = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
        self._thread = threading.Thread(target=self._read)

    def open(self) -> None:
        """Request events, and all Services once, as the page does."""
        self._link.request("GET", "/ui/api/events")
        self._answer = self._link.getresponse()
        listed = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
        listed.request("GET", "/ui/api/services", headers={"Accept-Encoding": "gzip"})
        listed.getresponse().read()
        listed.close()
        self._thread.start()

    def close(self) -> None:
        """Close the page."""
        self._ended = True
        self._thread.join()
        self._answer.close()
        self._link.close()

    def _read(self) -> None:
        kind = b""
        while not self._ended and (line := self._answer.readline()):
            self.bytes += len(line)
            if line.startswith(b"event: "):
                kind = line[7:].strip()
            elif line.startswith(b"data: ") and kind == b"now":
                self.messages += 1
                spread = msgspec.json.decode(line[6:])["lagMs"]
                if spread is not None:
                    self.lags.append(spread["p50"])


def measure(size: str, seconds: float, turns: int) -> dict[str, float]:
    """Measure both in turns: % of a core, including the proxy's companion processes."""
    wanted = objects.parse_size(size)
    network, api = Network(), ApiProcess()
    with tempfile.TemporaryDirectory(prefix="kube-proxy-page-") as folder:
        try:
            api.load(wanted)
            proxy = Contestant(f"{OURS} --control-socket {Path(folder, 'control')}", "nftables", api.url)
            try:
                proxy.wait("/readyz", 120.0)
                with changing(api, wanted):
                    time.sleep(SETTLE)
                    return _in_turns(proxy, seconds, turns)
            finally:
                proxy.close()
        finally:
            api.close()
            network.close()


def _in_turns(proxy: Contestant, seconds: float, turns: int) -> dict[str, float]:
    runs: list[dict[str, float]] = []
    for _ in range(turns):
        began = proxy.cpu_seconds()
        time.sleep(seconds)
        closed = (proxy.cpu_seconds() - began) / seconds * 100
        before = proxy.cpu_seconds()
        reader = Reader()
        reader.open()
        time.sleep(SETTLE)
        opening = (proxy.cpu_seconds() + _beside(proxy) - before) * 1e3 - closed * 10 * SETTLE
        began, others, counted, told = proxy.cpu_seconds(), _beside(proxy), reader.bytes, reader.messages
        at = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - at
        own, beside = proxy.cpu_seconds() - began, _beside(proxy) - others
        reader.close()
        if not reader.lags:
            raise RuntimeError(f"the page received no change, in {reader.messages} messages:\n{proxy.said()}")
        runs.append(
            {
                "closed": closed,
                "open": (own + beside) / took * 100,
                "more": (own + beside) / took * 100 - closed,
                "beside": beside / took * 100,
                "opening": opening,
                "bytes": (reader.bytes - counted) / took / 1e3,
                "messages": (reader.messages - told) / took,
                "p50": percentile(reader.lags, 50),
                "p99": percentile(reader.lags, 99),
            }
        )
        time.sleep(SETTLE)  # until the companion processes have ended
    return {name: percentile([run[name] for run in runs], 50) for name in runs[0]}


def _beside(proxy: Contestant) -> float:
    """Return the CPU time of a proxy's companion processes and of their ended children, in seconds."""
    children = Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text().split()
    return sum(memory.cpu_seconds(int(pid)) for pid in children)


def run(with_: Run) -> Report:
    """Measure with and without a page."""
    count, seconds, turns = (1, 10.0, 3) if with_.quick else (3, 20.0, 3)
    runs = [
        with_.measure(f"{SIZE} run {turn}/{count}", measure, size=SIZE, seconds=seconds, turns=turns)
        for turn in range(1, count + 1)
    ]
    rows = [Row(f"{SIZE} nftables", dict(spreads(runs)))]
    notes = (
        f"{RATE} endpoints a second change; both figures are of one proxy, in alternating periods of {seconds:.0f} s.",
        f"goal: less than {GOAL} % of a core more, including the proxy's companion processes.",
    )
    chart = Chart(
        f"One page open, {SIZE}",
        (panel_by_kind("CPU", "% of a core", "mode", rows, {"open": "with a page", "closed": "without"}),),
    )
    return Report("page", "The cost of an open page", COLUMNS, rows, chart, notes)
