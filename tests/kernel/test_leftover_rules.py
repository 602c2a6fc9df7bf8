"""The Go kube-proxy's iptables rules, as recorded, are removed from a real kernel; kubelet's rules remain."""

from __future__ import annotations

import subprocess

import pytest

from kubeproxy.ask import outlook
from kubeproxy.backends.ipvs import cleanup
from kubeproxy.backends.leftovers import remove_iptables_rules
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.nft_compat import RuleWriter
from kubeproxy.model.addresses import Family
from kubeproxy.setup import modes
from support.iptables_cases import go_rules
from support.own_network import own_network

KUBELET = "*filter\n:KUBE-FIREWALL - [0:0]\n:KUBE-ROUTER-INPUT - [0:0]\n-A INPUT -j KUBE-FIREWALL\nCOMMIT\n"


def restore(variant: str, text: str) -> None:
    subprocess.run([f"{variant}-restore", "--noflush"], input=text, text=True, check=True, capture_output=True)


@pytest.mark.parametrize("variant", xtables.VARIANTS)
def test_the_recorded_rules_go_and_kubelets_stay(variant):
    family = Family.IPV6 if variant.startswith("ip6") else Family.IPV4
    with own_network():
        restore(variant, go_rules(family))
        restore(variant, KUBELET)
        before = {chain for table in xtables.tables(variant) for chain in table.chains}
        assert "KUBE-SERVICES" in before
        assert remove_iptables_rules() == []
        tables = list(xtables.tables(variant))
        kept = {chain for table in tables for chain in table.chains if chain.startswith("KUBE-")}
        assert {"KUBE-FIREWALL", "KUBE-ROUTER-INPUT"} <= kept
        assert kept <= {"KUBE-FIREWALL", "KUBE-ROUTER-INPUT", "KUBE-KUBELET-CANARY"}
        assert "-A INPUT -j KUBE-FIREWALL" in [rule for table in tables for rule in table.rules]
        assert remove_iptables_rules() == []


def test_a_plan_names_leftovers_of_iptables_mode_in_either_variant_and_their_removal(monkeypatch):
    with own_network():
        for variant in ("iptables-nft", "iptables-legacy"):
            restore(variant, go_rules(Family.IPV4))
        restore("iptables-nft", "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n")
        restore("iptables-nft", KUBELET)
        monkeypatch.setattr(xtables, "chosen", lambda: "nft")
        unknown: list[str] = []

        def named(mode: str) -> list[str]:
            return [line.split(" chains KUBE-... of ")[-1] for line in outlook.leftovers(modes.named(mode), unknown)]

        assert all(line.startswith(outlook.REMOVED) for line in outlook.leftovers(modes.named("nftables"), unknown))
        assert named("nftables") == ["iptables-legacy", "iptables-nft"]
        assert named("iptables") == ["iptables-legacy"]
        monkeypatch.setattr(xtables, "installed", lambda: ["iptables-legacy"])
        assert named("nftables") == ["iptables-legacy", "iptables-nft"]
        assert outlook.leftovers(modes.named("nftables"), unknown)[1].startswith(outlook.STAYS)
        assert unknown == []
    with own_network():
        assert outlook.leftovers(modes.named("nftables"), unknown) == unknown == []


def test_a_plan_for_ipvs_mode_writes_nothing(monkeypatch):
    """At its start this mode tries a write; a question about it must not."""
    written: list[object] = []
    monkeypatch.setattr(xtables.Commands, "restore", lambda *arguments: written.append(arguments))
    with own_network():
        restore("iptables-nft", go_rules(Family.IPV4))
        monkeypatch.setattr(xtables, "chosen", lambda: "nft")
        unknown: list[str] = []
        left = outlook.leftovers(modes.named("ipvs"), unknown)
    assert (written, unknown) == ([], [])
    assert all(line.startswith(outlook.REMOVED) for line in left)


def test_more_chains_than_one_restore_takes_are_removed(monkeypatch):
    """The time of iptables-nft grows with the square of the chains in a restore: minutes for 10,000 Services."""
    monkeypatch.setattr(RuleWriter, "chains_at_once", 50)
    services = [f"KUBE-SVC-{number:016}" for number in range(200)]
    lines = ["*nat", *(f":{chain} - [0:0]" for chain in ("KUBE-SERVICES", *services)), "-A OUTPUT -j KUBE-SERVICES"]
    lines += [f"-A KUBE-SERVICES -d 10.96.0.{number}/32 -j {chain}" for number, chain in enumerate(services)]
    with own_network():
        restore("iptables-nft", "\n".join([*lines, "COMMIT", ""]))
        assert remove_iptables_rules() == []
        (nat,) = xtables.tables("iptables-nft")
        assert (nat.rules, {chain for chain in nat.chains if chain.startswith("KUBE-")}) == ((), set())


def test_rules_are_not_listed_if_no_chain_is_to_be_removed(monkeypatch):
    """iptables-nft-save starts again after each change of rules, and did not end during twenty changes per second."""
    with own_network():
        restore("iptables-nft", go_rules(Family.IPV4))
        restore("iptables-nft", KUBELET)
        monkeypatch.setattr(xtables, "installed", lambda: ["iptables-nft"])
        listed: list[str] = []
        monkeypatch.setattr(xtables, "tables", lambda name: listed.append(name) or [])
        assert cleanup.cleanup() == []
        assert remove_iptables_rules(lambda _commands, _table, _chain: True) == []
        assert listed == []
        remove_iptables_rules()
        assert listed == ["iptables-nft"]
