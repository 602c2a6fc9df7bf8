"""The state of one family's kernel: the changes that are pending, and the time of the last success."""

import pytest

from kubeproxy.engine import backlog as backlog_module
from kubeproxy.engine.backlog import Backlog, FamilyStanding
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from kubeproxy.model.plan import NOTHING
from kubeproxy.model.planner import Change
from support.cluster_objects import HERE, endpoint, endpoint_slice, service
from unit.model.test_planner import planner

V4 = Family.IPV4


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def backlog(now):
    made = Backlog(V4, clock=lambda: now[0])
    made.stale = False  # as when the first sync has begun
    return made


def test_nothing_is_known_before_the_first_commit(backlog):
    assert backlog.standing == FamilyStanding(V4)


def test_commits_and_looks_have_their_times_and_soundness_lasts(backlog, now):
    backlog.committed(backlog.portion())
    now[0] = 110.0
    backlog.inspected()
    now[0] = 120.0
    backlog.committed(backlog.portion())
    assert backlog.standing == FamilyStanding(V4, inspected_at=110.0, sound_since=100.0)


def test_a_refusal_stands_until_a_commit(backlog, now):
    backlog.committed(backlog.portion())
    now[0] = 110.0
    assert backlog.refused("busy") > 0
    assert backlog.stale
    assert backlog.resting
    assert backlog.standing == FamilyStanding(V4, inspected_at=100.0, refusal="busy")
    now[0], backlog.stale = 120.0, False
    backlog.committed(backlog.portion())
    assert backlog.standing == FamilyStanding(V4, inspected_at=120.0, sound_since=120.0)


def test_a_difference_stands_until_a_full_sync(backlog, now):
    backlog.committed(backlog.portion())
    now[0] = 110.0
    backlog.differs("rules were changed")
    assert backlog.stale
    assert backlog.standing == FamilyStanding(V4, inspected_at=100.0, difference="rules were changed")
    backlog.committed(backlog.portion())  # a change of a sync that had already started
    assert backlog.standing == FamilyStanding(V4, inspected_at=100.0, difference="rules were changed")
    now[0], backlog.stale = 120.0, False
    backlog.committed(backlog.portion())
    assert backlog.standing == FamilyStanding(V4, inspected_at=120.0, sound_since=120.0)


def test_queued_changes_are_counted_until_they_are_committed(backlog):
    backlog.add([Change(("ns", "a"), NOTHING, NOTHING), Change(("ns", "b"), NOTHING, NOTHING)])
    assert backlog.standing.queued == 2
    backlog.committed(backlog.portion())
    assert backlog.standing.queued == 0


@pytest.mark.parametrize("asked", [{"algorithm": "maglev-4093"}, {"weights": f"{HERE}=100,b=99"}])
def test_tables_and_weights_are_large_for_each_address(backlog, asked):
    """With 11 addresses, two kilobytes result in some 44,000 elements; other Services wait for one such Service."""
    for number, name in enumerate("ab", 1):
        many = [f"203.0.{number}.{n}" for n in range(1, 11)]
        wanted = service(name, f"10.96.0.{number}", external_ips=many, annotations=Annotations(**asked))
        members = [endpoint(f"10.244.0.{n}", HERE if n % 2 else "b") for n in range(1, 41)]
        after = planner(wanted, endpoint_slice(*members, of=name)).compiled["default", name]
        backlog.add([Change(("default", name), NOTHING, after)])
    assert [change.name[1] for change in backlog.portion()] == ["a"]


def ports_of(*numbers, pods=2):
    """Return a Service with these pairs of port and NodePort."""
    wanted = service("wide", ports=[ServicePort(port=p, node_port=n, name=f"p{p}") for p, n in numbers])
    offered = [EndpointPort(port=8000 + p, name=f"p{p}") for p, _ in numbers]
    members = [endpoint(f"10.244.0.{n}") for n in range(1, pods + 1)]
    return planner(wanted, endpoint_slice(*members, ports=offered, of="wide")).compiled["default", "wide"]


def parts_of(backlog, change):
    """Return the plans after each part of a change, by port."""
    backlog.add([change])
    found = []
    while backlog.changes:
        [part] = backlog.portion()
        assert part.before == backlog.changes[change.name].before
        backlog.committed([part])
        found.append({plan.key.port_name: plan for plan in part.after.plans})
    return found


def test_after_each_part_every_port_has_its_old_or_its_new_elements(backlog, monkeypatch):
    monkeypatch.setattr(backlog_module, "LARGE", 1)
    monkeypatch.setattr(backlog_module, "PART_SIZE", 1)
    before, after = ports_of((1, 30001), (2, 30002), (3, 30003)), ports_of((2, 30002), (3, 30003), (4, 30004), pods=3)
    old, new = ({plan.key.port_name: plan for plan in entry.plans} for entry in (before, after))
    parts = parts_of(backlog, Change(("default", "wide"), before, after))
    assert parts == [old | {"p2": new["p2"]}, old | {"p2": new["p2"], "p3": new["p3"]}, old | new, new]


def test_a_port_that_does_not_differ_is_no_part(backlog, monkeypatch):
    monkeypatch.setattr(backlog_module, "LARGE", 1)
    monkeypatch.setattr(backlog_module, "PART_SIZE", 1)
    before, after = ports_of((1, 30001), (2, 30002)), ports_of((1, 30001), (2, 30003))
    assert len(parts_of(backlog, Change(("default", "wide"), before, after))) == 1


def test_ports_of_a_few_elements_are_committed_together(backlog, monkeypatch):
    monkeypatch.setattr(backlog_module, "LARGE", 1)
    after = ports_of(*((n, 0) for n in range(1, 11)), pods=90)
    sizes = [len(part) for part in parts_of(backlog, Change(("default", "wide"), NOTHING, after))]
    assert sizes == [10]
    monkeypatch.setattr(backlog_module, "PART_SIZE", 500)
    sizes = [len(part) for part in parts_of(backlog, Change(("default", "wide"), NOTHING, after))]
    assert sizes == [2, 4, 6, 8, 10]


def test_ports_that_exchange_a_frontend_change_together(backlog, monkeypatch):
    """One transaction removes the frontend and adds it again: with two, it would be missing or duplicate in between."""
    monkeypatch.setattr(backlog_module, "LARGE", 1)
    monkeypatch.setattr(backlog_module, "PART_SIZE", 1)
    before, after = ports_of((1, 30001), (2, 30002)), ports_of((1, 30002), (2, 30001))
    assert len(parts_of(backlog, Change(("default", "wide"), before, after))) == 1
