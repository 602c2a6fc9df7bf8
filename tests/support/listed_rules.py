"""Reads a table of nf_tables from nft's text, without a kernel, for tests of kubeproxy.meaning.

Supports the language of `support.recorded_rules`: that of nft's listing of the Go kube-proxy's table.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from kubeproxy.kernel.nftables import compiling, tables
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables.fields import FIELDS, packed, padded
from kubeproxy.kernel.nftables.tables import ChainContents, Hook, SetForm
from kubeproxy.meaning.nft_tables import Elements, NftTable

_TYPES: Final = {"ipv4_addr": "ip daddr", "inet_proto": "meta l4proto", "inet_service": "th dport"}
_PRIORITIES: Final = {"filter": 0, "dstnat": -100, "srcnat": 100, "dstnat - 10": -110}
_HOOK: Final = re.compile(r"type (\w+) hook (\w+) priority ([^;]+); policy accept;")
_INLINE: Final = re.compile(r"(?:ip saddr|numgen random mod \d+)(?: !=| map| vmap)? (\{[^}]*\})")
_TO: Final = re.compile(r"dnat to (\S+):(\d+)$")
_NUMBER: Final = "numgen random mod 2"
"""This type contains the types of the keys of all maps that are used with random numbers."""

Entry = tuple[bytes, bytes, bytes | x.RuleVerdict]


def table(text: str) -> NftTable:
    """Parse the only table of a text: its chains, its sets, and its rules' anonymous sets, with generated names."""
    keys: dict[str, list[str]] = {}
    forms: dict[str, SetForm] = {}
    entries: dict[str, list[Entry]] = {}
    hooks: dict[str, Hook | None] = {}
    rules: dict[str, list[str]] = {}
    name = ""
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if line.startswith("add element "):
            name, key = words[4], line[line.index("{") + 2 : -2]
            entries[name].append(_entry(keys[name], key))
        elif line.startswith(("set ", "map ", "chain ")):
            name = words[1]
            hooks[name], rules[name] = None, []
        elif line.startswith("type ") and (hook := _HOOK.match(line)):
            priority = _PRIORITIES.get(hook[3]) if hook[3] in _PRIORITIES else int(hook[3])
            hooks[name] = Hook(hook[1], tables.HOOKS.index(hook[2]), priority or 0)
        elif line.startswith("type "):
            keys[name] = [_TYPES[kind] for kind in line.partition(" : ")[0].split()[1::2]]
            forms[name], entries[name] = _form(keys[name], 0), []
        elif line.startswith("flags "):
            forms[name] = _form(keys[name], tables.DYNAMIC | tables.TIMEOUT)
        elif line and not line.startswith(("table ", "comment ", "size ", "timeout ", "}")):
            rules[name].append(line)
    chains = {}
    for chain in (each for each in rules if each not in forms):
        chains[chain] = ChainContents(hooks[chain], tuple(_rule(rule, forms, entries) for rule in rules[chain]))
    return NftTable(2, "kube-proxy", chains, {name: Elements(forms[name], tuple(entries[name])) for name in forms})


def _form(key: list[str], flags: int) -> SetForm:
    return SetForm(flags, 0, sum(padded(FIELDS[field].size) for field in key))


def _entry(key: list[str], text: str) -> Entry:
    words, _, value = text.partition(" : ")
    ends = [_ends(field, word) for field, word in zip(key, words.split(" . "), strict=True)]
    first, last = (b"".join(one[at] for one in ends) for at in (0, 1))
    return first, last, _value(value)


def _ends(name: str, word: str) -> tuple[bytes, bytes]:
    field = FIELDS[name]
    if "/" in word:
        network = ipaddress.ip_network(word)
        return network[0].packed, network[-1].packed
    value = packed(field.type, field.size, word).ljust(padded(field.size), b"\0")
    return value, value


def _value(text: str) -> bytes | x.RuleVerdict:
    word, _, rest = text.partition(" ")
    verdicts = {"goto": x.GOTO, "jump": x.JUMP, "drop": x.DROP, "accept": x.ACCEPT}
    if word in verdicts:
        return x.RuleVerdict(verdicts[word], rest)
    if not text:
        return b""
    address, port = text.split(" . ")
    return ipaddress.ip_address(address).packed + int(port).to_bytes(2, "big") + bytes(2)


def _rule(text: str, forms: dict[str, SetForm], entries: dict[str, list[Entry]]) -> x.Rule:
    """Return a rule; a set in it becomes a set of the table."""
    if inline := _INLINE.search(text):
        key = ["ip saddr"] if "saddr" in inline[0] else [_NUMBER]
        name = f"__set{len(forms)}"
        forms[name] = _form(key, 0)
        entries[name] = [_entry(key, one.strip()) for one in inline[1].strip("{ }").split(",")]
        text = text[: inline.start(1)] + f"@{name}" + text[inline.end(1) :]
    to = _TO.search(text)
    if to is None:
        return compiling.rule(text, "ip")
    address, port = ipaddress.ip_address(to[1]).packed, int(to[2]).to_bytes(2, "big")
    nat = (x.Immediate(1, address), x.Immediate(2, port), x.Nat(1, 2, 1, 1, 2, 2, 3))
    return (*compiling.rule(text[: to.start()].strip(), "ip"), *nat)
