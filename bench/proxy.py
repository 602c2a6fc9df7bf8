"""The proxy's own parts, joined as program/app.py joins them: no sources, servers or metrics. For what is measured
inside one process.
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
from kubeproxy.model.events import kept
from kubeproxy.model.objects import Object, Resource
from kubeproxy.model.plan import Globals
from kubeproxy.model.planner import Change, Counts
from kubeproxy.model.world import Settings, Surroundings, build
from kubeproxy.program import lifetime

SETTINGS = Settings(node_name=objects.NODE, families=(Family.IPV4,), cluster_cidrs=(objects.CLUSTER_CIDR,))
"""One family, so that what is measured is what the recorded transactions contain."""

PERIOD = 3600.0
"""Seconds between thorough looks at the kernel: none while something else is measured."""

DUAL_STACK = Settings(
    node_name=objects.NODE,
    families=(Family.IPV4, Family.IPV6),
    cluster_cidrs=(objects.CLUSTER_CIDR, objects.CLUSTER_CIDR_6),
)


class Lags(Protocol):
    """Takes how late each change was programmed, in seconds."""

    def append(self, seconds: float, /) -> None:
        """Take one."""


class Listener:
    """An observer.Observer that passes on what a benchmark asks for, and fails on anything that should not happen."""

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
    """Return the addresses of a node that has but one of each family."""
    return {Family.IPV4: [b"\x7f\0\0\1"], Family.IPV6: [bytes(15) + b"\1"]}


def collect_as_the_proxy_does() -> None:
    """Set the garbage collector as app.run does."""
    lifetime.postpone_garbage_collection()


def settled() -> None:
    """Set the garbage collector as resume_garbage_collection does, without the garbage of the benchmark itself."""
    gc.collect()
    gc.freeze()
    gc.enable()


def engine(listener: Listener, period: float = PERIOD) -> tuple[Engine, NftablesBackend]:
    """Return an engine and its backend; to be made on the event loop. `period` is as in Pace."""
    made, [backend] = engine_of(SETTINGS, listener, period)
    return made, backend


def engine_of(settings: Settings, listener: Listener, period: float = PERIOD) -> tuple[Engine, list[NftablesBackend]]:
    """Return an engine and its backends, one a family; to be made on the event loop. `period` is as in Pace."""
    backends = [NftablesBackend(KernelTable.open(family), Globals(objects.NODE)) for family in settings.families]
    return Engine(settings, backends, listener, Pace(0.0, period), local_addresses, node_timeout=0.0), backends


def world() -> Globals:
    """Return the globals that such an engine works with."""
    return build(SETTINGS, Surroundings(local_addresses=local_addresses()))


def decoded(resource: Resource, pages: Iterable[bytes]) -> list[Object]:
    """Return the objects of all pages of a list."""
    found: list[Object] = []
    for page in pages:
        found += decode_page(resource, page).objects
    return found


class Listed(NamedTuple):
    """A list as the client collects it, and the seconds that decoding took, and making of it what is kept.

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


def decoded_object(resource: Resource, body: str) -> Object:
    """Return one object. Raises ValueError when it is none."""
    found, rejected = decode_object(resource, body.encode())
    if found is None:
        raise ValueError(str(rejected))
    return found


class Stopwatch:
    """Adds up the time, in seconds, and the calls of a method of a class; for the life of a process."""

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
    """Adds up the time, in seconds, that a method of a class takes for the steps it yields."""

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
    """Return the longest time, in seconds, that the event loop was kept from a timer while `stop` was not set."""
    longest = 0.0
    while not stop.is_set():
        due = time.perf_counter() + step
        await asyncio.sleep(step)
        longest = max(longest, time.perf_counter() - due)
    return longest
