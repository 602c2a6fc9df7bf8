"""The iptables rules of another mode that are removed, and those that remain."""

from __future__ import annotations

import pytest

from kubeproxy.backends import leftovers
from kubeproxy.backends.leftovers import owned, removals
from kubeproxy.backends.nftables import cleanup as nftables_cleanup
from kubeproxy.backends.nftables.layout import SCRATCH, TABLE
from kubeproxy.kernel.xtables.xtables import SavedTable, chain_of, target_of
from kubeproxy.model.answer import Packet

NAT = SavedTable(
    "nat",
    ("PREROUTING", "OUTPUT", "KUBE-SERVICES", "KUBE-SVC-ABC", "KUBE-SEP-DEF", "KUBE-MARK-MASQ", "KUBE-ROUTER-X"),
    (
        '-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        "-A OUTPUT -j KUBE-SERVICES",
        "-A OUTPUT -j KUBE-ROUTER-X",
        "-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -j KUBE-SVC-ABC",
        "-A KUBE-SVC-ABC -j KUBE-SEP-DEF",
        "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000",
    ),
)


def removal(tables, keeps):
    return "".join(removals(owned(tables, keeps), 100))


def nothing(table, chain):
    """The kept rules of a mode without chains."""
    return False


def test_jumps_go_first_then_the_chains_and_nothing_of_others():
    assert removal([NAT], nothing).splitlines() == [
        "*nat",
        ":KUBE-SERVICES - [0:0]",
        ":KUBE-MARK-MASQ - [0:0]",
        ":KUBE-SVC-ABC - [0:0]",
        ":KUBE-SEP-DEF - [0:0]",
        '-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        "-D OUTPUT -j KUBE-SERVICES",
        "-X KUBE-SERVICES",
        "-X KUBE-MARK-MASQ",
        "-X KUBE-SVC-ABC",
        "-X KUBE-SEP-DEF",
        "COMMIT",
    ]


def test_many_chains_go_in_pieces_and_none_while_a_rule_leads_to_it():
    services = [f"KUBE-SVC-{number}" for number in range(7)]
    large = SavedTable(
        "nat",
        (*services, "PREROUTING", "KUBE-MARK-MASQ", "KUBE-SERVICES"),
        (
            "-A PREROUTING -j KUBE-SERVICES",
            *(f"-A KUBE-SERVICES -j {chain}" for chain in services),
            *(f"-A {chain} -j KUBE-MARK-MASQ" for chain in services),
        ),
    )
    rules, chains = list(large.rules), set(large.chains)
    for text in removals(owned([large], nothing), 3):
        lines = text.splitlines()
        assert sum(line.startswith(":") for line in lines) <= 3
        emptied = {line[1:].split(" ")[0] for line in lines if line.startswith(":")}
        rules = [rule for rule in rules if chain_of(rule) not in emptied and rule.replace("-A", "-D", 1) not in lines]
        gone = {line[3:] for line in lines if line.startswith("-X ")}
        assert gone.isdisjoint(map(target_of, rules))
        chains -= gone
    assert (rules, chains) == ([], {"PREROUTING"})


def test_the_chain_of_the_mark_stays_while_rules_of_others_lead_to_it():
    """Like the rules of the CNI plugin portmap with externalSetMarkChain; iptables removes no chain in use."""
    portmap = SavedTable(
        "nat", (*NAT.chains, "CNI-HOSTPORT-SETMARK"), (*NAT.rules, "-A CNI-HOSTPORT-SETMARK -j KUBE-MARK-MASQ")
    )
    text = removal([portmap], nothing)
    assert "KUBE-MARK-MASQ" not in text
    assert "-X KUBE-SERVICES" in text


def test_kubelets_firewall_is_left_alone():
    table = SavedTable(
        "filter",
        ("INPUT", "KUBE-FIREWALL", "KUBE-KUBELET-CANARY"),
        ("-A INPUT -j KUBE-FIREWALL", "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP"),
    )
    assert removal([table], nothing) == ""


def test_a_comment_that_names_a_chain_is_no_jump():
    table = SavedTable(
        "filter", ("INPUT", "KUBE-FORWARD"), ('-A INPUT -m comment --comment "was -j KUBE-FORWARD" -j ACCEPT',)
    )
    assert "-D" not in removal([table], nothing)


def test_each_table_is_removed_though_another_one_could_not_be(monkeypatch):
    asked = []

    def remove(name):
        asked.append(name)
        return [f"cannot remove {name}"] * 2

    monkeypatch.setattr(nftables_cleanup, "remove_table", remove)
    assert nftables_cleanup.cleanup() == [f"cannot remove {name}" for name in asked for _ in range(2)]
    assert asked == [TABLE, SCRATCH]


@pytest.mark.parametrize(
    ("source", "hook", "caught"),
    [
        (b"\n\xf4\0\7", "PREROUTING", True),
        (b"\n\xf4\0\7", "OUTPUT", False),
        (None, "OUTPUT", True),
        (None, "PREROUTING", False),
    ],
)
def test_packets_of_this_node_pass_other_hooks(source, hook, caught):
    lines = [
        f"-A {hook} -j KUBE-SERVICES",
        "-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A",
        "-A KUBE-SVC-A -j DNAT --to-destination 10.244.0.9:80",
    ]
    packet = Packet(source, b"\n\x60\0\1", 6, 80)
    assert leftovers._rules_catch(lines, {"KUBE-SERVICES", "KUBE-SVC-A"}, packet) is caught
