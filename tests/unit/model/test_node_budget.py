"""What weights and tables of all Services may cost a node, who has them."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.model.balancing import NO_ROOM, entries
from kubeproxy.model.events import Deleted
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from kubeproxy.model.plan import Problem
from support.cluster_objects import HERE, endpoint, endpoint_slice, service
from unit.model.test_planner import planner, taken, upserted

ENTRIES = 8000
"""What the node gives in these tests: a namespace has 2000, and one table 1021."""
DENIED = Problem("metadata.annotations", NO_ROOM)
numbers = itertools.count(1)


def hashing(name, namespace="default", created=1, algorithm="maglev", ports=1, **more):
    """A Service with a table for each port."""
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
    """The Services that have their tables."""
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


def test_the_oldest_of_all_namespaces_have_what_the_node_gives():
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


def test_who_has_no_table_is_served_evenly_and_drained_endpoints_stay_drained():
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


def test_without_entries_enough_for_all_nobody_is_looked_at_again(monkeypatch):
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
def test_who_is_served_depends_on_the_services_alone_not_on_their_order(order, gone):
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
