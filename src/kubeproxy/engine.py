"""The one sync loop: when to sync, what of, and what follows from it. The only place that joins the two halves.

Everything before `apply` is pure and lives in model; what the kernel, the metrics and the operator get to see is
handed in. Nothing is written before every needed resource has been listed and the node is known (or given up on).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import ChainMap, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from msgspec import Struct

from kubeproxy.backends.mode import Backend, Depth, Difference
from kubeproxy.backlog import Backlog, Retry, note
from kubeproxy.errors import ApplyError, ChangedByOthersError, Unsupported
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event, Rejected, Upserted
from kubeproxy.model.objects import Node, ServiceCIDR
from kubeproxy.model.plan import NOTHING, Compiled, Globals, Problem, ServiceName, ServicePlan
from kubeproxy.model.planner import Change, Counts, Planner
from kubeproxy.model.world import Settings, Surroundings, build, pod_cidrs

log = logging.getLogger("kubeproxy.engine")

T = TypeVar("T")

NODE_PATIENCE = 30.0  # seconds; kube-proxy polls the Node that long before it falls back to loopback
HOLD = 0.01
"""Seconds that a long piece of work may hold the event loop at a time: 44,000 Services are seconds of work, and health,
watches and other programs' questions must not wait for that."""
DRIFT_CHECK = 1.0
"""Seconds between inspections. Each is in a thread, as nobody knows before whether it reads a number or all rules; the
thread costs some 70 microseconds."""


class Observer(Protocol):
    """Who wants to know. Called on the loop's thread; must return at once and not raise."""

    def queued(self, families: Sequence[Family]) -> None:
        """Something is to be programmed."""

    def pending(self, services: int, endpoints: int) -> None:
        """So many objects changed that are not yet in the kernel, in all families."""

    def counted(self, services: int, endpoints: int) -> None:
        """So many objects changed, each told once."""

    def synced(self, family: Family, seconds: float, full: bool) -> None:
        """A family is up to date in the kernel."""

    def failed(self, family: Family, error: ApplyError) -> None:
        """The kernel refused."""

    def applied(self, changes: Sequence[Change], full: bool) -> None:
        """These changes are in the kernel, in all families that it does not refuse at the moment."""

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
        self._backlogs = {backend.family: Backlog(backend.family) for backend in backends}
        self._unreported: dict[ServiceName, Change] = {}
        self._waiting = Counts()  # taken by a sync, but not in the kernel in all families
        self._started = time.monotonic()
        self._surroundings_changed = True
        self._world: Globals | None = None  # what the backends were told, nothing at first
        self._queued = False
        self._begun = False
        self._never_synced = {backend.family for backend in backends}

    @property
    def unapplied(self) -> Mapping[ServiceName, Change]:
        """The changes that are on their way to the kernel, or were refused by it."""
        return ChainMap(*(backlog.changes for backlog in self._backlogs.values()))

    def programmed(self, name: ServiceName) -> list[ServicePlan]:
        """Return what the kernel last took of a Service, family by family; a refused one has what it had before."""
        compiled = self.planner.compiled.get(name, NOTHING)
        return [plan for backlog in self._backlogs.values() for plan in backlog.taken(name, compiled)]

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
        self._tell_pending()
        self.poke()

    def _tell_pending(self) -> None:
        waiting, counts = self._waiting, self.planner.counts
        self._observer.pending(waiting.services + counts.services, waiting.endpoints + counts.endpoints)

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
        self._backlogs[family].stale = True
        self._wake.set()

    async def run(self) -> None:
        """Sync until cancelled."""
        drift = asyncio.create_task(self._watch_drift())
        drift.add_done_callback(lambda _: self._wake.set())
        retry = Retry()
        try:
            while True:
                await self._wait(drift)
                began = time.monotonic()
                try:
                    world_changed = self._update_world()
                except ApplyError as error:
                    log.error("Cannot read the local addresses error=%r", str(error))
                    await asyncio.sleep(retry.after_failure())
                    self._wake.set()
                    continue
                retry.succeeded()
                await self._sync(world_changed)
                await asyncio.sleep(max(0.0, self._pace.minimum - (time.monotonic() - began)))
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
            if self._begun or self._node_known():
                self._begun = True
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
            self._begun = True
            return

    def _node_known(self) -> bool:
        node = self.planner.nodes.get(self.settings.node_name)
        return node is not None and (self.settings.local_mode != "NodeCIDR" or bool(pod_cidrs(node)))

    async def _sync(self, world_changed: bool) -> None:
        """Do one sync of all families but those that rest after a failure."""
        queued, self._queued = self._queued, False
        fresh = await self._take()
        done: list[Family] = []
        full = False
        # Those that were refused come last: their attempts may be long.
        for backend in sorted(self._backends, key=lambda backend: self._backlogs[backend.family].stale):
            backlog = self._backlogs[backend.family]
            if backlog.resting:
                continue
            if backlog.changes or backlog.stale or world_changed:
                stale = backlog.stale
                if not await self._sync_family(backend, backlog, fresh, world_changed):
                    continue
                full = full or stale
            elif queued:  # what was queued came to nothing: that is up to date as well
                self._observer.synced(backend.family, 0.0, full=False)
            done.append(backend.family)
        if not any(backlog.changes for backlog in self._backlogs.values()):
            self._waiting = Counts()
        self._tell_pending()
        if done:
            self._report(full)
            if self._queued:  # during the sync, whose end told that nothing waits any more
                self._observer.queued([backend.family for backend in self._backends])
        if not self._never_synced:
            self.ready.set()

    async def _take(self) -> list[Change]:
        """Compile what is dirty; return what changed, which every family's backlog has by then."""
        counts, self.planner.counts = self.planner.counts, Counts()
        self._waiting.services += counts.services
        self._waiting.endpoints += counts.endpoints
        if counts.services or counts.endpoints:
            self._observer.counted(counts.services, counts.endpoints)
        fresh: list[Change] = []
        async for changes in _in_turns(self.planner.taking()):
            fresh += changes
            for backlog in self._backlogs.values():
                backlog.add(changes)
            for change in changes:
                note(self._unreported, change)
        return fresh

    async def _sync_family(
        self, backend: Backend, backlog: Backlog, fresh: Sequence[Change], world_changed: bool
    ) -> bool:
        """Bring one family up to date; return whether the kernel took it."""
        family, began = backend.family, time.monotonic()
        full, backlog.stale = backlog.stale, False  # it may be asked for meanwhile
        # If not stale its last sync succeeded, so it has all but what is fresh. A new world may be a new address for
        # NodePorts, to which flows began before it answered.
        everything = full or world_changed
        compiled = self.planner.compiled
        steps = _resync(backend, backlog, compiled) if full else backend.sync(backlog.plans())
        try:
            async with self._kernel:
                await _run(steps, in_thread=full or backend.blocking)
        except ApplyError as error:
            log.error("Sync failed family=%s error=%r", family.label, str(error))
            backlog.stale = backlog.resting = True
            asyncio.get_running_loop().call_later(backlog.retry.after_failure(), self._try_again, backlog)
            self._observer.failed(family, error)
            if isinstance(error, ChangedByOthersError):
                self._observer.drifted(str(error))
            return False
        self._observer.synced(family, time.monotonic() - began, full)
        self._observer.reached(family, backlog.everything(fresh, compiled) if everything else fresh, everything)
        now = datetime.now(UTC)
        for trigger in backlog.triggers():
            if (seconds := _age(trigger, now)) is not None:
                self._observer.programmed(family, seconds)
        backlog.changes.clear()
        backlog.retry.succeeded()
        self._never_synced.discard(family)
        return True

    def _try_again(self, backlog: Backlog) -> None:
        backlog.resting = False
        self._wake.set()

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
                self._backlogs[backend.family].stale = True
        return True

    def _report(self, full: bool) -> None:
        """Tell what follows from the changes; families that are refused are not waited for."""
        if not (self._unreported or full):
            return
        changes = list(self._unreported.values())
        self._unreported.clear()
        for change in changes:
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
            thorough = time.monotonic() - looked >= self._pace.period
            for backend in self._backends:
                async with self._kernel:
                    if self._backlogs[backend.family].stale:
                        suspicious.discard(backend.family)
                        continue
                    depth = Depth.THOROUGH if thorough or backend.family in suspicious else Depth.QUICK
                    difference = await asyncio.to_thread(_looked_after, backend, depth)
                convicted = difference is not None and (difference.certain or backend.family in suspicious)
                suspicious.discard(backend.family)
                if difference is not None and convicted:
                    log.warning("Repairing: %s", difference.what)
                    self._observer.drifted(difference.what)
                    self.force(backend.family)
                elif difference is not None:
                    suspicious.add(backend.family)
            if thorough:
                looked = time.monotonic()


async def _in_turns(steps: Iterable[T]) -> AsyncIterator[T]:
    """Yield from steps of work, letting the loop run whenever it was held long enough."""
    until = time.monotonic() + HOLD
    for step in steps:
        yield step
        if time.monotonic() > until:
            await asyncio.sleep(0)
            until = time.monotonic() + HOLD


def _looked_after(backend: Backend, depth: Depth) -> Difference | None:
    """Do a backend's upkeep and inspect it."""
    try:
        backend.upkeep()
        return backend.inspect(depth)
    except ApplyError as error:
        return Difference(f"the kernel cannot be read: {error}")


def _resync(backend: Backend, backlog: Backlog, compiled: Mapping[ServiceName, Compiled]) -> Iterator[int]:
    """Yield from a full sync. What is wanted is put together where it runs: at 44,000 Services that takes 0.1 s."""
    yield from backend.resync(backlog.all_plans(compiled))


async def _run(steps: Iterator[int], *, in_thread: bool) -> None:
    """Exhaust a backend's transactions, letting the loop run in between.

    A full sync, or any that runs a program, may wait for long: in a thread, so that health is answered meanwhile. It
    only touches the backend and what was compiled, which nobody else changes during a sync.
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


def _age(trigger: str, now: datetime) -> float | None:
    try:
        return (now - datetime.fromisoformat(trigger)).total_seconds()
    except (ValueError, TypeError):
        return None
