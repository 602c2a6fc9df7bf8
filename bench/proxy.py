"""The proxy's parts, connected as in program/app.py, without sources, servers and metrics, for measurements in one
process.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from bench import objects
from kubeproxy.api.decode import decode_object, decode_page
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.engine.engine import Engine, Pace
from kubeproxy.engine.observer import Commit, Notice
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.model.endpoints import PackedSlice
from kubeproxy.model.events import Event, Replaced, kept
from kubeproxy.model.objects import Object, Resource
from kubeproxy.model.plan import Globals
from kubeproxy.model.planner import Change, Counts
from kubeproxy.model.world import Settings, Surroundings, build
from kubeproxy.program import lifetime

SETTINGS = Settings(node_name=objects.NODE, families=(Family.IPV4,), cluster_cidrs=(objects.CLUSTER_CIDR,))
"""One family, so that the measurement has the same contents as the recorded transactions."""

PERIOD = 3600.0
"""Seconds between thorough inspections of the kernel: none happens during other measurements."""

DUAL_STACK = Settings(
    node_name=objects.NODE,
    families=(Family.IPV4, Family.IPV6),
    cluster_cidrs=(objects.CLUSTER_CIDR, objects.CLUSTER_CIDR_6),
)


class Lags(Protocol):
    """A function that gets the delay of each change, in seconds."""

    def append(self, seconds: float, /) -> None:
        """Process one delay."""


class Listener:
    """An observer.Observer that passes on the events that a benchmark needs, and fails on unexpected events."""

    def __init__(self, settled: Callable[[Sequence[Change]], None] | None = None) -> None:
        self.on_settled = settled
        self.lags: Lags = []
        self.failures: list[str] = []

    def queued(self, families: Sequence[Family]) -> None:
        """See observer.Observer."""

    def counted(self, fresh: Counts, pending: Counts) -> None:
        """See observer.Observer."""

    def committing(self, family: Family, changes: Sequence[Change] | None) -> None:
        """See observer.Observer."""

    def committed(self, commit: Commit) -> None:
        """See observer.Observer."""
        for age in commit.ages:
            self.lags.append(age)

    def settled(self, changes: Sequence[Change]) -> None:
        """See observer.Observer."""
        if self.on_settled is not None:
            self.on_settled(changes)

    def refused(self, family: Family, error: ApplyError) -> None:
        """See observer.Observer."""
        self.failures.append(f"{family.label}: {error}")

    def noticed(self, notice: Notice) -> None:
        """See observer.Observer."""
        self.failures.append(str(notice))

    def world(self, world: Globals) -> None:
        """See observer.Observer."""


def local_addresses() -> Mapping[Family, Sequence[bytes]]:
    """Return the addresses of a node that has only one address per family."""
    return {Family.IPV4: [b"\x7f\0\0\1"], Family.IPV6: [bytes(15) + b"\1"]}


def collect_as_the_proxy_does() -> None:
    """Configure the garbage collector as app.run does."""
    lifetime.postpone_garbage_collection()


def settled() -> None:
    """Configure the garbage collector like resume_garbage_collection, without the garbage of the benchmark."""
    gc.collect()
    gc.freeze()
    gc.enable()


def engine(listener: Listener, period: float = PERIOD) -> tuple[Engine, NftablesBackend]:
    """Return an engine and its backend; call it on the event loop. `period` is as in Pace."""
    made, [backend] = engine_of(SETTINGS, listener, period)
    return made, backend


def engine_of(settings: Settings, listener: Listener, period: float = PERIOD) -> tuple[Engine, list[NftablesBackend]]:
    """Return an engine and its backends, one per family; call it on the event loop. `period` is as in Pace."""
    backends = [NftablesBackend(KernelTable.open(family), Globals(objects.NODE)) for family in settings.families]
    return Engine(settings, backends, listener, Pace(0.0, period), local_addresses, node_timeout=0.0), backends


def world() -> Globals:
    """Return the globals of such an engine."""
    return build(SETTINGS, Surroundings(local_addresses=local_addresses()))


def decoded(resource: Resource, pages: Iterable[bytes]) -> list[Object]:
    """Return the objects of all pages of a list."""
    found: list[Object] = []
    for page in pages:
        found += decode_page(resource, page).objects
    return found


class Listed(NamedTuple):
    """A list as the client collects it, and the seconds of decoding, and of building the stored objects.

    `keeping_cpu` are seconds of this process's CPU time.
    """

    objects: list[Object | PackedSlice]
    decoding: float
    keeping: float
    keeping_cpu: float


def listed(resource: Resource, pages: Iterable[bytes]) -> Listed:
    """Collect a list page by page, as the client does."""
    found: list[Object | PackedSlice] = []
    decoding = keeping = keeping_cpu = 0.0
    for page in pages:
        began = time.perf_counter()
        objects = decode_page(resource, page).objects
        decoding += time.perf_counter() - began
        began, spent = time.perf_counter(), time.process_time()
        found += map(kept, objects)
        keeping, keeping_cpu = keeping + time.perf_counter() - began, keeping_cpu + time.process_time() - spent
    return Listed(found, decoding, keeping, keeping_cpu)


def lists(size: objects.Size) -> list[Event]:
    """Return the lists at the beginning of a full sync, collected as the client does."""
    return [
        Replaced("services", listed("services", objects.service_pages(size)).objects),
        Replaced("endpointslices", listed("endpointslices", objects.slice_pages(size)).objects),
    ]


def decoded_object(resource: Resource, body: str) -> Object:
    """Return one object. Raises ValueError if the line contains none."""
    found, rejected = decode_object(resource, body.encode())
    if found is None:
        raise ValueError(str(rejected))
    return found


class Stopwatch:
    """Sums the time, in seconds, and the calls of a method of a class, until the process ends."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        self.calls = 0
        work: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        setattr(owner, name, timed)


class StepWatch:
    """Sums the time, in seconds, of the steps that a method of a class yields."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        work: Callable[..., Iterator[Any]] = getattr(owner, name)

        def timed(*arguments: Any) -> Iterator[Any]:
            steps = work(*arguments)
            while True:
                began = time.perf_counter()
                try:
                    step = next(steps)
                except StopIteration:
                    return
                finally:
                    self.seconds += time.perf_counter() - began
                yield step

        setattr(owner, name, timed)


async def longest_hold(stop: asyncio.Event, step: float = 0.002) -> float:
    """Return the longest delay of a timer on the event loop, in seconds, until `stop` is set."""
    longest = 0.0
    while not stop.is_set():
        due = time.perf_counter() + step
        await asyncio.sleep(step)
        longest = max(longest, time.perf_counter() - due)
    return longest
