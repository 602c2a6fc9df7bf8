"""Stores the objects of the cluster and the plans of this node: applies events, and returns changed plans. Pure. The
planner is level-triggered: an event marks a Service as dirty, and `take` compiles dirty Services. The order and
grouping of events do not matter, because plans depend only on the last state of each object."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, KeysView, Mapping, Sequence
from sys import intern
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.features import BALANCING, EJECTION
from kubeproxy.model.addresses import Family
from kubeproxy.model.balancing import SlowStart, asks, entries, expected_entries, slow_start
from kubeproxy.model.claims import (
    Claimant,
    Claims,
    FairOrder,
    NodeBudget,
    Right,
    claimed_keys,
    important_first,
    lost_to,
    parted,
    ranges_of,
    written_addresses,
)
from kubeproxy.model.compile import compiling, is_slow
from kubeproxy.model.ejection import Ejections
from kubeproxy.model.endpoints import PackedSlice, Slice, packed
from kubeproxy.model.events import Deleted, Event, Rejected, Replaced, Upserted
from kubeproxy.model.gone import Departures
from kubeproxy.model.objects import EndpointSlice, Node, Object, Resource, Service
from kubeproxy.model.plan import (
    NODEPORT_KEY,
    NOTHING,
    WRITTEN,
    Compiled,
    Frontend,
    Globals,
    Problem,
    ServiceName,
    ServicePlan,
)
from kubeproxy.model.port_ranges import not_programmed
from kubeproxy.model.world import compiled_from, nodeport_addresses, remembering

NEEDED: tuple[Resource, ...] = ("services", "endpointslices")
"""The resources that must be listed once before plans are complete."""

STEP = 50
"""The number of objects or Services per step of long work. A step takes one or a few milliseconds."""

SLOW_STEPS = 6  # the number of steps for slow Services in one call of `taking`: some 20 ms
_ALLOCATED = Right.ALLOCATED  # looked up once, as in model.compile


class Trigger(NamedTuple):
    """The last-change-trigger-time annotation of an EndpointSlice, and the family of the slice's addresses."""

    family: Family
    time: str


class Change(Struct, frozen=True, gc=False):
    """The plans of a Service before and after its compilation, and the triggers of its slices' updates."""

    name: ServiceName
    before: Compiled
    after: Compiled
    uid: str = ""
    triggers: tuple[Trigger, ...] = ()


class Counts(Struct):
    """Numbers of Services and EndpointSlices."""

    services: int = 0
    endpoints: int = 0


class Planner:
    """Stores the objects, reduced to the used fields, and the last plans of each Service. `departures` tracks gone
    endpoints; it is None if their connections are not reset. In addition, three states depend on the past: the
    addresses of a deleted Node remain (see `remembering`), the shares of new endpoints grow with time (slow start), and
    failing endpoints are ejected."""

    def __init__(self, world: Globals, departures: Departures | None = None) -> None:
        self.world = world
        self.departures = departures
        self.services: dict[ServiceName, Service] = {}
        self.slices: dict[ServiceName, dict[str, Slice]] = {}
        self.nodes: dict[str, Node] = {}  # a deleted Node keeps its last state
        self.deleted_nodes: set[str] = set()
        self.service_cidrs: dict[str, tuple[str, ...]] = {}
        self.compiled: dict[ServiceName, Compiled] = {}
        self.counts = Counts()
        self.deferred: list[ServiceName] = []  # Services that the last `taking` deferred: they are still dirty
        self.unfinished: dict[ServiceName, Iterator[tuple[()]]] = {}  # compilations that the next `taking` continues
        self._moved: dict[Claims, set[bytes]] = {}  # keys and places with a new owner
        self._wanted: dict[ServiceName, Compiled] = {}
        self._service_of: dict[ServiceName, ServiceName] = {}
        self._claims: dict[Family, Claims] = {family: Claims() for family in Family}
        self._claimants: dict[ServiceName, Claimant] = {}
        self._dirty: dict[ServiceName, None] = {}
        self._taken: dict[ServiceName, None] = {}  # the Services that `taking` is compiling
        self._triggers: dict[ServiceName, list[Trigger]] = {}
        self._missing: set[Resource] = set(NEEDED)
        self.ejections = Ejections(EJECTION.value(world))
        self._slow_start = SlowStart()
        self._budget = NodeBudget(BALANCING.value(world))
        self._order = FairOrder()

    @property
    def complete(self) -> bool:
        """Whether all needed resources have been listed, so that plans are complete."""
        return not self._missing

    @property
    def objects(self) -> Counts:
        """The numbers of stored objects."""
        return Counts(len(self.services), len(self._service_of))

    @property
    def dirty(self) -> int:
        """The number of dirty Services."""
        return len(self._dirty.keys() | self.unfinished.keys())

    def is_dirty(self, name: ServiceName) -> bool:
        """Return whether a Service's plans may be outdated."""
        return name in self._dirty or name in self._taken or name in self.unfinished

    def service_of(self, slice_name: ServiceName) -> ServiceName | None:
        """Return the Service to which the EndpointSlice with this namespace and name belongs."""
        return self._service_of.get(slice_name)

    def owner(self, family: Family, key: bytes) -> ServiceName | None:
        """Return the Service that has a frontend (address, protocol and port, packed; a NodePort has no address)."""
        owner = self._claims[family].owner(key)
        if owner is None or (len(key) == NODEPORT_KEY and owner.right is Right.WRITTEN):
            return None  # an external address that is also the node's address has claimed this NodePort
        return owner.service

    def range_owner(self, family: Family, key: bytes) -> ServiceName | None:
        """Return the Service that has a range of ports with this address, protocol and port."""
        return self._claims[family].range_owner(key)

    def claimants(self, plan: ServicePlan, frontend: Frontend) -> list[str]:
        """Return the other Services (NAMESPACE/NAME) that claim a frontend of a plan."""
        own, claims = (plan.key.namespace, plan.key.name), self._claims[plan.key.family]
        return ["/".join(name) for name in claims.asking(frontend.key) if name != own]

    def apply(self, events: Iterable[Event]) -> list[Rejected]:
        """Apply events; return their unusable parts."""
        return [rejected for step in self.applying(events) for rejected in step]

    def applying(self, events: Iterable[Event]) -> Iterator[list[Rejected]]:
        """Apply events in steps of at most STEP objects; after each step yield the unusable parts. Between steps the
        planner may be used, except for other events of the same resource. A resource counts as listed after the last
        step of its list."""
        for event in events:
            rejected: list[Rejected] = []
            if isinstance(event, Upserted):
                self._upsert(event.object, rejected)
            elif isinstance(event, Deleted):
                self._delete(event.resource, (event.namespace, event.name))
            elif isinstance(event, Replaced):
                yield from self._replace(event)
            else:
                rejected.append(event)
            yield rejected

    def adopt(self, services: Mapping[ServiceName, Service], slices: Mapping[ServiceName, Mapping[str, Slice]]) -> None:
        """Copy the objects of another planner; `slices` are by Service and by name."""
        self.services.update(services)
        for owner, pieces in slices.items():
            self.slices.setdefault(owner, {}).update(pieces)
            self._service_of.update({(owner[0], name): owner for name in pieces})
        self.mark_all()

    def set_world(self, world: Globals) -> None:
        """Change the globals; Services become dirty if their plans depend on a changed part."""
        before, self.world = self.world, world
        self._dirty.update(dict.fromkeys(self.unfinished))
        self.unfinished.clear()
        if compiled_from(before) != compiled_from(world):
            self.mark_all()
        for family, claims in self._claims.items():
            if nodeport_addresses(before, family) != nodeport_addresses(world, family):
                self._dirty.update(dict.fromkeys(claims.written))

    def tick(self, now: float) -> None:
        """Set the time in seconds of a monotonic clock. A Service becomes dirty at each step of its slow start."""
        self._dirty.update(dict.fromkeys(self._slow_start.advance(now)))

    @property
    def due(self) -> float | None:
        """The time of the next call of `tick`, and of `look` of the departures; None if no plan changes with time."""
        moments = self._slow_start.next_step(), self.departures.due if self.departures is not None else None
        return min((moment for moment in moments if moment is not None), default=None)

    def mark(self, names: Iterable[ServiceName]) -> None:
        """Mark Services as dirty, because their endpoints fail or answer again."""
        self._dirty.update(dict.fromkeys(names))

    def mark_all(self) -> None:
        """Mark all Services as dirty."""
        self._dirty.update(dict.fromkeys(self.services))
        self._dirty.update(dict.fromkeys(self.compiled))

    def take(self) -> list[Change]:
        """Compile dirty Services; return the changes. The changes of important Services are first."""
        changes = [change for step in self.taking() for change in step]
        return changes + self.take() if self.unfinished else changes

    def taking(self) -> Iterator[Sequence[Change]]:
        """Compile dirty Services in steps; after each step yield the changes. A step compiles STEP Services, or a part
        of a large Service. Events may be applied between steps; their Services become dirty again. Only one iterator
        may be active, and it must be exhausted. If weights or Maglev tables of many Services, or Services with many
        ports, have changed, some of these Services remain dirty, so that other Services need not wait."""
        dirty = self._taken = self._begun()
        self._moved = {claims: set() for claims in self._claims.values()}
        yield from self._started(dirty)
        triggers = {name: self._triggers.pop(name) for name in dirty.keys() & self._triggers.keys()}
        for name in self._budget.settle():
            dirty[name] = None
            yield from self._compile(name)
            yield []
        if (releasing := self._releasing(dirty.keys())) is not None:
            self.deferred.remove(releasing)
            self._dirty.pop(releasing, None)
            dirty[releasing] = None
            triggers[releasing] = self._triggers.pop(releasing, [])
            yield from self._compile(releasing)
        for claims, keys in self._moved.items():  # once per key, because a key may have many claimants
            for key in keys:
                dirty.update(dict.fromkeys(claims.asking(key)))
                yield []
        changes: list[Change] = []
        contested = any(claims.contested for claims in self._claims.values())
        for done, name in enumerate(important_first(dirty), start=1):
            before = self.compiled.get(name, NOTHING)
            wanted = self._wanted.get(name)  # not `services`, which events may have changed between steps
            fresh = NOTHING if wanted is None else self._settled(name) if contested else wanted
            if fresh != before:
                service = self.services.get(name)
                uid = (service.metadata.uid or "") if service is not None else ""
                changes.append(Change(name, before, fresh, uid, tuple(triggers.get(name, ()))))
            if wanted is not None:
                self.compiled[name] = fresh
            else:
                self.compiled.pop(name, None)
            if not done % STEP or len(fresh.problems) > STEP:
                yield changes
                changes = []
        self._taken = {}
        yield changes

    def _begun(self) -> dict[ServiceName, None]:
        """Return the dirty Services, except deferred Services. A deleted Service is never deferred, because other
        Services may need its addresses."""
        dirty, self._dirty = self._dirty, {}
        dirty.update(dict.fromkeys(self._budget.settle()))
        self.deferred = []
        if self.compiled:  # the first compilation defers no Service, because the kernel may already serve all Services
            costs = self._budget.costs(dirty.keys())
            self.deferred += self._order.deferred({name: cost for name, cost in costs.items() if name in self.services})
            for name in self.deferred:
                self._dirty[name] = dirty.pop(name)
        return dirty

    def _releasing(self, taken: KeysView[ServiceName]) -> ServiceName | None:
        """Return a deferred Service that no longer requests one of its addresses, while a Service in `taken` claims the
        address. Only one Service is returned, because changes are costly."""
        for name in self.deferred:
            service = self.services.get(name)
            asked = written_addresses(service) if service is not None else ()
            for plan in self._wanted.get(name, NOTHING).plans:
                given = (f.key for f in plan.frontends if f.kind in WRITTEN and f.address not in asked)
                claims = self._claims[plan.key.family]
                if any(not taken.isdisjoint(claims.asking(key)) for key in given):
                    return name
        return None

    def _started(self, dirty: dict[ServiceName, None]) -> Iterator[tuple[()]]:
        """Compile dirty Services in steps. All slow Services share at most SLOW_STEPS steps; the first compilation
        has no limit. Slow Services that need more steps move from `dirty` to `unfinished`, and take turns."""
        left = SLOW_STEPS if self.compiled else sys.maxsize
        # Services that have changed since their compilation began are compiled again afterwards.
        self._dirty.update(dict.fromkeys(self.unfinished.keys() & dirty.keys()))
        for done, name in enumerate(list(self.unfinished | dirty), start=1):
            service = self.services.get(name)
            if service is None or not is_slow(service, len(self.slices.get(name, ()))):
                yield from self._compile(name)
            else:
                work = (self.unfinished.pop if left > 0 else self.unfinished.get)(name, None) or self._compile(name)
                step: tuple[()] | None = ()
                while left > 0 and (step := next(work, None)) is not None:
                    left -= 1
                    yield step
                if step is not None:
                    self.unfinished[name] = work
                    dirty.pop(name, None)
                    continue
            dirty[name] = None
            if not done % STEP:
                yield ()

    def _compile(self, name: ServiceName) -> Generator[tuple[()], None, None]:
        """Compile one Service in steps and claim its frontends; add keys with a new owner to `_moved`."""
        self.unfinished.pop(name, None)
        service = self.services.get(name)
        before, after = self._claimants.get(name), None
        old, fresh = self._wanted.get(name, NOTHING), NOTHING
        if service is not None:
            after = Claimant(_ALLOCATED, service.metadata.creation_timestamp or "", *name)
            fresh = yield from self._meaning(name, service)
            self._wanted[name] = fresh
            self._claimants[name] = after
        else:
            self._wanted.pop(name, None)
            self._claimants.pop(name, None)
            self._slow_start.forget(name)
            self._budget.ask(name, "", 0)
        self.ejections.replace(name, old.plans, fresh.plans)
        ipv4, ipv6 = self._claims.values()
        if old.plans == fresh.plans and before == after and name not in ipv4.written and name not in ipv6.written:
            return
        in_range = any(plan.port_ranges for plan in (*old.plans, *fresh.plans))
        for family, claims in self._claims.items():
            held, _ = parted(old.plans, family)
            asked, written = parted(fresh.plans, family)
            if (held or asked) and (held != asked or before != after):
                self._moved[claims] |= claims.replace(before, after, held, asked)
            if written or name in claims.written:
                keys = claimed_keys(written, asked, nodeport_addresses(self.world, family))
                self._moved[claims] |= claims.replace_written(name, before, after, keys)
            if in_range:
                had, has = ranges_of(old.plans, family), ranges_of(fresh.plans, family)
                self._moved[claims] |= claims.replace_ranges(before, after, had, has)

    def _meaning(self, name: ServiceName, service: Service) -> Generator[tuple[()], None, Compiled]:
        slices = self.slices.get(name)
        pieces, starting = slices.values() if slices is not None else (), self._slow_start
        failures = self.ejections.of(service)
        found = yield from compiling(service, pieces, self.world, starting.growth(name), failures)
        annotations = service.metadata.annotations
        seconds = 0
        if annotations is not None and asks(annotations) and BALANCING.value(self.world):
            seconds = slow_start(annotations, [])
        if not seconds:
            starting.forget(name)
        else:
            members = {d[:-2] for plan in found.plans for pool in (plan.cluster, plan.local) for d in pool}
            if starting.seen(name, members, seconds):
                found = yield from compiling(service, pieces, self.world, starting.growth(name), failures)
        self._budget.ask(name, service.metadata.creation_timestamp or "", entries(found.plans))
        if self._budget.has(name):
            return found
        return (yield from compiling(service, pieces, self.world, starting.growth(name), failures, most=0))

    def _settled(self, name: ServiceName) -> Compiled:
        """Return a Service's plans without the frontends that another Service owns."""
        wanted = self._wanted.get(name, NOTHING)
        claimant = self._claimants.get(name)
        if claimant is None:
            return wanted
        plans: list[ServicePlan] = []
        problems: list[Problem] = []
        for plan in wanted.plans:
            claims, hidden = self._claims[plan.key.family], nodeport_addresses(self.world, plan.key.family)
            lost = {f: why for f in plan.all_frontends if (why := lost_to(claims, f, claimant, hidden))}
            if lost:
                plan = plan.without(lost)  # noqa: PLW2901
                problems += [not_programmed(f, why) for f, why in lost.items()]
            plans.append(plan)
        if not problems:
            return wanted
        return Compiled(tuple(plans), wanted.health, wanted.problems + tuple(problems))

    def _upsert(self, obj: Object | PackedSlice, rejected: list[Rejected]) -> ServiceName:
        name = (intern(obj.metadata.namespace or ""), obj.metadata.name)
        if isinstance(obj, Service):
            if self.services.get(name) != obj:
                self.services[name] = obj
                self.ejections.request(name, obj.metadata.annotations)
                if asks(obj.metadata.annotations) and BALANCING.value(self.world):
                    self._budget.expect(name, obj.metadata.creation_timestamp or "", expected_entries(obj))
                self.counts.services += 1
                self._dirty[name] = None
        elif isinstance(obj, PackedSlice):
            self._upsert_slice(name, obj, rejected)
        elif isinstance(obj, EndpointSlice):
            self._upsert_slice(name, packed(obj), rejected)
        elif isinstance(obj, Node):
            self.deleted_nodes.discard(obj.metadata.name)
            self.nodes[obj.metadata.name] = remembering(self.nodes.get(obj.metadata.name), obj)
        else:
            self.service_cidrs[obj.metadata.name] = tuple((obj.spec.cidrs if obj.spec else None) or ())
        return name

    def _upsert_slice(self, name: ServiceName, obj: PackedSlice, rejected: list[Rejected]) -> None:
        labels, parsed = obj.metadata.labels, obj.piece
        owner = (name[0], labels.service_name) if labels is not None and labels.service_name else None
        if parsed is None or owner is None:
            if owner is not None and obj.address_type != "FQDN":
                reason = f"{obj.address_type[:64]!r} is not IPv4, IPv6 or FQDN; slice skipped"
                rejected.append(Rejected("endpointslices", *name, obj.metadata.uid or "", "addressType", reason))
            self._drop_slice(name)
            return
        previous = self._service_of.get(name)
        if parsed.problems:
            known = self.slices[previous][name[1]].problems if previous is not None else ()
            rejected += (
                Rejected("endpointslices", *name, obj.metadata.uid or "", p.field, p.reason)
                for p in parsed.problems
                if p not in known
            )
        if previous is not None and previous != owner:
            self._drop_slice(name)
        siblings = self.slices.setdefault(owner, {})
        before = siblings.get(name[1])
        if before == parsed:
            return
        if self.departures is not None:
            self.departures.replace(owner, before, parsed)
        siblings[name[1]] = parsed
        self._service_of[name] = owner
        self.counts.endpoints += 1
        self._dirty[owner] = None
        if parsed.triggered is not None and self.complete:
            self._triggers.setdefault(owner, []).append(Trigger(parsed.family, parsed.triggered))

    def _drop_slice(self, name: ServiceName) -> None:
        owner = self._service_of.pop(name, None)
        if owner is None:
            return
        siblings = self.slices[owner]
        if self.departures is not None:
            self.departures.replace(owner, siblings[name[1]], None)
        del siblings[name[1]]
        if not siblings:
            del self.slices[owner]
        self.counts.endpoints += 1
        self._dirty[owner] = None
        self._triggers.pop(owner, None)  # as in EndpointsChangeTracker, only updates have trigger times, not deletions

    def _delete(self, resource: Resource, name: ServiceName) -> None:
        if resource == "services":
            if self.services.pop(name, None) is not None:
                self.ejections.request(name, None)
                self.counts.services += 1
                self._dirty[name] = None
        elif resource == "endpointslices":
            self._drop_slice(name)
        elif resource == "servicecidrs":
            self.service_cidrs.pop(name[1], None)
        elif name[1] in self.nodes:
            self.deleted_nodes.add(name[1])

    def _replace(self, event: Replaced) -> Iterator[list[Rejected]]:
        seen: set[ServiceName] = set(event.kept or ())
        for start in range(0, len(event.objects), STEP):
            rejected: list[Rejected] = []
            for obj in event.objects[start : start + STEP]:
                seen.add(self._upsert(obj, rejected))
            yield rejected
        gone = [name for name in self._known(event.resource) if name not in seen] if event.kept is not None else []
        for done, name in enumerate(gone, start=1):
            self._delete(event.resource, name)
            if not done % STEP:
                yield []
        self._missing.discard(event.resource)

    def _known(self, resource: Resource) -> Iterable[ServiceName]:
        if resource == "services":
            return self.services
        if resource == "endpointslices":
            return self._service_of
        return (("", name) for name in (self.nodes if resource == "nodes" else self.service_cidrs))
