"""The node's part of the plans: addresses, detectors, NodePort addresses, service CIDRs.

Source: docs/reference.md "Start" 4 to 6 and 9; kube-proxy v1.36 pkg/proxy/util/nodeport_addresses.go.
"""

import pytest

from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import Node, ObjectMeta
from kubeproxy.model.plan import Detector, Loopback
from kubeproxy.model.world import Settings, Surroundings, build, node_addresses, pod_cidrs, remembering
from support.cluster_objects import HERE, address, node_object

V4, V6 = Family.IPV4, Family.IPV6
BOTH = (V4, V6)


def settings(**more) -> Settings:
    return Settings(node_name=HERE, **({"families": BOTH} | more))


def packed(*texts: str) -> tuple[bytes, ...]:
    return tuple(sorted(address(text) for text in texts))


# -- node addresses ------------------------------------------------------------------------------------------------

ADDRESS_CASES = {
    # bind address, the Node's addresses: v4, v6
    "internal before external": (
        "",
        [("ExternalIP", "203.0.113.1"), ("InternalIP", "192.0.2.1"), ("InternalIP", "192.0.2.2")],
        ("192.0.2.1", "::1"),
    ),
    "external where there is no internal": (
        "",
        [("ExternalIP", "203.0.113.1"), ("InternalIP", "2001:db8::1")],
        ("203.0.113.1", "2001:db8::1"),
    ),
    "no node": ("", None, ("127.0.0.1", "::1")),
    "no addresses": ("", [], ("127.0.0.1", "::1")),
    "a hostname is none": ("", [("Hostname", "192.0.2.9"), ("InternalDNS", "192.0.2.8")], ("127.0.0.1", "::1")),
    "unreadable ones are passed over": (
        "",
        [("InternalIP", "nonsense"), ("InternalIP", ""), ("InternalIP", "192.0.2.3")],
        ("192.0.2.3", "::1"),
    ),
    "leading zeros and mapped ones": (
        "",
        [("InternalIP", "::ffff:192.0.2.3"), ("ExternalIP", "2001:db8::00007")],
        ("192.0.2.3", "2001:db8::7"),
    ),
    "the bind address rules its family": (
        "192.0.2.77",
        [("InternalIP", "192.0.2.1"), ("InternalIP", "2001:db8::1")],
        ("192.0.2.77", "2001:db8::1"),
    ),
    "a v6 bind address": ("2001:db8::77", [("InternalIP", "192.0.2.1")], ("192.0.2.1", "2001:db8::77")),
}


@pytest.mark.parametrize("case", ADDRESS_CASES)
def test_node_addresses(case):
    bind, listed, expected = ADDRESS_CASES[case]
    node = node_object(HERE, *listed) if listed is not None else None
    chosen = settings(bind_address=address(bind) if bind else b"")
    for family, text in zip(BOTH, expected, strict=True):
        assert node_addresses(chosen, node, family) == (address(text),)
    world = build(chosen, Surroundings(node))
    assert [world.of(family).node_ips for family in BOTH] == [(address(text),) for text in expected]


def test_a_bare_node_object_is_enough():
    world = build(settings(), Surroundings(Node(ObjectMeta(name=HERE))))
    assert world.zone == ""
    assert pod_cidrs(Node(ObjectMeta(name=HERE))) == ()


@pytest.mark.parametrize(("zone", "expected"), [("z1", "z1"), ("", ""), (None, "")])
def test_the_zone_is_the_nodes_label(zone, expected):
    assert build(settings(), Surroundings(node_object(zone=zone))).zone == expected


@pytest.mark.parametrize("families", [(V4,), (V6,), BOTH])
def test_only_the_families_of_the_node(families):
    assert build(settings(families=families), Surroundings()).families == families


def test_settings_are_passed_on():
    world = build(settings(masquerade_all=True, masquerade_mark=0x1), Surroundings())
    assert (world.node_name, world.masquerade_all, world.masquerade_mark) == (HERE, True, 0x1)


# -- earlier states of a Node -----------------------------------------------------------------------------------------

FULL = node_object(HERE, ("InternalIP", "192.0.2.1"), ("InternalIP", "2001:db8::1"), pod_cidrs=["10.244.7.0/24"])
REMEMBERED_CASES = {
    # the present Node; addresses v4 and v6, pod networks
    "nothing is left": (node_object(HERE), ("192.0.2.1", "2001:db8::1"), ("10.244.7.0/24",)),
    "a bare object": (Node(ObjectMeta(name=HERE)), ("192.0.2.1", "2001:db8::1"), ("10.244.7.0/24",)),
    "another address": (
        node_object(HERE, ("InternalIP", "192.0.2.9"), ("InternalIP", "2001:db8::1"), pod_cidrs=["10.244.8.0/24"]),
        ("192.0.2.9", "2001:db8::1"),
        ("10.244.8.0/24",),
    ),
    "one family is left": (
        node_object(HERE, ("ExternalIP", "203.0.113.1"), pod_cidr="10.244.9.0/24"),
        ("203.0.113.1", "2001:db8::1"),
        ("10.244.9.0/24",),
    ),
    "a name is no address": (
        node_object(HERE, ("Hostname", "192.0.2.9"), ("InternalIP", "2001:db8::9")),
        ("192.0.2.1", "2001:db8::9"),
        ("10.244.7.0/24",),
    ),
}


@pytest.mark.parametrize("case", REMEMBERED_CASES)
def test_removed_node_fields_are_kept_and_changed_ones_followed(case):
    now, addresses, cidrs = REMEMBERED_CASES[case]
    node = remembering(FULL, now)
    assert [node_addresses(settings(), node, family) for family in BOTH] == [(address(text),) for text in addresses]
    assert pod_cidrs(node) == cidrs
    assert remembering(node, now) == node
    assert node.metadata == now.metadata


def test_a_complete_node_is_unchanged():
    assert remembering(None, FULL) is FULL
    assert remembering(node_object(HERE, ("InternalIP", "192.0.2.5")), FULL) is FULL
    assert remembering(FULL, node_object(HERE, zone="z")).metadata.labels.zone == "z"


# -- detectors -----------------------------------------------------------------------------------------------------


def network(text: str | None) -> Detector:
    return Detector("network", text) if text else Detector()


DETECTOR_CASES = {
    # settings, pod CIDRs of the node: v4, v6
    "no cluster CIDR": ({}, ["10.244.0.0/24"], (network(None), network(None))),
    "cluster CIDR, dual stack": (
        {"cluster_cidrs": ("10.244.0.0/16", "fd00::/48")},
        None,
        (network("10.244.0.0/16"), network("fd00::/48")),
    ),
    "cluster CIDRs the other way round": (
        {"cluster_cidrs": ("fd00::/48", "10.244.0.0/16")},
        None,
        (network("10.244.0.0/16"), network("fd00::/48")),
    ),
    "cluster CIDR of one family": (
        {"cluster_cidrs": ("10.244.0.0/16",)},
        None,
        (network("10.244.0.0/16"), network(None)),
    ),
    "cluster CIDR with host bits": (
        {"cluster_cidrs": ("10.244.1.1/16",)},
        None,
        (network("10.244.0.0/16"), network(None)),
    ),
    "unreadable cluster CIDR": ({"cluster_cidrs": ("x", "fd00::/48")}, None, (network(None), network("fd00::/48"))),
    "node CIDR": (
        {"local_mode": "NodeCIDR", "cluster_cidrs": ("10.0.0.0/8",)},
        ["10.244.7.0/24", "fd00:7::/64"],
        (network("10.244.7.0/24"), network("fd00:7::/64")),
    ),
    "node CIDR with leading zeros and a mapped one": (
        {"local_mode": "NodeCIDR"},
        ["::ffff:10.244.7.0/120", "fd00:00007::/064"],
        (network("10.244.7.0/24"), network("fd00:7::/64")),
    ),
    "node CIDR not there yet": ({"local_mode": "NodeCIDR"}, None, (network(None), network(None))),
    "bridge": (
        {"local_mode": "BridgeInterface", "bridge": "cni0"},
        None,
        (Detector("bridge", "cni0"), Detector("bridge", "cni0")),
    ),
    "prefix": (
        {"local_mode": "InterfaceNamePrefix", "prefix": "veth"},
        None,
        (Detector("prefix", "veth"), Detector("prefix", "veth")),
    ),
}


@pytest.mark.parametrize("case", DETECTOR_CASES)
def test_detectors(case):
    chosen, cidrs, expected = DETECTOR_CASES[case]
    world = build(settings(**chosen), Surroundings(node_object(pod_cidrs=cidrs)))
    assert (world.ipv4.detector, world.ipv6.detector) == expected
    assert world.ipv4.detector.implemented is (expected[0].kind != "none")


@pytest.mark.parametrize(
    ("cidrs", "cidr", "expected"),
    [
        (["10.1.0.0/24", "fd00::/64"], "10.1.0.0/24", ("10.1.0.0/24", "fd00::/64")),
        (None, "10.1.0.0/24", ("10.1.0.0/24",)),
        ([], "10.1.0.0/24", ("10.1.0.0/24",)),
        (None, None, ()),
        (None, "", ()),
    ],
)
def test_pod_cidrs(cidrs, cidr, expected):
    assert pod_cidrs(node_object(pod_cidrs=cidrs, pod_cidr=cidr)) == expected
    assert pod_cidrs(None) == ()


# -- NodePort addresses --------------------------------------------------------------------------------------------

NODE = node_object(HERE, ("InternalIP", "192.0.2.1"), ("InternalIP", "2001:db8::1"))
LOCAL = {
    V4: packed("127.0.0.1", "192.0.2.1", "192.0.2.200", "198.51.100.1"),
    V6: packed("::1", "2001:db8::1", "fe80::1"),
}
NODEPORT_CASES = {
    # nodePortAddresses: v4, v6; None means every local address except loopback
    "primary": (("primary",), packed("192.0.2.1"), packed("2001:db8::1")),
    "one CIDR; the other family has all": (("192.0.2.0/24",), packed("192.0.2.1", "192.0.2.200"), None),
    "two CIDRs": (
        ("192.0.2.128/25", "198.51.100.0/24", "2001:db8::/32"),
        packed("192.0.2.200", "198.51.100.1"),
        packed("2001:db8::1"),
    ),
    "overlapping CIDRs": (("192.0.2.0/24", "192.0.2.1/32"), packed("192.0.2.1", "192.0.2.200"), None),
    "nothing matches": (("10.0.0.0/8", "fd00::/8"), (), ()),
    "zero": (("0.0.0.0/0", "::/0"), None, None),
    "zero beside others": (("192.0.2.0/24", "0.0.0.0/0"), None, None),
    "loopback only": (("127.0.0.0/8", "::1/128"), (), ()),
    "loopback beside others": (("127.0.0.0/8", "192.0.2.1/32"), packed("192.0.2.1"), None),
    "none given": ((), None, None),
    "primary beside a network": (
        ("primary", "198.51.100.0/24"),
        packed("192.0.2.1", "198.51.100.1"),
        packed("2001:db8::1"),
    ),
    "primary beside loopback": (("primary", "127.0.0.0/8", "::1/128"), packed("192.0.2.1"), packed("2001:db8::1")),
    "primary beside all": (("primary", "0.0.0.0/0", "::/0"), None, None),
}


@pytest.mark.parametrize("case", NODEPORT_CASES)
def test_nodeport_addresses(case):
    chosen, v4, v6 = NODEPORT_CASES[case]
    world = build(settings(nodeport_addresses=chosen), Surroundings(NODE, (), LOCAL))
    assert (world.ipv4.nodeport_ips, world.ipv6.nodeport_ips) == (v4, v6)


@pytest.mark.parametrize(
    ("chosen", "v4", "v6"),
    [
        (("primary",), Loopback.REFUSED, Loopback.REFUSED),
        (("0.0.0.0/0", "::/0"), Loopback.REFUSED, Loopback.REFUSED),
        (("primary", "127.0.0.0/8", "::1/128"), Loopback.RELAYED, Loopback.RELAYED),
        (("0.0.0.0/0", "127.0.0.1/32"), Loopback.RELAYED, Loopback.REFUSED),
        (("::1/128",), Loopback.REFUSED, Loopback.RELAYED),
    ],
)
def test_only_a_network_within_loopback_asks_for_the_relay(chosen, v4, v6):
    """As in the Go kube-proxy of 1.37 (KEP-6032); without its gate there are no NodePorts on loopback."""
    world = build(settings(nodeport_addresses=chosen, loopback_nodeports="relayed"), Surroundings(NODE, (), LOCAL))
    assert (world.ipv4.loopback, world.ipv6.loopback) == (v4, v6)
    without = build(settings(nodeport_addresses=chosen), Surroundings(NODE, (), LOCAL))
    assert {without.ipv4.loopback, without.ipv6.loopback} == {Loopback.NOTHING}


PRIMARY_CASES = {
    # bind address, the Node's addresses, loopback: v4, v6
    "no Node": ("", None, "never", None, None),
    "no Node, where loopback answers": ("", None, "ipv4", None, None),
    "a Node without addresses": ("", [], "never", None, None),
    "a Node of one family": ("", [("InternalIP", "2001:db8::1")], "never", None, packed("2001:db8::1")),
    "a Node address on no interface": ("", [("InternalIP", "203.0.113.77")], "never", (), None),
    "bound to loopback": ("127.0.0.1", [("InternalIP", "192.0.2.1")], "never", None, None),
    "bound to another loopback": ("127.0.0.2", [("InternalIP", "192.0.2.1")], "never", None, None),
}


@pytest.mark.parametrize("case", PRIMARY_CASES)
def test_nodeports_answer_on_all_addresses_of_a_family_without_a_primary_one(case):
    """As in the Go kube-proxy, which finds no network of the family then (util/nodeport_addresses.go)."""
    bind, listed, loopback, v4, v6 = PRIMARY_CASES[case]
    node = node_object(HERE, *listed) if listed is not None else None
    chosen = settings(bind_address=address(bind) if bind else b"", loopback_nodeports=loopback)
    world = build(chosen, Surroundings(node, (), LOCAL))
    assert (world.ipv4.nodeport_ips, world.ipv6.nodeport_ips) == (v4, v6)


def test_loopback_may_be_a_nodeport_address_for_ipv4_alone():
    chosen = settings(nodeport_addresses=("127.0.0.0/8", "::1/128"), loopback_nodeports="ipv4")
    world = build(chosen, Surroundings(NODE, (), LOCAL))
    assert (world.ipv4.nodeport_ips, world.ipv6.nodeport_ips) == (packed("127.0.0.1"), ())


@pytest.mark.parametrize(
    ("chosen", "loopback", "v4", "v6"),
    [
        (("primary",), "never", (), ()),
        (("0.0.0.0/0", "127.0.0.0/8", "::/0"), "never", (), ()),
        (("127.0.0.0/8", "::1/128"), "never", packed("127.0.0.1"), packed("::1")),
        (("primary", "127.0.0.0/8", "fd00::/8"), "relayed", packed("127.0.0.1"), ()),
        (("127.0.0.0/8", "::1/128"), "ipv4", (), packed("::1")),
        (("127.9.0.0/16", "fd00::/8"), "never", (), ()),
    ],
)
def test_health_checks_are_answered_on_loopback_that_is_named(chosen, loopback, v4, v6):
    """As in the Go kube-proxy in all its modes, though NodePorts do not answer there."""
    around = Surroundings(NODE, (), LOCAL)
    world = build(settings(nodeport_addresses=chosen, loopback_nodeports=loopback), around)
    assert (world.ipv4.health_check_only_ips, world.ipv6.health_check_only_ips) == (v4, v6)


def test_nodeport_addresses_of_a_family_without_local_ones():
    world = build(settings(nodeport_addresses=("192.0.2.0/24",)), Surroundings(NODE))
    assert world.ipv4.nodeport_ips == ()


# -- service CIDRs -------------------------------------------------------------------------------------------------


def test_service_cidrs_are_merged_by_family():
    texts = ["10.97.0.0/16", "fd00:10:96::/112", "10.096.0.0/16", "10.96.128.0/17", "192.168.0.0/30", "nonsense", ""]
    world = build(settings(), Surroundings(None, texts))
    assert world.ipv4.service_cidrs == (
        (address("10.96.0.0"), address("10.97.255.255")),
        (address("192.168.0.0"), address("192.168.0.3")),
    )
    assert world.ipv6.service_cidrs == ((address("fd00:10:96::"), address("fd00:10:96::ffff")),)


def test_equal_surroundings_make_equal_worlds():
    one = build(settings(), Surroundings(NODE, ["10.96.0.0/16", "10.97.0.0/16"], LOCAL))
    two = build(settings(), Surroundings(NODE, ["10.97.0.0/16", "10.96.0.0/16"], LOCAL))
    assert one == two
