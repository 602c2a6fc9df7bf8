"""A proxy that starts over its own rules, on the real kernel: it writes missing rules, and no existing ones."""

from __future__ import annotations

import pytest
from test_iptables_audit import HARM

from kubeproxy.backends.iptables.backend import IptablesBackend
from kubeproxy.backends.mode import Depth
from support.fake_tables import Told
from support.iptables_kernel import check, opened, plans, state
from support.namespaces import run


@pytest.fixture
def restores(monkeypatch) -> list[int]:
    """The number of commits of each restore."""
    found: list[int] = []
    run = IptablesBackend._run

    def noted(self, piece, **how):
        found.append(piece.commits)
        return run(self, piece, **how)

    monkeypatch.setattr(IptablesBackend, "_run", noted)
    return found


def test_rules_that_are_there_stay_with_their_counters_and_are_watched(variant, restores):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    made.close()
    target = ["-m", "comment", "--comment", "kubernetes postrouting rules", "-j", "KUBE-POSTROUTING"]
    run(f"iptables-{variant}", "-t", "nat", "-R", "POSTROUTING", "1", *target, "-c", "7", "4242")
    before = run(f"iptables-{variant}-save", "-c")
    restores.clear()
    told = Told()
    again = opened(variant, told=told)
    list(again.resync(wanted))
    assert restores == []
    assert told.counted["nat"][1] == 0 < told.counted["nat"][0]
    kept = [line for line in run(f"iptables-{variant}-save", "-c").splitlines() if not line.startswith("#")]
    assert kept == [line for line in before.splitlines() if not line.startswith("#")]
    assert any(line.startswith("[7:4242] ") for line in kept)
    again._audit.suspect(rest=0.0)
    assert again.inspect(Depth.QUICK) is None
    assert not again.touched()
    run(f"iptables-{variant}", "-t", "nat", "-F", "KUBE-MARK-MASQ")
    assert again.touched()
    list(again.sync([(("default", "c"), plans("c", 3, "10.244.0.5"))]))
    again.close()


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_foreign_changes_between_inspections_are_repaired(variant, harm, restores):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    made.close()
    run(f"iptables-{variant}", "-t", "nat", *harm)
    restores.clear()
    again = opened(variant)
    list(again.resync(wanted))
    assert len(restores) == 1
    check(variant, wanted)
    again.close()


def test_changes_between_readings_are_written(variant):
    made, wanted = opened(variant), state()
    list(made.resync(wanted))
    made.close()
    later = wanted | {("default", "a"): plans("a", 1, "10.244.0.9"), ("default", "d"): plans("d", 4, "10.244.0.6")}
    del later["default", "b"]
    again = opened(variant)
    list(again.resync(later))
    check(variant, later)
    list(again.resync(later))
    assert again.inspect(Depth.QUICK) is None
    again.close()
