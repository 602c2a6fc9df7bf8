"""The compiler: computes the ServicePlans of one Service from its objects. Pure. No other code implements these
semantics. Source: docs/reference.md "Service semantics", which lists differences; kube-proxy v1.36
pkg/proxy/serviceport.go and the proxiers."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.features import BALANCING, EJECTION, PROXY_NAME
from kubeproxy.model.addresses import (
    PORT_BYTES,
    PROTOCOLS,
    Family,
    Range,
    covers_all,
    family_of,
    is_special,
    pack,
    parse_network,
    unpack,
    within,
)
from kubeproxy.model.balancing import GROWN, BalanceRequests, Growth, asks, balance_requests, balanced, room_for
from kubeproxy.model.cilium import Kinds, denies, outside_of, served_kinds
from kubeproxy.model.ejection import Failures, ejecting, too_many, wrong_request
from kubeproxy.model.endpoints import Slice, Viewpoint, offers, select
from kubeproxy.model.objects import PROXY_LABEL, Service, ServicePort, ServiceSpec
from kubeproxy.model.plan import (
    LONGEST_AFFINITY,
    NOTHING,
    ROOM,
    Action,
    Compiled,
    Frontend,
    FrontendKind,
    Globals,
    HealthCheck,
    Policies,
    Policy,
    Problem,
    ServicePlan,
    ServicePortKey,
    Traffic,
)
from kubeproxy.model.port_ranges import requested_ranges, with_ranges

# These constants are for code that runs for every Service: access to a member of an enum is slow in Python 3.11.
_CLUSTER_IP = FrontendKind.CLUSTER
_EVERYWHERE, _HERE = Policy.CLUSTER, Policy.LOCAL

DEFAULT_AFFINITY_SECONDS = 10800  # core/v1 DefaultClientIPServiceAffinitySeconds
STEP = 1500  # the number of endpoints times ports that are compiled in one step, which takes some milliseconds
PORT = 25  # the cost of a port without endpoints, as a number of endpoints


def compiling(
    service: Service,
    slices: Iterable[Slice],
    world: Globals,
    growth: Growth = GROWN,
    failures: Failures | None = None,
    most: int = ROOM,
) -> Generator[tuple[()], None, Compiled]:
    """Compile a Service and its slices (of all families, in any order) in steps; the result is the generator's return
    value. `growth`: new endpoints' present percentages of their weights. `failures`: the failing endpoints, which it
    ejects; None if the Service ejects none. `most`: the maximum number of entries for weights and Maglev tables per
    family; 0 for equal shares."""
    spec = service.spec
    if skipped(service, world):
        return NOTHING
    problems: list[Problem] = []
    facts = _read(service, world, problems)
    pieces = list(slices)
    asked = _asked(service, pieces, world, problems)
    if (annotations := service.metadata.annotations) is not None and annotations.eject is not None:
        problems += wrong_request(annotations.eject, EJECTION.value(world))
    ranges = requested_ranges(annotations, facts.ports, world, problems)
    plans: list[ServicePlan] = []
    done = 0
    for family in world.families:
        cluster_ip = facts.cluster_ips.get(family)
        if cluster_ip is not None:
            ours = [piece for piece in pieces if piece.family is family]
            first, offered = len(plans), offers(ours)
            for port in facts.ports:
                offer = offered.get((port.name, port.protocol), ())
                plan = _plan(facts, port, family, cluster_ip, offer, world, failures)
                plans.append(plan)
                if failures:
                    problems += too_many(plan, failures)
                if (done := done + PORT + len(plan.serving)) >= STEP:
                    yield ()
                    done = 0
            plans[first:] = with_ranges(plans[first:], ranges)
            if world.api_servers and (facts.external_ips or facts.balancer_ips):
                plans[first:] = [_sparing(plan, world.api_servers, problems) for plan in plans[first:]]
            if asked is not None:
                room = room_for(plans[first:], most)
                for at, plan in enumerate(plans[first:], first):
                    plans[at] = balanced(plan, ours, asked, growth, room, problems)
                    if (done := done + PORT + len(plan.serving)) >= STEP:
                        yield ()
                        done = 0
    if is_slow(service, len(pieces)):
        yield ()
    health = _health(facts.health_port, pieces, plans, world) if spec.health_check_node_port else None
    return Compiled(tuple(plans), health, tuple(problems))


def is_slow(service: Service, slices: int) -> bool:
    """Return whether compiling a Service with this number of slices may take more than half a millisecond."""
    return len(service.spec.ports or ()) * (PORT + 100 * slices) > STEP // 4


def skipped(service: Service, world: Globals) -> str:
    """Return the reason why this proxy does not serve a Service, '' when it does."""
    spec, labels = service.spec, service.metadata.labels
    first = spec.cluster_ips[0] if spec.cluster_ips else spec.cluster_ip
    proxy = labels.service_proxy_name if labels is not None else None
    if proxy is not None or world.features.values:  # nearly never
        name = PROXY_NAME.value(world) or None
        if proxy != name:
            return of_another_proxy(proxy)
    if spec.type == "ExternalName":
        return "its type is ExternalName: a name in DNS, no rules are needed"
    if first == "None":
        return "headless (spec.clusterIP is None): DNS returns its endpoints, no rules are needed"
    return "" if first else "spec.clusterIP is empty: it has no address yet"


def of_another_proxy(name: str | None) -> str:
    """Return the reason of a Service with another proxy's label, None for no label (KEP-2447)."""
    if name is None:
        return f"another proxy serves it: it lacks the label {PROXY_LABEL} (--service-proxy-name)"
    return f"another proxy serves it, by its label {PROXY_LABEL}: {name[:64]!r}"


class _Port(NamedTuple):
    name: str
    protocol: int
    port: int
    node_port: int


class _Facts(Struct, frozen=True, gc=False):
    """The parts of a Service's spec that apply to all its ports and families."""

    name: tuple[str, str]
    ports: Sequence[_Port]
    cluster_ips: Mapping[Family, bytes]
    external_ips: Mapping[Family, Sequence[bytes]]
    balancer_ips: Mapping[Family, Sequence[bytes]]
    source_ranges: Mapping[Family, tuple[Range, ...]]  # a family that is missing admits all clients
    policies: Policies
    affinity: int
    health_port: int
    kinds: Kinds | None  # of the frontends that are served, None for all


def _read(service: Service, world: Globals, problems: list[Problem]) -> _Facts:
    spec, meta = service.spec, service.metadata
    ingress = service.status.load_balancer.ingress if service.status and service.status.load_balancer else None
    balancer_ips = [i.ip for i in ingress if i.ip and i.ip_mode in (None, "", "VIP")] if ingress else ()
    outside = spec.external_ips if world.external_ips == "served" else None
    # Positional arguments are faster, and this code runs for every Service. The same applies to plans below.
    return _Facts(
        (meta.namespace or "", meta.name),
        _ports(spec.ports or (), problems),
        _cluster_ips(spec, problems),
        _addresses(outside, "spec.externalIPs", problems) if outside else _NO_ADDRESSES,
        _addresses(balancer_ips, "status.loadBalancer.ingress", problems) if balancer_ips else _NO_ADDRESSES,
        _source_ranges(service, world, problems) if spec.load_balancer_source_ranges else _NO_RANGES,
        _policies(spec, problems),
        _affinity(spec, problems) if spec.session_affinity not in _NO_AFFINITY else 0,
        _health_port(spec, problems) if spec.health_check_node_port else 0,
        served_kinds(meta.annotations, world, problems),
    )


_NO_AFFINITY = (None, "", "None")


def _shown(text: str | None) -> str:
    return repr((text or "")[:64])


def _ports(entries: Sequence[ServicePort], problems: list[Problem]) -> Sequence[_Port]:
    if len(entries) == 1 and not entries[0].node_port:  # the usual case; many Services have equal ports
        ports, wrong = _one_port(entries[0].port, entries[0].name, entries[0].protocol)
        problems += wrong
        return ports
    return _read_ports(entries, problems)


@lru_cache(maxsize=1024)
def _one_port(number: int, name: str | None, protocol: str | None) -> tuple[Sequence[_Port], Sequence[Problem]]:
    problems: list[Problem] = []
    return tuple(_read_ports((ServicePort(number, name, protocol),), problems)), tuple(problems)


def _read_ports(entries: Sequence[ServicePort], problems: list[Problem]) -> Sequence[_Port]:
    ports: list[_Port] = []
    names: set[tuple[str, int]] = set()
    numbers: set[tuple[int, int]] = set()
    node_ports: set[tuple[int, int]] = set()
    for i, entry in enumerate(entries):
        where = f"spec.ports[{i}]"
        protocol = PROTOCOLS.get(entry.protocol or "TCP")
        node_port = entry.node_port or 0
        if protocol is None:
            problems.append(
                Problem(f"{where}.protocol", f"{_shown(entry.protocol)} is not TCP, UDP or SCTP; port skipped")
            )
            continue
        if not 0 < entry.port < 65536:
            problems.append(Problem(f"{where}.port", f"{entry.port} is not between 1 and 65535; port skipped"))
            continue
        if not 0 <= node_port < 65536:
            problems.append(Problem(f"{where}.nodePort", f"{node_port} is not between 1 and 65535; no NodePort"))
            node_port = 0
        name = entry.name or ""
        if (name, protocol) in names or (protocol, entry.port) in numbers:
            problems.append(Problem(where, "repeats the name or the number of an earlier port; port skipped"))
            continue
        if (protocol, node_port) in node_ports:
            problems.append(Problem(f"{where}.nodePort", f"{node_port} is an earlier port's already; no NodePort"))
            node_port = 0
        if node_port:
            node_ports.add((protocol, node_port))
        names.add((name, protocol))
        numbers.add((protocol, entry.port))
        ports.append(_Port(name, protocol, entry.port, node_port))
    return ports


def _cluster_ips(spec: ServiceSpec, problems: list[Problem]) -> dict[Family, bytes]:
    usable: dict[Family, bytes] = {}
    for text in spec.cluster_ips or (spec.cluster_ip or "",):
        address = pack(text)
        if address is None or address in _UNSPECIFIED:
            field = "spec.clusterIPs" if spec.cluster_ips else "spec.clusterIP"
            problems.append(Problem(field, f"{_shown(text)} is no usable IP address; skipped"))
        else:
            usable.setdefault(family_of(address), address)
    return usable


_UNSPECIFIED = (b"\0" * 4, b"\0" * 16)
_NO_ADDRESSES: Mapping[Family, Sequence[bytes]] = {}
_NO_RANGES: Mapping[Family, tuple[Range, ...]] = {}


def _addresses(texts: Sequence[str], field: str, problems: list[Problem]) -> Mapping[Family, Sequence[bytes]]:
    by_family: dict[Family, list[bytes]] = {}
    for text in texts:
        address = pack(text)
        if address is None or not any(address):
            problems.append(Problem(field, f"{_shown(text)} is no usable IP address; skipped"))
            continue
        # The API server checks only spec.externalIPs. A Service must not take loopback or cloud metadata addresses.
        if is_special(address):
            problems.append(Problem(field, f"{_shown(text)} is loopback, link-local or multicast; skipped"))
            continue
        addresses = by_family.setdefault(family_of(address), [])
        if address not in addresses:
            addresses.append(address)
    return by_family


def _source_ranges(service: Service, world: Globals, problems: list[Problem]) -> Mapping[Family, tuple[Range, ...]]:
    """Return the source ranges of restricted families. An entry /0 admits all clients of its family; an invalid entry
    admits none. If the ranges are to be denied, return all other networks of their families."""
    texts = service.spec.load_balancer_source_ranges or ()
    restricted: dict[Family, list[Range]] = {}
    opened: set[Family] = set()
    unreadable = False
    for i, text in enumerate(texts):
        network = parse_network(text)
        if network is None:
            problems.append(Problem(f"spec.loadBalancerSourceRanges[{i}]", f"{_shown(text)} is no CIDR; skipped"))
            unreadable = True
            continue
        family = family_of(network[0])
        restricted.setdefault(family, []).append(network)
        if covers_all(network):
            opened.add(family)
    if denies(service.metadata.annotations, world, problems):
        return {family: outside_of(tuple(ranges)) for family, ranges in restricted.items()}
    if unreadable:
        for family in Family:
            restricted.setdefault(family, [])
    return {family: tuple(ranges) for family, ranges in restricted.items() if family not in opened}


def _policies(spec: ServiceSpec, problems: list[Problem]) -> Policies:
    is_external = spec.type != "ClusterIP" or bool(spec.external_ips)  # ExternallyAccessible of api/service/util.go
    policies, wrong = _read_policies(spec.internal_traffic_policy, spec.external_traffic_policy, is_external)
    problems += wrong
    return policies


@lru_cache(maxsize=32)
def _read_policies(internal: str | None, external: str | None, is_external: bool) -> tuple[Policies, Sequence[Problem]]:
    """Return the policies (one shared object for all Services with equal policies), and the problems."""
    problems: list[Problem] = []
    for text, field in ((internal, "spec.internalTrafficPolicy"), (external, "spec.externalTrafficPolicy")):
        if text not in (None, "", "Cluster", "Local"):
            problems.append(Problem(field, f"{_shown(text)} is not Cluster or Local; taken as Cluster"))
    used = (internal, external if is_external else None)
    return Policies(*[Policy.LOCAL if text == "Local" else Policy.CLUSTER for text in used]), problems


def _affinity(spec: ServiceSpec, problems: list[Problem]) -> int:
    if spec.session_affinity != "ClientIP":
        problems.append(
            Problem("spec.sessionAffinity", f"{_shown(spec.session_affinity)} is not None or ClientIP; ignored")
        )
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config is not None and config.client_ip is not None else None
    if seconds is None:
        return DEFAULT_AFFINITY_SECONDS
    if not 0 < seconds <= LONGEST_AFFINITY:
        field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
        problems.append(Problem(field, f"{seconds} is not between 1 and 86400; {DEFAULT_AFFINITY_SECONDS} is used"))
        return DEFAULT_AFFINITY_SECONDS
    return seconds


def _plan(
    facts: _Facts,
    port: _Port,
    family: Family,
    cluster_ip: bytes,
    offered: Sequence[tuple[Slice, int]],
    world: Globals,
    failures: Failures | None,
) -> ServicePlan:
    frontends = _frontends(facts, port, family, cluster_ip)
    if facts.kinds is not None:
        frontends = tuple([frontend for frontend in frontends if frontend.kind in facts.kinds])
    policies = facts.policies
    accessible = len(frontends) > 1 or (facts.kinds is not None and _CLUSTER_IP not in facts.kinds)
    uses_cluster = accessible or policies.internal is _EVERYWHERE
    uses_local = policies.internal is _HERE or (accessible and policies.external is _HERE)
    view = _viewpoint(world.node_name, world.zone)
    chosen, ejected = select(offered, view, uses_cluster, uses_local), None
    if failures is not None:
        chosen, ejected = ejecting(chosen, failures, port.protocol)
    ours = world.of(family)
    pods_known = ours is not None and ours.detector.implemented
    stock = bool(chosen.cluster), bool(chosen.local), chosen.usable
    internal, external = _traffic(policies, stock, world.masquerade_all, pods_known)
    return ServicePlan(
        ServicePortKey(*facts.name, port.name, port.protocol, family),
        frontends,
        chosen.cluster,
        chosen.local,
        policies,
        internal,
        external,
        facts.affinity,
        chosen.local_addresses,
        chosen.serving,
        _allowed(facts, family, world) if facts.source_ranges else None,
        facts.health_port,
        None,
        ejected,
    )


def _sparing(plan: ServicePlan, api_servers: Collection[bytes], problems: list[Problem]) -> ServicePlan:
    """Return a plan without frontends that would cut this node's proxy off from the API server.

    External IPs are written by users, so they are never served at the API server's address. A load balancer's address
    is written by the cluster's controllers, and connections to it may lead to the API server, so its frontend is
    omitted only while it would refuse or drop the node's own connections."""
    if (plan.key.namespace, plan.key.name) == _API_SERVER:
        return plan
    lost = []
    for frontend in plan.all_frontends:
        served = frontend.kind is FrontendKind.LOADBALANCER and plan.external.node.forwards
        if frontend.kind is _CLUSTER_IP or served or not any(map(frontend.covers, api_servers)):
            continue
        lost.append(frontend)
        field = "spec.externalIPs" if frontend.kind is FrontendKind.EXTERNAL else "status.loadBalancer.ingress"
        where = f"{unpack(frontend.address)} port {frontend.ports_text}"
        problems.append(Problem(field, f"{where} is where this node reaches the API server; not served"))
    return plan.without(lost) if lost else plan


_API_SERVER = ("default", "kubernetes")


def _asked(
    service: Service, slices: Sequence[Slice], world: Globals, problems: list[Problem]
) -> BalanceRequests | None:
    """Return the requested shares of connections; None if neither the Service nor its slices have such annotations."""
    annotations = service.metadata.annotations
    its_own = annotations is not None and asks(annotations)
    if not its_own and not [piece for piece in slices if piece.weight is not None]:
        return None
    if not BALANCING.value(world):
        ignored = "its requests for shares are ignored" if its_own else "the weights of its EndpointSlices are ignored"
        reason = f"{ignored}: the proxy on this node shares connections evenly, by its mode or its flags"
        problems.append(Problem("metadata.annotations", reason))
        return None
    return balance_requests(annotations, problems)


def _allowed(facts: _Facts, family: Family, world: Globals) -> tuple[Range, ...] | None:
    """Return the source ranges for the load balancer addresses; None without such addresses or without a restriction.
    If the node's address is in the ranges, the load balancer addresses are added, because the kernel selects one as the
    source address if a cloud's agent has added it to an interface (allowFromNode in the Go kube-proxy)."""
    ranges, balancers = facts.source_ranges.get(family), facts.balancer_ips.get(family, ())
    if ranges is None or not balancers:
        return None
    ours = world.of(family)
    node_ips = ours.node_ips if ours is not None else ()
    if any(within(ip, ranges) for ip in node_ips):
        return (*ranges, *[(address, address) for address in balancers])
    return ranges


_viewpoint = lru_cache(maxsize=8)(Viewpoint)


def _frontends(facts: _Facts, port: _Port, family: Family, cluster_ip: bytes) -> tuple[Frontend, ...]:
    tail = bytes((port.protocol,)) + PORT_BYTES[port.port]
    first = Frontend(_CLUSTER_IP, cluster_ip + tail)
    if not (facts.external_ips or facts.balancer_ips or port.node_port):
        return (first,)
    frontends = [first]
    if facts.external_ips:
        frontends += [Frontend(FrontendKind.EXTERNAL, a + tail) for a in facts.external_ips.get(family, ())]
    if facts.balancer_ips:
        frontends += [Frontend(FrontendKind.LOADBALANCER, a + tail) for a in facts.balancer_ips.get(family, ())]
    if port.node_port:
        frontends.append(Frontend(FrontendKind.NODEPORT, bytes((port.protocol,)) + PORT_BYTES[port.node_port]))
    if len(frontends) > 1 and len({f.key for f in frontends}) < len(frontends):
        # The cluster IP comes first. An external IP that is also a load balancer address has source ranges.
        frontends.sort(key=lambda f: f.kind is FrontendKind.EXTERNAL)
        frontends = list({f.key: f for f in reversed(frontends)}.values())[::-1]
    return tuple(frontends)


class _Stock(NamedTuple):
    """Three facts: the cluster pool has endpoints, the local pool has endpoints, some endpoint is usable."""

    cluster: bool
    local: bool
    usable: bool


@lru_cache(maxsize=256)
def _traffic(
    policies: Policies, stock: tuple[bool, bool, bool], masquerade_all: bool, pods_known: bool
) -> tuple[Traffic, Traffic]:
    """Return the traffic of the cluster IP, and the traffic of all other frontends. `stock` is a _Stock."""
    there = _Stock(*stock)
    return (
        _internal(policies.internal, there, masquerade_all, pods_known),
        _external(policies.external, there, pods_known),
    )


def _internal(policy: Policy, stock: _Stock, masquerade_all: bool, pods_known: bool) -> Traffic:
    local = policy is Policy.LOCAL
    if not (stock.local if local else stock.cluster):
        return Traffic(*(Action.DROP if stock.usable else Action.REJECT,) * 3)
    kept, hidden = (Action.LOCAL, Action.LOCAL_MASQUERADE) if local else (Action.CLUSTER, Action.CLUSTER_MASQUERADE)
    if masquerade_all:
        return Traffic(hidden, hidden, hidden)
    return Traffic(kept, hidden, hidden) if pods_known else Traffic(kept, kept, kept)


def _external(policy: Policy, stock: _Stock, pods_known: bool) -> Traffic:
    """Return the traffic of external IPs, load balancer addresses and NodePorts. With externalTrafficPolicy Local,
    connections of pods and of the node itself use the cluster pool, as if a load balancer had chosen a node."""
    if not stock.usable:
        return Traffic(Action.REJECT, Action.REJECT, Action.REJECT)
    node = Action.CLUSTER_MASQUERADE if stock.cluster else Action.DROP
    if policy is Policy.CLUSTER:
        return Traffic(node, node, node)
    outside = Action.LOCAL if stock.local else Action.DROP
    pod = (Action.CLUSTER if stock.cluster else Action.DROP) if pods_known else outside
    return Traffic(pod, node, outside)


def _health(port: int, slices: Sequence[Slice], plans: Sequence[ServicePlan], world: Globals) -> HealthCheck | None:
    """Return the health check of a LoadBalancer with externalTrafficPolicy Local. It counts the addresses of ready
    endpoints on this node, over all ports of a family's slices."""
    if not port or not plans:
        return None
    ready: dict[Family, set[bytes]] = {plan.key.family: set() for plan in plans}
    for piece in slices:
        if piece.ports and piece.family in ready:
            ready[piece.family] |= {e.address for e in piece.endpoints if e.ready and e.node == world.node_name}
    return HealthCheck(port, tuple((family, len(addresses)) for family, addresses in ready.items()))


def _health_port(spec: ServiceSpec, problems: list[Problem]) -> int:
    port = spec.health_check_node_port or 0
    if spec.type != "LoadBalancer" or spec.external_traffic_policy != "Local" or not port:
        return 0
    if 0 < port < 65536:
        return port
    problems.append(Problem("spec.healthCheckNodePort", f"{port} is not between 1 and 65535; no health check"))
    return 0
