"""The reports of the loop: problems, pending changes, and their duration."""

import asyncio
import itertools

import pytest

from kubeproxy.model.events import Rejected
from support.staged_engine import LISTS, V4, V6, endpoints, node, play, runs_for_years, service, started

_sleep = asyncio.sleep


def test_problems_are_reported_once():
    async def scene(stage):
        await started(stage)
        stage.tell(service("a", external_ips=["nonsense"]))
        await stage.settled()
        stage.tell(endpoints("a", 1))
        await stage.settled()
        stage.tell(service("a", external_ips=["nonsense", "more nonsense"]))
        stage.engine.force(V4)
        await stage.settled()
        reported = [(name, uid, problem.field, problem.reason) for name, uid, problem in stage.notes.notices]
        assert [(name, uid, field) for name, uid, field, _ in reported] == [
            (("ns", "a"), "uid-a", "spec.externalIPs")
        ] * 2
        assert len({reason for *_, reason in reported}) == 2

    play(scene)


def test_problems_survive_a_failed_sync():
    async def scene(stage):
        await started(stage)
        stage.backend.failures = [True]
        stage.tell(service("a", external_ips=["nonsense"]))
        await stage.settled()
        assert len(stage.notes.notices) == 1

    play(scene)


def test_rejected_objects_are_reported_without_a_sync():
    async def scene(stage):
        await started(stage)
        rejected = Rejected("services", "ns", "a", "uid", "spec", "is no object")
        stage.tell(rejected)
        assert stage.notes.notices == [rejected]
        await _sleep(0.005)
        assert stage.backend.calls == []

    play(scene)


def test_pending_changes_are_counted_until_they_are_in_the_kernel():
    async def scene(stage):
        await started(stage)
        stage.tell(service("a"), endpoints("a", 1))
        stage.tell(endpoints("a", 2))
        assert stage.notes.counts == ([], [(1, 1), (1, 2)])
        await stage.settled()
        assert stage.notes.counts == ([(1, 2)], [(1, 1), (1, 2), (0, 0)])
        stage.tell(service("b", 2))
        assert stage.notes.counts[1][-1] == (1, 0)

    play(scene)


def test_changes_during_a_sync_are_pending_after_it():
    async def scene(stage):
        await started(stage)
        stage.tell_during_sync(endpoints("a", 1))
        stage.tell(service("a"))
        await stage.settled()
        fresh, pending = stage.notes.counts
        assert fresh == [(1, 0), (0, 1)]
        assert [n for n, _ in itertools.groupby(pending)] == [(1, 0), (1, 1), (0, 1), (0, 0)]

    play(scene)


def test_changes_that_mean_nothing_are_not_pending_for_ever():
    async def scene(stage):
        await started(stage)
        stage.tell(service("a", type="ExternalName"))
        assert stage.notes.counts[1][-1] == (1, 0)
        await stage.until(lambda: stage.notes.commits)
        await stage.settled()
        assert stage.notes.counts[0] == [(1, 0)]
        assert stage.notes.counts[1][-1] == (0, 0)

    play(scene)


@pytest.mark.parametrize(
    ("triggered", "known"),
    [
        ("2026-01-01T00:00:00Z", True),
        ("2026-01-01T00:00:00.123456789Z", True),
        ("nonsense", False),
        ("", False),
        ("2026-01-01", False),
    ],
)
def test_the_duration_of_a_change_is_reported_if_it_is_known(triggered, known):
    async def scene(stage):
        await started(stage, service("a"))
        runs_for_years(stage)
        stage.tell(endpoints("a", 1, triggered=triggered))
        await stage.settled()
        [commit] = stage.notes.commits
        assert (commit.family, len(commit.ages)) == (V4, int(known))
        assert all(seconds > 0 for seconds in commit.ages)

    play(scene)


def test_a_trigger_from_before_the_start_is_not_measured():
    async def scene(stage):
        await started(stage, service("a"))
        stage.tell(endpoints("a", 1, triggered="2026-01-01T00:00:00Z"))
        await stage.settled()
        [commit] = stage.notes.commits
        assert commit.ages == []

    play(scene)


def test_a_trigger_is_measured_in_the_family_of_its_slice():
    async def scene(stage):
        await started(stage, service("a"), service("a", 6, V6))
        runs_for_years(stage)
        stage.tell(endpoints("a", 1, triggered="2026-01-01T00:00:00Z"), service("a", 7, V6))
        await stage.settled()
        assert {commit.family: len(commit.ages) for commit in stage.notes.commits}.get(V6, 0) == 0

    play(scene, families=(V4, V6))


def test_nothing_is_queued_before_everything_is_listed_and_then_the_first_sync_is():
    async def scene(stage):
        stage.tell(LISTS[0], service("a"), node())
        await _sleep(0.005)
        assert stage.notes.of("queued") == []
        stage.tell(LISTS[1])
        await stage.settled()
        assert stage.notes.of("queued") == [([V4],)]

    play(scene)


def test_queued_is_reported_once_until_committed():
    async def scene(stage):
        await started(stage, service("a"))
        for n in range(1, 4):
            stage.tell(endpoints("a", n))
        assert stage.notes.of("queued") == [([V4],)]
        await stage.settled()
        stage.tell(endpoints("a", 9))
        assert len(stage.notes.of("queued")) == 2

    play(scene)


def test_a_changed_node_is_queued_and_an_equal_one_is_not():
    async def scene(stage):
        await started(stage)
        stage.tell(node())
        await _sleep(0.005)
        assert stage.notes.of("queued") == []
        stage.tell(node("192.0.2.9"))
        await stage.settled()
        said = [name for name, _ in stage.notes.made if name in {"queued", "committed"}]
        assert said == ["queued", "committed"]

    play(scene)


def test_changes_queued_during_a_sync_still_wait_after_it():
    async def scene(stage):
        await started(stage)
        stage.tell_during_sync(endpoints("a", 1))
        stage.tell(service("a"))
        await stage.settled()
        said = [name for name, _ in stage.notes.made if name in {"queued", "committed"}]
        assert said == ["queued", "queued", "committed", "queued", "committed"]

    play(scene)
