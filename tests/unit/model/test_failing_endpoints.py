"""Ejection: the endpoints that a Service keeps when some fail, the times of attempts, and the end of an ejection."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kubeproxy.features import EJECTION, Features
from kubeproxy.model import ejection
from kubeproxy.model.ejection import FIRST, LONGEST, LONGEST_REST, RELAPSE, REST, SLOWEST, Ejections, Failure, ejecting
from kubeproxy.model.endpoints import Selection
from kubeproxy.model.events import Deleted, Replaced, Upserted
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from kubeproxy.model.planner import Planner
from support.cluster_objects import HERE, dest, dests, endpoint, endpoint_slice, key, service, world
from support.compiled import compile_service

ON, OFF = Annotations(eject="on"), Annotations(eject="off")
NAME = ("default", "web")
FAILURE = Failure(0.0, "no answer", 0.0, 1.0, 1.0)
PORTS = [ServicePort(port=80, name="tcp"), ServicePort(port=80, name="udp", protocol="UDP")]
SLICE_PORTS = [EndpointPort(port=8080, name="tcp"), EndpointPort(port=8080, name="udp", protocol="UDP")]


def text(number, port=8080):
    return f"10.244.1.{number}:{port}"


def pods(*numbers, **more):
    return endpoint_slice(*(endpoint(f"10.244.1.{number}") for number in numbers), **more)


def planned(annotations=ON, count=3, flags=None, mode="", **more):
    """Return a planner with one Service that has several endpoints."""
    made = Planner(replace(world(), features=Features(flags or {}, mode)))
    web = service(annotations=annotations, **more)
    slices = [pods(*range(1, count + 1), ports=SLICE_PORTS if more.get("ports") else (EndpointPort(port=8080),))]
    made.apply([Replaced("services", [web]), Replaced("endpointslices", slices)])
    made.take()
    return made


def fail(planner, *keys, now=0.0):
    for one in keys:
        planner.mark(planner.ejections.failed(one, "connection refused", now, 1e9 + now))
    planner.take()


def plan(planner, protocol=6):
    return next(one for one in planner.compiled[NAME].plans if one.key.protocol == protocol)


def test_a_failing_endpoint_leaves_the_pools_and_returns_when_it_answers():
    planner = planned()
    assert plan(planner).ejected == ()
    fail(planner, key(text(2)))
    assert plan(planner).cluster == dests(text(1), text(3))
    assert plan(planner).ejected == dests(text(2))
    assert plan(planner).serving == dests(text(1), text(2), text(3)), "established connections continue"
    assert planner.ejections.reasons(plan(planner)) == {dest(text(2)): "connection refused, since 2001-09-09T01:46:40Z"}
    planner.mark(planner.ejections.answered(key(text(2)), 1.0))
    planner.take()
    assert plan(planner).cluster == dests(text(1), text(2), text(3))
    assert plan(planner).ejected == ()


@pytest.mark.parametrize(
    ("annotations", "flags", "mode", "is_ejected"),
    [
        (None, None, "", False),
        (ON, None, "", True),
        (OFF, None, "", False),
        (Annotations(eject="yes"), None, "", False),
        (None, {EJECTION.flag: "always"}, "", True),
        (Annotations(eject="yes"), {EJECTION.flag: "always"}, "", True),
        (OFF, {EJECTION.flag: "always"}, "", False),
        (ON, None, "iptables", False),
        (None, {EJECTION.flag: "always"}, "ipvs", False),
    ],
)
def test_annotation_flag_and_mode_decide(annotations, flags, mode, is_ejected):
    planner = planned(annotations, flags=flags, mode=mode)
    assert planner.ejections.in_use is (is_ejected or (bool(flags) and not mode))
    assert (plan(planner).ejected is not None) is is_ejected
    fail(planner, key(text(2)))
    assert (dest(text(2)) not in plan(planner).cluster) is is_ejected


@pytest.mark.parametrize(
    ("annotations", "mode", "reason"),
    [
        (Annotations(eject="yes"), "", "'yes' is not on or off"),
        (ON, "iptables", "ignored: the proxy on this node ejects no endpoints"),
        (OFF, "iptables", ""),
        (ON, "", ""),
    ],
)
def test_an_annotation_without_effect_is_a_problem(annotations, mode, reason):
    problems = planned(annotations, mode=mode).compiled[NAME].problems
    assert [problem.field for problem in problems] == [ejection.EJECT] * bool(reason)
    assert not reason or reason in problems[0].reason


@pytest.mark.parametrize(
    ("count", "failing", "kept"), [(1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 1, 2), (3, 2, 3), (4, 2, 2)]
)
def test_at_most_half_of_the_endpoints_are_ejected(count, failing, kept):
    planner = planned(count=count)
    fail(planner, *(key(text(number)) for number in range(1, failing + 1)))
    assert len(plan(planner).cluster) == kept
    said = [problem.reason for problem in planner.compiled[NAME].problems]
    assert said == [
        f"{failing} of {count} endpoints of default/web/TCP (IPv4) do not answer: more than half, so none is ejected"
    ] * (kept == count)


def test_a_port_fails_alone_and_udp_flows_end():
    planner = planned(ports=PORTS)
    fail(planner, key(text(1), "UDP"))
    assert plan(planner).cluster == dests(text(1), text(2), text(3))
    assert plan(planner, 17).cluster == plan(planner, 17).serving == dests(text(2), text(3))


def test_the_only_endpoint_of_this_node_stays_under_policy_local():
    planner = Planner(world())
    there = endpoint_slice(endpoint("10.244.1.1", HERE), endpoint("10.244.1.2"), endpoint("10.244.1.3"))
    web = service(
        annotations=ON, type="NodePort", external_traffic_policy="Local", ports=[ServicePort(80, node_port=30080)]
    )
    planner.apply([Replaced("services", [web]), Replaced("endpointslices", [there])])
    planner.take()
    fail(planner, key(text(1)))
    assert plan(planner).local == dests(text(1))
    assert plan(planner).cluster == dests(text(2), text(3))
    assert plan(planner).ejected == ()


def test_the_state_of_the_api_precedes():
    planner = planned()
    fail(planner, key(text(2)))
    planner.apply([Upserted("endpointslices", pods(1, 3))])
    planner.take()
    assert not planner.ejections.failures
    assert plan(planner).ejected == ()
    planner.apply([Upserted("endpointslices", pods(1, 2, 3))])
    planner.take()
    assert plan(planner).cluster == dests(text(1), text(2), text(3)), "the new pod has not failed"
    fail(planner, key(text(2)))
    planner.apply([Upserted("services", service())])
    planner.take()
    assert plan(planner).cluster == dests(text(1), text(2), text(3)), "the annotation is removed"
    assert not planner.ejections.failures
    assert not planner.ejections.in_use


def test_a_deleted_service_is_forgotten_and_another_keeps_the_endpoint():
    planner = planned()
    planner.apply([Upserted("services", service("other", "10.96.0.2", annotations=ON))])
    planner.apply([Upserted("endpointslices", pods(1, 2, 3, of="other", name="other-1"))])
    planner.take()
    assert set(planner.ejections.services(key(text(2)))) == {NAME, ("default", "other")}
    fail(planner, key(text(2)))
    planner.apply([Deleted("services", "default", "web")])
    planner.take()
    assert key(text(2)) in planner.ejections.failures
    planner.apply([Deleted("services", "default", "other")])
    planner.take()
    assert not planner.ejections.failures
    assert not planner.ejections.services(key(text(2)))
    assert not planner.ejections.in_use


def of_web():
    found = Ejections("always")
    compiled = planned(flags={EJECTION.flag: "always"}).compiled[NAME]
    found.replace(NAME, (), compiled.plans)
    return found


def test_only_endpoints_of_services_that_eject_are_tried_and_answers_give_rest():
    found, own, foreign = of_web(), key(text(1)), key("10.9.9.9:80")
    assert found.due({own, foreign}, 0.0) == [own]
    now = 0.0
    for rest in (REST, 2 * REST, LONGEST_REST, LONGEST_REST):
        assert found.answered(own, now) == ()
        assert found.due({own}, now + rest - 0.01) == []
        now += rest
        assert found.due({own}, now) == [own]
    now += 2 * LONGEST_REST
    assert found.due({own}, now) == [own]
    found.answered(own, now)
    assert found.due({own}, now + REST) == [own], "earlier false suspicions are forgotten"
    assert found.failed(foreign, "no answer", 0.0, 0.0) == ()
    assert not found.failures


def attempts(found, own, now, until):
    """Return the times of attempts that all fail."""
    times = []
    while now < until:
        if found.due((), now):
            found.failed(own, "no answer", now, now)
            times.append(now)
        now += 0.5
    return times


def test_attempts_become_rarer_and_an_ejection_ends_without_an_answer():
    found, own = of_web(), key(text(1))
    assert found.failed(own, "no answer", 0.0, 0.0) == (NAME,)
    times = attempts(found, own, 0.0, LONGEST - SLOWEST)
    assert times[:6] == [1.0, 3.0, 7.0, 15.0, 31.0, 61.0]
    assert {b - a for a, b in pairwise(times[5:])} == {SLOWEST}
    last = times[-1] + SLOWEST
    while own in found.failures:
        changed = found.failed(own, "no answer", last, last)
        last += SLOWEST
    assert changed == (NAME,)
    assert last - SLOWEST >= LONGEST


def test_a_relapse_continues_with_the_last_pause():
    found, own = of_web(), key(text(1))
    found.failed(own, "no answer", 0.0, 0.0)
    found.failed(own, "no answer", FIRST, FIRST)
    assert found.answered(own, 3.0) == (NAME,)
    found.failed(own, "no answer", 4.0, 4.0)
    assert found.failures[own].due == 4.0 + 4 * FIRST
    found.answered(own, 10.0)
    now = 10.0
    while now < 10.0 + RELAPSE:
        assert found.answered(own, now) == ()
        now += LONGEST_REST
        assert found.due({own}, now) == [own], "false suspicions do not make the minute longer"
    found.failed(own, "no answer", 10.0 + RELAPSE, 0.0)
    assert found.failures[own].pause == FIRST


DESTINATIONS = [dest(text(number)) for number in range(8)]
pools = st.sets(st.sampled_from(DESTINATIONS)).map(lambda pool: tuple(sorted(pool)))


@given(pools, pools, st.sets(st.sampled_from(DESTINATIONS)), st.sampled_from([6, 17]))
def test_pools_keep_at_least_half_and_no_endpoint_is_lost(cluster, local, failing, protocol):
    everyone = tuple(sorted({*cluster, *local}))
    failures = {one[:-2] + bytes((protocol,)) + one[-2:]: FAILURE for one in failing}
    found, ejected = ejecting(Selection(cluster, local, everyone, (), True), failures, protocol)
    for before, after in ((cluster, found.cluster), (local, found.local)):
        assert after in (before, tuple(one for one in before if one not in failing))
        assert 2 * len(after) >= len(before)
        assert bool(after) is bool(before)
    assert {*found.cluster, *found.local, *ejected} == {*cluster, *local}
    assert set(ejected) <= failing
    assert set(found.serving) == ({*everyone} - {*ejected} if protocol == 17 else {*everyone})
    other = {one[:-3] + bytes((23 - protocol,)) + one[-2:]: FAILURE for one in failures}
    assert ejecting(Selection(cluster, local, everyone, (), True), other, protocol)[1] == ()


def test_shares_by_weights_and_tables_follow():
    asked = Annotations(weights=f"{HERE}=10", algorithm="maglev-251", eject="on")
    planner = planned(asked)
    fail(planner, key(text(2)))
    assert plan(planner).cluster == dests(text(1), text(3))
    assert plan(planner).balance.hashing.size == 251


events = st.lists(
    st.tuples(st.sampled_from(["fails", "answers", "leaves", "joins", "on", "off"]), st.integers(1, 4)), max_size=12
)


@given(events)
def test_plans_depend_on_objects_and_failing_endpoints_alone(history):
    planner, there, annotations = planned(count=4), {1, 2, 3, 4}, ON
    for now, (what, number) in enumerate(history):
        own = key(text(number))
        if what == "fails":
            planner.mark(planner.ejections.failed(own, "no answer", float(now), 0.0))
        elif what == "answers":
            planner.mark(planner.ejections.answered(own, float(now)))
        elif what in {"leaves", "joins"}:
            there = there - {number} if what == "leaves" else there | {number}
            planner.apply([Upserted("endpointslices", pods(*sorted(there)))])
        else:
            annotations = ON if what == "on" else None
            planner.apply([Upserted("services", service(annotations=annotations))])
        planner.take()
    failures = planner.ejections.failures if annotations is ON else None
    pieces = planner.slices.get(NAME, {}).values()
    fresh = compile_service(planner.services[NAME], pieces, planner.world, failures=failures)
    assert planner.compiled[NAME] == fresh
    assert planner.ejections.failures.keys() <= (
        {key(text(number)) for number in there} if failures is not None else set()
    )
