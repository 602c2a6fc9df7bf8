"""iptables: full and partial syncs of iptables mode, beside iptables-restore alone with the same bytes.

The planner and the iptables backend do the work as in a real proxy; one process and one namespace a run. The limit is
what the same inputs take when they are handed to the same command from a file, one after the other.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench import objects, proxy
from bench.charts import Chart, Panel, Series
from bench.figures import Spread, median, ratio, spreads
from bench.report import Column, Report, Row
from bench.runs import Run
from bench.worker import enter_new_namespace
from kubeproxy.backends.iptables.backend import IptablesBackend
from kubeproxy.backends.iptables.options import Options
from kubeproxy.kernel import iptables_variant
from kubeproxy.kernel.xtables import Commands
from kubeproxy.kernel.xtables_lock import Waited
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Event, Replaced, Upserted
from kubeproxy.model.planner import Planner

VARIANTS = ("legacy", "nft")
SIZES = ("1kx10", "5kx10", "10kx10")
GOALS = {"full": 1.5, "endpoint": 1.3, "service": 1.3}
CHANGES = 5

COLUMNS = (
    Column("ours ms", "ours", 1),
    Column("limit ms", "limit", 1),
    Column("ratio", "ratio", 2),
    Column("ratio CPU", "ratio_cpu", 2),
    Column("goal", "goal", 1),
    Column("kB", "kilobytes", 1, spread=False),
)


class Recorder:
    """Commands that keep what they are given."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self.inputs: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._commands, name)

    def restore(self, pieces: Iterable[str]) -> Waited:
        """See Commands."""
        kept: list[str] = []
        self.inputs.append(kept)

        def tee() -> Iterator[str]:
            for piece in pieces:
                kept.append(piece)
                yield piece

        return self._commands.restore(tee())


class Silent:
    """A backends.mode.Report that nobody reads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def measure(size: str, variant: str) -> dict[str, float]:
    """Measure a full sync and some partial ones, each with its limit; times in ms."""
    # A lock of our own: the namespace is, and whoever else works on this machine is none of our business.
    with tempfile.NamedTemporaryFile() as lock:
        os.environ["XTABLES_LOCKFILE"] = lock.name
        return _measure(objects.parse_size(size), variant)


def _measure(wanted: objects.Size, variant: str) -> dict[str, float]:
    services = proxy.decoded("services", objects.service_pages(wanted))
    slices = proxy.decoded("endpointslices", objects.slice_pages(wanted))
    gc.collect()
    gc.freeze()
    proxy.collect_as_the_proxy_does()
    world = proxy.world()
    planner = Planner(world)
    commands = Recorder(iptables_variant.commands(Family.IPV4, variant))
    backend = IptablesBackend(commands, world, Options(True, False, False), Silent())

    def full() -> None:
        planner.apply([Replaced("services", services), Replaced("endpointslices", slices)])
        _exhaust(backend.resync({change.name: change.after.plans for change in planner.take()}))

    found = _beside("full", full, commands, enter_new_namespace)
    rounds: dict[str, list[dict[str, float]]] = {"endpoint": [], "service": []}
    for n in range(CHANGES):
        for kind, events in (("endpoint", _endpoint_changes(wanted, n)), ("service", _service_comes(wanted, n))):
            for event in events:
                rounds[kind].append(_beside(kind, lambda e=event: _partial(planner, backend, e), commands))
    for several in rounds.values():
        found |= {name: median(one[name] for one in several) for name in several[0]}
    backend.close()
    return found


def _partial(planner: Planner, backend: IptablesBackend, events: list[Event]) -> None:
    planner.apply(events)
    _exhaust(backend.sync([(change.name, change.after.plans) for change in planner.take()]))


def _endpoint_changes(wanted: objects.Size, n: int) -> list[list[Event]]:
    number = wanted.services // 2 + n
    addresses = [*objects.endpoints_of(number, wanted.endpoints)[1:], objects.spare(n)]
    body = objects.endpoint_slice(number, addresses, n + 2)
    return [[Upserted("endpointslices", proxy.decoded_object("endpointslices", body))]]


def _service_comes(wanted: objects.Size, n: int) -> list[list[Event]]:
    number = wanted.services + n
    service = proxy.decoded_object("services", objects.service(number))
    addresses = objects.endpoints_of(number, wanted.endpoints)
    pods = proxy.decoded_object("endpointslices", objects.endpoint_slice(number, addresses))
    gone = [Deleted(kind, found.metadata.namespace, found.metadata.name) for kind, found in
            (("services", service), ("endpointslices", pods))]  # fmt: skip
    return [[Upserted("services", service), Upserted("endpointslices", pods)], gone]


def _beside(
    kind: str, work: Callable[[], None], commands: Recorder, before: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return what work takes, and its inputs alone; `before` is called in between."""
    commands.inputs.clear()
    spent, began = _cpu(), time.perf_counter()
    work()
    ours, ours_cpu = time.perf_counter() - began, _cpu() - spent
    texts = ["".join(pieces).encode() for pieces in commands.inputs]
    before()
    limit = limit_cpu = 0.0
    for text in texts:
        with tempfile.TemporaryFile() as file:
            file.write(text)
            file.seek(0)
            spent, began = _cpu(), time.perf_counter()
            subprocess.run([f"{commands.name}-restore", "--noflush", "-w", "5"], stdin=file, check=True)
            limit += time.perf_counter() - began
            limit_cpu += _cpu() - spent
    seconds = {"ours": ours, "limit": limit, "ours_cpu": ours_cpu, "limit_cpu": limit_cpu}
    return {f"{kind}_{name}": value * 1e3 for name, value in seconds.items()} | {
        f"{kind}_kilobytes": sum(map(len, texts)) / 1e3
    }


def _cpu() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def _exhaust(steps: Iterator[int]) -> None:
    for _ in steps:
        pass


def run(with_: Run) -> Report:
    """Measure all sizes by both variants."""
    sizes = SIZES[:1] if with_.quick else SIZES
    count = 1 if with_.quick else 3
    rows: list[Row] = []
    for variant in VARIANTS:
        for size in sizes:
            runs = [
                with_.measure(f"{variant} {size} run {n + 1}/{count}", measure, size=size, variant=variant)
                for n in range(count)
            ]
            rows += (_row(variant, size, kind, runs) for kind in GOALS)
    notes = [
        "full: everything to an empty node; endpoint: one of ten endpoints replaced; service: one added or removed.",
        "limit: iptables-restore alone, with the same inputs from a file, in the same process and namespace.",
        "Both are mostly iptables' own work: for legacy the whole table at each change.",
    ]
    return Report("iptables", "iptables mode: full and partial syncs", COLUMNS, rows, _chart(rows), notes)


def _row(variant: str, size: str, kind: str, runs: list[dict[str, float]]) -> Row:
    mine = [{name.removeprefix(f"{kind}_"): run[name] for name in run if name.startswith(f"{kind}_")} for run in runs]
    figures: dict[str, Any] = dict(spreads(mine))
    figures["ratio"] = ratio([run["ours"] for run in mine], [run["limit"] for run in mine])
    figures["ratio_cpu"] = ratio([run["ours_cpu"] for run in mine], [run["limit_cpu"] for run in mine])
    figures["goal"] = GOALS[kind]
    return Row(f"{variant} {size} {kind}", figures)


def _chart(rows: list[Row]) -> Chart:
    def series(label: str, figure: str, kind: str) -> Series:
        found = [row.figures.get(figure) for row in rows if row.case.endswith(kind)]
        return Series(label, [f if isinstance(f, Spread) else None for f in found])

    def panel(title: str, kind: str) -> Panel:
        cases = [row.case.removesuffix(f" {kind}") for row in rows if row.case.endswith(kind)]
        both = (series("ours", "ours", kind), series("iptables-restore alone", "limit", kind))
        return Panel(title, "ms", "variant and size", cases, both, logarithmic=True)

    return Chart("Syncs of iptables mode", (panel("Full sync", "full"), panel("One endpoint changes", "endpoint")))
