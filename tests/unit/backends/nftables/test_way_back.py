"""The Go kube-proxy of v1.36 can take over our table: no object in it conflicts with its names, types and deletions.

Facts of pkg/proxy/nftables/proxier.go: setupNFTables, syncProxyRules, isAffinitySetName, isServiceChainName.
"""

import re

import pytest
from msgspec.structs import replace

from kubeproxy.backends.nftables.failing import FAILING
from kubeproxy.backends.nftables.forwarding import FLOWTABLE
from kubeproxy.backends.nftables.layout import (
    CLIENTS,
    HASHED,
    OF_RANGES,
    TREATMENTS,
    ChainName,
    SetId,
    parse_chain_name,
)
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.features import CONNECTION_COUNTERS, FAST_FORWARDING, RESETS, Forwarding
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Loopback
from support.cluster_objects import world
from support.nft_text import skeleton

BASE_CHAINS = {
    "filter-prerouting-pre-dnat": "type filter hook prerouting priority -110",
    "filter-output-pre-dnat": "type filter hook output priority -110",
    "filter-input": "type filter hook input priority 0",
    "filter-forward": "type filter hook forward priority 0",
    "filter-output": "type filter hook output priority 0",
    "nat-prerouting": "type nat hook prerouting priority -100",
    "nat-output": "type nat hook output priority -100",
    "nat-postrouting": "type nat hook postrouting priority 100",
}
EMPTIED = {
    *BASE_CHAINS,
    *("services", "cluster-ips-check", "masquerading", "service-endpoints-check", "nodeport-endpoints-check"),
    *("firewall-check", "reject-chain"),
}
SETS = {"cluster-ips": ("ip daddr",), "nodeport-ips": ("ip daddr",)}
"""Sets of both programs, with the type that both give them; the kernel would refuse another type."""
OTHERS = {
    *("hairpin-connections", "no-endpoint-services", "no-endpoint-nodeports", "firewall-ips"),
    *("service-ips", "service-nodeports"),
}
DELETED_SETS = re.compile(r"affinity-|nodeport-ips$")
DELETED_CHAINS = re.compile(r".*/")


def everything():
    """Return the text of tables that together have all possible sets, chains and counters."""
    full = FAST_FORWARDING.on(RESETS.on(CONNECTION_COUNTERS.on(world(), True), True), Forwarding(1, (6, 17)))
    full = replace(full, ejects=True)
    places = (full.ipv4.nodeport_ips, None)
    chains = [
        ChainName(nodeport, treatment, *((3, 0) if treatment.endswith(HASHED) else (0, 10)))
        for nodeport in (False, True)
        for treatment in TREATMENTS
    ]
    for loopback in Loopback:
        for addresses in places:
            one = replace(full, ipv4=replace(full.ipv4, nodeport_ips=addresses, loopback=loopback))
            yield skeleton(Ruleset(Family.IPV4, one, OF_RANGES), chains)


@pytest.fixture(scope="module")
def text():
    return "".join(everything())


def made(text, keyword):
    return re.findall(rf"^add {keyword} ip kube-proxy (\S+) ?(.*)$", text, re.MULTILINE)


def test_base_chains_are_those_of_the_go_kube_proxy_and_no_others(text):
    ours = {name: hook for name, hook in made(text, "chain") if hook}
    assert {name: re.search(r"type .* priority \S+", hook)[0] for name, hook in ours.items()} == BASE_CHAINS


def test_the_go_kube_proxy_deletes_no_set_or_chain_of_ours(text):
    sets = {name for keyword in ("set", "map", "flowtable", "counter") for name, _ in made(text, keyword)}
    assert {CLIENTS, SetId.AFFINITY_SERVICES, "localhost-tcp", FLOWTABLE, FAILING, *OF_RANGES} <= sets
    assert {name for name in sets if DELETED_SETS.match(name)} == {"nodeport-ips"}
    chains = {name for name, _ in made(text, "chain")}
    assert any(parse_chain_name(name) for name in chains)
    assert not [name for name in chains if DELETED_CHAINS.match(name)]


def test_common_sets_have_one_type_and_all_other_names_differ(text):
    sets = dict(made(text, "set"))
    maps = dict(made(text, "map"))
    assert not OTHERS & (sets.keys() | maps.keys())
    assert not SETS.keys() & maps.keys()
    for name, (key,) in SETS.items():
        assert re.fullmatch(rf"{{ typeof {key} ; (size \d+ ; )?}}", sets[name])


def test_after_the_takeover_no_base_chain_leads_to_a_rule_about_ranges(text):
    rules = made(text, "rule")
    targets = {chain: set(re.findall(r"(?:jump|goto) (\S+)", rule)) for chain, rule in rules}
    for chain, rule in rules:
        targets[chain] |= set(re.findall(r"(?:jump|goto) (\S+)", rule))
    leading = {chain for chain, others in targets.items() if {"ranges", "range-endpoints-check"} & others}
    assert leading == {"nat-prerouting", "nat-output", "filter-input", "filter-forward", "filter-output"}
    assert leading <= EMPTIED


def test_only_rules_that_the_go_kube_proxy_removes_refer_to_a_set_that_it_deletes(text):
    rules = made(text, "rule")
    referring = {chain for chain, rule in rules for name in re.findall(r"@(\S+)", rule) if DELETED_SETS.match(name)}
    assert referring
    assert referring <= EMPTIED
