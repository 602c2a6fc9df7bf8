"""The selection of endpoints: readiness, termination, hints, locality, duplicates, ports, slices.

Source: docs/reference.md "Service semantics"; kube-proxy v1.36 pkg/proxy/topology.go, endpointslicecache.go.
"""

import itertools

import pytest

from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.endpoints import parse_slice
from kubeproxy.model.objects import EndpointConditions, EndpointPort, ServicePort, SliceEndpoint
from support.cluster_objects import HERE, THERE, dests, draining, endpoint, endpoint_slice, parsed, service, world
from support.compiled import compile_service

ONE, TWO, THREE = "10.244.0.1", "10.244.0.2", "10.244.1.3"


def pools(*endpoints, zone="", external="Local", **spec):
    """Return the cluster pool and the local pool, as texts without ports."""
    plan = only_plan([parsed(*endpoints)], zone=zone, external_traffic_policy=external, **spec)
    return texts(plan.cluster), texts(plan.local)


def only_plan(slices, *, zone="", node=HERE, **spec):
    spec.setdefault("external_ips", ["203.0.113.1"])
    globals_ = world(zone=zone, node=node, families=[Family.IPV4])
    (plan,) = compile_service(service(**spec), slices, globals_).plans
    return plan


def texts(pool):
    return [".".join(map(str, destination[:4])) for destination in pool]


READY_CASES = {
    "no conditions at all": (endpoint(ONE, HERE), True),
    "conditions unknown": (SliceEndpoint([ONE], EndpointConditions(), HERE), True),
    "ready": (endpoint(ONE, HERE, ready=True), True),
    "ready, so published although not serving": (endpoint(ONE, HERE, ready=True, serving=False), True),
    "ready although terminating (publishNotReadyAddresses)": (
        endpoint(ONE, HERE, ready=True, serving=True, terminating=True),
        True,
    ),
    "not ready": (endpoint(ONE, HERE, ready=False), False),
    "not ready, serving, not terminating": (endpoint(ONE, HERE, ready=False, serving=True), False),
    "serving and terminating": (draining(ONE, HERE), True),
    "serving unknown and terminating": (endpoint(ONE, HERE, ready=False, terminating=True), True),
    "terminating only": (endpoint(ONE, HERE, ready=False, serving=False, terminating=True), False),
}


@pytest.mark.parametrize("case", READY_CASES)
def test_a_single_endpoint_is_used_or_not(case):
    entry, used = READY_CASES[case]
    assert pools(entry) == (([ONE], [ONE]) if used else ([], []))


SELECTION_CASES = {
    "ready ones only": ([endpoint(ONE, HERE), draining(TWO, HERE), endpoint(THREE, ready=False)], [ONE], [ONE]),
    "draining when nothing is ready": ([draining(ONE), draining(TWO, HERE)], [ONE, TWO], [TWO]),
    "the pools fall back separately": ([draining(ONE, HERE), endpoint(THREE)], [THREE], [ONE]),
    "local ready, remote draining": ([endpoint(ONE, HERE), draining(THREE)], [ONE], [ONE]),
    "no node name is not local": ([endpoint(ONE, None)], [ONE], []),
    "an empty node name is not local": ([endpoint(ONE, "")], [ONE], []),
    "draining elsewhere": ([draining(THREE)], [THREE], []),
}


@pytest.mark.parametrize("case", SELECTION_CASES)
def test_selection(case):
    entries, cluster, local = SELECTION_CASES[case]
    for order in itertools.permutations(entries):
        assert pools(*order) == (cluster, local)


def hinted(text, node=THERE, zones=(), nodes=(), **more):
    return endpoint(text, node, zones=zones, nodes=nodes, **more)


HINT_CASES = {
    # name: (zone of this node, endpoints, cluster pool)
    "zone": ("z1", [hinted(ONE, zones=["z1"]), hinted(TWO, zones=["z2"])], [ONE]),
    "several zones": ("z1", [hinted(ONE, zones=["z2", "z1"]), hinted(TWO, zones=["z2"])], [ONE]),
    "zone of nobody": ("z3", [hinted(ONE, zones=["z1"]), hinted(TWO, zones=["z2"])], [ONE, TWO]),
    "zone unknown": ("", [hinted(ONE, zones=["z1"]), hinted(TWO, zones=["z2"])], [ONE, TWO]),
    "one endpoint without": ("z1", [hinted(ONE, zones=["z1"]), endpoint(TWO)], [ONE, TWO]),
    "one with an empty list": ("z1", [hinted(ONE, zones=["z1"]), SliceEndpoint([TWO])], [ONE, TWO]),
    "unready without a hint does not matter": (
        "z1",
        [hinted(ONE, zones=["z1"]), hinted(TWO, zones=["z2"]), endpoint(THREE, ready=False)],
        [ONE],
    ),
    "unready in our zone does not count": (
        "z1",
        [hinted(ONE, zones=["z1"], ready=False), hinted(TWO, zones=["z2"]), hinted(THREE, zones=["z2"])],
        [TWO, THREE],
    ),
    "draining ones fall back without hints": (
        "z1",
        [draining(ONE, zones=["z1"]), draining(TWO, zones=["z2"])],
        [ONE, TWO],
    ),
    "node": ("z1", [hinted(ONE, nodes=[HERE]), hinted(TWO, nodes=[THERE])], [ONE]),
    "node before zone": (
        "z1",
        [hinted(ONE, nodes=[HERE], zones=["z2"]), hinted(TWO, nodes=[THERE], zones=["z1"])],
        [ONE],
    ),
    "node hints for others only: zone": (
        "z1",
        [hinted(ONE, nodes=["node-c"], zones=["z2"]), hinted(TWO, nodes=[THERE], zones=["z1"])],
        [TWO],
    ),
    "one without node hint: zone": (
        "z1",
        [hinted(ONE, nodes=[HERE], zones=["z2"]), hinted(TWO, zones=["z1"])],
        [TWO],
    ),
    "node hints for others only, no zones": (
        "z1",
        [hinted(ONE, nodes=["node-c"]), hinted(TWO, nodes=[THERE])],
        [ONE, TWO],
    ),
    "node and zone names are not mixed": (HERE, [hinted(ONE, nodes=["z1"]), hinted(TWO, nodes=["z2"])], [ONE, TWO]),
}


@pytest.mark.parametrize("case", HINT_CASES)
def test_hints_choose_the_cluster_pool(case):
    zone, entries, cluster = HINT_CASES[case]
    for order in itertools.permutations(entries):
        assert pools(*order, zone=zone)[0] == cluster


def test_hints_do_not_apply_to_the_local_pool():
    entries = [hinted(ONE, HERE, zones=["z2"]), hinted(THREE, THERE, zones=["z1"])]
    assert pools(*entries, zone="z1") == ([THREE], [ONE])


def test_hints_do_not_apply_to_endpoints_that_may_keep_flows():
    plan = only_plan([parsed(hinted(ONE, zones=["z1"]), hinted(TWO, zones=["z2"]))], zone="z1")
    assert plan.cluster == dests(f"{ONE}:8080")
    assert plan.serving == dests(f"{ONE}:8080", f"{TWO}:8080")


def test_serving_endpoints_may_keep_flows_whether_ready_or_not():
    entries = [
        endpoint(ONE),
        draining(TWO),
        endpoint("10.244.0.4", ready=False, serving=True),
        endpoint(THREE, ready=False, serving=False),
    ]
    plan = only_plan([parsed(*entries)])
    assert plan.serving == dests(f"{ONE}:8080", f"{TWO}:8080", "10.244.0.4:8080")


POLICY_POOLS = {
    # policies internal and external, externally accessible: the pools with endpoints
    ("Cluster", "Cluster", True): (True, False),
    ("Cluster", "Cluster", False): (True, False),
    ("Cluster", "Local", True): (True, True),
    ("Cluster", "Local", False): (True, False),
    ("Local", "Cluster", True): (True, True),
    ("Local", "Cluster", False): (False, True),
    ("Local", "Local", True): (True, True),
    ("Local", "Local", False): (False, True),
}


@pytest.mark.parametrize("case", POLICY_POOLS)
@pytest.mark.parametrize("extra", [(), (endpoint(TWO, ready=False),)], ids=["plain", "mixed"])
def test_only_pools_that_a_policy_reaches_are_filled(case, extra):
    internal, external, accessible = case
    found = pools(
        endpoint(ONE, HERE),
        *extra,
        external=external,
        internal_traffic_policy=internal,
        external_ips=["203.0.113.1"] if accessible else [],
    )
    assert tuple(bool(pool) for pool in found) == POLICY_POOLS[case]


# -- duplicates ---------------------------------------------------------------------------------------------------

DUPLICATES = {
    "ready wins over draining": (endpoint(ONE, THERE), draining(ONE, THERE), ([ONE], [])),
    "the one that is not terminating wins, though unready": (
        endpoint(ONE, HERE, ready=False),
        draining(ONE, HERE),
        ([], []),
    ),
    "not terminating wins over local": (endpoint(ONE, THERE), draining(ONE, HERE), ([ONE], [])),
    "local wins": (endpoint(ONE, HERE), endpoint(ONE, THERE), ([ONE], [ONE])),
    "twice the same": (endpoint(ONE, HERE), endpoint(ONE, HERE), ([ONE], [ONE])),
}


@pytest.mark.parametrize("apart", [False, True], ids=["one slice", "two slices"])
@pytest.mark.parametrize("case", DUPLICATES)
def test_duplicates(case, apart):
    first, second, expected = DUPLICATES[case]
    for one, two in ((first, second), (second, first)):
        slices = [parsed(one), parsed(two, name="web-2")] if apart else [parsed(one, two)]
        plan = only_plan(slices, external_traffic_policy="Local")
        assert (texts(plan.cluster), texts(plan.local)) == expected


def test_the_same_address_with_another_port_is_no_duplicate():
    slices = [parsed(endpoint(ONE)), parsed(endpoint(ONE), name="web-2", ports=[EndpointPort(port=9090)])]
    assert only_plan(slices).cluster == dests(f"{ONE}:8080", f"{ONE}:9090")


def test_slices_of_a_service_add_up_in_any_order():
    slices = [parsed(endpoint(ONE)), parsed(endpoint(TWO), name="web-2"), parsed(draining(THREE), name="web-3")]
    plans = {only_plan(list(order)).cluster for order in itertools.permutations(slices)}
    assert plans == {dests(f"{ONE}:8080", f"{TWO}:8080")}


# -- ports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service_port", "slice_port", "matches"),
    [
        (ServicePort(port=80), EndpointPort(port=8080), True),
        (ServicePort(port=80, name=""), EndpointPort(port=8080, name=None), True),
        (ServicePort(port=80, name="http"), EndpointPort(port=8080, name="http"), True),
        (ServicePort(port=80, name="http"), EndpointPort(port=8080, name="https"), False),
        (ServicePort(port=80, name="http"), EndpointPort(port=8080), False),
        (ServicePort(port=80), EndpointPort(port=8080, name="http"), False),
        (ServicePort(port=80, name="http"), EndpointPort(port=8080, name="HTTP"), False),
        (ServicePort(port=80), EndpointPort(port=8080, protocol="TCP"), True),
        (ServicePort(port=80, protocol="TCP"), EndpointPort(port=8080), True),
        (ServicePort(port=80, protocol="UDP"), EndpointPort(port=8080, protocol="UDP"), True),
        (ServicePort(port=80, protocol="SCTP"), EndpointPort(port=8080, protocol="SCTP"), True),
        (ServicePort(port=80, protocol="UDP"), EndpointPort(port=8080), False),
        (ServicePort(port=80), EndpointPort(port=None), False),
        (ServicePort(port=80), EndpointPort(port=0), False),
        (ServicePort(port=80), EndpointPort(port=-1), False),
        (ServicePort(port=80), EndpointPort(port=65536), False),
        (ServicePort(port=80), EndpointPort(port=8080, protocol="ICMP"), False),
    ],
)
def test_ports_match_by_name_and_protocol(service_port, slice_port, matches):
    plan = only_plan([parsed(endpoint(ONE), ports=[slice_port])], ports=[service_port])
    assert bool(plan.cluster) is matches


@pytest.mark.parametrize("ports", [None, []])
def test_a_slice_without_ports_has_no_endpoints(ports):
    assert only_plan([parsed(endpoint(ONE), ports=ports)]).cluster == ()


def test_each_port_of_a_service_gets_its_own_endpoints():
    ports = [ServicePort(port=80, name="http"), ServicePort(port=53, name="dns", protocol="UDP")]
    slices = [
        parsed(endpoint(ONE), ports=[EndpointPort(port=8080, name="http")]),
        parsed(endpoint(TWO), name="web-2", ports=[EndpointPort(port=5353, name="dns", protocol="UDP")]),
    ]
    globals_ = world(families=[Family.IPV4])
    http, dns = compile_service(service(ports=ports), slices, globals_).plans
    assert (http.cluster, dns.cluster) == (dests(f"{ONE}:8080"), dests(f"{TWO}:5353"))
    assert (str(http.key), str(dns.key)) == ("default/web:http/TCP", "default/web:dns/UDP")


def test_a_port_without_name_keeps_its_key_short():
    assert str(only_plan([]).key) == "default/web/TCP"


# -- slices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address_type", ["FQDN", "", "ipv4", "IPv5"])
def test_slices_of_unknown_address_types_are_ignored(address_type):
    assert parse_slice(endpoint_slice(endpoint("example.com"), family=address_type)) is None


ADDRESS_CASES = {
    "": "endpoints[0].addresses[0]",
    "example.com": "endpoints[0].addresses[0]",
    "10.0.0": "endpoints[0].addresses[0]",
    "10.0.0.256": "endpoints[0].addresses[0]",
    "::ffff:fd00::1": "endpoints[0].addresses[0]",
    "10.0.0.1/32": "endpoints[0].addresses[0]",
    "10.0.0.1 ": "endpoints[0].addresses[0]",
    "\u0661\u0660.0.0.1": "endpoints[0].addresses[0]",
    "10.0.0.1\0": "endpoints[0].addresses[0]",
    "\udcff": "endpoints[0].addresses[0]",
    "fd00::1": "endpoints[0].addresses[0]",
    "9" * 10_000: "endpoints[0].addresses[0]",
}


@pytest.mark.parametrize("text", ADDRESS_CASES, ids=range(len(ADDRESS_CASES)))
def test_an_unusable_address_costs_only_its_entry(text):
    piece = parsed(endpoint(text), endpoint(TWO))
    assert [p.field for p in piece.problems] == [ADDRESS_CASES[text]]
    assert len(piece.problems[0].reason) < 200
    assert only_plan([piece]).cluster == dests(f"{TWO}:8080")


@pytest.mark.parametrize(
    ("text", "meant"), [("010.244.00.1", ONE), (f"::ffff:{ONE}", ONE), ("::ffff:010.244.0.1", ONE)]
)
@pytest.mark.parametrize("other", [(), (endpoint(TWO, ready=False),)], ids=["alone", "beside an unusual one"])
def test_stored_addresses_are_read_as_the_go_kube_proxy_reads_them(text, meant, other):
    piece = parsed(endpoint(text), *other)
    assert piece.problems == ()
    assert only_plan([piece]).cluster == dests(f"{meant}:8080")


def test_a_mapped_address_is_none_of_an_ipv6_slice():
    piece = parsed(endpoint(f"::ffff:{ONE}"), endpoint("fd00::00001"), endpoint("::1"), family="IPv6")
    assert [(p.field, p.reason) for p in piece.problems] == [
        ("endpoints[0].addresses[0]", f"'::ffff:{ONE}' is not an IPv6 address")
    ]
    assert [e.address for e in piece.endpoints] == [pack("fd00::1"), pack("::1")]


@pytest.mark.parametrize("addresses", [None, []])
def test_an_endpoint_without_addresses_is_named(addresses):
    piece = parsed(SliceEndpoint(addresses), endpoint(TWO))
    assert [p.field for p in piece.problems] == ["endpoints[0].addresses[0]"]
    assert [e.address for e in piece.endpoints] == [pack(TWO)]


def test_only_the_first_address_counts():
    piece = parsed(SliceEndpoint([ONE, TWO, "nonsense"]))
    assert [e.address for e in piece.endpoints] == [pack(ONE)]
    assert piece.problems == ()


def test_bad_ports_of_a_slice_are_named_and_its_other_ports_work():
    ports = [
        EndpointPort(port=70000, name="a"),
        EndpointPort(port=80, name="b", protocol="ICMP"),
        EndpointPort(port=None, name="c"),
        EndpointPort(port=8080),
    ]
    piece = parsed(endpoint(ONE), ports=ports)
    assert [p.field for p in piece.problems] == ["ports[0].port", "ports[1].protocol"]
    assert only_plan([piece]).cluster == dests(f"{ONE}:8080")


def test_null_lists_are_empty_lists():
    piece = parse_slice(endpoint_slice(ports=None))
    assert piece is not None
    assert (piece.endpoints, piece.ports, piece.problems) == ((), (), ())


# -- hairpin ------------------------------------------------------------------------------------------------------


def test_only_endpoints_of_this_node_need_hairpin():
    entries = [endpoint(TWO, HERE), endpoint(ONE, HERE), endpoint(THREE, THERE)]
    assert set(only_plan([parsed(*entries)]).hairpin) == {pack(ONE), pack(TWO)}
    mixed = [*entries, endpoint("10.244.0.9", ready=False)]
    assert set(only_plan([parsed(*mixed)]).hairpin) == {pack(ONE), pack(TWO)}


def test_draining_local_endpoints_that_are_used_need_hairpin():
    plan = only_plan([parsed(draining(ONE, HERE), endpoint(THREE))], external_traffic_policy="Local")
    assert plan.hairpin == (pack(ONE),)
    plan = only_plan([parsed(draining(ONE, HERE), endpoint(THREE))])
    assert plan.hairpin == ()


def test_the_order_of_endpoints_in_a_slice_has_no_meaning():
    entries = [endpoint(TWO, HERE), endpoint(ONE, HERE), endpoint(THREE, THERE)]
    plans = {str(only_plan([parsed(*order)])) for order in itertools.permutations(entries)}
    assert len(plans) == 1
    split = only_plan([parsed(entries[0]), parsed(*entries[1:], name="web-2")])
    assert str(split) in plans


def test_endpoints_in_any_order_are_sorted_with_their_nodes():
    found = parse_slice(
        endpoint_slice(endpoint("10.0.0.3", node="c"), endpoint("10.0.0.1", node="a"), endpoint("10.0.0.2", node="b"))
    )
    assert [d[3] for d in found.destinations[0]] == [1, 2, 3]
    assert found.nodes == ("a", "b", "c")


def test_an_address_that_is_there_twice_serves_on_both_its_nodes():
    found = parse_slice(endpoint_slice(endpoint("10.0.0.1", node="a"), endpoint("10.0.0.1", node="b")))
    assert {(one.address[3], one.node) for one in found.endpoints} == {(1, "a"), (1, "b")}
