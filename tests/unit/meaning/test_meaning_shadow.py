"""Lasting differences are distinguished from differences that disappear within the grace period."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.meaning import compare
from kubeproxy.meaning.compare import EACH, FirstPacket, Witness
from kubeproxy.meaning.flow import PacketOutcome
from kubeproxy.meaning.shadow import FamilyDifference, Shadow
from kubeproxy.model.addresses import Family
from support.rulesets import compared, iptables_rules

GRACE = 10.0
DROPPED = ((PacketOutcome("dropped"), 1.0),)


def difference(port: int, now: str = "passed") -> FamilyDifference:
    packet = FirstPacket("198.51.100.7", "10.96.0.1", 6, port, "eth0", "eth0")
    return FamilyDifference(Family.IPV4, Witness(packet, ((PacketOutcome(now), 1.0),), DROPPED))


def ports(episodes):
    return sorted(each.difference.witness.packet.port for each in episodes)


@pytest.mark.parametrize(
    ("found", "lasted", "transient", "undecided"),
    [
        ({}, [], 0, 0),
        ({0: [80]}, [], 0, 1),
        ({0: [80], 5: []}, [], 1, 0),
        ({0: [80], 10: [80]}, [], 0, 1),  # not longer than the grace period
        ({0: [80], 11: [80]}, [80], 0, 0),
        ({0: [80], 5: [80, 90], 11: [80, 90]}, [80], 0, 1),
        ({0: [80], 5: [], 11: [80]}, [], 1, 1),
        ({0: [80], 11: [80], 12: [], 13: [80], 25: [80]}, [80, 80], 0, 0),
    ],
)
def test_a_difference_lasts_after_the_grace(found, lasted, transient, undecided):
    shadow = Shadow(GRACE)
    for now, numbers in found.items():
        shadow.compared(now, map(difference, numbers))
    assert (ports(shadow.lasted), shadow.transient, shadow.undecided) == (lasted, transient, undecided)


def test_an_episode_has_its_first_and_last_comparison_and_is_reported_at_both_ends():
    shadow = Shadow(GRACE)
    assert shadow.compared(1.0, [difference(80)]) == []
    (begun,) = shadow.compared(12.0, [difference(80)])
    assert (begun.first, begun.last, begun.ended) == (1.0, 12.0, False)
    assert shadow.compared(20.0, [difference(80)]) == []
    (ended,) = shadow.compared(21.0, [])
    assert ended is begun
    assert (ended.last, ended.ended) == (20.0, True)


def test_a_packet_with_a_new_outcome_is_another_difference():
    """A proxy that is slow makes the same delayed writes again and again, so a packet's present outcome changes."""
    shadow = Shadow(GRACE)
    for second, now in enumerate(("passed", "refused", "passed", "refused")):
        shadow.compared(8.0 * second, [difference(80, now)])
    assert (shadow.lasted, shadow.transient, shadow.undecided) == ([], 3, 1)


def test_outdated_objects_restart_the_grace_and_keep_lasting_differences():
    shadow = Shadow(GRACE)
    shadow.compared(0.0, [difference(80)])
    shadow.compared(11.0, [difference(80), difference(90)])
    shadow.interrupt()
    shadow.compared(60.0, [difference(80), difference(90)])
    assert (ports(shadow.lasted), shadow.transient, shadow.undecided) == ([80], 0, 1)


HISTORIES = st.lists(
    st.tuples(st.floats(0.1, 15.0), st.one_of(st.none(), st.sets(st.integers(1, 4)))), min_size=1, max_size=12
)


@given(HISTORIES)
def test_each_run_of_comparisons_with_a_difference_has_one_end(history):
    """A difference without a gap is lasting after the grace period; otherwise transient, undecided or interrupted."""
    shadow, now, runs, reported = Shadow(GRACE), 0.0, {}, []
    lasted = transient = 0
    for pause, found in history:
        now += pause
        if found is None:
            shadow.interrupt()
            runs = {port: first for port, first in runs.items() if first is None}
            continue
        decides = shadow.decides(now)
        before = len(shadow.lasted)
        reported += [each for each in shadow.compared(now, map(difference, sorted(found))) if not each.ended]
        assert decides or len(shadow.lasted) == before
        for port in runs.keys() - found:
            transient += runs.pop(port) is not None
        for port in found:
            first = runs.setdefault(port, now)
            if first is not None and now - first > GRACE:
                runs[port] = None  # the difference is lasting
                lasted += 1
    assert (len(shadow.lasted), shadow.transient) == (lasted, transient)
    assert reported == shadow.lasted
    assert shadow.undecided == sum(first is not None for first in runs.values())
    assert all(each.last - each.first > GRACE for each in shadow.lasted)
    assert ports(each for each in shadow.lasted if not each.ended) == sorted(p for p, f in runs.items() if f is None)


ONE_SHAPE = """*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
{rules}COMMIT
"""


@pytest.mark.parametrize("each", [EACH, 1])
def test_each_unit_of_one_shape_has_its_own_difference(each, monkeypatch):
    monkeypatch.setattr(compare, "EACH", each)
    rules = "".join(
        f"-A KUBE-SERVICES -d 10.96.0.{n}/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.0.{n}:80\n"
        for n in (1, 2)
    )
    found = compared(iptables_rules(ONE_SHAPE.format(rules=rules)), iptables_rules(ONE_SHAPE.format(rules="")))
    destinations = {each.packet.destination for each in found.differences}
    assert destinations == ({"10.96.0.1", "10.96.0.2"} if each > 1 else {"10.96.0.1"})
    assert {group.classes for group in found.causes} == {2}
