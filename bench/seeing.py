"""seeing: the duration of commands that query a running proxy and read the kernel, while endpoints change continuously.

It also measures the cost for the proxy: the time from an API write to the first packet at the new endpoint, without and
with running commands.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import objects
from bench.apiserver import ApiProcess
from bench.charts import Chart
from bench.contestant import OURS, Contestant
from bench.e2e import Probed, awaited, move
from bench.figures import percentile, spreads
from bench.network import Network
from bench.report import ROOT, Column, Report, Row, panel_by_kind
from bench.runs import Run

SIZE = "10kx10"
RATE = 200  # changes per second
GOAL_ONE, GOAL_ALL, GOAL_P99 = 0.5, 3.0, 10.0  # s for one Service, s for everything, ms
MODES = ("nftables",)

COLUMNS = (
    Column("why s", "why", 2),
    Column("services NAME s", "services", 2),
    Column("verify NAME s", "verify_one", 2),
    Column("verify s", "verify", 2),
    Column("CPU s: why", "why_cpu", 2),
    Column("verify NAME", "verify_one_cpu", 2),
    Column("verify", "verify_cpu", 2),
    Column("lag p50 ms", "p50", 2),
    Column("lag p99 ms", "p99", 2),
    Column("idle p50 ms", "p50_alone", 2),
    Column("idle p99 ms", "p99_alone", 2),
)


def measure(size: str, mode: str, moves: int) -> dict[str, float]:
    """Measure the commands in one mode: seconds each, and lags in ms. Raises RuntimeError for an unexpected answer."""
    wanted = objects.parse_size(size)
    probed = Probed(wanted.services, "UDP", (objects.spare(1), objects.spare(2)))
    network, api = Network(), ApiProcess()
    with tempfile.TemporaryDirectory(prefix="kube-proxy-seeing-") as folder:
        socket = Path(folder, "control")
        try:
            network.pods.ask("answer", addresses=list(probed.addresses))
            api.load(wanted)
            api.put("services", objects.service(probed.number, protocol="UDP"))
            api.put("endpointslices", probed.slice(0, 1))
            proxy = Contestant(f"{OURS} --control-socket {socket}", mode, api.url)
            try:
                return _measured(network, api, proxy, probed, socket, wanted, moves)
            finally:
                proxy.close()
        finally:
            api.close()
            network.close()


def _measured(
    network: Network,
    api: ApiProcess,
    proxy: Contestant,
    probed: Probed,
    socket: Path,
    size: objects.Size,
    moves: int,
) -> dict[str, float]:
    awaited(network, proxy, probed)
    proxy.wait("/readyz", 120.0)
    ways = _commands(size)
    with changing(api, size):
        time.sleep(2)
        alone = [move(network, api, proxy, probed, turn) for turn in range(1, moves + 1)]
        took: dict[str, list[_Took]] = {name: [] for name in ways}
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                for name, words in ways.items():
                    took[name].append(_timed(words, socket))

        asking = threading.Thread(target=ask)
        asking.start()
        beside, turn = [], moves
        while turn < 2 * moves or not all(took.values()):
            turn += 1
            beside.append(move(network, api, proxy, probed, turn))
        ended.set()
        asking.join()
    found = {name: percentile([one.seconds for one in each], 50) for name, each in took.items()}
    found |= {f"{name}_cpu": percentile([one.cpu for one in each], 50) for name, each in took.items()}
    found |= {"p50": percentile(beside, 50), "p99": percentile(beside, 99)}
    return found | {"p50_alone": percentile(alone, 50), "p99_alone": percentile(alone, 99)}


def _commands(size: objects.Size) -> dict[str, list[str]]:
    number = size.services // 2
    name, front = "/".join(objects.names(number)), f"{objects.cluster_ip(number)}:80"
    return {
        "why": ["why", "10.250.0.2", front, "--no-probe"],
        "services": ["services", name],
        "verify_one": ["verify", name],
        "verify": ["verify"],
    }


class _Took(NamedTuple):
    """The duration of a command: seconds from start to end, and its CPU time."""

    seconds: float
    cpu: float


def _timed(words: Sequence[str], socket: Path) -> _Took:
    """Run a command. Raises RuntimeError if it reports a problem."""
    command = [str(ROOT / ".venv" / "bin" / "kube-proxy"), *words, "--control-socket", str(socket)]
    with tempfile.TemporaryFile() as said:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=said, stderr=said)
        usage = os.wait4(process.pid, 0)[2]
        took = time.monotonic() - began
        process.returncode = 0  # the process has ended and been waited for
        said.seek(0)
        text = said.read().decode(errors="replace")
    if "differences in" in text or "Error" in text:
        raise RuntimeError(f"{words}: {text}")
    return _Took(took, usage.ru_utime + usage.ru_stime)


@contextmanager
def changing(api: ApiProcess, size: objects.Size) -> Iterator[None]:
    """Change RATE endpoints per second during the body, of Services in turn; never of the queried Service."""
    ended = threading.Event()

    def change() -> None:
        due = time.monotonic()
        for turn in range(1, 1 << 30):
            if ended.is_set():
                return
            number = turn * 7919 % size.services
            if number == size.services // 2:
                continue
            # A prime number, so that a Service gets another address than its present one when its turn comes again.
            addresses = [*objects.endpoints_of(number, size.endpoints)[1:], objects.spare(10 + turn % 997)]
            api.put("endpointslices", objects.endpoint_slice(number, addresses, turn + 1))
            due += 1 / RATE
            time.sleep(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run(with_: Run) -> Report:
    """Measure all modes."""
    count, moves = (1, 60) if with_.quick else (3, 150)
    rows = []
    for mode in MODES:
        turns = range(1, count + 1)
        runs = [
            with_.measure(f"{mode} run {turn}/{count}", measure, size=SIZE, mode=mode, moves=moves) for turn in turns
        ]
        rows.append(Row(f"{SIZE} {mode}", dict(spreads(runs))))
    notes = (
        f"{RATE} endpoints change per second; a command's time is the time from the start to the end of its process.",
        f"goal: {GOAL_ONE} s for one Service, {GOAL_ALL:.0f} s for everything, lag p99 under {GOAL_P99:.0f} ms.",
    )
    return Report("seeing", "Commands with a busy proxy", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: Sequence[Row]) -> Chart:
    commands = {"why": "why", "services": "services NAME", "verify_one": "verify NAME", "verify": "verify"}
    lags = {"p50": "p50", "p99": "p99", "p50_alone": "p50 without", "p99_alone": "p99 without"}
    return Chart(
        f"Commands with a busy proxy, {SIZE}",
        (
            panel_by_kind("Commands", "s", "mode", rows, commands),
            panel_by_kind("Lag of the proxy", "ms", "mode", rows, lags),
        ),
    )
