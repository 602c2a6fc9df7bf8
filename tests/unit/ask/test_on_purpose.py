"""The reasons for intended differences from the Go kube-proxy's rules."""

from __future__ import annotations

import ipaddress

import pytest

from kubeproxy.ask.from_kernel import _problem_at, _to_itself
from kubeproxy.meaning.compare import FirstPacket, Witness, alike
from kubeproxy.meaning.flow import PacketOutcome
from kubeproxy.model.objects import ObjectMeta, Service, ServicePort, ServiceSpec
from kubeproxy.model.plan import Compiled, Globals, Problem
from kubeproxy.model.planner import Planner

POD, OTHER = "10.244.0.10", "10.244.1.7"


def packet(destination: str, port: int = 80) -> FirstPacket:
    return FirstPacket(POD, destination, 6, port, "eth0", "")


def to(address: str, port: int, *, masquerade: bool) -> PacketOutcome:
    return PacketOutcome("translated", int(ipaddress.ip_address(address)), port, masquerade)


@pytest.mark.parametrize(
    ("endpoints", "there", "here", "is_one"),
    [
        ([(POD, 3000), (POD, 3001)], [True, False], [True, True], True),
        ([(POD, 3000), (OTHER, 3000)], [True, False], [True, True], False),
        ([(OTHER, 3000), (OTHER, 3001)], [True, False], [True, True], False),
    ],
)
def test_an_endpoint_with_two_ports_that_connects_to_itself(endpoints, there, here, is_one):
    sides = (
        tuple((to(*each, masquerade=masked), 0.5) for each, masked in zip(endpoints, side, strict=True))
        for side in (there, here)
    )
    assert bool(_to_itself(Witness(packet("10.96.0.1"), *sides))) is is_one


def test_another_endpoint_is_no_connection_to_itself():
    one = (to(POD, 3000, masquerade=True), 0.5), (to(POD, 3001, masquerade=False), 0.5)
    other = (to(POD, 3000, masquerade=True), 0.5), (to(POD, 3002, masquerade=True), 0.5)
    assert not _to_itself(Witness(packet("10.96.0.1"), one, other))


@pytest.mark.parametrize(
    ("asked", "has_problem"),
    [
        (packet("10.96.0.1"), True),
        (packet("203.0.113.9"), True),
        (packet("192.0.2.1", 30080), True),  # a NodePort answers on any address of the node
        (packet("203.0.113.9", 81), False),
        (packet("203.0.113.10"), False),
    ],
)
def test_a_service_with_the_destination_and_a_problem(asked, has_problem):
    planner = Planner(Globals(node_name="here"))
    spec = ServiceSpec(
        cluster_ips=["10.96.0.1"], external_ips=["203.0.113.9"], ports=[ServicePort(port=80, node_port=30080)]
    )
    planner.services["default", "web"] = Service(ObjectMeta(name="web", namespace="default"), spec)
    assert not _problem_at(planner, asked)
    planner.compiled["default", "web"] = Compiled(problems=(Problem("spec.externalIPs[0]", "wrong"),))
    assert _problem_at(planner, asked) == "Service default/web: spec.externalIPs[0]: wrong" * has_problem


def test_shares_are_alike_up_to_the_tolerance():
    one, other = to(POD, 80, masquerade=False), to(OTHER, 80, masquerade=False)
    assert alike(((one, 0.5), (other, 0.5)), ((other, 0.5), (one, 0.5)))
    assert alike(((one, 0.5), (other, 0.5)), ((one, 0.501), (other, 0.499)))
    assert not alike(((one, 0.5), (other, 0.5)), ((one, 0.6), (other, 0.4)))
    assert not alike(((one, 1.0),), ((other, 1.0),))
