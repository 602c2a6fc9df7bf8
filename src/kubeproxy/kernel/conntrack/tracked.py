"""Reads connection tracking: entries of protocols with ports, the number of entries and its limit, counters of
failures. The kernel can select entries by their status, and sends only the selected entries. The kernel counts failures
per network namespace. Source: net/netfilter/nf_conntrack_netlink.c of Linux 6.18 (CTA_STATUS_MASK since 5.15)."""

from __future__ import annotations

import errno
import struct
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.netlink.announcements import IF_EQUAL, LOAD_WORD, Announcements, keeping
from kubeproxy.model.addresses import PORT_BYTES

SUBSYSTEM: Final = 1 << 8  # NFNL_SUBSYS_CTNETLINK
GET: Final = SUBSYSTEM | 1  # IPCTNL_MSG_CT_GET
DELETE: Final = SUBSYSTEM | 2  # IPCTNL_MSG_CT_DELETE
FIRST_ATTRIBUTE: Final = nl.HEADER.size + 4  # struct nfgenmsg

# Bits of an entry's status (enum ip_conntrack_status).
ANSWERED, DESTINATION_TRANSLATED = 1 << 1, 1 << 5

TUPLE_ORIGINAL, _TUPLE_REPLY, STATUS, _PROTOCOL_STATE, ID = 1, 2, 3, 4, 12
ZONE, FILTER, _STATUS_MASK = 18, 25, 26
# Attributes of a tuple. Source addresses have the numbers 1 (IPv4) and 3 (IPv6).
_TUPLE_IP, _TUPLE_PROTOCOL, _PROTOCOL, _SOURCE_PORT, _DESTINATION_PORT = 1, 2, 1, 2, 3
# Bits of CTA_FILTER (Linux 5.8): the fields of a tuple that the kernel compares.
_COMPARE_PROTOCOL: Final = 1 << 3
_ENDS: Final = ((TUPLE_ORIGINAL, 2, 1 << 1, _DESTINATION_PORT, 1 << 5), (_TUPLE_REPLY, 1, 1 << 0, _SOURCE_PORT, 1 << 4))
"""The ends of a connection that a filter can select: the target in the original tuple, and the server in the reply
tuple. For each end: the tuple's attribute; the attribute and filter bit of the IPv4 address; the attribute and filter
bit of the port."""

_IPV4_END: Final = 6  # the size of an IPv4 address and a port
_U32: Final = struct.Struct(">I")
_FLAGS: Final = struct.Struct("=I")
_FIRST: Final = struct.Struct("=HH4s")  # an attribute's length and type, and the first bytes of its payload

TCP_STATES: Final = (
    *("none", "syn-sent", "syn-received", "established", "fin-wait", "close-wait", "last-ack", "time-wait", "close"),
    "syn-sent-by-both",
)
"""Names of TCP states by number (enum tcp_conntrack)."""
_TCP_OVER: Final = frozenset({4, 5, 6, 7, 8})


class Tracked(NamedTuple):
    """An entry of connection tracking. `target` is the original destination: packed address, protocol (1 byte), port (2
    bytes), as in a frontend's key. `client` and `server` are a packed address followed by the port; `server` is the
    source of replies. `state` is the state of a TCP connection, else 0. `entry_id` is unique among present and past
    entries (CTA_ID). `seen` is the packed address that the server sees as the client."""

    target: bytes
    client: bytes
    server: bytes
    status: int
    state: int
    entry_id: bytes
    seen: bytes = b""

    @property
    def answered(self) -> bool:
        """Whether the server sent a packet."""
        return bool(self.status & ANSWERED)

    @property
    def over(self) -> bool:
        """Whether a TCP connection is closed or closing; the kernel removes the entry of such a connection later."""
        return self.state in _TCP_OVER


def target_of(address: bytes, protocol: int, port: int) -> bytes:
    """Return the target of a connection to an address and port."""
    return address + bytes([protocol]) + PORT_BYTES[port]


class Wanted(NamedTuple):
    """A filter for the kernel: it selects the entries with `status & mask == status`."""

    status: int = 0
    mask: int = 0


EVERYTHING: Final = Wanted()


def entries(link: nl.Netlink, family: int, wanted: Wanted = EVERYTHING, selected: bytes = b"") -> Iterator[Tracked]:
    """Yield the entries of a family (AF_INET or AF_INET6) of TCP, UDP and SCTP. Raises ApplyError. `selected` is a
    result of `selection`, which Linux before 5.8 ignores. The kernel needs 10 ms to search a table of the usual size,
    0.1 us per entry that it skips, and 3 us per entry that it returns."""
    payload = nl.netfilter_header(family) + selected
    if wanted.mask:
        payload += nl.number_attribute(STATUS, wanted.status) + nl.number_attribute(_STATUS_MASK, wanted.mask)
    yield from _dump(link, family, payload, wanted)


def entries_to(link: nl.Netlink, family: int, protocol: int, port: int) -> Iterator[Tracked]:
    """Yield the entries with a protocol and a port in their original destination. Raises ApplyError."""
    payload = nl.netfilter_header(family) + selection(protocol, (b"", PORT_BYTES[port]))
    tail = target_of(b"", protocol, port)
    return (entry for entry in _dump(link, family, payload, EVERYTHING) if entry.target.endswith(tail))


def selection(protocol: int, *ends: tuple[bytes, bytes]) -> bytes:
    """Return the attributes that select the entries of a protocol for a dump or a deletion. `ends` are the target and,
    optionally, the server: each is a pair of packed IPv4 address and port, b'' for any. An end cannot have an IPv6
    address, because the kernel compares IPv6 addresses wrongly (ctnetlink_filter_match_tuple)."""
    tuples = flags = b""
    for (address, port), (kind, of_address, compare_address, of_port, compare_port) in zip(ends, _ENDS, strict=False):
        compare = _COMPARE_PROTOCOL
        numbers = nl.attribute(_PROTOCOL, bytes([protocol]))
        addresses = b""
        if address:
            compare |= compare_address
            addresses = nl.nested(_TUPLE_IP, nl.attribute(of_address, address))
        if port:
            compare |= compare_port
            numbers += nl.attribute(of_port, port)
        tuples += nl.nested(kind, addresses, nl.nested(_TUPLE_PROTOCOL, numbers))
        flags += nl.attribute(kind, _FLAGS.pack(compare))
    return tuples + nl.nested(FILTER, flags)


def identity(entry: Tracked) -> bytes:
    """Return the attributes that identify an entry for a deletion, but no newer entry with the same addresses."""
    ends = ((entry.client[:-2], entry.client[-2:]), (entry.target[:-3], entry.target[-2:]))
    first = 1 if len(entry.client) == _IPV4_END else 3  # CTA_IP_V4_SRC, CTA_IP_V6_SRC; the destination follows
    addresses = [nl.attribute(first + place, address) for place, (address, _) in enumerate(ends)]
    ports = [nl.attribute(_SOURCE_PORT + place, port) for place, (_, port) in enumerate(ends)]
    numbers = nl.nested(_TUPLE_PROTOCOL, nl.attribute(_PROTOCOL, entry.target[-3:-2]), *ports)
    return nl.nested(TUPLE_ORIGINAL, nl.nested(_TUPLE_IP, *addresses), numbers) + nl.attribute(ID, entry.entry_id)


def delete(link: nl.Netlink, payloads: Sequence[bytes], what: str) -> int:
    """Delete entries by packed identities; return the number of entries that existed. Raises NetlinkError."""
    results = link.requests(DELETE, payloads, f"the deletion of {what}")
    refused = [result for result in results if result[0] not in {0, errno.ENOENT}]
    if refused:
        code, text = refused[0]
        raise nl.NetlinkError(code, f"cannot delete {len(refused)} of {len(results)} {what}", text)
    return sum(code == 0 for code, _ in results)


def _dump(link: nl.Netlink, family: int, payload: bytes, wanted: Wanted) -> Iterator[Tracked]:
    read = LAYOUTS[family].entries
    what = "connection tracking"
    with nl.understood(what):
        for data in link.dump(GET, payload, what):
            for ends in read(data):
                if ends is not None:
                    entry = _tracked(data, ends)
                    # Kernels before 5.15 ignore the mask and send all entries.
                    if entry.status & wanted.mask == wanted.status:
                        yield entry


class Ends(NamedTuple):
    """The target, client, server and `seen` of an entry, as in Tracked, and the offsets of its attributes in a buffer.
    The attributes are in [start:end]; the attributes after the two tuples start at `rest` or later."""

    target: bytes
    client: bytes
    server: bytes
    start: int
    rest: int
    end: int
    seen: bytes


class EntryLayout:
    """The usual byte layout of a family's entries in the kernel's messages. An entry with another layout, such as an
    entry in a zone, is parsed attribute by attribute."""

    def __init__(self, family: int) -> None:
        size = 4 if family == 2 else 16
        ip = nl.ATTRIBUTE.pack(4 + 2 * (4 + size), _TUPLE_IP | nl.NLA_F_NESTED)
        source = nl.ATTRIBUTE.pack(4 + size, 1 if family == 2 else 3)  # CTA_IP_V4_SRC or CTA_IP_V6_SRC
        length = 4 + 4 + 2 * (4 + size) + 28
        self.head = nl.ATTRIBUTE.pack(length, TUPLE_ORIGINAL | nl.NLA_F_NESTED) + ip + source
        self._protocol = nl.ATTRIBUTE.pack(28, _TUPLE_PROTOCOL | nl.NLA_F_NESTED) + nl.ATTRIBUTE.pack(5, _PROTOCOL)
        self._port = nl.ATTRIBUTE.pack(6, _SOURCE_PORT)
        # The addresses and ports of both tuples, and the protocol of the original tuple.
        self._tuples = struct.Struct(f"=12s{size}s4x{size}s8ss3x4s2s2x4x2s2x12x{size}s4x{size}s8x4x4x2s2x8x")

    def entries(
        self,
        data: bytes,
        protocol: bytes | None = None,
        targets: Container[bytes] | None = None,
        ports: Container[bytes] = (),
    ) -> Iterator[Ends | None]:
        """Yield those entries of a buffer that have a target in `targets`, or a target port in `ports`; with `targets`
        None, all entries. For an entry without ports, or not of `protocol`, the iterator yields None. The function is
        long and uses local variables for speed: its loop runs 100,000 times per sync of a busy node."""
        unpack, size, header, done = self._tuples.unpack_from, self._tuples.size, nl.HEADER.unpack_from, nl.NLMSG_DONE
        head, kind, port = self.head, self._protocol, self._port
        following, last = 0, len(data) - nl.HEADER.size
        while following <= last:
            length, message, _, _, _ = header(data, following)
            if message == done:
                return
            start, end = following + FIRST_ATTRIBUTE, following + length
            following += (length + 3) & ~3
            if end - start < size:
                yield None
                continue
            first, source, to, second, number, third, source_port, to_port, back, seen, back_port = unpack(data, start)
            if first != head or second != kind:
                found = _attribute_by_attribute(data, start, end)
                if found is None or (protocol is not None and found.target[-3:-2] != protocol):
                    yield None
                elif targets is None or found.target in targets or found.target[-2:] in ports:
                    yield found
            elif third != port or (protocol is not None and number != protocol):
                yield None  # ICMP has type and code in place of ports
            elif (target := to + number + to_port) and (targets is None or target in targets or to_port in ports):
                yield Ends(target, source + source_port, back + back_port, start, start + size, end, seen)

    def read(self, message: bytes) -> Tracked | None:
        """Return the entry in a message, or None if the entry has no ports."""
        ends = next(self.entries(message), None)
        return None if ends is None else _tracked(message, ends)


LAYOUTS: Final = {2: EntryLayout(2), 10: EntryLayout(10)}


def _tracked(data: bytes, ends: Ends) -> Tracked:
    target, client, server, _, start, end, seen = ends
    status = state = 0
    entry_id = b""
    while start < end:
        length, kind, value = _FIRST.unpack_from(data, start)
        kind &= nl.NLA_TYPE_MASK
        if kind == STATUS:
            status = _U32.unpack(value)[0]
        elif kind == ID:
            entry_id = value
        elif kind == _PROTOCOL_STATE:
            state = _tcp_state(data, start + 4, start + length)
            if entry_id:
                break
        start += (length + 3) & ~3 or 4
    return Tracked(target, client, server, status, state, entry_id, seen)


def _tcp_state(data: bytes, start: int, end: int) -> int:
    # CTA_PROTOINFO_TCP and its attribute CTA_PROTOINFO_TCP_STATE both have number 1. The result for other layouts is 0.
    return data[start + 8] if end >= start + 9 and data[start + 2] == 1 and data[start + 6] == 1 else 0


def _attribute_by_attribute(data: bytes, start: int, end: int) -> Ends | None:
    found = nl.parts(data, start, end)
    if TUPLE_ORIGINAL not in found or _TUPLE_REPLY not in found:
        return None
    (source, destination), numbers = _tuple(found[TUPLE_ORIGINAL])
    (back, seen), reply_numbers = _tuple(found[_TUPLE_REPLY])
    if not {1, 2, 3} <= numbers.keys() or 2 not in reply_numbers:
        return None
    target = destination + numbers[_PROTOCOL] + numbers[_DESTINATION_PORT]
    return Ends(target, source + numbers[_SOURCE_PORT], back + reply_numbers[_SOURCE_PORT], start, start, end, seen)


def _tuple(data: bytes) -> tuple[tuple[bytes, bytes], dict[int, bytes]]:
    """Return a tuple's source and destination address, and the CTA_PROTO_... attributes (protocol, ports) by number."""
    found = nl.parts(data)
    addresses = {kind & 1: value for kind, value in nl.parts(found.get(_TUPLE_IP, b"")).items()}
    return (addresses.get(1, b""), addresses.get(0, b"")), nl.parts(found.get(_TUPLE_PROTOCOL, b""))


_GET_STATS_CPU: Final = SUBSYSTEM | 4  # IPCTNL_MSG_CT_GET_STATS_CPU
_GET_STATS: Final = SUBSYSTEM | 5  # IPCTNL_MSG_CT_GET_STATS
_ALL_FAMILIES: Final = nl.netfilter_header()


class Level(NamedTuple):
    """The number of entries in this network namespace, and the limit for each network namespace (0: no limit)."""

    entries: int
    limit: int


class Refusals(NamedTuple):
    """Counters of failures since the creation of the network namespace, summed over all CPUs.

    `dropped`: packets dropped because the table was full or a helper refused them. `early`: entries of unanswered or
    closing connections, evicted for new entries. `failed`: packets for which no entry was inserted, because another
    packet had created the entry or the translated addresses were in use. `clashes`: the cases of `failed` without a
    lost packet. `chains`: packets dropped because their hash bucket had too many entries. `restarts`: searches
    of the table that the kernel repeated. `invalid`: packets of no connection."""

    dropped: int = 0
    early: int = 0
    failed: int = 0
    clashes: int = 0
    chains: int = 0
    restarts: int = 0
    invalid: int = 0


_FIELDS: Final = {"dropped": 10, "early": 11, "failed": 9, "clashes": 14, "chains": 15, "restarts": 13, "invalid": 4}
"""The number of the CTA_STATS_... attribute of each field."""


@nl.understood("connection tracking")
def level(link: nl.Netlink) -> Level:
    """Return the number of entries and its limit. Raises ApplyError."""
    places = link.ask(_GET_STATS, _ALL_FAMILIES, "the number of tracked connections")
    found = next((nl.numbers(*place) for place in places), {})
    return Level(found.get(1, 0), found.get(2, 0))


@nl.understood("connection tracking")
def refusals(link: nl.Netlink) -> Refusals:
    """Return the present counters of failures. Raises ApplyError."""
    sums = dict.fromkeys(_FIELDS, 0)
    buffers = link.dump_all(_GET_STATS_CPU, _ALL_FAMILIES, "the statistics of connection tracking")
    for place in nl.answers(buffers, len(_ALL_FAMILIES)):
        found = nl.numbers(*place)
        sums = {name: total + found.get(_FIELDS[name], 0) for name, total in sums.items()}
    return Refusals(**sums)


_NEW: Final = SUBSYSTEM | 0  # IPCTNL_MSG_CT_NEW
BEGINNINGS: Final = 1  # NFNLGRP_CONNTRACK_NEW
ENDS: Final = 3  # NFNLGRP_CONNTRACK_DESTROY
_RECEIVE_BUFFER: Final = 8 << 20  # about 8,000 events, more than a busy node has in one second

_FIND_ATTRIBUTE: Final = 0xFFFFF000 + 12  # SKF_AD_OFF + SKF_AD_NLATTR
# Instructions of classic BPF (linux/bpf_common.h).
_LOAD, _LOAD_INDEX, _LOAD_AFTER = 0x00, 0x01, 0x40
_AND, _TO_INDEX = 0x54, 0x07


NOT_ANNOUNCED: Final = (
    "the kernel announces no connections (net.netfilter.nf_conntrack_events): sysctl -w "
    "net.netfilter.nf_conntrack_events=2 enables announcements while a program listens"
)


def announced(proc: Path = Path("/proc")) -> bool:
    """Return whether the kernel announces connections in the caller's network namespace."""
    try:
        return (proc / "sys/net/netfilter/nf_conntrack_events").read_text().strip() != "0"
    except OSError:  # the kernel was built without this sysctl
        return False


class Event(NamedTuple):
    """The start of a connection, or the removal of a connection's entry (`ended`) after its close or idle timeout."""

    ended: bool
    family: int
    entry: Tracked


class Events(Announcements):
    """A socket that receives events of all connections, or, after `sample`, of a share of the connections. For a
    connection that began before `listen`, the kernel announces only the end."""

    wanted = EVERYTHING
    one_in = 1

    @classmethod
    def listen(cls, wanted: Wanted = EVERYTHING, groups: tuple[int, ...] = (BEGINNINGS, ENDS)) -> Self:
        """Receive the events of connections with a `wanted` status (the filter of `entries`). Raises NetlinkError."""
        opened = cls.open("connection tracking", groups, _RECEIVE_BUFFER, program=filter_program(wanted, 1))
        opened.wanted = wanted
        return opened

    def sample(self, one_in: int) -> None:
        """Receive only events of 1/`one_in` of the connections, selected by entry id; `one_in` is a power of two."""
        self.attach(filter_program(self.wanted, one_in))
        self.one_in = one_in

    def events(self, end: float) -> Iterator[Event]:
        """Yield events until the time `end` of time.monotonic(). Raises NetlinkError."""
        with nl.understood("connections that begin and end"):
            for data in self.until(end):
                if (event := read(data)) is not None:
                    yield event


def read(data: bytes) -> Event | None:
    """Return the event in a message, or None if the connection has no ports."""
    kind = nl.HEADER.unpack_from(data)[1]
    family = data[nl.HEADER.size]
    if kind not in (_NEW, DELETE) or family not in LAYOUTS:
        return None
    entry = LAYOUTS[family].read(data)
    return Event(kind == DELETE, family, entry) if entry is not None else None


def filter_program(wanted: Wanted, one_in: int) -> bytes:
    """Return a BPF filter that accepts messages of 1/`one_in` of the connections with the `wanted` status."""
    tests = []
    if wanted.mask:
        tests.append([*_attribute(STATUS), (_AND, wanted.mask), (IF_EQUAL, wanted.status)])
    if one_in > 1:
        tests.append([*_attribute(ID), (_AND, one_in - 1), (IF_EQUAL, 0)])
    return keeping([step for test in tests for step in test])


def _attribute(kind: int) -> list[tuple[int, int]]:
    return [
        (_LOAD, FIRST_ATTRIBUTE),
        (_LOAD_INDEX, kind),
        (LOAD_WORD, _FIND_ATTRIBUTE),
        (_TO_INDEX, 0),
        (_LOAD_AFTER, 4),
    ]
