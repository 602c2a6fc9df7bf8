"""Each chain of the proxy has a description for traces; no other program's chain has one."""

from __future__ import annotations

import re

import pytest

from kubeproxy.backends.iptables import skeleton
from kubeproxy.backends.leftovers import CHAINS, PREFIXES
from kubeproxy.backends.nftables.layout import OF_RANGES, ChainName
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.userspace import ruleset as userspace
from kubeproxy.setup import modes
from support.nftables_plans import V4, WORLD

NFTABLES, USERSPACE = modes.named("nftables"), modes.named("userspace")


def chains_of(text: str) -> set[str]:
    return set(re.findall(r"^add chain \S+ \S+ (\S+)", text, re.MULTILINE))


def test_chains_of_nftables_mode_have_words():
    sticky = [
        ChainName(nodeport, kind, affinity=30) for nodeport in (False, True) for kind in ("cluster", "policy-local")
    ]
    sticky.append(ChainName(False, "range-pick", affinity=30))
    chains = Ruleset(V4, WORLD, OF_RANGES).chains(sticky).keys()
    words = {chain: NFTABLES.decision("kube-proxy", chain) for chain in chains}
    assert len(words) > 60
    assert [chain for chain, decision in words.items() if decision in {None, "kube-proxy's own"}] == []


def test_chains_of_userspace_mode_have_words():
    chains = userspace.UserspaceRuleset(V4, WORLD, b"\x0a\0\0\1").chains().keys()
    words = {chain: USERSPACE.decision("kube-proxy-userspace", chain) for chain in chains}
    assert len(words) > 8
    assert [chain for chain, decision in words.items() if decision in {None, "kube-proxy's own"}] == []


@pytest.mark.parametrize("mode", ["iptables", "ipvs"])
def test_chains_of_iptables_have_words(mode):
    decision = modes.named(mode).decision
    for chain in (
        *(skeleton.OWN_CHAINS - {skeleton.KUBELET_FIREWALL}),
        *CHAINS,
        *(f"{prefix}ABCDEF" for prefix in PREFIXES),
    ):
        assert decision("nat", chain), chain


@pytest.mark.parametrize("mode", modes.every(), ids=lambda mode: mode.name)
def test_chains_of_others_have_none(mode):
    for table, chain in (("filter", "INPUT"), ("nat", "KUBE-FIREWALL"), ("firewall", "services"), ("nat", "DOCKER")):
        assert mode.decision(table, chain) is None
