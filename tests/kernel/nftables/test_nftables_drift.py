"""What is noticed of what others do to the table, and that it is repaired."""

import pytest

from kubeproxy.backends.mode import Depth
from kubeproxy.errors import ApplyError
from kubeproxy.kernel import nft
from support.nftables_table import (
    DISTURBANCES,
    chains,
    cluster,
    contents,
    difference,
    disturb,
    disturbed,
    is_clean,
    is_touched,
    listing,
    plans_of,
    resync,
    sync,
)

RULE_DRIFTS = {
    "flush ruleset": ["flush ruleset"],
    "delete table": ["delete table ip kube-proxy"],
    "flush table": ["flush table ip kube-proxy"],
    "flush chain": ["flush chain ip kube-proxy services"],
    "add rule": ["add rule ip kube-proxy filter-forward drop"],
    "insert rule": ["insert rule ip kube-proxy nat-prerouting accept"],
    "table made again": ["delete table ip kube-proxy", "add table ip kube-proxy"],
    "table switched off": ["add table ip kube-proxy { flags dormant ; }"],
}


@pytest.mark.parametrize("case", RULE_DRIFTS)
def test_changed_rules_are_noticed_and_repaired(start, case):
    backend, plans = disturbed(start)
    before, rules = contents(), chains()
    disturb(*RULE_DRIFTS[case])
    assert "chains or rules" in backend.inspect(Depth.QUICK).what
    resync(backend, plans)
    assert (contents(), chains()) == (before, rules)
    assert "dormant" not in listing()
    is_clean(backend, plans)


@pytest.mark.parametrize("case", DISTURBANCES)
def test_changed_elements_are_noticed_and_repaired(start, case):
    backend, plans = disturbed(start)
    before = contents()
    disturb(*DISTURBANCES[case])
    assert backend.inspect(Depth.QUICK) is None
    for _ in range(2):  # until it is repaired
        found = backend.inspect(Depth.THOROUGH)
        assert "elements of" in found.what
        assert not found.certain
    resync(backend, plans)
    assert contents() == before
    is_clean(backend, plans)


def test_what_others_do_to_their_own_tables_is_no_drift(start):
    backend, plans = disturbed(start)
    disturb("add table ip mine", "add chain ip mine c", "add rule ip mine c drop")
    assert is_touched(backend)
    assert backend.inspect(Depth.QUICK) is None
    assert is_touched(backend)
    assert backend.inspect(Depth.THOROUGH) is None
    assert not is_touched(backend)
    is_clean(backend, plans)


def test_our_own_transactions_are_no_drift(start):
    backend, plans = disturbed(start)
    changes = [
        plans_of("a", 1, 5),
        plans_of("a", 1, 25),
        plans_of("a", 1, 4, session_affinity="ClientIP"),
        plans_of("a", 1, 2, session_affinity="ClientIP"),
        (),
    ]
    for change in changes:
        sync(backend, (("default", "a"), change))
        assert not is_touched(backend)
        assert difference(backend) is None
    del plans["default", "a"]
    is_clean(backend, plans)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flush set ip kube-proxy cluster-services", "elements of cluster-services"),
        ("add rule ip kube-proxy filter-forward drop", "chains or rules"),
    ],
)
def test_what_others_do_during_a_resync_is_noticed_after_it(start, line, found):
    backend, plans = disturbed(start)
    steps = backend.resync(plans)
    next(steps)
    disturb(line)
    for _ in steps:
        pass
    assert found in backend.inspect(Depth.THOROUGH).what
    resync(backend, plans)
    is_clean(backend, plans)


@pytest.fixture
def meddle(monkeypatch):
    """Return a function that has another program commit right after the next text that we load."""
    run = nft.run

    def meddle(*lines):
        def run_and_disturb(text):
            run(text)
            monkeypatch.setattr(nft, "run", run)
            disturb(*lines)

        monkeypatch.setattr(nft, "run", run_and_disturb)

    return meddle


@pytest.mark.parametrize("how", ["load", "replace"])
def test_rules_of_others_are_not_taken_for_ours_when_the_table_is_made(start, meddle, how):
    plans = cluster("a")
    if how == "replace":
        disturb("add table ip kube-proxy")
    backend = start()
    meddle("insert rule ip kube-proxy nat-prerouting accept")
    with pytest.raises(ApplyError, match="another program"):
        resync(backend, plans)
    resync(backend, plans)
    is_clean(backend, plans)


def test_what_others_do_to_their_own_tables_is_no_drift_when_ours_is_made(start, meddle):
    backend = start()
    meddle("add table ip mine")
    resync(backend, cluster("a"))
    assert backend.inspect(Depth.THOROUGH) is None
    assert not is_touched(backend)


def test_rules_of_others_are_not_taken_for_ours_right_after_chains_are_made(start, meddle):
    backend, plans = disturbed(start)
    plans["default", "a"] = plans_of("a", 1, 9, session_affinity="ClientIP")
    meddle("insert rule ip kube-proxy nat-prerouting accept")
    with pytest.raises(ApplyError, match="another program"):
        sync(backend, (("default", "a"), plans["default", "a"]))
    resync(backend, plans)
    is_clean(backend, plans)


def test_rules_of_others_are_not_taken_for_ours_when_chains_are_made(start):
    backend, plans = disturbed(start)
    disturb("insert rule ip kube-proxy nat-prerouting accept")
    plans["default", "a"] = plans_of("a", 1, 9, session_affinity="ClientIP")
    with pytest.raises(ApplyError, match="chains or rules"):
        sync(backend, (("default", "a"), plans["default", "a"]))
    resync(backend, plans)
    is_clean(backend, plans)
