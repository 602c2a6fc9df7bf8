"""Weights, draining, slow start: the effects of annotations on plans, wrong annotations, and their place in answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.nftables.render import slots
from kubeproxy.config.modes import MODES
from kubeproxy.features import BALANCING
from kubeproxy.model.addresses import Family
from kubeproxy.model.answer import Packet, answer
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from kubeproxy.model.plan import ROOM, Balance, Policy
from support.cluster_objects import (
    HERE,
    THERE,
    address,
    dest,
    dests,
    draining,
    endpoint,
    endpoint_slice,
    parsed,
    service,
    world,
)
from support.compiled import compile_service
from unit.model.test_planner import WEB, planner, taken, upserted

WORLD = world(families=[Family.IPV4])
ONE, TWO, THREE = (endpoint(f"10.244.0.{n}", HERE if n == 1 else THERE) for n in (1, 2, 3))
EVERY = dests("10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.3:8080")


def compiled(*slices, globals_=WORLD, slow_start=None, growth=None, weights=None, **spec):
    subject = service(annotations=Annotations(weights=weights, slow_start=slow_start), **spec)
    return compile_service(subject, slices, globals_, growth or {})


def shared(*slices, **more):
    """Return the cluster pool with weights, and the drained endpoints."""
    (plan,) = compiled(*slices, **more).plans
    balance = plan.balance or Balance()
    weights = balance.cluster or (None,) * len(plan.cluster)
    return dict(zip(plan.cluster, weights, strict=True)), balance.drained


def test_without_annotations_shares_are_not_mentioned():
    (plan,) = compile_service(service(), [parsed(ONE, TWO)], WORLD).plans
    assert plan.balance is None


@pytest.mark.parametrize("text", ["", f"{HERE}=100", "elsewhere=0", f"{HERE}=50, {THERE}=50", " , "])
def test_equal_weights_are_the_plan_as_without(text):
    assert compiled(parsed(ONE, TWO, THREE), weights=text).plans == compiled(parsed(ONE, TWO, THREE)).plans
    assert compiled(parsed(ONE, TWO, THREE), weights=text).problems == ()


def test_a_slice_has_a_weight_for_all_of_its_endpoints():
    slices = parsed(ONE, TWO, name="stable"), parsed(THREE, name="canary", weight="5")
    assert shared(*slices) == (dict(zip(EVERY, (100, 100, 5), strict=True)), ())


def test_a_node_has_a_weight_for_endpoints_on_it_and_the_smaller_one_counts():
    slices = parsed(ONE, name="a", weight="30"), parsed(TWO, name="b", weight="80"), parsed(THREE, name="c")
    found, _ = shared(*slices, weights=f"{THERE}=50,{HERE}=70")
    assert list(found.values()) == [30, 50, 50]


def test_of_an_endpoint_in_two_slices_the_smaller_weight_counts():
    found, drained = shared(parsed(ONE, TWO, weight="9"), parsed(TWO, name="other", weight="0"))
    assert (list(found), drained) == ([EVERY[0]], (EVERY[1],))


def test_weight_0_drains_and_the_others_share_evenly():
    found = compiled(parsed(ONE, TWO, THREE), weights=f"{HERE}=0")
    (plan,) = found.plans
    assert (plan.cluster, plan.serving, found.problems) == (EVERY[1:], EVERY, ())
    assert plan.balance == Balance(drained=EVERY[:1])


def test_if_all_endpoints_are_drained_shares_are_equal_and_an_event_reports_it():
    found = compiled(parsed(ONE, TWO, weight="0"))
    (plan,) = found.plans
    assert (plan.cluster, plan.balance) == (EVERY[:2], None)
    (problem,) = found.problems
    assert "all endpoints of this service port have weight 0" in problem.reason


def test_each_pool_is_drained_on_its_own():
    found = compiled(
        parsed(ONE, TWO), weights=f"{HERE}=0", external_ips=["203.0.113.1"], external_traffic_policy="Local"
    )
    (plan,) = found.plans
    assert (plan.cluster, plan.local) == (EVERY[1:2], EVERY[:1])
    assert "all endpoints on this node have weight 0" in found.problems[0].reason


def test_terminating_endpoints_have_weights_when_there_are_no_others():
    slices = parsed(draining("10.244.0.1"), weight="10"), parsed(draining("10.244.0.2"), name="b")
    assert shared(*slices) == (dict(zip(EVERY[:2], (10, 100), strict=True)), ())


PLACES = {"10.244.0.1": "eu-1a", "10.244.0.2": "eu-1a", "10.244.0.3": "eu-1b"}


def test_a_zone_has_a_weight_for_endpoints_in_it_and_the_smallest_of_all_counts():
    slices = parsed(ONE, TWO, placed=PLACES), parsed(THREE, name="b", weight="30", placed=PLACES)
    found, _ = shared(*slices, weights=f"zone:eu-1a=50,zone:eu-1b=70,zone:elsewhere=0,{HERE}=20")
    assert list(found.values()) == [20, 50, 30]
    found, drained = shared(*slices, weights="zone:eu-1a=0")
    assert (list(found), drained) == ([EVERY[2]], EVERY[:2])


def test_a_zone_is_no_node_and_where_zones_are_not_known_nodes_count_alone():
    assert shared(parsed(ONE, TWO, placed={"10.244.0.1": HERE}), weights=f"{HERE}=100,zone:{THERE}=0")[1] == ()
    found, _ = shared(parsed(ONE, TWO), weights=f"{HERE}=20,zone:eu-1a=0")
    assert list(found.values()) == [20, 100]


def test_zones_count_beside_endpoints_that_make_no_sense():
    piece = parsed(endpoint("nonsense"), ONE, draining("10.244.0.2"), placed=PLACES | {"nonsense": "eu-1a"})
    assert [one.zone for one in piece.endpoints] == ["eu-1a", "eu-1a"]


def test_an_annotation_longer_than_any_use_of_it_is_not_read():
    text = ",".join(f"node-{n}=50" for n in range(2000))
    found = compiled(parsed(ONE, TWO), weights=text)
    assert found.plans == compiled(parsed(ONE, TWO)).plans
    assert "characters are more than" in found.problems[0].reason


WRONG = [f"{HERE}=101", f"{HERE}=-1", HERE, "=5", f"{HERE}=", f"{HERE}=½", f"{HERE}=5,{HERE}=6"]
WRONG += ["zone:=5", "zone:a", "zone:a=5,zone:a=5", "zones:a=5", "zone:zone:a=5"]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_annotation_of_a_service_is_named_and_none_of_it_counts(text):
    found = compiled(parsed(ONE, TWO), weights=f"{THERE}=7,{text}")
    assert found.plans == compiled(parsed(ONE, TWO)).plans
    (problem,) = found.problems
    assert problem.field == "metadata.annotations[kube-proxy-py/weights]"
    assert "no weight of this annotation counts" in problem.reason


@pytest.mark.parametrize("text", ["", "-1", "101", "0.5", "1e1", "x" * 300, "9" * 5000, "\u0661"])
def test_a_wrong_annotation_of_a_slice_is_named_and_does_not_count(text):
    piece = parsed(ONE, TWO, weight=text)
    assert piece.weight is None
    (problem,) = piece.problems
    assert problem.field == "metadata.annotations[kube-proxy-py/weight]"
    assert len(problem.reason) < 300
    assert compiled(piece).plans == compiled(parsed(ONE, TWO)).plans


def test_the_weight_of_cilium_applies_if_ours_is_missing():
    assert parsed(ONE, cilium_weight="50").weight == 50
    assert parsed(ONE, weight="10", cilium_weight="50").weight == 10
    piece = parsed(ONE, cilium_weight="65535")
    assert piece.weight is None
    assert [problem.field for problem in piece.problems] == ["metadata.annotations[service.cilium.io/weight]"]


@pytest.mark.parametrize("text", ["-1", "3601", "1m", ""])
def test_a_wrong_slow_start_is_named_and_does_not_count(text):
    (problem,) = compiled(parsed(ONE), slow_start=text).problems
    assert problem.field == "metadata.annotations[kube-proxy-py/slow-start]"


def test_a_mode_with_equal_shares_reports_it_once():
    globals_ = BALANCING.on(world(families=[Family.IPV4, Family.IPV6]), 0)
    slices = parsed(ONE, name="a", weight="0"), parsed(TWO, name="b")
    (problem,) = compiled(*slices, globals_=globals_, weights="nonsense").problems
    assert "the Service's requests for shares are ignored" in problem.reason
    (problem,) = compile_service(service(), slices, globals_).problems
    assert "the weights of the Service's EndpointSlices are ignored" in problem.reason
    assert compile_service(service(), slices, globals_).plans[0].cluster == EVERY[:2]


def test_one_mode_has_weights():
    assert [name for name in MODES if BALANCING.supported(name)] == ["nftables"]


def test_new_endpoints_have_a_part_of_their_weight():
    found, _ = shared(parsed(ONE, TWO), slow_start="10", growth={address("10.244.0.2"): 20})
    assert list(found.values()) == [100, 20]


# -- limits of the tables -----------------------------------------------------------------------------------------


def crowded(ports, endpoints, **annotations):
    """Return the plans of a Service with 21 addresses, the number of their entries, and the problems."""
    subject = service(
        ports=[ServicePort(port=1000 + n, name=f"p{n}") for n in range(ports)],
        external_ips=[f"203.0.113.{n}" for n in range(1, 21)],
        annotations=Annotations(**annotations),
    )
    members = [endpoint(f"10.244.{n // 250}.{n % 250}", THERE if n else HERE) for n in range(endpoints)]
    piece = parsed(*members, ports=[EndpointPort(8000 + n, f"p{n}") for n in range(ports)])
    found = compile_service(subject, [piece], WORLD)
    entries = sum(len(plan.frontends) * len(slots(plan, Policy.CLUSTER)) for plan in found.plans)
    return found.plans, entries, [problem.reason for problem in found.problems]


@pytest.mark.parametrize(("ports", "table"), [(1, 1021), (3, 1021), (4, 251), (12, 251), (13, 0)])
def test_a_table_is_as_large_as_there_is_room_for_at_all_ports_and_addresses(ports, table):
    plans, entries, problems = crowded(ports, 3, algorithm="maglev-4093")
    assert entries <= ROOM
    assert {plan.balance.hashing.size if plan.balance else 0 for plan in plans} == {table}
    instead = f"{table} are used" if table else "picked at random"
    assert [instead in problem for problem in problems] == [True] * (table < 4093)


@pytest.mark.parametrize(
    ("ports", "endpoints", "told"), [(1, 20, False), (60, 20, True), (60, 300, True), (2, 900, True)]
)
def test_weights_are_as_exact_as_there_is_room_for(ports, endpoints, told):
    _, entries, problems = crowded(ports, endpoints, weights=f"{HERE}=1")
    assert entries <= max(ROOM, ports * 21 * endpoints)
    assert [("too many for exact shares" in problem) for problem in problems] == [True] * told


# -- answers -------------------------------------------------------------------------------------------------------


def asked(subject):
    return answer(subject, Packet(None, address("10.96.0.1"), 6, 80), [address("192.0.2.1")])


def test_why_has_shares_and_drained_endpoints():
    subject = planner(
        service(annotations=Annotations(weights="elsewhere=0")),
        endpoint_slice(ONE, TWO, name="stable"),
        endpoint_slice(THREE, endpoint("10.244.0.4", "elsewhere"), name="canary", weight="50"),
        endpoint_slice(endpoint("10.244.0.5"), name="old", weight="0"),
    )
    made = asked(subject)
    assert {choice.destination: choice.share for choice in made.choices} == dict(
        zip(EVERY, (0.4, 0.4, 0.2), strict=True)
    )
    assert any("weights from 50 to 100" in step.text for step in made.steps)
    reasons = {absent.destination: (absent.reason, absent.field) for absent in made.absent}
    assert reasons[dest("10.244.0.4:8080")][0].startswith("the weight of elsewhere is 0")
    assert reasons[dest("10.244.0.5:8080")][1] == "metadata.annotations[*/weight]"


def test_why_names_the_zone_that_is_drained():
    subject = planner(
        service(annotations=Annotations(weights=f"zone:eu-1a=0,{HERE}=0")),
        endpoint_slice(ONE, TWO, THREE, placed=PLACES),
    )
    reasons = {absent.destination: absent.reason for absent in asked(subject).absent}
    assert reasons[EVERY[0]].startswith(f"the weight of {HERE} is 0")
    assert reasons[EVERY[1]].startswith("the weight of zone eu-1a is 0")


def test_an_endpoint_that_moves_to_a_drained_zone_is_drained():
    subject = planner(service(annotations=Annotations(weights="zone:eu-1a=0")), endpoint_slice(THREE, ONE))
    assert subject.compiled[WEB].plans[0].balance is None
    (change,) = taken(subject, upserted(endpoint_slice(THREE, ONE, placed=PLACES))).values()
    assert change.after.plans[0].cluster == EVERY[2:]


# -- slow start ----------------------------------------------------------------------------------------------------


def weights_at(subject, now):
    subject.tick(now)
    subject.take()
    plan = subject.compiled[WEB].plans[0]
    return list(plan.weights(0) or (100,) * len(plan.cluster))


def test_a_new_endpoint_grows_in_ten_steps_and_then_nothing_waits():
    subject = planner(service(annotations=Annotations(slow_start="20")), endpoint_slice(ONE, TWO))
    assert subject.due is None
    subject.tick(100.5)
    taken(subject, upserted(endpoint_slice(ONE, TWO, THREE)))
    seen = {}
    while (due := subject.due) is not None:
        now = subject.compiled[WEB].plans[0].weights(0)
        seen[tuple(now)] = due
        weights_at(subject, due)
        assert len(seen) < 12
    assert [weights[2] for weights in seen if weights] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert list(seen.values())[:2] == [pytest.approx(102, abs=0.01), pytest.approx(104, abs=0.01)]
    assert subject.compiled[WEB].plans[0].balance is None


def test_endpoints_at_the_start_are_not_new():
    subject = planner(service(annotations=Annotations(slow_start="20")), endpoint_slice(ONE, TWO, THREE))
    assert weights_at(subject, 1) == [100, 100, 100]
    taken(subject, upserted(service(annotations=Annotations(slow_start="40"))))
    assert weights_at(subject, 2) == [100, 100, 100]


def test_a_returning_endpoint_is_new_and_a_deleted_service_has_no_timer():
    subject = planner(service(annotations=Annotations(slow_start="20")), endpoint_slice(ONE, TWO))
    taken(subject, upserted(endpoint_slice(ONE)))
    taken(subject, upserted(endpoint_slice(ONE, TWO)))
    assert weights_at(subject, 1) == [100, 10]
    taken(subject, upserted(service()))
    assert subject.due is None
    assert weights_at(subject, 2) == [100, 100]


def test_time_costs_nothing_where_nothing_starts_slowly():
    subject = planner(service(), endpoint_slice(ONE, TWO))
    subject.tick(5)
    assert (subject.dirty, subject.due) == (0, None)


@given(st.lists(st.tuples(st.floats(0, 5), st.sets(st.integers(1, 5), min_size=1)), max_size=12), st.integers(1, 30))
def test_each_share_only_grows_and_a_step_changes_a_service_once(history, seconds):
    subject = planner(service(annotations=Annotations(slow_start=str(seconds))), endpoint_slice(ONE))
    now, changes, before = 0.0, 0, {}
    for later, numbers in history:
        now += later
        subject.tick(now)
        assert subject.apply([upserted(endpoint_slice(*(endpoint(f"10.244.0.{n}") for n in numbers)))]) == []
        subject.take()
        plan = subject.compiled[WEB].plans[0]
        weights = dict(zip(plan.cluster, plan.weights(0) or (100,) * len(plan.cluster), strict=True))
        if len(set(weights.values())) > 1:
            assert all(weight >= before.get(member, 0) or before == {} for member, weight in weights.items())
            before = weights
        else:
            before = {}
    while (due := subject.due) is not None:
        subject.tick(due)
        subject.take()
        changes += 1
        assert changes <= 10
    assert subject.compiled[WEB].plans[0].balance is None
