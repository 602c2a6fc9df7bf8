"""The one sync loop: when to sync, what of, and what follows from it. The only place that joins the two halves.

Everything before a backend is pure and lives in model; what the kernel, the metrics and the operator get to see is
handed in. Nothing is written before every needed resource has been listed and the node is known (or given up on).
The words for what happens to an event on its way are those of docs/architecture.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from kubeproxy.backends.mode import Backend, ForeignChange
from kubeproxy.engine.backlog import Backlog, note, retries
from kubeproxy.engine.inspection import Inspector
from kubeproxy.engine.intake import Intake
from kubeproxy.engine.latest import LatestPlans, Plans
from kubeproxy.engine.observer import Commit, Observer, ServiceProblem
from kubeproxy.engine.progress import Progress
from kubeproxy.engine.standing import FamilyStanding
from kubeproxy.engine.turns import exhaust, in_turns, to_its_end
from kubeproxy.errors import ApplyError, ChangedByOthersError, Unsupported
from kubeproxy.features import RESETS
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event
from kubeproxy.model.gone import Departures
from kubeproxy.model.objects import Node
from kubeproxy.model.plan import NOTHING, Globals, ServiceName, ServicePlan
from kubeproxy.model.planner import Change, Counts, Planner
from kubeproxy.model.world import Settings, Surroundings, build, pod_cidrs, primary_family

log = logging.getLogger("kubeproxy.engine")

NODE_PATIENCE = 30.0  # seconds; kube-proxy polls the Node that long before it falls back to loopback

CATCH_UP = 0.05
"""Seconds that a full sync lets events come in after it has read the kernel: another kube-proxy on this node, as in an
upgrade, may get them earlier, and what it wrote is not to be undone."""

TOGETHER = 5000
"""Changes that are said to be settled at once: some 10 ms."""


class Pace(Struct, frozen=True):
    """Seconds: at least `minimum` between syncs, at most `period` between thorough looks at the kernel."""

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
        servers: Callable[[], Iterable[tuple[str, int]]] = tuple,
    ) -> None:
        self.settings = settings
        self.planner = Planner(build(settings, Surroundings()), Departures() if RESETS.value(settings) else None)
        self.ready = asyncio.Event()
        self.progress: Progress | None = None  # of the full sync under way, if there is one
        self.local_addresses: Mapping[Family, Sequence[bytes]] = {}  # the node's, packed, as they were read last
        self._backends = backends
        self._families = [backend.family for backend in backends]
        self._observer = observer
        self._pace = pace
        self._read_addresses = local_addresses
        self._node_patience = node_patience
        self._servers = servers
        self._wake = asyncio.Event()
        self._kernel = asyncio.Lock()  # a backend does one thing at a time
        self._intake = Intake(self.planner, observer.noticed)
        self._backlogs = {family: Backlog(family) for family in self._families}
        self._inspector = Inspector(backends, self._backlogs, pace.period, self._kernel, self._convicted)
        self._unsettled: dict[ServiceName, Change] = {}
        self._uncommitted = Counts()  # taken up by syncs, but not committed in all families
        self._started = time.monotonic()
        self._primary: Family | None = None  # of the Node, once it is known
        self._surroundings_changed = True
        self._world: Globals | None = None  # what the backends were given, nothing at first
        self._queued = False
        self._begun = False
        self._alarm: asyncio.TimerHandle | None = None
        self._never_committed = set(self._families)

    # -- what may be asked of it --------------------------------------------------------------------------------------

    @property
    def queued(self) -> Mapping[ServiceName, Change]:
        """The changes that some family does not have yet: on their way to its kernel, or refused by it."""
        return ChainMap(*(backlog.changes for backlog in self._backlogs.values()))

    def committed(self, name: ServiceName) -> list[ServicePlan]:
        """Return what the kernel last took of a Service, family by family; a refused one has what it had before.

        Whether the kernel still has it, and since when that is known, says `standing`.
        """
        compiled = self.planner.compiled.get(name, NOTHING)
        return [plan for backlog in self._backlogs.values() for plan in backlog.committed_plans(name, compiled)]

    @property
    def standings(self) -> tuple[FamilyStanding, ...]:
        """What is known of each family's kernel."""
        return tuple(map(self.standing, self._families))

    def standing(self, family: Family) -> FamilyStanding:
        """Return what is known of a family's kernel."""
        return self._backlogs[family].standing

    # -- what arrives -------------------------------------------------------------------------------------------------

    def arrive(self, events: Sequence[Event]) -> None:
        """Take events of a source in. Never raises: what cannot be used is reported.

        Few events are taken in at once, a long list bit by bit.
        """
        waiting = not self._intake.is_empty
        if self._intake.arrive(events):
            self._surroundings_changed = True
        if not waiting:
            self._taken_in()
        self._wake.set()

    def _taken_in(self) -> None:
        if self._intake.is_empty:
            self._count(Counts())
            self._poke()

    def _count(self, fresh: Counts) -> None:
        uncommitted, arrived = self._uncommitted, self.planner.counts
        pending = Counts(uncommitted.services + arrived.services, uncommitted.endpoints + arrived.endpoints)
        self._observer.counted(fresh, pending)

    def _poke(self) -> None:
        """Look soon whether there is something to do."""
        if self._begun and self.planner.dirty:
            self._queue()
        self._wake.set()

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            self._observer.queued(self._families)

    def addresses_changed(self) -> None:
        """Look at the local addresses and those of the API server again: frontends depend on both."""
        self._surroundings_changed = True
        self._wake.set()

    def force(self, family: Family) -> None:
        """Compare a family with the kernel at the next sync."""
        self._backlogs[family].stale = True
        self._wake.set()

    def _convicted(self, family: Family, difference: ForeignChange) -> None:
        self._observer.noticed(difference)
        self.force(family)

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sync until cancelled."""
        inspection = asyncio.create_task(self._inspector.run())
        inspection.add_done_callback(lambda _: self._wake.set())
        backoff = retries()
        try:
            while True:
                await self._wait(inspection)
                began = time.monotonic()
                try:
                    world_changed = await self._update_world()
                except ApplyError as error:
                    log.error("Cannot read the local addresses error=%r", str(error))
                    await asyncio.sleep(backoff.failed())
                    self._wake.set()
                    continue
                backoff.succeeded()
                if world_changed:
                    self._queue()
                await self._sync(world_changed)
                if any(backlog.changes and not backlog.resting for backlog in self._backlogs.values()):
                    self._wake.set()  # large Services, one after the other
                    continue
                await asyncio.sleep(max(0.0, self._pace.minimum - (time.monotonic() - began)))
        finally:
            inspection.cancel()
            await asyncio.wait([inspection])  # a look under way ends before the backends are closed

    async def _wait(self, inspection: asyncio.Task[None]) -> None:
        """Return when there is something to sync and it may be synced. Raises what ended the inspections."""
        while True:
            await self._wake.wait()
            if inspection.done():
                inspection.result()
            while not self._intake.is_empty:  # half a list is not written
                self._intake.digest()
                self._taken_in()
                await asyncio.sleep(0)
            self._wake.clear()
            if not self._begun and self.planner.complete and self._may_begin():
                self._begun = True
                self._queue()  # from now on the kernel is late, and not a list or the Node
            if self._begun:
                return

    def _may_begin(self) -> bool:
        """Return whether the Node is known or given up on. Raises Unsupported when it cannot be done without."""
        node = self.planner.nodes.get(self.settings.node_name)
        needs_pod_cidrs = self.settings.local_mode == "NodeCIDR"
        has_addresses = primary_family(self.settings, node) is not None
        if node is not None and has_addresses and (pod_cidrs(node) or not needs_pod_cidrs):
            return True
        left = self._started + self._node_patience - time.monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._wake.set)
            return False
        if needs_pod_cidrs:
            raise Unsupported(
                f"detectLocalMode is NodeCIDR, but Node {self.settings.node_name} got no podCIDRs within "
                f"{self._node_patience:.0f} s: have them allocated (--allocate-node-cidrs), or use another mode"
            )
        if node is None:
            log.warning("No Node of this name, going on without its addresses node=%s", self.settings.node_name)
        else:
            log.warning("The Node has no address yet, going on without node=%s", self.settings.node_name)
        return True

    def _check_family(self, node: Node | None) -> None:
        """Raise Unsupported when the family of the Node's first address cannot be served here; it is looked at once.

        Without an address that is IPv4, as for the Go kube-proxy.
        """
        if self._primary is not None:
            return
        self._primary = primary_family(self.settings, node)
        primary = self._primary or Family.IPV4
        if primary in self.settings.families:
            return
        name, served = self.settings.node_name, " and ".join(family.label for family in self.settings.families)
        if self._primary is None:
            raise Unsupported(
                f"Node {name} has no address that would say that it needs no IPv4, and only {served} can be served "
                f"here: set bindAddress to an {served} address of this node, or give it what IPv4 lacks"
            )
        raise Unsupported(
            f"the first address of Node {name} is an {primary.label} address, but only {served} can be served here: "
            f"turn {primary.label} on in this kernel, with iptables for it where the mode needs that, or have the "
            "other address come first"
        )

    async def _update_world(self) -> bool:
        """Take the node's part of the plans up to date; return whether it changed. Raises ApplyError."""
        if not self._surroundings_changed:
            return False
        self._surroundings_changed = False  # it may change meanwhile
        try:
            return await self._look_around()
        except ApplyError:
            self._surroundings_changed = True
            raise

    async def _look_around(self) -> bool:
        self.local_addresses = await to_its_end(self._read_addresses)
        cidrs = [cidr for cidrs in self.planner.service_cidrs.values() for cidr in cidrs]
        node = self.planner.nodes.get(self.settings.node_name)
        self._check_family(node)
        world = build(self.settings, Surroundings(node, cidrs, self.local_addresses, self._servers()))
        if world == self._world:
            return False
        async with self._kernel:
            for backend in self._backends:  # one that cannot take it leaves it new to all of them
                if await to_its_end(backend.set_world, world):
                    self._backlogs[backend.family].stale = True
        self._world = world
        self.planner.set_world(world)
        self._observer.world(world)
        return True

    # -- one sync -----------------------------------------------------------------------------------------------------

    async def _sync(self, world_changed: bool) -> None:
        """Do one sync of all families but those that rest after a refusal."""
        queued, self._queued = self._queued, False
        counts, self.planner.counts = self.planner.counts, Counts()
        self._uncommitted.services += counts.services
        self._uncommitted.endpoints += counts.endpoints
        fresh = await self._compile()
        current: list[Family] = []
        # Those that were refused come last: their attempts may be long.
        for backend in sorted(self._backends, key=lambda backend: self._backlogs[backend.family].stale):
            backlog = self._backlogs[backend.family]
            if backlog.resting:
                continue
            if backlog.changes or backlog.stale or backlog.besides or world_changed:
                if not await self._commit(backend, backlog, fresh, world_changed):
                    continue
            elif queued:  # what was queued came to nothing: that is up to date as well
                self._observer.committed(Commit(backend.family))
            current.append(backend.family)
        if not self.planner.deferred and not any(backlog.changes for backlog in self._backlogs.values()):
            self._uncommitted = Counts()
        self._count(counts)
        if current:
            await self._settle(current)
            if self._queued:  # during the sync, whose end said that nothing waits any more
                self._observer.queued(self._families)
        if not self._never_committed:
            self.ready.set()

    async def _compile(self) -> list[Change]:
        """Compile what is dirty; return what changed, which is queued for every family by then."""
        fresh = await self._take_dirty()
        self._tell_departed()
        self._set_alarm()
        return fresh

    async def _take_dirty(self) -> list[Change]:
        fresh: list[Change] = []
        self.planner.tick(time.monotonic())
        async for changes in in_turns(self.planner.taking()):
            fresh += changes
            for backlog in self._backlogs.values():
                backlog.add(changes)
            for change in changes:
                note(self._unsettled, change)
        if self.planner.dirty:  # some may have been left for the next sync, so that those of others come between
            self._poke()
        return fresh

    def _tell_departed(self) -> None:
        """Tell the backends which endpoints are gone for good."""
        departures = self.planner.departures
        if departures is None:
            return
        departed = departures.look(time.monotonic(), self.planner.services)
        for backend in self._backends:
            depart = backend.abilities.depart
            if depart and depart(departed, departures.in_use):
                self._backlogs[backend.family].besides = True

    def _set_alarm(self) -> None:
        """Look again when time alone changes something: a timer only where something waits for that."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        due = self.planner.due
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._alarm = asyncio.get_running_loop().call_later(delay, self._time_has_come)

    def _time_has_come(self) -> None:
        self._alarm = None
        self.planner.tick(time.monotonic())
        self._poke()

    async def _commit(self, backend: Backend, backlog: Backlog, fresh: list[Change], world_changed: bool) -> bool:
        """Bring one family up to date; return whether the kernel took it."""
        family, began = backend.family, time.monotonic()
        full, backlog.stale = backlog.stale, False  # it may be asked for meanwhile
        compiled = self.planner.compiled
        whole = full or world_changed or backend.abilities.at_once
        portion = list(backlog.changes.values()) if whole else backlog.portion()
        try:
            async with self._kernel:
                if full:
                    with Progress(backend, len(compiled)) as self.progress:
                        await exhaust(backend.resync(LatestPlans(self._plans_of(backlog, fresh))))
                    portion = list(backlog.changes.values())
                else:
                    await exhaust(backend.sync(backlog.plans(portion)))
        except ApplyError as error:
            log.error("Sync failed family=%s error=%r", family.label, str(error))
            asyncio.get_running_loop().call_later(backlog.refused(str(error)), self._try_again, backlog)
            self._observer.refused(family, error)
            if isinstance(error, ChangedByOthersError):
                self._observer.noticed(ForeignChange(str(error)))
            return False
        finally:
            self.progress = None
        seconds = time.monotonic() - began
        # If it was not stale its last sync succeeded, so it has all but what is fresh. A new world may be a new address
        # for NodePorts, to which flows began before it answered.
        everything = full or world_changed
        changes, services = portion, 0
        if everything:
            parts = in_turns(backlog.everything(fresh, compiled))
            changes = [change async for part in parts for change in part]
            services = sum(1 for entry in compiled.values() if entry.plans)
        running = time.monotonic() - self._started  # the Go kube-proxy leaves out what happened before it started, too
        ages = [age for trigger in backlog.triggers(portion) if (age := _age(trigger)) is not None and age < running]
        backlog.committed(portion)
        self._queued |= bool(backlog.changes)
        self._observer.committed(Commit(family, changes, full, everything, services, seconds, ages))
        self._never_committed.discard(family)
        return True

    def _plans_of(self, backlog: Backlog, fresh: list[Change]) -> Callable[[], Plans]:
        """Return what a full sync takes its plans from, on its thread, with what arrived while it read the kernel."""
        loop = asyncio.get_running_loop()

        def take() -> Plans:
            asyncio.run_coroutine_threadsafe(self._catch_up(backlog.family, fresh), loop).result()
            # Nobody else changes what is compiled during a sync. At 44,000 Services this takes 0.1 s.
            return backlog.all_plans(self.planner.compiled)

        return take

    async def _catch_up(self, family: Family, fresh: list[Change]) -> None:
        """Compile what arrived during a sync."""
        if family not in self._never_committed:  # at a start nothing of ours can be older than what is there
            await asyncio.sleep(CATCH_UP)
        if self._intake.is_empty:  # half a list is not written
            fresh += await self._take_dirty()

    def _try_again(self, backlog: Backlog) -> None:
        backlog.resting = False
        self._wake.set()

    async def _settle(self, current: Sequence[Family]) -> None:
        """Say what is settled: families that are refused are not waited for, `current` ones are."""
        waiting = {name for family in current for name in self._backlogs[family].changes}
        changes = [change for name, change in self._unsettled.items() if name not in waiting]
        self._unsettled = {name: self._unsettled[name] for name in waiting if name in self._unsettled}
        async for some in in_turns(changes[at : at + TOGETHER] for at in range(0, len(changes), TOGETHER)):
            for change in some:
                if change.after.problems != change.before.problems:
                    for problem in change.after.problems:
                        if problem not in change.before.problems:
                            self._observer.noticed(ServiceProblem(change.name, change.uid, problem))
            self._observer.settled(some)


def _age(trigger: str) -> float | None:
    """Return how many seconds ago that was, None when it is no time."""
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(trigger)).total_seconds()
    except (ValueError, TypeError):
        return None
