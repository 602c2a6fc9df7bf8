"""The sync loop: connects the pure model with the backends, decides when to sync, and reports to an observer. Nothing
is written before all needed resources are listed, and the Node is known or its timeout is over. docs/architecture.md
defines the stages of an event: arrived, compiled, queued, committed, refused, settled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self

from msgspec import Struct

from kubeproxy.backends.mode import Backend, ForeignChange
from kubeproxy.engine.backlog import Backlog, FamilyStanding, Inspector, LatestPlans, Plans, RepairPolicy, note, retries
from kubeproxy.engine.observer import Commit, Observer, ServiceProblem
from kubeproxy.engine.pacing import Intake, TokenBucket, exhaust, in_turns, to_its_end
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

NODE_WARNING, NODE_REPEAT = 5.0, 60.0  # seconds before the first warning, and between two warnings

CATCH_UP = 0.05
"""Seconds for which a full sync waits for events after it has read the kernel. During an upgrade, another kube-proxy on
this node may receive events earlier, and the sync must not undo its changes."""

_DISTURBED: Final = 2  # up to this number of consecutive refusals, changes by another program may be the cause
TOGETHER = 5000  # changes per call of `settled`: some 10 ms
PROGRESS_SECONDS: Final = 5.0  # seconds between the log lines about a long full sync, and before the first line


class Pace(Struct, frozen=True):
    """Intervals in seconds: at least `minimum` between syncs, at most `period` between thorough inspections."""

    minimum: float = 0.0
    period: float = 30.0


class Progress:
    """A running full sync of one family. A context manager that logs the progress of long syncs."""

    def __init__(self, backend: Backend, services: int) -> None:
        self._backend = backend
        self._services = services
        self._began = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def __str__(self) -> str:
        programmed = self._backend.abilities.programmed
        done = f"{min(programmed(), self._services):,} of " if programmed else ""
        return f"Programming {done}{self._services:,} Services, {self._backend.family.label}"

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._log)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _log(self) -> None:
        log.info("%s seconds=%.0f", self, time.monotonic() - self._began)
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._log)


class Engine:
    """Applies events to the planner and syncs its plans, one sync at a time."""

    def __init__(
        self,
        settings: Settings,
        backends: Sequence[Backend],
        observer: Observer,
        pace: Pace,
        local_addresses: Callable[[], Mapping[Family, Sequence[bytes]]],
        node_timeout: float,
        servers: Callable[[], Iterable[tuple[str, int]]] = tuple,
    ) -> None:
        self.settings = settings
        self.planner = Planner(build(settings, Surroundings()), Departures() if RESETS.value(settings) else None)
        self.ready = asyncio.Event()
        self.progress: Progress | None = None  # the running full sync
        self.awaits = ""  # the Node for which the engine waits before it writes, as text; '' for none
        self.local_addresses: Mapping[Family, Sequence[bytes]] = {}  # the node's packed addresses when last read
        self._backends = backends
        self._families = [backend.family for backend in backends]
        self._observer = observer
        self._pace = pace
        self._read_addresses = local_addresses
        self._node_timeout = node_timeout
        self._servers = servers
        self._wake = asyncio.Event()
        self._kernel = asyncio.Lock()  # held during each call into a backend
        self._intake = Intake(self.planner, observer.noticed)
        self._backlogs = {family: Backlog(family) for family in self._families}
        policies = {family: RepairPolicy(pace.period, time.monotonic()) for family in self._families}
        self._inspector = Inspector(backends, self._backlogs, policies, self._kernel, self._repair)
        self._unsettled: dict[ServiceName, Change] = {}
        self._uncommitted = Counts()  # changed objects that are not committed in all families
        self._disturbances = 0  # syncs that were refused because of other programs, and not logged yet
        self._disturbance_logs = TokenBucket(1 / 60, 1)
        self._started = time.monotonic()
        self._warns_at = self._started + NODE_WARNING
        self._primary: Family | None = None  # the Node's primary family, if known
        self._surroundings_changed = True
        self._world: Globals | None = None  # the globals that the backends have
        self._queued = False
        self._begun = False
        self._alarm: asyncio.TimerHandle | None = None
        self._never_committed = set(self._families)

    @property
    def queued(self) -> Mapping[ServiceName, Change]:
        """The changes that are queued or refused in at least one family."""
        return ChainMap(*(backlog.changes for backlog in self._backlogs.values()))

    def committed(self, name: ServiceName) -> list[ServicePlan]:
        """Return a Service's plans that the kernel last accepted in each family; `standing` shows whether another
        program has changed the rules since then."""
        compiled = self.planner.compiled.get(name, NOTHING)
        return [plan for backlog in self._backlogs.values() for plan in backlog.committed_plans(name, compiled)]

    @property
    def standings(self) -> tuple[FamilyStanding, ...]:
        """The state of each family's rules in the kernel."""
        return tuple(map(self.standing, self._families))

    def standing(self, family: Family) -> FamilyStanding:
        """Return the state of a family's rules in the kernel."""
        return self._backlogs[family].standing

    def arrive(self, events: Sequence[Event]) -> None:
        """Apply events from a source. Never raises; reports unusable objects to the observer."""
        waiting = not self._intake.is_empty
        if self._intake.arrive(events):
            self._surroundings_changed = True
        if not waiting:
            self._applied()
        self._wake.set()

    def _applied(self) -> None:
        if self._intake.is_empty:
            self._count(Counts())
            self._poke()

    def _count(self, fresh: Counts) -> None:
        uncommitted, arrived = self._uncommitted, self.planner.counts
        pending = Counts(uncommitted.services + arrived.services, uncommitted.endpoints + arrived.endpoints)
        self._observer.counted(fresh, pending)

    def _poke(self) -> None:
        if self._begun and self.planner.dirty:
            self._queue()
        self._wake.set()

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            self._observer.queued(self._families)

    def addresses_changed(self) -> None:
        """Read the addresses of this node and of the API server again, because plans depend on them."""
        self._surroundings_changed = True
        self._wake.set()

    def plan_again(self, names: Iterable[ServiceName]) -> None:
        """Compile Services again, because endpoints fail or answer again."""
        self.planner.mark(names)
        self._poke()

    def force(self, family: Family) -> None:
        """Make the next sync of a family a full sync."""
        self._backlogs[family].stale = True
        self._wake.set()

    def _repair(self, family: Family, difference: ForeignChange) -> None:
        self._observer.noticed(difference)
        self.force(family)

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
                    self._surroundings_changed = True
                    await asyncio.sleep(backoff.failed())
                    self._wake.set()
                    continue
                backoff.succeeded()
                if world_changed:
                    self._queue()
                await self._sync(world_changed)
                if self.planner.unfinished or any(b.changes and not b.resting for b in self._backlogs.values()):
                    self._wake.set()  # parts of large changes are left
                    await asyncio.sleep(0)  # lets the event loop run; waiting for a set event does not
                    continue
                await asyncio.sleep(max(0.0, self._pace.minimum - (time.monotonic() - began)))
        finally:
            inspection.cancel()
            await asyncio.wait([inspection])  # a running inspection must end before the backends are closed

    async def _wait(self, inspection: asyncio.Task[None]) -> None:
        """Wait until there are changes to sync and a sync is allowed. Raises the error that ended the inspections."""
        while True:
            await self._wake.wait()
            if inspection.done():
                inspection.result()
            while not self._intake.is_empty:  # a sync must not use a partly applied list
                self._intake.digest()
                self._applied()
                await asyncio.sleep(0)
            self._wake.clear()
            if not self._begun and self.planner.complete and self._may_begin():
                self._begun, self.awaits = True, ""
                self._queue()  # from now on readiness depends on the kernel, not on lists or the Node
            if self._begun:
                return

    def _may_begin(self) -> bool:
        """Return whether the Node is known, or its timeout is over. Raises Unsupported if the mode needs the Node."""
        node = self.planner.nodes.get(self.settings.node_name)
        needs_pod_cidrs = self.settings.local_mode == "NodeCIDR"
        has_addresses = primary_family(self.settings, node) is not None
        if node is not None and has_addresses and (pod_cidrs(node) or not needs_pod_cidrs):
            return True
        left = self._started + self._node_timeout - time.monotonic()
        if left > 0:
            name = self.settings.node_name
            lack = "no address" if not has_addresses else "no podCIDRs"
            known = f"has {lack} yet" if node is not None else "the API server has not listed"
            self.awaits = f"Node {name}, which {known}"
            self._await_node(left)
            return False
        if needs_pod_cidrs:
            raise Unsupported(
                f"detectLocalMode is NodeCIDR, but Node {self.settings.node_name} got no podCIDRs within "
                f"{self._node_timeout:.0f} s: have them allocated (--allocate-node-cidrs), or use another mode"
            )
        if node is None:
            log.warning("No Node of this name, continuing without its addresses node=%s", self.settings.node_name)
        else:
            log.warning("The Node has no address yet, continuing without an address node=%s", self.settings.node_name)
        return True

    def _await_node(self, left: float) -> None:
        """Set the timer of the Node's timeout; until then, log the reason of the delay every NODE_REPEAT seconds."""
        now = time.monotonic()
        if now >= self._warns_at:
            self._warns_at = now + NODE_REPEAT
            log.warning("Nothing is written yet: the proxy waits for %s seconds_left=%.0f", self.awaits, left)
        asyncio.get_running_loop().call_later(min(left, self._warns_at - now), self._wake.set)

    def _check_family(self, node: Node | None) -> None:
        """Raise Unsupported if this proxy does not serve the family of the Node's first known address. For a Node
        without an address the family is IPv4, as in the Go kube-proxy."""
        if self._primary is not None:
            return
        self._primary = primary_family(self.settings, node)
        primary = self._primary or Family.IPV4
        if primary in self.settings.families:
            return
        name, served = self.settings.node_name, " and ".join(family.label for family in self.settings.families)
        if self._primary is None:
            raise Unsupported(
                f"Node {name} has no address, so it needs IPv4, but only {served} can be served here: set bindAddress "
                f"to an {served} address of this node, or provide the requirements of IPv4"
            )
        raise Unsupported(
            f"the first address of Node {name} is an {primary.label} address, but only {served} can be served here: "
            f"turn {primary.label} on in this kernel, and install iptables for it if the mode needs it, or list the "
            "other address first"
        )

    async def _update_world(self) -> bool:
        began = self._world is not None and self._world.ejects
        ejects = began or self.planner.ejections.in_use  # stays True: a return to False would cause a full sync
        if not self._surroundings_changed and ejects is began:
            return False
        # reset before the inputs are read, because the inputs may change during the reading
        self._surroundings_changed = False
        self.local_addresses = await to_its_end(self._read_addresses)
        cidrs = [cidr for cidrs in self.planner.service_cidrs.values() for cidr in cidrs]
        node = self.planner.nodes.get(self.settings.node_name)
        self._check_family(node)
        world = build(self.settings, Surroundings(node, cidrs, self.local_addresses, self._servers(), ejects))
        if world == self._world:
            return False
        async with self._kernel:
            for backend in self._backends:  # after an error, all backends get the globals again
                if await to_its_end(backend.set_world, world):
                    self._backlogs[backend.family].stale = True
        self._world = world
        self.planner.set_world(world)
        self._observer.world(world)
        return True

    async def _sync(self, world_changed: bool) -> None:
        queued, self._queued = self._queued, False
        counts, self.planner.counts = self.planner.counts, Counts()
        self._uncommitted.services += counts.services
        self._uncommitted.endpoints += counts.endpoints
        fresh = await self._take_dirty()
        self._pass_departures()
        self._set_alarm()
        current: list[Family] = []
        # Refused families come last, because their attempts may take long.
        for backend in sorted(self._backends, key=lambda backend: self._backlogs[backend.family].stale):
            backlog = self._backlogs[backend.family]
            if backlog.resting:
                continue
            if backlog.changes or backlog.stale or backlog.other_changes or world_changed:
                if not await self._commit(backend, backlog, fresh, world_changed):
                    continue
            elif queued:  # the queued events have changed no plan, so the kernel is up to date
                self._observer.committed(Commit(backend.family))
            current.append(backend.family)
        later = self.planner.deferred or self.planner.unfinished
        if not later and not any(backlog.changes for backlog in self._backlogs.values()):
            self._uncommitted = Counts()
        self._count(counts)
        if current:
            await self._settle(current)
            if self._queued:  # events arrived during the sync, but `committed` reported that all is up to date
                self._observer.queued(self._families)
        if not self._never_committed:
            self.ready.set()

    async def _take_dirty(self) -> list[Change]:
        fresh: list[Change] = []
        self.planner.tick(time.monotonic())
        async for changes in in_turns(self.planner.taking()):
            fresh += changes
            for backlog in self._backlogs.values():
                backlog.add(changes)
            for change in changes:
                note(self._unsettled, change)
        if self.planner.dirty:  # the planner has deferred some Services to the next sync
            self._poke()
        return fresh

    def _pass_departures(self) -> None:
        departures = self.planner.departures
        if departures is None:
            return
        departed = departures.look(time.monotonic(), self.planner.services)
        for backend in self._backends:
            depart = backend.abilities.depart
            if depart and depart(departed, departures.in_use):
                self._backlogs[backend.family].other_changes = True

    def _set_alarm(self) -> None:
        """If plans will change only because time passes, set a timer for the next such change."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        due = self.planner.due
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._alarm = asyncio.get_running_loop().call_later(delay, self._time_changed)

    def _time_changed(self) -> None:
        self._alarm = None
        self.planner.tick(time.monotonic())
        self._poke()

    async def _commit(self, backend: Backend, backlog: Backlog, fresh: list[Change], world_changed: bool) -> bool:
        family, began = backend.family, time.monotonic()
        full, backlog.stale = backlog.stale, False  # reset before the sync, because it may be set during the sync
        compiled = self.planner.compiled
        whole = full or world_changed or backend.abilities.at_once
        portion = list(backlog.changes.values()) if whole else backlog.portion()
        try:
            async with self._kernel:
                self._observer.committing(family, None if full else portion)
                if full:
                    with Progress(backend, len(compiled)) as self.progress:
                        await exhaust(backend.resync(LatestPlans(self._plans_of(backlog, fresh))))
                    portion = list(backlog.changes.values())
                else:
                    await exhaust(backend.sync(backlog.plans(portion)))
        except ApplyError as error:
            asyncio.get_running_loop().call_later(backlog.refused(str(error)), self._try_again, backlog)
            self._log_refusal(family, error, repeated=backlog.backoff.failures > _DISTURBED)
            self._observer.refused(family, error)
            if isinstance(error, ChangedByOthersError):
                self._observer.noticed(ForeignChange(str(error)))
            return False
        finally:
            self.progress = None
        seconds = time.monotonic() - began
        # A partial sync reports only its changes, because the kernel had all earlier changes. New globals require a
        # report of everything: flows of any Service to a new NodePort address may have begun before it had rules.
        everything = full or world_changed
        changes, services = portion, 0
        if everything:
            parts = in_turns(backlog.everything(fresh, compiled))
            changes = [change async for part in parts for change in part]
            services = sum(1 for entry in compiled.values() if entry.plans)
        running = time.monotonic() - self._started  # as in the Go kube-proxy, changes before the start are not measured
        ages = [age for trigger in backlog.triggers(portion) if (age := _age(trigger)) is not None and age < running]
        backlog.committed(portion)
        self._queued |= bool(backlog.changes)
        self._observer.committed(Commit(family, changes, full, everything, services, seconds, ages))
        self._never_committed.discard(family)
        return True

    def _log_refusal(self, family: Family, error: ApplyError, *, repeated: bool) -> None:
        """Log a refusal. If another program may be the cause, log at most once a minute; but log every refusal after
        the second in a row (`repeated`). With two proxies in one mode, nearly every change of each proxy is refused."""
        if repeated or not isinstance(error, ChangedByOthersError):
            log.error("Sync failed family=%s error=%r", family.label, str(error))
            return
        self._disturbances += 1
        if self._disturbance_logs.take():
            text = "Comparing everything, as another program changes our objects family=%s error=%r times=%d"
            log.warning(text, family.label, str(error), self._disturbances)
            self._disturbances = 0

    def _plans_of(self, backlog: Backlog, fresh: list[Change]) -> Callable[[], Plans]:
        """Return a function that returns the plans of a full sync; call it after the kernel is read."""
        loop = asyncio.get_running_loop()

        def take() -> Plans:
            asyncio.run_coroutine_threadsafe(self._catch_up(backlog.family, fresh), loop).result()
            # During a sync only this code changes the compiled plans. `all_plans` takes 0.1 s for 44,000 Services.
            return backlog.all_plans(self.planner.compiled)

        return take

    async def _catch_up(self, family: Family, fresh: list[Change]) -> None:
        if family not in self._never_committed:  # at the start, the plans cannot be older than the kernel's rules
            await asyncio.sleep(CATCH_UP)
        if self._intake.is_empty:  # a sync must not use a partly applied list
            fresh += await self._take_dirty()

    def _try_again(self, backlog: Backlog) -> None:
        backlog.resting = False
        self._wake.set()

    async def _settle(self, current: Sequence[Family]) -> None:
        """Report the changes that every family in `current` has committed; refused families are not in `current`."""
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
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(trigger)).total_seconds()
    except (ValueError, TypeError):
        return None
