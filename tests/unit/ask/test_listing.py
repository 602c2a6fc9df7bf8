"""One-line descriptions of a Service in the lists of the commands and of the page."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kubeproxy.ask.listing import EndpointCount, addresses, cause, endpoints, flags, unserved
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.endpoints import parse_slice
from kubeproxy.model.events import Replaced
from kubeproxy.model.objects import EndpointPort, EndpointSlice, Labels, ObjectMeta, ServicePort, SliceEndpoint
from kubeproxy.model.plan import Balance, FamilyGlobals, Globals
from kubeproxy.model.planner import Planner
from support.cluster_objects import dest, endpoint, endpoint_slice, service, world
from support.snapshots import planner_of

PORTS = [EndpointPort(port=8080, name="http", protocol="TCP")]
FOUR = endpoint_slice(endpoint("10.244.1.1"), endpoint("10.244.1.2"), endpoint("10.244.1.3", ready=False), ports=PORTS)
SIX = endpoint_slice(*(endpoint(f"fd00:10:244:1::{n}") for n in (1, 2)), ports=PORTS, family="IPv6", name="web-6")


def test_a_nodeport_of_both_families_is_one_place() -> None:
    ports = [ServicePort(port=80, name="http", node_port=31647)]
    planner = Planner(world(families=list(Family)))
    web = service("web", "10.96.0.10", "fd00:10:96::10", ports=ports)
    planner.apply([Replaced("services", [web]), Replaced("endpointslices", [FOUR, SIX])])
    planner.take()
    ((_, compiled),) = planner.compiled.items()
    assert list(addresses(compiled.plans)) == ["10.96.0.10:80/tcp", "*:31647/tcp", "[fd00:10:96::10]:80/tcp"]
    four, six = FamilyGlobals(nodeport_ips=(pack("10.0.0.1") or b"",)), FamilyGlobals(nodeport_ips=None)
    here = list(addresses(compiled.plans, Globals("a", "", ipv4=four, ipv6=six)))
    assert here == ["10.96.0.10:80/tcp", "10.0.0.1:31647/tcp", "[fd00:10:96::10]:80/tcp", "*:31647/tcp"]


def test_a_pod_with_an_address_of_each_family_counts_once() -> None:
    assert endpoints([parse_slice(FOUR), parse_slice(SIX)], ()) == EndpointCount(2, 3)
    assert endpoints([parse_slice(SIX)], ()) == EndpointCount(2, 2)
    assert endpoints([], ()) == EndpointCount(0, 0)


def test_the_family_with_more_ready_endpoints_is_counted() -> None:
    four = endpoint_slice(*(endpoint(f"10.244.1.{n}", ready=False) for n in (1, 2)), ports=PORTS)
    six = endpoint_slice(endpoint("fd00:10:244:1::1"), ports=PORTS, family="IPv6", name="web-6")
    assert endpoints([parse_slice(four), parse_slice(six)], ()) == EndpointCount(1, 1)


@pytest.mark.parametrize(
    ("ports", "count"),
    [
        ([EndpointPort(80, "http")], EndpointCount(3, 3)),
        ([EndpointPort(80, "http"), EndpointPort(81, "metrics")], EndpointCount(6, 6)),
        ([EndpointPort(80, "http"), EndpointPort(80, "other")], EndpointCount(3, 3)),
        ([], EndpointCount(0, 3)),  # as if no container had the named targetPort
    ],
)
def test_endpoints_are_counted_by_address_and_port(ports: list[EndpointPort], count: EndpointCount) -> None:
    meta = ObjectMeta(name="web-x", namespace="default", labels=Labels("web"))
    entries = [SliceEndpoint([f"10.0.0.{number}"], None, "b") for number in (1, 2, 3)]
    piece = parse_slice(EndpointSlice(meta, "IPv4", entries, ports))
    assert piece is not None
    assert endpoints([piece], ()) == count


def test_a_drained_endpoint_is_not_ready() -> None:
    web = service("web", "10.96.0.10", ports=[ServicePort(port=80, name="http")])
    plans = planner_of(world(), web, FOUR).compiled["default", "web"].plans
    drained = Balance(drained=(dest("10.244.1.2:8080"),))
    assert endpoints([parse_slice(FOUR)], [replace(plans[0], balance=drained)]) == EndpointCount(1, 3)


def test_an_ejected_endpoint_is_not_ready_and_has_a_letter() -> None:
    web = service("web", "10.96.0.10", ports=[ServicePort(port=80, name="http")])
    plans = planner_of(world(), web, FOUR).compiled["default", "web"].plans
    ejected = [replace(plans[0], ejected=(dest("10.244.1.2:8080"),))]
    assert endpoints([parse_slice(FOUR)], ejected) == EndpointCount(1, 3)
    assert (flags(plans, ()), flags(ejected, ())) == ("", "E")


@pytest.mark.parametrize(
    ("ends", "name", "words"),
    [
        ([], "http", "no endpoints"),
        ([endpoint("10.244.1.1", ready=False), endpoint("10.244.1.2", ready=False)], "http", "2 not ready"),
        ([endpoint("10.244.1.1", ready=False)], "", "no port without a name"),
        ([endpoint("10.244.1.1", ready=False)], "dead", "no port named dead"),
        ([endpoint("10.244.1.1")], "http", ""),
    ],
)
def test_the_cause_of_a_port_without_endpoints_is_short(ends: list[SliceEndpoint], name: str, words: str) -> None:
    piece = endpoint_slice(*ends, ports=PORTS)
    plans = planner_of(world(), service("web", "10.96.0.10", ports=[ServicePort(port=80, name=name)]), piece)
    assert cause(plans.compiled["default", "web"].plans, plans.slices["default", "web"].values()) == words


def test_a_drained_service_tells_so() -> None:
    web = service("web", "10.96.0.10", ports=[ServicePort(port=80, name="http")])
    plan = planner_of(world(), web, endpoint_slice(ports=PORTS)).compiled["default", "web"].plans[0]
    drained = [replace(plan, balance=Balance(drained=(dest("10.244.1.2:8080"),)))]
    assert cause(drained, [parse_slice(FOUR)]) == "drained"


def test_ports_without_an_available_endpoint_are_named() -> None:
    ports = [ServicePort(port=80, name="http"), ServicePort(port=81, name="nosuch"), ServicePort(port=82, name="six")]
    planner = Planner(world(families=list(Family)))
    web = service("web", "10.96.0.10", "fd00:10:96::10", ports=ports)
    named = [EndpointPort(port=8080, name="http", protocol="TCP"), EndpointPort(port=8082, name="six", protocol="TCP")]
    four, six = FOUR, endpoint_slice(endpoint("fd00:10:244:1::1"), ports=named, family="IPv6", name="web-6")
    planner.apply([Replaced("services", [web]), Replaced("endpointslices", [four, six])])
    planner.take()
    ((_, compiled),) = planner.compiled.items()
    assert list(unserved(compiled.plans)) == ["81/TCP", "82/TCP (IPv4)"]
    assert flags(compiled.plans, planner.slices["default", "web"].values()) == "P"


@pytest.mark.parametrize(("ports", "letters"), [([], "P"), (PORTS, "")])
def test_endpoints_without_the_port_have_a_letter(ports: list[EndpointPort], letters: str) -> None:
    piece = endpoint_slice(endpoint("10.244.1.1", ready=bool(letters)), ports=ports)
    web = service("web", "10.96.0.10", ports=[ServicePort(port=80, name="http")])
    plans = planner_of(world(), web, piece).compiled["default", "web"].plans
    assert flags(plans, [parse_slice(piece)]) == letters
    assert endpoints([parse_slice(piece)], plans) == EndpointCount(0, 1)
