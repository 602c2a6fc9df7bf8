"""An examination of a table reports all drift, by Service and in words, and nothing for a correct table."""

from __future__ import annotations

from contextlib import closing

import pytest

from kubeproxy.backends.nftables.affinity import client_number
from kubeproxy.backends.nftables.examine import NftablesExaminer, NftablesView
from kubeproxy.backends.nftables.layout import CLIENTS
from kubeproxy.backends.state import Kind
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink
from kubeproxy.model.objects import EndpointPort
from kubeproxy.model.plan import Policy
from support.cluster_objects import HERE, address, dest, endpoint, parsed, service
from support.compiled import compile_service
from support.nftables_disturbances import DISTURBANCES, disturbed
from support.nftables_ground import FakeGround, resync, sync
from support.nftables_plans import EVERYTHING, V4, WORLD, cluster, plans_of, sticky
from unit.backends.nftables.test_nftables_drift import RULE_DRIFTS, UNUSED

A = ("default", "a")


class TableView:
    """Return the fake table for an examination."""

    family = V4

    def __init__(self, table) -> None:
        self._table = table
        self.header, self.sets, self.close = table.header, table.sets, table.close
        self.contents = table.contents

    def elements(self, name):
        return {element.key: element.data for element in self._table.elements(name)}

    def lookup(self, name, keys):
        there = self.elements(name)
        return {key: there[key] for key in keys if key in there}


def examiner(ground) -> NftablesExaminer:
    if isinstance(ground, FakeGround):
        return NftablesExaminer(TableView(ground.table(V4)), WORLD)
    return NftablesExaminer(NftablesView(V4, Netlink.open(NETLINK_NETFILTER)), WORLD)


def everything(ground, plans) -> list:
    with closing(examiner(ground)) as made:
        return list(made.everything(plans))


def some(ground, plans) -> list:
    with closing(examiner(ground)) as made:
        return list(made.some(plans))


def test_a_correct_state_shows_no_difference(ground):
    plans = cluster("a", "b") | {
        ("default", "all"): plans_of("all", 7, **EVERYTHING),
        ("default", "none"): plans_of("none", 8, 0, ports=EVERYTHING["ports"]),
        ("default", "sticky"): sticky("sticky", 9, 5),
    }
    backend = ground.start()
    resync(backend, plans)
    assert everything(ground, plans) == []
    assert some(ground, plans) == []
    # Endpoints keep their slots after the removal of others, which is no difference.
    fewer = plans_of("a", 1, 2)
    sync(backend, (A, fewer[:1]))
    assert everything(ground, plans | {A: fewer[:1]}) == []


def test_a_client_with_affinity_is_found_at_its_endpoint(ground):
    plans = sticky("a", 1, 3, external_ips=["203.0.113.1"])
    backend = ground.start()
    resync(backend, {("default", "other"): sticky("other", 2, 3), A: plans})
    (number,) = {element.split(" : ")[1] for element in ground.elements("session-pools") if "10.96.0.1 " in element}
    client = int.from_bytes(client_number(address("172.16.0.1")), "little")
    slots = dict(element.split(" : ") for element in ground.elements("session-slots"))
    one = slots[f"{number} . 1"]
    ground.disturb(f"add element ip kube-proxy {CLIENTS} {{ {client} . {number} timeout 30s expires 20s : {one} }}")
    endpoint_ = dict(element.split(" : ") for element in ground.elements("session-endpoints"))[f"{one} . tcp"]
    with closing(examiner(ground)) as made:
        found = {
            client: [*made.remembered(plans[0], address(client), Policy.CLUSTER)]
            for client in ("172.16.0.1", "172.16.0.2")
        }
    assert found == {"172.16.0.1": [dest(endpoint_.replace(" . ", ":"))], "172.16.0.2": []}


@pytest.mark.parametrize("case", DISTURBANCES)
def test_every_changed_element_is_shown(ground, case):
    backend, plans = disturbed(ground)
    assert everything(ground, plans) == []
    ground.disturb(*DISTURBANCES[case])
    assert everything(ground, plans)
    resync(backend, plans)
    assert everything(ground, plans) == []


@pytest.mark.parametrize("case", RULE_DRIFTS)
def test_every_changed_rule_is_shown(ground, case):
    _, plans = disturbed(ground)
    ground.disturb(*RULE_DRIFTS[case])
    if case == "table made again":
        ground.disturb("add chain ip kube-proxy mine")
    found = everything(ground, plans)
    assert found
    assert {finding.service for finding in found} == {None}


def test_a_set_that_is_missing_is_shown(ground):
    _, plans = disturbed(ground)
    ground.disturb(*UNUSED["map"])
    for found in (everything(ground, plans), some(ground, plans)):
        (finding,) = found
        assert (finding.kind, finding.what) == (Kind.MISSING, "sets of the table: nodeport-session-pools")


@pytest.mark.parametrize("gone", range(1, 4))
def test_only_the_endpoint_that_is_gone_differs(ground, gone):
    """Another endpoint would move to its slot, and is neither missing nor superfluous."""
    resync(ground.start(), cluster("a", endpoints=3))
    kept = [endpoint(f"10.244.0.{n}", HERE) for n in range(1, 4) if n != gone]
    fewer = {A: compile_service(service("a"), [parsed(*kept, ports=[EndpointPort(port=8080)])], WORLD).plans}
    for found in (everything(ground, fewer), some(ground, fewer)):
        endpoints = [(one.kind, one.what) for one in found if one.what.startswith("endpoint")]
        assert endpoints == [(Kind.EXTRA, f"endpoint 10.244.0.{gone}:8080 of 10.96.0.1:80/tcp")]


def test_an_endpoint_in_a_slot_past_its_pool_differs_in_one_slot(ground):
    """The pool has the right number of slots for each endpoint, and a hole."""
    plans = cluster("a", endpoints=2)
    resync(ground.start(), plans)
    at = "10.96.0.1 . tcp . 80 . "
    ground.disturb(f"delete element ip kube-proxy endpoints {{ {at}1 }}")
    ground.disturb(f"add element ip kube-proxy endpoints {{ {at}3 : 10.244.0.2 . 8080 }}")
    for found in (everything(ground, plans), some(ground, plans)):
        assert [(one.kind, one.what) for one in found] == [(Kind.DIFFERENT, "1 of 2 slots of 10.96.0.1:80/tcp")]


def test_an_endpoint_is_named_with_its_frontend(ground):
    plans = cluster("a", endpoints=3)
    resync(ground.start(), plans)
    ground.disturb("delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }")
    for found in (everything(ground, plans), some(ground, plans)):
        (finding,) = found
        assert (finding.service, finding.kind) == (A, Kind.MISSING)
        assert finding.what.startswith("endpoint 10.244.0.")
        assert finding.what.endswith(":8080 of 10.96.0.1:80/tcp")
        assert finding.where == "map endpoints of table ip kube-proxy"
    ground.disturb("add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 : 10.9.9.9 . 8080 }")
    for found in (everything(ground, plans), some(ground, plans)):
        assert [(finding.service, finding.kind) for finding in found] == [(A, Kind.MISSING), (A, Kind.EXTRA)]
        assert found[1].what == "endpoint 10.9.9.9:8080 of 10.96.0.1:80/tcp"


def test_an_endpoint_too_many_and_one_twice(ground):
    plans = cluster("a", endpoints=2)
    resync(ground.start(), plans)
    ground.disturb("add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 3 : 10.9.9.9 . 8080 }")
    for found in (everything(ground, plans), some(ground, plans)):
        (finding,) = found
        assert (finding.service, finding.kind, finding.what) == (
            A,
            Kind.EXTRA,
            "endpoint 10.9.9.9:8080 of 10.96.0.1:80/tcp",
        )


def test_the_outcome_for_a_frontend_is_reported(ground):
    plans = cluster("a")
    resync(ground.start(), plans)
    ground.disturb("add element ip kube-proxy no-local-endpoint-services { 10.96.0.1 . tcp . 80 }")
    for found in (everything(ground, plans), some(ground, plans)):
        (finding,) = found
        assert (finding.service, finding.kind, finding.what) == (A, Kind.EXTRA, "10.96.0.1:80/tcp")
        assert finding.present == "dropped, as no endpoint is on this node"


def test_a_source_range_that_another_program_added(ground):
    plans = {A: plans_of("a", 1, ingress=["198.51.100.1"], load_balancer_source_ranges=["172.16.0.0/24"])}
    resync(ground.start(), plans)
    ground.disturb("add element ip kube-proxy firewall-allow { 0.0.0.2 . 10.1.0.0-10.1.0.255 }")
    for found in (everything(ground, plans), some(ground, plans)):
        (finding,) = found
        assert (finding.service, finding.kind) == (A, Kind.EXTRA)
        assert finding.present == "open for 10.1.0.0 to 10.1.0.255"


def test_objects_without_a_service(ground):
    plans = cluster("a")
    resync(ground.start(), plans)
    ground.disturb("add element ip kube-proxy cluster-services { 10.96.9.9 . tcp . 80 : 1 }")
    (finding,) = everything(ground, plans)
    assert (finding.service, finding.kind, finding.what) == (None, Kind.EXTRA, "10.96.9.9:80/tcp")
    assert some(ground, plans) == []


def test_another_programs_table(ground):
    plans = cluster("a")
    resync(ground.start(), plans)
    ground.disturb("delete table ip kube-proxy", 'add table ip kube-proxy { comment "mine" ; }')
    for found in (everything(ground, plans), some(ground, plans)):
        (finding,) = found
        assert (finding.kind, finding.present) == (Kind.DIFFERENT, "mine")
    ground.disturb("delete table ip kube-proxy")
    assert [finding.kind for finding in everything(ground, plans)] == [Kind.MISSING]


def test_with_weights_the_number_of_slots_counts_and_their_order_does_not(ground):
    members = [endpoint(f"10.244.0.{n}") for n in (1, 2)]
    slices = [parsed(members[0], weight="50"), parsed(members[1])]
    plans = {A: compile_service(service("a"), slices, WORLD).plans}
    resync(ground.start(), plans)
    assert everything(ground, plans) == some(ground, plans) == []
    at = "10.96.0.1 . tcp . 80 . "
    ground.disturb(*(f"delete element ip kube-proxy endpoints {{ {at}{slot} }}" for slot in (0, 1)))
    swapped = f"{at}0 : 10.244.0.2 . 8080, {at}1 : 10.244.0.1 . 8080"
    ground.disturb(f"add element ip kube-proxy endpoints {{ {swapped} }}")
    assert everything(ground, plans) == some(ground, plans) == []
    ground.disturb(f"delete element ip kube-proxy endpoints {{ {at}0 }}")
    ground.disturb(f"add element ip kube-proxy endpoints {{ {at}0 : 10.244.0.1 . 8080 }}")
    for found in (everything(ground, plans), some(ground, plans)):
        assert [(one.kind, one.wanted, one.present) for one in found] == [
            (Kind.DIFFERENT, "once", "2 times"),
            (Kind.DIFFERENT, "2 times", "once"),
        ]


def test_a_frontend_with_another_number_than_the_first_of_its_pool(ground):
    plans = {A: sticky("a", 1, 2, external_ips=["203.0.113.1"])}
    resync(ground.start(), plans)
    at = "203.0.113.1 . tcp . 80"
    ground.disturb(f"delete element ip kube-proxy session-pools {{ {at} }}")
    ground.disturb(f"add element ip kube-proxy session-pools {{ {at} : 0.0.0.99 }}")
    for found in (everything(ground, plans), some(ground, plans)):
        (one,) = found
        assert (one.service, one.kind, one.what) == (A, Kind.DIFFERENT, "203.0.113.1:80/tcp")
        assert one.wanted == "session affinity uses a separate pool number"
        assert one.present == "session affinity uses the pool number 0.0.0.99"


def test_elements_of_a_pool_with_affinity_are_named(ground):
    plans = {A: sticky("a", 1, 2)}
    resync(ground.start(), plans)
    (of_slot_1,) = (e.split(" : ")[1] for e in ground.elements("session-slots") if e.startswith("0.0.0.2 . 1 "))
    ground.disturb("delete element ip kube-proxy session-slots { 0.0.0.2 . 0 }")
    ground.disturb("add element ip kube-proxy session-slots { 0.0.0.2 . 2 : 192.0.0.1 }")
    ground.disturb(f"delete element ip kube-proxy session-endpoints {{ {of_slot_1} . tcp }}")
    for found in (everything(ground, plans), some(ground, plans)):
        assert {one.service for one in found} == {A}
        assert {one.kind for one in found} <= {Kind.MISSING, Kind.EXTRA, Kind.DIFFERENT}
        assert "slot 0 of pool number 0.0.0.2" in {one.what for one in found}


def test_two_service_ports_with_one_number(ground):
    plans = {(A[0], name): sticky(name, number, 2) for number, name in enumerate("ab", 1)}
    resync(ground.start(), plans)
    elements = dict(element.split(" : ") for element in ground.elements("session-pools"))
    first, second = "10.96.0.1 . tcp . 80", "10.96.0.2 . tcp . 80"
    ground.disturb(f"delete element ip kube-proxy session-pools {{ {second} }}")
    ground.disturb(f"add element ip kube-proxy session-pools {{ {second} : {elements[first]} }}")
    found = everything(ground, plans)
    assert ((A[0], "b"), "10.96.0.2:80/tcp") in [(one.service, one.what) for one in found]
    assert (A[0], "a") not in {one.service for one in found}
    assert "10.96.0.1:80/tcp" in {finding.what for finding in some(ground, {(A[0], "a"): plans[A[0], "a"]})}
