"""Rendering of plans: pools by policy, sets by kind of frontend, source ranges in the form of the kernel's sets."""

from __future__ import annotations

import socket

import pytest

from kubeproxy.backends.ipvs.desired import NodeAddresses, render
from kubeproxy.backends.ipvs.layout import IpsetId
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import EndpointPort, ServicePort
from support.cluster_objects import HERE, THERE, address, dests, draining, endpoint, key, parsed, service, world
from support.compiled import compile_service

TCP = socket.IPPROTO_TCP
NODE = NodeAddresses(frozenset({address("192.0.2.1")}), (address("192.0.2.1"),), (address("192.0.2.1"),))
CLUSTER, EXTERNAL, BALANCER, NODE_PORT = "10.96.0.1:80", "203.0.113.1:80", "198.51.100.1:80", "192.0.2.1:30080"
NEAR, FAR = "10.244.0.1", "10.244.1.1"


def wish(*endpoints, protocol="TCP", pods_known=True, node=NODE, **spec):
    ports = [ServicePort(port=80, name="p", protocol=protocol, node_port=30080)]
    subject = service("web", "10.96.0.1", ports=ports, external_ips=["203.0.113.1"], ingress=["198.51.100.1"], **spec)
    piece = parsed(*endpoints, ports=[EndpointPort(port=8080, name="p", protocol=protocol)])
    globals_ = world(detector=pods_known, families=[Family.IPV4])
    return render(compile_service(subject, [piece], globals_).plans, node)


def at(text):
    return SetEntry(address(text.split(":")[0]), TCP, int(text.split(":")[1]))


def pools(found):
    return {text: found.servers[key(text)].pool for text in (CLUSTER, EXTERNAL, BALANCER, NODE_PORT)}


BOTH = (endpoint(NEAR, HERE), endpoint(FAR, THERE))
ALL, LOCAL, REMOTE = dests(f"{NEAR}:8080", f"{FAR}:8080"), dests(f"{NEAR}:8080"), dests(f"{FAR}:8080")


@pytest.mark.parametrize(
    ("endpoints", "internal", "external", "inner", "outer"),
    [
        (BOTH, "Cluster", "Cluster", ALL, ALL),
        (BOTH, "Local", "Cluster", LOCAL, ALL),
        (BOTH, "Cluster", "Local", ALL, LOCAL),
        (BOTH[1:], "Local", "Local", (), REMOTE),
        ((), "Cluster", "Local", (), ()),
        ((draining(NEAR, HERE), BOTH[1]), "Cluster", "Local", REMOTE, LOCAL),
    ],
)
def test_the_pool_of_a_virtual_server_is_that_of_its_policy(endpoints, internal, external, inner, outer) -> None:
    found = wish(*endpoints, internal_traffic_policy=internal, external_traffic_policy=external)
    assert pools(found) == {CLUSTER: inner, EXTERNAL: outer, BALANCER: outer, NODE_PORT: outer}


@pytest.mark.parametrize(
    ("internal", "external", "pods_known", "everybody", "outside"),
    [
        ("Cluster", "Cluster", True, set(), set()),
        ("Local", "Cluster", True, {CLUSTER}, set()),
        ("Cluster", "Local", True, set(), {EXTERNAL, BALANCER, NODE_PORT}),
        ("Local", "Local", False, {CLUSTER}, {EXTERNAL, BALANCER, NODE_PORT}),
    ],
)
def test_without_local_endpoints_a_local_policy_drops(internal, external, pods_known, everybody, outside) -> None:
    found = wish(
        BOTH[1], pods_known=pods_known, internal_traffic_policy=internal, external_traffic_policy=external
    ).entries
    assert found.get(IpsetId.DROP, set()) == {at(text) for text in everybody}
    assert found.get(IpsetId.DROP_OUTSIDE, set()) == {at(text) for text in outside}


@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_frontends_are_in_the_sets_for_masquerade(policy) -> None:
    found = wish(*BOTH, external_traffic_policy=policy).entries
    port, local = SetEntry(port=30080), policy == "Local"
    assert found[IpsetId.CLUSTER_IP] == {at(CLUSTER)}
    assert found[IpsetId.EXTERNAL_IP_LOCAL if local else IpsetId.EXTERNAL_IP] == {at(EXTERNAL)}
    assert found[IpsetId.LOAD_BALANCER] == {at(BALANCER)}
    assert found.get(IpsetId.LOAD_BALANCER_LOCAL, set()) == ({at(BALANCER)} if local else set())
    assert found[IpsetId.NODE_PORT_TCP] == {port}
    assert found.get(IpsetId.NODE_PORT_LOCAL_TCP, set()) == ({port} if local else set())
    assert found[IpsetId.LOOP_BACK] == {SetEntry(address(NEAR), TCP, 8080, address(NEAR))}


def test_the_health_check_port_is_let_in() -> None:
    found = wish(*BOTH, type="LoadBalancer", external_traffic_policy="Local", health_check_node_port=31000)
    assert found.entries[IpsetId.HEALTH_CHECK_NODE_PORT] == {SetEntry(port=31000)}


def test_nodeports_of_sctp_are_by_address_and_port() -> None:
    found = wish(*BOTH, protocol="SCTP").entries
    assert found[IpsetId.NODE_PORT_SCTP] == {SetEntry(address("192.0.2.1"), socket.IPPROTO_SCTP, 30080)}


def test_addresses_that_the_node_has_are_not_bound_but_cluster_ips_always() -> None:
    assert wish(*BOTH).addresses == {address(a) for a in ("10.96.0.1", "203.0.113.1", "198.51.100.1")}
    own = NODE._replace(own=frozenset({address("203.0.113.1"), address("10.96.0.1")}))
    assert wish(*BOTH, node=own).addresses == {address("10.96.0.1"), address("198.51.100.1")}


def net(text, prefixlen):
    return at(BALANCER)._replace(ip2=address(text), prefixlen=prefixlen)


@pytest.mark.parametrize(
    ("ranges", "single", "networks"),
    [
        (["172.16.0.0/30"], set(), {net("172.16.0.0", 30)}),
        (["172.16.0.9/32"], {"172.16.0.9"}, set()),
        (["0.0.0.0/1", "128.0.0.0/1"], {"198.51.100.1"}, {net("0.0.0.0", 1), net("128.0.0.0", 1)}),
        (["172.16.0.1/32", "172.16.0.2/31"], set(), {net("172.16.0.1", 32), net("172.16.0.2", 31)}),
        (["198.51.100.0/24"], set(), {net("198.51.100.0", 24)}),  # the node's own connections have this source: no
        (["192.0.2.0/24"], {"198.51.100.1"}, {net("192.0.2.0", 24)}),  # and here they are allowed
        (["nonsense"], set(), set()),
    ],
)
def test_source_ranges_become_entries_that_the_sets_take(ranges, single, networks) -> None:
    found = wish(*BOTH, load_balancer_source_ranges=ranges).entries
    assert found[IpsetId.LOAD_BALANCER_FW] == {at(BALANCER)}
    assert found.get(IpsetId.LOAD_BALANCER_SOURCE_IP, set()) == {
        at(BALANCER)._replace(ip2=address(one)) for one in single
    }
    assert found.get(IpsetId.LOAD_BALANCER_SOURCE_CIDR, set()) == networks


def test_a_range_of_all_addresses_is_unrestricted() -> None:
    assert IpsetId.LOAD_BALANCER_FW not in wish(*BOTH, load_balancer_source_ranges=["0.0.0.0/0"]).entries


@pytest.mark.parametrize("set_id", list(IpsetId))
def test_set_names_fit_the_kernel_and_differ(set_id) -> None:
    names = {set_id.named(Family.IPV4), set_id.named(Family.IPV6)}
    assert len(names) == 2
    assert all(len(name) <= 31 for name in names)
    assert len({one.named(Family.IPV6) for one in IpsetId}) == len(IpsetId)
