"""Connection tracking's entries of every protocol, read and never touched: who talks to whom, and who answered.

The entries of some may be asked for by their status, so that those of all others cost nothing here: the kernel passes
over them. Source: net/netfilter/nf_conntrack_netlink.c of Linux 6.18 (CTA_STATUS_MASK since 5.15).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import (
    ATTRIBUTE,
    NLA_F_NESTED,
    NLA_TYPE_MASK,
    NLMSG_DONE,
    Netlink,
    attribute,
    attributes,
    messages,
    nested,
    understood,
)

SUBSYSTEM: Final = 1 << 8  # NFNL_SUBSYS_CTNETLINK
_GET: Final = SUBSYSTEM | 1  # IPCTNL_MSG_CT_GET
_GENERIC: Final = 4  # struct nfgenmsg

# Bits of an entry's status (enum ip_conntrack_status).
ANSWERED: Final = 1 << 1
DESTINATION_TRANSLATED: Final = 1 << 5

STATUS: Final = 3
ID: Final = 12
_TUPLE_ORIGINAL: Final = 1
_TUPLE_REPLY: Final = 2
_PROTOCOL_STATE: Final = 4
_STATUS_MASK: Final = 26
_FILTER: Final = 25
_TUPLE_IP: Final = 1
_TUPLE_PROTOCOL: Final = 2
_FILTER_ORIGINAL: Final = 1
_COMPARE_PROTOCOL_AND_PORT: Final = 1 << 3 | 1 << 5

_U32: Final = struct.Struct(">I")
_FIRST: Final = struct.Struct("=HH4s")  # an attribute's length and type, and the first bytes of its payload

TCP_STATES: Final = (
    *("none", "syn-sent", "syn-received", "established", "fin-wait", "close-wait", "last-ack", "time-wait", "close"),
    "syn-sent-by-both",
)
"""By number (enum tcp_conntrack)."""
_TCP_OVER: Final = frozenset({4, 5, 6, 7, 8})


class Tracked(NamedTuple):
    """One entry.

    `target` is where the client sent to: packed address, protocol (1 byte), port (2 bytes), as the key of a frontend.
    `client` is a packed address with the port after it, as is `server`, from where the answers come. `state` is that
    of a TCP connection, 0 of all others, and `mark` is what tells an entry from all others there have been.
    """

    target: bytes
    client: bytes
    server: bytes
    status: int
    state: int
    mark: bytes

    @property
    def answered(self) -> bool:
        """Return whether anything came back."""
        return bool(self.status & ANSWERED)

    @property
    def over(self) -> bool:
        """Return whether a TCP connection is closed, or closing; the kernel remembers it for a while."""
        return self.state in _TCP_OVER


class Wanted(NamedTuple):
    """Which entries to read: those whose status, under the mask, is this. The kernel picks them."""

    status: int = 0
    mask: int = 0


EVERYTHING: Final = Wanted()


def entries(link: Netlink, family: int, wanted: Wanted = EVERYTHING) -> Iterator[Tracked]:
    """Yield the entries of a family (AF_INET or AF_INET6) that are TCP's, UDP's or SCTP's. Raises ApplyError.

    The kernel needs 10 ms to walk a table of the usual size, and 0.1 us for each entry that it passes over; an entry
    that is read costs 3 us.
    """
    payload = bytes([family, 0, 0, 0])
    if wanted.mask:
        payload += attribute(STATUS, _U32.pack(wanted.status)) + attribute(_STATUS_MASK, _U32.pack(wanted.mask))
    yield from _dump(link, family, payload, wanted)


def entries_to(link: Netlink, family: int, protocol: int, port: int) -> Iterator[Tracked]:
    """Yield the entries whose original destination has a protocol and a port. Raises ApplyError."""
    fields = attribute(1, bytes([protocol])) + attribute(3, port.to_bytes(2, "big"))
    payload = (
        bytes([family, 0, 0, 0])
        + nested(_TUPLE_ORIGINAL, nested(_TUPLE_PROTOCOL, fields))
        + nested(_FILTER, attribute(_FILTER_ORIGINAL, struct.pack("=I", _COMPARE_PROTOCOL_AND_PORT)))
    )
    tail = bytes([protocol]) + port.to_bytes(2, "big")
    return (entry for entry in _dump(link, family, payload, EVERYTHING) if entry.target.endswith(tail))


def _dump(link: Netlink, family: int, payload: bytes, wanted: Wanted) -> Iterator[Tracked]:
    read = LAYOUTS[family].read
    what = "connection tracking"
    with understood(what):
        for data in link.dump(_GET, payload, what):
            for at in messages(data):
                if at.kind == NLMSG_DONE:
                    break
                entry = read(data, at.start + _GENERIC, at.end)
                # A kernel before 5.15 passes over the mask, and sends everything.
                if entry is not None and entry.status & wanted.mask == wanted.status:
                    yield entry


class Layout:
    """Where the fields of an entry of one family are in the messages that kernels really send."""

    def __init__(self, family: int) -> None:
        size = 4 if family == 2 else 16
        ip = ATTRIBUTE.pack(4 + 2 * (4 + size), _TUPLE_IP | NLA_F_NESTED)
        source = ATTRIBUTE.pack(4 + size, 1 if family == 2 else 3)  # CTA_IP_V4_SRC or CTA_IP_V6_SRC
        length = 4 + 4 + 2 * (4 + size) + 28
        self._head = ATTRIBUTE.pack(length, _TUPLE_ORIGINAL | NLA_F_NESTED) + ip + source
        self._protocol = ATTRIBUTE.pack(28, _TUPLE_PROTOCOL | NLA_F_NESTED) + ATTRIBUTE.pack(5, 1)
        self._port = ATTRIBUTE.pack(6, 2)
        # Of the original tuple addresses, protocol and ports; of the reply's, which looks alike, where it comes from.
        self._tuples = struct.Struct(f"=12s{size}s4x{size}s8ss3x4s2s2x4x2s2x12x{size}s4x{size}x8x4x4x2s2x8x")

    def read(self, data: bytes, start: int, end: int) -> Tracked | None:
        """Return the entry whose attributes are data[start:end], None when it has no ports."""
        if end - start < self._tuples.size:
            return None
        head, source, destination, kind, protocol, first, port, to, back, back_port = self._tuples.unpack_from(
            data, start
        )
        if head != self._head or kind != self._protocol:
            return _attribute_by_attribute(data, start, end)
        if first != self._port:
            return None  # ICMP has a type and a code there
        return Tracked(
            destination + protocol + to,
            source + port,
            back + back_port,
            *_standing(data, start + self._tuples.size, end),
        )


LAYOUTS: Final = {2: Layout(2), 10: Layout(10)}


def _standing(data: bytes, start: int, end: int) -> tuple[int, int, bytes]:
    """Return status, TCP state and mark from the attributes after the tuples."""
    status = state = 0
    mark = b""
    while start < end:
        length, kind, value = _FIRST.unpack_from(data, start)
        kind &= NLA_TYPE_MASK
        if kind == STATUS:
            status = _U32.unpack(value)[0]
        elif kind == ID:
            mark = value
        elif kind == _PROTOCOL_STATE:
            state = _tcp_state(data, start + 4, start + length)
            if mark:
                break
        start += (length + 3) & ~3 or 4
    return status, state, mark


def _tcp_state(data: bytes, start: int, end: int) -> int:
    """Return CTA_PROTOINFO_TCP_STATE, which comes first, or 0."""
    # CTA_PROTOINFO_TCP is attribute 1, and so is the state in it.
    return data[start + 8] if end >= start + 9 and data[start + 2] == 1 and data[start + 6] == 1 else 0


def _attribute_by_attribute(data: bytes, start: int, end: int) -> Tracked | None:
    """Read an entry of another layout, as in a zone of its own."""
    found = {kind: (first, last) for kind, first, last in attributes(data, start, end)}
    original, reply = found.get(_TUPLE_ORIGINAL), found.get(_TUPLE_REPLY)
    if original is None or reply is None:
        return None
    (source, destination), numbers = _tuple(data, *original)
    (back, _), reply_numbers = _tuple(data, *reply)
    if not {1, 2, 3} <= numbers.keys() or 2 not in reply_numbers:
        return None
    return Tracked(
        destination + numbers[1] + numbers[3],
        source + numbers[2],
        back + reply_numbers[2],
        *_standing(data, start, end),
    )


def _tuple(data: bytes, start: int, end: int) -> tuple[tuple[bytes, bytes], dict[int, bytes]]:
    """Return source and destination of a tuple, and its protocol and ports as CTA_PROTO_... name them."""
    addresses: dict[int, bytes] = {}
    numbers: dict[int, bytes] = {}
    for kind, begin, stop in attributes(data, start, end):
        if kind == _TUPLE_IP:
            addresses = {which & 1: data[first:last] for which, first, last in attributes(data, begin, stop)}
        elif kind == _TUPLE_PROTOCOL:
            numbers = {which: data[first:last] for which, first, last in attributes(data, begin, stop)}
    return (addresses.get(1, b""), addresses.get(0, b"")), numbers  # sources have odd numbers: 1 and 3
