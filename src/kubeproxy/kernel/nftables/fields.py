"""The fields that rules match and that form the keys of sets. Each name in nft has an expression, a size and a type.
Sources: include/datatype.h, include/proto.h and src/{payload,meta,ct,numgen}.c of nft 1.0.6."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final, NamedTuple

from kubeproxy.kernel.nftables.expressions import Ct, Expression, Fib, Meta, Numgen, Payload
from kubeproxy.model.addresses import PROTOCOLS, pack, unpack

NETWORK, TRANSPORT = 1, 2
IPV4_ADDRESS, IPV6_ADDRESS, INTEGER, PROTOCOL, PORT, TCP_FLAGS, MARK, INTERFACE = 7, 8, 4, 12, 13, 15, 19, 41
_INDEX: Final = 20  # the type of an interface's index
VERDICTS: Final = 0xFFFFFF00
"""The data type of a map to verdicts."""
# Numbers of this module for types that never occur in the key of a set.
_STATE, _DIRECTION, _STATUS, _ADDRESS_TYPE, _NUMBER, _FAMILY = 1024, 1025, 1026, 1027, 1028, 1029

STATES: Final = {"invalid": 1, "established": 2, "related": 4, "new": 8, "untracked": 64}
STATUSES: Final = {"expected": 1, "seen-reply": 2, "assured": 4, "confirmed": 8, "snat": 16, "dnat": 32, "dying": 512}
_FLAGS: Final = {name: 1 << bit for bit, name in enumerate(("fin", "syn", "rst", "psh", "ack", "urg", "ecn", "cwr"))}
ADDRESS_TYPES: Final = {"unspec": 0, "unicast": 1, "local": 2, "broadcast": 3, "anycast": 4, "multicast": 5}
_DIRECTIONS: Final = {"original": 0, "reply": 1}


class Field(NamedTuple):
    """A field: the expression that loads it (without a register), the size in bytes, and the type. `typeof` describes
    the field (kind of expression, and attributes) in the user data that nft stores with a set."""

    load: Expression
    size: int
    type: int
    typeof: tuple[int, tuple[int, ...]] = (0, ())


_PAYLOAD_TYPEOF, _META_TYPEOF, _NUMGEN_TYPEOF = 7, 9, 23
_IP, _IP6, _TH = 12, 13, 11  # enum proto_desc_id


def _payload(base: int, offset: int, size: int, kind: int, *typeof: int) -> Field:
    return Field(Payload(base, offset, size), size, kind, (_PAYLOAD_TYPEOF, typeof))


FIELDS: Final[dict[str, Field]] = {
    "ip saddr": _payload(NETWORK, 12, 4, IPV4_ADDRESS, _IP, 11),
    "ip daddr": _payload(NETWORK, 16, 4, IPV4_ADDRESS, _IP, 12),
    "ip6 saddr": _payload(NETWORK, 8, 16, IPV6_ADDRESS, _IP6, 8),
    "ip6 daddr": _payload(NETWORK, 24, 16, IPV6_ADDRESS, _IP6, 9),
    "th sport": _payload(TRANSPORT, 0, 2, PORT, _TH, 1),
    "th dport": _payload(TRANSPORT, 2, 2, PORT, _TH, 2),
    "tcp flags": Field(Payload(TRANSPORT, 13, 1), 1, TCP_FLAGS),
    "meta l4proto": Field(Meta(16), 1, PROTOCOL, (_META_TYPEOF, (16,))),
    "meta nfproto": Field(Meta(15), 1, _FAMILY),
    "meta mark": Field(Meta(3), 4, MARK),
    "iif": Field(Meta(4), 4, _INDEX),
    "oif": Field(Meta(5), 4, _INDEX),
    "iifname": Field(Meta(6), 16, INTERFACE),
    "oifname": Field(Meta(7), 16, INTERFACE),
    "ct state": Field(Ct(0), 4, _STATE),
    "ct direction": Field(Ct(1), 1, _DIRECTION),
    "ct status": Field(Ct(2), 4, _STATUS),
    "fib saddr type": Field(Fib(0, 3, 1), 4, _ADDRESS_TYPE),
    "fib daddr type": Field(Fib(0, 3, 2), 4, _ADDRESS_TYPE),
    "numgen random mod 2": Field(Numgen(0, 2, 1), 4, INTEGER, (_NUMGEN_TYPEOF, (1, 2, 0))),
    **{
        name.format(direction): field
        for direction, number in _DIRECTIONS.items()
        for name, field in {
            "ct {} ip saddr": Field(Ct(19, direction=number), 4, IPV4_ADDRESS),
            "ct {} ip daddr": Field(Ct(20, direction=number), 4, IPV4_ADDRESS),
            "ct {} ip6 saddr": Field(Ct(21, direction=number), 16, IPV6_ADDRESS),
            "ct {} ip6 daddr": Field(Ct(22, direction=number), 16, IPV6_ADDRESS),
            "ct {} protocol": Field(Ct(10, direction=number), 1, PROTOCOL),
            "ct {} proto-src": Field(Ct(11, direction=number), 2, PORT),
            "ct {} proto-dst": Field(Ct(12, direction=number), 2, PORT),
            "ct {} packets": Field(Ct(14, direction=number), 8, _NUMBER),
        }.items()
    },
}

NAMES: Final[dict[Expression, str]] = {field.load: name for name, field in FIELDS.items() if "numgen" not in name}
"""The names of fields, by the expression that loads the field, without a register."""

_SYMBOLS: Final[dict[int, dict[str, int]]] = {
    PROTOCOL: {"icmp": 1, "ipv6-icmp": 58} | {name.lower(): number for name, number in PROTOCOLS.items()},
    _FAMILY: {"ipv4": 2, "ipv6": 10},
    _STATE: STATES,
    _STATUS: STATUSES,
    TCP_FLAGS: _FLAGS,
    _ADDRESS_TYPE: ADDRESS_TYPES,
    _DIRECTION: _DIRECTIONS,
}
_HOST_ORDER: Final = frozenset({MARK, INTEGER, _INDEX, _STATE, _STATUS, _ADDRESS_TYPE})


def packed(kind: int, size: int, word: str) -> bytes:
    """Return the bytes of a value of this type, as a register contains them. Raises ValueError."""
    if kind == INTERFACE:
        name = word.strip('"').encode()
        return name[:-1] if name.endswith(b"*") else name.ljust(size, b"\0")
    if kind in {IPV4_ADDRESS, IPV6_ADDRESS}:
        address = pack(word)
        if address is None:
            raise ValueError(f"{word!r} is not an address")
        return address
    symbols = _SYMBOLS.get(kind, {})
    number = symbols[word] if word in symbols else int(word, 0)
    return number.to_bytes(size, "little" if kind in _HOST_ORDER else "big")


def shown(kind: int, value: bytes) -> str:
    """Return a value of a type in nft's notation."""
    if kind in {IPV4_ADDRESS, IPV6_ADDRESS}:
        return unpack(value)
    if kind == INTERFACE:
        return f'"{value.rstrip(bytes(1)).decode(errors="replace")}{"" if len(value) == 16 else "*"}"'
    number = int.from_bytes(value, "little" if kind in _HOST_ORDER else "big")
    if kind == _INDEX:
        with suppress(OSError):  # nft, too, prints the number of an interface that no longer exists
            return f'"{socket.if_indextoname(number)}"'
    if kind == MARK:
        return f"{number:#010x}"
    names = _SYMBOLS.get(kind, {}).items()
    if kind in {_STATE, _STATUS, TCP_FLAGS} and number:
        return ",".join(name for name, bit in names if number & bit) or f"{number:#x}"
    return next((name for name, code in names if code == number), str(number))


def padded(size: int) -> int:
    """Return a field's size in a key, in bytes: a multiple of 4, since a field occupies whole registers."""
    return size + (-size & 3)
