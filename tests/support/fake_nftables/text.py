"""Parses nft's text, one command per line, into the steps of a transaction.

Supports only the commands of the backend and the tests, in their spelling.
"""

from __future__ import annotations

import errno
import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import cache

from kubeproxy.kernel.nftables import compiling, listing
from support.fake_nftables.objects import Element, RefusedError, Set, Table, Type, UnsupportedError
from support.fake_nftables.transaction import Transaction

_TYPES = {
    "ip saddr": "ipv4_addr",
    "ip daddr": "ipv4_addr",
    "ip6 saddr": "ipv6_addr",
    "ip6 daddr": "ipv6_addr",
    "meta l4proto": "inet_proto",
    "th dport": "inet_service",
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPACES = re.compile(r"\s+")


def execute(line: str, transaction: Transaction) -> None:
    """Carry out one command."""
    line = _SPACES.sub(" ", line.strip())
    if line == "flush ruleset":
        for table in transaction.tables():
            transaction.delete_table(table)
        return
    verb, kind, family, rest = line.split(" ", 3)
    command = _COMMANDS.get((verb, kind))
    if command is None:
        raise UnsupportedError(f"command {line!r}")
    name, _, rest = rest.partition(" ")
    if kind == "table":
        command(transaction, family, name, rest)
    else:
        command(transaction, transaction.table(family, name), rest)


# -- tables, chains, rules -----------------------------------------------------------------------------------------


def _add_table(transaction: Transaction, family: str, name: str, rest: str) -> None:
    comment = re.search(r'comment "([^"]*)"', rest)
    transaction.add_table(family, name, comment[1] if comment else "", "flags dormant" in rest)


def _delete_table(transaction: Transaction, family: str, name: str, _: str) -> None:
    transaction.delete_table(transaction.table(family, name))


def _flush_table(transaction: Transaction, family: str, name: str, _: str) -> None:
    for chain in transaction.table(family, name).chains.values():
        transaction.flush_chain(chain)


def _add_chain(transaction: Transaction, table: Table, rest: str) -> None:
    name, _, hook = rest.partition(" ")
    transaction.add_chain(table, name, hook.strip("{ }"))


def _delete_chain(transaction: Transaction, table: Table, rest: str) -> None:
    transaction.delete_chain(table, table.chain(rest))


def _flush_chain(transaction: Transaction, table: Table, rest: str) -> None:
    transaction.flush_chain(table.chain(rest))


def _add_counter(transaction: Transaction, table: Table, name: str) -> None:
    transaction.add_counter(table, name)


def _add_rule(transaction: Transaction, table: Table, rest: str) -> None:
    chain, _, text = rest.partition(" ")
    transaction.add_rule(table, table.chain(chain), _listed(text, table.family))


def _insert_rule(transaction: Transaction, table: Table, rest: str) -> None:
    chain, _, text = rest.partition(" ")
    transaction.add_rule(table, table.chain(chain), _listed(text, table.family), first=True)


def _listed(text: str, family: str) -> str:
    """Return a rule in the form of a listing; a rule in an unknown form stays unchanged."""
    try:
        return listing.text(compiling.rule(text, family), family)
    except ValueError:
        return text


# -- sets ----------------------------------------------------------------------------------------------------------


def _add_set(transaction: Transaction, table: Table, rest: str) -> None:
    name, _, body = rest.partition(" ")
    new = Set(name, Type(()))
    elements = ""
    for part in filter(None, map(str.strip, body.strip("{ }").split(";"))):
        word, _, value = part.partition(" ")
        match word:
            case "type" | "typeof":
                _take_type(new, value)
            case "flags":
                flags = re.split(r",\s*", value)
                new.interval, new.dynamic = "interval" in flags, "dynamic" in flags
                if "timeout" in flags:
                    new.timeout = new.timeout or 0
            case "timeout":
                new.timeout = _milliseconds(value)
            case "size":
                new.size = int(value)
            case "counter":
                new.counted = True  # Options of each element, which no code here reads.
            case "auto-merge":
                new.auto_merge = True
            case "elements":
                elements = value.strip("={ }")
            case _:
                raise UnsupportedError(f"{part!r} in a set")
    transaction.add_set(table, new)
    if elements:
        _add_elements(transaction, table, new, elements)


def _take_type(target: Set, text: str) -> None:
    key, _, value = text.partition(" : ")
    target.key = _type(key)
    target.verdicts = value == "verdict"
    target.value = _type(value) if value and not target.verdicts else None


@cache
def _type(text: str) -> Type:
    return Type(tuple("integer" if w.startswith("numgen") else _TYPES.get(w, w) for w in text.split(" . ")))


def _milliseconds(text: str) -> int:
    return 1000 * sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))


def _delete_set(transaction: Transaction, table: Table, rest: str) -> None:
    transaction.delete_set(table, table.set(rest))


def _flush_set(transaction: Transaction, table: Table, rest: str) -> None:
    transaction.flush_set(table.set(rest))


# -- elements ------------------------------------------------------------------------------------------------------


def _add_element(transaction: Transaction, table: Table, rest: str) -> None:
    name, _, body = rest.partition(" ")
    _add_elements(transaction, table, table.set(name), body.strip("{ }"))


def _add_elements(transaction: Transaction, table: Table, target: Set, text: str) -> None:
    if target.auto_merge:
        keys = [key for key, _ in _elements(target, text)]
        transaction.merge(target, [(key[: target.key.size], key[target.key.size :]) for key in keys])
        return
    for key, element in _elements(target, text):
        transaction.add_element(table, target, key, element)


def _delete_element(transaction: Transaction, table: Table, rest: str) -> None:
    name, _, body = rest.partition(" ")
    target = table.set(name)
    for key, _element in _elements(target, body.strip("{ }")):
        if target.auto_merge and key not in target.elements:
            raise RefusedError(errno.ENOENT, f"no such range in {name}")
        transaction.delete_element(target, key)


def _elements(target: Set, text: str) -> Iterator[tuple[bytes, Element]]:
    for item in text.split(", "):
        words, _, value = item.strip().partition(" : ")
        words, *times = re.split(r" (?=timeout|expires)", words)
        timeout, until = 0, None
        for time in times:
            if time.startswith("timeout"):
                timeout = _milliseconds(time)
            else:
                until = _milliseconds(time)
        ends = [_ends(word, target.interval) for word in words.split(" . ")]
        key = target.key.pack([first for first, _ in ends])
        if target.interval:
            key += target.key.pack([last for _, last in ends])
        yield key, Element(_value(target, value) if value else b"", timeout, until)


def _ends(word: str, interval: bool) -> tuple[str, str]:
    if interval and "-" in word:
        first, _, last = word.partition("-")
        return first, last
    if interval and "/" in word:
        network = ipaddress.ip_network(word)
        return str(network[0]), str(network[-1])
    return word, word


def _value(target: Set, text: str) -> bytes:
    if target.verdicts:
        return text.removeprefix("goto ").encode()
    return target.value.as_value(text.split(" . ")) if target.value is not None else b""


_COMMANDS: dict[tuple[str, str], Callable[..., None]] = {
    ("add", "table"): _add_table,
    ("delete", "table"): _delete_table,
    ("flush", "table"): _flush_table,
    ("add", "chain"): _add_chain,
    ("delete", "chain"): _delete_chain,
    ("flush", "chain"): _flush_chain,
    ("add", "counter"): _add_counter,
    ("add", "rule"): _add_rule,
    ("insert", "rule"): _insert_rule,
    ("add", "set"): _add_set,
    ("add", "map"): _add_set,
    ("delete", "set"): _delete_set,
    ("delete", "map"): _delete_set,
    ("flush", "set"): _flush_set,
    ("flush", "map"): _flush_set,
    ("add", "element"): _add_element,
    ("delete", "element"): _delete_element,
}
