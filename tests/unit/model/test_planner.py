"""The planner turns events into changed plans: the effect of each kind of event, one at a time."""

import itertools

import pytest
from msgspec.structs import replace

from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Rejected, Replaced, Upserted
from kubeproxy.model.objects import (
    EndpointPort,
    EndpointSlice,
    Labels,
    ObjectMeta,
    Service,
    ServiceCIDR,
    ServiceCIDRSpec,
    ServicePort,
)
from kubeproxy.model.plan import NOTHING, FrontendKind
from kubeproxy.model.planner import Counts, Planner
from support.cluster_objects import (
    HERE,
    dests,
    endpoint,
    endpoint_slice,
    frontend_keys,
    key,
    node_object,
    service,
    world,
)

ONE, TWO = endpoint("10.244.0.1", HERE), endpoint("10.244.0.2")
WEB = ("default", "web")
OLD, MID, NEW = "2024-01-01T00:00:00Z", "2024-06-01T00:00:00Z", "2025-01-01T00:00:00Z"


def upserted(obj):
    kinds = {Service: "services", EndpointSlice: "endpointslices"}
    return Upserted(kinds[type(obj)], obj)


def planner(*objects, **more) -> Planner:
    """A planner that has listed these objects, without pending changes."""
    found = Planner(world(**({"families": [Family.IPV4]} | more)))
    for resource, kind in (("services", Service), ("endpointslices", EndpointSlice)):
        assert found.apply([Replaced(resource, [o for o in objects if isinstance(o, kind)])]) == []
    found.take()
    return found


def taken(subject: Planner, *events):
    """Return the changes that events cause, by Service name."""
    assert subject.apply(events) == []
    return {change.name[1]: change for change in subject.take()}


def cluster_pool(subject: Planner, name=WEB):
    return subject.compiled[name].plans[0].cluster


# -- completeness --------------------------------------------------------------------------------------------------


def test_complete_when_services_and_slices_were_listed():
    subject = Planner(world())
    assert not subject.complete
    subject.apply([upserted(service()), upserted(endpoint_slice(ONE))])
    assert not subject.complete
    subject.apply([Replaced("services", [])])
    subject.apply([Replaced("nodes", []), Replaced("servicecidrs", [])])
    assert not subject.complete
    subject.apply([Replaced("endpointslices", [])])
    assert subject.complete


# -- single events -------------------------------------------------------------------------------------------------


def test_a_service_comes_changes_and_goes():
    subject = planner()
    (change,) = taken(subject, upserted(service())).values()
    assert (change.name, change.before, change.uid) == (WEB, NOTHING, "uid-of-web")
    assert frontend_keys(change.after.plans[0], FrontendKind.CLUSTER) == {key("10.96.0.1:80")}
    came = change.after
    (change,) = taken(subject, upserted(service(external_ips=["203.0.113.1"]))).values()
    assert change.before == came
    (change,) = taken(subject, Deleted("services", *WEB)).values()
    assert (change.after, change.uid) == (NOTHING, "")
    assert subject.compiled == {}
    assert taken(subject, Deleted("services", *WEB)) == {}


def test_slices_may_come_before_their_service():
    subject = planner()
    assert taken(subject, upserted(endpoint_slice(ONE))) == {}
    taken(subject, upserted(service()))
    assert cluster_pool(subject) == dests("10.244.0.1:8080")


def test_a_slice_comes_changes_and_goes():
    subject = planner(service())
    taken(subject, upserted(endpoint_slice(ONE)))
    assert cluster_pool(subject) == dests("10.244.0.1:8080")
    taken(subject, upserted(endpoint_slice(ONE, TWO)))
    assert cluster_pool(subject) == dests("10.244.0.1:8080", "10.244.0.2:8080")
    taken(subject, Deleted("endpointslices", "default", "web-1"))
    assert cluster_pool(subject) == ()
    assert subject.slices == {}


def test_slices_belong_to_services_of_their_namespace():
    subject = planner(service(), service(namespace="other"))
    assert set(taken(subject, upserted(endpoint_slice(ONE, namespace="other")))) == {"web"}
    assert cluster_pool(subject) == ()
    assert cluster_pool(subject, ("other", "web")) == dests("10.244.0.1:8080")


@pytest.mark.parametrize(
    "moved",
    [
        endpoint_slice(ONE, of=None),
        endpoint_slice(ONE, of=""),
        EndpointSlice(ObjectMeta(name="web-1", namespace="default"), "IPv4", [ONE], [EndpointPort(port=8080)]),
        endpoint_slice(ONE, family="FQDN"),
        endpoint_slice(ONE, of="other"),
    ],
)
def test_a_slice_that_is_moved_away_takes_its_endpoints_along(moved):
    subject = planner(service(), service("other", "10.96.0.2"), endpoint_slice(ONE))
    taken(subject, upserted(moved))
    assert cluster_pool(subject) == ()
    expected = dests("10.244.0.1:8080") if moved.metadata.labels == Labels(service_name="other") else ()
    assert cluster_pool(subject, ("default", "other")) == expected
    taken(subject, upserted(endpoint_slice(ONE)))
    assert cluster_pool(subject) == dests("10.244.0.1:8080")
    assert cluster_pool(subject, ("default", "other")) == ()


def test_a_change_without_effect_is_no_change():
    subject = planner(service(), endpoint_slice(ONE, TWO))
    renumbered = replace(service(), metadata=replace(service().metadata, resource_version="99"))
    assert taken(subject, upserted(renumbered)) == {}
    assert taken(subject, upserted(endpoint_slice(TWO, ONE))) == {}
    assert taken(subject, upserted(service("headless", "None"))) == {}
    assert taken(subject, upserted(endpoint_slice(ONE, name="x", of="nobody"))) == {}
    assert taken(subject, Deleted("endpointslices", "default", "nobody")) == {}


def test_a_change_undone_before_it_was_taken_is_no_change():
    subject = planner(service(), endpoint_slice(ONE))
    events = [
        upserted(endpoint_slice(TWO)),
        Deleted("services", *WEB),
        upserted(service()),
        upserted(endpoint_slice(ONE)),
    ]
    assert taken(subject, *events) == {}


def test_only_the_service_concerned_changes():
    others = [service(f"s{n}", f"10.96.1.{n}") for n in range(50)]
    subject = planner(service(), *others)
    assert subject.dirty == 0
    subject.apply([upserted(endpoint_slice(ONE))])
    assert subject.dirty == 1
    assert [change.name for change in subject.take()] == [WEB]


def test_important_services_come_first():
    names = [("default", "a"), ("kube-system", "kube-dns"), ("z", "z"), ("default", "kubernetes"), ("default", "zz")]
    events = [upserted(service(n, f"10.96.0.{i}", namespace=ns)) for i, (ns, n) in enumerate(names, 1)]
    subject = planner()
    subject.apply(events)
    assert {change.name for change in subject.take()[:2]} == {("kube-system", "kube-dns"), ("default", "kubernetes")}


# -- lists ---------------------------------------------------------------------------------------------------------


def test_a_list_removes_objects_that_it_lacks():
    subject = planner(service(), service("other", "10.96.0.2"), endpoint_slice(ONE))
    assert set(taken(subject, Replaced("services", [service("other", "10.96.0.2")]))) == {"web"}
    assert taken(subject, Replaced("services", [service(), service("other", "10.96.0.2")])).keys() == {"web"}
    assert cluster_pool(subject) == dests("10.244.0.1:8080")
    taken(subject, Replaced("endpointslices", []))
    assert cluster_pool(subject) == ()


def test_an_equal_list_changes_nothing():
    objects = [service(), endpoint_slice(ONE)]
    subject = planner(*objects)
    assert taken(subject, Replaced("services", [objects[0]]), Replaced("endpointslices", [objects[1]])) == {}
    assert subject.dirty == 0


def test_an_undecodable_object_of_a_list_keeps_its_last_valid_state():
    subject = planner(service(), service("other", "10.96.0.2"), endpoint_slice(ONE))
    assert taken(subject, Replaced("services", [], None)) == {}  # the intended one of them cannot be determined
    assert taken(subject, Replaced("services", [], frozenset({WEB}))).keys() == {"other"}
    assert taken(subject, Replaced("endpointslices", [], frozenset({("default", "web-1")}))) == {}
    assert cluster_pool(subject) == dests("10.244.0.1:8080")
    assert taken(subject, Replaced("services", [], frozenset({("default", "unknown")}))).keys() == {"web"}


def test_lists_of_other_kinds_leave_services_alone():
    subject = planner(service())
    assert taken(subject, Replaced("nodes", [node_object()]), Replaced("servicecidrs", [])) == {}


def test_objects_are_those_with_counted_changes():
    subject = planner(service(), service("other", "10.96.0.2"), endpoint_slice(ONE))
    assert subject.objects == Counts(2, 1)
    subject.apply([upserted(endpoint_slice(name="nobodys", of=None)), Deleted("services", "default", "other")])
    assert subject.objects == Counts(1, 1)


# -- nodes and service CIDRs ---------------------------------------------------------------------------------------


def cidr(name, *cidrs):
    return ServiceCIDR(ObjectMeta(name=name), ServiceCIDRSpec(list(cidrs)))


def test_nodes_and_service_cidrs_are_kept_for_the_world():
    subject = planner()
    subject.apply([Upserted("nodes", node_object("n1")), Upserted("nodes", node_object("n2", zone="z"))])
    subject.apply([Upserted("servicecidrs", cidr("a", "10.96.0.0/16", "fd00::/112"))])
    subject.apply([Upserted("servicecidrs", ServiceCIDR(ObjectMeta(name="empty")))])
    assert set(subject.nodes) == {"n1", "n2"}
    assert subject.service_cidrs == {"a": ("10.96.0.0/16", "fd00::/112"), "empty": ()}
    subject.apply([Deleted("nodes", "", "n1"), Deleted("servicecidrs", "", "a"), Deleted("nodes", "", "unknown")])
    assert set(subject.service_cidrs) == {"empty"}
    subject.apply([Replaced("servicecidrs", [cidr("b", "10.97.0.0/16")])])
    assert subject.service_cidrs == {"b": ("10.97.0.0/16",)}


@pytest.mark.parametrize("event", [Deleted("nodes", "", HERE), Replaced("nodes", [])])
def test_a_node_that_is_gone_is_remembered(event):
    subject = planner()
    known = node_object(HERE, ("InternalIP", "192.0.2.1"), zone="z")
    subject.apply([Upserted("nodes", known), event])
    assert (subject.nodes, subject.deleted_nodes) == ({HERE: known}, {HERE})
    again = node_object(HERE, ("InternalIP", "192.0.2.2"))
    subject.apply([Upserted("nodes", again)])
    assert (subject.nodes, subject.deleted_nodes) == ({HERE: again}, set())
    subject.apply([Upserted("nodes", node_object(HERE))])
    assert subject.nodes[HERE].status == again.status


def test_a_changed_world_changes_dependent_plans():
    hinted = endpoint_slice(endpoint("10.244.0.1", zones=["z1"]), endpoint("10.244.0.2", zones=["z2"]))
    subject = planner(service(), hinted, service("other", "10.96.0.2"))
    subject.set_world(world(families=[Family.IPV4], zone="z1"))
    assert [change.name for change in subject.take()] == [WEB]
    assert cluster_pool(subject) == dests("10.244.0.1:8080")


def test_a_world_that_means_the_same_is_no_work():
    subject = planner(service(), endpoint_slice(ONE))
    ours = world(families=[Family.IPV4])
    subject.set_world(
        replace(ours, ipv4=replace(ours.ipv4, nodeport_ips=None, service_cidrs=((b"\0" * 4, b"\1" * 4),)))
    )
    assert subject.dirty == 0
    subject.set_world(world(families=[Family.IPV4], detector=False))
    assert len(subject.take()) == 1


def test_marking_all_is_harmless():
    subject = planner(service(), endpoint_slice(ONE))
    subject.mark_all()
    assert subject.dirty == 1
    assert subject.take() == []


# -- bad input -----------------------------------------------------------------------------------------------------


def test_rejected_objects_are_passed_on_and_change_nothing():
    subject = planner(service())
    rejected = Rejected("services", "default", "web", "uid", "spec.ports[0].port", "is no number")
    assert subject.apply([rejected]) == [rejected]
    assert subject.take() == []
    assert subject.compiled[WEB] != NOTHING


def test_bad_entries_of_a_slice_are_reported_once():
    bad = endpoint_slice(ONE, endpoint("nonsense"))
    subject = planner(service())
    (reported,) = subject.apply([upserted(bad)])
    assert (reported.resource, reported.namespace, reported.name) == ("endpointslices", "default", "web-1")
    assert (reported.uid, reported.field) == ("uid-of-web-1", "endpoints[1].addresses[0]")
    assert subject.apply([upserted(bad), Replaced("endpointslices", [bad])]) == []
    worse = endpoint_slice(ONE, endpoint("nonsense"), endpoint("more nonsense"))
    assert [r.field for r in subject.apply([upserted(worse)])] == ["endpoints[2].addresses[0]"]
    subject.apply([Deleted("endpointslices", "default", "web-1")])
    assert len(subject.apply([upserted(bad)])) == 1


def test_problems_of_a_service_are_part_of_the_change():
    subject = planner(service(), service("other", "10.96.0.2"))
    changes = taken(subject, upserted(service(external_ips=["nonsense"])))
    assert [p.field for p in changes["web"].after.problems] == ["spec.externalIPs"]
    assert list(changes) == ["web"]
    assert taken(subject, upserted(service(external_ips=["nonsense"]))) == {}


# -- input of metrics ------------------------------------------------------------------------------------------------


def test_counts_of_changes():
    subject = planner()
    subject.counts.services = subject.counts.endpoints = 0
    subject.apply([upserted(service()), upserted(service()), upserted(endpoint_slice(ONE))])
    subject.apply([upserted(endpoint_slice(ONE)), Deleted("services", "default", "nobody")])
    assert (subject.counts.services, subject.counts.endpoints) == (1, 1)
    subject.apply([Deleted("services", *WEB), Deleted("endpointslices", "default", "web-1")])
    assert (subject.counts.services, subject.counts.endpoints) == (2, 2)


def test_triggers_are_those_of_changes_after_the_first_lists():
    first, later = "2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z"
    subject = planner(service(), endpoint_slice(ONE, triggered=first))
    assert taken(subject, upserted(endpoint_slice(ONE, triggered=first))) == {}
    change = taken(subject, upserted(endpoint_slice(ONE, TWO, triggered=later)))["web"]
    assert change.triggers == ((Family.IPV4, later),)
    change = taken(subject, upserted(endpoint_slice(ONE)))["web"]
    assert change.triggers == ()


def test_the_first_lists_have_no_triggers():
    subject = Planner(world())
    subject.apply([Replaced("services", [service()])])
    subject.apply([Replaced("endpointslices", [endpoint_slice(ONE, triggered="2026-01-01T00:00:00Z")])])
    assert [change.triggers for change in subject.take()] == [()]


def test_a_deletion_forgets_the_triggers_of_updates_before_it():
    subject = planner(service(), endpoint_slice(ONE))
    subject.apply([upserted(endpoint_slice(ONE, TWO, triggered="2026-01-01T00:00:00Z"))])
    change = taken(subject, Deleted("endpointslices", "default", "web-1"))["web"]
    assert change.triggers == ()


def test_a_deleted_slice_has_no_trigger():
    """Its annotation has the time of its last update, which may be days ago."""
    subject = planner(service(), endpoint_slice(ONE, triggered="2026-01-01T00:00:00Z"))
    change = taken(subject, Deleted("endpointslices", "default", "web-1"))["web"]
    assert change.triggers == ()


# -- collisions ----------------------------------------------------------------------------------------------------

SHARED = "203.0.113.1"


def claimant(name, created, number, **spec):
    return service(name, f"10.96.0.{number}", created=created, **({"external_ips": [SHARED]} | spec))


def owner_of(subject: Planner, wanted: bytes):
    owners = {name[1] for name, c in subject.compiled.items() for p in c.plans for f in p.frontends if f.key == wanted}
    assert len(owners) <= 1
    return next(iter(owners), None)


def reports(subject: Planner, name):
    return [p for p in subject.compiled["default", name].problems if p.field == "spec.ports"]


THREE = [claimant("a", NEW, 1), claimant("b", OLD, 2), claimant("c", MID, 3)]


@pytest.mark.parametrize("order", list(itertools.permutations(THREE)))
@pytest.mark.parametrize("apart", [False, True])
def test_the_oldest_of_three_owns_the_address(order, apart):
    subject = planner()
    if apart:
        for obj in order:
            taken(subject, upserted(obj))
    else:
        taken(subject, *map(upserted, order))
    assert owner_of(subject, key(f"{SHARED}:80")) == "b"
    for name in "ac":
        (problem,) = reports(subject, name)
        assert "default/b" in problem.reason
    assert reports(subject, "b") == []


def test_the_next_oldest_takes_over_when_the_owner_goes():
    subject = planner(*THREE)
    changes = taken(subject, Deleted("services", "default", "b"))
    assert set(changes) == {"a", "b", "c"}
    assert owner_of(subject, key(f"{SHARED}:80")) == "c"
    assert "default/c" in reports(subject, "a")[0].reason
    assert set(taken(subject, upserted(claimant("c", MID, 3, external_ips=[])))) == {"a", "c"}
    assert owner_of(subject, key(f"{SHARED}:80")) == "a"
    assert reports(subject, "a") == []


def test_a_service_made_again_waits_in_line():
    subject = planner(*THREE)
    taken(subject, Deleted("services", "default", "b"), upserted(claimant("b", "2026-01-01T00:00:00Z", 2)))
    assert owner_of(subject, key(f"{SHARED}:80")) == "c"
    taken(subject, upserted(claimant("b", OLD, 2)))
    assert owner_of(subject, key(f"{SHARED}:80")) == "b"


def test_the_loser_keeps_its_other_frontends_and_its_neighbours_are_unaffected():
    subject = planner(*THREE, service("bystander", "10.96.0.9"))
    (plan,) = subject.compiled["default", "a"].plans
    assert {f.key for f in plan.frontends} == {key("10.96.0.1:80")}
    assert subject.compiled["default", "bystander"].problems == ()


def test_a_service_that_loses_its_load_balancer_address_has_no_source_ranges():
    ports = [ServicePort(port=80, name="a"), ServicePort(port=81, name="b")]
    subject = planner(
        service("older", "10.96.0.1", created=OLD, ingress=[SHARED]),
        service(
            "a", "10.96.0.2", created=NEW, ingress=[SHARED], ports=ports, load_balancer_source_ranges=["10.0.0.0/8"]
        ),
    )
    lost, kept = subject.compiled["default", "a"].plans
    assert (len(lost.frontends), lost.source_ranges) == (1, None)
    assert (len(kept.frontends), bool(kept.source_ranges)) == (2, True)


def test_node_ports_collide_by_protocol():
    ports = {p: [ServicePort(port=80, protocol=p, node_port=30080)] for p in ("TCP", "UDP")}
    subject = planner(
        service("a", "10.96.0.1", created=NEW, ports=ports["TCP"]),
        service("b", "10.96.0.2", created=OLD, ports=ports["TCP"]),
        service("c", "10.96.0.3", created=NEW, ports=ports["UDP"]),
    )
    assert owner_of(subject, key(":30080")) == "b"
    assert owner_of(subject, key(":30080", "UDP")) == "c"
    assert len(reports(subject, "a")) == 1


def test_kinds_of_frontends_collide_with_each_other():
    subject = planner(
        service("a", "10.96.0.1", created=OLD),
        service("b", "10.96.0.2", created=NEW, external_ips=["10.96.0.1"]),
        service("c", "10.96.0.3", created=NEW, ingress=["10.96.0.2"]),
    )
    assert owner_of(subject, key("10.96.0.1:80")) == "a"
    assert owner_of(subject, key("10.96.0.2:80")) == "b"


def test_an_older_external_ip_takes_no_cluster_ip():
    """Otherwise a user who may write externalIPs could take the cluster IPs of all younger Services."""
    thief = service("a", "10.96.0.1", created=OLD, external_ips=["10.96.0.2", "10.96.0.3"])
    subject = planner(
        thief,
        service("b", "10.96.0.2", created=NEW),
        service("c", "10.96.0.4", created=MID, ingress=["10.96.0.3"]),
    )
    assert owner_of(subject, key("10.96.0.2:80")) == "b"
    assert owner_of(subject, key("10.96.0.3:80")) == "a"
    (problem,) = reports(subject, "a")
    assert problem.reason == (
        "external 10.96.0.2 TCP 80 is the cluster IP of Service default/b; not programmed for this Service"
    )
    assert set(taken(subject, upserted(service("d", "10.96.0.3", created=NEW)))) == {"a", "c", "d"}
    assert owner_of(subject, key("10.96.0.3:80")) == "d"
    assert "cluster IP of Service default/d" in reports(subject, "c")[0].reason
    taken(subject, Deleted("services", "default", "b"))
    assert owner_of(subject, key("10.96.0.2:80")) == "a"


NODE_PORT = [ServicePort(port=80, node_port=30080)]
SAME_NUMBER = [ServicePort(port=30080)]


@pytest.mark.parametrize("nodeports", ["primary", "all"])
@pytest.mark.parametrize("written", [{"external_ips": ["192.0.2.1"]}, {"ingress": ["192.0.2.1"]}])
def test_an_address_of_the_node_takes_no_nodeport_of_another_service(written, nodeports):
    subject = planner(service("a", "10.96.0.1", created=OLD, ports=SAME_NUMBER, **written))
    subject.set_world(world(families=[Family.IPV4], nodeports=nodeports))
    subject.take()
    shared = key("192.0.2.1:30080")
    assert owner_of(subject, shared) == "a"
    assert subject.owner(Family.IPV4, key(":30080")) is None
    assert set(taken(subject, upserted(service("b", "10.96.0.2", created=NEW, ports=NODE_PORT)))) == {"a", "b"}
    assert subject.owner(Family.IPV4, key(":30080")) == ("default", "b")
    assert owner_of(subject, shared) is None
    assert owner_of(subject, key(":30080")) == "b"
    (problem,) = reports(subject, "a")
    assert problem.reason.endswith("is a NodePort of Service default/b; not programmed for this Service")
    assert set(taken(subject, upserted(service("b", "10.96.0.2", created=NEW)))) == {"a", "b"}
    assert owner_of(subject, shared) == "a"


def test_nodeports_come_first_on_the_addresses_that_they_answer_on():
    subject = planner(
        service("a", "10.96.0.1", ports=SAME_NUMBER, external_ips=["192.0.2.1", "203.0.113.1"]),
        service("b", "10.96.0.2", ports=NODE_PORT),
    )
    here, elsewhere = key("192.0.2.1:30080"), key("203.0.113.1:30080")
    assert (owner_of(subject, here), owner_of(subject, elsewhere)) == (None, "a")
    subject.set_world(world(families=[Family.IPV4], nodeports="none"))
    assert [change.name[1] for change in subject.take()] == ["a"]
    assert owner_of(subject, here) == "a"
    subject.set_world(world(families=[Family.IPV4]))
    assert [change.name[1] for change in subject.take()] == ["a"]
    assert owner_of(subject, here) is None


def test_a_service_has_its_own_nodeport_as_an_external_ip_too():
    ports = [ServicePort(port=30080, node_port=30080)]
    subject = planner(
        service("a", "10.96.0.1", created=OLD, ports=ports, external_ips=["192.0.2.1"]),
        service("b", "10.96.0.2", created=NEW, ports=SAME_NUMBER, external_ips=["192.0.2.1"]),
    )
    assert owner_of(subject, key("192.0.2.1:30080")) == owner_of(subject, key(":30080")) == "a"
    assert len(reports(subject, "b")) == 1


def test_families_do_not_collide():
    node_port = [ServicePort(port=80, node_port=30080)]
    subject = planner(
        service("a", "10.96.0.1", created=OLD, ports=node_port),
        service("b", "fd00::1", created=NEW, ports=node_port),
        families=[Family.IPV4, Family.IPV6],
    )
    assert subject.compiled["default", "b"].problems == ()


def test_other_ports_of_the_same_address_do_not_collide():
    subject = planner(THREE[0], claimant("d", OLD, 4, ports=[ServicePort(port=81)]))
    assert owner_of(subject, key(f"{SHARED}:80")) == "a"
    assert owner_of(subject, key(f"{SHARED}:81")) == "d"


def test_a_service_that_becomes_headless_lets_go():
    subject = planner(*THREE)
    taken(subject, upserted(service("b", "None", created=OLD, external_ips=[SHARED])))
    assert owner_of(subject, key(f"{SHARED}:80")) == "c"


def test_a_large_service_is_compiled_in_steps():
    many = 300
    ports = [ServicePort(port=number, name=f"p{number}") for number in range(1, many + 1)]
    offered = [EndpointPort(port=number, name=f"p{number}") for number in range(1, many + 1)]
    pods = [endpoint(f"10.244.0.{number}") for number in range(1, 101)]
    slices = [endpoint_slice(*pods, ports=offered)]
    found = Planner(world(families=[Family.IPV4]))
    found.apply([Replaced("services", [service("web", ports=ports)]), Replaced("endpointslices", slices)])
    steps = list(found.taking())
    assert len(steps) >= many * len(pods) / 10_000
    assert [len(change.after.plans) for changes in steps for change in changes] == [many]


@pytest.mark.parametrize("meanwhile", ["nothing", "changed", "deleted"])
def test_a_slow_service_is_compiled_in_the_background(meanwhile):
    """Changes of others are ready before it, even if it changes all the time. A deletion is a change without delay."""
    ports = [ServicePort(port=number, name=f"p{number}") for number in range(1, 301)]
    offered = [EndpointPort(port=number, name=f"p{number}") for number in range(1, 301)]
    subject = planner(service("web", ports=ports), service("other", "10.96.0.9"))

    def slices(count):
        return upserted(endpoint_slice(*(endpoint(f"10.244.0.{n}") for n in range(1, count + 1)), ports=offered))

    subject.apply([slices(99), upserted(service("other", "10.96.0.9", ports=[ServicePort(port=1)]))])
    takes = [[change.name[1] for step in subject.taking() for change in step]]
    assert subject.is_dirty(WEB)
    assert subject.dirty == 1
    if meanwhile == "changed":
        subject.apply([slices(100)])
    elif meanwhile == "deleted":
        subject.apply([Deleted("services", *WEB)])
    while subject.dirty:
        steps = list(subject.taking())
        assert len(steps) < 15
        takes.append([change.name[1] for step in steps for change in step])
    first, *others = [names for names in takes if names]
    assert first == ["other"]
    assert others == [["web"]] * (2 if meanwhile == "changed" else 1)
    found = subject.compiled.get(WEB, NOTHING)
    assert {len(plan.cluster) for plan in found.plans} == {"nothing": {99}, "changed": {100}, "deleted": set()}[
        meanwhile
    ]


def test_slow_services_take_turns():
    """No change waits until all others are compiled."""
    offered = [EndpointPort(port=number, name=f"p{number}") for number in range(1, 301)]
    ports = [ServicePort(port=number, name=f"p{number}") for number in range(1, 301)]
    small, few = ports[:10], offered[:10]
    names = {"large": (ports, offered), **{f"s{n}": (small, few) for n in range(8)}}
    subject = planner(*(service(name, f"10.96.0.{n}", ports=its[0]) for n, (name, its) in enumerate(names.items(), 1)))
    pods = [endpoint(f"10.244.0.{n}") for n in range(1, 101)]
    subject.apply(
        [upserted(endpoint_slice(*pods, ports=its[1], name=f"{name}-1", of=name)) for name, its in names.items()]
    )
    takes = []
    while subject.dirty:
        takes.append([change.name[1] for step in subject.taking() for change in step])
    assert takes[0] == []
    assert takes[-1] == ["large"]
    assert sorted(name for names in takes[1:-1] for name in names) == [f"s{n}" for n in range(8)]
