"""Strategies for random clusters: values come from small pools, so that objects often conflict; some values are
invalid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Rejected, Replaced, Upserted
from kubeproxy.model.objects import (
    Annotations,
    ClientIPConfig,
    EndpointConditions,
    EndpointHints,
    EndpointPort,
    EndpointSlice,
    LoadBalancerIngress,
    NameHint,
    Object,
    Resource,
    Service,
    ServicePort,
    SessionAffinityConfig,
    SliceEndpoint,
)
from support.cluster_objects import HERE, THERE, endpoint_slice, service, world

T = TypeVar("T")

NAMESPACES = ("default", "default", "")
SERVICES = ("a", "b", "c", "")
SLICES = ("s1", "s2", "s3", "")

booleans = st.none() | st.booleans()
absurd_text = st.sampled_from(["", " ", "None", "Local ", "é", "\0", "\udc80", "x" * 300, "1.2.3", "::1%lo", "0.0.0.0"])
absurd_number = st.sampled_from([-(2**31), -1, 0, 65536, 2**31 - 1, 10**40])


def seldom(absurd: st.SearchStrategy[Any], *values: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for these values, and sometimes an invalid value."""
    return st.integers(0, 15).flatmap(lambda n: absurd if n == 15 else st.sampled_from(values))


def pick(*values: Any) -> st.SearchStrategy[Any]:
    return seldom(absurd_text, *values)


def number(*values: Any) -> st.SearchStrategy[Any]:
    return seldom(absurd_number, *values)


ports = st.builds(
    ServicePort,
    port=number(80, 81),
    name=pick(None, "", None, "", "http"),
    protocol=pick(None, "TCP", None, "TCP", "UDP"),
    node_port=number(None, 0, 30080, 30081),
)
addresses = pick("203.0.113.1", "203.0.113.2", "10.96.0.1", "2001:db8::1", "fd00::1")
ingress = st.builds(LoadBalancerIngress, ip=st.none() | addresses, ip_mode=pick(None, "VIP", "Proxy"))
affinities = st.none() | st.builds(SessionAffinityConfig, st.none() | st.builds(ClientIPConfig, number(None, 30)))


service_annotations = st.none() | st.builds(
    Annotations,
    algorithm=st.none() | pick("maglev-251", "random"),
    cilium_algorithm=st.none() | pick("maglev", "random"),
    cilium_type=st.none() | pick("ClusterIP", "NodePort", "LoadBalancer", "x"),
    cilium_source_policy=st.none() | pick("allow", "deny", "x"),
    weights=st.none()
    | pick(f"{HERE}=0", f"{THERE}=0", f"{HERE}=50, {THERE}=0", f"{HERE}=101", "=", f"{HERE}=1,")
    | pick("zone:z1=0", f"zone:z1=0,zone:z2=50,{HERE}=20", "zone:=1"),
    eject=st.none() | pick("on", "off", "yes"),
    port_ranges=st.none()
    | pick("70-90/tcp", "79-79/udp,82-90/tcp", "80/tcp,90-89/tcp", "1-79/tcp, 60-70/TCP", "x/sctp"),
)


def lists(elements: st.SearchStrategy[T], size: int = 3) -> st.SearchStrategy[list[T] | None]:
    some = st.lists(elements, min_size=1, max_size=size)
    return st.integers(0, 7).flatmap(lambda n: st.none() if n == 7 else st.just([]) if n == 6 else some)


@st.composite
def services(draw: st.DrawFn, names: Sequence[str] = SERVICES) -> Service:
    return service(
        draw(st.sampled_from(names)),
        *draw(st.lists(pick("10.96.0.1", "10.96.0.2", "10.96.0.3", "fd00::1"), min_size=1, max_size=3)),
        namespace=draw(st.sampled_from(NAMESPACES)),
        created=draw(st.sampled_from([None, "2024-01-01T00:00:00Z", "2024-02-01T00:00:00Z", "2025-01-01T00:00:00Z"])),
        annotations=draw(service_annotations),
        ports=draw(lists(ports)),
        ingress=draw(st.lists(ingress, max_size=2)),
        type=draw(pick(None, "ClusterIP", "LoadBalancer", "LoadBalancer")),
        external_ips=draw(lists(addresses)),
        session_affinity=draw(pick(None, "None", "ClientIP")),
        session_affinity_config=draw(affinities),
        internal_traffic_policy=draw(pick(None, "Cluster", "Local")),
        external_traffic_policy=draw(pick(None, "Cluster", "Local")),
        load_balancer_source_ranges=draw(lists(pick("203.0.113.0/24", "192.0.2.0/24", "::/0", "0.0.0.0/0"))),
        health_check_node_port=draw(number(None, 32000)),
    )


def endpoints_in(*texts: str) -> st.SearchStrategy[SliceEndpoint]:
    return st.builds(
        SliceEndpoint,
        addresses=st.lists(pick(*texts), min_size=1, max_size=2)
        | st.lists(pick(*texts), min_size=1)
        | lists(addresses),
        conditions=st.none() | st.builds(EndpointConditions, booleans, booleans, booleans),
        node_name=st.sampled_from([None, HERE, HERE, THERE]),
        hints=st.none()
        | st.builds(
            EndpointHints,
            lists(st.builds(NameHint, st.sampled_from(["z1", "z2", ""])), 2),
            lists(st.builds(NameHint, st.sampled_from([HERE, THERE, ""])), 2),
        ),
    )


endpoints = {
    "IPv4": endpoints_in("10.244.0.1", "10.244.0.2", "10.244.1.1"),
    "IPv6": endpoints_in("fd00:244::1", "fd00:244::2"),
}
slice_ports = st.builds(
    EndpointPort,
    port=number(None, 8080, 8080, 9090),
    name=pick(None, "", None, "", "http"),
    protocol=pick(None, "TCP", None, "TCP", "UDP"),
)


@st.composite
def slices(draw: st.DrawFn) -> EndpointSlice:
    family = draw(pick("IPv4", "IPv4", "IPv6", "FQDN"))
    return endpoint_slice(
        *draw(st.lists(endpoints.get(family, endpoints["IPv4"]), max_size=4)),
        name=draw(st.sampled_from(SLICES)),
        of=draw(st.sampled_from([None, *SERVICES, *SERVICES])),
        namespace=draw(st.sampled_from(NAMESPACES)),
        family=family,
        ports=draw(lists(slice_ports)),
        triggered=draw(st.none() | st.just("2026-01-01T00:00:00Z") | absurd_text),
        weight=draw(st.none() | pick("0", "1", "10", "100", "-1", "0.5")),
        cilium_weight=draw(st.none() | pick("0", "50", "101")),
        placed=draw(st.none() | st.dictionaries(pick("10.244.0.1", "10.244.1.1", "fd00:244::1"), pick("z1", "z2", ""))),
    )


worlds = st.builds(
    world,
    zone=st.sampled_from(["", "z1", "z2"]),
    node=st.sampled_from([HERE, HERE, ""]),
    detector=st.booleans(),
    masquerade_all=st.booleans(),
    nodeports=st.sampled_from(["primary", "all", "none"]),
)

names = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(SERVICES + SLICES))


@st.composite
def replacements(draw: st.DrawFn, resource: Resource, objects: st.SearchStrategy[Object]) -> Replaced:
    kept = draw(st.frozensets(names, max_size=3))
    return Replaced(resource, draw(st.lists(objects, max_size=5)), kept)


events = (
    st.builds(Upserted, st.just("services"), services())
    | st.builds(Upserted, st.just("endpointslices"), slices())
    | st.builds(Upserted, st.just("endpointslices"), slices())
    | st.builds(lambda n: Deleted("services", *n), names)
    | st.builds(lambda n: Deleted("endpointslices", *n), names)
    | replacements("services", services())
    | replacements("endpointslices", slices())
    | st.builds(lambda n: Rejected("services", n[0], n[1], "uid", "spec", "no object"), names)
)

BOTH = (Family.IPV4, Family.IPV6)


def asking_ranges(text: str) -> Annotations:
    return Annotations(port_ranges=text)


rivals = st.builds(
    service,
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["10.96.0.1", "10.96.0.2", "None"]),
    created=st.sampled_from(["2024-01-01T00:00:00Z", "2024-02-01T00:00:00Z", "2025-01-01T00:00:00Z"]),
    external_ips=st.sampled_from(
        [
            ["203.0.113.1"],
            ["203.0.113.1"],
            ["203.0.113.2", "203.0.113.1"],
            ["10.96.0.1", "192.0.2.1"],
            ["192.0.2.1"],
            [],
        ]
    ),
    ports=st.sampled_from(
        [[ServicePort(port=80)], [ServicePort(port=80, node_port=30080)], [ServicePort(port=30080)]],
    ),
    annotations=st.sampled_from(
        [None, None, *map(asking_ranges, ("70-90/tcp", "85-200/tcp", "100-30079/tcp", "9-9/tcp,30080-40000/TCP"))]
    ),
)
"""Return a strategy for Services that claim the same few addresses and NodePorts."""

rival_worlds = st.builds(world, nodeports=st.sampled_from(["primary", "all", "none"]))

rivalries = (
    st.builds(Upserted, st.just("services"), rivals)
    | st.builds(Upserted, st.just("services"), rivals)
    | st.builds(lambda name: Deleted("services", "default", name), st.sampled_from(["a", "b", "c"]))
    | st.builds(lambda found: Replaced("services", found), st.lists(rivals, max_size=3))
)
