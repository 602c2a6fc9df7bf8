"""When the loop syncs, and which Services: the first sync, bursts, families, changes during a sync."""

import asyncio
import threading
from itertools import chain

import pytest
from msgspec.structs import replace

from kubeproxy.engine import backlog as backlog_module
from kubeproxy.engine import engine as engine_module
from kubeproxy.engine.engine import Pace
from kubeproxy.errors import Unsupported
from kubeproxy.model import compile as compile_module
from kubeproxy.model import planner as planner_module
from kubeproxy.model.addresses import pack
from kubeproxy.model.events import Replaced, Upserted
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from support.staged_engine import LISTS, READY, V4, V6, cidr, endpoints, gone, node, play, service, started

_sleep = asyncio.sleep

# -- when ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [
        [],
        [node()],
        [node(), Replaced("services", [])],
        [node(), Replaced("endpointslices", [])],
        [node(), service("a"), endpoints("a", 1)],
        [*LISTS],
        [*LISTS, node(name="another")],
    ],
)
def test_nothing_is_written_before_the_lists_and_the_node_are_there(events):
    async def scene(stage):
        for event in events:
            stage.tell(event)
            await _sleep(0.005)
        assert stage.backend.calls == []
        assert not stage.engine.ready.is_set()
        stage.tell(*READY)
        await stage.settled()
        assert stage.backend.calls[0][0] == "resync"

    play(scene)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_of_the_first_lists_does_not_matter(order):
    async def scene(stage):
        for index in order:
            stage.tell(READY[index])
            await _sleep(0)
        await stage.settled()
        assert stage.backend.calls == [("resync", [])]

    play(scene)


def test_the_first_sync_is_one_resync_of_everything():
    async def scene(stage):
        stage.tell(service("a"), endpoints("a", 1), service("b", 2), *READY[2:])
        stage.tell(Replaced("services", [service("a").object, service("b", 2).object]))
        stage.tell(Replaced("endpointslices", [endpoints("a", 1).object]))
        await stage.settled()
        assert [b.calls for b in stage.backends] == [[("resync", ["a", "b"])]] * 2
        assert stage.programmed()["a"][0].cluster
        assert stage.notes.commits[0].full

    play(scene, families=(V4, V6))


def test_without_a_node_it_goes_on_after_a_while():
    async def scene(stage):
        stage.tell(*LISTS)
        await stage.settled()
        assert stage.backend.calls == [("resync", [])]
        assert len(stage.backend.worlds) == 1  # the backends must get every world, even one without addresses
        stage.tell(node())
        await stage.until(lambda: len(stage.backend.worlds) == 2)
        assert stage.backend.worlds[-1].ipv4.node_ips == (bytes([192, 0, 2, 1]),)

    play(scene, patience=0.03)


def test_a_late_first_list_does_not_wait_for_the_node_again():
    async def scene(stage):
        stage.engine._started -= 3600.0
        stage.tell(*LISTS)
        await stage.settled()
        assert stage.backend.calls == [("resync", [])]

    play(scene, patience=3600.0)  # longer than a test waits


def test_node_cidr_mode_waits_for_the_pod_networks():
    async def scene(stage):
        stage.tell(*READY)
        await _sleep(0.01)
        assert stage.backend.calls == []
        stage.tell(node(pod_cidrs=["10.244.3.0/24"]))
        await stage.settled()
        assert stage.backend.worlds[-1].ipv4.detector.value == "10.244.3.0/24"

    play(scene, local_mode="NodeCIDR")


def test_node_cidr_mode_gives_up_without_pod_networks():
    async def scene(stage):
        stage.tell(*READY)
        with pytest.raises(Unsupported, match="podCIDRs"):
            await asyncio.wait_for(stage.task, 5)
        assert stage.backend.calls == []

    play(scene, local_mode="NodeCIDR", patience=0.01)


@pytest.mark.parametrize(("address", "bind", "runs"), [("fd00::1", "", False), ("fd00::1", "192.0.2.1", True)])
def test_a_node_with_an_unserved_first_address_is_refused(address, bind, runs):
    """As the Go kube-proxy, which ends with "no support for primary IP family"."""

    async def scene(stage):
        stage.tell(*LISTS, node(address))
        if runs:
            await stage.settled()
            assert stage.backend.calls == [("resync", [])]
        else:
            with pytest.raises(Unsupported, match="is an IPv6 address, but only IPv4 can be served here"):
                await asyncio.wait_for(stage.task, 5)
            assert stage.backend.calls == []

    play(scene, bind_address=pack(bind) if bind else b"")


# -- which Services -------------------------------------------------------------------------------------------------


def test_only_changes_are_synced():
    async def scene(stage):
        await started(stage, service("a"), service("b", 2))
        stage.tell(endpoints("b", 1))
        await stage.settled()
        assert stage.backend.calls == [("sync", ["b"])]
        assert [(commit.family, commit.full) for commit in stage.notes.commits] == [(V4, False)]

    play(scene)


def test_a_burst_is_one_sync():
    async def scene(stage):
        await started(stage, *[service(f"s{n}", n) for n in range(1, 50)])
        for n in range(1, 50):
            stage.tell(endpoints(f"s{n}", 1))
            stage.tell(endpoints(f"s{n}", 1, 2))
        await stage.settled()
        assert stage.backend.calls == [("sync", [f"s{n}" for n in range(1, 50)])]
        assert len(stage.notes.of("queued")) == 1
        assert len(stage.notes.commits) == 1

    play(scene)


def test_a_family_gets_its_own_plans_only():
    async def scene(stage):
        await started(stage)
        stage.tell(service("four"), service("six", 6, V6))
        await stage.settled()
        assert [set(stage.programmed(b)) for b in stage.backends] == [{"four"}, {"six"}]
        stage.tell(gone("six"))
        await stage.settled()
        assert [set(stage.programmed(b)) for b in stage.backends] == [{"four"}, set()]

    play(scene, families=(V4, V6))


def test_a_service_that_changes_family_after_a_failure_leaves_the_one_it_had():
    async def scene(stage):
        await started(stage, service("a"))
        four, six = stage.backends
        four.failures = [True] * 10_000
        stage.tell(service("b", 2, V6), endpoints("a", 1))
        await stage.until(lambda: stage.notes.of("refused") and "b" in stage.programmed(six))
        stage.tell(service("b", 2, V4))
        four.failures.clear()
        await stage.settled()
        assert [set(stage.programmed(b)) for b in stage.backends] == [{"a", "b"}, set()]

    play(scene, families=(V4, V6))


def test_changes_without_effect_are_not_synced_and_count_as_done():
    async def scene(stage):
        await started(stage, service("a"), endpoints("a", 1, 2))
        stage.tell(endpoints("a", 2, 1, triggered="2026-01-01T00:00:00Z"))
        await stage.settled()
        assert stage.backend.calls == []
        assert len(stage.notes.of("queued")) == len(stage.notes.commits) == 1

    play(scene)


def test_changes_during_a_sync_are_in_the_next_one():
    async def scene(stage):
        await started(stage, service("a"), service("b", 2), service("c", 3))
        late = iter([endpoints("a", 7), endpoints("c", 7)])
        stage.backend.before_step = lambda: stage.tell(*[e for e in [next(late, None)] if e])
        stage.tell(endpoints("a", 1), endpoints("b", 1))
        await stage.settled()
        assert stage.backend.calls == [("sync", ["a", "b"]), ("sync", ["a", "c"])]
        assert all(stage.programmed()[name] == stage.engine.planner.compiled["ns", name].plans for name in "abc")

    play(scene)


def test_at_least_the_minimum_between_two_syncs(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        await _sleep(0.02 if seconds > 1 else seconds)

    async def scene(stage):
        await started(stage, service("a"))
        slept.clear()
        stage.tell(endpoints("a", 1))
        await stage.until(lambda: stage.backend.calls)
        stage.tell(endpoints("a", 2))
        await _sleep(0.005)
        assert len(stage.backend.calls) == 1  # still pausing
        await stage.until(lambda: len(stage.backend.calls) == 2)
        rests = [seconds for seconds in slept if seconds > 1]
        assert rests
        assert all(4 < seconds <= 5 for seconds in rests)

    monkeypatch.setattr(engine_module.asyncio, "sleep", sleep)
    play(scene, pace=Pace(minimum=5.0))


@pytest.mark.parametrize("change", [endpoints("a", 1), gone("a"), cidr("10.96.0.0/16")])
def test_the_loop_goes_on_while_the_kernel_is_waited_for(change):
    """Another program may hold its locks: a commit, the node's addresses, and a backend's read of a new world."""

    async def scene(stage):
        await started(stage, service("a"))
        turns, free = [], threading.Event()

        def wait():
            turns.append(free.wait(30))

        stage.backend.before_step = stage.before_addresses = stage.backend.before_world = wait
        stage.tell(change)
        await _sleep(0.02)
        stage.engine.addresses_changed()
        for _ in range(20):
            await _sleep(0.001)
        free.set()
        await stage.settled()
        assert len(turns) >= 2
        assert all(turns)

    play(scene)


def test_changes_of_many_tables_are_in_several_syncs_and_those_of_others_between_them():
    """Sixteen tables of 4093 slots are accepted at a time: 40 Services with as many each delayed all others by 12 s."""

    async def scene(stage):
        stage.tell(service("there", 1), endpoints("there", 1), *READY)
        stage.tell(Replaced("services", [service("there", 1).object]))
        await stage.settled()
        stage.backend.calls.clear()
        noisy = [f"noisy-{n}" for n in range(40)]
        table = Annotations(algorithm="maglev-4093")
        stage.backend.before_step = lambda: stage.tell(service("plain", 2)) if not stage.backend.calls[1:] else None
        stage.tell(*(service(name, n, annotations=table) for n, name in enumerate(noisy, start=3)))
        await stage.settled()
        synced = [names for _, names in stage.backend.calls]
        assert [len(names) for names in synced] == [16, 17, 8]
        pending = [services for services, _ in stage.notes.counts[1]]
        assert pending[-3:] == [41, 41, 0]  # until the last ones are committed, too
        assert "plain" in synced[1]
        assert sorted(chain.from_iterable(synced)) == sorted([*noisy, "plain"])

    play(scene)


def test_others_wait_for_one_large_service_and_not_for_all(monkeypatch):
    """Each is in a separate transaction. Small changes precede them, and then join the next transaction."""
    monkeypatch.setattr(backlog_module, "LARGE", 3)

    async def scene(stage):
        await started(stage, *(service(name, number) for number, name in enumerate("abcd", 1)))
        stage.backend.calls.clear()
        stage.notes.made.clear()
        large = [endpoints(name, 1, 2, 3, 4) for name in "abc"]
        stage.tell_during_sync(endpoints("d", 2))
        stage.tell(*large, endpoints("d", 1))
        await stage.settled()
        commits = [["d"], ["a", "d"], ["b"], ["c"]]
        assert [sorted(names) for _, names in stage.backend.calls] == commits
        assert [[c.name[1] for c in changes] for (changes,) in stage.notes.of("settled")] == commits
        assert [sorted(c.name[1] for c in commit.changes) for commit in stage.notes.commits] == commits
        assert not stage.engine.queued

    play(scene)


def test_changes_during_the_commit_of_a_large_service_wait_only_for_this_commit(monkeypatch):
    """A Service whose endpoint becomes ready and unready again and again: others waited for two of its commits."""
    monkeypatch.setattr(backlog_module, "LARGE", 3)

    async def scene(stage):
        await started(stage, service("large"), service("a", 2))
        for number in (1, 2):
            stage.backend.calls.clear()
            stage.tell_during_sync(endpoints("a", number), endpoints("large", 1, 2, 3, 4 + number))
            stage.tell(endpoints("large", 1, 2, 3, 9))
            await stage.settled()
            assert [names for _, names in stage.backend.calls] == [["large"], ["a"], ["large"]]

    play(scene)


def test_a_large_service_is_committed_port_by_port_and_others_between_its_ports(monkeypatch):
    """It settles once, after its last port. When it is deleted, its ports are removed one by one as well."""
    monkeypatch.setattr(backlog_module, "LARGE", 3)
    monkeypatch.setattr(backlog_module, "PART_SIZE", 1)
    wide, slices = service("wide", 2), endpoints("wide", 1, 2)
    ports = [ServicePort(port=80 + n, name=f"p{n}") for n in range(3)]
    wide = Upserted("services", replace(wide.object, spec=replace(wide.object.spec, ports=ports)))
    offered = [EndpointPort(port=8080, name=f"p{n}") for n in range(3)]
    slices = Upserted("endpointslices", replace(slices.object, ports=offered))

    async def scene(stage):
        await started(stage, service("a"))
        for events, sizes in (((slices, wide), [1, 2, 3]), ((gone("wide"),), [2, 1, 0])):
            stage.backend.calls.clear()
            stage.notes.made.clear()
            stage.tell_during_sync(endpoints("a", sizes[0]))
            stage.tell(*events)
            await stage.settled()
            assert [names for _, names in stage.backend.calls] == [["wide"], ["a"], ["wide"], ["wide"]]
            assert [[c.name[1] for c in changes] for (changes,) in stage.notes.of("settled")] == [["a"], ["wide"]]
            changes = [change for commit in stage.notes.commits for change in commit.changes]
            assert [len(change.after.plans) for change in changes if change.name[1] == "wide"] == sizes

    play(scene)


def test_large_services_that_wait_do_not_wait_for_the_next_sync_period(monkeypatch):
    monkeypatch.setattr(backlog_module, "LARGE", 3)

    async def scene(stage):
        await started(stage, service("a"), service("b", 2))
        stage.backend.calls.clear()
        stage.engine._pace = Pace(minimum=3600.0)
        stage.tell(endpoints("a", 1, 2, 3, 4), endpoints("b", 1, 2, 3, 4))
        await stage.settled()
        assert [names for _, names in stage.backend.calls] == [["a"], ["b"]]

    play(scene)


def test_large_services_between_which_an_address_changes_hands_go_together(monkeypatch):
    monkeypatch.setattr(backlog_module, "LARGE", 3)

    async def scene(stage):
        await started(stage, service("a"), endpoints("a", 1, 2, 3, 4), endpoints("b", 1, 2, 3, 4))
        stage.backend.calls.clear()
        stage.tell(gone("a"), service("b"))
        await stage.settled()
        assert [names for _, names in stage.backend.calls] == [["a", "b"]]

    play(scene)


def test_the_event_loop_runs_between_the_passes_that_compile_a_large_service(monkeypatch):
    monkeypatch.setattr(planner_module, "SLOW_STEPS", 1)
    monkeypatch.setattr(compile_module, "STEP", 1)
    wide = service("wide", 2)
    ports = [ServicePort(port=80 + n, name=f"p{n}") for n in range(9)]
    wide = Upserted("services", replace(wide.object, spec=replace(wide.object.spec, ports=ports)))

    async def scene(stage):
        await started(stage, service("a"))
        turns, at = [0], []

        async def count():
            while True:
                turns[0] += 1
                await _sleep(0)

        counting = asyncio.create_task(count())
        taking = stage.engine.planner.taking
        monkeypatch.setattr(stage.engine.planner, "taking", lambda: at.append(turns[0]) or taking())
        stage.tell(wide)
        await stage.settled()
        counting.cancel()
        assert len(at) > len(ports)
        assert len(set(at)) == len(at)

    play(scene)
