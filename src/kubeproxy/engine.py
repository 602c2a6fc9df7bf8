"""The one sync loop: when to sync, what of, and what follows from it. The only place that joins the two halves.

Everything before `apply` is pure and lives in model; what the kernel, the metrics and the operator get to see is
handed in. Nothing is written before every needed resource has been listed and the node is known (or given up on).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from msgspec import Struct

from kubeproxy.backends.mode import Backend
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event, Rejected, Upserted
from kubeproxy.model.objects import Node, ServiceCIDR
from kubeproxy.model.plan import Compiled, Globals, Problem, ServiceName, ServicePlan
from kubeproxy.model.planner import Change, Planner
from kubeproxy.model.world import Settings, Surroundings, build, pod_cidrs

log = logging.getLogger("kubeproxy.engine")

T = TypeVar("T")

NODE_PATIENCE = 30.0  # seconds; kube-proxy polls the Node that long before it falls back to loopback
FIRST_RETRY = 0.05
SLOWEST_RETRY = 10.0
HOLD = 0.01
"""Seconds that a long piece of work may hold the event loop at a time: 44,000 Services are seconds of work, and health,
watches and other programs' questions must not wait for that."""
DRIFT_CHECK = 1.0  # seconds between looks at the ruleset's generation, which cost microseconds


class Observer(Protocol):
    """Who wants to know. Called on the loop's thread; must return at once and not raise."""

    def queued(self, families: Sequence[Family]) -> None:
        """Something is to be programmed."""

    def pending(self, services: int, endpoints: int) -> None:
        """So many objects changed since the last sync."""

    def counted(self, services: int, endpoints: int) -> None:
        """So many object changes went into a sync of all families."""

    def synced(self, family: Family, seconds: float, full: bool) -> None:
        """A family is up to date in the kernel."""

    def failed(self, family: Family, error: ApplyError) -> None:
        """The kernel refused."""

    def applied(self, changes: Sequence[Change], full: bool) -> None:
        """These changes are in the kernel, in all families."""

    def reached(self, family: Family, changes: Sequence[Change], full: bool) -> None:
        """These changes are in the kernel in this family; all Services if `full`, whatever it had before."""

    def programmed(self, family: Family, seconds: float) -> None:
        """An endpoint change reached the kernel so long after what triggered it."""

    def problem(self, name: ServiceName, uid: str, problem: Problem) -> None:
        """A Service has a field that cannot be used."""

    def rejected(self, rejected: Rejected) -> None:
        """An object, or an entry of it, cannot be used."""

    def drifted(self, what: str) -> None:
        """Another program changed our rules; they are being repaired."""

    def world(self, world: Globals) -> None:
        """The node's part of the plans changed."""


class Pace(Struct, frozen=True):
    """Seconds: at least `minimum` between syncs, at most `period` between full looks at what others changed."""

    minimum: float = 0.0
    period: float = 30.0


class Engine:
    """Owns the planner; runs one sync at a time."""

    def __init__(
        self,
        settings: Settings,
        backends: Sequence[Backend],
        observer: Observer,
        pace: Pace,
        local_addresses: Callable[[], Mapping[Family, Sequence[bytes]]],
        node_patience: float = NODE_PATIENCE,
    ) -> None:
        self.settings = settings
        self.planner = Planner(build(settings, Surroundings()))
        self.ready = asyncio.Event()
        self._backends = backends
        self._observer = observer
        self._pace = pace
        self._local_addresses = local_addresses
        self._node_patience = node_patience
        self._wake = asyncio.Event()
        self._kernel = asyncio.Lock()  # a backend does one thing at a time, in a thread or not
        self._inbox: deque[Iterator[list[Rejected]]] = deque()  # what is being taken in, and what comes after it
        self._unapplied: dict[ServiceName, Change] = {}
        self._stale: set[Family] = {backend.family for backend in backends}
        self._started = time.monotonic()
        self._surroundings_changed = True
        self._world: Globals | None = None  # what the backends were told, nothing at first
        self._queued = False
        self._retry = FIRST_RETRY

    @property
    def unapplied(self) -> Mapping[ServiceName, Change]:
        """The changes that are on their way to the kernel, or were refused by it."""
        return self._unapplied

    def sink(self, events: Sequence[Event]) -> None:
        """Take events of a source in. Never raises: what cannot be used is reported.

        Few events are taken in at once, a long list bit by bit; whatever comes after it waits for its turn, but for
        the Node and the ServiceCIDRs, which others than the engine look at.
        """
        if about_node := [event for event in events if _is_about_node(event)]:
            self._surroundings_changed = True
            self._reject(self.planner.apply(about_node))
            events = [event for event in events if not _is_about_node(event)]
        self._inbox.append(self.planner.applying(events))
        if len(self._inbox) == 1:
            self._digest()
        self._wake.set()

    def _digest(self) -> None:
        """Take in what was delivered, for as long as the loop can be held; `_wait` takes in the rest."""
        until = time.monotonic() + HOLD
        while self._inbox:
            try:
                for rejected in self._inbox[0]:
                    self._reject(rejected)
                    if time.monotonic() > until:
                        return
            except BaseException:
                self._inbox.popleft()
                raise
            self._inbox.popleft()
        counts = self.planner.counts
        self._observer.pending(counts.services, counts.endpoints)
        self.poke()

    def _reject(self, found: Sequence[Rejected]) -> None:
        for rejected in found:
            self._observer.rejected(rejected)

    def poke(self) -> None:
        """Look soon whether there is something to do."""
        if self.planner.dirty and not self._queued:
            self._queued = True
            self._observer.queued([backend.family for backend in self._backends])
        self._wake.set()

    def addresses_changed(self) -> None:
        """Look at the local addresses again: NodePorts may have to answer on others."""
        self._surroundings_changed = True
        self._wake.set()

    def force(self, family: Family) -> None:
        """Compare a family with the kernel at the next sync."""
        self._stale.add(family)
        self._wake.set()

    async def run(self) -> None:
        """Sync until cancelled."""
        drift = asyncio.create_task(self._watch_drift())
        drift.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                await self._wait(drift)
                began = time.monotonic()
                if await self._sync():
                    self._retry = FIRST_RETRY
                    if self._queued:  # during the sync, whose end told that nothing waits any more
                        self._observer.queued([backend.family for backend in self._backends])
                    await asyncio.sleep(max(0.0, self._pace.minimum - (time.monotonic() - began)))
                else:
                    await asyncio.sleep(self._retry * random.uniform(0.75, 1.25))  # noqa: S311 - jitter
                    self._retry = min(self._retry * 2, SLOWEST_RETRY)
                    self._wake.set()
        finally:
            drift.cancel()

    async def _wait(self, drift: asyncio.Task[None]) -> None:
        """Return when there is something to sync and it may be synced. Raises what ended the look-out for drift."""
        while True:
            await self._wake.wait()
            if drift.done():
                drift.result()
            while self._inbox:  # half a list is not written
                self._digest()
                await asyncio.sleep(0)
            self._wake.clear()
            if not self.planner.complete:
                continue
            if self._node_known() or self.ready.is_set():
                return
            left = self._started + self._node_patience - time.monotonic()
            if left > 0:
                asyncio.get_running_loop().call_later(left, self._wake.set)
                continue
            if self.settings.local_mode == "NodeCIDR":
                raise Unsupported(
                    f"detectLocalMode is NodeCIDR, but Node {self.settings.node_name} got no podCIDRs within "
                    f"{self._node_patience:.0f} s: have them allocated (--allocate-node-cidrs), or use another mode"
                )
            log.warning("No Node of this name, going on without its addresses node=%s", self.settings.node_name)
            return

    def _node_known(self) -> bool:
        node = self.planner.nodes.get(self.settings.node_name)
        return node is not None and (self.settings.local_mode != "NodeCIDR" or bool(pod_cidrs(node)))

    async def _sync(self) -> bool:
        """Do one sync of all families; return whether everything is in the kernel."""
        try:
            world_changed = self._update_world()
        except ApplyError as error:
            log.error("Cannot read the local addresses error=%r", str(error))
            return False
        queued, self._queued = self._queued, False
        services, endpoints = self.planner.counts.services, self.planner.counts.endpoints
        self.planner.counts.services = self.planner.counts.endpoints = 0
        fresh: list[Change] = []
        async for changes in _in_turns(self.planner.taking()):
            fresh += changes
            for change in changes:
                earlier = self._unapplied.get(change.name)
                self._unapplied[change.name] = change if earlier is None else _joined(earlier, change)
        if not (self._unapplied or self._stale or world_changed):
            for backend in (
                self._backends if queued else ()
            ):  # what was queued came to nothing: that is up to date as well
                self._observer.synced(backend.family, 0.0, full=False)
            self._observer.counted(services, endpoints)
            return True
        changes = list(self._unapplied.values())
        full = bool(self._stale)
        done: list[bool] = []
        for backend in self._backends:
            # If not stale its last sync succeeded, so it has all but what is fresh, whatever the other family has.
            # A new world may be a new address for NodePorts, to which flows began before it answered.
            everything = world_changed or backend.family in self._stale
            about = self._everything(fresh) if everything else fresh
            done.append(await self._sync_family(backend, changes))
            if done[-1]:
                self._observer.reached(backend.family, about, everything)
        if not all(done):
            self.planner.counts.services += services
            self.planner.counts.endpoints += endpoints
            return False
        self._unapplied.clear()
        self._observer.counted(services, endpoints)
        self._report(changes, full)
        self.ready.set()
        return True

    def _everything(self, fresh: Sequence[Change]) -> list[Change]:
        """Return what changed since the kernel was known to be right, and all Services that did not change."""
        unapplied, compiled = self._unapplied, self.planner.compiled
        joined = [change for change in fresh if unapplied[change.name] is not change]
        same = [Change(name, entry, entry) for name, entry in compiled.items() if name not in unapplied]
        return [*joined, *unapplied.values(), *same]

    async def _sync_family(self, backend: Backend, changes: Sequence[Change]) -> bool:
        family, began = backend.family, time.monotonic()
        full = family in self._stale
        try:
            if full:
                steps = self._resync(backend, changes)
            else:
                # All of them: of two changes joined after a failure, this family may have got the first one.
                steps = backend.sync([(c.name, _of(c.after, family)) for c in changes])
            async with self._kernel:
                await _run(steps, in_thread=full or backend.blocking)
        except ApplyError as error:
            log.error("Sync failed family=%s error=%r", family.label, str(error))
            self._stale.add(family)
            self._observer.failed(family, error)
            return False
        if full:  # else it may have been asked for meanwhile
            self._stale.discard(family)
        self._observer.synced(family, time.monotonic() - began, full)
        return True

    def _resync(self, backend: Backend, changes: Sequence[Change]) -> Iterator[int]:
        """Yield from a full sync of a family; what changed comes first, in its order."""
        compiled = self.planner.compiled
        ordered = {change.name: change.after for change in changes if change.name in compiled} | compiled
        yield from backend.resync({name: _of(entry, backend.family) for name, entry in ordered.items()})

    def _update_world(self) -> bool:
        """Take the node's part of the plans up to date; return whether it changed. Raises ApplyError."""
        if not self._surroundings_changed:
            return False
        cidrs = [cidr for cidrs in self.planner.service_cidrs.values() for cidr in cidrs]
        node = self.planner.nodes.get(self.settings.node_name)
        world = build(self.settings, Surroundings(node, cidrs, self._local_addresses()))
        self._surroundings_changed = False
        if world == self._world:
            return False
        self._world = world
        self.planner.set_world(world)
        self._observer.world(world)
        for backend in self._backends:
            if backend.set_world(world):
                self._stale.add(backend.family)
        return True

    def _report(self, changes: Sequence[Change], full: bool) -> None:
        now = datetime.now(UTC)
        for change in changes:
            for trigger in change.triggers:
                if (seconds := _age(trigger, now)) is not None:
                    for family in {plan.key.family for plan in change.after.plans}:
                        self._observer.programmed(family, seconds)
            if change.after.problems != change.before.problems:
                for problem in change.after.problems:
                    if problem not in change.before.problems:
                        self._observer.problem(change.name, change.uid, problem)
        self._observer.applied(changes, full)

    async def _watch_drift(self) -> None:
        """Notice other programs' changes to our rules within seconds, and have them undone."""
        suspicious: set[Family] = set()
        looked = time.monotonic()
        while True:
            await asyncio.sleep(DRIFT_CHECK)
            if not self.ready.is_set():
                continue
            thorough = time.monotonic() - looked >= self._pace.period
            for backend in self._backends:
                async with self._kernel:
                    if backend.family in self._stale or not self._touched(backend):
                        suspicious.discard(backend.family)
                        continue
                    closely = thorough or backend.family in suspicious
                    found, certain = await asyncio.to_thread(self._drift, backend, closely)
                # A dump may catch the kernel's hash tables while they grow: only a second look convicts.
                convicted = found and (certain or backend.family in suspicious)
                suspicious.discard(backend.family)
                if convicted:
                    log.warning("Repairing: %s", found)
                    self._observer.drifted(found)
                    self.force(backend.family)
                elif found:
                    suspicious.add(backend.family)
            if thorough:
                looked = time.monotonic()

    @staticmethod
    def _touched(backend: Backend) -> bool:
        try:
            return backend.touched()
        except ApplyError as error:
            log.error("Cannot look for drift family=%s error=%r", backend.family.label, str(error))
            return False

    @staticmethod
    def _drift(backend: Backend, thorough: bool) -> tuple[str, bool]:
        """Return what another program did ('' for nothing), and whether one look is enough to be certain."""
        try:
            found = backend.drift()
            return (found, True) if found else (backend.element_drift() if thorough else "", False)
        except ApplyError as error:
            return f"the table cannot be read: {error}", True


async def _in_turns(steps: Iterable[T]) -> AsyncIterator[T]:
    """Yield from steps of work, letting the loop run whenever it was held long enough."""
    until = time.monotonic() + HOLD
    for step in steps:
        yield step
        if time.monotonic() > until:
            await asyncio.sleep(0)
            until = time.monotonic() + HOLD


async def _run(steps: Iterator[int], *, in_thread: bool) -> None:
    """Exhaust a backend's transactions, letting the loop run in between.

    A full sync, or any that runs a program, may wait for long: in a thread, so that health is answered meanwhile. It
    only touches the backend, which nobody else uses during a sync, and plans, which never change.
    """
    if in_thread:
        while await asyncio.to_thread(next, steps, None) is not None:
            pass
        return
    next(steps, None)
    for _ in steps:
        await asyncio.sleep(0)


def _is_about_node(event: Event) -> bool:
    """Return whether an event may change what holds for all Services."""
    if isinstance(event, Upserted):
        return isinstance(event.object, Node | ServiceCIDR)
    return event.resource in {"nodes", "servicecidrs"}


def _of(compiled: Compiled, family: Family) -> tuple[ServicePlan, ...]:
    plans = compiled.plans  # family by family
    if plans and plans[0].key.family is family is plans[-1].key.family:
        return plans
    return tuple([plan for plan in plans if plan.key.family is family])


def _joined(earlier: Change, later: Change) -> Change:
    """Return two changes of a Service as one."""
    return Change(later.name, earlier.before, later.after, later.uid, earlier.triggers + later.triggers)


def _age(trigger: str, now: datetime) -> float | None:
    try:
        return (now - datetime.fromisoformat(trigger)).total_seconds()
    except (ValueError, TypeError):
        return None
