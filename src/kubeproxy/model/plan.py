"""The plans of Services on this node, in terms that do not depend on the mode. Plans are frozen, contain packed
addresses and share equal parts, because 100,000 endpoints are normal."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, IntEnum
from typing import Final, Literal, NamedTuple

from msgspec import Struct, structs

from kubeproxy.features import Features
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, Range, merge_ranges, parse_network, unpack, within

ServiceName = tuple[str, str]  # namespace and name of a Service
Pool = tuple[bytes, ...]  # packed destinations (address and port), sorted, without duplicates


class ServicePortKey(NamedTuple):
    """The identity of a service port in one family."""

    namespace: str
    name: str
    port_name: str
    protocol: int
    family: Family

    def __str__(self) -> str:
        port = f":{self.port_name}" if self.port_name else ""
        return f"{self.namespace}/{self.name}{port}/{PROTOCOL_NAMES[self.protocol]}"


class FrontendKind(IntEnum):
    """The kind of a frontend's address."""

    CLUSTER = 0
    EXTERNAL = 1
    LOADBALANCER = 2
    NODEPORT = 3


NODEPORT_KEY = 3  # bytes in the key of a frontend without an address
WRITTEN: frozenset[FrontendKind] = frozenset({FrontendKind.EXTERNAL, FrontendKind.LOADBALANCER})
"""The kinds of frontends that API clients write. Frontends of other kinds are allocated by the API server."""


class Frontend(Struct, frozen=True, gc=False):
    """A place to which clients connect; its key: address (none for a NodePort), protocol (1 byte), port (2 bytes)."""

    kind: FrontendKind
    key: bytes

    @property
    def address(self) -> bytes:
        """The packed address; b'' for a NodePort."""
        return self.key[:-3]

    @property
    def nodeport_key(self) -> bytes:
        """The key of a NodePort with the same protocol and port."""
        return self.key[-NODEPORT_KEY:]

    @property
    def protocol(self) -> int:
        """The IP protocol number."""
        return self.key[-3]

    @property
    def port(self) -> int:
        """The port that clients use."""
        return int.from_bytes(self.key[-2:], "big")

    @property
    def port_text(self) -> str:
        """The port with its protocol, such as 53/UDP."""
        return f"{self.ports_text}/{PROTOCOL_NAMES[self.protocol]}"

    @property
    def last_port(self) -> int:
        """The last port that clients use."""
        return self.port

    @property
    def ports_text(self) -> str:
        """The port, or the first and the last port of a range, such as 10000-20000."""
        return f"{self.port}" if self.port == self.last_port else f"{self.port}-{self.last_port}"

    @property
    def handover_key(self) -> bytes:
        """Equal for two frontends if the replacement of one by the other must be a single transaction."""
        return self.key

    def covers(self, key: bytes) -> bool:
        """Return whether a single port with this key is one of the frontend's ports."""
        return self.key[:-2] == key[:-2] and self.key[-2:] <= key[-2:] <= self.last_port.to_bytes(2, "big")

    def __str__(self) -> str:
        address = unpack(self.address) if self.address else "nodePort"
        return f"{self.kind.name.lower()} {address} {PROTOCOL_NAMES[self.protocol]} {self.ports_text}"


class PortRange(Frontend, frozen=True, gc=False):
    """A range of ports at a Service's address; each port leads to the same port number of an endpoint. The key
    contains the first port."""

    last: int

    @property
    def last_port(self) -> int:
        """The last port of the range."""
        return self.last

    @property
    def handover_key(self) -> bytes:
        """Address and protocol, because the kernel refuses a range that overlaps another range."""
        return self.key[:-2]


class Policy(IntEnum):
    """A traffic policy, which determines the eligible endpoints."""

    CLUSTER = 0  # all endpoints
    LOCAL = 1  # endpoints on this node


class Policies(NamedTuple):
    """A Service's policies: internalTrafficPolicy for the cluster IP, externalTrafficPolicy for all other frontends."""

    internal: Policy
    external: Policy


class Action(IntEnum):
    """The treatment of a new connection."""

    CLUSTER = 0  # forwarded to the cluster pool, with the client's source address
    CLUSTER_MASQUERADE = 1
    LOCAL = 2  # forwarded to the local pool, with the client's source address
    LOCAL_MASQUERADE = 3
    REJECT = 4
    DROP = 5

    @property
    def forwards(self) -> bool:
        """Whether an endpoint gets the connection."""
        return self < Action.REJECT

    @property
    def picks_local(self) -> bool:
        """Whether the endpoint is picked from the local pool."""
        return self in {Action.LOCAL, Action.LOCAL_MASQUERADE}


class Traffic(NamedTuple):
    """The actions for new connections by the client's origin: a pod of this cluster, this node, any other client."""

    pod: Action
    node: Action
    outside: Action


Weights = tuple[int, ...]
"""The weights of a pool's destinations, in the same order; empty if all weights are equal."""


LONGEST_AFFINITY: Final = 86400  # seconds: core/v1 validation of sessionAffinityConfig.clientIP.timeoutSeconds


class HashKey(IntEnum):
    """The part of a connection that is hashed."""

    FLOW = 0  # the client's address and port
    CLIENT = 1  # the client's address


class Hashing(NamedTuple):
    """Consistent hashing: the hashed part, and the number of slots."""

    key: HashKey
    size: int


ROOM: Final = 1 << 16
"""The maximum number of a Service's entries for weights and Maglev tables in one family, over all its frontends."""


class Balance(Struct, frozen=True, gc=False):
    """The distribution of a service port's connections, if its endpoints do not get equal shares."""

    cluster: Weights = ()  # the weights of the cluster pool's destinations
    local: Weights = ()  # the weights of the local pool's destinations
    drained: Pool = ()  # endpoints with weight 0: they are in no pool, but keep their connections
    hashing: Hashing | None = None  # None for a random choice
    room: int = ROOM  # the maximum number of entries per frontend: see balancing.room_for


class ServicePlan(Struct, frozen=True, gc=False):
    """One service port in one family: its frontends, its pools and the actions for each kind of traffic."""

    key: ServicePortKey
    frontends: tuple[Frontend, ...]
    cluster: Pool
    local: Pool
    policies: Policies  # the Service's policies
    internal: Traffic  # the cluster IP's traffic, which follows from policies and endpoints
    external: Traffic  # the other frontends' traffic, which follows from policies and endpoints
    affinity: int  # seconds of session affinity; 0 if there is none
    hairpin: Pool  # addresses of endpoints on this node: their connections to themselves need masquerading
    serving: Pool  # all destinations to which conntrack flows may continue
    source_ranges: tuple[Range, ...] | None = None  # the clients that may use load balancer addresses; None: all
    health_port: int = 0  # the healthCheckNodePort; 0 if there is none
    balance: Balance | None = None  # None for equal shares
    ejected: Pool | None = None  # endpoints in no pool because they fail; None if the Service ejects none
    port_ranges: tuple[PortRange, ...] = ()  # only the Service's first plan in a family has ranges

    @property
    def usable(self) -> bool:
        """Whether an endpoint on some node takes new connections."""
        return self.external.outside is not Action.REJECT

    @property
    def accessible(self) -> bool:
        """Whether the plan has a frontend for clients outside of the cluster, to which the external policy applies."""
        return any(frontend.kind is not FrontendKind.CLUSTER for frontend in self.frontends)

    @property
    def numbered(self) -> bool:
        """Whether nftables mode identifies the pools by a number: for session affinity, or for ranges of ports."""
        return bool(self.affinity or self.port_ranges)

    @property
    def all_frontends(self) -> tuple[Frontend, ...]:
        """The frontends and the ranges of ports."""
        return self.frontends + self.port_ranges

    def without(self, lost: Collection[Frontend]) -> ServicePlan:
        """Return the plan without some frontends and ranges, and without source ranges that no frontend uses."""
        kept = tuple([each for each in self.frontends if each not in lost])
        ranges = tuple([each for each in self.port_ranges if each not in lost])
        balanced = any(each.kind is FrontendKind.LOADBALANCER for each in kept + ranges)
        sources = self.source_ranges if balanced else None
        return structs.replace(self, frontends=kept, port_ranges=ranges, source_ranges=sources)

    def at_port(self, frontend: Frontend, port: bytes) -> ServicePlan:
        """Return the plan for one port of a frontend. For a range of ports, all destinations get this port, so that
        endpoints with the same address become equal destinations."""
        if not isinstance(frontend, PortRange):
            return self
        pools = (tuple([one[:-2] + port for one in pool]) for pool in (self.cluster, self.local, self.serving))
        cluster, local, serving = pools
        return structs.replace(self, cluster=cluster, local=local, serving=serving)

    def traffic(self, frontend: Frontend) -> Traffic:
        """Return the traffic of a frontend."""
        return self.internal if frontend.kind is FrontendKind.CLUSTER else self.external

    def weights(self, policy: Policy) -> Weights:
        """Return the weights of a policy's pool; empty if all weights are equal."""
        if self.balance is None:
            return ()
        return self.balance.local if policy is Policy.LOCAL else self.balance.cluster

    @property
    def remembers(self) -> int:
        """The seconds of session affinity in a mode without hashing. The value is the maximum if the
        plan hashes only the client's address."""
        hashing = self.balance.hashing if self.balance is not None else None
        return LONGEST_AFFINITY if hashing is not None and hashing.key is HashKey.CLIENT else self.affinity

    def policy(self, frontend: Frontend) -> Policy:
        """Return the policy of a frontend."""
        return self.policies.internal if frontend.kind is FrontendKind.CLUSTER else self.policies.external

    def sources(self, frontend: Frontend) -> tuple[Range, ...] | None:
        """Return the disjoint, sorted ranges of the clients that may use a frontend; None without a restriction."""
        if self.source_ranges is None or frontend.kind is not FrontendKind.LOADBALANCER:
            return None
        return merge_ranges(self.source_ranges)


class HealthCheck(NamedTuple):
    """A Service's health check port, and the number of the Service's ready endpoints on this node in each family."""

    port: int
    counts: tuple[tuple[Family, int], ...]

    def local_endpoints(self, family: Family) -> int | None:
        """Return the number of ready endpoints in a family; None if the port is not served in this family."""
        return dict(self.counts).get(family)


class Problem(NamedTuple):
    """An unusable field of an object, and the consequence."""

    field: str
    reason: str


class Compiled(Struct, frozen=True, gc=False):
    """The result of compiling a Service: its plans, its health check, and its problems."""

    plans: tuple[ServicePlan, ...] = ()
    health: HealthCheck | None = None
    problems: tuple[Problem, ...] = ()

    def has(self, protocol: int) -> bool:
        """Return whether a service port or a range of ports has the protocol with this IP protocol number."""
        return any(
            plan.key.protocol == protocol or any(each.protocol == protocol for each in plan.port_ranges)
            for plan in self.plans
        )


NOTHING = Compiled()


class Detector(Struct, frozen=True):
    """Identifies traffic of this node's pods by source network or by incoming interface."""

    kind: Literal["none", "network", "bridge", "prefix"] = "none"
    value: str = ""

    @property
    def implemented(self) -> bool:
        """Whether pod traffic can be identified."""
        return self.kind != "none"

    @property
    def words(self) -> str:
        """The network or interface that identifies pod traffic, as text."""
        kinds = {
            "none": "nothing",
            "network": f"the pod network {self.value}",
            "bridge": f"the interface {self.value}",
            "prefix": f"interfaces {self.value}*",
        }
        return kinds[self.kind]

    def holds(self, source: bytes, interface: str) -> bool:
        """Return whether a packet comes from a pod. `interface` is the packet's incoming interface; '' if unknown."""
        if self.kind == "network":
            network = parse_network(self.value)
            return network is not None and within(source, (network,))
        if self.kind == "prefix":
            return interface.startswith(self.value)
        return self.kind == "bridge" and interface == self.value


class Loopback(Enum):
    """The treatment of NodePorts on loopback addresses."""

    NOTHING = "nothing"
    SERVED = "served"  # by the rules for all local addresses
    REFUSED = "refused"  # and counted
    RELAYED = "relayed"  # the proxy itself relays TCP; other protocols are refused and counted


class FamilyGlobals(Struct, frozen=True):
    """The globals of one family."""

    detector: Detector = Detector()
    node_ips: tuple[bytes, ...] = ()  # the node's own packed addresses
    nodeport_ips: tuple[bytes, ...] | None = ()  # addresses with NodePorts; None: all local addresses except loopback
    service_cidrs: tuple[Range, ...] = ()  # merged
    loopback: Loopback = Loopback.NOTHING
    health_check_only_ips: tuple[bytes, ...] = ()  # loopback addresses with health check ports, but no NodePorts

    @property
    def health_check_ips(self) -> tuple[bytes, ...] | None:
        """The addresses on which health check ports are served; None means all local addresses."""
        return None if self.nodeport_ips is None else (*self.nodeport_ips, *self.health_check_only_ips)


ExternalIPs = Literal["served", "ignored"]  # the treatment of spec.externalIPs of all Services


class Globals(Struct, frozen=True):
    """The inputs that all plans on the node share: the node's addresses, pod networks, zone and options."""

    node_name: str
    zone: str = ""
    masquerade_all: bool = False
    masquerade_mark: int = 0x4000
    external_ips: ExternalIPs = "served"
    features: Features = Features()
    api_servers: tuple[bytes, ...] = ()  # keys of frontends (Frontend.key) that would hide the API server
    ejects: bool = False  # whether any Service ejects failing endpoints, so that the kernel must report suspects
    ipv4: FamilyGlobals | None = FamilyGlobals()
    ipv6: FamilyGlobals | None = FamilyGlobals()

    def of(self, family: Family) -> FamilyGlobals | None:
        """Return the globals of a family; None if the node does not have the family."""
        return self.ipv4 if family is Family.IPV4 else self.ipv6

    @property
    def families(self) -> tuple[Family, ...]:
        """The families that are programmed."""
        return _FAMILIES[self.ipv4 is not None, self.ipv6 is not None]

    @property
    def parts(self) -> dict[Family, FamilyGlobals]:
        """The globals of each family that is programmed."""
        return {family: part for family in self.families if (part := self.of(family)) is not None}


_FAMILIES: dict[tuple[bool, bool], tuple[Family, ...]] = {
    (False, False): (),
    (True, False): (Family.IPV4,),
    (False, True): (Family.IPV6,),
    (True, True): (Family.IPV4, Family.IPV6),
}


class Affinity(Enum):
    """The scope within which session affinity keeps a client's endpoint."""

    SERVICE_PORT = "each service port"
    POLICY = "each service port, separately for the internal and the external traffic policy"
    ADDRESS = "each address of a service port"


class Habits(NamedTuple):
    """The properties of a mode that clients can notice and in which modes differ."""

    refuses_ports: tuple[FrontendKind, ...] = (FrontendKind.CLUSTER,)
    """The kinds of frontends at whose addresses a connection to a port of no Service is refused."""
    drops_unowned: bool = True  # packets to unused addresses in ServiceCIDRs are dropped
    refuses_node: bool = True  # this node's own connections to external addresses without endpoints are refused
    refuses_at_input: tuple[FrontendKind, ...] = (FrontendKind.NODEPORT,)
    """The kinds of frontends at which the hook input refuses this node's own packets. At other kinds the hook output
    refuses these packets."""
    ranges_first: bool = True  # source ranges apply also if a Service has no endpoints
    resets_tcp: tuple[Family, ...] = (Family.IPV4,)  # the families in which TCP is refused by a reset, not by ICMP
    loopback: tuple[Family, ...] = ()  # the families in which NodePorts on all local addresses answer on loopback, too
    closes_everywhere: bool = False  # a NodePort without endpoints is refused also on addresses without NodePorts
    one_pool: bool = False  # with policy Local, all clients get only endpoints on this node, if there are any
    carries: bool = False  # the proxy relays the bytes, and endpoints see the proxy's address
    carries_sctp: bool = True  # SCTP is served, not refused
    affinity: Affinity = Affinity.SERVICE_PORT  # the scope of session affinity
    outlives_mode: bool = True  # established connections continue when another mode takes over
    hairpins: Literal["of this node", "all"] = "of this node"  # endpoints that can reach themselves, by masquerading
