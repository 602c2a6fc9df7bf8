"""iptables: full and partial syncs of iptables mode, compared with iptables-restore alone with the same bytes.

The planner and the iptables backend do the work as in a real proxy; each run has a separate process and namespace. The
limit is the time of the commands alone with the same rules from files.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench import objects, proxy
from bench.charts import Chart, Panel, Series
from bench.figures import Spread, median, ratio, spreads
from bench.report import Column, Report, Row
from bench.runs import Run
from bench.worker import another_namespace
from kubeproxy.backends.iptables.backend import IptablesBackend
from kubeproxy.backends.iptables.skeleton import CANARY_TABLES, StartOptions
from kubeproxy.backends.iptables.watch import watch
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.nft_compat import RuleWriter
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.kernel.xtables.xtables_lock import NOT_WAITED, Waited
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Event, Replaced, Upserted
from kubeproxy.model.plan import ServiceName, ServicePlan
from kubeproxy.model.planner import Planner

VARIANTS: tuple[xtables.Variant, ...] = ("legacy", "nft")
SIZES = ("1kx10", "5kx10", "10kx10")
GOALS = {"full": 1.5, "again": 3.0, "endpoint": 1.3, "service": 1.3}
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
    """Commands, and a RuleWriter, that record their input; with `idle` they do nothing else."""

    def __init__(self, commands: Commands, *, idle: bool = False) -> None:
        self._commands = commands
        self._idle = idle
        self._writer = RuleWriter(commands, None) if idle else RuleWriter.open(commands)
        self.chains_at_once = self._writer.chains_at_once
        self.inputs: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._commands, name)

    def prepared(self, text: str) -> Callable[[], Waited]:
        """See RuleWriter."""
        self.inputs.append(text)
        return (lambda: NOT_WAITED) if self._idle else self._writer.prepared(text)

    def close(self) -> None:
        """See RuleWriter."""
        self._writer.close()

    def restore(self, pieces: Iterable[str]) -> Waited:
        """See Commands."""
        kept: list[str] = []

        def tee() -> Iterator[str]:
            for piece in pieces:
                kept.append(piece)
                yield piece
            self.inputs.append("".join(kept))

        if self._idle:
            for _ in tee():
                pass
            return NOT_WAITED
        return self._commands.restore(tee())


class Silent:
    """Metrics of iptables mode that discard their values."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def measure(size: str, variant: xtables.Variant) -> dict[str, float]:
    """Measure a full sync and several partial ones, each with its limit; times in ms."""
    # The namespace is private, so its lock is too: other programs of this machine do not matter.
    with tempfile.NamedTemporaryFile() as lock:
        os.environ["XTABLES_LOCKFILE"] = lock.name
        return _measure(objects.parse_size(size), variant)


def _measure(wanted: objects.Size, variant: xtables.Variant) -> dict[str, float]:
    services = proxy.decoded("services", objects.service_pages(wanted))
    slices = proxy.decoded("endpointslices", objects.slice_pages(wanted))
    gc.collect()
    gc.freeze()
    proxy.collect_as_the_proxy_does()
    planner = Planner(proxy.world())
    commands = xtables.variant_commands(Family.IPV4, variant)
    recorder, backend = _opened(commands)
    plans: dict[ServiceName, tuple[ServicePlan, ...]] = {}

    def full() -> None:
        planner.apply([Replaced("services", services), Replaced("endpointslices", slices)])
        plans.update((change.name, change.after.plans) for change in planner.take())
        _exhaust(backend.resync(plans))

    found = _timed("full", full)
    with another_namespace():
        found |= _limit("full", commands.name, _inputs(commands, plans))
    found |= _again(commands, plans)
    rounds: dict[str, list[dict[str, float]]] = {"endpoint": [], "service": []}
    for n in range(CHANGES):
        for kind, events in (("endpoint", _endpoint_changes(wanted, n)), ("service", _service_comes(wanted, n))):
            for event in events:
                recorder.inputs.clear()
                backend.touched()  # as the engine does: the limit's changes do not count
                ours = _timed(kind, partial(_partial, planner, backend, event))
                rounds[kind].append(ours | _limit(kind, commands.name, recorder.inputs))
    for several in rounds.values():
        found |= {name: median(one[name] for one in several) for name in several[0]}
    backend.close()
    return found


def _again(commands: Commands, plans: Mapping[ServiceName, tuple[ServicePlan, ...]]) -> dict[str, float]:
    """Measure the first sync of a proxy that finds all of its rules, compared with iptables-save alone; in ms."""
    recorder, backend = _opened(commands)
    found = _timed("again", lambda: _exhaust(backend.resync(plans)))
    backend.close()
    if recorder.inputs:
        raise RuntimeError(f"existing rules are written once more: {recorder.inputs[0][:300]}")

    def read() -> None:
        for table in CANARY_TABLES:
            subprocess.run([f"{commands.name}-save", "-t", table], stdout=subprocess.DEVNULL, check=True)

    limit = _timed("again", read)
    return found | {name.replace("_ours", "_limit"): value for name, value in limit.items()}


def _opened(commands: Commands, *, idle: bool = False) -> tuple[Recorder, IptablesBackend]:
    recorder: Any = Recorder(commands, idle=idle)
    silent: Any = Silent()
    options = StartOptions(localhost_nodeports=True, liberal=False, counters=False)
    return recorder, IptablesBackend(recorder, proxy.world(), options, silent, watch(recorder), recorder)


def _inputs(commands: Commands, plans: Mapping[ServiceName, tuple[ServicePlan, ...]]) -> list[str]:
    """Return the input of the command in a full sync in which the command writes everything."""
    recorder, backend = _opened(commands, idle=True)
    _exhaust(backend.resync(plans))
    backend.close()
    return recorder.inputs


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
    namespace, name = objects.names(number)
    gone: list[Event] = [Deleted("services", namespace, name), Deleted("endpointslices", namespace, pods.metadata.name)]
    return [[Upserted("services", service), Upserted("endpointslices", pods)], gone]


def _timed(kind: str, work: Callable[[], None]) -> dict[str, float]:
    """Return the duration of some work, and its CPU time; in ms."""
    spent, began = _cpu(), time.perf_counter()
    work()
    return {f"{kind}_ours": (time.perf_counter() - began) * 1e3, f"{kind}_ours_cpu": (_cpu() - spent) * 1e3}


def _limit(kind: str, name: str, texts: Sequence[str]) -> dict[str, float]:
    """Return the duration of a command with these inputs one after the other; in ms."""
    limit = limit_cpu = 0.0
    for text in texts:
        with tempfile.TemporaryFile() as file:
            file.write(text.encode())
            file.seek(0)
            spent, began = _cpu(), time.perf_counter()
            subprocess.run([f"{name}-restore", "--noflush", "-w", "5"], stdin=file, check=True)
            limit += time.perf_counter() - began
            limit_cpu += _cpu() - spent
    kilobytes = sum(len(text) for text in texts) / 1e3
    return {f"{kind}_limit": limit * 1e3, f"{kind}_limit_cpu": limit_cpu * 1e3, f"{kind}_kilobytes": kilobytes}


def _cpu() -> float:
    """Return the CPU seconds of this process and of its ended children."""
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
        "full: all rules to an empty node; again: by a proxy that finds all of its rules, and writes nothing;",
        "endpoint: one of ten endpoints replaced; service: one added or removed.",
        "limit: iptables-restore alone, with the same rules from files, in the same process; for again: iptables-save.",
        "Most of it is the work of iptables and the kernel: for legacy the whole table at each change, for nft a walk",
        "over all rules at its end. With nft, rules of Services are committed over netlink, without the command.",
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
