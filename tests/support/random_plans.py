"""Random clusters of one family, as plans: few Services, few endpoints, every policy. Keys never collide."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hypothesis import strategies as st

from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import (
    Annotations,
    ClientIPConfig,
    EndpointPort,
    Service,
    ServicePort,
    SessionAffinityConfig,
    SliceEndpoint,
)
from kubeproxy.model.plan import Detector, Globals, ServicePlan
from support.cluster_objects import HERE, THERE, draining, endpoint, parsed, service, world
from support.compiled import compile_service

Plans = dict[tuple[str, str], tuple[ServicePlan, ...]]


class Addresses(NamedTuple):
    """The addresses of a family, as text with a placeholder for a number."""

    cluster: str
    external: str
    balancer: str
    pod: str
    pods: str
    node: str
    outside: str
    ranges: tuple[str, ...]


ADDRESSES = {
    Family.IPV4: Addresses(
        cluster="10.96.0.{}",
        external="203.0.113.{}",
        balancer="198.51.100.{}",
        pod="10.244.0.{}",
        pods="10.244.0.0/16",
        node="192.0.2.1",
        outside="172.16.0.{}",
        ranges=("172.16.0.0/30", "172.16.0.9/32", "10.244.0.0/16", "192.0.2.0/24", "0.0.0.0/0", "nonsense"),
    ),
    Family.IPV6: Addresses(
        cluster="fd00:96::{}",
        external="2001:db8:e::{}",
        balancer="2001:db8:b::{}",
        pod="fd00:244::{}",
        pods="fd00:244::/64",
        node="2001:db8::1",
        outside="2001:db8:f::{}",
        ranges=("2001:db8:f::/126", "2001:db8:f::9/128", "fd00:244::/64", "2001:db8::/64", "::/0", "nonsense"),
    ),
}

DetectorKind = Literal["none", "network", "bridge", "prefix"]
detectors = st.sampled_from(["network", "none", "bridge", "prefix"])


def globals_of(family: Family, detector: DetectorKind, masquerade_all: bool) -> Globals:
    where = ADDRESSES[family]
    found = Detector(detector, where.pods if detector == "network" else "cni0") if detector != "none" else Detector()
    return world(detector=found, masquerade_all=masquerade_all, families=[family])


def worlds(family: Family) -> st.SearchStrategy[Globals]:
    return st.builds(globals_of, st.just(family), detectors, st.booleans())


@st.composite
def endpoints(draw: st.DrawFn, family: Family) -> list[SliceEndpoint]:
    few = st.lists(st.integers(1, 9), max_size=6, unique=True)
    none = st.just(list[int]())
    many = st.integers(15, 18).map(lambda count: list(range(1, count + 1)))  # numbers at the boundary of a size class
    numbers = draw(st.one_of(none, few, few, many))
    found = []
    for number in numbers:
        make = draw(st.sampled_from([endpoint, endpoint, endpoint, draining]))
        found.append(make(ADDRESSES[family].pod.format(number), draw(st.sampled_from([HERE, THERE]))))
    return found


RANGES = (None, "{0}0000-{0}9999/udp", "{0}0000-{0}0999/tcp,{0}-{0}/sctp,{0}1000-{0}9999/TCP")
"""Ranges of ports, of which each Service has its own."""
SHARED = 200  # the number of an external address that several Services have
ALGORITHMS = (*[None] * 30, "maglev-251")
WEIGHTS = (None, None, None, f"{HERE}=0", f"{THERE}=50", f"{HERE}=50,{THERE}=25")


@st.composite
def subjects(draw: st.DrawFn, family: Family, number: int) -> Service:
    """Return a Service."""
    where = ADDRESSES[family]
    affinity = draw(st.sampled_from([None, None, 30, 10800]))
    names = draw(st.sampled_from([["a"], ["a", "b"]]))
    ranges = draw(st.sampled_from(RANGES))
    external = st.sampled_from([[], [number], [SHARED], [SHARED], [number, SHARED]])
    return service(
        f"s{number}",
        where.cluster.format(number),
        annotations=Annotations(
            weights=draw(st.sampled_from(WEIGHTS)),
            algorithm=draw(st.sampled_from(ALGORITHMS)),
            port_ranges=ranges.format(number) if ranges else None,
        ),
        ports=[
            ServicePort(
                port=80 + 10 * number + i,
                name=name,
                protocol=draw(st.sampled_from(["TCP", "UDP", "SCTP"])),
                node_port=draw(st.sampled_from([None, 30000 + 10 * number + i])),
            )
            for i, name in enumerate(names)
        ],
        external_ips=[where.external.format(each) for each in draw(external)],
        ingress=draw(st.sampled_from([[], [where.balancer.format(number)]])),
        load_balancer_source_ranges=draw(st.lists(st.sampled_from(where.ranges), max_size=2)),
        session_affinity="ClientIP" if affinity else None,
        session_affinity_config=SessionAffinityConfig(ClientIPConfig(affinity)) if affinity else None,
        internal_traffic_policy=draw(st.sampled_from(["Cluster", "Local"])),
        external_traffic_policy=draw(st.sampled_from(["Cluster", "Local"])),
    )


@st.composite
def service_plans(draw: st.DrawFn, family: Family, globals_: Globals, number: int) -> tuple[ServicePlan, ...]:
    subject = draw(subjects(family, number))
    return draw(plans_with_endpoints(subject, family, globals_))


@st.composite
def plans_with_endpoints(
    draw: st.DrawFn, subject: Service, family: Family, globals_: Globals
) -> tuple[ServicePlan, ...]:
    """Return a Service's plans, with any endpoints."""
    ports = [
        EndpointPort(port=8080 + i, name=p.name, protocol=p.protocol) for i, p in enumerate(subject.spec.ports or ())
    ]
    piece = parsed(*draw(endpoints(family)), family=family.label, ports=ports)
    return compile_service(subject, [piece], globals_).plans


@st.composite
def clusters(draw: st.DrawFn, family: Family, globals_: Globals) -> Plans:
    numbers = draw(st.lists(st.integers(1, 4), max_size=4, unique=True))
    return {("default", f"s{n}"): draw(service_plans(family, globals_, n)) for n in numbers}


@st.composite
def histories(draw: st.DrawFn, min_size: int = 1, max_size: int = 4) -> tuple[Globals, list[Plans]]:
    """Return a world, and successive states of a cluster."""
    family = draw(st.sampled_from(list(Family)))
    globals_ = draw(worlds(family))
    return globals_, draw(st.lists(clusters(family, globals_), min_size=min_size, max_size=max_size))


@st.composite
def cycling(draw: st.DrawFn) -> tuple[Globals, list[Plans]]:
    """Return a world, and successive states of a cluster with constant Services and changing endpoints."""
    family = draw(st.sampled_from(list(Family)))
    globals_ = draw(worlds(family))
    staying = [draw(subjects(family, number)) for number in range(1, draw(st.integers(1, 3)) + 1)]
    states = [
        {("default", s.metadata.name): draw(plans_with_endpoints(s, family, globals_)) for s in staying}
        for _ in range(3)
    ]
    return globals_, states
