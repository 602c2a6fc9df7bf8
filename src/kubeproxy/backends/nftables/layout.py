"""The shape of our table: which sets and maps there are, how their keys are packed, how chains are named.

Pure data, shared by the text of the ruleset and by the elements. Source: docs/nftables.md "Sets and maps by name".
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum, StrEnum
from functools import lru_cache
from itertools import pairwise
from math import ceil, log
from typing import Final, NamedTuple

from kubeproxy.backends import nftables
from kubeproxy.kernel.nftables.tables import INTERVAL, VERDICT, SetSpec
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family
from kubeproxy.model.plan import LONGEST_AFFINITY, Policy

TABLE: Final = nftables.TABLE
SCRATCH: Final = f"{TABLE}-check"
"""A table that earlier versions made for a moment, and that one which is killed then leaves."""

SLOTS: Final = 1 << 16
"""No frontend has so many slots."""

EXACT: Final = 8
"""Up to so many endpoints each number is a class of its own."""

CLASSES: Final[tuple[int, ...]] = (
    *range(1, EXACT + 1),
    *(10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256),
    *(1024, 4096, 16384, 65535),
)
"""Frontends are sorted by how many endpoints they have, rounded up to one of these; slots are picked from a class.

Each one is a rule that the kernel checks every new element against: twice as many make a full sync a sixth longer.
The largest one fits into a port.
"""

BELOW: Final[dict[int, int]] = dict(pairwise(reversed(CLASSES)))
"""The next smaller class of each but the first."""

_MISSED: Final = 0.005
"""How many picks may miss until the class below settles it: the share of an endpoint is that even, or more."""

_SLOTS: list[bytes] = [slot.to_bytes(4, "little") for slot in range(1024)]


class SetId(StrEnum):
    """Our sets and maps, by their names in the kernel.

    The Go kube-proxy takes our table over when a node goes back to it. So no set has the name of a map of its own, and
    none begins with `affinity-`: it deletes all sets that do, which the kernel refuses while our chains refer to them.
    """

    # address . protocol . port . slot : destination
    ENDPOINTS = "endpoints"
    LOCAL_ENDPOINTS = "local-endpoints"
    NODEPORT_ENDPOINTS = "nodeport-endpoints"
    LOCAL_NODEPORT_ENDPOINTS = "local-nodeport-endpoints"
    # frontends by what happens to their connections, to the class of what they pick from
    CLUSTER_SERVICES = "cluster-services"
    EXTERNAL_SERVICES = "external-services"
    POLICY_LOCAL_SERVICES = "policy-local-services"
    EXTERNAL_NODEPORTS = "external-nodeports"
    POLICY_LOCAL_NODEPORTS = "policy-local-nodeports"
    # those of policy-local-* to the class of their local endpoints
    LOCAL_SERVICES = "local-services"
    LOCAL_NODEPORTS = "local-nodeports"
    # frontends with session affinity, to the chains of their own
    AFFINITY_SERVICES = "session-services"
    LOCAL_AFFINITY_SERVICES = "local-session-services"
    AFFINITY_NODEPORTS = "session-nodeports"
    LOCAL_AFFINITY_NODEPORTS = "local-session-nodeports"
    STICKY_NODEPORTS = "sticky-nodeports"  # those of session-nodeports, where no verdict is asked for
    # the same frontends to the numbers of the pools that they pick from
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
    FIREWALL_LISTS = "firewall-lists"  # the same frontends to the number of their Service's list of ranges
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
"""By endpoint map, as VERDICT_MAPS."""
POOLS_OF: Final = dict(zip(ENDPOINT_MAPS, POOL_MAPS, strict=True))

NUMBER_MAPS: Final = (*POOL_MAPS, SetId.FIREWALL_LISTS)
"""Maps to numbers that are written as addresses."""

LARGEST_NUMBER: Final = 1 << 30
"""What the number of a service port, or of a list, may be: with a bit for the pool it goes into an IPv4 address."""

SHARED: Final = (SetId.CLUSTER_IPS, SetId.HAIRPIN)
"""Sets whose elements several service ports ask for: they stay until the last one lets go."""


SERVICE_CIDRS: Final = "service-cidrs"
"""The set of the ranges that cluster IPs are from."""

TRANSPORTS: Final = "transports"
"""The set of the protocols that are served: nft wants to see one before a port is read."""

COUNTERS: Final = {f"localhost-{name.lower()}": name for name in PROTOCOL_NAMES.values()}
"""The table's named counters, and the protocol that each counts the refused packets of."""


def class_of(count: int) -> int:
    """Return the class of a number of endpoints; of more than the largest class, only as many are ever picked."""
    return CLASSES[min(bisect_left(CLASSES, count), len(CLASSES) - 1)]


def tries(size: int) -> int:
    """Return how often a slot is picked from a class before the class below settles it, of which all are taken."""
    most = 1 - (BELOW.get(size, 0) + 1) / size
    return max(1, ceil(log(_MISSED) / log(most))) if most else 1


@lru_cache(maxsize=4096)
def packed_class(count: int) -> bytes:
    """Return the class of a number of endpoints as it is in the kernel: a port."""
    return class_of(count).to_bytes(2, "big")


class Kind(IntEnum):
    """How the elements of a set are packed."""

    PLAIN = 0
    DESTINATION = 1
    VERDICT = 2
    INTERVAL = 3
    NUMBER = 4  # as an address
    CLASS = 5  # as a port


class SetShape(NamedTuple):
    """A set as it is declared, the fields of its key, and what it maps to."""

    spec: SetSpec
    fields: tuple[str, ...]  # address, protocol, port, slot
    kind: Kind

    def key_size(self, family: Family) -> int:
        """Return the bytes of a key; every field fills whole 4-byte registers."""
        return sum(family.address_size if f == "address" else 4 for f in self.fields)

    def data_size(self, family: Family) -> int:
        """Return the bytes of what a key leads to, 0 where that is nothing, or a verdict."""
        sizes = {Kind.DESTINATION: family.address_size + 4, Kind.NUMBER: family.address_size, Kind.CLASS: 2}
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
    """The sets of one family, in the order of their making."""

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
        kind, flags = Kind.PLAIN, 0
        data: tuple[str, ...] = ()
        if name in ENDPOINT_MAPS:
            kind, data = Kind.DESTINATION, (f"{self.ip} daddr", "th dport")
        elif name in VERDICT_MAPS:
            kind, data = Kind.VERDICT, VERDICT
        elif name in NUMBER_MAPS:
            kind, data = Kind.NUMBER, (f"{self.ip} daddr",)
        elif name in CLASS_MAPS:
            kind, data = Kind.CLASS, ("th dport",)
        elif name == SetId.FIREWALL_ALLOW:
            kind, flags = Kind.INTERVAL, INTERVAL
        spec = SetSpec(name, tuple([words[f] for f in fields]), data, flags)
        return SetShape(spec, tuple(["address" if f == "source" else f for f in fields]), kind)


CLIENTS: Final = "clients-"


def client_set(slot: int) -> str:
    """Return the name of the set of clients that stay with a slot, over all pools."""
    return f"{CLIENTS}{slot}"


def slot_of_clients(name: str) -> int | None:
    """Return whose clients a set has; None when it is no set of clients."""
    slot = name.removeprefix(CLIENTS)
    return int(slot) if slot != name and slot.isdecimal() else None


def pool_number(number: int, policy: Policy, family: Family) -> bytes:
    """Return what stands for a service port's pool in the sets of clients; by the pool's policy."""
    return (2 * number + policy).to_bytes(family.address_size, "big")


def list_number(number: int, family: Family) -> bytes:
    """Return what stands for a Service's list of source ranges in the set of all ranges: an address that is none."""
    return pool_number(number, Policy.CLUSTER, family)


def service_port_number(packed: bytes) -> int:
    """Return the number of the service port whose pool, or of the Service whose list, a number stands for."""
    return int.from_bytes(packed, "big") >> 1


def slot_bytes(count: int) -> list[bytes]:
    """Return the packed slot numbers 0 to count - 1, and possibly more: host byte order, as numgen leaves them."""
    if count > len(_SLOTS):
        _SLOTS.extend(slot.to_bytes(4, "little") for slot in range(len(_SLOTS), count * 2))
    return _SLOTS


def service_key(frontend_key: bytes) -> bytes:
    """Return the element key of a frontend: address (if any), protocol and port, each in whole registers."""
    return frontend_key[:-3] + _registers(frontend_key[-3:])


@lru_cache(maxsize=4096)
def _registers(tail: bytes) -> bytes:
    """Return protocol and port, each in a whole register."""
    return tail[:1] + b"\0\0\0" + tail[1:] + b"\0\0"


class ChainName(NamedTuple):
    """A chain of session affinity, shared by all Services with as many endpoints and the same timeout.

    `treatment` is one of TREATMENTS, `affinity` the timeout in seconds. `endpoints` is how many there are to pick from;
    in slot and affinity chains it is the slot that is meant, and slot chains have no timeout. Chains of Maglev
    have none either: for them it is the size of the table.
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
        """Return the 'local-' of chains that pick from a local pool beside a cluster pool, else ''."""
        return "local-" if self.treatment.startswith("local-") else ""

    @property
    def endpoint_map(self) -> SetId:
        """Return the map that the chain picks from, or leads to picking from."""
        if self.local:
            return SetId.LOCAL_NODEPORT_ENDPOINTS if self.nodeport else SetId.LOCAL_ENDPOINTS
        return SetId.NODEPORT_ENDPOINTS if self.nodeport else SetId.ENDPOINTS

    @property
    def is_slot(self) -> bool:
        """Return whether the chain is one rule that always goes to the same endpoint."""
        return self.treatment.endswith("slot")

    @property
    def is_possible(self) -> bool:
        """Return whether one of our chains may be called so: another program may give a name with any numbers."""
        counts_slots = self.is_slot or self.treatment.endswith("affinity")
        return (0 if counts_slots else 1) <= self.endpoints < SLOTS and self.affinity <= LONGEST_AFFINITY

    @property
    def hashed(self) -> str:
        """Return which of HASHED a chain of Maglev is for, else ''."""
        return next((word for word in HASHED[::-1] if self.treatment.endswith(word)), "")

    @property
    def picks(self) -> bool:
        """Return whether the chain is one rule that picks from a map."""
        return self.is_slot or (self.treatment in _PICKING)


HASHED: Final = ("maglev", "client-maglev")
"""What treatments are called that pick by a hash, by what that is over: plan.HashKey."""

_PICKING: Final = frozenset(f"{local}{word}" for word in HASHED for local in ("", "local-"))

TREATMENTS: Final = (
    "cluster",  # cluster IPs: masqueraded as the globals say
    "external",  # masqueraded
    "policy-local",  # externalTrafficPolicy Local: pods and this node, then the local endpoints
    "pick",
    "local-pick",
    "affinity",  # remembers the client, then the slot
    "local-affinity",
    "slot",
    "local-slot",
    *(f"{treatment}-{word}" for treatment in ("cluster", "external", "policy-local", "local") for word in HASHED),
    *HASHED,
)


def parse_chain_name(text: str) -> ChainName | None:
    """Return the affinity chain that a name stands for, None when it is none."""
    nodeport = text.startswith("nodeport-")
    rest = text.removeprefix("nodeport-")
    for treatment in TREATMENTS:
        if rest.startswith(treatment + "-"):
            number, _, affinity = rest[len(treatment) + 1 :].partition("-")
            seconds = affinity.removesuffix("s")
            if not number.isdecimal() or (affinity and not (affinity.endswith("s") and seconds.isdecimal())):
                continue
            name = ChainName(nodeport, treatment, int(number), int(seconds or 0))
            # A name reads back only as it is written, and only slots have no timeout: pick-4 is a static chain.
            untimed = name.is_slot or bool(name.hashed)
            return name if str(name) == text and bool(name.affinity) != untimed and name.is_possible else None
    return None
