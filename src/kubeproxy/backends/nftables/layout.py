"""Layout of our table: its sets and maps, the packing of their keys, classes and slots of pools, and names of chains.
Pure data for rules and elements. Source: docs/nftables.md "Sets and maps by name"."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from enum import IntEnum, StrEnum
from functools import lru_cache
from itertools import pairwise
from math import ceil, gcd, log
from typing import Final, NamedTuple

from kubeproxy.backends import nftables
from kubeproxy.kernel.nftables.tables import INTERVAL, VERDICT, SetSpec
from kubeproxy.model.addresses import PORT_BYTES, PROTOCOL_NAMES, Family
from kubeproxy.model.plan import LONGEST_AFFINITY, Policy, PortRange

TABLE: Final = nftables.TABLE
SCRATCH: Final = f"{TABLE}-check"
"""Name of a temporary table of earlier versions, which remains if such a version is killed."""

SLOTS: Final = 1 << 16
"""Exclusive upper bound of the number of slots of a frontend."""

EXACT: Final = 8
"""Up to this number of endpoints, each number of endpoints has its own class."""

CLASSES: Final[tuple[int, ...]] = (
    *range(1, EXACT + 1),
    *(10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256),
    *(1024, 4096, 16384, 65535),
)
"""Sizes of the classes: the number of endpoints in a pool is rounded up to the next size. A rule picks a random slot of
a class. The kernel checks each new element against the rule of each class, so with twice as many classes a full sync
takes a sixth longer. In a map a class has two bytes, so the largest class is 65,535."""

BELOW: Final[dict[int, int]] = dict(pairwise(reversed(CLASSES)))
"""The next smaller class of each class except the first."""

_MISSED: Final = 0.005
"""Maximum share of connections for which every try picks an unused slot. The rules then pick from the next smaller
class, so this is also the largest error of an endpoint's share."""

_SLOTS: list[bytes] = [slot.to_bytes(4, "little") for slot in range(1024)]


class SetId(StrEnum):
    """Names of our sets and maps in the kernel. No map of the Go kube-proxy has one of these names, because the Go
    kube-proxy takes over our table after a rollback. No name begins with `affinity-`, because the Go kube-proxy deletes
    such sets, and the kernel refuses the deletion while our chains use them."""

    # address . protocol . port . slot : destination
    ENDPOINTS = "endpoints"
    LOCAL_ENDPOINTS = "local-endpoints"
    NODEPORT_ENDPOINTS = "nodeport-endpoints"
    LOCAL_NODEPORT_ENDPOINTS = "local-nodeport-endpoints"
    # frontend : class of its pool, one map for each treatment
    CLUSTER_SERVICES = "cluster-services"
    EXTERNAL_SERVICES = "external-services"
    POLICY_LOCAL_SERVICES = "policy-local-services"
    EXTERNAL_NODEPORTS = "external-nodeports"
    POLICY_LOCAL_NODEPORTS = "policy-local-nodeports"
    # frontend of policy-local-* : class of its local pool
    LOCAL_SERVICES = "local-services"
    LOCAL_NODEPORTS = "local-nodeports"
    # frontend with session affinity or consistent hashing : goto its chain
    AFFINITY_SERVICES = "session-chains"
    LOCAL_AFFINITY_SERVICES = "local-session-chains"
    AFFINITY_NODEPORTS = "nodeport-session-chains"
    LOCAL_AFFINITY_NODEPORTS = "local-nodeport-session-chains"
    STICKY_NODEPORTS = "sticky-nodeports"  # the keys of nodeport-session-chains as a set
    # frontend with session affinity : its pool's number
    AFFINITY_POOLS = "session-pools"
    LOCAL_AFFINITY_POOLS = "local-session-pools"
    NODEPORT_AFFINITY_POOLS = "nodeport-session-pools"
    LOCAL_NODEPORT_AFFINITY_POOLS = "local-nodeport-session-pools"
    # pools with session affinity, by their numbers
    SESSION_CLASSES = "session-classes"  # pool : class
    SESSION_SLOTS = "session-slots"  # pool . slot : the endpoint's number
    SESSION_ENDPOINTS = "session-endpoints"  # the endpoint's number . protocol : destination
    SESSION_OWN = "session-own"  # an endpoint's number . address . port, if the endpoint is also a frontend
    CLUSTER_IPS = "cluster-ips"
    HAIRPIN = "hairpin-endpoints"
    NO_ENDPOINT_SERVICES = "unserved-services"
    NO_LOCAL_ENDPOINT_SERVICES = "no-local-endpoint-services"
    NO_ENDPOINT_NODEPORTS = "unserved-nodeports"
    NO_LOCAL_ENDPOINT_NODEPORTS = "no-local-endpoint-nodeports"
    FIREWALL_IPS = "firewalled-services"
    FIREWALL_LISTS = "firewall-lists"  # frontend with source ranges : number of its Service's list of ranges
    FIREWALL_ALLOW = "firewall-allow"
    NODEPORT_IPS = "nodeport-ips"
    # address . protocol . range of ports : its pool's number
    CLUSTER_RANGES = "cluster-ranges"
    EXTERNAL_RANGES = "external-ranges"
    POLICY_LOCAL_RANGES = "policy-local-ranges"
    LOCAL_RANGES = "local-ranges"
    # address . protocol . range of ports : number that identifies the Service's list of source ranges
    FIREWALL_RANGES = "firewall-ranges"
    NO_ENDPOINT_RANGES = "unserved-ranges"
    NO_LOCAL_ENDPOINT_RANGES = "no-local-endpoint-ranges"
    RANGE_ENDPOINTS = "range-endpoints"  # an endpoint's number : its address
    RANGE_CHAINS = "range-session-chains"  # number that identifies a pool with session affinity : goto its chain


ENDPOINT_MAPS: Final = (
    SetId.ENDPOINTS,
    SetId.LOCAL_ENDPOINTS,
    SetId.NODEPORT_ENDPOINTS,
    SetId.LOCAL_NODEPORT_ENDPOINTS,
)
CLASS_MAPS: Final = (
    SetId.CLUSTER_SERVICES,
    SetId.EXTERNAL_SERVICES,
    SetId.POLICY_LOCAL_SERVICES,
    SetId.EXTERNAL_NODEPORTS,
    SetId.POLICY_LOCAL_NODEPORTS,
    SetId.LOCAL_SERVICES,
    SetId.LOCAL_NODEPORTS,
)
VERDICT_MAPS: Final = (
    SetId.AFFINITY_SERVICES,
    SetId.LOCAL_AFFINITY_SERVICES,
    SetId.AFFINITY_NODEPORTS,
    SetId.LOCAL_AFFINITY_NODEPORTS,
)
POOL_MAPS: Final = (
    SetId.AFFINITY_POOLS,
    SetId.LOCAL_AFFINITY_POOLS,
    SetId.NODEPORT_AFFINITY_POOLS,
    SetId.LOCAL_NODEPORT_AFFINITY_POOLS,
)
"""Maps with pool numbers as data. VERDICT_MAPS and POOL_MAPS have the order of ENDPOINT_MAPS."""
POOLS_OF: Final = dict(zip(ENDPOINT_MAPS, POOL_MAPS, strict=True))

COUNTED_MAPS: Final = (*ENDPOINT_MAPS, SetId.SESSION_ENDPOINTS, SetId.RANGE_ENDPOINTS)
"""Maps with a counter of connections in each element: each connection passes exactly one element."""

RANGE_POOLS: Final = (SetId.CLUSTER_RANGES, SetId.EXTERNAL_RANGES, SetId.POLICY_LOCAL_RANGES, SetId.LOCAL_RANGES)
RANGE_MAPS: Final = (*RANGE_POOLS, SetId.FIREWALL_RANGES)
INTERVALS: Final = (*RANGE_MAPS, SetId.NO_ENDPOINT_RANGES, SetId.NO_LOCAL_ENDPOINT_RANGES)
"""Sets and maps with one element for each range of ports at an address."""
OF_RANGES: Final = (*INTERVALS, SetId.RANGE_ENDPOINTS, SetId.RANGE_CHAINS)
"""Sets and maps that a table has only if a Service has ranges of ports."""

NUMBER_MAPS: Final = (*POOL_MAPS, SetId.FIREWALL_LISTS)
"""Maps from frontends to numbers, which have the type of addresses."""

SESSION_SETS: Final = (SetId.SESSION_CLASSES, SetId.SESSION_SLOTS, SetId.SESSION_ENDPOINTS, SetId.SESSION_OWN)
"""Sets and maps of pools with session affinity. The keys begin with a pool's or an endpoint's number."""

LARGEST_NUMBER: Final = (1 << 30) - 1
"""The largest number that identifies a service port, list or endpoint. With one more bit for the pool, a number fits
into an IPv4 address."""

FIRST_ENDPOINT: Final = 3 << 30
"""The number in the kernel for endpoint number 0; numbers of pools are smaller."""

SHARED: Final = (SetId.CLUSTER_IPS, SetId.HAIRPIN)
"""Sets with elements that several service ports share: an element is removed when no service port uses it."""

_REACHED: Final = (
    (
        SetId.LOCAL_SERVICES,
        SetId.LOCAL_NODEPORTS,
        SetId.LOCAL_AFFINITY_SERVICES,
        SetId.LOCAL_AFFINITY_NODEPORTS,
        SetId.FIREWALL_LISTS,
        SetId.LOCAL_RANGES,
        SetId.FIREWALL_RANGES,
    ),
    (*POOL_MAPS, SetId.FIREWALL_ALLOW, SetId.RANGE_CHAINS),
    (SetId.SESSION_CLASSES,),
    (*ENDPOINT_MAPS, SetId.SESSION_SLOTS),
    (SetId.SESSION_ENDPOINTS, SetId.SESSION_OWN, SetId.RANGE_ENDPOINTS),
)
LOOKUPS: Final = (tuple([name for name in SetId if not any(name in sets for sets in _REACHED)]), *_REACHED)
"""All sets and maps in the order of a packet's lookups: an element leads a packet only to elements of later groups."""


SERVICE_CIDRS: Final = "service-cidrs"
"""Name of the set with the ranges of cluster IPs."""

TRANSPORTS: Final = "transports"
"""Name of the set of supported transport protocols. A rule must match the protocol before a port."""

COUNTERS: Final = {f"localhost-{name.lower()}": name for name in PROTOCOL_NAMES.values()}
"""Names of the table's counters of refused packets, each with the protocol of the counted packets."""


def class_of(count: int) -> int:
    """Return the class of a number of endpoints. Endpoints beyond the largest class are never picked."""
    return CLASSES[min(bisect_left(CLASSES, count), len(CLASSES) - 1)]


def tries(size: int) -> int:
    """Return how many times the rules pick from a class before they pick from the next smaller class, which has no
    unused slots."""
    most = 1 - (BELOW.get(size, 0) + 1) / size
    return max(1, ceil(log(_MISSED) / log(most))) if most else 1


@lru_cache(maxsize=4096)
def packed_class(count: int) -> bytes:
    """Return the class of a number of endpoints, packed into two bytes in network byte order."""
    return class_of(count).to_bytes(2, "big")


STICKY_SLOTS: Final = 512
"""Maximum number of slots of a pool with weights and session affinity, unless the pool has more endpoints."""

ERROR: Final = 0.019
"""Largest relative error of an endpoint's share, a little below the documented 2 %."""


@lru_cache(maxsize=256)
def slot_counts(weights: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the number of slots of each endpoint, for weights above 0: at most `most` in total, but at least one per
    endpoint. If `most` slots are too few for shares within ERROR, the function returns the best approximation."""
    counts = Counter(weights)
    kinds = tuple(sorted(counts))
    chosen = dict(zip(kinds, _chosen(kinds, tuple([counts[kind] for kind in kinds]), most), strict=True))
    return tuple([chosen[weight] for weight in weights])


@lru_cache(maxsize=256)
def _chosen(kinds: tuple[int, ...], counts: tuple[int, ...], most: int) -> tuple[int, ...]:
    smallest, best, least = kinds[0], (1,) * len(kinds), float("inf")
    # If the smallest weight gets smallest / gcd slots, no number of slots is rounded. The loop tries up to four times
    # as many slots, because the total may then be closer to the size of its class, so that fewer picks hit an empty
    # slot.
    for few in range(1, 4 * smallest // gcd(*kinds) + 1):
        slots = tuple([max(1, (2 * kind * few + smallest) // (2 * smallest)) for kind in kinds])
        total = sum([n * count for n, count in zip(slots, counts, strict=True)])
        if total > most:
            break
        error = _error(kinds, counts, slots, total)
        if error < least:
            best, least = slots, error
        if error <= ERROR:
            break
    if least == float("inf"):
        total = sum([kind * count for kind, count in zip(kinds, counts, strict=True)])
        best = tuple([max(1, kind * most // total) for kind in kinds])
    return best


def _error(kinds: tuple[int, ...], counts: tuple[int, ...], slots: tuple[int, ...], total: int) -> float:
    """Return the largest relative error of a share. The slots of the next smaller class get more than their share,
    because the rules pick from that class after every try has picked an unused slot."""
    size = class_of(total)
    missed = (1 - total / size) ** tries(size)
    more = missed * (total / BELOW[size] - 1) if missed else 0
    whole = sum([kind * count for kind, count in zip(kinds, counts, strict=True)])
    ratios = [n * whole / (total * kind) for n, kind in zip(slots, kinds, strict=True)]
    return max(1 - min(ratios) * (1 - missed), max(ratios) * (1 + more) - 1)


class Packing(IntEnum):
    """The way in which the elements of a set are packed."""

    PLAIN = 0
    DESTINATION = 1  # address and port, in whole registers
    VERDICT = 2
    INTERVAL = 3  # a range of keys; the data, if any, is a number
    NUMBER = 4  # an identifying number, in the size of an address
    CLASS = 5  # a class, in the size of a port


class SetShape(NamedTuple):
    """A set's declaration, the fields of its key, and the packing of its elements."""

    spec: SetSpec
    fields: tuple[str, ...]  # number (as an address), address, protocol, port, slot
    kind: Packing

    def key_size(self, family: Family) -> int:
        """Return the size of a key in bytes; each field fills whole 4-byte registers."""
        return sum(family.address_size if f in {"address", "number"} else 4 for f in self.fields)

    def data_size(self, family: Family) -> int:
        """Return the size of an element's data in bytes; 0 for plain sets and verdicts."""
        sizes = {Packing.DESTINATION: family.address_size + 4, Packing.NUMBER: family.address_size, Packing.CLASS: 2}
        return sizes.get(self.kind, 0)


_OTHER_KEYS: dict[str, tuple[str, ...]] = {
    SetId.CLUSTER_IPS: ("address",),
    SetId.NODEPORT_IPS: ("address",),
    SetId.HAIRPIN: ("source", "address"),
    SetId.FIREWALL_ALLOW: ("address", "source"),
    SetId.SESSION_CLASSES: ("number",),
    SetId.SESSION_SLOTS: ("number", "slot"),
    SetId.SESSION_ENDPOINTS: ("number", "protocol"),
    SetId.SESSION_OWN: ("number", "address", "port"),
    SetId.RANGE_ENDPOINTS: ("number",),
    SetId.RANGE_CHAINS: ("number",),
}


def _key_fields(name: str) -> tuple[str, ...]:
    if name in _OTHER_KEYS:
        return _OTHER_KEYS[name]
    fields = ("protocol", "port") if "nodeport" in name else ("address", "protocol", "port")
    return (*fields, "slot") if name in ENDPOINT_MAPS else fields


class Layout:
    """The sets of one family, in the order of their creation; of the sets in OF_RANGES, only those in `extra`."""

    def __init__(self, family: Family, extra: Collection[SetId] = ()) -> None:
        self.family = family
        self.ip = "ip" if family is Family.IPV4 else "ip6"
        names = [name for name in SetId if name not in OF_RANGES or name in extra]
        self.shapes: dict[str, SetShape] = {str(name): self._shape(str(name)) for name in names}

    def _shape(self, name: str) -> SetShape:
        fields = _key_fields(name)
        words = {
            "address": f"{self.ip} daddr",
            "number": f"{self.ip} daddr",
            "source": f"{self.ip} saddr",
            "protocol": "meta l4proto",
            "port": "th dport",
            "slot": "numgen random mod 2",
        }
        kind, flags = Packing.PLAIN, 0
        data: tuple[str, ...] = ()
        if name in ENDPOINT_MAPS or name == SetId.SESSION_ENDPOINTS:
            kind, data = Packing.DESTINATION, (f"{self.ip} daddr", "th dport")
        elif name in VERDICT_MAPS or name == SetId.RANGE_CHAINS:
            kind, data = Packing.VERDICT, VERDICT
        elif name in NUMBER_MAPS or name in {SetId.SESSION_SLOTS, SetId.RANGE_ENDPOINTS}:
            kind, data = Packing.NUMBER, (f"{self.ip} daddr",)
        elif name in CLASS_MAPS or name == SetId.SESSION_CLASSES:
            kind, data = Packing.CLASS, ("th dport",)
        elif name == SetId.FIREWALL_ALLOW:
            kind, flags = Packing.INTERVAL, INTERVAL
        elif name in INTERVALS:
            kind, flags, data = Packing.INTERVAL, INTERVAL, (f"{self.ip} daddr",) if name in RANGE_MAPS else ()
        spec = SetSpec(name, tuple([words[f] for f in fields]), data, flags)
        return SetShape(spec, tuple(["address" if f == "source" else f for f in fields]), kind)


CLIENTS: Final = "session-clients"
"""Name of the map of clients with session affinity. Key: a hash of the client's address, and the pool's number; data:
the endpoint's number."""

POOL_SETS: Final = (*ENDPOINT_MAPS, SetId.SESSION_SLOTS)
"""Maps with keys that end with the slot of a pool."""

PADDING: Final[dict[str, bytes]] = {**dict.fromkeys(ENDPOINT_MAPS, b"\0\0"), SetId.SESSION_SLOTS: b""}
"""For each map, the padding after an entry of a pool. It extends the port to a whole register."""


def pool_number(number: int, policy: Policy, family: Family) -> bytes:
    """Return the packed number of a service port's pool in the sets of clients. The last bit of the number is the
    policy."""
    return (2 * number + policy).to_bytes(family.address_size, "big")


def endpoint_number(number: int, family: Family) -> bytes:
    """Return the packed number of an endpoint of a pool with session affinity."""
    return (FIRST_ENDPOINT + number).to_bytes(family.address_size, "big")


def protocol_field(protocol: int) -> bytes:
    """Return a protocol, padded to a whole register."""
    return bytes((protocol, 0, 0, 0))


def list_number(number: int, family: Family) -> bytes:
    """Return the packed number of a list of source ranges, padded to the size of an address."""
    return pool_number(number, Policy.CLUSTER, family)


def service_port_number(packed: bytes) -> int:
    """Return the number of a service port or list, given the packed number of its pool or the packed list number."""
    return int.from_bytes(packed, "big") >> 1


def slot_bytes(count: int) -> list[bytes]:
    """Return the packed slot numbers 0 to count - 1, and possibly more, in host byte order like numgen's results."""
    if count > len(_SLOTS):
        _SLOTS.extend(slot.to_bytes(4, "little") for slot in range(len(_SLOTS), count * 2))
    return _SLOTS


def slot_keys(key: bytes, count: int) -> list[bytes]:
    """Return the element keys of the first slots of a frontend."""
    return [key + slot for slot in slot_bytes(count)[:count]]


def service_key(frontend_key: bytes) -> bytes:
    """Return the element key of a frontend: address (if any), protocol and port, each in whole registers."""
    return frontend_key[:-3] + _registers(frontend_key[-3:])


def range_key(span: PortRange) -> bytes:
    """Return the element key of a range of ports: the keys of the first and the last port."""
    return service_key(span.key) + service_key(span.key[:-2] + PORT_BYTES[span.last])


@lru_cache(maxsize=4096)
def _registers(tail: bytes) -> bytes:
    return tail[:1] + b"\0\0\0" + tail[1:] + b"\0\0"


class ChainName(NamedTuple):
    """A chain that several Services share, created for the first Service that needs it. `treatment` is one of
    TREATMENTS. `affinity` is the timeout of a session affinity chain in seconds, else 0; `size` is the table size of a
    Maglev chain, else 0."""

    nodeport: bool
    treatment: str
    size: int = 0
    affinity: int = 0

    def __str__(self) -> str:
        return f"{'nodeport-' if self.nodeport else ''}{self.treatment}-{self.size or f'{self.affinity}s'}"

    @property
    def endpoint_map(self) -> SetId:
        """Return the endpoint map from which this chain picks."""
        if self.treatment.startswith("local-"):
            return SetId.LOCAL_NODEPORT_ENDPOINTS if self.nodeport else SetId.LOCAL_ENDPOINTS
        return SetId.NODEPORT_ENDPOINTS if self.nodeport else SetId.ENDPOINTS

    @property
    def hashed(self) -> str:
        """Return the element of HASHED for a chain of Maglev, else ''."""
        return next((word for word in HASHED[::-1] if self.treatment.endswith(word)), "")

    @property
    def picks(self) -> bool:
        """Return whether the chain has a single rule, which picks from a map."""
        return self.treatment.removeprefix("local-") in HASHED

    @property
    def of_ranges(self) -> bool:
        """Return whether the chain serves ranges of ports."""
        return self.treatment.startswith("range-")


HASHED: Final = ("maglev", "client-maglev")
"""Names of the treatments that pick an endpoint by a hash, in the order of plan.HashKey."""

_SEQUENCE: Final = ("cluster", "external", "policy-local")
"""Treatments of a connection: `cluster` masquerades if the globals require it, `external` always. `policy-local`
forwards connections of pods and this node to the cluster pool, and all other connections to the local pool."""

TREATMENTS: Final = (
    *_SEQUENCE,
    "pick",  # finds pool and client
    "local-pick",
    "recall",  # a known client
    "local-recall",
    "remember",  # a new client
    *("range-pick", "range-recall", "range-remember"),  # the same for ranges of ports
    *(f"{treatment}-{word}" for treatment in (*_SEQUENCE, "local") for word in HASHED),
    *HASHED,
)

_CHAIN_NAME: Final = re.compile(rf"(nodeport-)?({'|'.join(TREATMENTS)})-(?:([1-9][0-9]*)|([1-9][0-9]*)s)")


def parse_chain_name(text: str) -> ChainName | None:
    """Parse the name of a chain of session affinity or of Maglev; return None for any other name."""
    found = _CHAIN_NAME.fullmatch(text)
    if found is None:
        return None
    nodeport, treatment, size, affinity = found.groups()
    name = ChainName(nodeport is not None, treatment, int(size or 0), int(affinity or 0))
    # Another program's chain may have any number in its name. Names of static chains, such as pick-4, match too.
    possible = name.size < SLOTS and name.affinity <= LONGEST_AFFINITY and bool(name.size) == bool(name.hashed)
    return name if possible else None
