"""Messages that make chains, rules and sets of nf_tables, of values. Without sequence numbers, as nfnetlink has them.

A set notes what its keys are made of in user data, in nft's own form, so that nft lists it as it was declared. Sources:
src/mnl.c and include/netlink.h of nft 1.0.6, include/udata.h of libnftnl 1.2.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import HEADER, NLM_F_CREATE, NLM_F_REQUEST, attribute, nested
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.fields import FIELDS, INTEGER, MARK, PROTOCOL, Field, padded
from kubeproxy.kernel.nftables.nfnetlink import (
    GENERIC,
    NEW_ELEMENT,
    NEW_SET,
    element_messages,
    rule_message,
    text_attribute,
)

ANONYMOUS, CONSTANT, MAP, TIMEOUT, DYNAMIC = 1, 2, 8, 16, 32
"""Flags of sets (NFT_SET_...)."""
_NUMBERS: Final = count(1)
_HOST_ENDIAN, _BIG_ENDIAN = 1, 2  # enum byteorder of nft
_CONCATENATION: Final = 13  # EXPR_CONCAT of nft
_BITS: Final = 6  # of each type in that of a concatenation


class SetSpec(NamedTuple):
    """A set or map: what its keys are made of (names of fields.FIELDS), flags, its size (0: any), its timeout in ms."""

    name: str
    key: tuple[str, ...]
    flags: int = 0
    size: int = 0
    timeout: int = 0


def made_set(family: int, table: str, spec: SetSpec) -> bytes:
    """Return the message that makes a set."""
    fields = [FIELDS[name] for name in spec.key]
    kind = 0
    for field in fields:
        kind = kind << _BITS | field.type
    length = sum(padded(field.size) for field in fields) if len(fields) > 1 else fields[0].size
    parts = [_number(nfta.SET_FLAGS, spec.flags), _number(nfta.SET_KEY_TYPE, kind)]
    parts.append(_number(nfta.SET_KEY_LENGTH, length))
    if spec.size:
        parts.append(nested(nfta.SET_DESC, _number(nfta.SET_DESC_SIZE, spec.size)))
    if spec.timeout:
        parts.append(attribute(nfta.SET_TIMEOUT, spec.timeout.to_bytes(8, "big")))
    order = 0 if len(fields) > 1 else _order(fields[0].type)
    notes = _note(0, order.to_bytes(4, "little")) + _note(3, _typeof(fields))
    parts.append(attribute(nfta.SET_USERDATA, notes))
    return _set(family, table, spec.name, next(_NUMBERS) & 0x7FFFFFFF, parts)


def _set(family: int, table: str, name: str, number: int, parts: Sequence[bytes]) -> bytes:
    names = text_attribute(nfta.SET_TABLE, table) + text_attribute(nfta.SET_NAME, name)
    payload = GENERIC.pack(family, 0, 0) + names + _number(nfta.SET_ID, number) + b"".join(parts)
    return HEADER.pack(HEADER.size + len(payload), NEW_SET, NLM_F_REQUEST | NLM_F_CREATE, 0, 0) + payload


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, value.to_bytes(4, "big"))


def _order(kind: int) -> int:
    return _HOST_ENDIAN if kind in {INTEGER, MARK, PROTOCOL} else _BIG_ENDIAN


def _note(kind: int, value: bytes) -> bytes:
    """Return an entry of user data: type, length, value."""
    return bytes((kind, len(value))) + value


def _typeof(fields: Sequence[Field]) -> bytes:
    if len(fields) == 1:
        return _expression(*fields[0].typeof)
    inner = b"".join(_note(at, _expression(*field.typeof)) for at, field in enumerate(fields))
    return _note(0, _CONCATENATION.to_bytes(4, "little")) + _note(1, inner)


def _expression(kind: int, attributes: Sequence[int]) -> bytes:
    values = b"".join(_note(at, value.to_bytes(4, "little")) for at, value in enumerate(attributes))
    return _note(0, kind.to_bytes(4, "little")) + _note(1, values)


def appended(family: int, table: str, chain: str, rule: x.Rule) -> Iterator[bytes]:
    """Yield the messages that append a rule, with the sets that belong to it."""
    packed = []
    for expression in rule:
        if isinstance(expression, x.Lookup) and isinstance(expression.set, x.Inline):
            number = next(_NUMBERS) & 0x7FFFFFFF
            name = "__map%d" if expression.set.data_type else "__set%d"
            yield from _inline(family, table, name, number, expression.set)
            packed.append(x.pack_lookup(expression, name, number))
        else:
            packed.append(x.pack(expression))
    yield rule_message(family, table, chain, b"".join(packed))


def _inline(family: int, table: str, name: str, number: int, inline: x.Inline) -> Iterator[bytes]:
    flags = ANONYMOUS | CONSTANT | (MAP if inline.data_type else 0)
    parts = [
        _number(nfta.SET_FLAGS, flags),
        _number(nfta.SET_KEY_TYPE, inline.key_type),
        _number(nfta.SET_KEY_LENGTH, inline.key_length),
    ]
    if inline.data_type:
        parts.append(_number(nfta.SET_DATA_TYPE, inline.data_type))
    parts.append(nested(nfta.SET_DESC, _number(nfta.SET_DESC_SIZE, len(inline.elements))))
    parts.append(attribute(nfta.SET_USERDATA, _note(0, _order(inline.key_type).to_bytes(4, "little"))))
    yield _set(family, table, name, number, parts)
    elements = [_element(key[: inline.key_length], data) for key, data in sorted(inline.elements)]
    yield from element_messages(NEW_ELEMENT, family, table, name, elements, set_id=number)


def _element(key: bytes, data: bytes | x.RuleVerdict) -> bytes:
    value = nested(nfta.SET_ELEM_DATA, x.pack_value(data)) if data else b""
    return nested(nfta.LIST_ELEM, nested(nfta.SET_ELEM_KEY, x.pack_value(key)), value)
