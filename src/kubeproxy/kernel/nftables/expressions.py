"""The expressions of nf_tables' rules as values, with functions that pack and parse their netlink attributes. An
expression of an unknown kind is stored as bytes (Opaque). Registers have the numbers that the kernel uses in dumps:
registers 1 to 4 have 16 bytes, 8 to 23 have 4 bytes, and 0 is the verdict register. Sources:
include/uapi/linux/netfilter/nf_tables.h and the dump functions of net/netfilter/nft_*.c of Linux 6.18."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

from msgspec import Struct

from kubeproxy.kernel.netlink.protocol import attribute, attributes, nested, parts, text_attribute, text_of
from kubeproxy.kernel.nftables import nfta

VERDICT: Final = 0

DROP, ACCEPT, CONTINUE, JUMP, GOTO, RETURN = 0, 1, -1, -3, -4, -5
VERDICTS: Final = {"drop": DROP, "accept": ACCEPT, "continue": CONTINUE, "jump": JUMP, "goto": GOTO, "return": RETURN}
"""The codes of verdicts by their names in nft."""


class RuleVerdict(NamedTuple):
    """The verdict of a rule: DROP, ACCEPT, RETURN, or JUMP or GOTO with a chain."""

    code: int
    chain: str = ""


class Inline(NamedTuple):
    """An anonymous set or map, which is part of one rule. The types and lengths are as in `tables.SetForm`. `elements`
    are pairs of key and data; the data in a set is b''."""

    key_type: int
    key_length: int
    data_type: int
    elements: frozenset[tuple[bytes, bytes | RuleVerdict]]


class Codec(NamedTuple):
    """Functions that convert a field's value to an attribute's payload, and a payload to a value."""

    pack: Callable[[Any], bytes]
    parse: Callable[[bytes], Any]


def _whole(size: int) -> Codec:
    return Codec(lambda value: value.to_bytes(size, "big"), lambda data: int.from_bytes(data, "big"))


def pack_value(value: bytes | RuleVerdict) -> bytes:
    """Pack a value or a verdict into an attribute."""
    if isinstance(value, bytes):
        return attribute(nfta.DATA_VALUE, value)
    code = attribute(nfta.VERDICT_CODE, value.code.to_bytes(4, "big", signed=True))
    chain = text_attribute(nfta.VERDICT_CHAIN, value.chain) if value.chain else b""
    return nested(nfta.DATA_VERDICT, code, chain)


def parse_value(data: bytes) -> bytes | RuleVerdict:
    """Return the value or the verdict in the payload of an attribute."""
    for kind, start, end in attributes(data, 0, len(data)):
        if kind == nfta.DATA_VALUE:
            return data[start:end]
        found = parts(data, start, end)
        code = int.from_bytes(found[nfta.VERDICT_CODE], "big", signed=True)
        return RuleVerdict(code, text_of(found.get(nfta.VERDICT_CHAIN, b"")))
    return b""


_VALUE: Final = Codec(pack_value, parse_value)
_CODECS: Final = {
    "": _whole(4),
    "u8": _whole(1),
    "u64": _whole(8),
    "text": Codec(lambda text: text.encode(errors="surrogateescape") + b"\0", text_of),
    "value": _VALUE,
}


def _layout(text: str) -> tuple[tuple[str, int, Codec], ...]:
    """Return name, number and codec of each attribute. `text` lists the names of the attributes 1, 2, ... A name is
    followed by `:` and a codec, unless the attribute is a 32-bit number. `-` stands for an attribute that is not used.
    """
    words = [word.partition(":") for word in text.split()]
    return tuple((name, number, _CODECS[codec]) for number, (name, _, codec) in enumerate(words, 1) if name != "-")


class Expression(Struct, frozen=True):
    """An expression. The message omits a field with its default value."""

    KIND: ClassVar[str] = ""
    LAYOUT: ClassVar[tuple[tuple[str, int, Codec], ...]] = ()


class Payload(Expression, frozen=True):
    """Loads bytes of a packet's header into `dreg`, or writes them from `sreg`."""

    KIND = "payload"
    LAYOUT = _layout("dreg base offset length sreg checksum checksum_offset checksum_flags")
    base: int
    offset: int
    length: int
    dreg: int | None = None
    sreg: int | None = None
    checksum: int = 0
    checksum_offset: int = 0
    checksum_flags: int = 0


class Meta(Expression, frozen=True):
    """Loads metadata of the packet, or sets it."""

    KIND = "meta"
    LAYOUT = _layout("dreg key sreg")
    key: int
    dreg: int | None = None
    sreg: int | None = None


class Ct(Expression, frozen=True):
    """Loads a property of the packet's connection from connection tracking, or sets it."""

    KIND = "ct"
    LAYOUT = _layout("dreg key direction:u8 sreg")
    key: int
    dreg: int | None = None
    direction: int | None = None
    sreg: int | None = None


class Fib(Expression, frozen=True):
    """Looks up an address of the packet in the routing tables."""

    KIND = "fib"
    LAYOUT = _layout("dreg result flags")
    dreg: int
    result: int
    flags: int


class Lookup(Expression, frozen=True):
    """Looks up a key in a set, or looks up a key in a map and loads the data into `dreg` (VERDICT: a verdict map). The
    transaction that creates an anonymous set refers to the set by `set_id`."""

    KIND = "lookup"
    LAYOUT = _layout("set:text sreg dreg set_id flags")
    set: str | Inline
    sreg: int
    dreg: int | None = None
    flags: int = 0
    set_id: int | None = None


class Compare(Expression, frozen=True):
    """Ends the rule unless the comparison of a register with a value is true. `op` is an index into OPERATORS."""

    KIND = "cmp"
    LAYOUT = _layout("sreg op value:value")
    sreg: int
    op: int
    value: bytes


OPERATORS: Final = ("==", "!=", "<", "<=", ">", ">=")


class Range(Expression, frozen=True):
    """Ends the rule unless a register's value is inside a range (`op` 0) or outside of it (`op` 1)."""

    KIND = "range"
    LAYOUT = _layout("sreg op first:value last:value")
    sreg: int
    op: int
    first: bytes
    last: bytes


class Bitwise(Expression, frozen=True):
    """Computes (sreg & mask) ^ xor."""

    KIND = "bitwise"
    LAYOUT = _layout("sreg dreg length mask:value xor:value op data:value sreg2")
    sreg: int
    dreg: int
    length: int
    mask: bytes = b""
    xor: bytes = b""
    op: int = 0
    data: bytes = b""
    sreg2: int | None = None


class Byteorder(Expression, frozen=True):
    """Reverses the byte order of the numbers in a register."""

    KIND = "byteorder"
    LAYOUT = _layout("sreg dreg op length size")
    sreg: int
    dreg: int
    op: int
    length: int
    size: int


class Immediate(Expression, frozen=True):
    """Loads a value into a register, or ends the rule with a verdict (`dreg` VERDICT)."""

    KIND = "immediate"
    LAYOUT = _layout("dreg value:value")
    dreg: int
    value: bytes | RuleVerdict


class Numgen(Expression, frozen=True):
    """Loads `offset` plus a number below `modulus`: an incremented (`type` 0) or a random number (`type` 1)."""

    KIND = "numgen"
    LAYOUT = _layout("dreg modulus type offset")
    dreg: int
    modulus: int
    type: int
    offset: int = 0


class Hash(Expression, frozen=True):
    """Loads a hash below `modulus`: jhash of registers (`type` 0) or symhash (`type` 1)."""

    KIND = "hash"
    LAYOUT = _layout("sreg dreg length modulus seed offset type")
    dreg: int
    modulus: int
    sreg: int | None = None
    length: int = 0
    seed: int | None = None
    offset: int = 0
    type: int = 0


class Nat(Expression, frozen=True):
    """Translates the connection's source (`type` 0) or destination (`type` 1)."""

    KIND = "nat"
    LAYOUT = _layout("type family address address_last port port_last flags")
    type: int
    family: int
    address: int | None = None
    address_last: int | None = None
    port: int | None = None
    port_last: int | None = None
    flags: int = 0

    @property
    def is_range(self) -> bool:
        """Whether the kernel picks one of several addresses or ports."""
        return self.address_last not in {None, self.address} or self.port_last not in {None, self.port}


class Masquerade(Expression, frozen=True):
    """Translates the connection's source to an address of the outgoing interface."""

    KIND = "masq"
    LAYOUT = _layout("flags port port_last")
    flags: int = 0
    port: int | None = None
    port_last: int | None = None


class Redirect(Expression, frozen=True):
    """Translates the connection's destination to the address of the incoming interface."""

    KIND = "redir"
    LAYOUT = _layout("port port_last flags")
    port: int | None = None
    port_last: int | None = None
    flags: int = 0

    @property
    def is_range(self) -> bool:
        """Whether the kernel picks one of several ports."""
        return self.port_last not in {None, self.port}


class Reject(Expression, frozen=True):
    """Drops the packet and sends ICMP unreachable (`type` 0) or a TCP reset (`type` 1)."""

    KIND = "reject"
    LAYOUT = _layout("type code:u8")
    type: int
    code: int = 0


class PacketCount(Expression, frozen=True):
    """Counts packets and bytes. Two expressions are equal even if their counts differ."""

    KIND = "counter"


class TableObject(Expression, frozen=True):
    """Uses a named object of the table: a counter (`type` 1), a quota (2), a limit (4) or another kind."""

    KIND = "objref"
    LAYOUT = _layout("type name:text sreg set:text")
    type: int = 0
    name: str = ""
    sreg: int | None = None
    set: str = ""


class Offload(Expression, frozen=True):
    """Adds the connection to a flowtable."""

    KIND = "flow_offload"
    LAYOUT = _layout("flowtable:text")
    flowtable: str


class Limit(Expression, frozen=True):
    """Ends the rule if there are more than `rate` packets (`type` 0) or bytes (`type` 1) per `unit` seconds. With
    `flags` 1, ends the rule in the opposite case."""

    KIND = "limit"
    LAYOUT = _layout("rate:u64 unit:u64 burst type flags")
    rate: int
    unit: int
    burst: int = 0
    type: int = 0
    flags: int = 0


class Update(Expression, frozen=True):
    """Adds (`op` 0), refreshes (1) or deletes (2) a key in a set. `timeout` is in ms; 0 means the set's timeout."""

    KIND = "dynset"
    LAYOUT = _layout("set:text - op key data timeout:u64 - - flags")
    set: str
    op: int
    key: int
    data: int | None = None
    timeout: int = 0
    flags: int = 0


class Opaque(Expression, frozen=True):
    """An expression of a kind without a class in this module: the kind's name and the packed attributes."""

    name: str
    raw: bytes


Rule = tuple[Expression, ...]

KINDS: Final = {kind.KIND: kind for kind in Expression.__subclasses__() if kind.KIND}


@lru_cache(maxsize=4096)
def pack(expression: Expression) -> bytes:
    """Pack an expression as an entry of a rule's list. A lookup in an anonymous set needs the set's name and number."""
    if isinstance(expression, Opaque):
        name, body = expression.name, expression.raw
    else:
        name, body = expression.KIND, b"".join(_packed(expression))
    return nested(nfta.LIST_ELEM, text_attribute(nfta.EXPR_NAME, name), nested(nfta.EXPR_DATA, body))


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


def parse(data: bytes) -> Rule:
    """Parse a list of expressions into a rule. Anonymous sets are represented by the names that the kernel assigned."""
    return tuple([_parsed(data[first:last]) for _, first, last in attributes(data, 0, len(data))])


@lru_cache(maxsize=4096)
def _parsed(element: bytes) -> Expression:
    one = parts(element)
    name, body = text_of(one[nfta.EXPR_NAME]), one.get(nfta.EXPR_DATA, b"")
    kind = KINDS.get(name)
    if kind is None:
        return Opaque(name, body)
    present = parts(body)
    values = {field: codec.parse(present.pop(number)) for field, number, codec in kind.LAYOUT if number in present}
    # An unknown attribute may change the rule's meaning; padding and counts never change the meaning.
    if any(number not in _IGNORED.get(name, ()) for number in present):
        return Opaque(name, body)
    try:
        return kind(**values)
    except TypeError:  # an attribute is missing
        return Opaque(name, body)


_IGNORED: Final = {"counter": (1, 2, 3), "dynset": (8,), "limit": (6,)}


def names_of(rule: Rule) -> set[str]:
    """Return the names of the sets and chains to which a rule refers."""
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
