"""Lists that are processed in parts, while the loop runs in between."""

import asyncio

import pytest

from kubeproxy.engine import pacing
from kubeproxy.model import planner as planner_module
from kubeproxy.model.events import Replaced
from support.staged_engine import NODE, V4, cidr, endpoints, gone, node, play, service, started

_sleep = asyncio.sleep


@pytest.fixture
def bit_by_bit(monkeypatch):
    """Let the loop run after every object."""
    monkeypatch.setattr(pacing, "HOLD", -1.0)
    monkeypatch.setattr(planner_module, "STEP", 1)


def lists(*numbers):
    names = [f"s{n}" for n in numbers]
    return (
        Replaced("services", [service(name, n).object for name, n in zip(names, numbers, strict=True)]),
        Replaced("endpointslices", [endpoints(name, n).object for name, n in zip(names, numbers, strict=True)]),
    )


@pytest.mark.usefixtures("bit_by_bit")
def test_half_a_list_is_not_written():
    async def scene(stage):
        stage.tell(*lists(*range(1, 20)), node())
        await stage.settled()
        assert stage.backend.calls == [("resync", [f"s{n}" for n in range(1, 20)])]
        stage.backend.calls.clear()
        stage.tell(*lists(*range(10, 30)))
        await stage.settled()
        assert [kind for kind, _ in stage.backend.calls] == ["sync"]
        assert set(stage.programmed()) == {f"s{n}" for n in range(10, 30)}
        assert all(plan.cluster for plans in stage.programmed().values() for plan in plans)

    play(scene)


@pytest.mark.usefixtures("bit_by_bit")
def test_changes_after_a_list_wait_for_the_list():
    async def scene(stage):
        await started(stage)
        stage.tell(*lists(1, 2, 3))
        stage.tell(service("s3", 9), gone("s2"))
        stage.tell(service("s3", 4))
        assert "s3" not in {name for _, name in stage.engine.planner.services}
        await stage.settled()
        assert set(stage.programmed()) == {"s1", "s3"}
        assert stage.programmed()["s3"][0].frontends[0].address == bytes([10, 96, 0, 4])

    play(scene)


@pytest.mark.usefixtures("bit_by_bit")
def test_the_node_does_not_wait_for_a_list():
    async def scene(stage):
        stage.tell(*lists(1, 2, 3))
        stage.tell(node(), cidr("10.96.0.0/16"))
        assert NODE in stage.engine.planner.nodes
        await stage.settled()
        assert stage.backend.worlds[-1].ipv4.service_cidrs

    play(scene)


@pytest.mark.usefixtures("bit_by_bit")
def test_changes_during_a_sync_are_written_by_the_next():
    async def scene(stage):
        await started(stage, *lists(1, 2, 3))
        for n in range(30):
            stage.tell(service(f"s{n % 3 + 1}", n % 3 + 100 + n), service("late", n + 1))
            await _sleep(0)
        stage.tell(gone("late"))
        await stage.settled()
        assert {name: plans[0].frontends[0].address[-1] for name, plans in stage.programmed().items()} == {
            "s1": 127,
            "s2": 129,
            "s3": 131,
        }

    play(scene)


@pytest.mark.usefixtures("bit_by_bit")
def test_a_failure_in_a_list_ends_the_program():
    async def scene(stage):
        await started(stage)
        broken = Replaced("services", [service("a").object, None, service("b", 2).object])
        stage.tell(broken)
        with pytest.raises(AttributeError):
            await asyncio.wait_for(stage.task, 15)

    play(scene)


@pytest.mark.usefixtures("bit_by_bit")
def test_a_full_sync_takes_no_half_list():
    async def scene(stage):
        await started(stage, *lists(1, 2, 3))
        stage.tell_while_it_reads(*lists(*range(2, 9)))
        stage.engine.force(V4)
        await stage.settled()
        assert stage.backend.calls[0] == ("resync", ["s1", "s2", "s3"])
        assert set(stage.programmed()) == {f"s{n}" for n in range(2, 9)}

    play(scene)
