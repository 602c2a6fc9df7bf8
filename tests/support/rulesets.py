"""Rulesets for the tests of kubeproxy.meaning: nf_tables from text, iptables from iptables-save, and a node."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from kubeproxy.kernel.nftables import compiling, tables
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables.fields import FIELDS, padded
from kubeproxy.kernel.nftables.tables import SetForm
from kubeproxy.meaning import iptables, nft_tables, nftables, rules
from kubeproxy.meaning.compare import Comparison, compare
from kubeproxy.meaning.rules import CompiledRules, NodePlace

NODE = "192.168.100.10"
PLACE = NodePlace(32, rules.union([(127 << 24, (128 << 24) - 1), (int(ipaddress.ip_address(NODE)),) * 2]))

Sets = Mapping[str, tuple[str, Mapping[str, str]]]
"""Sets by name: the fields of the key, with ' . ' between them, and the elements: key to '' or a verdict or a value."""


def iptables_rules(text: str) -> CompiledRules:
    """Return a ruleset of iptables: tables in the form of iptables-save, without counters."""
    return CompiledRules(iptables.compiled(text, PLACE))


def nftables_rules(
    chains: Mapping[str, tuple[tables.Hook | None, list[str]]], sets: Sets | None = None
) -> CompiledRules:
    """A ruleset of one nf_tables table: hook and rules of each chain, in nft's language."""
    made = {
        name: tables.ChainContents(hook, tuple(compiling.rule(rule, "ip") for rule in rules))
        for name, (hook, rules) in chains.items()
    }
    elements = {name: _set(key, entries) for name, (key, entries) in (sets or {}).items()}
    return CompiledRules(nftables.compiled(nft_tables.NftTable(2, "t", made, elements), PLACE))


def _set(key: str, entries: Mapping[str, str]) -> nft_tables.Elements:
    fields = [FIELDS[name] for name in key.split(" . ")]
    found = []
    for words, data in entries.items():
        packed = [compiling._element_key(field, word) for field, word in zip(fields, words.split(" . "), strict=True)]
        whole = b"".join(packed)
        found.append((whole, whole, _data(data)))
    form = SetForm(0, 0, sum(padded(field.size) for field in fields))
    return nft_tables.Elements(form, tuple(found))


def _data(word: str) -> bytes | x.RuleVerdict:
    verdict = {"goto": x.GOTO, "jump": x.JUMP, "drop": x.DROP, "accept": x.ACCEPT}.get(
        word.split(" ", maxsplit=1)[0] if word else ""
    )
    if verdict is not None:
        return x.RuleVerdict(verdict, word.partition(" ")[2])
    if not word:
        return b""
    address, port = word.split(" . ")
    return ipaddress.ip_address(address).packed + int(port).to_bytes(2, "big") + bytes(2)


def compared(first: CompiledRules, second: CompiledRules) -> Comparison:
    """Compare two rulesets on the node."""
    return compare(first, second, PLACE)
