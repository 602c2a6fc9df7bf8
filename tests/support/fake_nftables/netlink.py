"""Netlink messages as the backend packs them, read into the steps of a transaction.

Attribute numbers are those of include/uapi/linux/netfilter/nf_tables.h. What the backend never sends is not known here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import cache

from kubeproxy.kernel import nfnetlink
from kubeproxy.kernel.netlink import HEADER, attribute, attributes, nested
from support.fake_nftables.objects import Element, RefusedError, Set, Table
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
            transaction.add_rule(table, table.chain(_text(parts[2])), rule_text(parts[4]))
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


# -- rules ---------------------------------------------------------------------------------------------------------
# The kernel has expressions where nft has words. Here the words between two numgens are one expression, and each numgen
# is as in the kernel, for that is what the backend reads and changes when it clones a rule.

_NUMGEN = "numgen random mod "


@cache
def expressions(text: str) -> tuple[tuple[object, ...], bytes]:
    """Return a rule as expressions, names with their attributes, and those as the kernel sends them."""
    head, *rest = text.split(_NUMGEN)
    listed = [_expression("words", {1: head.encode()})]
    for part in rest:
        modulus, _, words = part.partition(" ")
        offset = "0"
        if words.startswith("offset "):
            _, offset, words = words.split(" ", 2)
        numbers = {1: 1, 2: int(modulus), 3: 1, 4: int(offset)}  # register, modulus, random, offset
        listed.append(_expression("numgen", {kind: number.to_bytes(4, "big") for kind, number in numbers.items()}))
        listed.append(_expression("words", {1: words.encode()}))
    return tuple(shown for shown, _ in listed), b"".join(packed for _, packed in listed)


def _expression(name: str, body: Parts) -> tuple[object, bytes]:
    values = nested(2, *(attribute(kind, value) for kind, value in body.items()))
    return (name, tuple(body.items())), nested(1, attribute(1, name.encode() + b"\0"), values)


def rule_text(data: bytes) -> str:
    """Return the rule that packed expressions are."""
    text = ""
    for _, start, end in attributes(data, 0, len(data)):
        parts = _parts(data[start:end])
        body = _parts(parts[2])
        if parts[1] == b"numgen\0":
            modulus, offset = int.from_bytes(body[2], "big"), int.from_bytes(body[4], "big")
            text += f"{_NUMGEN}{modulus} offset {offset} " if offset else f"{_NUMGEN}{modulus} "
        else:
            text += body[1].decode()
    return text
