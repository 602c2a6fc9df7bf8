"""The fixed rules of ipvs mode, their removal, and the mode's settings."""

from __future__ import annotations

from functools import partial

import pytest

from kubeproxy.backends.ipvs import cleanup
from kubeproxy.backends.ipvs.layout import CHAINS, JUMPS, IpsetId, Rules, Scheduler, scheduler_named
from kubeproxy.backends.ipvs.mode import CONN_REUSE, OPERATIONS, STRICT_ARP, excluded, settings
from kubeproxy.backends.leftovers import owned, removals
from kubeproxy.config.fields import IPVS
from kubeproxy.errors import ConfigError
from kubeproxy.kernel.xtables.xtables import Commands, SavedTable
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.plan import Detector
from support.cluster_objects import world


def rules(detector=False, family=Family.IPV4, **more):
    return Rules(family, world(detector=detector, families=[family], **more))


@pytest.mark.parametrize("family", list(Family))
def test_the_chains_are_those_that_are_named_and_every_jump_leads_to_one(family) -> None:
    found = rules(family=family)
    assert {table: tuple(chains) for table, chains in found.tables.items()} == CHAINS
    assert all(jump.target in CHAINS[jump.table] for jump in JUMPS)


@pytest.mark.parametrize(
    ("detector", "expected"),
    [
        (Detector("network", "10.244.0.0/16"), "! -s 10.244.0.0/16 -j KUBE-MARK-MASQ"),
        (Detector("bridge", "cbr0"), "! -i cbr0 -j KUBE-MARK-MASQ"),
        (Detector("prefix", "veth"), "! -i veth+ -j KUBE-MARK-MASQ"),
        (Detector(), "-m addrtype --src-type LOCAL -j KUBE-MARK-MASQ"),
    ],
)
def test_cluster_ips_masquerade_clients_that_are_no_pods(detector, expected) -> None:
    lines = rules(detector).tables["nat"]["KUBE-SERVICES"]
    assert any("KUBE-CLUSTER-IP" in line and line.endswith(expected) for line in lines)


@pytest.mark.parametrize("name", ["cbr0 -j ACCEPT", "a\nCOMMIT", '"', "!cbr0", "+", "veth+", "-x", "\x01"])
def test_an_interface_that_would_mean_something_else_in_a_rule_is_refused(name) -> None:
    with pytest.raises(ConfigError, match="detectLocal"):
        rules(Detector("bridge", name))


def test_only_missing_jumps_are_added_in_front_and_in_order() -> None:
    missing = [jump for jump in JUMPS if jump.chain in {"INPUT", "PREROUTING"}]
    text = rules().text(("filter", "nat"), missing)
    inserted = [line.split(" -j ")[1] for line in text.splitlines() if line.startswith("-I INPUT")]
    assert inserted == ["KUBE-IPVS-FILTER", "KUBE-PROXY-FIREWALL", "KUBE-NODE-PORT"]  # the last rule becomes the first
    assert "-I OUTPUT" not in text
    assert text.count("COMMIT") == 2


def test_references_of_sets_are_counted_as_the_kernel_does() -> None:
    found = rules(family=Family.IPV6)
    assert found.references(IpsetId.LOOP_BACK) == 1
    assert found.references(IpsetId.LOAD_BALANCER) == 3
    assert found.references(IpsetId.LOAD_BALANCER_FW) == 3
    assert all(found.references(set_id) for set_id in IpsetId)


def table(found: Rules, name: str) -> SavedTable:
    lines = [f"-A {chain} {rule}" for chain, chain_rules in found.tables[name].items() for rule in chain_rules]
    jumps = [f"-A {jump.rule}" for jump in JUMPS if jump.table == name]
    return SavedTable(name, ("INPUT", "OUTPUT", *found.tables[name], "OTHERS"), (*jumps, *lines, "-A OTHERS -j ACCEPT"))


def test_removal_takes_the_modes_own_chains_and_all_rules_with_its_sets(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(cleanup, "remove_iptables_rules", lambda *given: asked.append(given) or [])
    monkeypatch.setattr(cleanup, "_names", lambda _: {"KUBE-LOOP-BACK", "others"})
    cleanup._remove_rules()

    def removed(*tables):
        kept = partial(kept_by_cleanup, Commands("iptables", Family.IPV4, uses_nft=True, version=(1, 8)))
        return "".join(removals(owned(tables, kept, sets), 10))

    (kept_by_cleanup, sets), *_ = asked
    text = removed(table(rules(), "nat"))
    assert "-X KUBE-NODE-PORT" in text
    assert "-X KUBE-SERVICES" not in text  # iptables mode may be using it
    assert "OTHERS" not in text
    assert sets == {"KUBE-LOOP-BACK"}
    assert "-D KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK" in text
    assert removed(SavedTable("nat", ("OTHERS",), ("-A OTHERS -j ACCEPT",))) == ""


def test_chains_of_the_current_mode_are_no_leftovers() -> None:
    ours_are = Commands("iptables-nft", Family.IPV4, uses_nft=True, version=(1, 8))
    kept = partial(OPERATIONS._replace(commands=lambda _: ours_are).keeps, ours_are)
    ours = table(rules(), "nat")
    others = SavedTable("nat", (*ours.chains, "KUBE-SVC-X"), (*ours.rules, "-A KUBE-SVC-X -j ACCEPT"))
    assert list(owned([ours], kept)) == []
    (text,) = removals(owned([others], kept), 10)
    assert text.splitlines() == [
        "*nat",
        ":KUBE-SVC-X - [0:0]",
        "-X KUBE-SVC-X",
        "COMMIT",
    ]


def test_sysctls_follow_the_kernel_and_strict_arp() -> None:
    assert CONN_REUSE in settings(IPVS(), (5, 8))
    assert CONN_REUSE not in settings(IPVS(), (5, 9))
    assert set(STRICT_ARP) <= set(settings(IPVS(strict_arp=True), (6, 1)))
    assert not set(STRICT_ARP) & set(settings(IPVS(), (6, 1)))


def test_excluded_networks_are_by_family() -> None:
    config = IPVS(exclude_cidrs=("198.51.100.0/24", "2001:db8::/32"))
    assert excluded(config, Family.IPV4) == ((pack("198.51.100.0"), pack("198.51.100.255")),)
    assert len(excluded(config, Family.IPV6)) == 1


def test_the_default_scheduler_is_rr() -> None:
    assert scheduler_named("") == Scheduler("rr")
    assert scheduler_named("twos") == Scheduler("twos")
    assert scheduler_named("mh").flags
