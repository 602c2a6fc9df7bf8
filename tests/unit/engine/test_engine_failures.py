"""The loop after a failed sync: it retries, loses no change, and reports no success too early."""

import asyncio
import itertools
import threading

from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.mode import ForeignChange
from kubeproxy.engine import backlog
from kubeproxy.engine.pacing import Backoff
from kubeproxy.errors import ChangedByOthersError
from kubeproxy.model.events import Deleted, Replaced
from support.effort import examples
from support.staged_engine import READY, V4, V6, endpoints, gone, play, runs_for_years, service, started

_sleep = asyncio.sleep


def test_a_failed_sync_is_tried_again_as_a_resync():
    async def scene(stage):
        await started(stage, service("a"), service("b", 2))
        stage.backend.failures = [True]
        stage.tell(endpoints("b", 1))
        await stage.settled()
        assert stage.backend.calls == [("sync", ["b"]), ("resync", ["b", "a"])]
        assert stage.programmed()["b"][0].cluster
        assert [str(error) for _, error in stage.notes.of("refused")] == ["the kernel is in a bad mood"]
        stage.tell(endpoints("a", 1))
        await stage.settled()
        assert stage.backend.calls[2:] == [("sync", ["a"])]

    play(scene)


def test_foreign_changes_during_a_sync_are_reported_as_drift():
    async def scene(stage):
        await started(stage, service("a"))
        stage.backend.failures, stage.backend.mood = [True], ChangedByOthersError("rules were changed")
        stage.tell(endpoints("a", 1))
        await stage.settled()
        assert stage.notes.notices == [ForeignChange("rules were changed")]
        assert len(stage.notes.of("refused")) == 1
        assert stage.programmed()["a"][0].cluster

    play(scene)


def test_foreign_changes_are_logged_once_per_minute_unless_repairs_are_refused_too(caplog):
    async def scene(stage):
        await started(stage, service("a"))
        stage.backend.mood = ChangedByOthersError("another program changed table t")
        for count in range(1, 5):
            stage.backend.failures = [True]
            stage.tell(endpoints("a", count))
            await stage.settled()
        assert len(stage.notes.of("refused")) == len(stage.notes.notices) == 4
        assert [line.levelname for line in caplog.records if "another program changed" in line.message] == ["WARNING"]
        stage.backend.failures = [True, True, True]
        stage.tell(endpoints("a", 1))
        await stage.settled()
        (line,) = [line for line in caplog.records if line.message.startswith("Sync failed")]
        assert "another program changed table t" in line.message

    play(scene)


def test_a_failed_first_sync_is_tried_again_and_not_ready_until_it_is_done():
    async def scene(stage):
        stage.backend.failures = [True] * 10_000
        stage.tell(service("a"), *READY[2:], Replaced("endpointslices", []))
        stage.tell(Replaced("services", [service("a").object]))
        await stage.until(lambda: len(stage.notes.of("refused")) >= 2)
        assert not stage.engine.ready.is_set()
        stage.backend.failures.clear()
        await stage.settled()
        assert {kind for kind, _ in stage.backend.calls} == {"resync"}
        assert set(stage.programmed()) == {"a"}

    play(scene)


def test_the_pauses_of_retries_grow_and_restart_after_a_success(monkeypatch):
    async def scene(stage):
        await started(stage, service("a"))
        loop, pauses = asyncio.get_running_loop(), []
        later = loop.call_later

        def call_later(seconds, callback, *arguments):
            if callback == stage.engine._try_again:
                pauses.append(seconds)
                seconds = 0
            return later(seconds, callback, *arguments)

        monkeypatch.setattr(loop, "call_later", call_later)
        for _ in range(2):
            pauses.clear()
            stage.backend.failures = [True] * 6
            stage.tell(endpoints("a", len(stage.backend.calls) + 1))
            await stage.until(lambda: not stage.backend.failures)
            await stage.settled()
            assert pauses == [0.001, 0.002, 0.004, 0.004, 0.004, 0.004]

    monkeypatch.setattr(backlog, "retries", lambda: Backoff(0.001, 0.004, spread=0.0))
    play(scene)


def test_changes_of_a_family_do_not_wait_for_the_retries_of_the_other_one(monkeypatch):
    monkeypatch.setattr(backlog, "FIRST_RETRY", 3600.0)
    monkeypatch.setattr(backlog, "SLOWEST_RETRY", 3600.0)

    async def scene(stage):
        four, six = stage.backends
        six.failures = [True] * 10_000
        runs_for_years(stage)
        stage.tell(*READY, service("six", 6, V6))
        await stage.until(lambda: stage.notes.of("refused"))
        for number in (1, 2, 3):  # also those that arrive after the first failure
            stage.tell(service(f"s{number}", number), endpoints(f"s{number}", 1, triggered="2026-01-01T00:00:00Z"))
            await stage.until(lambda: f"s{number}" in stage.programmed(four))  # noqa: B023
        stage.tell(service("bad", 9, external_ips=["nonsense"]))
        await stage.until(lambda: stage.notes.notices)
        settled = {change.name[1] for (changes,) in stage.notes.of("settled") for change in changes}
        assert settled == {"six", "s1", "s2", "s3", "bad"}
        assert {commit.family for commit in stage.notes.commits if commit.ages} == {V4}
        assert len(stage.notes.of("refused")) == 1
        assert not stage.engine.ready.is_set()

    play(scene, families=(V4, V6))


def test_rules_of_a_family_are_repaired_while_the_other_one_fails():
    async def scene(stage):
        four, six = stage.backends
        six.failures = [True] * 10_000
        stage.tell(*READY, service("a"), service("six", 6, V6))
        await stage.until(lambda: stage.notes.of("refused") and stage.programmed(four))
        four.state.clear()
        four.is_touched, four.altered = True, ForeignChange("chains or rules were changed")
        await stage.until(lambda: stage.programmed(four))
        assert stage.notes.notices == [ForeignChange("chains or rules were changed")]

    play(scene, families=(V4, V6))


def test_a_family_that_fails_does_not_hold_the_other_one():
    async def scene(stage):
        await started(stage, service("a"), service("six", 6, V6))
        four, six = stage.backends
        six.failures = [True, True]
        stage.tell(service("b", 2), service("c", 3, V6))
        await stage.until(lambda: "b" in stage.programmed(four))
        await stage.settled()
        assert set(stage.programmed(six)) == {"six", "c"}
        assert {kind for kind, _ in four.calls} == {"sync"}
        assert [kind for kind, _ in six.calls] == ["sync", "resync", "resync"]
        assert {family for family, _ in stage.notes.of("refused")} == {V6}

    play(scene, families=(V4, V6))


def test_changes_are_reported_once_and_when_no_family_has_them_not_at_all():
    async def scene(stage):
        await started(stage, service("a"), service("six", 6, V6))
        for backend in stage.backends:
            backend.failures = [True] * 10_000
        runs_for_years(stage)
        stage.tell(endpoints("a", 1, triggered="2026-01-01T00:00:00Z"))
        await stage.until(lambda: len(stage.notes.of("refused")) >= 2)
        assert stage.notes.of("settled") == []
        assert stage.notes.commits == []
        stage.tell(endpoints("a", 1, 2, triggered="2026-01-01T00:00:09Z"))
        for backend in stage.backends:
            backend.failures.clear()
        await stage.settled()
        changes = [change for (changes,) in stage.notes.of("settled") for change in changes]
        assert {change.name[1] for change in changes} == {"a"}
        assert changes[0].before.plans[0].cluster == ()  # one change or two, by the moment of the steps
        assert all(one.after == two.before for one, two in itertools.pairwise(changes))
        assert len(changes[-1].after.plans[0].cluster) == 2
        assert sum(slices for _, slices in stage.notes.counts[0]) == 2
        assert sum(len(commit.ages) for commit in stage.notes.commits) == 2

    play(scene, families=(V4, V6))


def test_attempts_that_fail_are_not_reported_as_done():
    async def scene(stage):
        await started(stage, service("a"))
        stage.backends[1].failures = [True] * 10_000
        stage.tell(service("six", 6, V6))
        await stage.until(lambda: len(stage.notes.of("refused")) > 3)
        [(changes,)] = stage.notes.of("settled")
        assert [change.name[1] for change in changes] == ["six"]

    play(scene, families=(V4, V6))


def test_the_state_of_a_family_is_reported_while_the_other_one_is_refused():
    async def scene(stage):
        await started(stage, service("a"), service("six", 6, V6))
        stage.backends[1].failures = [True] * 10_000
        stage.tell(service("b", 2), endpoints("a", 7), gone("six"))
        await stage.until(lambda: stage.notes.of("refused") and "b" in stage.programmed())
        engine, four = stage.engine, stage.programmed()
        assert {name[1] for name in engine.queued} == {"a", "b", "six"}
        for name in "a", "b":
            assert tuple(engine.committed(("ns", name))) == four[name]
        assert [plan.key.family for plan in engine.committed(("ns", "six"))] == [V6]

    play(scene, families=(V4, V6))


def test_attempts_of_a_refused_family_leave_the_loop_alone(monkeypatch):
    """With 44,000 Services the desired state takes 0.1 s to compute, and the retries may last for days."""
    threads, gathered = set(), backlog.Backlog.all_plans

    def noted(self, compiled):
        threads.add(threading.current_thread())
        return gathered(self, compiled)

    monkeypatch.setattr(backlog.Backlog, "all_plans", noted)

    async def scene(stage):
        stage.backend.failures = [True, True]
        await started(stage, service("a"))
        assert threads
        assert threading.current_thread() not in threads

    play(scene)


def test_changes_are_pending_until_every_family_has_them():
    async def scene(stage):
        await started(stage)
        stage.backends[1].failures = [True] * 10_000
        stage.tell(service("a"), endpoints("a", 1))
        await stage.until(lambda: "a" in stage.programmed(stage.backends[0]))
        await stage.until(lambda: stage.notes.of("refused"))
        stage.tell(endpoints("a", 1, 2))
        await stage.until(lambda: stage.notes.counts[0] == [(1, 1), (0, 1)])
        await stage.until(lambda: len(stage.notes.of("refused")) > 2)
        assert stage.notes.counts[1][-1] == (1, 2)
        stage.backends[1].failures.clear()
        await stage.settled()
        assert stage.notes.counts[1][-1] == (0, 0)
        assert stage.notes.counts[0] == [(1, 1), (0, 1)]

    play(scene, families=(V4, V6))


names = st.sampled_from(["a", "b", "c"])
moves = st.one_of(
    st.builds(service, names, st.integers(1, 3)),
    st.builds(lambda name, number: service(name, number, V6), names, st.integers(1, 3)),
    st.builds(lambda name, numbers: endpoints(name, *numbers), names, st.lists(st.integers(1, 5), unique=True)),
    st.builds(gone, names),
    st.sampled_from(["rest", "refuse 4", "refuse 6", "force"]),
)


@examples(60)
@given(st.lists(moves, max_size=20))
def test_nothing_is_lost_whatever_fails(moves):
    async def scene(stage):
        await started(stage)
        for move in moves:
            if move == "rest":
                await _sleep(0)
            elif move == "force":
                stage.engine.force(V4)
            elif isinstance(move, str):
                stage.backends[move == "refuse 6"].failures += [False, True]
            else:
                stage.tell(move)
        await stage.settled()
        for backend in stage.backends:
            expected = {
                name: plans
                for name, compiled in stage.engine.planner.compiled.items()
                if (plans := tuple(p for p in compiled.plans if p.key.family is backend.family))
            }
            assert backend.state == expected

    play(scene, families=(V4, V6))


def test_a_failing_family_does_not_delay_the_effects_of_the_other_ones_changes():
    async def scene(stage):
        await started(stage, service("a", protocol="UDP"))
        stage.backends[1].failures = [True] * 10_000
        stage.tell(service("six", 6, V6, protocol="UDP"), service("tcp", 7, V6))
        await stage.until(lambda: stage.notes.of("refused"))
        for number in (1, 2):
            stage.notes.made.clear()
            stage.tell(endpoints("a", number, protocol="UDP"))
            await stage.until(lambda: [change for commit in stage.notes.commits for change in commit.changes])
            [change] = [change for commit in stage.notes.commits for change in commit.changes]
            assert {(commit.family, commit.everything) for commit in stage.notes.commits} == {(V4, False)}
            assert change.after.plans[0].cluster[0][3] == number
        stage.notes.made.clear()
        stage.tell(gone("a"))
        stage.backends[1].failures.clear()
        await stage.settled()
        [commit] = [commit for commit in stage.notes.commits if commit.family is V6 and commit.everything]
        assert {change.name[1] for change in commit.changes} == {"a", "six"}

    play(scene, families=(V4, V6))


def test_a_repair_may_concern_every_udp_service():
    async def scene(stage):
        await started(stage, service("a", protocol="UDP"), service("b", 2, protocol="UDP"), service("tcp", 3))
        stage.engine.force(V4)
        stage.tell(endpoints("b", 1, protocol="UDP"), endpoints("tcp", 1))
        await stage.settled()
        [commit] = stage.notes.commits
        assert (commit.family, commit.full, commit.everything, commit.services) == (V4, True, True, 3)
        assert {c.name[1]: c.before == c.after for c in commit.changes} == {"a": True, "b": False}

    play(scene)


def test_services_that_come_and_go_while_the_kernel_refuses_are_forgotten():
    async def scene(stage):
        await started(stage, service("a"), service("six", 6, V6), service("old", 7, V6))
        four, six = stage.backends
        four.failures, six.failures = [True] * 10_000, [True] * 10_000
        stage.tell(endpoints("a", 1), gone("old"))
        for number in range(50):
            stage.tell(service(f"s{number}", 9, V6), endpoints(f"s{number}", 1))
            await stage.until(lambda: not stage.engine.planner.dirty)
            stage.tell(gone(f"s{number}"), Deleted("endpointslices", "ns", f"s{number}"))
            await stage.until(lambda: not stage.engine.planner.dirty)
        for known in (stage.engine._unsettled, *(b.changes for b in stage.engine._backlogs.values())):
            assert known.keys() <= {("ns", "a"), ("ns", "old"), ("ns", "s49")}
        four.failures, six.failures = [], []
        await stage.settled()
        assert (set(stage.programmed(four)), set(stage.programmed(six))) == ({"a"}, {"six"})

    play(scene, families=(V4, V6))
