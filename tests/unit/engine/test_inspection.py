"""The depth of inspections, and decisions about their findings, without a loop or a kernel."""

import pytest

from kubeproxy.backends.mode import Depth, ForeignChange
from kubeproxy.engine.backlog import RepairPolicy, look_after
from kubeproxy.errors import ApplyError

CERTAIN, DOUBTFUL = ForeignChange("rules were changed"), ForeignChange("elements were changed", certain=False)


def test_a_look_is_thorough_once_in_a_period():
    policy = RepairPolicy(30.0, 100.0)
    assert [policy.depth(100.0 + n).name for n in (1, 29, 30, 31, 59, 60)] == [
        *["QUICK", "QUICK", "THOROUGH"],
        *["QUICK", "QUICK", "THOROUGH"],
    ]


def test_a_certain_difference_is_repaired_at_once():
    assert RepairPolicy(30.0, 0.0).to_repair(CERTAIN) == CERTAIN


def test_an_uncertain_difference_is_inspected_thoroughly_and_repaired_the_second_time():
    policy = RepairPolicy(30.0, 0.0)
    assert not policy.to_repair(DOUBTFUL)
    assert policy.depth(1.0) is Depth.THOROUGH
    assert policy.to_repair(DOUBTFUL)
    assert policy.depth(2.0) is Depth.QUICK


@pytest.mark.parametrize("settle", [lambda s: s.to_repair(None), lambda s: s.reset(1.0)], ids=["nothing", "full sync"])
def test_an_uncertain_difference_expires(settle):
    policy = RepairPolicy(30.0, 0.0)
    policy.to_repair(DOUBTFUL)
    settle(policy)
    assert policy.depth(2.0) is Depth.QUICK
    assert not policy.to_repair(DOUBTFUL)


def test_a_full_sync_stands_for_a_thorough_look():
    policy = RepairPolicy(30.0, 0.0)
    policy.reset(29.0)
    assert policy.depth(31.0) is Depth.QUICK
    assert policy.depth(59.0) is Depth.THOROUGH


class Backend:
    """A backend that succeeds or fails in upkeep or inspection."""

    def __init__(self, fails=""):
        self.fails, self.done = fails, []

    def upkeep(self):
        self._do("upkeep")

    def inspect(self, depth):
        self._do(depth)
        return DOUBTFUL

    def _do(self, what):
        self.done.append(what)
        if what == self.fails:
            raise ApplyError("no such table")


def test_upkeep_comes_before_the_look():
    backend = Backend()
    assert look_after(backend, Depth.THOROUGH) == DOUBTFUL
    assert backend.done == ["upkeep", Depth.THOROUGH]


@pytest.mark.parametrize("fails", ["upkeep", Depth.QUICK])
def test_an_unreadable_kernel_counts_as_different(fails):
    assert look_after(Backend(fails), Depth.QUICK) == ForeignChange("the kernel cannot be read: no such table")
