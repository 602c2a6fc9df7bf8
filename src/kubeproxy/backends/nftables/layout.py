"""Layout of our table: its sets and maps, the packing of their keys, classes and slots of pools, and names of chains.

Pure data for rules and elements. Source: docs/nftables.md "Sets and maps by name".
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from enum import IntEnum, StrEnum
from functools import lru_cache
from itertools import pairwise
from math import ceil, gcd, log
from typing import Final, NamedTuple

from kubeproxy.backends import nftables
from kubeproxy.kernel.nftables.tables import INTERVAL, VERDICT, SetSpec
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family
from kubeproxy.model.plan import LONGEST_AFFINITY, Policy

TABLE: Final = nftables.TABLE
SCRATCH: Final = f"{TABLE}-check"
"""A temporary table of earlier versions, which remains if they are killed."""

SLOTS: Final = 1 << 16
"""Exclusive upper bound of the number of slots of a frontend."""

EXACT: Final = 8
"""Up to this number of endpoints each number is its own class."""

CLASSES: Final[tuple[int, ...]] = (
    *range(1, EXACT + 1),
    *(10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256),
    *(1024, 4096, 16384, 65535),
)
"""The classes: the number of endpoints in a pool is rounded up to the next of these. A rule picks a random slot of a
class.

The kernel checks each new element against the rule of each class, so with twice as many classes a full sync takes a
sixth longer. The largest class still fits into the two bytes of a class in a map.
"""

BELOW: Final[dict[int, int]] = dict(pairwise(reversed(CLASSES)))
"""The next smaller class of each class except the first."""

_MISSED: Final = 0.005
"""Share of picks that may miss in every try and fall to the class below: the largest error of an endpoint's share."""

_SLOTS: list[bytes] = [slot.to_bytes(4, "little") for slot in range(1024)]


class SetId(StrEnum):
    """Names of our sets and maps in the kernel.

    After a rollback the Go kube-proxy takes over our table. So no set has the name of one of its maps, and none begins
    with `affinity-`: it deletes such sets, which the kernel refuses while our chains use them.
    """

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
    # frontend with session affinity : goto its chain
    AFFINITY_SERVICES = "session-services"
    LOCAL_AFFINITY_SERVICES = "local-session-services"
    AFFINITY_NODEPORTS = "session-nodeports"
    LOCAL_AFFINITY_NODEPORTS = "local-session-nodeports"
    STICKY_NODEPORTS = "sticky-nodeports"  # the keys of session-nodeports as a set
    # frontend with session affinity : number of its pool
    AFFINITY_POOLS = "session-pools"
    LOCAL_AFFINITY_POOLS = "local-session-pools"
    NODEPORT_AFFINITY_POOLS = "nodeport-session-pools"
    LOCAL_NODEPORT_AFFINITY_POOLS = "local-nodeport-session-pools"
    CLUSTER_IPS = "cluster-ips"
    HAIRPIN = "hairpin-endpoints"
    NO_ENDPOINT_SERVICES = "unserved-services"
    NO_LOCAL_ENDPOINT_SERVICES = "no-local-endpoint-services"
    NO_ENDPOINT_NODEPORTS = "unserved-nodeports"
    NO_LOCAL_ENDPOINT_NODEPORTS = "no-local-endpoint-nodeports"
    FIREWALL_IPS = "firewalled-services"
    FIREWALL_LISTS = "firewall-lists"  # frontend with source ranges : number of its Service's list of source ranges
    FIREWALL_ALLOW = "firewall-allow"
    NODEPORT_IPS = "nodeport-ips"


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
"""In the order of ENDPOINT_MAPS, as VERDICT_MAPS."""
POOLS_OF: Final = dict(zip(ENDPOINT_MAPS, POOL_MAPS, strict=True))

NUMBER_MAPS: Final = (*POOL_MAPS, SetId.FIREWALL_LISTS)
"""Maps whose data are numbers, which have the type of addresses."""

LARGEST_NUMBER: Final = 1 << 30
"""Largest number of a service port or of a list: with one more bit, for the pool, a number fits into an IPv4
address."""

SHARED: Final = (SetId.CLUSTER_IPS, SetId.HAIRPIN)
"""Sets whose elements several service ports share: an element stays until no service port uses it."""


SERVICE_CIDRS: Final = "service-cidrs"
"""Name of the set with the ranges of cluster IPs."""

TRANSPORTS: Final = "transports"
"""Name of the set with the supported transport protocols: a rule must match one before it reads a port."""

COUNTERS: Final = {f"localhost-{name.lower()}": name for name in PROTOCOL_NAMES.values()}
"""Names of the table's counters of refused packets, with the protocol of each."""


def class_of(count: int) -> int:
    """Return the class of a number of endpoints. Endpoints beyond the largest class are never picked."""
    return CLASSES[min(bisect_left(CLASSES, count), len(CLASSES) - 1)]


def tries(size: int) -> int:
    """Return the number of picks from a class before a pick from the class below, whose slots are all in use."""
    most = 1 - (BELOW.get(size, 0) + 1) / size
    return max(1, ceil(log(_MISSED) / log(most))) if most else 1


@lru_cache(maxsize=4096)
def packed_class(count: int) -> bytes:
    """Return the class of a number of endpoints packed as in the kernel: a port."""
    return class_of(count).to_bytes(2, "big")


STICKY_SLOTS: Final = 512
"""Number of slots of a pool with session affinity; a pool with more endpoints has as many slots. Each slot needs a
rule."""

ERROR: Final = 0.019
"""Largest relative error of a share: a little below the documented 2 %."""


@lru_cache(maxsize=256)
def slot_counts(weights: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the number of slots of each endpoint, for weights above 0: at most `most` in total, or one per endpoint.

    If `most` slots are too few for shares within ERROR, it returns the best approximation.
    """
    counts = Counter(weights)
    kinds = tuple(sorted(counts))
    chosen = dict(zip(kinds, _chosen(kinds, tuple([counts[kind] for kind in kinds]), most), strict=True))
    return tuple([chosen[weight] for weight in weights])


@lru_cache(maxsize=256)
def _chosen(kinds: tuple[int, ...], counts: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the number of slots for each weight (smallest first); `counts` has the number of endpoints of each."""
    smallest, best, least = kinds[0], (1,) * len(kinds), float("inf")
    # smallest / gcd slots for the smallest weight need no rounding. With up to four times as many slots, the total
    # comes close to the size of its class, so few picks hit an empty slot.
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
    """Return the largest relative error of a share.

    A pick without a hit in every try uses the class below, so the slots of that class get more than their share.
    """
    size = class_of(total)
    missed = (1 - total / size) ** tries(size)
    more = missed * (total / BELOW[size] - 1) if missed else 0
    whole = sum([kind * count for kind, count in zip(kinds, counts, strict=True)])
    ratios = [n * whole / (total * kind) for n, kind in zip(slots, kinds, strict=True)]
    return max(1 - min(ratios) * (1 - missed), max(ratios) * (1 + more) - 1)


class Packing(IntEnum):
    """How the elements of a set are packed."""

    PLAIN = 0
    DESTINATION = 1
    VERDICT = 2
    INTERVAL = 3
    NUMBER = 4  # as an address
    CLASS = 5  # as a port


class SetShape(NamedTuple):
    """A set's declaration, the fields of its key, and the packing of its elements."""

    spec: SetSpec
    fields: tuple[str, ...]  # address, protocol, port, slot
    kind: Packing

    def key_size(self, family: Family) -> int:
        """Return the size of a key in bytes; each field fills whole 4-byte registers."""
        return sum(family.address_size if f == "address" else 4 for f in self.fields)

    def data_size(self, family: Family) -> int:
        """Return the size of an element's data in bytes; 0 for plain sets and verdicts."""
        sizes = {Packing.DESTINATION: family.address_size + 4, Packing.NUMBER: family.address_size, Packing.CLASS: 2}
        return sizes.get(self.kind, 0)


_OTHER_KEYS: dict[str, tuple[str, ...]] = {
    SetId.CLUSTER_IPS: ("address",),
    SetId.NODEPORT_IPS: ("address",),
    SetId.HAIRPIN: ("source", "address"),
    SetId.FIREWALL_ALLOW: ("address", "source"),
}


def _key_fields(name: str) -> tuple[str, ...]:
    if name in _OTHER_KEYS:
        return _OTHER_KEYS[name]
    fields = ("protocol", "port") if "nodeport" in name else ("address", "protocol", "port")
    return (*fields, "slot") if name in ENDPOINT_MAPS else fields


class Layout:
    """The sets of one family, in the order of their creation."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.ip = "ip" if family is Family.IPV4 else "ip6"
        self.shapes: dict[str, SetShape] = {str(name): self._shape(str(name)) for name in SetId}

    def _shape(self, name: str) -> SetShape:
        fields = _key_fields(name)
        words = {
            "address": f"{self.ip} daddr",
            "source": f"{self.ip} saddr",
            "protocol": "meta l4proto",
            "port": "th dport",
            "slot": "numgen random mod 2",
        }
        kind, flags = Packing.PLAIN, 0
        data: tuple[str, ...] = ()
        if name in ENDPOINT_MAPS:
            kind, data = Packing.DESTINATION, (f"{self.ip} daddr", "th dport")
        elif name in VERDICT_MAPS:
            kind, data = Packing.VERDICT, VERDICT
        elif name in NUMBER_MAPS:
            kind, data = Packing.NUMBER, (f"{self.ip} daddr",)
        elif name in CLASS_MAPS:
            kind, data = Packing.CLASS, ("th dport",)
        elif name == SetId.FIREWALL_ALLOW:
            kind, flags = Packing.INTERVAL, INTERVAL
        spec = SetSpec(name, tuple([words[f] for f in fields]), data, flags)
        return SetShape(spec, tuple(["address" if f == "source" else f for f in fields]), kind)


CLIENTS: Final = "clients-"


def client_set(slot: int) -> str:
    """Return the name of the set of clients of a slot, over all pools."""
    return f"{CLIENTS}{slot}"


def slot_of_clients(name: str) -> int | None:
    """Return the slot whose clients a set has; None if it is no set of clients."""
    slot = name.removeprefix(CLIENTS)
    return int(slot) if slot != name and slot.isdecimal() else None


def pool_number(number: int, policy: Policy, family: Family) -> bytes:
    """Return the packed number of a service port's pool in the sets of clients. Its last bit is the policy."""
    return (2 * number + policy).to_bytes(family.address_size, "big")


def list_number(number: int, family: Family) -> bytes:
    """Return the packed number of a list of source ranges in the set of all ranges, in the size of an address."""
    return pool_number(number, Policy.CLUSTER, family)


def service_port_number(packed: bytes) -> int:
    """Return the number of the service port or list in a packed number of a pool or list."""
    return int.from_bytes(packed, "big") >> 1


def slot_bytes(count: int) -> list[bytes]:
    """Return the packed slot numbers 0 to count - 1, and possibly more, in host byte order as numgen writes them."""
    if count > len(_SLOTS):
        _SLOTS.extend(slot.to_bytes(4, "little") for slot in range(len(_SLOTS), count * 2))
    return _SLOTS


def slot_keys(key: bytes, count: int) -> list[bytes]:
    """Return the element keys of the first slots of a frontend."""
    return [key + slot for slot in slot_bytes(count)[:count]]


def service_key(frontend_key: bytes) -> bytes:
    """Return the element key of a frontend: address (if any), protocol and port, each in whole registers."""
    return frontend_key[:-3] + _registers(frontend_key[-3:])


@lru_cache(maxsize=4096)
def _registers(tail: bytes) -> bytes:
    """Return protocol and port, each in a whole register."""
    return tail[:1] + b"\0\0\0" + tail[1:] + b"\0\0"


class ChainName(NamedTuple):
    """A chain of session affinity, shared by all Services with the same number of endpoints and the same timeout.

    `treatment` is one of TREATMENTS, `affinity` the timeout in seconds. `endpoints` is the number of endpoints; for
    slot and affinity chains the slot; for chains of Maglev the size of the table. Slot chains and chains of Maglev have
    no timeout.
    """

    nodeport: bool
    treatment: str
    endpoints: int
    affinity: int = 0

    def __str__(self) -> str:
        prefix = "nodeport-" if self.nodeport else ""
        suffix = f"-{self.affinity}s" if self.affinity else ""
        return f"{prefix}{self.treatment}-{self.endpoints}{suffix}"

    @property
    def local(self) -> str:
        """Return 'local-' for chains that pick from a local pool of a frontend with two pools, else ''."""
        return "local-" if self.treatment.startswith("local-") else ""

    @property
    def endpoint_map(self) -> SetId:
        """Return the endpoint map that the chain, or a chain it leads to, picks from."""
        if self.local:
            return SetId.LOCAL_NODEPORT_ENDPOINTS if self.nodeport else SetId.LOCAL_ENDPOINTS
        return SetId.NODEPORT_ENDPOINTS if self.nodeport else SetId.ENDPOINTS

    @property
    def is_slot(self) -> bool:
        """Return whether the chain always leads to the endpoint in one slot."""
        return self.treatment.endswith("slot")

    @property
    def is_possible(self) -> bool:
        """Return whether the numbers are in the range of our chains; another program's chain may have any."""
        counts_slots = self.is_slot or self.treatment.endswith("affinity")
        return (0 if counts_slots else 1) <= self.endpoints < SLOTS and self.affinity <= LONGEST_AFFINITY

    @property
    def hashed(self) -> str:
        """Return the element of HASHED for a chain of Maglev, else ''."""
        return next((word for word in HASHED[::-1] if self.treatment.endswith(word)), "")

    @property
    def picks(self) -> bool:
        """Return whether the chain is a single rule that picks from a map."""
        return self.is_slot or self.treatment.removeprefix("local-") in HASHED


HASHED: Final = ("maglev", "client-maglev")
"""Names of the treatments that pick an endpoint by a hash, in the order of plan.HashKey."""

TREATMENTS: Final = (
    "cluster",  # cluster IPs: masqueraded as the globals say
    "external",  # masqueraded
    "policy-local",  # externalTrafficPolicy Local: pods and this node, then the local endpoints
    "pick",
    "local-pick",
    "affinity",  # chains that remember the client, then the chains of the slots
    "local-affinity",
    "slot",
    "local-slot",
    *(f"{treatment}-{word}" for treatment in ("cluster", "external", "policy-local", "local") for word in HASHED),
    *HASHED,
)


def parse_chain_name(text: str) -> ChainName | None:
    """Parse the name of an affinity chain; return None for any other name."""
    nodeport = text.startswith("nodeport-")
    rest = text.removeprefix("nodeport-")
    for treatment in TREATMENTS:
        if rest.startswith(treatment + "-"):
            number, _, affinity = rest[len(treatment) + 1 :].partition("-")
            seconds = affinity.removesuffix("s")
            if not number.isdecimal() or (affinity and not (affinity.endswith("s") and seconds.isdecimal())):
                continue
            name = ChainName(nodeport, treatment, int(number), int(seconds or 0))
            # Only canonical names are parsed, and only slot and hashed chains lack a timeout: pick-4 is a static chain.
            untimed = name.is_slot or bool(name.hashed)
            return name if str(name) == text and bool(name.affinity) != untimed and name.is_possible else None
    return None
