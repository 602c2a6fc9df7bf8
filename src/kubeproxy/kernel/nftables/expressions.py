"""The expressions of nf_tables' rules: values that are packed into netlink attributes, and parsed back.

An expression of another kind is kept as bytes (Opaque). Registers have the numbers that the kernel lists: 1 to 4 have
16 bytes, 8 to 23 have 4 bytes; 0 is the verdict's. Sources: include/uapi/linux/netfilter/nf_tables.h and the dump
functions of net/netfilter/nft_*.c of Linux 6.18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

from msgspec import Struct

from kubeproxy.kernel.netlink.protocol import attribute, attributes, nested
from kubeproxy.kernel.nftables import nfta

VERDICT: Final = 0
"""The register of verdicts."""

DROP: Final = 0
ACCEPT: Final = 1
CONTINUE: Final = -1
JUMP: Final = -3
GOTO: Final = -4
RETURN: Final = -5


class RuleVerdict(NamedTuple):
    """The end of a rule: DROP, ACCEPT, RETURN, or JUMP or GOTO with a chain."""

    code: int
    chain: str = ""


class Inline(NamedTuple):
    """A set or map without a name, which belongs to one rule: types and lengths as `sets.SetSpec` has them.

    `elements` are pairs of key and data; the data of a set's element is b''.
    """

    key_type: int
    key_length: int
    data_type: int
    elements: frozenset[tuple[bytes, bytes | RuleVerdict]]


class Codec(NamedTuple):
    """How a field's value becomes an attribute's payload and is read from it."""

    pack: Callable[[Any], bytes]
    parse: Callable[[bytes], Any]


def _whole(size: int) -> Codec:
    return Codec(lambda value: value.to_bytes(size, "big"), lambda data: int.from_bytes(data, "big"))


def pack_value(value: bytes | RuleVerdict) -> bytes:
    """Return the attribute of a value or of a verdict."""
    if isinstance(value, bytes):
        return attribute(nfta.DATA_VALUE, value)
    code = attribute(nfta.VERDICT_CODE, value.code.to_bytes(4, "big", signed=True))
    chain = attribute(nfta.VERDICT_CHAIN, value.chain.encode(errors=nfta.NOT_TEXT) + b"\0") if value.chain else b""
    return nested(nfta.DATA_VERDICT, code, chain)


def parse_value(data: bytes) -> bytes | RuleVerdict:
    """Return a value or a verdict from the payload of what holds it."""
    for kind, start, end in attributes(data, 0, len(data)):
        if kind == nfta.DATA_VALUE:
            return data[start:end]
        found = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
        code = int.from_bytes(found[nfta.VERDICT_CODE], "big", signed=True)
        return RuleVerdict(code, found.get(nfta.VERDICT_CHAIN, b"").rstrip(b"\0").decode(errors=nfta.NOT_TEXT))
    return b""


_U8, _U32, _U64 = _whole(1), _whole(4), _whole(8)
_TEXT: Final = Codec(
    lambda text: text.encode(errors=nfta.NOT_TEXT) + b"\0", lambda data: data.rstrip(b"\0").decode(errors=nfta.NOT_TEXT)
)
_VALUE: Final = Codec(pack_value, parse_value)


class Expression(Struct, frozen=True):
    """An expression. A field with a default is left out of the message when it has that value."""

    KIND: ClassVar[str] = ""
    LAYOUT: ClassVar[tuple[tuple[str, int, Codec], ...]] = ()


class Payload(Expression, frozen=True):
    """Loads bytes of a packet's header (`dreg`), or writes them (`sreg`)."""

    KIND = "payload"
    LAYOUT = (
        ("dreg", 1, _U32),
        ("base", 2, _U32),
        ("offset", 3, _U32),
        ("length", 4, _U32),
        ("sreg", 5, _U32),
        ("checksum", 6, _U32),
        ("checksum_offset", 7, _U32),
        ("checksum_flags", 8, _U32),
    )
    base: int
    offset: int
    length: int
    dreg: int | None = None
    sreg: int | None = None
    checksum: int = 0
    checksum_offset: int = 0
    checksum_flags: int = 0


class Meta(Expression, frozen=True):
    """Loads a property of the packet beside its bytes, or sets it."""

    KIND = "meta"
    LAYOUT = (("dreg", 1, _U32), ("key", 2, _U32), ("sreg", 3, _U32))
    key: int
    dreg: int | None = None
    sreg: int | None = None


class Ct(Expression, frozen=True):
    """Loads what connection tracking has of the packet's connection, or sets it."""

    KIND = "ct"
    LAYOUT = (("dreg", 1, _U32), ("key", 2, _U32), ("direction", 3, _U8), ("sreg", 4, _U32))
    key: int
    dreg: int | None = None
    direction: int | None = None
    sreg: int | None = None


class Fib(Expression, frozen=True):
    """Looks an address of the packet up in the routing tables."""

    KIND = "fib"
    LAYOUT = (("dreg", 1, _U32), ("result", 2, _U32), ("flags", 3, _U32))
    dreg: int
    result: int
    flags: int


class Lookup(Expression, frozen=True):
    """Looks a key up in a set; with `dreg` in a map, whose data it loads: VERDICT for a map to verdicts."""

    KIND = "lookup"
    LAYOUT = (("set", 1, _TEXT), ("sreg", 2, _U32), ("dreg", 3, _U32), ("flags", 5, _U32))
    set: str | Inline
    sreg: int
    dreg: int | None = None
    flags: int = 0


class Compare(Expression, frozen=True):
    """Breaks the rule unless a register compares with a value: `op` is an index of OPERATORS."""

    KIND = "cmp"
    LAYOUT = (("sreg", 1, _U32), ("op", 2, _U32), ("value", 3, _VALUE))
    sreg: int
    op: int
    value: bytes


OPERATORS: Final = ("==", "!=", "<", "<=", ">", ">=")


class Range(Expression, frozen=True):
    """Breaks the rule unless a register is, or is not, in a range."""

    KIND = "range"
    LAYOUT = (("sreg", 1, _U32), ("op", 2, _U32), ("first", 3, _VALUE), ("last", 4, _VALUE))
    sreg: int
    op: int
    first: bytes
    last: bytes


class Bitwise(Expression, frozen=True):
    """Changes bits of a register: (sreg & mask) ^ xor."""

    KIND = "bitwise"
    LAYOUT = (
        ("sreg", 1, _U32),
        ("dreg", 2, _U32),
        ("length", 3, _U32),
        ("mask", 4, _VALUE),
        ("xor", 5, _VALUE),
        ("op", 6, _U32),
        ("data", 7, _VALUE),
        ("sreg2", 8, _U32),
    )
    sreg: int
    dreg: int
    length: int
    mask: bytes = b""
    xor: bytes = b""
    op: int = 0
    data: bytes = b""
    sreg2: int | None = None


class Byteorder(Expression, frozen=True):
    """Turns the bytes of numbers in a register around."""

    KIND = "byteorder"
    LAYOUT = (("sreg", 1, _U32), ("dreg", 2, _U32), ("op", 3, _U32), ("length", 4, _U32), ("size", 5, _U32))
    sreg: int
    dreg: int
    op: int
    length: int
    size: int


class Immediate(Expression, frozen=True):
    """Loads a value, or ends the rule with a verdict (`dreg` VERDICT)."""

    KIND = "immediate"
    LAYOUT = (("dreg", 1, _U32), ("value", 2, _VALUE))
    dreg: int
    value: bytes | RuleVerdict


class Numgen(Expression, frozen=True):
    """Loads a number: `offset` plus one below `modulus`, one after another (0) or at random (1)."""

    KIND = "numgen"
    LAYOUT = (("dreg", 1, _U32), ("modulus", 2, _U32), ("type", 3, _U32), ("offset", 4, _U32))
    dreg: int
    modulus: int
    type: int
    offset: int = 0


class Hash(Expression, frozen=True):
    """Loads the hash of registers, below a modulus: jhash (0) or symhash (1)."""

    KIND = "hash"
    LAYOUT = (
        ("sreg", 1, _U32),
        ("dreg", 2, _U32),
        ("length", 3, _U32),
        ("modulus", 4, _U32),
        ("seed", 5, _U32),
        ("offset", 6, _U32),
        ("type", 7, _U32),
    )
    dreg: int
    modulus: int
    sreg: int | None = None
    length: int = 0
    seed: int | None = None
    offset: int = 0
    type: int = 0


class Nat(Expression, frozen=True):
    """Translates the connection's source (0) or destination (1)."""

    KIND = "nat"
    LAYOUT = (
        ("type", 1, _U32),
        ("family", 2, _U32),
        ("address", 3, _U32),
        ("address_last", 4, _U32),
        ("port", 5, _U32),
        ("port_last", 6, _U32),
        ("flags", 7, _U32),
    )
    type: int
    family: int
    address: int | None = None
    address_last: int | None = None
    port: int | None = None
    port_last: int | None = None
    flags: int = 0


class Masquerade(Expression, frozen=True):
    """Translates the connection's source to an address of the interface that the packet leaves by."""

    KIND = "masq"
    LAYOUT = (("flags", 1, _U32), ("port", 2, _U32), ("port_last", 3, _U32))
    flags: int = 0
    port: int | None = None
    port_last: int | None = None


class Redirect(Expression, frozen=True):
    """Translates the connection's destination to the address of the interface that the packet came in by."""

    KIND = "redir"
    LAYOUT = (("port", 1, _U32), ("port_last", 2, _U32), ("flags", 3, _U32))
    port: int | None = None
    port_last: int | None = None
    flags: int = 0


class Reject(Expression, frozen=True):
    """Drops the packet and answers: ICMP unreachable (0), TCP reset (1)."""

    KIND = "reject"
    LAYOUT = (("type", 1, _U32), ("code", 2, _U8))
    type: int
    code: int = 0


class PacketCount(Expression, frozen=True):
    """Counts packets and bytes. What it has counted is no part of the value."""

    KIND = "counter"


class NamedObject(Expression, frozen=True):
    """Uses a named object of the table: counter (1), quota (2), limit (4) and others."""

    KIND = "objref"
    LAYOUT = (("type", 1, _U32), ("name", 2, _TEXT), ("sreg", 3, _U32), ("set", 4, _TEXT))
    type: int = 0
    name: str = ""
    sreg: int | None = None
    set: str = ""


class Offload(Expression, frozen=True):
    """Hands the connection over to a flowtable."""

    KIND = "flow_offload"
    LAYOUT = (("flowtable", 1, _TEXT),)
    flowtable: str


class Limit(Expression, frozen=True):
    """Breaks the rule above a rate: `rate` per `unit` seconds, of packets (0) or bytes (1); `flags` 1 inverts."""

    KIND = "limit"
    LAYOUT = (("rate", 1, _U64), ("unit", 2, _U64), ("burst", 3, _U32), ("type", 4, _U32), ("flags", 5, _U32))
    rate: int
    unit: int
    burst: int = 0
    type: int = 0
    flags: int = 0


class Update(Expression, frozen=True):
    """Adds a key to a set (0), refreshes it (1), or deletes it (2); `timeout` is in milliseconds, 0 for the set's."""

    KIND = "dynset"
    LAYOUT = (
        ("set", 1, _TEXT),
        ("op", 3, _U32),
        ("key", 4, _U32),
        ("data", 5, _U32),
        ("timeout", 6, _U64),
        ("flags", 9, _U32),
    )
    set: str
    op: int
    key: int
    data: int | None = None
    timeout: int = 0
    flags: int = 0


class Opaque(Expression, frozen=True):
    """An expression of a kind that is not described here: its name, and its attributes as the kernel sent them."""

    name: str
    raw: bytes


Rule = tuple[Expression, ...]

KINDS: Final[dict[str, type[Expression]]] = {
    kind.KIND: kind
    for kind in (
        Payload,
        Meta,
        Ct,
        Fib,
        Lookup,
        Compare,
        Range,
        Bitwise,
        Byteorder,
        Immediate,
        Numgen,
        Hash,
        Nat,
        Masquerade,
        Redirect,
        Reject,
        PacketCount,
        NamedObject,
        Offload,
        Limit,
        Update,
    )
}
_SET_ID: Final = 4  # NFTA_LOOKUP_SET_ID


@lru_cache(maxsize=4096)
def pack(expression: Expression) -> bytes:
    """Return an expression as an entry of a rule's list. It refers to no set without a name: see `pack_rule`."""
    if isinstance(expression, Opaque):
        name, body = expression.name, expression.raw
    else:
        name, body = expression.KIND, b"".join(_packed(expression))
    return nested(nfta.LIST_ELEM, attribute(nfta.EXPR_NAME, name.encode() + b"\0"), nested(nfta.EXPR_DATA, body))


def _packed(expression: Expression) -> Iterator[bytes]:
    defaults = _defaults(type(expression))
    for field, kind, codec in expression.LAYOUT:
        value = getattr(expression, field)
        if field not in defaults or value != defaults[field]:
            packed = codec.pack(value)
            yield nested(kind, packed) if codec is _VALUE else attribute(kind, packed)


@lru_cache(maxsize=64)
def _defaults(kind: type[Expression]) -> dict[str, Any]:
    fields, values = kind.__struct_fields__, kind.__struct_defaults__
    return dict(zip(fields[len(fields) - len(values) :], values, strict=True))


def pack_lookup(expression: Lookup, name: str, set_id: int) -> bytes:
    """Return a lookup in a set without a name, which the same transaction makes under a number."""
    named = Lookup(name, expression.sreg, expression.dreg, expression.flags)
    body = b"".join(_packed(named)) + attribute(_SET_ID, set_id.to_bytes(4, "big"))
    return nested(nfta.LIST_ELEM, attribute(nfta.EXPR_NAME, b"lookup\0"), nested(nfta.EXPR_DATA, body))


def parse(data: bytes) -> Rule:
    """Return a rule of the list that the kernel sends; a set without a name has the name that the kernel gave it."""
    found = []
    for _, first, last in attributes(data, 0, len(data)):
        parts = {kind: (s, e) for kind, s, e in attributes(data, first, last)}
        name = data[slice(*parts[nfta.EXPR_NAME])].rstrip(b"\0").decode()
        found.append(_parsed(name, data[slice(*parts.get(nfta.EXPR_DATA, (0, 0)))]))
    return tuple(found)


@lru_cache(maxsize=4096)
def _parsed(name: str, body: bytes) -> Expression:
    kind = KINDS.get(name)
    if kind is None:
        return Opaque(name, body)
    present = {number: body[s:e] for number, s, e in attributes(body, 0, len(body))}
    values = {field: codec.parse(present.pop(number)) for field, number, codec in kind.LAYOUT if number in present}
    # What is not described may mean anything; the kernel's padding, and what a counter has counted, mean nothing.
    if any(number not in _IGNORED.get(name, ()) for number in present) or not _required(kind) <= values.keys():
        return Opaque(name, body)
    return kind(**values)


_IGNORED: Final = {"counter": (1, 2, 3), "dynset": (8,), "limit": (6,), "lookup": (_SET_ID,)}


@lru_cache(maxsize=64)
def _required(kind: type[Expression]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__) - _defaults(kind).keys()


def names_of(rule: Rule) -> set[str]:
    """Return the names of the sets and chains that a rule refers to."""
    found = set()
    for each in rule:
        values: list[object] = []
        match each:
            case Lookup(set=Inline(elements=elements)):
                values += [data for _, data in elements]
            case Lookup(set=str(name)) | Update(set=name):
                found.add(name)
            case Immediate(value=value):
                values.append(value)
        found |= {value.chain for value in values if isinstance(value, RuleVerdict)}
    return found
