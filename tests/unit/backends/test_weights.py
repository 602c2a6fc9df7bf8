"""The number of elements that each mode would write for plans, without a kernel: counted from its own rendering."""

from __future__ import annotations

import pytest

from kubeproxy.backends.nftables.render import Numbers, place, render
from kubeproxy.config.modes import MODES
from kubeproxy.model.addresses import Family
from kubeproxy.model.endpoints import parse_slice
from kubeproxy.model.objects import ServicePort
from kubeproxy.setup import modes
from support.cluster_objects import NODE_IPS, address, endpoint, endpoint_slice, service, world
from support.compiled import compile_service

WORLD = world()
V4 = Family.IPV4


def plans(endpoints: int, **spec):
    ports = [ServicePort(port=80, node_port=30080), ServicePort(port=81, name="sctp", protocol="SCTP")]
    made = service("web", "10.96.0.10", ports=ports, ingress=["198.51.100.1"], **spec)
    pieces = [endpoint_slice(*(endpoint(f"10.244.1.{number + 1}") for number in range(endpoints)))]
    return {("default", "web"): compile_service(made, [parse_slice(piece) for piece in pieces], WORLD).plans}


def weigh(mode, wanted, family=V4):
    return modes.named(mode).operations().weigh(WORLD, family, wanted, [address(NODE_IPS[V4])])


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_plans(mode):
    assert weigh(mode, {}).amount == 0
    none, one, three = (weigh(mode, plans(count)).amount for count in (0, 1, 3))
    assert none > 0
    assert none != one
    assert (three > one) is (mode != "userspace")  # an endpoint is no separate kernel object there
    assert weigh(mode, plans(3), Family.IPV6).amount == 0
    ranged = plans(3, type="LoadBalancer", load_balancer_source_ranges=["10.0.0.0/8"])
    assert weigh(mode, ranged).amount > three


def test_elements_of_nftables_mode_are_those_of_its_rendering():
    wanted = plans(3, session_affinity="ClientIP")
    rendered = render(place(plan, None, Numbers()) for each in wanted.values() for plan in each)
    assert weigh("nftables", wanted) == (sum(map(len, rendered.values())), "elements")
