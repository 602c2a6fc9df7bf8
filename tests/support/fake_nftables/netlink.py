"""Netlink messages as the backend packs them, read into the steps of a transaction.

Attribute numbers are those of include/uapi/linux/netfilter/nf_tables.h. What the backend never sends is not known here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import cache

from msgspec.structs import replace

from kubeproxy.kernel.netlink.protocol import HEADER, attributes
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import listing, nfnetlink
from support.fake_nftables.objects import Element, RefusedError, Set, Table, Type
from support.fake_nftables.transaction import Transaction

_GENERIC_SIZE = 4  # struct nfgenmsg
_GOTO = (-4).to_bytes(4, "big", signed=True)

Parts = dict[int, bytes]


def execute(message: bytes, transaction: Transaction) -> None:
    """Do what one message says."""
    length, kind, flags, _, _ = HEADER.unpack_from(message)
    assert length == len(message), "a message says how long it is"
    parts = _parts(message[HEADER.size + _GENERIC_SIZE :])
    table = transaction.table(Table.FAMILIES[message[HEADER.size]], _text(parts[1]))
    creating = bool(flags & nfnetlink.NLM_F_CREATE)
    match kind:
        case nfnetlink.NEW_SET if creating:
            _add_set(transaction, table, parts)
        case nfnetlink.NEW_ELEMENT if creating and _text(parts[2]).startswith("__"):
            _fill(transaction, parts)
        case nfnetlink.NEW_ELEMENT if creating:
            target = table.set(_text(parts[2]))
            for key, element in _elements(target, parts[3]):
                transaction.add_element(table, target, key, element)
        case nfnetlink.DELETE_ELEMENT:
            target = table.set(_text(parts[2]))
            for key, _ in _elements(target, parts[3]):
                transaction.delete_element(target, key)
        case nfnetlink.NEW_CHAIN if creating:
            transaction.add_chain(table, _text(parts[3]), "")
        case nfnetlink.DELETE_CHAIN:
            transaction.delete_chain(table, table.chain(_text(parts[3])))
        case nfnetlink.NEW_RULE if creating and flags & nfnetlink.NLM_F_APPEND:
            rule = tuple(_whole(each, transaction) for each in x.parse(parts[4]))
            transaction.add_rule(table, table.chain(_text(parts[2])), listing.text(rule, table.family))
        case nfnetlink.DELETE_RULE if 3 not in parts:  # without a handle: all of the chain
            transaction.flush_chain(table.chain(_text(parts[2])))
        case _:
            raise NotImplementedError(f"message {kind:#x} with flags {flags:#x}")


def _parts(data: bytes) -> Parts:
    return {kind: data[start:end] for kind, start, end in attributes(data, 0, len(data))}


def _text(value: bytes) -> str:
    assert value.endswith(b"\0")
    return value[:-1].decode()


def _elements(target: Set, data: bytes) -> Iterator[tuple[bytes, Element]]:
    for _, start, end in attributes(data, 0, len(data)):
        parts = _parts(data[start:end])
        key = b"".join(_parts(parts[number])[1] for number in (1, 10) if number in parts)
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

_TYPES = {7: "ipv4_addr", 8: "ipv6_addr", 12: "inet_proto", 13: "inet_service", 4: "integer"}
_DYNAMIC = 32


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")


def _add_set(transaction: Transaction, table: Table, parts: Parts) -> None:
    """Make a set of clients, or begin one that belongs to a rule: no others come as messages."""
    name, flags, kind = _text(parts[2]), _number(parts[3]), _number(parts[4])
    if name.startswith("__"):
        transaction.inline[_number(parts[10])] = x.Inline(
            kind, _number(parts[5]), _number(parts.get(6, b"")), frozenset()
        )
        return
    fields = []
    while kind:
        fields.insert(0, _TYPES[kind & 63])
        kind >>= 6
    size = _number(_parts(parts[9])[1])
    timeout = _number(parts[11])
    transaction.add_set(
        table, Set(name, Type(tuple(fields)), dynamic=bool(flags & _DYNAMIC), timeout=timeout, size=size)
    )


def _fill(transaction: Transaction, parts: Parts) -> None:
    number = _number(parts[4])
    elements = set()
    for _, start, end in attributes(parts[3], 0, len(parts[3])):
        body = _parts(parts[3][start:end])
        elements.add((x.parse_value(body[1]), x.parse_value(body[2]) if 2 in body else b""))
    transaction.inline[number] = transaction.inline[number]._replace(elements=frozenset(elements))


def _whole(expression: x.Expression, transaction: Transaction) -> x.Expression:
    """Return a lookup with the set that belongs to it, which is the one that was begun first."""
    if isinstance(expression, x.Lookup) and expression.set in {"__map%d", "__set%d"}:
        return replace(expression, set=transaction.inline.pop(min(transaction.inline)))
    return expression


# -- rules ---------------------------------------------------------------------------------------------------------


@cache
def expressions(text: str) -> tuple[tuple[object, ...], bytes]:
    """Return a rule in a form to be compared, and what stands for the bytes that the kernel sends."""
    return (text,), text.encode()
