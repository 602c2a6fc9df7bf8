"""Annotations of Cilium: the kinds of addresses of a Service, and denied source ranges."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.features import CILIUM
from kubeproxy.model.addresses import Family, network_text, parse_network, within
from kubeproxy.model.cilium import outside_of
from kubeproxy.model.objects import Annotations, ServicePort
from kubeproxy.model.plan import FrontendKind
from support.cluster_objects import endpoint, parsed, service, world
from support.compiled import compile_service

WITHOUT = world(families=[Family.IPV4])
WORLD = CILIUM.on(WITHOUT, value=True)
CLUSTER, EXTERNAL, BALANCER, NODEPORT = FrontendKind


def compiled(globals_=WORLD, ranges=None, **annotations):
    subject = service(
        annotations=Annotations(**annotations),
        type="LoadBalancer",
        ports=[ServicePort(port=80, node_port=30080)],
        external_ips=["192.0.2.1"],
        ingress=["198.51.100.1"],
        load_balancer_source_ranges=ranges,
    )
    return compile_service(subject, [parsed(endpoint("10.244.0.1"))], globals_)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (None, {CLUSTER, EXTERNAL, BALANCER, NODEPORT}),
        ("ClusterIP", {CLUSTER, EXTERNAL}),
        ("NodePort", {NODEPORT, EXTERNAL}),
        ("LoadBalancer", {BALANCER, EXTERNAL}),
    ],
)
def test_a_type_leaves_one_kind_of_addresses_and_external_ips(text, kinds):
    found = compiled(cilium_type=text)
    (plan,) = found.plans
    assert {frontend.kind for frontend in plan.frontends} == kinds
    assert plan.cluster
    assert found.problems == ()


def test_a_load_balancer_without_an_address_is_served_nowhere():
    subject = service(annotations=Annotations(cilium_type="LoadBalancer"), type="LoadBalancer")
    (plan,) = compile_service(subject, [parsed(endpoint("10.244.0.1"))], WORLD).plans
    assert plan.frontends == ()


@pytest.mark.parametrize(
    ("ranges", "policy", "allowed"),
    [
        (["128.0.0.0/1"], "allow", "128.0.0.0/1"),
        (["128.0.0.0/1"], "deny", "0.0.0.0/1"),
        (["0.0.0.0/2", "64.0.0.0/2", "fd00::/8"], "deny", "128.0.0.0/1"),
        (["0.0.0.0/0"], "deny", ""),
        (["fd00::/8"], "deny", None),
        (None, "deny", None),
    ],
)
def test_the_policy_of_source_ranges(ranges, policy, allowed):
    found = compiled(ranges=ranges, cilium_source_policy=policy)
    (plan,) = found.plans
    written = plan.source_ranges
    if written is not None:  # without the load balancer's address, which is a possible source of this node's packets
        written = ", ".join(network_text(one) for one in written if one[0] != one[1])
    assert written == allowed
    assert found.problems == ()


def test_an_invalid_range_to_deny_is_named_and_the_others_are_denied():
    found = compiled(ranges=["x", "128.0.0.0/1"], cilium_source_policy="deny")
    assert [network_text(one) for one in found.plans[0].source_ranges] == ["0.0.0.0/1"]
    assert [problem.field for problem in found.problems] == ["spec.loadBalancerSourceRanges[0]"]


@pytest.mark.parametrize("name", ["type", "src-ranges-policy"])
@pytest.mark.parametrize(("globals_", "text"), [(WORLD, "Nodeport"), (WITHOUT, "deny"), (WITHOUT, "NodePort")])
def test_an_annotation_without_effect_is_named(name, globals_, text):
    key = {"type": "cilium_type", "src-ranges-policy": "cilium_source_policy"}[name]
    found = compiled(globals_, ["10.0.0.0/8"], **{key: text})
    assert found.plans == compiled(globals_, ["10.0.0.0/8"]).plans
    (problem,) = found.problems
    assert problem.field == f"metadata.annotations[service.cilium.io/{name}]"
    assert ("--cilium-annotations" in problem.reason) is (globals_ is WITHOUT)


NETWORKS = st.one_of(
    st.builds(lambda n, bits: ip_network((n, bits), strict=False), st.integers(0, 2**32 - 1), st.integers(0, 32)),
    st.builds(
        lambda n, bits: ip_network((n.to_bytes(16, "big"), bits), strict=False),
        st.integers(0, 2**128 - 1),
        st.integers(0, 128),
    ),
)


@given(st.lists(NETWORKS, min_size=1, max_size=8), st.data())
def test_an_address_is_in_the_ranges_or_outside_of_them(networks, data):
    networks = [each for each in networks if each.version == networks[0].version]
    ranges = tuple(parse_network(str(each)) for each in networks)
    others = outside_of(ranges)
    for first, last in others:
        assert ip_network(network_text((first, last)))[-1].packed == last
    near = data.draw(st.sampled_from(networks))
    numbers = [int(near[0]) - 1, int(near[0]), int(near[-1]), int(near[-1]) + 1]
    for number in numbers:
        if 0 <= number < 1 << near.max_prefixlen:
            address = (ip_address("0.0.0.0") if near.version == 4 else ip_address("::")) + number
            assert within(address.packed, others) is not within(address.packed, ranges)
