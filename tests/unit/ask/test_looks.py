"""Reports on a kernel that changes during the reading: only lasting differences are reported."""

from __future__ import annotations

import pytest

from kubeproxy.ask.facts import ProgrammedService
from kubeproxy.ask.kernel import looks
from kubeproxy.backends.state import Finding, Kind

A, B = ("default", "a"), ("default", "b")
LOST = Finding(A, Kind.MISSING, "endpoint 10.0.0.1:80 of 10.96.0.1:80/tcp", "map endpoints")
OTHER = Finding(B, Kind.EXTRA, "10.96.0.2:80/tcp", "set x")
STRAY = Finding(None, Kind.EXTRA, "10.96.9.9", "set cluster-ips")


class Scene:
    """A proxy and a kernel that return these states in turn; the last one is repeated."""

    def __init__(self, held, *, everything=((),), some=((),)) -> None:
        self._held = [list(one) for one in held]
        self._everything, self._some = list(everything), list(some)
        self.asked: list[tuple] = []

    def ask(self, names):
        self.asked.append(tuple(names))
        return [one for one in _next(self._held) if not names or one.name in names]

    def everything(self, wanted):
        return iter(_next(self._everything))

    def some(self, plans):
        return (finding for finding in _next(self._some) if finding.service is None or finding.service in plans)

    caveats = ("rules were not compared",)

    def look(self, *names):
        return looks.look(self.ask, [self], names)


def _next(said):
    return said.pop(0) if len(said) > 1 else said[0]


def held(name, version="1", wanted=None) -> ProgrammedService:
    return ProgrammedService(name=name, state="programmed", version=version, slices={}, plans=(), wanted=wanted)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(looks, "PAUSE", 0.0)


def test_nothing_differs_after_one_look():
    scene = Scene([[held(A), held(B)]])
    seen = scene.look()
    assert (seen.services, seen.findings, seen.on_their_way) == (2, (), ())
    assert seen.caveats == ("rules were not compared",)
    assert scene.asked == [()]


def test_a_difference_in_two_readings_counts():
    scene = Scene([[held(A), held(B)]], everything=[[LOST, OTHER]], some=[[LOST]])
    assert scene.look().findings == (LOST,)
    assert scene.asked == [(), (A, B), (A,)]  # only differing parts are read again


def test_one_service_is_looked_at_twice_as_well():
    assert Scene([[held(A)]], some=[[LOST]]).look(A).findings == (LOST,)
    assert Scene([[held(A)]], some=[[LOST], []]).look(A).findings == ()


def test_a_change_between_two_readings_causes_another_one():
    # After the second reading the Service has another version: whether the difference was real cannot be determined.
    scene = Scene([[held(A)], [held(A)], [held(A, "2")]], some=[[LOST], [LOST], []])
    assert scene.look(A).findings == ()
    scene = Scene([[held(A)], [held(A)], [held(A, "2")]], some=[[LOST]])
    assert scene.look(A).findings == (LOST,)


def test_a_service_that_always_changes_is_called_unstable():
    versions = [[held(A, str(number))] for number in range(100)]
    seen = Scene(versions, some=[[LOST]]).look(A)
    assert (seen.findings, seen.unstable) == ((), (A,))


def test_a_pending_change_is_no_difference():
    seen = Scene([[held(A, wanted=())]], everything=[[LOST]]).look()
    assert (seen.findings, seen.on_their_way) == ((), (A,))
    seen = Scene([[held(A)], [held(A, wanted=())]], everything=[[LOST]], some=[[LOST]]).look()
    assert seen.findings == ()


def test_a_service_that_went_meanwhile_is_no_difference():
    assert Scene([[held(A)], []], everything=[[LOST]], some=[[LOST]]).look().findings == ()


def test_elements_without_a_service_count_in_two_passes():
    assert Scene([[held(A)]], everything=[[STRAY]]).look().findings == (STRAY,)
    assert Scene([[held(A)]], everything=[[STRAY], []]).look().findings == ()
