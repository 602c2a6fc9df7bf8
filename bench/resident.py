"""resident: the memory of a proxy in each mode: after a first start, a start onto its own rules, and a repair of all
rules.

Measures the process (from /proc), and a control group with the process, its commands, and the kernel's memory for its
rules: a container's limit applies to the control group.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench import lasting, objects
from bench.apiserver import ApiProcess
from bench.charts import Chart, Panel
from bench.contestant import OURS, Contestant
from bench.figures import spreads
from bench.report import Column, Report, Row, series
from bench.runs import Run

SIZES = ("1kx10", "10kx10", "44kx10")
MODES = {
    "nftables": (*SIZES, "10kx10 dual-stack", "1kx100", "10kx1"),
    "iptables-nft": SIZES,
    "iptables-legacy": SIZES[:2],
    "userspace": SIZES[:2],
}
HARM = {
    "nftables": ("nft", "delete", "table", "ip", "kube-proxy"),
    "iptables-nft": ("iptables-nft", "-t", "nat", "-F"),
    "iptables-legacy": ("iptables-legacy", "-t", "nat", "-F"),
    "userspace": ("nft", "delete", "table", "ip", "kube-proxy-userspace"),
}
"""A change by another program after which the proxy writes everything again."""
LIMIT = 900  # seconds for a start or a repair
SETTLED = 5  # seconds without a new maximum
_COMMITTED = re.compile(r"Committed everything family=IPv4")

COLUMNS = (
    Column("first start MB", "first", 0),
    Column("own rules MB", "again", 0),
    Column("after a repair MB", "repaired", 0),
    Column("at most MB", "peak", 0),
    Column("container MB", "group", 0),
    Column("container at most MB", "group_peak", 0),
)


def measure(mode: str, size: str) -> dict[str, float]:
    """Start twice with a full API server, and repair; in MB."""
    name, api = lasting.hinted(mode), ApiProcess()
    try:
        api.load(objects.parse_size(size))
        with _group() as group:
            first = _started(name, api, group)
            found = dict(zip(("first", "peak"), _settled(first), strict=True))
            first.close()
            second = _started(name, api, group)
            try:
                found["again"], peak = _settled(second)
                subprocess.run(HARM[mode], check=True, timeout=120)
                _committed(second, 2)
                found["repaired"], last = _settled(second)
                found["peak"] = max(found["peak"], peak, last)
                return found | {name: _usage(group, file) for name, file in _FILES.items()}
            finally:
                second.close()
    finally:
        api.close()


def _started(mode: str, api: ApiProcess, group: Path) -> Contestant:
    with _inside(group):
        proxy = Contestant(OURS, mode, api.url)
    try:
        _committed(proxy, 1)
    except BaseException:
        proxy.close()
        raise
    return proxy


def _committed(proxy: Contestant, times: int) -> None:
    """Wait until the log has reported this number of times that everything is committed."""
    end = time.monotonic() + LIMIT
    while len(_COMMITTED.findall(proxy.logged())) < times:
        if not proxy.running or time.monotonic() > end:
            raise RuntimeError(f"the proxy did not commit everything:\n{proxy.said()}")
        time.sleep(0.1)


def _settled(proxy: Contestant) -> tuple[float, float]:
    """Return the present and the maximum memory once it does not grow any more."""
    most, since = proxy.memory()[1], time.monotonic()
    while time.monotonic() - since < SETTLED:
        time.sleep(0.1)
        if (now := proxy.memory()[1]) > most:
            most, since = now, time.monotonic()
    return proxy.memory()


_FILES = {"group": "memory.usage_in_bytes", "group_peak": "memory.max_usage_in_bytes"}


def _usage(group: Path, file: str) -> float:
    return int((group / file).read_text()) / 2**20


def _own() -> Path:
    """Return this process's memory control group (version 1)."""
    own: str
    (own,) = re.findall(r"^\d+:memory:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    return Path("/sys/fs/cgroup/memory") / own.lstrip("/")


@contextmanager
def _group() -> Iterator[Path]:
    """Create a control group below that of this process."""
    group = _own() / f"kube-proxy-bench-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        for _ in range(100):  # commands of the proxy may end after the proxy
            if not (group / "cgroup.procs").read_text():
                break
            time.sleep(0.1)
        group.rmdir()


@contextmanager
def _inside(group: Path) -> Iterator[None]:
    """Make the processes that the body starts belong to this control group."""
    own = _own()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()))


def run(with_: Run) -> Report:
    """Measure each mode and size."""
    rows = [
        Row(f"{mode}, {size}", dict(spreads([with_.measure(f"{mode} {size}", measure, mode=mode, size=size)])))
        for mode, sizes in MODES.items()
        for size in (sizes[:1] if with_.quick else sizes)
    ]
    notes = (
        "MB resident of the process; container: with commands, page cache, and the kernel's memory for its rules.",
        "own rules: of a second proxy; after a repair: of this proxy, after another program deleted its rules.",
    )
    return Report("resident", "Memory of a proxy, by mode and size", COLUMNS, rows, _chart(rows), notes)


def _chart(rows: list[Row]) -> Chart:
    colour = partial(series, rows)
    both = (colour("process", "peak"), colour("container", "group_peak"))
    return Chart("Memory at most", (Panel("At most", "MB", "mode and size", [row.case for row in rows], both),))
