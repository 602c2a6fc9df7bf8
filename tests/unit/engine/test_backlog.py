"""How a family's kernel stands: what it was last known to have, and since when."""

import pytest

from kubeproxy.engine.backlog import Backlog, FamilyStanding
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import Annotations
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
    backlog.committed(backlog.portion())  # of a sync that was under way already
    assert backlog.standing == FamilyStanding(V4, inspected_at=100.0, difference="rules were changed")
    now[0], backlog.stale = 120.0, False
    backlog.committed(backlog.portion())
    assert backlog.standing == FamilyStanding(V4, inspected_at=120.0, sound_since=120.0)


def test_what_is_queued_is_counted_until_it_is_committed(backlog):
    backlog.add([Change(("ns", "a"), NOTHING, NOTHING), Change(("ns", "b"), NOTHING, NOTHING)])
    assert backlog.standing.queued == 2
    backlog.committed(backlog.portion())
    assert backlog.standing.queued == 0


@pytest.mark.parametrize("asked", [{"algorithm": "maglev-4093"}, {"weights": f"{HERE}=100,b=99"}])
def test_tables_and_weights_are_large_for_each_address(backlog, asked):
    """With 11 addresses some 44,000 elements come of two kilobytes, and others wait for one such Service."""
    for number, name in enumerate("ab", 1):
        many = [f"203.0.{number}.{n}" for n in range(1, 11)]
        wanted = service(name, f"10.96.0.{number}", external_ips=many, annotations=Annotations(**asked))
        members = [endpoint(f"10.244.0.{n}", HERE if n % 2 else "b") for n in range(1, 41)]
        after = planner(wanted, endpoint_slice(*members, of=name)).compiled["default", name]
        backlog.add([Change(("default", name), NOTHING, after)])
    assert [change.name[1] for change in backlog.portion()] == ["a"]
