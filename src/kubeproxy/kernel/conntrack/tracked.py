"""Connection tracking's entries of every protocol, read and never touched: who talks to whom, and who answered.

The entries of some may be asked for by their status, so that those of all others cost nothing here: the kernel passes
over them. Source: net/netfilter/nf_conntrack_netlink.c of Linux 6.18 (CTA_STATUS_MASK since 5.15).
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import (
    ATTRIBUTE,
    HEADER,
    NLA_F_NESTED,
    NLA_TYPE_MASK,
    NLMSG_DONE,
    Netlink,
    attribute,
    attributes,
    nested,
    understood,
)
from kubeproxy.model.addresses import PORT_BYTES

SUBSYSTEM: Final = 1 << 8  # NFNL_SUBSYS_CTNETLINK
GET: Final = SUBSYSTEM | 1  # IPCTNL_MSG_CT_GET
FIRST_ATTRIBUTE: Final = HEADER.size + 4  # struct nfgenmsg

# Bits of an entry's status (enum ip_conntrack_status).
ANSWERED: Final = 1 << 1
DESTINATION_TRANSLATED: Final = 1 << 5

# CTA_...
TUPLE_ORIGINAL: Final = 1
_TUPLE_REPLY: Final = 2
STATUS: Final = 3
_PROTOCOL_STATE: Final = 4
ID: Final = 12
ZONE: Final = 18
FILTER: Final = 25
_STATUS_MASK: Final = 26
# Within a tuple; sources of IPv4 and IPv6 have odd numbers: 1 and 3.
_TUPLE_IP: Final = 1
_TUPLE_PROTOCOL: Final = 2
_PROTOCOL: Final = 1
_SOURCE_PORT: Final = 2
_DESTINATION_PORT: Final = 3
# Bits of a filter (Linux >= 5.8): the fields of a tuple that the kernel compares.
_COMPARE_PROTOCOL: Final = 1 << 3
_ENDS: Final = ((TUPLE_ORIGINAL, 2, 1 << 1, _DESTINATION_PORT, 1 << 5), (_TUPLE_REPLY, 1, 1 << 0, _SOURCE_PORT, 1 << 4))
"""Of each direction where the address (IPv4) and the port of its server are in a tuple, and their bits."""

_U32: Final = struct.Struct(">I")
_FLAGS: Final = struct.Struct("=I")
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


def target_of(address: bytes, protocol: int, port: int) -> bytes:
    """Return the target of a connection to an address and port."""
    return address + bytes([protocol]) + PORT_BYTES[port]


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
    payload = bytes([family, 0, 0, 0]) + selection(protocol, (b"", PORT_BYTES[port]))
    tail = target_of(b"", protocol, port)
    return (entry for entry in _dump(link, family, payload, EVERYTHING) if entry.target.endswith(tail))


def selection(protocol: int, *ends: tuple[bytes, bytes]) -> bytes:
    """Return the attributes of a request about entries of a protocol, and of a target and a server: their packed IPv4
    address and port, of which b'' stands for any.
    """
    tuples = flags = b""
    for (address, port), (kind, of_address, compare_address, of_port, compare_port) in zip(ends, _ENDS, strict=False):
        compare = _COMPARE_PROTOCOL
        numbers = attribute(_PROTOCOL, bytes([protocol]))
        parts = b""
        if address:
            compare |= compare_address
            parts = nested(_TUPLE_IP, attribute(of_address, address))
        if port:
            compare |= compare_port
            numbers += attribute(of_port, port)
        tuples += nested(kind, parts, nested(_TUPLE_PROTOCOL, numbers))
        flags += attribute(kind, _FLAGS.pack(compare))
    return tuples + nested(FILTER, flags)


def _dump(link: Netlink, family: int, payload: bytes, wanted: Wanted) -> Iterator[Tracked]:
    read = LAYOUTS[family].entries
    what = "connection tracking"
    with understood(what):
        for data in link.dump(GET, payload, what):
            for ends in read(data):
                if ends is not None:
                    entry = _tracked(data, ends)
                    # A kernel before 5.15 passes over the mask, and sends everything.
                    if entry.status & wanted.mask == wanted.status:
                        yield entry


class Ends(NamedTuple):
    """Target, client and server of an entry, as in Tracked, and where its attributes are in the buffer: they begin at
    `start`, those after the two tuples not before `rest`, and end at `end`.
    """

    target: bytes
    client: bytes
    server: bytes
    start: int
    rest: int
    end: int


class Layout:
    """Where the fields of an entry of one family are in the messages that kernels really send.

    An entry with another layout, as in a zone of its own, is read attribute by attribute.
    """

    def __init__(self, family: int) -> None:
        size = 4 if family == 2 else 16
        ip = ATTRIBUTE.pack(4 + 2 * (4 + size), _TUPLE_IP | NLA_F_NESTED)
        source = ATTRIBUTE.pack(4 + size, 1 if family == 2 else 3)  # CTA_IP_V4_SRC or CTA_IP_V6_SRC
        length = 4 + 4 + 2 * (4 + size) + 28
        self.head = ATTRIBUTE.pack(length, TUPLE_ORIGINAL | NLA_F_NESTED) + ip + source
        self._protocol = ATTRIBUTE.pack(28, _TUPLE_PROTOCOL | NLA_F_NESTED) + ATTRIBUTE.pack(5, _PROTOCOL)
        self._port = ATTRIBUTE.pack(6, _SOURCE_PORT)
        # Of the original tuple addresses, protocol and ports; of the reply's, which looks alike, where it comes from.
        self._tuples = struct.Struct(f"=12s{size}s4x{size}s8ss3x4s2s2x4x2s2x12x{size}s4x{size}x8x4x4x2s2x8x")

    def entries(
        self,
        data: bytes,
        protocol: bytes | None = None,
        targets: Container[bytes] | None = None,
        ports: Container[bytes] = (),
    ) -> Iterator[Ends | None]:
        """Yield the entries in a buffer whose target is one of these or has one of these ports; None is any.

        An entry of another protocol is None, as is one without ports.

        One long function with everything in local names: it runs 100,000 times for each sync of a busy node.
        """
        unpack, size, header = self._tuples.unpack_from, self._tuples.size, HEADER.unpack_from
        head, kind, port = self.head, self._protocol, self._port
        following, last = 0, len(data) - HEADER.size
        while following <= last:
            length, message, _, _, _ = header(data, following)
            if message == NLMSG_DONE:
                return
            start, end = following + FIRST_ATTRIBUTE, following + length
            following += (length + 3) & ~3
            if end - start < size:
                yield None
                continue
            first, source, to, second, number, third, source_port, to_port, back, back_port = unpack(data, start)
            if first != head or second != kind:
                found = _attribute_by_attribute(data, start, end)
                if found is None or (protocol is not None and found.target[-3:-2] != protocol):
                    yield None
                elif targets is None or found.target in targets or found.target[-2:] in ports:
                    yield found
            elif third != port or (protocol is not None and number != protocol):
                yield None  # ICMP has a type and a code there
            elif (target := to + number + to_port) and (targets is None or target in targets or to_port in ports):
                yield Ends(target, source + source_port, back + back_port, start, start + size, end)

    def read(self, message: bytes) -> Tracked | None:
        """Return the entry of a single message, None when it has no ports."""
        ends = next(self.entries(message), None)
        return None if ends is None else _tracked(message, ends)


LAYOUTS: Final = {2: Layout(2), 10: Layout(10)}


def _tracked(data: bytes, ends: Ends) -> Tracked:
    """Return the entry with status, TCP state and mark from the attributes after the tuples."""
    target, client, server, _, start, end = ends
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
    return Tracked(target, client, server, status, state, mark)


def _tcp_state(data: bytes, start: int, end: int) -> int:
    """Return CTA_PROTOINFO_TCP_STATE, which comes first, or 0."""
    # CTA_PROTOINFO_TCP is attribute 1, and so is the state in it.
    return data[start + 8] if end >= start + 9 and data[start + 2] == 1 and data[start + 6] == 1 else 0


def _attribute_by_attribute(data: bytes, start: int, end: int) -> Ends | None:
    found = {kind: (first, last) for kind, first, last in attributes(data, start, end)}
    original, reply = found.get(TUPLE_ORIGINAL), found.get(_TUPLE_REPLY)
    if original is None or reply is None:
        return None
    (source, destination), numbers = _tuple(data, *original)
    (back, _), reply_numbers = _tuple(data, *reply)
    if not {1, 2, 3} <= numbers.keys() or 2 not in reply_numbers:
        return None
    target = destination + numbers[_PROTOCOL] + numbers[_DESTINATION_PORT]
    return Ends(target, source + numbers[_SOURCE_PORT], back + reply_numbers[_SOURCE_PORT], start, start, end)


def _tuple(data: bytes, start: int, end: int) -> tuple[tuple[bytes, bytes], dict[int, bytes]]:
    """Return source and destination of a tuple, and its protocol and ports as CTA_PROTO_... name them."""
    addresses: dict[int, bytes] = {}
    numbers: dict[int, bytes] = {}
    for kind, begin, stop in attributes(data, start, end):
        if kind == _TUPLE_IP:
            addresses = {which & 1: data[first:last] for which, first, last in attributes(data, begin, stop)}
        elif kind == _TUPLE_PROTOCOL:
            numbers = {which: data[first:last] for which, first, last in attributes(data, begin, stop)}
    return (addresses.get(1, b""), addresses.get(0, b"")), numbers
