"""Outcomes of packets in a small ruleset of nf_tables, compared with hand-computed results."""

from __future__ import annotations

import pytest

from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables.tables import ChainContents, Hook
from kubeproxy.meaning import nftables
from kubeproxy.meaning.compare import FirstPacket, outcomes
from kubeproxy.meaning.nft_tables import NftTable
from kubeproxy.meaning.rules import CompiledRules
from support.rulesets import PLACE, nftables_rules

KEY = "ip daddr . meta l4proto . th dport"
CHAINS = {
    "filter-forward": (Hook("filter", 2, 0), [f"ct state new {KEY} vmap @services"]),
    "service": (None, ["numgen random mod 4 vmap { 0 : goto refuse, 1 : goto lose, 2 : goto lose, 3 : goto lose }"]),
    "mark": (None, ["ip saddr != 10.244.0.0/16 meta mark set meta mark or 0x4000"]),
    "refuse": (None, ["reject"]),
    "lose": (None, ["drop"]),
    "nat-postrouting": (Hook("nat", 4, 100), ["meta mark & 0x4000 != 0 masquerade fully-random"]),
}
SETS = {
    "services": (
        KEY,
        {
            "10.96.0.1 . tcp . 80": "goto service",
            "10.96.0.2 . tcp . 80": "goto refuse",
            "10.96.0.3 . tcp . 80": "drop",
            "10.96.0.5 . tcp . 80": "goto mark",
        },
    )
}


@pytest.mark.parametrize(
    ("source", "destination", "wanted"),
    [
        ("10.244.0.9", "10.96.0.1", {"refused": 0.25, "dropped": 0.75}),
        ("10.244.0.9", "10.96.0.2", {"refused": 1.0}),
        ("10.244.0.9", "10.96.0.3", {"dropped": 1.0}),
        ("10.244.0.9", "10.96.0.4", {"passed": 1.0}),
        ("10.244.0.9", "10.96.0.5", {"passed": 1.0}),
        ("192.168.100.1", "10.96.0.5", {"passed masq": 1.0}),
    ],
)
def test_outcomes(source: str, destination: str, wanted: dict[str, float]) -> None:
    rules = nftables_rules(CHAINS, SETS)
    found = outcomes(rules, PLACE, FirstPacket(source, destination, 6, 80, "eth0", ""))
    assert {one.kind + " masq" * one.masquerade: round(share, 6) for one, share in found} == wanted


CARRY, BACK = "ip saddr set ip daddr", "ip saddr set ct original ip saddr"


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ([CARRY, BACK, "ip saddr 10.244.0.9 drop"], "dropped"),
        ([CARRY, BACK], "passed"),
        ([CARRY, "ip saddr 10.244.0.9 drop", BACK], "unknown"),
        ([CARRY], "unknown"),
        ([CARRY, BACK, "dnat to ip daddr"], "translated"),
    ],
)
def test_a_source_address_that_a_rule_has_written_is_not_followed(rules: list[str], wanted: str) -> None:
    compiled = nftables_rules({"nat-prerouting": (Hook("nat", 0, -100), rules)}, {})
    ((found, share),) = outcomes(compiled, PLACE, FirstPacket("10.244.0.9", "10.96.0.1", 6, 80, "eth0", ""))
    assert (found.kind, share) == (wanted, 1.0)
    if wanted == "translated":
        assert (found.address, found.port) == (int.from_bytes(bytes((10, 96, 0, 1)), "big"), 80)


@pytest.mark.parametrize(("last", "kind"), [(1, "translated"), (2, "unknown")])
def test_a_translation_to_a_range_is_not_taken_for_its_first_address(last: int, kind: str) -> None:
    addresses = x.Immediate(1, bytes((10, 244, 0, 1))), x.Immediate(2, bytes((10, 244, 0, 9)))
    chain = ChainContents(Hook("nat", 0, -100), ((*addresses, x.Nat(1, 2, 1, last)),))
    rules = CompiledRules(nftables.compiled(NftTable(2, "t", {"nat-prerouting": chain}, {}), PLACE))
    ((found, _),) = outcomes(rules, PLACE, FirstPacket("10.244.0.9", "10.96.0.1", 6, 80, "eth0", ""))
    assert found.kind == kind
