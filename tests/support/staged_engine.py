"""Runs an engine in a test: objects of the API, backends and an observer that only record calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from kubeproxy.backends.mode import Abilities, Depth, ForeignChange
from kubeproxy.backends.state import NamedPlans, Plans
from kubeproxy.engine.engine import Engine, Pace
from kubeproxy.engine.observer import Commit, Notice
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Event, Replaced, Upserted
from kubeproxy.model.objects import (
    Annotations,
    EndpointPort,
    EndpointSlice,
    Labels,
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Service,
    ServiceCIDR,
    ServiceCIDRSpec,
    ServicePort,
    ServiceSpec,
    SliceEndpoint,
)
from kubeproxy.model.plan import Globals, ServiceName, ServicePlan
from kubeproxy.model.world import Settings

T = TypeVar("T")

V4, V6 = Family.IPV4, Family.IPV6
NODE = "node-a"
TIMEOUT = 30.0
_sleep = asyncio.sleep


# -- objects ------------------------------------------------------------------------------------------------------


def service(
    name: str,
    number: int = 1,
    family: Family = V4,
    annotations: Annotations | None = None,
    protocol: str = "TCP",
    **spec: Any,
) -> Upserted:
    address = f"10.96.0.{number}" if family is V4 else f"fd00::{number}"
    ports = [ServicePort(port=80, protocol=protocol)]
    made = ServiceSpec(cluster_ip=address, cluster_ips=[address], ports=ports, **spec)
    meta = ObjectMeta(name=name, namespace="ns", uid=f"uid-{name}", annotations=annotations)
    return Upserted("services", Service(meta, made))


def endpoints(name: str, *numbers: int, triggered: str | None = None, protocol: str = "TCP") -> Upserted:
    meta = ObjectMeta(name=name, namespace="ns", labels=Labels(service_name=name), annotations=Annotations(triggered))
    found = [SliceEndpoint([f"10.244.0.{n}"]) for n in numbers]
    return Upserted("endpointslices", EndpointSlice(meta, "IPv4", found, [EndpointPort(port=8080, protocol=protocol)]))


def gone(name: str) -> Deleted:
    return Deleted("services", "ns", name)


def node(address: str | None = "192.0.2.1", name: str = NODE, pod_cidrs: list[str] | None = None) -> Upserted:
    """Return a Node with an address, or without one."""
    status = NodeStatus([NodeAddress("InternalIP", address)] if address else [])
    return Upserted("nodes", Node(ObjectMeta(name=name), NodeSpec(pod_cidrs=pod_cidrs), status))


def cidr(text: str) -> Upserted:
    return Upserted("servicecidrs", ServiceCIDR(ObjectMeta(name="kubernetes"), ServiceCIDRSpec([text])))


LISTS = (Replaced("services", []), Replaced("endpointslices", []))
READY = (*LISTS, node())


# -- recorders --------------------------------------------------------------------------------------------------------


class FakeBackend:
    """A backend that stores its input like a kernel; a test can make it refuse changes."""

    abilities = Abilities()

    def __init__(self, family: Family) -> None:
        self.family = family
        self.state: dict[ServiceName, Sequence[ServicePlan]] = {}
        self.calls: list[tuple[str, list[str]]] = []
        self.worlds: list[Globals] = []
        self.failures: list[bool] = []  # True: refuse the next transaction
        self.world_failures: list[bool] = []  # the same for the next world
        self.mood: Exception = ApplyError("the kernel is in a bad mood")
        self.resync_on_world = False
        self.is_touched: bool | Exception = False
        self.altered: ForeignChange | Exception | None = None
        self.altered_elements: ForeignChange | Exception | None = None
        self.looks: list[Depth] = []
        self.kept_up = 0
        self.before_step: Callable[[], object] = lambda: None
        self.before_world: Callable[[], object] = lambda: None
        self.before_reading: Callable[[], object] = lambda: None

    def set_world(self, world: Globals) -> bool:
        self.before_world()
        if self.world_failures and self.world_failures.pop(0):
            raise self.mood
        self.worlds.append(world)
        return self.resync_on_world

    def sync(self, changes: Sequence[NamedPlans]) -> Iterator[int]:
        self.calls.append(("sync", [name[1] for name, _ in changes]))
        for name, plans in changes:
            yield self._write(name, plans)
        yield 0

    def resync(self, wanted: Plans) -> Iterator[int]:
        self.before_reading()
        self.calls.append(("resync", [name[1] for name in wanted]))
        for name in set(self.state) - set(wanted):
            del self.state[name]
        for name, plans in wanted.items():
            yield self._write(name, plans)
        self.is_touched, self.altered, self.altered_elements = False, None, None
        yield 0

    def _write(self, name: ServiceName, plans: Sequence[ServicePlan]) -> int:
        self.before_step()
        if self.failures and self.failures.pop(0):
            raise self.mood
        if plans:
            self.state[name] = plans
        else:
            self.state.pop(name, None)
        return 1

    def upkeep(self) -> None:
        self.kept_up += 1

    def inspect(self, depth: Depth) -> ForeignChange | None:
        self.looks.append(depth)
        if not self._answer(self.is_touched):
            return None
        if depth is Depth.QUICK or self.altered is not None:
            return self._answer(self.altered)
        return self._answer(self.altered_elements)

    @staticmethod
    def _answer(value: T | Exception) -> T:
        if isinstance(value, Exception):
            raise value
        return value

    def close(self) -> None:
        pass


class Notes:
    """An observer that records its calls, by the name of the method."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> Any:
        def note(*arguments: object, **more: object) -> None:
            self.made.append((method, (*arguments, *more.values())))

        return note

    def of(self, method: str) -> list[tuple[Any, ...]]:
        return [arguments for name, arguments in self.made if name == method]

    @property
    def commits(self) -> list[Commit]:
        return [commit for (commit,) in self.of("committed")]

    @property
    def notices(self) -> list[Notice]:
        return [notice for (notice,) in self.of("noticed")]

    @property
    def counts(self) -> tuple[list[Any], list[Any]]:
        """The changed Services and slices of each sync, without empty syncs, and the pending changes at each call."""
        made = [(tuple(getattr(c, f) for f in c.__struct_fields__) for c in pair) for pair in self.of("counted")]
        pairs = [tuple(pair) for pair in made]
        return [fresh for fresh, _ in pairs if any(fresh)], [pending for _, pending in pairs]


class Stage:
    """A running engine with its surroundings."""

    def __init__(
        self,
        *,
        families: tuple[Family, ...] = (V4,),
        patience: float = TIMEOUT,
        pace: Pace | None = None,
        **options: Any,
    ) -> None:
        self.backends = [FakeBackend(family) for family in families]
        self.notes = Notes()
        self.addresses: dict[Family, list[bytes]] | Exception = {V4: [], V6: []}
        self.before_addresses: Callable[[], object] = lambda: None
        self.engine = Engine(
            Settings(node_name=NODE, families=families, **options),
            self.backends,
            self.notes,
            pace or Pace(),
            self._local_addresses,
            patience,
        )
        self.task: asyncio.Task[None] | None = None

    def _local_addresses(self) -> dict[Family, list[bytes]]:
        self.before_addresses()
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return self.addresses

    @property
    def backend(self) -> FakeBackend:
        return self.backends[0]

    def tell_during_sync(self, *events: Event) -> None:
        """Set an event when the next sync is under way."""

        def tell_once() -> None:
            self.backend.before_step = lambda: None
            self.tell(*events)

        self.backend.before_step = tell_once

    def tell_while_it_reads(self, *events: Event) -> None:
        """Set an event when the next full sync reads the kernel."""

        def tell_once() -> None:
            for backend in self.backends:
                backend.before_reading = lambda: None
            loop.call_soon_threadsafe(self.tell, *events)

        loop = asyncio.get_running_loop()
        self.backend.before_reading = tell_once

    def tell(self, *events: Event) -> None:
        self.engine.arrive(events)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert self.task is not None
                assert not self.task.done(), self.task
                await _sleep(0.001)

    async def settled(self) -> None:
        """Wait until the backends have all changes so far, and the loop is idle."""
        await self.until(lambda: self.engine.ready.is_set() and not self.engine.planner.dirty and self.idle())
        await _sleep(0.005)
        await self.until(self.idle)

    def idle(self) -> bool:
        engine = self.engine
        waiting = any(b.changes or b.stale or b.resting for b in engine._backlogs.values())
        return engine._intake.is_empty and not (waiting or engine._wake.is_set() or engine._kernel.locked())

    def programmed(self, backend: FakeBackend | None = None) -> dict[str, Sequence[ServicePlan]]:
        return {name[1]: plans for name, plans in (backend or self.backend).state.items()}


def play(scene: Callable[[Stage], Awaitable[object]], **options: Any) -> None:
    """Run a test with an engine that runs at the same time."""

    async def run() -> None:
        stage = Stage(**options)
        stage.task = asyncio.create_task(stage.engine.run())
        try:
            await scene(stage)
        finally:
            stage.task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Unsupported, AttributeError):
                await stage.task
            await _sleep(0)

    asyncio.run(run())


def runs_for_years(stage: Stage) -> None:
    """Make the engine's start so old that no trigger time is before it."""
    stage.engine._started -= 1e9


async def started(stage: Stage, *events: Event) -> None:
    stage.tell(*READY, *events)
    await stage.settled()
    for backend in stage.backends:
        backend.calls.clear()
    stage.notes.made.clear()
