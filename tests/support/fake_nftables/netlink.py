"""Parses the backend's netlink messages into the steps of a transaction.

Attribute numbers are those of include/uapi/linux/netfilter/nf_tables.h. Messages that the backend never sends are not
supported. Nearly every test loads the same table, so results that depend only on a message's bytes are cached.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from msgspec.structs import replace

from kubeproxy.kernel.netlink.protocol import HEADER, NLM_F_CREATE, NLM_F_EXCL, attributes
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import listing, nfnetlink, tables
from kubeproxy.kernel.nftables.fields import VERDICTS
from support.fake_nftables.objects import TYPES, Element, RefusedError, Set, Table, Type, UnsupportedError
from support.fake_nftables.transaction import Transaction

_GENERIC_SIZE = 4  # struct nfgenmsg
_INLINE = {"__map%d", "__set%d"}
_GOTO = (-4).to_bytes(4, "big", signed=True)

Parts = Mapping[int, bytes]

_parse = lru_cache(maxsize=4096)(x.parse)
_printed = lru_cache(maxsize=4096)(listing.text)


def execute(message: bytes, transaction: Transaction) -> None:
    """Carry out one message."""
    length, kind, flags, _, _ = HEADER.unpack_from(message)
    assert length == len(message), "a message says how long it is"
    if kind == nfnetlink.NEW_RULE and flags & NLM_F_CREATE and flags & nfnetlink.NLM_F_APPEND:
        _append(message, transaction)
        return
    parts = _parts(message[HEADER.size + _GENERIC_SIZE :])
    family, creating = Table.FAMILIES[message[HEADER.size]], bool(flags & NLM_F_CREATE)
    if kind == nfnetlink.NEW_TABLE:
        transaction.add_table(family, _text(parts[1]), _text(parts[6][2:]), dormant=False)
        return
    table = transaction.table(family, _text(parts[1]))
    match kind:
        case nfnetlink.DELETE_TABLE:
            transaction.delete_table(table)
        case nfnetlink.NEW_OBJECT if creating:
            transaction.add_counter(table, _text(parts[2]))
        case nfnetlink.DELETE_OBJECT:
            transaction.delete_counter(table, _text(parts[2]))
        case nfnetlink.DELETE_SET:
            transaction.delete_set(table, table.set(_text(parts[2])))
        case nfnetlink.NEW_SET if creating:
            _add_set(transaction, table, parts)
        case nfnetlink.NEW_ELEMENT if creating and _text(parts[2]).startswith("__"):
            _fill(transaction, parts)
        case nfnetlink.NEW_ELEMENT if creating:
            target = table.set(_text(parts[2]))
            if target.auto_merge:
                transaction.merge(target, _ranges(target, parts[3]))
                return
            for key, element in _elements(target, parts[3]):
                transaction.add_element(table, target, key, element)
        case nfnetlink.DELETE_ELEMENT if 3 not in parts:
            transaction.flush_set(table.set(_text(parts[2])))
        case nfnetlink.DELETE_ELEMENT:
            target = table.set(_text(parts[2]))
            for key, _ in _elements(target, parts[3]):
                transaction.delete_element(target, key)
        case nfnetlink.NEW_CHAIN if creating:
            if flags & NLM_F_EXCL and _text(parts[3]) in table.chains:
                raise RefusedError(errno.EEXIST, f"chain {_text(parts[3])} exists")
            transaction.add_chain(table, _text(parts[3]), _hook(parts))
        case nfnetlink.DELETE_CHAIN:
            transaction.delete_chain(table, table.chain(_text(parts[3])))
        case nfnetlink.DELETE_RULE if 3 not in parts:  # a deletion without a handle: of all rules of the chain
            transaction.flush_chain(table.chain(_text(parts[2])))
        case _:
            raise UnsupportedError(f"message {kind:#x} with flags {flags:#x}")


def _append(message: bytes, transaction: Transaction) -> None:
    family, name, chain, rule, words = _rule(message)
    table = transaction.table(family, name)
    if not words:
        words = _printed(tuple(_whole(each, transaction) for each in rule), family)
    transaction.add_rule(table, table.chain(chain), words)


@lru_cache(maxsize=16384)
def _rule(message: bytes) -> tuple[str, str, str, x.Rule, str]:
    """Return the table's family and name, the chain, the rule, and its text unless the rule has an anonymous set."""
    family, parts = Table.FAMILIES[message[HEADER.size]], _parts(message[HEADER.size + _GENERIC_SIZE :])
    rule = _parse(parts[4])
    words = "" if any(isinstance(each, x.Lookup) and each.set in _INLINE for each in rule) else _printed(rule, family)
    return family, _text(parts[1]), _text(parts[2]), rule, words


@lru_cache(maxsize=16384)
def _parts(data: bytes) -> Parts:
    return {kind: data[start:end] for kind, start, end in attributes(data, 0, len(data))}


def _text(value: bytes) -> str:
    assert value.endswith(b"\0")
    return value[:-1].decode()


def _elements(target: Set, data: bytes) -> Iterator[tuple[bytes, Element]]:
    for _, start, end in attributes(data, 0, len(data)):
        parts = _parts(data[start:end])
        keys = (_parts(parts[number])[1] for number in (1, 10) if number in parts)
        key = b"".join(key.ljust(target.key.size, b"\0") for key in keys)
        if target.interval and 10 not in parts:
            raise RefusedError(errno.EINVAL, f"an element of {target.name} has no end")
        until = int.from_bytes(parts[5], "big") if 5 in parts else None
        value = _value(_parts(parts[2])) if 2 in parts else b""
        yield key, Element(value, int.from_bytes(parts.get(4, b""), "big"), until)


def _value(parts: Parts) -> bytes:
    if 1 in parts:
        return parts[1]
    verdict = _parts(parts[2])
    assert verdict[1] == _GOTO, "our verdicts are to go to a chain"
    return _text(verdict[2]).encode()


# -- sets ----------------------------------------------------------------------------------------------------------


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")


def _add_set(transaction: Transaction, table: Table, parts: Parts) -> None:
    """Create a set, or begin an anonymous set of a rule."""
    name, flags = _text(parts[2]), _number(parts[3])
    if name.startswith("__"):
        inline = x.Inline(_number(parts[4]), _number(parts[5]), _number(parts.get(6, b"")), frozenset())
        transaction.add_inline(_number(parts[10]), inline)
        return
    data = _number(parts.get(6, b""))
    new = Set(name, _type(_number(parts[4])), verdicts=data == VERDICTS)
    new.value = _type(data) if data and not new.verdicts else None
    new.interval, new.dynamic = bool(flags & tables.INTERVAL), bool(flags & tables.DYNAMIC)
    new.timeout = _number(parts.get(11, b"")) if flags & tables.TIMEOUT else None
    new.size = _number(_parts(parts[9])[1]) if 9 in parts and 1 in _parts(parts[9]) else None
    new.auto_merge = b"\2\4\1\0\0\0" in parts[13]
    new.counted = 17 in parts
    transaction.add_set(table, new)


def _type(number: int) -> Type:
    fields: list[str] = []
    while number:
        fields.insert(0, TYPES[number & 63])
        number >>= 6
    return Type(tuple(fields))


def _ranges(target: Set, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield first and last values: an element with the end flag is the value after the last one of a range."""
    first = None
    for _, start, end in attributes(data, 0, len(data)):
        parts = _parts(data[start:end])
        key = _parts(parts[1])[1]
        if 3 in parts and first is not None:
            yield first, (int.from_bytes(key, "big") - 1).to_bytes(len(key), "big")
        first = None if 3 in parts else key
    if first is not None:
        yield first, b"\xff" * target.key.size


_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")


def _hook(parts: Parts) -> str:
    if 4 not in parts:
        return ""
    hook = _parts(parts[4])
    priority = int.from_bytes(hook[2], "big", signed=True)
    policy = "" if _number(parts[5]) else " policy drop ;"
    return f"type {_text(parts[7])} hook {_HOOKS[_number(hook[1])]} priority {priority} ;{policy}"


def hook_of(text: str) -> tables.Hook | None:
    """Return a base chain's hook from nft's words."""
    found = re.match(r"type (\w+) hook (\w+) priority (-?\d+)", text)
    return found and tables.Hook(found[1], _HOOKS.index(found[2]), int(found[3]), "drop" in text)


def _fill(transaction: Transaction, parts: Parts) -> None:
    number = _number(parts[4])
    elements: set[tuple[bytes, bytes | x.RuleVerdict]] = set()
    for _, start, end in attributes(parts[3], 0, len(parts[3])):
        body = _parts(parts[3][start:end])
        key = x.parse_value(body[1])
        assert isinstance(key, bytes), "a key is no verdict"
        elements.add((key, x.parse_value(body[2]) if 2 in body else b""))
    transaction.inline[number] = transaction.inline[number]._replace(elements=frozenset(elements))


def _whole(expression: x.Expression, transaction: Transaction) -> x.Expression:
    """Return a lookup with its anonymous set: the oldest one without a rule."""
    if isinstance(expression, x.Lookup) and expression.set in _INLINE:
        return replace(expression, set=transaction.inline.pop(min(transaction.inline)))
    return expression
