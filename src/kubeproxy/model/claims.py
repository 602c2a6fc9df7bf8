"""Resolves conflicts between Services on a node: about addresses with ports, and about entries for weights and Maglev
tables. Pure. A claimed address belongs to the Service to which the API server allocated the address, else to the oldest
Service. Therefore users with the right to write externalIPs cannot take addresses of other Services (CVE-2020-8554). In
the Go kube-proxy the owner is random."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from msgspec import Struct, structs

from kubeproxy.model.addresses import PORT_BYTES, Family, pack
from kubeproxy.model.objects import Service
from kubeproxy.model.plan import ROOM, WRITTEN, Frontend, FrontendKind, PortRange, ServiceName, ServicePlan

_CLUSTER_IP = FrontendKind.CLUSTER  # looked up once, as in model.compile


class Right(IntEnum):
    """The reason why a Service may claim a frontend. The claimant with the smallest value gets the frontend."""

    ALLOCATED = 0  # allocated by the API server: cluster IPs, NodePorts
    WRITTEN = 1  # written by a client of the API: external IPs, addresses of load balancers


class Claimant(Struct, frozen=True, order=True, gc=False):
    """A Service that claims frontends. The smallest claimant of a frontend is its owner."""

    right: Right  # the reason for the claim
    created: str  # in RFC 3339, so that older Services sort first
    namespace: str
    name: str

    @property
    def writing(self) -> Claimant:
        """The same claimant with the right WRITTEN."""
        return structs.replace(self, right=Right.WRITTEN)

    @property
    def service(self) -> ServiceName:
        """The Service's namespace and name."""
        return self.namespace, self.name

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Claims:
    """The owners of one family's frontends, by Frontend.key. `written` contains keys claimed with the right WRITTEN. A
    range of ports competes with overlapping ranges and ports of other Services: the range takes effect if no smaller
    claimant has an overlapping range or port. `place` is a frontend's address and protocol, its key without the port. A
    claim of a contested key takes logarithmic time in the number of claimants."""

    def __init__(self) -> None:
        self.written: dict[ServiceName, tuple[bytes, ...]] = {}
        self._owner: dict[bytes, Claimant] = {}
        self._contested: dict[bytes, list[Claimant]] = {}
        self._ranges: dict[bytes, dict[tuple[Claimant, PortRange], None]] = {}  # by place
        self._in_ranges: dict[bytes, set[bytes]] = {}  # by place with ranges: the keys of its claimed single ports

    def replace(
        self, old: Claimant | None, new: Claimant | None, before: Collection[bytes], after: Collection[bytes]
    ) -> set[bytes]:
        """Replace a Service's claims with one right; return the contested keys with a new owner. `old` and `new` differ
        if a Service was deleted and created again, because then its age differs."""
        moved: set[bytes] = set()
        if old is not None and before:
            keys = set(after)
            moved.update([key for key in before if (old != new or key not in keys) and self._release(key, old)])
        if new is not None:
            for key in after:
                owner = self._owner.setdefault(key, new)
                if owner is not new and owner != new and self._contest(key, new):
                    moved.add(key)
        if self._ranges:
            for key in {*before, *after}:
                if (place := key[:-2]) in self._ranges:
                    (self._in_ranges[place].add if key in self._owner else self._in_ranges[place].discard)(key)
                    moved.add(place)
        return moved

    def replace_ranges(
        self, old: Claimant | None, new: Claimant | None, before: Sequence[PortRange], after: Sequence[PortRange]
    ) -> set[bytes]:
        """Replace a Service's claims of ranges; return the places and keys for which the owner must be determined
        again."""
        moved: set[bytes] = set()
        if old == new and before == after:
            return moved
        for span in before:
            place, rest = span.key[:-2], self._ranges[span.key[:-2]]
            moved |= {place, *self._in_ranges[place]}
            del rest[_of(old, span), span]
            if not rest:
                del self._ranges[place], self._in_ranges[place]
        for span in after:
            place = span.key[:-2]
            self._ranges.setdefault(place, {})[_of(new, span), span] = None
            ports = map(place.__add__, PORT_BYTES[span.port : span.last + 1])
            keys = self._in_ranges.setdefault(place, set())
            keys.update(filter(self._owner.__contains__, ports))
            moved |= {place, *keys}
        return moved

    def rival(self, frontend: Frontend, claimant: Claimant) -> Claimant | None:
        """Return the smallest claimant that precedes `claimant` and has a range or port that overlaps the frontend."""
        place = frontend.key[:-2]
        rivals = [
            other
            for other, span in self._ranges.get(place, ())
            if span.port <= frontend.last_port and frontend.port <= span.last
        ]
        if isinstance(frontend, PortRange):
            rivals += [self._owner[key] for key in self._in_ranges.get(place, ()) if frontend.covers(key)]
        return min((each for each in rivals if each < claimant and each.service != claimant.service), default=None)

    def range_owner(self, key: bytes) -> ServiceName | None:
        """Return the Service of the smallest claimant with a range that contains this key; None without a range."""
        own = (claimant for claimant, span in self._ranges.get(key[:-2], ()) if span.covers(key))
        first = min(own, default=None)
        return first.service if first is not None else None

    def replace_written(
        self, name: ServiceName, old: Claimant | None, new: Claimant | None, after: tuple[bytes, ...]
    ) -> set[bytes]:
        """Replace a Service's claims with the right WRITTEN; see `replace` for the returned keys."""
        before = self.written.pop(name, ())
        if after:
            self.written[name] = after
        return self.replace(old and old.writing, new and new.writing, before, after)

    @property
    def contested(self) -> bool:
        """Whether any key has more than one claimant, or any range is claimed."""
        return bool(self._contested or self._ranges)

    def owner(self, key: bytes) -> Claimant | None:
        """Return the owner of a key."""
        return self._owner.get(key)

    def asking(self, key: bytes) -> Iterable[ServiceName]:
        """Return all Services that claim a key, or ranges at a place. If the owner changes, the plans or problems of
        all these Services may change."""
        if key in self._ranges:
            return {claimant.service for claimant, _ in self._ranges[key]}
        owner = self._owner.get(key)
        return [claimant.service for claimant in self._contested.get(key, () if owner is None else (owner,))]

    def _release(self, key: bytes, claimant: Claimant) -> bool:
        waiting = self._contested.get(key)
        if waiting is None:
            if self._owner.get(key) == claimant:
                del self._owner[key]
            return False
        at = bisect_left(waiting, claimant)
        if at < len(waiting) and waiting[at] == claimant:
            del waiting[at]
        self._owner[key] = waiting[0]
        if len(waiting) == 1:
            del self._contested[key]
        return at == 0

    def _contest(self, key: bytes, claimant: Claimant) -> bool:
        waiting = self._contested.setdefault(key, [self._owner[key]])
        at = bisect_left(waiting, claimant)
        if at < len(waiting) and waiting[at] == claimant:
            return False
        waiting.insert(at, claimant)
        self._owner[key] = waiting[0]
        return at == 0


def _of(service: Claimant | None, span: PortRange) -> Claimant:
    assert service is not None  # noqa: S101 - a Service with a range is not None
    return service.writing if span.kind in WRITTEN else service


def claimed_keys(
    written: Sequence[Frontend], allocated: Collection[bytes], nodeport_addresses: Collection[bytes]
) -> tuple[bytes, ...]:
    """Return the keys of frontends with addresses that users wrote, and of the NodePorts that these frontends would
    hide."""
    taken = [frontend.nodeport_key for frontend in written if frontend.address in nodeport_addresses]
    return tuple(dict.fromkeys([f.key for f in written] + [key for key in taken if key not in allocated]))


def lost_to(claims: Claims, frontend: Frontend, claimant: Claimant, nodeport_addresses: Collection[bytes]) -> str:
    """Return the reason why another Service owns a frontend; '' if the claimant owns the frontend."""
    written = frontend.kind in WRITTEN
    owner = claims.owner(frontend.key)
    if owner is not None and owner != (claimant.writing if written else claimant):
        beaten = written and owner.right is Right.ALLOCATED
        return f"is the cluster IP of Service {owner}" if beaten else f"belongs to the older Service {owner}"
    if (rival := claims.rival(frontend, claimant.writing if written else claimant)) is not None:
        return f"overlaps ports of Service {rival}"
    if written and frontend.address in nodeport_addresses:
        owner = claims.owner(frontend.nodeport_key)
        if owner is not None and owner.right is Right.ALLOCATED and owner.service != claimant.service:
            return f"is a NodePort of Service {owner}"
    return ""


def parted(plans: tuple[ServicePlan, ...], family: Family) -> tuple[Sequence[bytes], Sequence[Frontend]]:
    """Return a Service's frontends of one family in two groups: keys that the API server allocated, and frontends
    that users wrote."""
    if not plans or (len(plans) == 1 and plans[0].key.family is not family):
        return (), ()
    if len(plans) == 1 and len(plans[0].frontends) == 1 and plans[0].frontends[0].kind is _CLUSTER_IP:
        return [plans[0].frontends[0].key], ()
    allocated: list[bytes] = []
    written: list[Frontend] = []
    for plan in plans:
        if plan.key.family is family:
            for frontend in plan.frontends:
                if frontend.kind in WRITTEN:
                    written.append(frontend)
                else:
                    allocated.append(frontend.key)
    return allocated, written


def ranges_of(plans: Iterable[ServicePlan], family: Family) -> Sequence[PortRange]:
    """Return the ranges of ports of a Service in a family."""
    return [span for plan in plans if plan.port_ranges and plan.key.family is family for span in plan.port_ranges]


def written_addresses(service: Service) -> set[bytes | None]:
    """Return the packed external IPs and load balancer addresses of a Service."""
    status = service.status.load_balancer if service.status else None
    ingress = (status.ingress if status else None) or ()
    return {pack(text) for text in (*(service.spec.external_ips or ()), *(each.ip for each in ingress if each.ip))}


SHARES: Final = 4  # a namespace gets at most a quarter of the entries
TURN: Final = ROOM  # the number of entries to change in one sync; these entries take about 0.25 s of CPU time


class _Asker(NamedTuple):
    created: str  # RFC 3339 timestamps sort by age as text
    name: ServiceName


class NodeBudget:
    """Grants entries for weights and Maglev tables to Services, in the order of age and then name. A Service gets its
    entries if older Services leave enough entries. Entries are limited, because a Service of two kilobytes may request
    65,536 elements in the kernel of every node, and a namespace may have a thousand such Services. See
    docs/balancing.md "What a node gives". Nodes with the same Services grant the same entries, also after a restart."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._asked: dict[ServiceName, tuple[_Asker, int]] = {}
        self._by_age: list[_Asker] = []
        self._total = 0
        self._sums: Counter[str] = Counter()  # by namespace
        self._denied: frozenset[ServiceName] = frozenset()
        self._is_settled = True

    def expect(self, name: ServiceName, created: str, entries: int) -> None:
        """Record an estimate for a Service that has not requested entries yet."""
        if name not in self._asked:
            self.ask(name, created, entries)

    def ask(self, name: ServiceName, created: str, entries: int) -> None:
        """Set the number of entries that a Service requests."""
        asker, before = self._asked.get(name, (None, 0))
        if before == entries and (asker is None or asker.created == created):
            return
        self._is_settled = False
        if asker is not None:
            del self._asked[name], self._by_age[bisect_left(self._by_age, asker)]
        if entries:
            asker = _Asker(created, name)
            self._asked[name] = asker, entries
            insort(self._by_age, asker)
        self._total += entries - before
        self._sums[name[0]] += entries - before
        if not self._sums[name[0]]:
            del self._sums[name[0]]

    def has(self, name: ServiceName) -> bool:
        """Return whether the last `settle` granted a Service its entries."""
        return name not in self._denied

    def costs(self, names: KeysView[ServiceName]) -> dict[ServiceName, int]:
        """Return the number of entries of each of these Services, oldest first, except Services without entries."""
        found = sorted(self._asked[name] for name in names & self._asked.keys() if self.has(name))
        return {asker.name: entries for asker, entries in found}

    def settle(self) -> Iterable[ServiceName]:
        """Recompute the grants if a request changed; return the Services that gained or lost entries."""
        if self._is_settled:
            return ()
        self._is_settled = True
        before, self._denied = self._denied, frozenset(self._beyond())
        return sorted(before.symmetric_difference(self._denied) & self._asked.keys())

    def _beyond(self) -> Iterable[ServiceName]:
        share, left = self._entries // SHARES, self._entries
        if self._total <= left and all(count <= share for count in self._sums.values()):
            return
        shares = dict.fromkeys(self._sums, share)
        for asker in self._by_age:
            entries, namespace = self._asked[asker.name][1], asker.name[0]
            if entries > min(left, shares[namespace]):
                yield asker.name
                continue
            left -= entries
            shares[namespace] -= entries


IMPORTANT: frozenset[ServiceName] = frozenset({("default", "kubernetes"), ("kube-system", "kube-dns")})
"""The Services that a full sync programs first, because the rest of a cluster depends on them."""


def important_first(names: dict[ServiceName, None]) -> Iterable[ServiceName]:
    """Return the names in order, but the names of IMPORTANT Services first."""
    important = dict.fromkeys(name for name in names if name in IMPORTANT) if len(names) > 1 else {}
    return important | names if important else names


class FairOrder:
    """Orders costly changes so that no namespace waits for all changes of another namespace. Waiting changes come
    before new changes. A namespace keeps its position in the order while it has no waiting changes."""

    def __init__(self) -> None:
        self._waiting: list[ServiceName] = []
        self._served: dict[str, int] = {}
        self._turn = 0

    def deferred(self, costs: Mapping[ServiceName, int]) -> Iterable[ServiceName]:
        """Return, in order, the Services with changes that must wait; `costs` are the entries per changed Service."""
        if sum(costs.values()) <= TURN:
            self._waiting.clear()
            self._served.clear()
            return ()
        names = dict.fromkeys([*(name for name in self._waiting if name in costs), *costs])
        waiting: dict[str, list[ServiceName]] = {}
        for name in names:
            waiting.setdefault(name[0], []).append(name)
        left, later = TURN, set(costs)
        while later:
            self._turn += 1
            namespace = min(waiting, key=lambda each: self._served.get(each, 0))
            name = waiting[namespace].pop(0)
            if left < TURN and costs[name] > left:
                break
            later.discard(name)
            left -= costs[name]
            self._served[namespace] = self._turn
            if not waiting[namespace]:
                del waiting[namespace]
        self._waiting = [name for name in names if name in later]
        return tuple(self._waiting)
