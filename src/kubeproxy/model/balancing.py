"""Weights and consistent hashing: parses the annotations of Services and EndpointSlices, and applies them to pools.
Pure. A weight is a number from 0 to 100 (the default); an endpoint's share of the connections is its weight divided by
the sum of all weights. A weight of 0 drains an endpoint. See docs/balancing.md."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import floor, gcd
from typing import Final, NamedTuple

from msgspec import Struct, structs

from kubeproxy.model.addresses import PORT_BYTES
from kubeproxy.model.endpoints import FULL, Slice, annotation_field, read_number
from kubeproxy.model.maglev import DEFAULT_SIZE, SIZES
from kubeproxy.model.objects import Annotations, Service
from kubeproxy.model.plan import ROOM, Balance, Hashing, HashKey, Pool, Problem, ServiceName, ServicePlan, Weights
from kubeproxy.model.port_ranges import FIELD

WEIGHT: Final = "metadata.annotations[*/weight]"  # kube-proxy-py/weight or service.cilium.io/weight
WEIGHTS: Final = annotation_field("weights")
SLOW_START: Final = annotation_field("slow-start")
ALGORITHM: Final = annotation_field("algorithm")
CILIUM_ALGORITHM: Final = "metadata.annotations[service.cilium.io/lb-algorithm]"


_CILIUM_ALGORITHMS: Final = {"random": 0, "maglev": DEFAULT_SIZE}
_ALGORITHMS: Final = _CILIUM_ALGORITHMS | {f"maglev-{size}": size for size in SIZES}
"""The size of each algorithm's Maglev table; 0 if the algorithm uses no table."""

LONGEST_START: Final = 3600  # the maximum number of seconds of a slow start
LONGEST_WEIGHTS: Final = 1 << 14
"""The maximum length of an annotation with weights, which every node parses: enough for a few hundred Nodes."""

ZONE: Final = "zone:"  # the prefix of a zone's name in an annotation with weights; no Node's name has a colon
NO_ROOM: Final = (
    "older Services use all entries of this node, or of this namespace, for weights and tables (--balancing-entries);"
    " connections are shared evenly"
)

Growth = Mapping[bytes, int]  # by packed address of a new endpoint: the percentage of its weight that it has now
GROWN: Growth = {}  # no endpoint is new


class BalanceRequests(Struct, frozen=True, gc=False):
    """The requests in a Service's annotations: weights by Node and zone, seconds of slow start, Maglev table size."""

    nodes: Mapping[str, int] = {}
    zones: Mapping[str, int] = {}
    slow_start: int = 0
    table: int = 0


def asks(annotations: Annotations | None) -> bool:
    """Return whether a Service's annotations request weights, slow start or a Maglev table."""
    return annotations is not None and not (
        annotations.weights is None
        and annotations.slow_start is None
        and annotations.algorithm is None
        and annotations.cilium_algorithm is None
    )


def weighs_zones(annotations: Annotations | None) -> bool:
    """Return whether a Service's annotations contain weights by zone."""
    return annotations is not None and annotations.weights is not None and ZONE in annotations.weights


def balance_requests(annotations: Annotations | None, problems: list[Problem]) -> BalanceRequests:
    """Return the requests in a Service's annotations. An invalid annotation is ignored, and reported as a problem."""
    if annotations is None:
        return BalanceRequests()
    nodes: Mapping[str, int] = {}
    zones: Mapping[str, int] = {}
    if annotations.weights is not None:
        nodes, zones, wrong = _by_place(annotations.weights)
        problems += wrong
    return BalanceRequests(nodes, zones, slow_start(annotations, problems), _table(annotations, problems))


def _table(annotations: Annotations, problems: list[Problem]) -> int:
    text, field, known = annotations.algorithm, ALGORITHM, _ALGORITHMS
    if text is None:
        text, field, known = annotations.cilium_algorithm, CILIUM_ALGORITHM, _CILIUM_ALGORITHMS
    if text is None:
        return 0
    if text not in known:
        reason = f"{text[:64]!r} is none of {', '.join(known)}; endpoints are picked at random"
        problems.append(Problem(field, reason))
    return known.get(text, 0)


def slow_start(annotations: Annotations | None, problems: list[Problem]) -> int:
    """Return the seconds over which a new endpoint's share grows; 0 if there is no slow start."""
    text = annotations.slow_start if annotations is not None else None
    if text is None:
        return 0
    seconds = read_number(text, LONGEST_START)
    if seconds is None:
        reason = f"{text[:64]!r} is no number of seconds from 0 to {LONGEST_START}; there is no slow start"
        problems.append(Problem(SLOW_START, reason))
        return 0
    return seconds


class _ByPlace(NamedTuple):
    nodes: dict[str, int]
    zones: dict[str, int]
    problems: Sequence[Problem] = ()


@lru_cache(maxsize=64)
def _by_place(text: str) -> _ByPlace:
    """Parse weights such as `node-a=0,zone:eu-1=50`; return no weights if any weight is invalid."""
    if len(text) > LONGEST_WEIGHTS:
        return _unreadable(f"{len(text)} characters are more than {LONGEST_WEIGHTS}: weigh by zone, or by slices")
    found = _ByPlace({}, {})
    for entry in filter(None, (part.strip() for part in text.split(","))):
        place, equals, number = (part.strip() for part in entry.rpartition("="))
        weight, zone = read_number(number), place.removeprefix(ZONE)
        if not equals or weight is None or not zone or ":" in zone:
            form = f"NODE=WEIGHT or {ZONE}ZONE=WEIGHT with a weight from 0 to {FULL}"
            return _unreadable(f"{entry[:64]!r} is not {form}")
        weights = found.nodes if zone == place else found.zones
        if zone in weights:
            return _unreadable(f"{place[:64]!r} has two weights")
        weights[zone] = weight
    return found


def _unreadable(reason: str) -> _ByPlace:
    return _ByPlace({}, {}, (Problem(WEIGHTS, f"{reason}; no weight of this annotation counts"),))


def entries(plans: Iterable[ServicePlan]) -> int:
    """Return the number of entries that a Service's plans need for weights and Maglev tables, over all frontends. For
    weights this is the number that exact shares need; backends may round shares. A Maglev table's size does not depend
    on its endpoints."""
    total = 0
    for plan in plans:
        if (balance := plan.balance) is None:
            continue
        if balance.hashing is not None:
            each = balance.hashing.size
        else:
            each = max([sum(w) // gcd(*w) for w in (balance.cluster, balance.local) if w], default=0)
        total += min(each, balance.room) * len(plan.frontends)
    return total


def expected_entries(service: Service) -> int:
    """Estimate the number of entries of a Service that is not compiled yet, from its annotations."""
    annotations = service.metadata.annotations
    table = _table(annotations, []) if annotations is not None else 0
    return min(ROOM, table * len(service.spec.ports or ()))


def room_for(plans: Iterable[ServicePlan], most: int) -> int:
    """Return the maximum number of entries per frontend of a Service's plans in one family; `most` is the maximum of
    all frontends together. Without this limit, a small Service object (2,000 bytes) with a thousand frontends and an
    annotation for a large Maglev table would need four million entries on every node."""
    return max(min(most, 1), most // max(1, sum(len(plan.frontends) for plan in plans)))


def balanced(
    plan: ServicePlan,
    slices: Iterable[Slice],
    asked: BalanceRequests,
    growth: Growth,
    room: int,
    problems: list[Problem],
) -> ServicePlan:
    """Return a plan without drained endpoints in its pools. If shares are not equal, the plan has a balance. `room` is
    the result of `room_for`; 0 if the node has no entries left for the Service. If all endpoints of a pool have weight
    0, they get equal shares, because draining moves connections but never refuses them."""
    weights = _weights(slices, (plan.key.port_name, plan.key.protocol), asked)
    if growth:
        _grow(weights, plan, growth)
    near, far = _shares(plan.local, weights), _shares(plan.cluster, weights)
    if not room and (asked.table or near.weights or far.weights):
        near, far, asked = near._replace(weights=()), far._replace(weights=()), structs.replace(asked, table=0)
        _say(problems, "metadata.annotations", NO_ROOM)
    drained = {*plan.cluster}.difference(far.pool) | {*plan.local}.difference(near.pool)
    field = WEIGHTS if asked.nodes or asked.zones else WEIGHT
    if far.all_drained or near.all_drained:
        where = "on this node" if not far.all_drained else "of this service port"
        reason = f"all endpoints {where} have weight 0; they share connections evenly"
        _say(problems, field, reason)
    hashing = _hashing(plan, asked.table, room, problems) if asked.table else None
    if hashing is not None and len(far.pool) > hashing.size:
        _say(problems, ALGORITHM, f"a table of {hashing.size} slots has no slot for some of {len(far.pool)} endpoints")
    if hashing is not None and plan.port_ranges:
        _say(problems, FIELD, "consistent hashing and ranges of ports exclude each other; no range is served")
        plan = structs.replace(plan, port_ranges=())
    if hashing is None and (far.weights or near.weights):
        _check_exactness(far if far.weights else near, room, field, problems)
    if not drained and not far.weights and not near.weights and hashing is None:
        return plan
    return structs.replace(
        plan,
        cluster=far.pool,
        local=near.pool,
        affinity=0 if hashing is not None else plan.affinity,
        balance=Balance(far.weights, near.weights, tuple(sorted(drained)), hashing, room),
    )


def _hashing(plan: ServicePlan, table: int, room: int, problems: list[Problem]) -> Hashing | None:
    size = max([size for size in SIZES if size <= min(table, room)], default=0)
    if size < table:
        instead = f"{size} are used" if size else "endpoints are picked at random"
        _say(problems, ALGORITHM, f"{table} slots for each of so many ports and addresses are too many; {instead}")
    # With session affinity only the client's address is hashed, so a client keeps its endpoint without stored state.
    return Hashing(HashKey.CLIENT if plan.affinity else HashKey.FLOW, size) if size else None


_ROUGH: Final = 16  # with fewer entries per endpoint, shares may be less exact than documented


def _check_exactness(shares: _Shares, room: int, field: str, problems: list[Problem]) -> None:
    exact, count = sum(shares.weights) // gcd(*shares.weights), len(shares.pool)
    if room < exact and room < _ROUGH * count:
        reason = f"{count} endpoints at so many ports and addresses are too many for exact shares"
        _say(problems, field, f"{reason}: there is room for {max(count, room)} entries at each")


def _say(problems: list[Problem], field: str, reason: str) -> None:
    """Add a problem, unless another port or family has already added the same problem."""
    if (problem := Problem(field, reason)) not in problems:
        problems.append(problem)


class _Shares(NamedTuple):
    pool: Pool
    weights: Weights
    all_drained: bool = False


def _shares(pool: Pool, weights: Mapping[bytes, int]) -> _Shares:
    kept = tuple([d for d in pool if weights.get(d, FULL)])
    if not kept:
        return _Shares(pool, (), all_drained=bool(pool))
    found = tuple([weights.get(d, FULL) for d in kept])
    return _Shares(kept, found if len(set(found)) > 1 else ())


def _weights(slices: Iterable[Slice], port: tuple[str, int], asked: BalanceRequests) -> dict[bytes, int]:
    """Return the weights below FULL of a port's (name, protocol) destinations; the smallest of a destination's weights
    applies."""
    found: dict[bytes, int] = {}
    for piece in slices:
        most = FULL if piece.weight is None else piece.weight
        for number in [p.port for p in piece.ports if (p.name, p.protocol) == port]:
            for one in piece.endpoints:
                weight = min(most, asked.nodes.get(one.node, FULL), asked.zones.get(one.zone, FULL))
                if weight < FULL:
                    destination = one.address + PORT_BYTES[number]
                    found[destination] = min(weight, found.get(destination, FULL))
    return found


def _grow(weights: dict[bytes, int], plan: ServicePlan, growth: Growth) -> None:
    for destination in {*plan.cluster, *plan.local}:
        share, weight = growth.get(destination[:-2], FULL), weights.get(destination, FULL)
        if weight and share < FULL:
            weights[destination] = max(1, weight * share // FULL)


STEPS: Final = 10  # the number of steps in which a new endpoint's share grows
_SURELY: Final = 0.001  # seconds added to the time of a step, so that a rounded timer does not fire too early


class _Ages(Struct):
    step: float  # seconds
    known: frozenset[bytes]
    since: dict[bytes, int]


class SlowStart:
    """Tracks Services with a slow start: their new endpoints, and the present percentage of these endpoints' weights.
    The share of a new endpoint grows in steps. All new endpoints of a Service reach a step at the same time, so that a
    step causes at most one change per Service. Endpoints that exist when the proxy first sees a Service are not new, so
    a restart of the proxy causes no slow start. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ages: dict[ServiceName, _Ages] = {}
        self._growing: set[ServiceName] = set()  # Services that have new endpoints

    def growth(self, name: ServiceName) -> Growth:
        """Return, for each new endpoint of a Service, the percentage of its weight that it has now."""
        if name not in self._growing:
            return GROWN
        ages = self._ages[name]
        at = floor(self.now / ages.step)
        return {
            address: (1 + at - since) * FULL // STEPS for address, since in ages.since.items() if at - since < STEPS - 1
        }

    def seen(self, name: ServiceName, endpoints: Collection[bytes], seconds: int) -> bool:
        """Record a Service's endpoints and its seconds of slow start; return whether its shares change."""
        step = seconds / STEPS
        at = floor(self.now / step)
        before = self._ages.get(name)
        if before is None or before.step != step:
            self._note(name, _Ages(step, frozenset(endpoints), {}))
            return before is not None and bool(before.since)
        fresh = before.known.symmetric_difference(endpoints).intersection(endpoints)
        since = {a: since for a, since in before.since.items() if a in endpoints and at - since < STEPS - 1}
        self._note(name, _Ages(step, frozenset(endpoints), since | dict.fromkeys(fresh, at)))
        return bool(fresh)

    def _note(self, name: ServiceName, ages: _Ages) -> None:
        self._ages[name] = ages
        if ages.since:
            self._growing.add(name)
        else:
            self._growing.discard(name)

    def forget(self, name: ServiceName) -> None:
        """Stop tracking a Service that is deleted or has no slow start."""
        if self._ages:
            self._ages.pop(name, None)
            self._growing.discard(name)

    def advance(self, now: float) -> Collection[ServiceName]:
        """Set the time; return the Services in which a share has grown."""
        before, self.now = self.now, now
        steps = ((name, self._ages[name].step) for name in self._growing)
        return [name for name, step in steps if floor(before / step) != floor(now / step)]

    def next_step(self) -> float | None:
        """Return the time at which the next share grows; None if there are no new endpoints."""
        steps = {self._ages[name].step for name in self._growing}
        return min([(floor(self.now / step) + 1) * step + _SURELY for step in steps], default=None)
