"""The compiler: computes the ServicePlans of one Service from its objects. Pure. No other code implements these
semantics. Source: docs/reference.md "Service semantics", which lists differences; kube-proxy v1.36
pkg/proxy/serviceport.go and the proxiers."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from functools import lru_cache

from kubeproxy.features import BALANCING, EJECTION, PROXY_NAME
from kubeproxy.model.addresses import PORT_BYTES, Family, Range, unpack, within
from kubeproxy.model.balancing import GROWN, BalanceRequests, Growth, asks, balance_requests, balanced, room_for
from kubeproxy.model.ejection import Failures, ejecting, too_many, wrong_request
from kubeproxy.model.endpoints import Slice, offers, select
from kubeproxy.model.objects import PROXY_LABEL, Service
from kubeproxy.model.plan import (
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
from kubeproxy.model.port_ranges import ProtocolRange, requested_ranges, with_ranges
from kubeproxy.model.spec import ServiceFacts, SpecPort, read_spec

# Code that runs for every Service uses these constants, because access to a member of an enum is slow in Python 3.11.
_CLUSTER_IP = FrontendKind.CLUSTER
_EVERYWHERE, _HERE = Policy.CLUSTER, Policy.LOCAL

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
    value. `growth` contains the percentage of its weight that each new endpoint has now. `failures` are the failing
    endpoints to eject; None if the Service ejects none. `most` is the maximum number of entries for weights and Maglev
    tables per family; 0 for equal shares."""
    if skipped(service, world):
        return NOTHING
    problems: list[Problem] = []
    facts = read_spec(service, world, problems)
    pieces = list(slices)
    asked = _asked(service, pieces, world, problems)
    ranges = _ranges(service, facts, world, problems)
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
    health = _health(facts.health_port, pieces, plans, world) if facts.health_port else None
    return Compiled(tuple(plans), health, tuple(problems))


def is_slow(service: Service, slices: int) -> bool:
    """Return whether compiling a Service with this number of slices may take more than half a millisecond."""
    return len(service.spec.ports or ()) * (PORT + 100 * slices) > STEP // 4


def skipped(service: Service, world: Globals) -> str:
    """Return the reason why this proxy does not serve a Service; '' for a Service that it serves."""
    spec, labels = service.spec, service.metadata.labels
    first = spec.cluster_ips[0] if spec.cluster_ips else spec.cluster_ip
    proxy = labels.service_proxy_name if labels is not None else None
    if proxy is not None or world.features.values:  # rare
        name = PROXY_NAME.value(world) or None
        if proxy != name:
            return of_another_proxy(proxy)
    if spec.type == "ExternalName":
        return "its type is ExternalName, which needs DNS and no rules"
    if first == "None":
        return "headless (spec.clusterIP is None): DNS returns the endpoints, and no rules are needed"
    return "" if first else "spec.clusterIP is empty: the Service has no address yet"


def of_another_proxy(name: str | None) -> str:
    """Return why another proxy serves a Service; `name` is the value of the Service's label, or None without a label
    (KEP-2447)."""
    if name is None:
        return f"another proxy serves this Service, which lacks the label {PROXY_LABEL} (--service-proxy-name)"
    return f"another proxy serves this Service, by the label {PROXY_LABEL}: {name[:64]!r}"


def _plan(
    facts: ServiceFacts,
    port: SpecPort,
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
    chosen, ejected = select(offered, world, uses_cluster, uses_local), None
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
    """Return a plan without frontends that would cut this node's proxy off from the API server. An external IP is
    written by a user, so it is never served at the API server's address. A load balancer's address is written by the
    cluster's controllers, and connections to it may lead to the API server. The frontend of a load balancer's address
    is therefore omitted only while it would refuse or drop the node's own connections."""
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
    annotations = service.metadata.annotations
    its_own = annotations is not None and asks(annotations)
    if not its_own and not [piece for piece in slices if piece.weight is not None]:
        return None
    if not BALANCING.value(world):
        ignored = "the Service's requests for shares" if its_own else "the weights of the Service's EndpointSlices"
        reason = f"{ignored} are ignored: the proxy on this node shares connections evenly, by its mode or its flags"
        problems.append(Problem("metadata.annotations", reason))
        return None
    return balance_requests(annotations, problems)


def _ranges(service: Service, facts: ServiceFacts, world: Globals, problems: list[Problem]) -> Sequence[ProtocolRange]:
    annotations = service.metadata.annotations
    if annotations is None:
        return ()
    problems += wrong_request(annotations, EJECTION.value(world))
    return requested_ranges(annotations, facts.ports, world, problems)


def _allowed(facts: ServiceFacts, family: Family, world: Globals) -> tuple[Range, ...] | None:
    """Return the source ranges for the load balancer addresses; None if there are no such addresses or no restriction.
    If the node's address is in the ranges, the load balancer addresses are added (allowFromNode in the Go kube-proxy):
    a cloud's agent may add such an address to an interface, and the kernel then selects it as the source address."""
    ranges, balancers = facts.source_ranges.get(family), facts.balancer_ips.get(family, ())
    if ranges is None or not balancers:
        return None
    ours = world.of(family)
    node_ips = ours.node_ips if ours is not None else ()
    if any(within(ip, ranges) for ip in node_ips):
        return (*ranges, *[(address, address) for address in balancers])
    return ranges


def _frontends(facts: ServiceFacts, port: SpecPort, family: Family, cluster_ip: bytes) -> tuple[Frontend, ...]:
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
        # Of frontends with equal keys, the cluster IP is kept, else the load balancer address, which has source ranges.
        frontends.sort(key=lambda f: f.kind is FrontendKind.EXTERNAL)
        frontends = list({f.key: f for f in reversed(frontends)}.values())[::-1]
    return tuple(frontends)


_Stock = tuple[bool, bool, bool]  # whether the cluster and local pools have endpoints, and any endpoint is usable


@lru_cache(maxsize=256)
def _traffic(policies: Policies, stock: _Stock, masquerade_all: bool, pods_known: bool) -> tuple[Traffic, Traffic]:
    """Return the traffic of the cluster IP, and the traffic of all other frontends."""
    internal = _internal(policies.internal, stock, masquerade_all, pods_known)
    return internal, _external(policies.external, stock, pods_known)


def _internal(policy: Policy, stock: _Stock, masquerade_all: bool, pods_known: bool) -> Traffic:
    cluster, near, usable = stock
    local = policy is Policy.LOCAL
    if not (near if local else cluster):
        return Traffic(*(Action.DROP if usable else Action.REJECT,) * 3)
    kept, hidden = (Action.LOCAL, Action.LOCAL_MASQUERADE) if local else (Action.CLUSTER, Action.CLUSTER_MASQUERADE)
    if masquerade_all:
        return Traffic(hidden, hidden, hidden)
    return Traffic(kept, hidden, hidden) if pods_known else Traffic(kept, kept, kept)


def _external(policy: Policy, stock: _Stock, pods_known: bool) -> Traffic:
    """Return the traffic of external IPs, load balancer addresses and NodePorts. With externalTrafficPolicy Local,
    connections of pods and of the node itself use the cluster pool, as if a load balancer had chosen a node."""
    cluster, near, usable = stock
    if not usable:
        return Traffic(Action.REJECT, Action.REJECT, Action.REJECT)
    node = Action.CLUSTER_MASQUERADE if cluster else Action.DROP
    if policy is Policy.CLUSTER:
        return Traffic(node, node, node)
    outside = Action.LOCAL if near else Action.DROP
    pod = (Action.CLUSTER if cluster else Action.DROP) if pods_known else outside
    return Traffic(pod, node, outside)


def _health(port: int, slices: Sequence[Slice], plans: Sequence[ServicePlan], world: Globals) -> HealthCheck | None:
    """Return the health check at a port. In each family, the check counts the addresses of ready endpoints on this
    node, over all ports of the Service."""
    if not port or not plans:
        return None
    ready: dict[Family, set[bytes]] = {plan.key.family: set() for plan in plans}
    for piece in slices:
        if piece.ports and piece.family in ready:
            ready[piece.family] |= {e.address for e in piece.endpoints if e.ready and e.node == world.node_name}
    return HealthCheck(port, tuple((family, len(addresses)) for family, addresses in ready.items()))
