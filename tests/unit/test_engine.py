"""The sync loop, with backends and an observer that only take notes: when it syncs, what of, what after a failure."""

import asyncio
import contextlib
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubeproxy import engine as engine_module
from kubeproxy.engine import Engine, Pace
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.model import planner as planner_module
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Rejected, Replaced, Upserted
from kubeproxy.model.objects import (
    Annotations,
    EndpointPort,
    EndpointSlice,
    Labels,
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Service,
    ServiceCIDR,
    ServiceCIDRSpec,
    ServicePort,
    ServiceSpec,
    SliceEndpoint,
)
from kubeproxy.model.world import Settings

V4, V6 = Family.IPV4, Family.IPV6
NODE = "node-a"
PATIENCE = 30.0
_sleep = asyncio.sleep


# -- objects -------------------------------------------------------------------------------------------------------


def service(name, number=1, family=V4, **spec):
    address = f"10.96.0.{number}" if family is V4 else f"fd00::{number}"
    spec = ServiceSpec(cluster_ip=address, cluster_ips=[address], ports=[ServicePort(port=80)], **spec)
    return Upserted("services", Service(ObjectMeta(name=name, namespace="ns", uid=f"uid-{name}"), spec))


def endpoints(name, *numbers, triggered=None):
    meta = ObjectMeta(name=name, namespace="ns", labels=Labels(service_name=name), annotations=Annotations(triggered))
    found = [SliceEndpoint([f"10.244.0.{n}"]) for n in numbers]
    return Upserted("endpointslices", EndpointSlice(meta, "IPv4", found, [EndpointPort(port=8080)]))


def gone(name):
    return Deleted("services", "ns", name)


def node(address="192.0.2.1", name=NODE, pod_cidrs=None):
    status = NodeStatus([NodeAddress("InternalIP", address)])
    return Upserted("nodes", Node(ObjectMeta(name=name), NodeSpec(pod_cidrs=pod_cidrs), status))


def cidr(text):
    return Upserted("servicecidrs", ServiceCIDR(ObjectMeta(name="kubernetes"), ServiceCIDRSpec([text])))


LISTS = (Replaced("services", []), Replaced("endpointslices", []))
READY = (*LISTS, node())


# -- who takes notes -----------------------------------------------------------------------------------------------


class FakeBackend:
    """Keeps what it was told, as a kernel would; refuses when told to."""

    blocking = False

    def __init__(self, family):
        self.family = family
        self.state = {}
        self.calls = []
        self.worlds = []
        self.failures = []  # True: refuse the next transaction
        self.resync_on_world = False
        self.is_touched = False
        self.found = self.found_elements = ""
        self.before_step = lambda: None

    def set_world(self, world):
        self.worlds.append(world)
        return self.resync_on_world

    def sync(self, changes):
        self.calls.append(("sync", [name[1] for name, _ in changes]))
        for name, plans in changes:
            yield self._write(name, plans)
        yield 0

    def resync(self, wanted):
        self.calls.append(("resync", [name[1] for name in wanted]))
        for name in set(self.state) - set(wanted):
            del self.state[name]
        for name, plans in wanted.items():
            yield self._write(name, plans)
        self.is_touched, self.found, self.found_elements = False, "", ""
        yield 0

    def _write(self, name, plans):
        self.before_step()
        if self.failures and self.failures.pop(0):
            raise ApplyError("the kernel is in a bad mood")
        if plans:
            self.state[name] = plans
        else:
            self.state.pop(name, None)
        return 1

    def touched(self):
        return self._answer(self.is_touched)

    def drift(self):
        return self._answer(self.found)

    def element_drift(self):
        return self._answer(self.found_elements)

    @staticmethod
    def _answer(value):
        if isinstance(value, Exception):
            raise value
        return value

    def close(self):
        pass


class Notes:
    """An observer: what it is called with, by the method's name."""

    def __init__(self):
        self.made = []

    def __getattr__(self, method):
        def note(*arguments, **more):
            self.made.append((method, (*arguments, *more.values())))

        return note

    def of(self, method):
        return [arguments for name, arguments in self.made if name == method]


class Stage:
    """An engine with its surroundings, running."""

    def __init__(self, *, families=(V4,), patience=PATIENCE, pace=None, **options):
        self.backends = [FakeBackend(family) for family in families]
        self.notes = Notes()
        self.addresses = {V4: [], V6: []}
        self.engine = Engine(
            Settings(node_name=NODE, families=families, **options),
            self.backends,
            self.notes,
            pace or Pace(),
            self._local_addresses,
            patience,
        )
        self.task = None

    def _local_addresses(self):
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return self.addresses

    @property
    def backend(self):
        return self.backends[0]

    def tell(self, *events):
        self.engine.sink(events)

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                assert not self.task.done(), self.task
                await _sleep(0.001)

    async def settled(self):
        """Wait until everything said so far is in the backends, and the loop has nothing to do."""
        await self.until(lambda: self.engine.ready.is_set() and not self.engine.planner.dirty and self.idle())
        await _sleep(0.005)
        await self.until(self.idle)

    def idle(self):
        engine = self.engine
        return not (engine._inbox or engine._unapplied or engine._stale or engine._wake.is_set())

    def programmed(self, backend=None):
        return {name[1]: plans for name, plans in (backend or self.backend).state.items()}


def play(scene, **options):
    """Run a scene with an engine running beside it."""

    async def run():
        stage = Stage(**options)
        stage.task = asyncio.create_task(stage.engine.run())
        try:
            await scene(stage)
        finally:
            stage.task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Unsupported, AttributeError):
                await stage.task
            await _sleep(0)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(engine_module, "FIRST_RETRY", 0.001)
    monkeypatch.setattr(engine_module, "SLOWEST_RETRY", 0.004)
    monkeypatch.setattr(engine_module, "DRIFT_CHECK", 0.002)


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
        assert stage.notes.of("synced")[0][2] is True

    play(scene, families=(V4, V6))


def test_without_a_node_it_goes_on_after_a_while():
    async def scene(stage):
        stage.tell(*LISTS)
        await stage.settled()
        assert stage.backend.calls == [("resync", [])]
        assert len(stage.backend.worlds) == 1  # however bare the world is, the backends must be told
        stage.tell(node())
        await stage.until(lambda: len(stage.backend.worlds) == 2)
        assert stage.backend.worlds[-1].ipv4.node_ips == (bytes([192, 0, 2, 1]),)

    play(scene, patience=0.03)


def test_a_late_first_list_does_not_wait_for_the_node_again():
    async def scene(stage):
        await _sleep(0.01)
        stage.tell(*LISTS)
        await stage.settled()

    play(scene, patience=0.005)


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


# -- what ----------------------------------------------------------------------------------------------------------


async def started(stage, *events):
    stage.tell(*READY, *events)
    await stage.settled()
    for backend in stage.backends:
        backend.calls.clear()
    stage.notes.made.clear()


def test_only_what_changed_is_synced():
    async def scene(stage):
        await started(stage, service("a"), service("b", 2))
        stage.tell(endpoints("b", 1))
        await stage.settled()
        assert stage.backend.calls == [("sync", ["b"])]
        assert [(f, full) for f, _, full in stage.notes.of("synced")] == [(V4, False)]

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
        assert len(stage.notes.of("synced")) == 1

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
        await stage.until(lambda: stage.notes.of("failed") and "b" in stage.programmed(six))
        stage.tell(service("b", 2, V4))
        four.failures.clear()
        await stage.settled()
        assert [set(stage.programmed(b)) for b in stage.backends] == [{"a", "b"}, set()]

    play(scene, families=(V4, V6))


def test_what_has_no_meaning_is_not_synced_and_counts_as_done():
    async def scene(stage):
        await started(stage, service("a"), endpoints("a", 1, 2))
        stage.tell(endpoints("a", 2, 1))
        await stage.settled()
        assert stage.backend.calls == []
        assert len(stage.notes.of("queued")) == len(stage.notes.of("synced")) == 1

    play(scene)


def test_what_comes_during_a_sync_is_in_the_next_one():
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
        assert len(stage.backend.calls) == 1  # still resting
        await stage.until(lambda: len(stage.backend.calls) == 2)
        rests = [seconds for seconds in slept if seconds > 1]
        assert rests
        assert all(4 < seconds <= 5 for seconds in rests)

    monkeypatch.setattr(engine_module.asyncio, "sleep", sleep)
    play(scene, pace=Pace(minimum=5.0))


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_failed_sync_is_tried_again_as_a_resync():
    async def scene(stage):
        await started(stage, service("a"), service("b", 2))
        stage.backend.failures = [True]
        stage.tell(endpoints("b", 1))
        await stage.settled()
        assert stage.backend.calls == [("sync", ["b"]), ("resync", ["b", "a"])]
        assert stage.programmed()["b"][0].cluster
        assert [str(error) for _, error in stage.notes.of("failed")] == ["the kernel is in a bad mood"]
        stage.tell(endpoints("a", 1))
        await stage.settled()
        assert stage.backend.calls[2:] == [("sync", ["a"])]

    play(scene)


def test_a_failed_first_sync_is_tried_again_and_not_ready_until_it_is_done():
    async def scene(stage):
        stage.backend.failures = [True] * 10_000
        stage.tell(service("a"), *READY[2:], Replaced("endpointslices", []))
        stage.tell(Replaced("services", [service("a").object]))
        await stage.until(lambda: len(stage.notes.of("failed")) >= 2)
        assert not stage.engine.ready.is_set()
        stage.backend.failures.clear()
        await stage.settled()
        assert {kind for kind, _ in stage.backend.calls} == {"resync"}
        assert set(stage.programmed()) == {"a"}

    play(scene)


def test_retries_come_later_and_later_and_start_anew_after_a_success(monkeypatch):
    slept = []

    async def sleep(seconds):
        if seconds == engine_module.DRIFT_CHECK:
            await _sleep(3600)
        slept.append(seconds)
        await _sleep(0)

    async def scene(stage):
        await started(stage, service("a"))
        for _ in range(2):
            slept.clear()
            stage.backend.failures = [True] * 6
            stage.tell(endpoints("a", len(stage.backend.calls) + 1))
            await stage.until(lambda: not stage.backend.failures)
            await stage.settled()
            delays = [seconds for seconds in slept if seconds]
            assert delays[:6] == [0.001, 0.002, 0.004, 0.004, 0.004, 0.004]

    monkeypatch.setattr(engine_module.asyncio, "sleep", sleep)
    monkeypatch.setattr(engine_module.random, "uniform", lambda *_: 1.0)
    monkeypatch.setattr(engine_module, "DRIFT_CHECK", 77.0)
    play(scene)


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
        assert {family for family, _ in stage.notes.of("failed")} == {V6}

    play(scene, families=(V4, V6))


def test_changes_are_reported_once_and_only_when_every_family_has_them():
    async def scene(stage):
        await started(stage, service("a"))
        stage.backends[1].failures = [True] * 10_000
        stage.tell(service("six", 6, V6), endpoints("a", 1, triggered="2026-01-01T00:00:00Z"))
        await stage.until(lambda: stage.notes.of("failed"))
        assert stage.notes.of("applied") == []
        assert stage.notes.of("counted") == []
        stage.tell(endpoints("a", 1, 2, triggered="2026-01-01T00:00:09Z"))
        stage.backends[1].failures.clear()
        await stage.settled()
        changes = [change for changes, _ in stage.notes.of("applied") for change in changes]
        assert {change.name[1] for change in changes} == {"a", "six"}
        ours = [change for change in changes if change.name[1] == "a"]  # one, or two when it was told between steps
        assert ours[0].before.plans[0].cluster == ()
        assert all(one.after == two.before for one, two in itertools.pairwise(ours))
        assert len(ours[-1].after.plans[0].cluster) == 2
        assert sum(services for services, _ in stage.notes.of("counted")) == 1
        assert sum(slices for _, slices in stage.notes.of("counted")) == 2
        assert len(stage.notes.of("programmed")) == 2

    play(scene, families=(V4, V6))


names = st.sampled_from(["a", "b", "c"])
moves = st.one_of(
    st.builds(service, names, st.integers(1, 3)),
    st.builds(lambda name, number: service(name, number, V6), names, st.integers(1, 3)),
    st.builds(lambda name, numbers: endpoints(name, *numbers), names, st.lists(st.integers(1, 5), unique=True)),
    st.builds(gone, names),
    st.sampled_from(["rest", "refuse 4", "refuse 6", "force"]),
)


@settings(max_examples=60, deadline=None)
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


# -- bit by bit ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bit_by_bit(monkeypatch):
    """The loop runs after every object."""
    monkeypatch.setattr(engine_module, "HOLD", -1.0)
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
def test_what_comes_after_a_list_waits_for_its_turn():
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
def test_what_changes_during_a_sync_is_written_by_the_next():
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


# -- what others do ------------------------------------------------------------------------------------------------


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


# -- the node ------------------------------------------------------------------------------------------------------


def test_a_changed_node_reaches_the_backends_by_a_sync():
    async def scene(stage):
        await started(stage, service("a"))
        for backend in stage.backends:
            backend.worlds.clear()
        stage.tell(node("192.0.2.9"))
        await stage.until(lambda: all(backend.calls for backend in stage.backends))
        assert [backend.calls for backend in stage.backends] == [[("sync", [])]] * 2
        assert [world.ipv4.node_ips for backend in stage.backends for world in backend.worlds] == [
            (bytes([192, 0, 2, 9]),)
        ] * 2
        assert len(stage.notes.of("world")) == 1

    play(scene, families=(V4, V6))


def test_a_backend_that_asks_for_it_is_synced_as_a_whole():
    async def scene(stage):
        await started(stage, service("a"))
        stage.backends[0].resync_on_world = True
        stage.tell(cidr("10.96.0.0/16"))
        await stage.until(lambda: all(backend.calls for backend in stage.backends))
        assert [backend.calls for backend in stage.backends] == [[("resync", ["a"])], [("sync", [])]]
        assert stage.backends[0].worlds[-1].ipv4.service_cidrs

    play(scene, families=(V4, V6))


@pytest.mark.parametrize(
    "event", [node(), node(name="another"), Replaced("servicecidrs", []), Deleted("nodes", "", "x")]
)
def test_a_node_that_says_the_same_is_no_work(event):
    async def scene(stage):
        await started(stage)
        stage.backend.worlds.clear()
        stage.tell(event)
        await _sleep(0.01)
        assert stage.backend.calls == stage.backend.worlds == []
        assert stage.notes.of("world") == []

    play(scene)


def test_changed_local_addresses_are_looked_at():
    async def scene(stage):
        await started(stage)
        stage.addresses = {V4: [bytes([192, 0, 2, 5])]}
        stage.engine.addresses_changed()
        await stage.until(lambda: stage.backend.calls)
        assert stage.backend.worlds[-1].ipv4.nodeport_ips == (bytes([192, 0, 2, 5]),)

    play(scene, nodeport_addresses=("192.0.2.0/24",))


def test_local_addresses_that_cannot_be_read_are_read_again():
    async def scene(stage):
        await started(stage, service("a"))
        stage.addresses = ApplyError("addresses changed while being read")
        stage.engine.addresses_changed()
        stage.tell(endpoints("a", 1))
        await _sleep(0.01)
        stage.addresses = {V4: [bytes([192, 0, 2, 5])]}
        await stage.until(lambda: stage.backend.worlds[-1].ipv4.nodeport_ips == (bytes([192, 0, 2, 5]),))
        await stage.settled()
        assert stage.programmed()["a"][0].cluster

    play(scene, nodeport_addresses=("192.0.2.0/24",))


# -- what is reported ----------------------------------------------------------------------------------------------


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
        reported = [(name, uid, problem.field, problem.reason) for name, uid, problem in stage.notes.of("problem")]
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
        assert len(stage.notes.of("problem")) == 1

    play(scene)


def test_rejected_objects_are_reported_and_wake_nobody():
    async def scene(stage):
        await started(stage)
        rejected = Rejected("services", "ns", "a", "uid", "spec", "is no object")
        stage.tell(rejected)
        assert stage.notes.of("rejected") == [(rejected,)]
        await _sleep(0.005)
        assert stage.backend.calls == []

    play(scene)


def test_pending_changes_are_counted_until_they_are_in_the_kernel():
    async def scene(stage):
        await started(stage)
        stage.tell(service("a"), endpoints("a", 1))
        stage.tell(endpoints("a", 2))
        assert stage.notes.of("pending") == [(1, 1), (1, 2)]
        await stage.settled()
        assert stage.notes.of("counted") == [(1, 2)]
        stage.tell(service("b", 2))
        assert stage.notes.of("pending")[-1] == (1, 0)

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
def test_how_long_it_took_is_reported_where_it_is_known(triggered, known):
    async def scene(stage):
        await started(stage, service("a"))
        stage.tell(endpoints("a", 1, triggered=triggered))
        await stage.settled()
        found = stage.notes.of("programmed")
        assert [family for family, _ in found] == ([V4] if known else [])
        assert all(seconds > 0 for _, seconds in found)

    play(scene)


def test_queued_is_said_once_until_it_is_synced():
    async def scene(stage):
        await started(stage, service("a"))
        for n in range(1, 4):
            stage.tell(endpoints("a", n))
        assert stage.notes.of("queued") == [([V4],)]
        await stage.settled()
        stage.tell(endpoints("a", 9))
        assert len(stage.notes.of("queued")) == 2

    play(scene)
