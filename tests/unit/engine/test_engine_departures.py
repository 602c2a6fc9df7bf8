"""Deleted endpoints: the backends are notified when a deletion is certain, even if no plan changes then."""

import pytest

from kubeproxy.backends.mode import Abilities
from kubeproxy.features import RESETS, Features
from kubeproxy.model import gone as model
from kubeproxy.model.addresses import pack
from kubeproxy.model.events import Upserted
from kubeproxy.model.objects import EndpointConditions, EndpointPort, EndpointSlice, Labels, ObjectMeta, SliceEndpoint
from support import staged_engine
from support.staged_engine import FakeBackend, play, service, started

FAILED = EndpointConditions(ready=False, serving=False, terminating=True)


class Resetting(FakeBackend):
    """A backend that records deleted endpoints, and writes them with the next sync."""

    def __init__(self, family):
        super().__init__(family)
        self.abilities = Abilities(depart=self.depart)
        self.gone = []
        self.asked = None

    def depart(self, departed, in_use):
        self.gone += departed.gone
        self.asked = in_use
        return bool(departed.gone)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(model, "UPDATED", 0.02)
    monkeypatch.setattr(staged_engine, "FakeBackend", Resetting)


def failing(*numbers):
    meta = ObjectMeta(name="a", namespace="ns", labels=Labels(service_name="a"))
    found = [SliceEndpoint([f"10.244.0.{number}"], FAILED) for number in numbers]
    return Upserted("endpointslices", EndpointSlice(meta, "IPv4", found, [EndpointPort(port=8080)]))


def test_deleted_endpoints_are_passed_on_and_committed_in_time():
    async def scene(stage):
        await started(stage, service("a"), failing(1, 2))
        stage.tell(failing(1))
        await stage.until(lambda: stage.backend.gone)
        await stage.until(lambda: ("sync", []) in stage.backend.calls)
        assert stage.backend.gone == [pack("10.244.0.2") + b"\x06" + (8080).to_bytes(2, "big")]
        assert stage.backend.asked(pack("10.244.0.1"))

    play(scene, features=Features({RESETS.flag: True}))


def test_without_the_flag_nothing_is_reported():
    async def scene(stage):
        await started(stage, service("a"), failing(1, 2))
        stage.tell(failing(1))
        await stage.settled()
        assert stage.backend.asked is None
        assert stage.engine.planner.departures is None

    play(scene)


def test_refused_departures_are_part_of_the_next_full_sync():
    async def scene(stage):
        await started(stage, service("a"), failing(1, 2))
        stage.backend.failures = [True]
        stage.tell(failing(1), service("b", 2))
        await stage.until(lambda: stage.backend.gone)
        await stage.settled()
        assert "resync" in [kind for kind, _ in stage.backend.calls]
        assert not stage.engine._backlogs[stage.backend.family].other_changes

    play(scene, features=Features({RESETS.flag: True}))
