"""Random histories with refusals anywhere: the kernel's final state equals that of a new start, and packets get the
answers of the plans."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kubeproxy.backends.nftables import backend as backend_module
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Loopback
from support import cluster_strategies, nftables_packets, random_plans
from support.cluster_strategies import events, rivalries
from support.effort import examples
from support.nftables_disturbances import DISTURBANCES
from support.nftables_ground import FakeGround, resync, sync, without_slots
from support.nftables_history import History

families = st.sampled_from(list(Family))


def on_loopback(world, loopback):
    """Return the same world with NodePorts on loopback."""
    ipv4, ipv6 = (replace(ours, loopback=loopback) if ours is not None else None for ours in (world.ipv4, world.ipv6))
    return replace(world, ipv4=ipv4, ipv6=ipv6)


in_this_mode = st.sampled_from([care for care in Loopback if care is not Loopback.SERVED])
worlds = st.builds(on_loopback, cluster_strategies.worlds, in_this_mode)
steps = st.one_of(
    events,
    events,
    rivalries,
    worlds,
    st.just("sync"),
    st.just("sync"),
    st.sampled_from(["restart", "inspect"]),
)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Let a sync take several transactions, and remove unused chains."""
    monkeypatch.setattr(backend_module, "BATCH", 5)
    monkeypatch.setattr(backend_module, "PRUNE_FROM", 20)


def is_as_from_a_fresh_start(history):
    """Check that the ground has the state of a ground with the same plans in one sync, except for unused chains."""
    ground, family, world = history.ground, history.family, history.planner.world
    with FakeGround.fresh() as other:
        resync(other.start(world, family), history.plans)
        assert without_slots(ground.contents(family)) == without_slots(other.contents(family))
        chains = ground.chains(family)
        fresh = other.chains(family)
        assert {name: chains.get(name) for name in fresh} == fresh
    plans = (plan for found in history.plans.values() for plan in found)
    nftables_packets.check(ground.kernel, world, family, plans)


@examples(60)
@given(families, worlds, st.lists(steps, max_size=25))
def test_a_history_without_refusals_needs_no_repair(family, world, sequence):
    with FakeGround.fresh() as ground:
        history = History(ground, family, world)
        for step in [*sequence, "sync"]:
            history.go(step)
            assert history.refused is None
        assert ground.difference(history.backend) is None
        is_as_from_a_fresh_start(history)


@examples(100)
@given(random_plans.histories())
def test_packets_have_the_planned_outcome_in_every_state(states):
    world, clusters = states
    (family,) = world.families
    with FakeGround.fresh() as ground:
        backend = ground.start(world)
        resync(backend, {})
        before = {}
        for plans in clusters:
            names = before.keys() | plans.keys()
            sync(backend, *((name, plans.get(name, ())) for name in sorted(names)))
            nftables_packets.check(ground.kernel, world, family, [plan for found in plans.values() for plan in found])
            before = plans
        sync(backend, *((name, ()) for name in before))
        assert {name for name, found in ground.contents(family).items() if found} <= {"nodeport-ips", "transports"}


refusals = st.builds(lambda after, code: ("refuse", after, code), st.integers(0, 12), st.sampled_from([1, 12, 17, 28]))
disturbances = st.builds(lambda case: ("disturb", DISTURBANCES[case]), st.sampled_from(sorted(DISTURBANCES)))
lost_answers = st.builds(lambda after: ("lose", after), st.integers(0, 3))
unread = st.builds(lambda after: ("do not read", after), st.integers(0, 120))


class Trouble:
    """Refusals of messages, lost answers, failing dumps: each once, after a number of successful ones."""

    def __init__(self, ground):
        self.ground = ground
        self.lost = self.unread = -1
        ground.after_commit = self._lose
        ground.before_read = self._fail

    def go(self, step):
        match step:
            case ("refuse", after, code):
                self.ground.kernel.refuse(after, code)
            case ("lose", after):
                self.lost = after
            case ("do not read", after):
                self.unread = after
            case ("disturb", lines):
                try:
                    self.ground.disturb(*lines)
                except ApplyError:
                    return False
        return True

    def end(self):
        self.lost = self.unread = -1
        self.ground.kernel.accept()

    def _lose(self):
        self.lost -= 1
        if self.lost == -1:
            raise NetlinkError(errno.ETIMEDOUT, "no answer from nf_tables")

    def _fail(self):
        self.unread -= 1
        if self.unread == -1:
            raise NetlinkError(errno.EINTR, "cannot read")


@examples(100)
@given(
    families,
    worlds,
    st.lists(st.one_of(steps, steps, steps, refusals, disturbances, lost_answers, unread), max_size=30),
)
def test_the_next_full_sync_repairs_any_refusal_or_disturbance(family, world, sequence):
    with FakeGround.fresh() as ground:
        history, trouble = History(ground, family, world), Trouble(ground)
        for step in sequence:
            if isinstance(step, tuple) and isinstance(step[0], str):
                trouble.go(step)
            else:
                history.go(step)
        trouble.end()
        history.recover()
        assert ground.difference(history.backend) is None
        is_as_from_a_fresh_start(history)
