"""Changes of the table by other programs are noticed and repaired."""

from contextlib import closing

import pytest

from kubeproxy.backends.mode import Depth
from kubeproxy.backends.nftables.layout import CLIENTS
from kubeproxy.errors import ApplyError, ChangedByOthersError
from kubeproxy.model.objects import Annotations, ServicePort
from support.cluster_objects import world
from support.nftables_disturbances import DISTURBANCES, disturbed
from support.nftables_ground import resync, sync, without_slots
from support.nftables_plans import V4, V6, cluster, plans_of, sticky

RULE_DRIFTS = {
    "flush ruleset": ["flush ruleset"],
    "delete table": ["delete table ip kube-proxy"],
    "flush table": ["flush table ip kube-proxy"],
    "flush chain": ["flush chain ip kube-proxy services"],
    "add rule": ["add rule ip kube-proxy filter-forward drop"],
    "insert rule": ["insert rule ip kube-proxy nat-prerouting accept"],
    "table made again": ["delete table ip kube-proxy", "add table ip kube-proxy"],
    "table switched off": ["add table ip kube-proxy { flags dormant ; }"],
    "policy": ["add chain ip kube-proxy filter-forward { policy drop ; }"],
    "stray base chain": ["add chain ip kube-proxy stray { type filter hook forward priority -5 ; policy drop ; }"],
    "stray chain": ["add chain ip kube-proxy stray"],
    "another priority": [
        "flush chain ip kube-proxy nat-postrouting",
        "delete chain ip kube-proxy nat-postrouting",
        "add chain ip kube-proxy nat-postrouting { type nat hook postrouting priority 300 ; }",
        "add rule ip kube-proxy nat-postrouting jump masquerading",
    ],
    "another set within a rule": [
        "flush chain ip kube-proxy put-port-back",
        "add rule ip kube-proxy put-port-back meta l4proto { tcp, sctp } th dport set ct original proto-dst",
    ],
    "another verdict within a rule": [
        "flush chain ip kube-proxy local-pick",
        "add rule ip kube-proxy local-pick th dport vmap { 1 : goto local-pick-1 }",
    ],
}


TABLE_GOES = ("flush ruleset", "delete table", "table made again")


@pytest.mark.parametrize("case", RULE_DRIFTS)
def test_changed_rules_are_noticed_and_repaired(ground, case):
    backend, plans = disturbed(ground)
    before, rules = ground.contents(), ground.chains()
    ground.disturb(*RULE_DRIFTS[case])
    assert "chains or rules" in backend.inspect(Depth.QUICK).what
    resync(backend, plans)
    assert (ground.contents(), ground.chains()) == (before, rules)
    assert not ground.header().dormant
    ground.is_clean(backend, plans)


IN_PLACE = [case for case in RULE_DRIFTS if case not in {*TABLE_GOES, "table switched off"}]


@pytest.mark.parametrize("case", IN_PLACE)
def test_rules_are_repaired_where_they_are_and_clients_stay(ground, case):
    plans = {("default", "a"): sticky("a", 1, 3)}
    backend = ground.start()
    resync(backend, plans)
    ground.disturb(f"add element ip kube-proxy {CLIENTS} {{ 7 . 0.0.0.2 timeout 30s expires 20s : 192.0.0.1 }}")
    resync(backend, plans)
    table, clients, others = ground.header(), ground.packed(CLIENTS), len(ground.rule_handles())
    handles = set(ground.rule_handles())
    ground.disturb(*RULE_DRIFTS[case])
    resync(backend, plans)
    assert ground.header() == table
    assert [element.key for element in ground.packed(CLIENTS)] == [element.key for element in clients] != []
    kept = handles & set(ground.rule_handles())
    assert len(ground.rule_handles()) == others
    assert case == "flush table" or len(kept) > others - 10  # only differing chains were written
    ground.is_clean(backend, plans)


def test_another_declaration_of_a_set_is_noticed_and_repaired(ground):
    """The rules are as before, but the set's new elements would disappear."""
    backend, plans = disturbed(ground)
    before, rules = ground.contents(), ground.chains()
    ground.disturb(
        "flush chain ip kube-proxy nodeport-endpoints-check",
        "delete set ip kube-proxy no-local-endpoint-nodeports",
        "add set ip kube-proxy no-local-endpoint-nodeports"
        " { typeof meta l4proto . th dport ; flags timeout ; timeout 9s ; }",
        "add rule ip kube-proxy nodeport-endpoints-check"
        " ip daddr @nodeport-ips meta l4proto . th dport @no-local-endpoint-nodeports drop",
        "add rule ip kube-proxy nodeport-endpoints-check"
        " ip daddr @nodeport-ips meta l4proto . th dport @unserved-nodeports goto refuse",
    )
    assert (ground.contents(), ground.chains()) == (before, rules)
    assert backend.inspect(Depth.QUICK) is not None
    resync(backend, plans)
    with closing(ground.table(V4)) as table:
        assert table.sets()["no-local-endpoint-nodeports"].timeout == 0
    ground.is_clean(backend, plans)


def test_a_chain_that_an_element_leads_to_goes_with_the_table(ground):
    """The kernel refuses to remove such a chain, so the table is replaced."""
    backend, plans = disturbed(ground)
    before, table = ground.contents(), ground.header()
    ground.disturb(
        "add chain ip kube-proxy mine",
        "add element ip kube-proxy nodeport-session-chains { tcp . 1 : goto mine }",
    )
    resync(backend, plans)
    assert ground.contents() == before
    assert ground.header() != table
    ground.is_clean(backend, plans)


@pytest.mark.parametrize("case", [case for case in RULE_DRIFTS if case not in TABLE_GOES])
def test_a_restart_repairs_rules(ground, case):
    _, plans = disturbed(ground)
    before, rules = ground.contents(), ground.chains()
    ground.disturb(*RULE_DRIFTS[case])
    again = ground.start()
    resync(again, plans)
    assert (ground.contents(), ground.chains()) == (before, rules)
    ground.is_clean(again, plans)


UNUSED = {
    "map": ["delete map ip kube-proxy nodeport-session-pools"],
    "set": ["delete set ip kube-proxy sticky-nodeports"],
    "map of another type": [
        "delete map ip kube-proxy nodeport-session-pools",
        "add map ip kube-proxy nodeport-session-pools { type ipv4_addr : ipv4_addr ; }",
    ],
}


@pytest.mark.parametrize(
    ("case", "when"),
    [
        (case, when)
        for case in UNUSED
        for when in ("repair", "restart", "change")
        if "type" not in case or when != "repair"
    ],
)
def test_a_set_that_no_rule_refers_to_may_be_deleted_and_comes_back(ground, case, when):
    backend, plans = disturbed(ground)
    before = ground.contents()
    ground.disturb(*UNUSED[case])
    if when == "change":
        plans["default", "d"] = sticky("d", 4, 2, ports=[ServicePort(port=80, node_port=30005)])
        with pytest.raises(ApplyError):
            sync(backend, (("default", "d"), plans["default", "d"]))
    elif when == "repair":
        assert "nodeport" in backend.inspect(Depth.QUICK).what
    else:
        backend = ground.start()
    resync(backend, plans)
    assert ground.contents().keys() == before.keys()
    ground.is_clean(backend, plans)
    resync(ground.start(), plans)


def test_a_set_of_clients_of_an_earlier_version_is_removed(ground):
    backend, plans = disturbed(ground)
    before = ground.contents()
    ground.disturb("add set ip kube-proxy clients-6 { type ipv4_addr ; }")
    resync(backend, plans)
    assert ground.contents() == before
    ground.is_clean(backend, plans)


def test_a_change_during_a_repair_is_found_by_the_next_inspection(ground):
    backend, plans = disturbed(ground)
    before = ground.contents()
    ground.disturb("flush map ip kube-proxy cluster-services")
    assert backend.inspect(Depth.QUICK) is not None
    further = ["flush set ip kube-proxy cluster-ips"]  # in the middle of the repair, which receives no announcements
    ground.after_commit = lambda: further and ground.disturb_unheard(further.pop())
    resync(backend, plans)
    assert "elements of cluster-ips" in backend.inspect(Depth.QUICK).what
    resync(backend, plans)
    assert ground.contents() == before
    ground.is_clean(backend, plans)
    assert not ground.is_touched(backend)


@pytest.mark.parametrize("case", DISTURBANCES)
def test_changed_elements_are_noticed_and_repaired(ground, case):
    backend, plans = disturbed(ground)
    before = ground.contents()
    ground.disturb(*DISTURBANCES[case])
    found = backend.inspect(Depth.QUICK)
    assert "elements of" in found.what
    assert found.what.endswith("another program: nft")
    assert found.certain
    resync(backend, plans)
    # The number of an endpoint with affinity is not reused.
    comparable = without_slots if case == "changed endpoint with affinity" else dict
    assert comparable(ground.contents()) == comparable(before)
    ground.is_clean(backend, plans)


def test_changed_elements_are_found_by_reading_after_a_missed_announcement(ground):
    backend, plans = disturbed(ground)
    before = ground.contents()
    backend.inspect(Depth.QUICK)
    ground.disturb_unheard("flush map ip kube-proxy cluster-services")
    assert backend.inspect(Depth.QUICK) is None
    for _ in range(2):  # until the repair
        found = backend.inspect(Depth.THOROUGH)
        assert "elements of cluster-services" in found.what
        assert not found.certain
        assert backend.inspect(Depth.QUICK) is None
    resync(backend, plans)
    assert ground.contents() == before
    ground.is_clean(backend, plans)


def test_a_table_is_disturbed_from_a_change_until_the_repair(ground):
    backend, plans = disturbed(ground)
    is_disturbed = backend.abilities.disturbed
    assert not is_disturbed()
    ground.disturb(*DISTURBANCES["missing endpoint"])
    assert is_disturbed()
    assert backend.inspect(Depth.QUICK) is not None
    assert is_disturbed()
    resync(backend, plans)
    assert not is_disturbed()


def test_a_table_is_disturbed_while_it_is_compared(ground):
    backend, _ = disturbed(ground)
    seen = []
    ground.disturb(*DISTURBANCES["missing endpoint"])
    ground.before_read = lambda: seen.append(ground.calls[-1] == "disturbed" or backend.abilities.disturbed())
    backend.inspect(Depth.QUICK)
    assert len(seen) > 1
    assert all(seen)


def test_a_table_is_no_longer_disturbed_when_an_inspection_finds_it_right(ground):
    backend, _ = disturbed(ground)
    ground.disturb("add element ip kube-proxy cluster-ips { 10.96.0.99 }")
    ground.disturb("delete element ip kube-proxy cluster-ips { 10.96.0.99 }")
    assert backend.abilities.disturbed()
    assert backend.inspect(Depth.QUICK) is None
    assert not backend.abilities.disturbed()


def test_changes_of_other_tables_and_our_own_disturb_nothing(ground):
    backend, _ = disturbed(ground)
    ground.disturb("add table ip theirs", "add chain ip theirs c")
    sync(backend, (("default", "new"), plans_of("new", 77)))
    assert not backend.abilities.disturbed()


def test_changes_of_other_programs_tables_are_no_drift(ground):
    backend, plans = disturbed(ground)
    ground.disturb("add table ip mine", "add chain ip mine c", "add rule ip mine c drop")
    ground.disturb("add set ip mine kube-proxy { type ipv4_addr ; elements = { 10.0.0.1 } ; }")
    assert not ground.is_touched(backend)
    assert backend.inspect(Depth.THOROUGH) is None
    assert ground.calls == ["changes", "changes"]
    ground.is_clean(backend, plans)


def test_commits_of_the_other_family_are_no_drift(ground):
    backend, plans = disturbed(ground)
    six = world(families=[V6])
    other = ground.start(six)
    resync(other, {})
    assert backend.inspect(Depth.THOROUGH) is None  # announcements during the pause are lost
    ground.calls.clear()
    sync(other, (("default", "six"), plans_of("six", 1, 3, six)))
    assert not ground.is_touched(backend)
    assert not ground.is_touched(other)
    ground.is_clean(backend, plans)


def test_our_own_transactions_are_no_drift(ground):
    backend, plans = disturbed(ground)
    changes = [
        plans_of("a", 1, 5),
        plans_of("a", 1, 25),
        plans_of("a", 1, 4, session_affinity="ClientIP"),
        plans_of("a", 1, 2, session_affinity="ClientIP"),
        (),
    ]
    for change in changes:
        sync(backend, (("default", "a"), change))
        assert not ground.is_touched(backend)
        assert ground.difference(backend) is None
    del plans["default", "a"]
    ground.is_clean(backend, plans)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flush map ip kube-proxy cluster-services", "elements of cluster-services"),
        ("add rule ip kube-proxy filter-forward drop", "chains or rules"),
    ],
)
def test_foreign_changes_during_a_resync_are_noticed_after_it(ground, line, found):
    backend, plans = disturbed(ground)
    steps = backend.resync(plans)
    next(steps)
    ground.disturb(line)
    for _ in steps:
        pass
    assert found in backend.inspect(Depth.THOROUGH).what
    resync(backend, plans)
    ground.is_clean(backend, plans)


def before_reading(ground, what, *lines):
    """Make another program commit right before the backend's next read of this set."""

    def disturb_once():
        if ground.calls[-1] == what:
            ground.before_read = lambda: None
            ground.disturb(*lines)

    ground.before_read = disturb_once


def test_a_chain_that_comes_while_chains_and_rules_are_read_goes_again(ground):
    _, plans = disturbed(ground)
    before = ground.chains()
    again = ground.start()
    before_reading(ground, "rules", "add chain ip kube-proxy mine", "add rule ip kube-proxy mine accept")
    resync(again, plans)
    if again.inspect(Depth.THOROUGH) is not None:
        resync(again, plans)
    assert ground.chains() == before
    ground.is_clean(again, plans)


@pytest.mark.parametrize(
    "more", [{"session_affinity": "ClientIP"}, {"annotations": Annotations(algorithm="maglev-251")}]
)
def test_a_table_that_goes_right_before_chains_are_made_is_an_error(ground, more):
    backend, plans = disturbed(ground)
    plans["default", "a"] = plans_of("a", 1, 9, **more)

    def disturb_once():
        ground.before_commit = lambda: None
        ground.disturb("flush ruleset")

    ground.before_commit = disturb_once
    with pytest.raises(ApplyError):
        sync(backend, (("default", "a"), plans["default", "a"]))
    resync(backend, plans)
    ground.is_clean(backend, plans)


@pytest.fixture
def meddle(ground):
    """Return a function that makes another program commit right after the backend's next commit."""

    def meddle(*lines):
        def disturb_once():
            ground.after_commit = lambda: None
            ground.disturb(*lines)

        ground.after_commit = disturb_once

    return meddle


@pytest.mark.parametrize("how", ["load", "replace"])
def test_rules_of_other_programs_are_detected_when_the_table_is_created(ground, meddle, how):
    plans = cluster("a")
    if how == "replace":
        ground.disturb("add table ip kube-proxy")
    backend = ground.start()
    meddle("insert rule ip kube-proxy nat-prerouting accept")
    with pytest.raises(ApplyError, match="another program"):
        resync(backend, plans)
    resync(backend, plans)
    ground.is_clean(backend, plans)


def test_changes_of_other_tables_are_no_drift_when_ours_is_created(ground, meddle):
    backend = ground.start()
    meddle("add table ip mine")
    resync(backend, cluster("a"))
    assert backend.inspect(Depth.THOROUGH) is None
    assert not ground.is_touched(backend)


def test_changes_of_other_tables_cause_no_work_when_chains_are_created(ground):
    backend, plans = disturbed(ground)
    ground.disturb("add table ip mine")
    ground.calls.clear()
    plans["default", "a"] = plans_of("a", 1, 9, session_affinity="ClientIP")
    sync(backend, (("default", "a"), plans["default", "a"]))
    assert "contents" not in ground.calls  # no comparison, so no reading
    ground.is_clean(backend, plans)


def test_new_chains_are_not_read_back_beside_a_program_that_the_kernel_cannot_announce(ground):
    backend, plans = disturbed(ground)
    ground.disturb_unheard("add table ip mine")
    plans["default", "a"] = plans_of("a", 1, 9, session_affinity="ClientIP")
    ground.calls.clear()
    sync(backend, (("default", "a"), plans["default", "a"]))
    assert ground.calls == []  # no reading: a reading starts again whenever another program commits
    assert backend.inspect(Depth.THOROUGH) is None
    ground.is_clean(backend, plans)


def test_foreign_rules_are_detected_right_after_chains_are_created(ground, meddle):
    backend, plans = disturbed(ground)
    plans["default", "a"] = plans_of("a", 1, 9, session_affinity="ClientIP")
    meddle("insert rule ip kube-proxy nat-prerouting accept")
    sync(backend, (("default", "a"), plans["default", "a"]))
    assert "chains or rules" in backend.inspect(Depth.QUICK).what
    resync(backend, plans)
    ground.is_clean(backend, plans)


def test_foreign_rules_are_detected_when_chains_are_created(ground):
    backend, plans = disturbed(ground)
    ground.disturb("insert rule ip kube-proxy nat-prerouting accept")
    plans["default", "a"] = plans_of("a", 1, 9, session_affinity="ClientIP")
    sync(backend, (("default", "a"), plans["default", "a"]))
    assert "chains or rules" in backend.inspect(Depth.QUICK).what
    resync(backend, plans)
    ground.is_clean(backend, plans)


def test_further_chains_are_noticed_without_a_read_of_their_rules(ground):
    """The Go kube-proxy may add ten thousand chains to the table."""
    backend, _ = disturbed(ground)
    ground.disturb("add chain ip kube-proxy service-ULMVA6XW-ns1/svc1/tcp/p80")
    ground.calls.clear()
    assert "chains or rules" in backend.inspect(Depth.QUICK).what
    assert "contents" not in ground.calls


def test_a_chain_of_another_program_is_detected(ground):
    backend, plans = disturbed(ground)
    ground.disturb("add chain ip kube-proxy pick-10800s", "add rule ip kube-proxy pick-10800s accept")
    plans["default", "a"] = plans_of("a", 1, 9, session_affinity="ClientIP")
    with pytest.raises(ApplyError, match="another program changed table ip kube-proxy"):
        sync(backend, (("default", "a"), plans["default", "a"]))
    resync(backend, plans)
    ground.is_clean(backend, plans)


@pytest.mark.parametrize(
    "lines",
    [
        ["delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }"],
        ["add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 2 : 10.244.9.9 . 80 }"],
        ["delete table ip kube-proxy"],
    ],
)
def test_a_sync_that_finds_changes_of_another_program_names_it(ground, lines):
    backend, a = ground.start(), ("default", "a")
    resync(backend, {a: plans_of("a", 1, 2)})
    ground.disturb(*lines)
    number = 1 if "delete element" in lines[0] else 3
    with pytest.raises(ChangedByOthersError, match="another program changed table ip kube-proxy"):
        sync(backend, (a, plans_of("a", 1, number)))
    resync(backend, {a: plans_of("a", 1, number)})
    ground.is_clean(backend, {a: plans_of("a", 1, number)})
