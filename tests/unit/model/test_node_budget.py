"""The node's limits for weights and Maglev tables: the Services that get tables, and fairness between Services."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kubeproxy.model.addresses import pack
from kubeproxy.model.balancing import NO_ROOM, entries
from kubeproxy.model.claims import SHARES, TURN, FairOrder
from kubeproxy.model.events import Deleted
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from kubeproxy.model.plan import Problem
from support.cluster_objects import HERE, endpoint, endpoint_slice, service
from unit.model.test_planner import planner, taken, upserted

ENTRIES = 8000
"""The limits in these tests: 2000 for a namespace, and 1021 for a table."""
DENIED = Problem("metadata.annotations", NO_ROOM)
numbers = itertools.count(1)


def hashing(name, namespace="default", created=1, algorithm="maglev", ports=1, **more):
    """Return a Service with a table for each port."""
    return service(
        name,
        f"10.96.{created}.{next(numbers) % 250 + 1}",
        namespace=namespace,
        created=f"2024-01-01T00:00:{created:02}Z",
        annotations=Annotations(algorithm=algorithm, **more),
        ports=[ServicePort(port=80 + n, name=f"p{n}") for n in range(ports)],
    )


def names(subject):
    name = subject.metadata.name
    return {"name": name, "of": name, "namespace": subject.metadata.namespace}


def slice_of(subject, count=2):
    members = [endpoint(f"10.244.0.{n}", HERE) for n in range(1, count + 1)]
    ports = [EndpointPort(name=port.name, port=8080) for port in subject.spec.ports]
    return endpoint_slice(*members, ports=ports, **names(subject))


def small(*services, **more):
    return planner(*services, *map(slice_of, services), balancing_entries=ENTRIES, **more)


def served(subject):
    """Return the Services that have their tables."""
    found = set()
    for name, compiled in subject.compiled.items():
        has = all(plan.balance for plan in compiled.plans)
        assert has != (DENIED in compiled.problems)
        if has:
            found.add("/".join(name))
    return found


def test_a_namespace_has_a_quarter_and_its_oldest_services_have_it():
    subject = small(hashing("c", created=3), hashing("a", created=2), hashing("b", created=1))
    assert served(subject) == {"default/b"}
    change = taken(subject, Deleted("services", "default", "b"))
    assert served(subject) == {"default/a"}
    assert change.keys() == {"a", "b"}
    taken(subject, upserted(hashing("old", created=0)))
    assert served(subject) == {"default/old"}


def test_the_oldest_services_of_all_namespaces_get_the_budget():
    wanted = [hashing("web", f"n{age}", created=age) for age in range(10)]
    assert served(small(*wanted)) == {f"n{age}/web" for age in range(7)}


def test_one_that_fits_is_served_though_an_older_one_does_not():
    subject = small(hashing("a", created=1, ports=2), hashing("b", created=2))
    assert served(subject) == {"default/b"}


def test_an_older_one_that_asks_for_more_takes_it_from_younger_ones():
    subject = small(hashing("a", created=1, algorithm="maglev-251"), hashing("b", created=2))
    assert served(subject) == {"default/a", "default/b"}
    assert taken(subject, upserted(hashing("a", created=1))).keys() == {"a", "b"}
    assert served(subject) == {"default/a"}
    assert taken(subject, upserted(hashing("a", created=1, algorithm="random"))).keys() == {"a", "b"}
    assert not subject.compiled["default", "b"].problems


def test_services_without_a_table_have_equal_shares_and_drained_endpoints_stay_drained():
    first, other = hashing("a", created=1), hashing("b", created=2, weights=f"{HERE}=0")
    subject = small(first, other)
    members = [endpoint("10.244.0.1", HERE), endpoint("10.244.0.2"), endpoint("10.244.0.3")]
    ports = [EndpointPort(name="p0", port=8080)]
    taken(subject, upserted(endpoint_slice(*members, ports=ports, **names(other))))
    compiled = subject.compiled["default", "b"]
    (plan,) = compiled.plans
    assert compiled.problems == (DENIED,)
    assert len(plan.cluster) == 2
    assert len(plan.balance.drained) == 1
    assert not plan.balance.cluster
    assert plan.balance.hashing is None


def test_weights_count_as_well_as_tables():
    members = [endpoint("10.244.0.1", HERE), endpoint("10.244.0.2")]
    found = []
    for age, name in enumerate("ab"):
        subject = hashing(name, created=age, algorithm=None, weights=f"{HERE}=97", ports=10)
        ports = [EndpointPort(name=port.name, port=8080) for port in subject.spec.ports]
        found += [subject, endpoint_slice(*members, ports=ports, **names(subject))]
    subject = planner(*found, balancing_entries=ENTRIES)
    assert entries(subject.compiled["default", "a"].plans) == 1970
    assert subject.compiled["default", "b"].problems == (DENIED,)
    assert not any(plan.balance for plan in subject.compiled["default", "b"].plans)


def test_without_enough_entries_no_service_is_compiled_again(monkeypatch):
    subject = small(*(hashing("web", f"n{age}", created=age) for age in range(6)))
    looked = []
    compile_one = subject._compile
    monkeypatch.setattr(subject, "_compile", lambda name: looked.append(name) or compile_one(name))
    taken(subject, upserted(hashing("web", "n9", created=9)))
    assert looked == [("n9", "web")]


SUBJECTS = [
    hashing(name, namespace, created, algorithm, ports)
    for (namespace, name), created, algorithm, ports in zip(
        itertools.product("xyz", "abcd"),
        [3, 1, 2, 1] * 3,
        ["maglev", "maglev-251", "random", "maglev"] * 3,
        [1, 2, 1, 2] * 3,
        strict=True,
    )
]


@given(st.permutations(SUBJECTS), st.lists(st.sampled_from(SUBJECTS), max_size=6))
def test_the_served_services_do_not_depend_on_their_order(order, gone):
    subject = planner(balancing_entries=3000)
    for one in order:
        taken(subject, upserted(one), upserted(slice_of(one)))
    for one in gone:
        taken(subject, Deleted("services", one.metadata.namespace, one.metadata.name))
    left = [one for one in SUBJECTS if one not in gone]
    fresh = planner(*left, *map(slice_of, SUBJECTS), balancing_entries=3000)
    while subject.dirty:
        subject.take()
    assert subject.compiled == {name: fresh.compiled[name] for name in subject.compiled}


# -- the order of changes ---------------------------------------------------------------------------------------------


def crowd(namespace, count):
    return [hashing(f"s{n:02}", namespace, created=n, algorithm="maglev-4093", ports=16) for n in range(count)]


def test_a_namespace_with_many_costly_services_delays_no_other():
    noisy, quiet = crowd("noisy", 8), hashing("web", "quiet")
    plain = service("plain", "10.97.0.1")
    subject = planner(service("there", "10.97.0.2"), balancing_entries=1 << 30)
    subject.apply([upserted(one) for one in (*noisy, *map(slice_of, noisy))])
    first = {change.name for change in subject.take()}
    assert first == {("noisy", "s00")}
    assert subject.is_dirty(("noisy", "s01"))
    subject.apply([upserted(one) for one in (plain, quiet, slice_of(quiet))])
    assert {change.name for change in subject.take()} == {("default", "plain"), ("quiet", "web")}
    rounds = 0
    while subject.dirty:
        (change,) = subject.take()
        assert change.name[0] == "noisy"
        rounds += 1
    assert rounds == 7
    assert all(plan.balance for one in noisy for plan in subject.compiled["noisy", one.metadata.name].plans)


def test_a_postponed_change_keeps_its_trigger_time():
    noisy = crowd("noisy", 2)
    subject = planner(*noisy, service("there", "10.97.0.2"), balancing_entries=1 << 30)
    triggered = [
        endpoint_slice(
            endpoint("10.244.0.9"),
            ports=[EndpointPort(name=port.name, port=8080) for port in one.spec.ports],
            **names(one),
            triggered="2026-01-01T00:00:00Z",
        )
        for one in noisy
    ]
    subject.apply(map(upserted, triggered))
    found = subject.take() + subject.take()
    assert [(change.name[1], len(change.triggers)) for change in found] == [("s00", 1), ("s01", 1)]


def test_a_planner_that_begins_leaves_nothing_for_later():
    """Otherwise the tables in the kernel from the previous run would belong to no Service."""
    subject = planner(*(noisy := crowd("noisy", 3)), *map(slice_of, noisy), balancing_entries=1 << 30)
    assert len(subject.compiled) == 3
    assert not subject.dirty


def test_services_without_a_table_do_not_wait_for_services_with_one():
    subject = planner(service("there", "10.97.0.2"), balancing_entries=SHARES * TURN)
    noisy = crowd("noisy", 4)
    subject.apply([upserted(one) for one in (*noisy[::-1], *map(slice_of, noisy))])
    assert len(subject.take()) == 4
    assert not subject.dirty
    assert [bool(subject.compiled["noisy", f"s{n:02}"].problems) for n in range(4)] == [False, True, True, True]


@pytest.mark.parametrize("cost", [TURN // 3, TURN, TURN + 1])
def test_each_namespace_has_its_turn(cost):
    order, waiting = FairOrder(), {(space, str(n)): cost for space in "abc" for n in range(4)}
    seen = []
    while waiting:
        later = order.deferred(waiting)
        taken_now = [name for name in waiting if name not in later]
        assert taken_now
        assert len(taken_now) == 1 or sum(waiting[name] for name in taken_now) <= TURN
        seen += [space for space, _ in taken_now]
        waiting = {name: waiting[name] for name in waiting if name in later}
    for at in range(0, len(seen), 3):
        assert set(seen[at : at + 3]) == set("abc")


@pytest.mark.parametrize(
    "restless",
    [
        [[("a", "old")]],  # its own namespace
        [[("b", "old")], [("c", "old")]],  # the others, each in every second turn
    ],
)
def test_constant_changes_do_not_delay_waiting_services_forever(restless):
    order, waiting = FairOrder(), [("a", "first"), ("a", "second")]
    for turn in range(8):
        again = restless[turn % len(restless)]
        later = list(order.deferred(dict.fromkeys([*again, *waiting], TURN)))
        waiting = [name for name in waiting if name in later]
    assert not waiting


def test_an_address_of_a_large_service_that_is_gone_is_its_heirs_at_once():
    large = [hashing(f"s{n}", created=n + 1, algorithm="maglev-4093", ports=16) for n in range(3)]
    subject = planner(*large, *map(slice_of, large))
    last = large[2].spec
    heir = service("heir", last.cluster_ip, namespace="default", created="2025-01-01T00:00:00Z", ports=last.ports)
    gone = [Deleted("services", "default", f"s{n}") for n in range(3)]
    taken(subject, *gone, upserted(heir))
    found = subject.compiled["default", "heir"]
    assert found.plans
    assert not found.problems


def test_an_address_that_a_large_service_gave_away_does_not_wait_for_its_turn():
    """Otherwise its new Service, the only claimant, would refuse connections for the whole delay."""
    address = "203.0.113.1"
    many = [hashing(f"noisy-{n:02}", created=n, algorithm="maglev-4093") for n in range(1, 20)]
    changed = hashing("former", created=50, algorithm="maglev-4093")
    former = structs.replace(changed, spec=structs.replace(changed.spec, external_ips=[address]))
    heir = service("heir", "10.96.200.1", created="2024-01-02T00:00:00Z")
    subject = planner(*many, former, heir, *map(slice_of, (*many, former)))
    asking = service("heir", "10.96.200.1", created="2024-01-02T00:00:00Z", external_ips=[address])
    changes = taken(subject, *map(upserted, (*(slice_of(each, 3) for each in many), changed, asking)))
    assert subject.deferred
    assert pack(address) in {f.address for plan in changes["heir"].after.plans for f in plan.frontends}
    assert not changes["heir"].after.problems
    assert "former" in changes
