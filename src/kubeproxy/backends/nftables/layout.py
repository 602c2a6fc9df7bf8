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
from typing import Final, NamedTuple, Self

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


class Packing(IntEnum):
    """The way in which the elements of a set are packed."""

    PLAIN = 0
    DESTINATION = 1  # address and port, in whole registers
    VERDICT = 2
    INTERVAL = 3  # a range of keys; the data, if any, is a number
    NUMBER = 4  # an identifying number, in the size of an address
    CLASS = 5  # a class, in the size of a port


_NODEPORT: Final = "protocol port"
_FRONT: Final = f"address {_NODEPORT}"


class SetId(StrEnum):
    """Names of our sets and maps in the kernel, with the fields of a key, the packing of an element, and the stage in
    the order of a packet's lookups: an element leads a packet only to elements of later stages. The field `number` has
    the size of an address. No map of the Go kube-proxy has one of these names, because the Go kube-proxy takes over our
    table after a rollback. No name begins with `affinity-`, because the Go kube-proxy deletes such sets, and the kernel
    refuses the deletion while our chains use them."""

    fields: tuple[str, ...]
    packing: Packing
    stage: int

    def __new__(cls, name: str, fields: str = "", packing: Packing = Packing.PLAIN, stage: int = 0) -> Self:
        """Create a name with its properties."""
        made = str.__new__(cls, name)
        made._value_, made.fields, made.packing, made.stage = name, tuple(fields.split()), packing, stage
        return made

    ENDPOINTS = "endpoints", f"{_FRONT} slot", Packing.DESTINATION, 4
    LOCAL_ENDPOINTS = "local-endpoints", f"{_FRONT} slot", Packing.DESTINATION, 4
    NODEPORT_ENDPOINTS = "nodeport-endpoints", f"{_NODEPORT} slot", Packing.DESTINATION, 4
    LOCAL_NODEPORT_ENDPOINTS = "local-nodeport-endpoints", f"{_NODEPORT} slot", Packing.DESTINATION, 4
    # the class of a frontend's pool, one map for each treatment
    CLUSTER_SERVICES = "cluster-services", _FRONT, Packing.CLASS
    EXTERNAL_SERVICES = "external-services", _FRONT, Packing.CLASS
    POLICY_LOCAL_SERVICES = "policy-local-services", _FRONT, Packing.CLASS
    EXTERNAL_NODEPORTS = "external-nodeports", _NODEPORT, Packing.CLASS
    POLICY_LOCAL_NODEPORTS = "policy-local-nodeports", _NODEPORT, Packing.CLASS
    # the class of the local pool, for frontends in policy-local-*
    LOCAL_SERVICES = "local-services", _FRONT, Packing.CLASS, 1
    LOCAL_NODEPORTS = "local-nodeports", _NODEPORT, Packing.CLASS, 1
    # goto the chain of a frontend with session affinity or consistent hashing
    AFFINITY_SERVICES = "session-chains", _FRONT, Packing.VERDICT
    LOCAL_AFFINITY_SERVICES = "local-session-chains", _FRONT, Packing.VERDICT, 1
    AFFINITY_NODEPORTS = "nodeport-session-chains", _NODEPORT, Packing.VERDICT
    LOCAL_AFFINITY_NODEPORTS = "local-nodeport-session-chains", _NODEPORT, Packing.VERDICT, 1
    STICKY_NODEPORTS = "sticky-nodeports", _NODEPORT  # the keys of nodeport-session-chains as a set
    # the number of the pool of a frontend with session affinity
    AFFINITY_POOLS = "session-pools", _FRONT, Packing.NUMBER, 2
    LOCAL_AFFINITY_POOLS = "local-session-pools", _FRONT, Packing.NUMBER, 2
    NODEPORT_AFFINITY_POOLS = "nodeport-session-pools", _NODEPORT, Packing.NUMBER, 2
    LOCAL_NODEPORT_AFFINITY_POOLS = "local-nodeport-session-pools", _NODEPORT, Packing.NUMBER, 2
    # pools with session affinity, by their numbers
    SESSION_CLASSES = "session-classes", "number", Packing.CLASS, 3
    SESSION_SLOTS = "session-slots", "number slot", Packing.NUMBER, 4  # the endpoint's number
    SESSION_ENDPOINTS = "session-endpoints", "number protocol", Packing.DESTINATION, 5  # by the endpoint's number
    SESSION_OWN = "session-own", "number address port", Packing.PLAIN, 5  # an endpoint that is also a frontend
    CLUSTER_IPS = "cluster-ips", "address"
    HAIRPIN = "hairpin-endpoints", "source address"
    NO_ENDPOINT_SERVICES = "unserved-services", _FRONT
    NO_LOCAL_ENDPOINT_SERVICES = "no-local-endpoint-services", _FRONT
    NO_ENDPOINT_NODEPORTS = "unserved-nodeports", _NODEPORT
    NO_LOCAL_ENDPOINT_NODEPORTS = "no-local-endpoint-nodeports", _NODEPORT
    FIREWALL_IPS = "firewalled-services", _FRONT
    FIREWALL_LISTS = "firewall-lists", _FRONT, Packing.NUMBER, 1  # the number of the Service's list of source ranges
    FIREWALL_ALLOW = "firewall-allow", "address source", Packing.INTERVAL, 2  # the address is the list's number
    NODEPORT_IPS = "nodeport-ips", "address"
    # for each range of ports: the number that identifies its pool
    CLUSTER_RANGES = "cluster-ranges", _FRONT, Packing.INTERVAL
    EXTERNAL_RANGES = "external-ranges", _FRONT, Packing.INTERVAL
    POLICY_LOCAL_RANGES = "policy-local-ranges", _FRONT, Packing.INTERVAL
    LOCAL_RANGES = "local-ranges", _FRONT, Packing.INTERVAL, 1
    FIREWALL_RANGES = "firewall-ranges", _FRONT, Packing.INTERVAL, 1  # the number of the list of source ranges
    NO_ENDPOINT_RANGES = "unserved-ranges", _FRONT, Packing.INTERVAL
    NO_LOCAL_ENDPOINT_RANGES = "no-local-endpoint-ranges", _FRONT, Packing.INTERVAL
    RANGE_ENDPOINTS = "range-endpoints", "number", Packing.NUMBER, 5  # the address of an endpoint, by its number
    RANGE_CHAINS = "range-session-chains", "number", Packing.VERDICT, 2  # goto the chain of a pool with affinity

    def key_size(self, family: Family) -> int:
        """Return the size of a key in bytes; each field fills whole 4-byte registers."""
        return sum(4 if field in {"protocol", "port", "slot"} else family.address_size for field in self.fields)

    def data_size(self, family: Family) -> int:
        """Return the size of an element's data in bytes; 0 for plain sets, verdicts and intervals."""
        sizes = {Packing.DESTINATION: family.address_size + 4, Packing.NUMBER: family.address_size, Packing.CLASS: 2}
        return sizes.get(self.packing, 0)


def _sets(field: str, packing: Packing | None = None) -> tuple[SetId, ...]:
    """Return the sets with this field in their keys, and with this packing."""
    return tuple(name for name in SetId if field in name.fields and packing in {None, name.packing})


ENDPOINT_MAPS: Final = _sets("slot", Packing.DESTINATION)
CLASS_MAPS: Final = _sets("port", Packing.CLASS)
VERDICT_MAPS: Final = _sets("port", Packing.VERDICT)
NUMBER_MAPS: Final = _sets("port", Packing.NUMBER)
"""Maps from frontends to numbers."""
POOL_MAPS: Final = tuple(name for name in NUMBER_MAPS if name != SetId.FIREWALL_LISTS)
"""Maps with pool numbers as data. VERDICT_MAPS and POOL_MAPS have the order of ENDPOINT_MAPS."""
POOLS_OF: Final = dict(zip(ENDPOINT_MAPS, POOL_MAPS, strict=True))

COUNTED_MAPS: Final = (*ENDPOINT_MAPS, SetId.SESSION_ENDPOINTS, SetId.RANGE_ENDPOINTS)
"""Maps with a counter of connections in each element: each connection passes exactly one element."""

RANGE_POOLS: Final = (SetId.CLUSTER_RANGES, SetId.EXTERNAL_RANGES, SetId.POLICY_LOCAL_RANGES, SetId.LOCAL_RANGES)
RANGE_MAPS: Final = (*RANGE_POOLS, SetId.FIREWALL_RANGES)
INTERVALS: Final = _sets("port", Packing.INTERVAL)
"""Sets and maps with one element for each range of ports at an address."""
OF_RANGES: Final = (*INTERVALS, SetId.RANGE_ENDPOINTS, SetId.RANGE_CHAINS)
"""Sets and maps that a table has only if a Service has ranges of ports."""

SESSION_SETS: Final = (SetId.SESSION_CLASSES, SetId.SESSION_SLOTS, SetId.SESSION_ENDPOINTS, SetId.SESSION_OWN)
"""Sets and maps of pools with session affinity."""
OF_NUMBERS: Final = _sets("number")
"""Sets and maps with keys that begin with a pool's or an endpoint's number."""

LARGEST_NUMBER: Final = (1 << 30) - 1
"""The largest number that identifies a service port, list or endpoint. With one more bit for the pool, a number fits
into an IPv4 address."""

FIRST_ENDPOINT: Final = 3 << 30
"""The number in the kernel for endpoint number 0; numbers of pools are smaller."""

SHARED: Final = (SetId.CLUSTER_IPS, SetId.HAIRPIN)
"""Sets with elements that several service ports share: an element is removed when no service port uses it."""

LOOKUPS: Final = tuple(tuple(name for name in SetId if name.stage == stage) for stage in range(6))
"""All sets and maps in the order of a packet's lookups."""

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
    # as many slots, because the total may then be closer to the size of its class, so that fewer picks hit an unused
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
    because the rules pick from that class if all tries have picked unused slots."""
    size = class_of(total)
    missed = (1 - total / size) ** tries(size)
    more = missed * (total / BELOW[size] - 1) if missed else 0
    whole = sum([kind * count for kind, count in zip(kinds, counts, strict=True)])
    ratios = [n * whole / (total * kind) for n, kind in zip(slots, kinds, strict=True)]
    return max(1 - min(ratios) * (1 - missed), max(ratios) * (1 + more) - 1)


class Layout:
    """The sets of one family in creation order. Sets in OF_RANGES are included only if `extra` contains them."""

    def __init__(self, family: Family, extra: Collection[SetId] = ()) -> None:
        self.family = family
        self.ip = "ip" if family is Family.IPV4 else "ip6"
        self.sets = {str(name): self._spec(name) for name in SetId if name not in OF_RANGES or name in extra}

    def _spec(self, name: SetId) -> SetSpec:
        address, port = f"{self.ip} daddr", "th dport"
        words = {
            "address": address,
            "number": address,
            "source": f"{self.ip} saddr",
            "protocol": "meta l4proto",
            "port": port,
            "slot": "numgen random mod 2",
        }
        data = {
            Packing.DESTINATION: (address, port),
            Packing.VERDICT: VERDICT,
            Packing.INTERVAL: (address,) if name in RANGE_MAPS else (),
            Packing.NUMBER: (address,),
            Packing.CLASS: (port,),
        }
        flags = INTERVAL if name.packing is Packing.INTERVAL else 0
        return SetSpec(str(name), tuple([words[field] for field in name.fields]), data.get(name.packing, ()), flags)


CLIENTS: Final = "session-clients"
"""Name of the map of clients with session affinity. Key: a hash of the client's address, and the pool's number; data:
the endpoint's number."""

POOL_SETS: Final = (*ENDPOINT_MAPS, SetId.SESSION_SLOTS)
"""Maps with keys that end with the slot of a pool."""

PADDING: Final[dict[str, bytes]] = {**dict.fromkeys(ENDPOINT_MAPS, b"\0\0"), SetId.SESSION_SLOTS: b""}
"""For each map, the bytes after an entry of a pool, which extend the entry's port to a whole register."""


def pool_number(number: int, policy: Policy, family: Family) -> bytes:
    """Return the packed number of a service port's pool for a policy. The last bit of the packed number is the
    policy."""
    return (2 * number + policy).to_bytes(family.address_size, "big")


def endpoint_number(number: int, family: Family) -> bytes:
    """Return the packed number of an endpoint of a pool with session affinity."""
    return (FIRST_ENDPOINT + number).to_bytes(family.address_size, "big")


def protocol_field(protocol: int) -> bytes:
    """Return a protocol, padded to a whole register."""
    return bytes((protocol, 0, 0, 0))


def list_number(number: int, family: Family) -> bytes:
    """Return the packed number of a list of source ranges, in the size of an address."""
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
        """Return the element of HASHED in a Maglev chain's treatment; '' for any other chain."""
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
"""Treatments of a connection: `cluster` masquerades if the globals require it, `external` masquerades always.
`policy-local` forwards connections of pods and this node to the cluster pool, and all others to the local pool."""

TREATMENTS: Final = (
    *_SEQUENCE,
    "pick",  # looks up the pool, and the client in the map of clients
    "local-pick",
    "recall",  # forwards a known client to its endpoint
    "local-recall",
    "remember",  # picks and stores the endpoint of a new client
    *("range-pick", "range-recall", "range-remember"),  # pick, recall and remember for ranges of ports
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
    # Another program's chain may have any number in its name. Static chains, such as pick-4, match _CHAIN_NAME too.
    possible = name.size < SLOTS and name.affinity <= LONGEST_AFFINITY and bool(name.size) == bool(name.hashed)
    return name if possible else None
