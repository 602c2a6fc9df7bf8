"""Desired elements: translates a Service's plans into elements of the sets and maps of our table. Pure. An endpoint
keeps its slot for its lifetime, so a change writes few elements, and clients with session affinity keep their
endpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kubeproxy.backends.nftables import layout
from kubeproxy.backends.nftables.layout import LARGEST_NUMBER, ChainName, SetId, packed_class, pool_number, service_key
from kubeproxy.backends.nftables.port_ranges import of_ranges
from kubeproxy.backends.state import Elements
from kubeproxy.model import maglev
from kubeproxy.model.addresses import Family, Range, merge_ranges
from kubeproxy.model.plan import (
    Action,
    Frontend,
    FrontendKind,
    Policy,
    Pool,
    PortRange,
    ServicePlan,
    ServicePortKey,
    Traffic,
    Weights,
)

# Local names for speed, as in model.compile.
_CLUSTER_IP, _LOCAL, _CLUSTER_IPS = FrontendKind.CLUSTER, Policy.LOCAL, SetId.CLUSTER_IPS
_PAD = b"\0\0"  # padding of a two-byte port to a whole register
_PLACES = ("services", "nodeports")  # endings of set names; the index is whether a frontend is a NodePort


def list_key(key: ServicePortKey) -> ServicePortKey:
    """Return the key of a Service's list of source ranges in Numbers; `key` is the key of any port of the Service."""
    return key._replace(port_name="", protocol=0)


class Numbers:
    """Assigns numbers, beginning with 1, to service ports with session affinity, their endpoints, and lists of source
    ranges. Numbers are never reused, because a reused number would inherit the clients of its former service port. Each
    owner keeps its number during a comparison with the kernel."""

    def __init__(self, taken: Iterable[int] = ()) -> None:
        self._last = self.last_endpoint = 0
        self._had: dict[ServicePortKey, int] = {}
        self._endpoints: dict[ServicePortKey, Identities] = {}
        self._taken = set(taken)

    def of(self, key: ServicePortKey) -> int:
        """Return the identifying number of a service port that has none in the kernel: its former number, or a new
        number."""
        return self._had.pop(key, 0) or self._new()

    def _new(self) -> int:
        self._last += 1
        return self._last

    def endpoints(self, pool: Pool, before: Mapping[bytes, bytes], family: Family) -> dict[bytes, bytes]:
        """Return the packed numbers of a pool's endpoints; only new endpoints get new numbers."""
        return {each: before.get(each) or self._new_endpoint(family) for each in dict.fromkeys(pool)}

    def former_endpoints(self, key: ServicePortKey) -> Identities:
        """Return the numbers of a service port's endpoints before the comparison."""
        return self._endpoints.get(key, _NONE)

    def _new_endpoint(self, family: Family) -> bytes:
        self.last_endpoint = self.last_endpoint % LARGEST_NUMBER + 1
        return layout.endpoint_number(self.last_endpoint, family)

    def compare(self, had: Iterable[Placed]) -> None:
        """Begin a comparison with the kernel, and record the numbers of the former placements (`had`). Numbers that a
        failed comparison recorded remain valid."""
        for item in had:
            if item.number:
                self._had[item.plan.key] = item.number
                self._endpoints[item.plan.key] = item.endpoints
            if item.ranges:
                self._had[list_key(item.plan.key)] = item.ranges
        self._taken = set(self._had.values())

    def read(self, numbers: Iterable[int]) -> None:
        """Record the kernel's numbers, so that new numbers are larger. Endpoint numbers begin at FIRST_ENDPOINT."""
        for number in numbers:
            if number <= LARGEST_NUMBER:
                self._last = max(self._last, number)
            elif 0 <= number - layout.FIRST_ENDPOINT <= LARGEST_NUMBER:
                self.last_endpoint = max(self.last_endpoint, number - layout.FIRST_ENDPOINT)

    def recall(self, key: ServicePortKey, number: int) -> int:
        """Return the number that a service port had before the comparison, or else `number`, its number in the kernel.
        Returns 0 without a number. A number that is too large or belongs to a different service port is from another
        program; the function then returns 0, too."""
        if key in self._had:
            return self._had.pop(key)
        if number in self._taken or number > LARGEST_NUMBER:
            return 0
        self._taken.add(number)
        return number

    def recall_endpoints(
        self, key: ServicePortKey, policy: Policy, found: Mapping[bytes, bytes], owner: Callable[[bytes], bytes]
    ) -> dict[bytes, bytes]:
        """Return the packed numbers of a pool's endpoints: the numbers in the kernel, else the numbers before the
        comparison. `owner` returns the endpoint that has a number in the kernel, or b'' if no endpoint has it. Each
        number belongs to only one pool."""
        mine = {}
        for endpoint, packed in (*found.items(), *self.former_endpoints(key).get(policy, {}).items()):
            number = int.from_bytes(packed, "big")
            if endpoint not in mine and number not in self._taken and owner(packed) in {endpoint, b""}:
                self._taken.add(number)
                mine[endpoint] = packed
        return mine

    def compared(self) -> None:
        """End the comparison, and drop the numbers of service ports that no longer exist."""
        self._had.clear()
        self._endpoints.clear()
        self._taken.clear()


Identities = Mapping[Policy, Mapping[bytes, bytes]]
"""Packed numbers of the endpoints of each pool with session affinity. An endpoint keeps its number when it moves to
another slot; the number of a removed endpoint is not given to another endpoint."""

_NONE: Identities = MappingProxyType({})


class MaglevTable(tuple[bytes, ...]):
    """The endpoint of each slot of a Maglev table. Unlike in other pools, the order is significant."""

    __slots__ = ()


class Placed(NamedTuple):
    """A plan with the endpoints of its pools in slot order. If the plan has affinity or ranges of ports, `number`
    identifies its pools, and `endpoints` contains the numbers of the endpoints; else `number` is 0. With weights an
    endpoint has several slots. `ranges` is the number that identifies the Service's list of source ranges, or 0 if the
    Service has no list. In the Service's first plan, `allowed` contains the ranges of the list; in its other plans,
    `allowed` is empty."""

    plan: ServicePlan
    cluster: Pool
    local: Pool
    number: int
    ranges: int = 0
    allowed: tuple[Range, ...] = ()
    endpoints: Identities = _NONE

    def pool(self, policy: Policy) -> Pool:
        """Return the pool of a policy."""
        return self.local if policy is Policy.LOCAL else self.cluster


def place(plan: ServicePlan, before: Placed | None, numbers: Numbers) -> Placed:
    """Give each endpoint a slot and the plan a number, and keep the slots and numbers of the earlier placement."""
    number = ((before.number if before is not None else 0) or numbers.of(plan.key)) if plan.numbered else 0
    cluster, local = slots(plan, Policy.CLUSTER), slots(plan, Policy.LOCAL)
    if plan.balance is not None and plan.balance.hashing is not None:
        return Placed(plan, cluster, local, number)
    known = numbers.former_endpoints(plan.key)
    if before is not None:
        cluster, local, known = assign(before.cluster, cluster), assign(before.local, local), before.endpoints
    placed = Placed(plan, cluster, local, number)
    if not number:
        return placed
    family, used = plan.key.family, pools(placed).items()
    ids = {policy: numbers.endpoints(pool, known.get(policy, {}), family) for policy, pool in used}
    return placed._replace(endpoints=ids)


def place_all(
    plans: Sequence[ServicePlan], before: Sequence[Placed], numbers: Numbers, *, committed: bool = False
) -> tuple[Placed, ...]:
    """Place all plans of a Service, and keep the slots and numbers of the earlier placement. `committed`: the earlier
    placement was committed, not only found in the kernel, so a plan that is equal to the earlier plan keeps its
    placement object."""
    known = {item.plan.key[2:4]: item for item in before}  # keyed by name and protocol of the port
    after = []
    for plan in plans:
        item = known.get(plan.key[2:4])
        is_kept = item is not None and committed and (item.plan is plan or item.plan == plan)
        after.append(item if is_kept and item is not None else place(plan, item, numbers))
    ranges = next((plan.source_ranges for plan in plans if plan.source_ranges is not None), None)
    had = next((item.ranges for item in before if item.ranges), 0)
    if ranges is None and not had:
        return tuple(after)
    number = 0 if ranges is None else had or numbers.of(list_key(plans[0].key))
    allowed = () if ranges is None else merge_ranges(ranges)
    for at, item in enumerate(after):
        mine = number, () if at else allowed
        if mine != (item.ranges, item.allowed):
            after[at] = item._replace(ranges=mine[0], allowed=mine[1])
    return tuple(after)


def slots(plan: ServicePlan, policy: Policy) -> Pool:
    """Return the endpoints of a pool, each repeated for each of its slots. The order is significant only in a
    MaglevTable."""
    pool, weights = plan.local if policy is Policy.LOCAL else plan.cluster, plan.weights(policy)
    if plan.balance is not None and plan.balance.hashing is not None:
        return MaglevTable(maglev.fill(pool, weights, plan.balance.hashing.size))
    if not weights or plan.balance is None:
        return pool
    return repeated(pool, weights, min(plan.balance.room, layout.STICKY_SLOTS if plan.affinity else layout.CLASSES[-1]))


def repeated(pool: Pool, weights: Weights, most: int) -> Pool:
    """Return the endpoints of a pool, each repeated for each of its slots: see layout.slot_counts."""
    counts = layout.slot_counts(weights, most)
    return tuple([destination for destination, count in zip(pool, counts, strict=True) for _ in range(count)])


def assign(before: Pool, wanted: Pool) -> Pool:
    """Return the desired destinations in the order that moves the fewest destinations. Remaining destinations keep
    their slots. Destinations in slots beyond the new size, and then new destinations, fill the free slots. An endpoint
    that loses some of its slots keeps its lowest slots."""
    if before == wanted or not before:
        return wanted
    missing = dict.fromkeys(wanted, 1)
    if len(missing) < len(wanted):
        missing = Counter(wanted)
    slots: list[bytes | None] = []
    for destination in before:
        if missing.get(destination):
            missing[destination] -= 1
            slots.append(destination)
        else:
            slots.append(None)
    fresh = sorted([d for d, count in missing.items() for _ in range(count)])
    result: list[bytes] = []
    for index in range(len(wanted)):
        kept = slots[index] if index < len(slots) else None
        result.append(kept if kept is not None else b"")
    spare = [d for d in slots[len(wanted) :] if d is not None]
    queue = iter((*spare, *fresh))
    return tuple(d or next(queue) for d in result)


class Recipient(Protocol):
    """Receives the elements of a plan from `translate`."""

    def entry(self, set_id: str, key: bytes, data: bytes) -> None:
        """Receive an element."""

    def pool(self, set_id: str, key: bytes, pool: Pool) -> None:
        """Receive the endpoints of a frontend in slot order, or the endpoints' numbers for a pool with affinity."""


class Parts:
    """A recipient that collects elements. Pools are not split into elements, because the frontends of a service port
    share pools."""

    def __init__(self, placed: Iterable[Placed]) -> None:
        self.elements: Elements = {}
        """The elements of all sets except layout.POOL_SETS."""
        self.pools: dict[tuple[str, bytes], Pool] = {}
        """Entries of pools in slot order. Keys: the map (one of layout.POOL_SETS), and the frontend or the pool's
        number."""
        for item in placed:
            translate(item, self)

    def entry(self, set_id: str, key: bytes, data: bytes) -> None:
        """See Recipient."""
        self.elements.setdefault(set_id, {})[key] = data

    def pool(self, set_id: str, key: bytes, pool: Pool) -> None:
        """See Recipient."""
        self.pools[set_id, key] = pool


def render(placed: Iterable[Placed]) -> Elements:
    """Return the elements of a Service in one family."""
    parts = Parts(placed)
    found = parts.elements
    for (set_id, key), pool in parts.pools.items():
        elements, padding = found.setdefault(set_id, {}), layout.PADDING[set_id]
        elements.update({key + slot: d + padding for slot, d in zip(layout.slot_bytes(len(pool)), pool, strict=False)})
    return found


def shared_elements(plan: ServicePlan) -> list[tuple[str, bytes]]:
    """Return set and key of the elements that a plan may share with other plans."""
    found: list[tuple[str, bytes]] = [(_CLUSTER_IPS, f.key[:-3]) for f in plan.frontends if f.kind is _CLUSTER_IP]
    return found + [(SetId.HAIRPIN, address + address) for address in plan.hairpin] if plan.hairpin else found


def translate(item: Placed, recipient: Recipient) -> None:
    """Pass a plan's elements to a recipient."""
    plan = item.plan
    for set_id, key in shared_elements(plan):
        recipient.entry(set_id, key, b"")
    for frontend in plan.frontends:
        _frontend(item, frontend, plan.traffic(frontend), recipient)
    for policy, numbers in item.endpoints.items():
        number = pool_number(item.number, policy, plan.key.family)
        sticky_pool(number, item.pool(policy), numbers, plan.key.protocol, recipient)
        if plan.port_ranges:
            _range_pool(number, numbers, plan.affinity, recipient)
    for span in plan.port_ranges:
        _range(item, span, recipient)
    if item.allowed:
        number = layout.list_number(item.ranges, plan.key.family)
        for first, last in item.allowed:
            recipient.entry(SetId.FIREWALL_ALLOW, number + first + number + last, b"")


def _frontend(item: Placed, frontend: Frontend, traffic: Traffic, recipient: Recipient) -> None:
    kind = frontend.kind
    key = service_key(frontend.key)
    if kind is FrontendKind.LOADBALANCER and item.plan.source_ranges is not None:
        recipient.entry(SetId.FIREWALL_IPS, key, b"")
        recipient.entry(SetId.FIREWALL_LISTS, key, layout.list_number(item.ranges, item.plan.key.family))
    way = way_of(kind, traffic)
    if way.picked:
        _forward(item, key, way, recipient)
    if way.unserved is not None:
        recipient.entry(way.unserved, key, b"")


def _range_pool(number: bytes, numbers: Mapping[bytes, bytes], affinity: int, recipient: Recipient) -> None:
    """Pass to a recipient the elements of a pool of ranges that `sticky_pool` does not pass: the addresses of the
    endpoints, and the chain of session affinity."""
    for destination, packed in numbers.items():
        recipient.entry(SetId.RANGE_ENDPOINTS, packed, destination[:-2])
    if affinity:
        recipient.entry(SetId.RANGE_CHAINS, number, chain_of(False, "range-pick", affinity=affinity))


def _range(item: Placed, span: PortRange, recipient: Recipient) -> None:
    plan, key, family = item.plan, layout.range_key(span), item.plan.key.family
    if span.kind is FrontendKind.LOADBALANCER and plan.source_ranges is not None:
        recipient.entry(SetId.FIREWALL_RANGES, key, layout.list_number(item.ranges, family))
    way = way_of(span.kind, plan.traffic(span))
    for _, class_map, _, policy in way.picked:
        recipient.entry(of_ranges(class_map), key, pool_number(item.number, policy, family))
    if way.unserved is not None:
        recipient.entry(of_ranges(way.unserved), key, b"")


def _forward(item: Placed, key: bytes, way: Way, recipient: Recipient) -> None:
    plan, nodeport = item.plan, way.nodeport
    affinity = plan.affinity
    hashing = plan.balance.hashing if plan.balance is not None else None
    if nodeport and (affinity or hashing is not None):
        recipient.entry(SetId.STICKY_NODEPORTS, key, b"")
    for endpoint_map, class_map, treatment, policy in way.picked:
        members = item.local if policy is _LOCAL else item.cluster
        if hashing is not None:
            recipient.pool(endpoint_map, key, members)
            hashed = f"{treatment.removesuffix('-pick')}-{layout.HASHED[hashing.key]}"
            recipient.entry(_AFFINITY_MAPS[endpoint_map], key, chain_of(nodeport, hashed, hashing.size))
        elif affinity:
            recipient.entry(layout.POOLS_OF[endpoint_map], key, pool_number(item.number, policy, plan.key.family))
            recipient.entry(_AFFINITY_MAPS[endpoint_map], key, chain_of(nodeport, treatment, affinity=affinity))
            for own in own_frontend(item.endpoints[policy], key):
                recipient.entry(SetId.SESSION_OWN, own, b"")
        else:
            recipient.pool(endpoint_map, key, members)
            recipient.entry(class_map, key, packed_class(len(members)))


def sticky_pool(
    number: bytes, members: Pool, numbers: Mapping[bytes, bytes], protocol: int, recipient: Recipient
) -> None:
    """Pass to a recipient the number, the endpoints and the endpoints' numbers of a pool with session affinity. All
    frontends of the pool share these elements."""
    recipient.entry(SetId.SESSION_CLASSES, number, packed_class(len(members)))
    recipient.pool(SetId.SESSION_SLOTS, number, tuple([numbers[each] for each in members]))
    for destination, packed in numbers.items():
        recipient.entry(SetId.SESSION_ENDPOINTS, packed + layout.protocol_field(protocol), destination + _PAD)


def own_frontend(numbers: Mapping[bytes, bytes], frontend: bytes) -> Iterator[bytes]:
    """Yield the SESSION_OWN keys of the endpoints with the address and port of the frontend."""
    address, port = frontend[:-8], frontend[-4:-2]
    if address:
        if (number := numbers.get(address + port)) is not None:
            yield number + address + port + _PAD
    else:  # any address of the node
        yield from (number + each + _PAD for each, number in numbers.items() if each[-2:] == port)


def pools(item: Placed) -> dict[Policy, Pool]:
    """Return the pools that the frontends of a plan identify by a number, in slot order. If there is no session
    affinity, only ranges of ports use such pools."""
    found = {}
    for frontend in item.plan.all_frontends if item.plan.affinity else item.plan.port_ranges:
        way = way_of(frontend.kind, item.plan.traffic(frontend))
        found.update({policy: item.pool(policy) for _, _, _, policy in way.picked})
    return found


class Way(NamedTuple):
    """The sets and maps that contain a frontend, which depend on the frontend's kind and traffic. `picked` contains,
    for each pool, the endpoint map, the map of frontends, the treatment of the pool's chain, and the policy of the
    pool; it is empty if the frontend forwards no traffic. `unserved` is the set of refused or dropped frontends to
    which the frontend belongs, or None."""

    nodeport: bool
    picked: Sequence[tuple[SetId, SetId, str, Policy]]
    unserved: SetId | None


@lru_cache(maxsize=1024)
def way_of(kind: FrontendKind, traffic: Traffic) -> Way:
    """Return the sets and maps of a frontend. Few combinations occur, so the cache nearly always hits."""
    nodeport = kind is FrontendKind.NODEPORT
    unserved = None
    if traffic.outside is Action.REJECT:
        unserved = SetId(f"unserved-{_PLACES[nodeport]}")
    elif traffic.outside is Action.DROP:
        unserved = SetId(f"no-local-endpoint-{_PLACES[nodeport]}")
    return Way(nodeport, _picked(kind, traffic) if traffic.node.forwards else (), unserved)


def _picked(kind: FrontendKind, traffic: Traffic) -> list[tuple[SetId, SetId, str, Policy]]:
    nodeport = kind is FrontendKind.NODEPORT
    policy, treatment = Policy.CLUSTER, "policy-local"
    if kind is FrontendKind.CLUSTER:
        treatment = "cluster"
        if traffic.node.picks_local:
            policy = Policy.LOCAL
    elif traffic.outside is Action.CLUSTER_MASQUERADE:
        treatment = "external"
    wide = SetId.NODEPORT_ENDPOINTS if nodeport else SetId.ENDPOINTS
    found = [(wide, SetId(f"{treatment}-{_PLACES[nodeport]}"), treatment, policy)]
    if treatment == "policy-local" and traffic.outside is Action.LOCAL:
        near = SetId.LOCAL_NODEPORT_ENDPOINTS if nodeport else SetId.LOCAL_ENDPOINTS
        found.append((near, SetId(f"local-{_PLACES[nodeport]}"), "local-pick", Policy.LOCAL))
    return found


_AFFINITY_MAPS = dict(zip(layout.ENDPOINT_MAPS, layout.VERDICT_MAPS, strict=True))


@lru_cache(maxsize=512)
def chain_of(nodeport: bool, treatment: str, size: int = 0, affinity: int = 0) -> bytes:
    """Return the packed name of the chain for a frontend or pool with session affinity or Maglev: see ChainName."""
    return str(ChainName(nodeport, treatment, size, affinity)).encode()
