"""What others do to the rules: when the loop looks for it, and what it makes of what it finds."""

import asyncio
import contextlib
from collections import Counter

from kubeproxy.engine import Pace
from kubeproxy.errors import ApplyError
from support.staged_engine import V4, endpoints, play, service, started

_sleep = asyncio.sleep


def test_changed_rules_are_repaired_at_once():
    async def scene(stage):
        await started(stage, service("a"))
        stage.backend.state.clear()
        stage.backend.is_touched, stage.backend.found = True, "chains or rules were changed"
        await stage.until(lambda: stage.backend.calls)
        await stage.settled()
        assert stage.backend.calls == [("resync", ["a"])]
        assert set(stage.programmed()) == {"a"}
        assert stage.notes.of("drifted") == [("chains or rules were changed",)]

    play(scene)


def test_what_is_not_touched_is_not_looked_at():
    async def scene(stage):
        await started(stage)
        stage.backend.found = stage.backend.found_elements = AssertionError("looked")
        await _sleep(0.02)
        assert stage.backend.calls == []

    play(scene, pace=Pace(period=0.0))


def test_changed_elements_are_looked_for_in_each_period_and_convicted_by_a_second_look():
    async def scene(stage):
        await started(stage, service("a"))
        looks = Counter()
        original = stage.backend.element_drift

        def element_drift():
            looks["elements"] += 1
            return original()

        stage.backend.element_drift = element_drift
        stage.backend.is_touched, stage.backend.found_elements = True, "elements of endpoints were changed"
        await stage.until(lambda: stage.backend.calls)
        await stage.settled()
        assert looks["elements"] == 2
        assert stage.backend.calls == [("resync", ["a"])]
        assert stage.notes.of("drifted") == [("elements of endpoints were changed",)]

    play(scene, pace=Pace(period=0.0))


def test_elements_are_left_alone_between_the_periods():
    async def scene(stage):
        await started(stage)
        stage.backend.is_touched, stage.backend.found_elements = True, AssertionError("looked")
        await _sleep(0.02)
        assert stage.backend.calls == []

    play(scene, pace=Pace(period=3600.0))


def test_a_suspicion_that_does_not_hold_is_dropped():
    async def scene(stage):
        await started(stage)
        answers = ["elements of endpoints were changed", "", "elements of endpoints were changed"]

        def element_drift():
            if not answers:
                return ""
            if len(answers) == 1:
                stage.backend.is_touched = False
            return answers.pop(0)

        stage.backend.element_drift, stage.backend.is_touched = element_drift, True
        await stage.until(lambda: not answers)
        await _sleep(0.01)
        assert stage.backend.calls == []
        assert stage.notes.of("drifted") == []

    play(scene, pace=Pace(period=0.0))


def test_rules_that_cannot_be_read_are_written_again():
    async def scene(stage):
        await started(stage)
        stage.backend.is_touched, stage.backend.found = True, ApplyError("no such table")
        await stage.until(lambda: stage.backend.calls)
        assert stage.backend.calls == [("resync", [])]
        assert "no such table" in stage.notes.of("drifted")[0][0]

    play(scene)


def test_a_kernel_that_does_not_answer_is_asked_again():
    async def scene(stage):
        await started(stage)
        stage.backend.is_touched = ApplyError("no answer")
        await _sleep(0.01)
        stage.backend.is_touched, stage.backend.found = True, "chains or rules were changed"
        await stage.until(lambda: stage.backend.calls == [("resync", [])])

    play(scene)


def test_what_is_asked_for_during_a_sync_is_not_forgotten():
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
        stage.backend.is_touched, stage.backend.found = True, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a chain")
        with contextlib.suppress(UnicodeDecodeError):
            async with asyncio.timeout(15):
                await stage.task
        assert isinstance(stage.task.exception(), UnicodeDecodeError)
        stage.task = asyncio.create_task(_sleep(0))

    play(scene)
