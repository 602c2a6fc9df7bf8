"""Changes of the rules by other programs: when the loop looks for them, and its reaction."""

import asyncio
import contextlib

import pytest

from kubeproxy.backends.mode import Depth, ForeignChange
from kubeproxy.engine.engine import Pace
from kubeproxy.errors import ApplyError
from support.staged_engine import LISTS, V4, V6, endpoints, gone, play, service, started

_sleep = asyncio.sleep


RULES = ForeignChange("chains or rules were changed")
ELEMENTS = ForeignChange("elements of endpoints were changed", certain=False)


def test_changed_rules_are_repaired_at_once():
    async def scene(stage):
        await started(stage, service("a"))
        stage.backend.state.clear()
        stage.backend.is_touched, stage.backend.altered = True, RULES
        await stage.until(lambda: stage.backend.calls)
        await stage.settled()
        assert stage.backend.calls == [("resync", ["a"])]
        assert set(stage.programmed()) == {"a"}
        assert stage.notes.notices == [RULES]

    play(scene)


def test_the_state_of_a_family_is_reported_until_the_repair_and_after_it():
    async def scene(stage):
        await started(stage, service("a"))
        sound = stage.engine.standing(V4)
        assert sound.sound_since == sound.inspected_at
        assert (sound.refusal, sound.difference, sound.queued) == (None, None, 0)
        stage.backend.failures = [True] * 10_000
        stage.backend.is_touched, stage.backend.altered = True, RULES
        await stage.until(lambda: stage.engine.standing(V4).refusal)
        assert stage.engine.standing(V4).difference == RULES.what
        assert stage.engine.standing(V4).sound_since is None
        stage.backend.failures.clear()
        await stage.settled()
        repaired = stage.engine.standing(V4)
        assert (repaired.refusal, repaired.difference) == (None, None)
        assert repaired.sound_since > sound.sound_since

    play(scene)


@pytest.mark.parametrize(("period", "depth"), [(0.0, Depth.THOROUGH), (3600.0, Depth.QUICK)])
def test_only_a_look_at_everything_shows_that_everything_is_there(period, depth):
    async def scene(stage):
        await started(stage, service("a"))
        before = stage.engine.standing(V4).inspected_at
        stage.backend.looks.clear()
        await stage.until(lambda: len(stage.backend.looks) >= 3)
        assert set(stage.backend.looks) == {depth}
        assert (stage.engine.standing(V4).inspected_at > before) == (depth is Depth.THOROUGH)

    play(scene, pace=Pace(period=period))


def test_upkeep_comes_with_each_look():
    async def scene(stage):
        await started(stage)
        stage.backend.looks.clear()
        stage.backend.kept_up = 0
        await stage.until(lambda: len(stage.backend.looks) >= 3)
        assert stage.backend.kept_up >= 3

    play(scene)


def test_a_family_that_waits_for_a_full_sync_is_not_looked_at():
    async def scene(stage):
        stage.tell(LISTS[0])  # the lists are not complete: nothing has been written yet
        await _sleep(0.02)
        assert (stage.backend.looks, stage.backend.kept_up) == ([], 0)

    play(scene)


def test_inspections_are_thorough_once_per_period_and_a_second_difference_is_repaired():
    async def scene(stage):
        await started(stage, service("a"))
        stage.backend.looks.clear()
        stage.backend.is_touched, stage.backend.altered_elements = True, ELEMENTS
        await stage.until(lambda: stage.backend.calls)
        looks = list(stage.backend.looks)
        await stage.settled()
        assert set(looks) == {Depth.THOROUGH}
        assert len(looks) in (2, 3)  # an inspection may have been under way
        assert stage.backend.calls == [("resync", ["a"])]
        assert stage.notes.notices == [ELEMENTS]

    play(scene, pace=Pace(period=0.0))


def test_looks_are_quick_between_the_periods():
    async def scene(stage):
        await started(stage)
        stage.backend.is_touched, stage.backend.altered_elements = True, ELEMENTS
        await stage.until(lambda: len(stage.backend.looks) >= 3)
        assert set(stage.backend.looks) == {Depth.QUICK}
        assert stage.backend.calls == []

    play(scene, pace=Pace(period=3600.0))


def test_an_unconfirmed_difference_is_dropped():
    async def scene(stage):
        await started(stage)
        answers = [ELEMENTS, None, ELEMENTS, None]

        def inspect(_):
            return answers.pop(0) if answers else None

        stage.backend.inspect = inspect
        await stage.until(lambda: not answers)
        await _sleep(0.01)
        assert stage.backend.calls == []
        assert stage.notes.notices == []

    play(scene, pace=Pace(period=0.0))


@pytest.mark.parametrize("part", ["is_touched", "altered"])
def test_an_unreadable_kernel_is_written_again(part):
    async def scene(stage):
        await started(stage)
        stage.backend.is_touched = True
        setattr(stage.backend, part, ApplyError("no such table"))
        await stage.until(lambda: stage.backend.calls)
        assert stage.backend.calls == [("resync", [])]
        assert "no such table" in stage.notes.notices[0].what

    play(scene)


def test_upkeep_that_fails_leads_to_a_full_sync():
    async def scene(stage):
        await started(stage)

        def fails():
            stage.backend.upkeep = lambda: None
            raise ApplyError("no such server")

        stage.backend.upkeep = fails
        await stage.until(lambda: stage.backend.calls == [("resync", [])])

    play(scene)


def test_an_inspection_without_memory_is_repeated_and_then_leads_to_a_full_sync_of_each_family():
    """The inspection may have forgotten announced changes, which both families share."""

    async def scene(stage):
        await started(stage, service("a"))
        first, second = stage.backends
        written, answers = [], [MemoryError("no more")] * 3

        def inspect(_):
            written.append(list(first.calls))
            if answers:
                raise answers.pop()

        first.inspect = inspect
        await stage.until(lambda: first.calls and second.calls)
        await stage.settled()
        assert written[:4] == [[]] * 4
        assert first.calls[0][0] == second.calls[0][0] == "resync"
        assert {"memory" in notice.what for notice in stage.notes.notices} == {True}

    play(scene, families=(V4, V6), pace=Pace(period=3600.0))


def test_periodic_work_without_memory_ends_the_program_because_it_may_be_half_done():
    async def scene(stage):
        await started(stage)

        def fails():
            raise MemoryError("no more")

        stage.backend.upkeep = fails
        with contextlib.suppress(MemoryError):
            async with asyncio.timeout(15):
                await stage.task
        assert isinstance(stage.task.exception(), MemoryError)
        stage.task = asyncio.create_task(_sleep(0))

    play(scene)


def test_a_request_during_a_sync_is_not_lost():
    async def scene(stage):
        await started(stage, service("a"), service("b", 2))
        asked = iter([True])

        def force():
            if next(asked, False):
                stage.engine.force(V4)

        stage.backend.before_step = force
        stage.tell(endpoints("a", 1), endpoints("b", 1))
        await stage.until(lambda: len(stage.backend.calls) >= 2)
        await stage.settled()
        assert [kind for kind, _ in stage.backend.calls] == ["sync", "resync"]

    play(scene)


def test_a_look_out_that_breaks_ends_the_program():
    async def scene(stage):
        await started(stage)
        stage.backend.is_touched, stage.backend.altered = True, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a chain")
        with contextlib.suppress(UnicodeDecodeError):
            async with asyncio.timeout(15):
                await stage.task
        assert isinstance(stage.task.exception(), UnicodeDecodeError)
        stage.task = asyncio.create_task(_sleep(0))

    play(scene)


def test_a_full_sync_writes_changes_that_arrived_during_its_reading():
    """Another kube-proxy may have written it by then: older plans would restore a deleted endpoint."""

    async def scene(stage):
        await started(stage, service("a"), endpoints("a", 1), service("gone", 2))
        stage.tell_while_it_reads(endpoints("a", 2), gone("gone"))
        stage.engine.force(V4)
        await stage.settled()
        assert stage.backend.calls == [("resync", ["a"])]
        (plan,) = stage.programmed()["a"]
        assert plan.cluster == (bytes([10, 244, 0, 2, 0x1F, 0x90]),)
        assert {change.name[1] for (changes,) in stage.notes.of("settled") for change in changes} == {"a", "gone"}

    play(scene)


def test_changes_during_the_reading_remain_queued_when_the_kernel_refuses():
    async def scene(stage):
        await started(stage, service("a"), endpoints("a", 1))
        stage.tell_while_it_reads(endpoints("a", 2))
        stage.backend.failures = [True]
        stage.engine.force(V4)
        await stage.settled()
        assert stage.backend.calls == [("resync", ["a"])] * 2
        (plan,) = stage.programmed()["a"]
        assert plan.cluster == (bytes([10, 244, 0, 2, 0x1F, 0x90]),)

    play(scene)


def test_a_family_that_was_committed_before_has_it_after_the_sync():
    async def scene(stage):
        first, second = stage.backends
        await started(stage, service("a"), service("b", 7, V6))
        stage.tell_while_it_reads(endpoints("a", 2))
        first.before_reading, second.before_reading = second.before_reading, first.before_reading
        stage.engine.force(V6)
        await stage.settled()
        assert second.calls == [("resync", ["a", "b"])]
        assert first.calls == [("sync", ["a"])]

    play(scene, families=(V4, V6))


def test_changes_are_reported_before_the_kernel_has_them():
    async def scene(stage):
        await started(stage, service("a"))
        reported = []
        stage.backend.before_step = lambda: reported.append(stage.notes.of("committing"))
        stage.tell(service("b", 2))
        await stage.settled()
        stage.engine.force(V4)
        await stage.settled()
        ((family, (change,)),), (*_, (_, everything)) = reported[0], reported[-1]
        assert (family, change.name[1], everything) == (V4, "b", None)

    play(scene)
