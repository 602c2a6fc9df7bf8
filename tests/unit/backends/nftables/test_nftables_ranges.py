"""Ranges of ports in the table: their sets, chains and rules exist only while a Service has a range."""

from __future__ import annotations

import pytest

from kubeproxy.backends.nftables.layout import OF_RANGES, SESSION_SETS
from kubeproxy.backends.state import Kind
from kubeproxy.model.objects import Annotations, ServicePort
from support.effort import stride
from support.nftables_ground import resync, sync, without_slots
from support.nftables_plans import EVERYTHING, cluster, plans_of, sticky
from unit.backends.nftables.test_nftables_examine import everything, some

A, B = ("default", "a"), ("default", "b")


def asking(text):
    return {"annotations": Annotations(port_ranges=text)}


def ranged(text="10000-20000/udp", name="a", number=1, endpoints=3, **more):
    return plans_of(name, number, endpoints, **asking(text), **more)


def shared(text, name, number):
    """Return a Service with a range at an address that it shares with others."""
    ports = [ServicePort(port=80 + number)]
    return ranged(text, name, number, external_ips=["203.0.113.1"], ports=ports)


@pytest.fixture
def plain(ground, new_ground):
    """Return the chains of a table of two Services without ranges."""
    with new_ground() as other:
        resync(other.start(), cluster("a", "b"))
        yield other.chains()


def test_the_first_range_adds_sets_and_rules_and_the_last_one_takes_them_along(ground, plain):
    backend = ground.start()
    services = cluster("a", "b")
    resync(backend, services)
    assert ground.chains() == plain
    sync(backend, (A, ranged()))
    assert ground.elements("cluster-ranges") == {"10.96.0.1 . udp . 10000-20000 : 0.0.0.2"}
    assert ground.count("range-endpoints") == 3
    own = {name: rules for name, rules in ground.chains().items() if plain.get(name) != rules}
    assert {name for name in own if name in plain} == {
        *("filter-prerouting-pre-dnat", "filter-output-pre-dnat", "filter-input", "filter-forward", "filter-output"),
        *("nat-prerouting", "nat-output"),
    }
    assert all(name.startswith("range") for name in own.keys() - plain.keys())
    ground.is_clean(backend, services | {A: ranged()})
    sync(backend, (A, services[A]))
    assert ground.chains() == plain
    assert not ground.contents().keys() & set(OF_RANGES)
    ground.is_clean(backend, services)


@pytest.mark.parametrize("how", ["sync", "restart"])
@pytest.mark.parametrize("before", [None, "10000-20000/udp", "5000-10000/udp,443-444/tcp"])
@pytest.mark.parametrize("after", [None, "10000-20000/udp", "9000-11000/udp,15000-15000/udp"])
def test_an_annotation_changes(ground, plain, how, before, after):
    services = cluster("b") | {B: plans_of("b", 2)}
    backend = ground.start()
    resync(backend, services | {A: ranged(before)})
    if how == "restart":
        backend = ground.start()
        changed = resync(backend, services | {A: ranged(after)})
        assert before != after or not changed
    else:
        sync(backend, (A, ranged(after)))
    ground.is_clean(backend, services | {A: ranged(after)})
    assert (ground.chains() == plain) is (after is None)
    assert everything(ground, services | {A: ranged(after)}) == []


def test_ten_thousand_ports_cost_one_element(ground):
    backend = ground.start()
    resync(backend, {A: ranged("9-9/udp")})
    few = sum(map(len, ground.contents().values()))
    assert sync(backend, (A, ranged("10000-20000/udp"))) == 2
    assert sum(map(len, ground.contents().values())) == few


def test_a_range_goes_to_another_service_at_once(ground):
    backend = ground.start()
    resync(backend, {A: shared("10000-20000/udp", "a", 1), B: shared(None, "b", 2)})
    gone, come = shared(None, "a", 1), shared("15000-25000/udp", "b", 2)
    sync(backend, (B, come), (A, gone))
    assert {one.split(" : ")[0] for one in ground.elements("external-ranges")} == {"203.0.113.1 . udp . 15000-25000"}
    ground.is_clean(backend, {A: gone, B: come})


def test_all_policies_and_affinity_survive_a_restart(ground):
    ports = [ServicePort(port=80, node_port=30080)]
    services = {
        A: ranged(**EVERYTHING | {"ports": ports}),
        B: sticky("b", 2, 5, **asking("1-79/tcp,10000-20000/udp,10000-20000/sctp")),
        ("default", "none"): ranged(name="none", number=3, endpoints=0),
        ("default", "far"): ranged(name="far", number=4, local="node-b", internal_traffic_policy="Local"),
    }
    resync(ground.start(), services)
    assert ground.count("range-session-chains") == 3
    assert (ground.count("unserved-ranges"), ground.count("no-local-endpoint-ranges")) == (1, 1)
    assert (ground.count("firewall-ranges"), ground.count("local-ranges")) == (1, 2)
    before, handles = ground.contents(), ground.rule_handles()
    again = ground.start()
    assert resync(again, services) == 0
    assert (ground.contents(), ground.rule_handles()) == (before, handles)
    ground.is_clean(again, services)
    assert everything(ground, services) == []
    for name, plans in services.items():
        assert some(ground, {name: plans}) == []


DAMAGES = {
    "a range is missing": (
        "delete element ip kube-proxy cluster-ranges {{ 10.96.0.1 . udp . 10000-20000 }}",
        {(Kind.MISSING, "10.96.0.1, ports 10000-20000/UDP")},
    ),
    "a range too many": (
        "add element ip kube-proxy unserved-ranges {{ 10.96.0.1 . udp . 1-3 }}",
        {(Kind.EXTRA, "10.96.0.1, ports 1-3/UDP")},
    ),
    "an endpoint is missing": (
        "delete element ip kube-proxy range-endpoints {{ {endpoint} }}",
        {(Kind.MISSING, "endpoint number {endpoint}")},
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_range_is_found_and_repaired(ground, damage):
    services = cluster("b") | {A: ranged(), B: plans_of("b", 2)}
    backend = ground.start()
    resync(backend, services)
    whole = without_slots(ground.contents())
    line, wanted = DAMAGES[damage]
    endpoint = min(ground.elements("range-endpoints")).split(" : ")[0]
    ground.disturb(line.format(endpoint=endpoint))
    wanted = {(kind, what.format(endpoint=endpoint)) for kind, what in wanted}
    for findings in (everything(ground, services), some(ground, {A: services[A]})):
        # Without the only element that has the number of a pool, the pool differs as well.
        assert wanted <= {(one.kind, one.what) for one in findings}
        assert len(findings) == 1 or damage == "a range is missing"
        assert A in {one.service for one in findings} <= {A, None}
    assert ground.is_touched(backend)
    resync(backend, services)
    assert without_slots(ground.contents()) == whole
    ground.is_clean(backend, services)


def test_rules_of_ranges_are_repaired(ground):
    services = {A: ranged()}
    backend = ground.start()
    resync(backend, services)
    whole = ground.chains()
    ground.disturb("flush chain ip kube-proxy nat-prerouting", "flush chain ip kube-proxy range-pick")
    assert {one.what for one in everything(ground, services)} == {
        "the rules of chain nat-prerouting",
        "the rules of chain range-pick",
    }
    resync(backend, services)
    assert ground.chains() == whole
    ground.is_clean(backend, services)


def test_services_with_separate_ranges_at_an_address_are_neither_a_difference_nor_written_again(ground):
    services = {A: shared("10000-20000/tcp", "a", 1), B: shared("20001-30000/tcp", "b", 2)}
    backend = ground.start()
    resync(backend, services)
    assert ground.difference(backend) is None
    backend = ground.start()
    assert not resync(backend, services)
    ground.is_clean(backend, services)
    for name, plans in services.items():
        assert some(ground, {name: plans}) == []


def test_a_range_that_covers_ports_of_a_service_is_found_by_a_look_at_this_service(ground):
    services = {A: shared("10000-20000/tcp", "a", 1), B: shared("20001-30000/tcp", "b", 2)}
    resync(ground.start(), services)
    ground.disturb("add element ip kube-proxy unserved-ranges { 203.0.113.1 . tcp . 19999-20001 }")
    for name, plans in services.items():
        (finding,) = some(ground, {name: plans})
        assert (finding.kind, finding.what) == (Kind.EXTRA, "203.0.113.1, ports 19999-20001/TCP")


def test_each_deleted_element_is_found_by_each_look_and_repaired(ground):
    """The elements of ranges, and those of the pools that ranges use."""
    services = {
        A: ranged(**EVERYTHING | {"ports": [ServicePort(port=80, node_port=30080)]}),
        B: sticky("b", 2, 3, **asking("1-79/tcp,10000-20000/udp,10000-20000/sctp")),
        ("default", "none"): ranged(name="none", number=3, endpoints=0),
        ("default", "far"): ranged(name="far", number=4, local="node-b", internal_traffic_policy="Local"),
        ("default", "one"): shared("10000-20000/tcp", "one", 5),
        ("default", "two"): shared("20001-30000/tcp", "two", 6),
    }
    backend = ground.start()
    resync(backend, services)
    whole = without_slots(ground.contents())
    keys = {name: {one.split(" : ")[0] for one in ground.elements(name)} for name in (*OF_RANGES, *SESSION_SETS)}
    every = [(name, key) for name, its in keys.items() for key in sorted(its)]
    for name, key in every[:: stride(1)]:
        if any(one.split(" : ")[0] == key for one in ground.elements(name)):  # a repair may give another number
            ground.disturb(f"delete element ip kube-proxy {name} {{ {key} }}")
            assert everything(ground, services) != [], (name, key)
            assert len([1 for each, plans in services.items() if some(ground, {each: plans})]) == 1, (name, key)
            assert ground.is_touched(backend)
            resync(backend, services)
            assert without_slots(ground.contents()) == whole, (name, key)
    ground.is_clean(backend, services)
