"""Ip sets over netlink: creating them, adding and removing many entries at once, reading them back.

What a set is for is a backend's affair. Sources: include/uapi/linux/netfilter/ipset/ip_set.h and
net/netfilter/ipset/ of Linux 6.18.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, Self

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import (
    NETLINK_NETFILTER,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Closing,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
    errno_text,
    messages,
    nested,
    understood,
)

_SUBSYSTEM: Final = 6  # NFNL_SUBSYS_IPSET
_PROTOCOL: Final = 6  # understood since Linux 3.x; 7 adds nothing that is used here

_CREATE: Final = _SUBSYSTEM << 8 | 2
_DESTROY: Final = _SUBSYSTEM << 8 | 3
_FLUSH: Final = _SUBSYSTEM << 8 | 4
_SWAP: Final = _SUBSYSTEM << 8 | 6
_LIST: Final = _SUBSYSTEM << 8 | 7
_ADD: Final = _SUBSYSTEM << 8 | 9
_DELETE: Final = _SUBSYSTEM << 8 | 10
_TYPE: Final = _SUBSYSTEM << 8 | 13

# Attributes of commands.
_SET_NAME: Final = 2
_TYPE_NAME: Final = 3
_SECOND_NAME: Final = 3
_REVISION: Final = 4
_FAMILY: Final = 5
_FLAGS: Final = 6
_DATA: Final = 7
_ENTRIES: Final = 8  # IPSET_ATTR_ADT
_LINE: Final = 9
_LIST_NAMES: Final = 2  # IPSET_FLAG_LIST_SETNAME
_LIST_HEADERS: Final = 4  # IPSET_FLAG_LIST_HEADER

# Attributes of entries and of what a set is created with.
_IP: Final = 1
_PORT: Final = 4
_PORT_TO: Final = 5
_PROTO: Final = 7
_HASHSIZE: Final = 18
_MAXELEM: Final = 19
_IP2: Final = 20
_CIDR2: Final = 21
_COUNT: Final = 24  # IPSET_ATTR_ELEMENTS
_REFERENCES: Final = 25
_BIG_ENDIAN: Final = 0x4000  # NLA_F_NET_BYTEORDER
_NESTED: Final = 0x8000

_HEADER: Final = struct.pack("=BBH", socket.AF_INET, 0, 0)  # struct nfgenmsg
_ADDRESS: Final = struct.Struct("=HHHH")
_PORT_AND_PROTOCOL: Final = struct.Struct("=HH2sxx HHBxxx")
# A list's length has 16 bits, and a refused message comes back whole.
_LIST_LIMIT: Final = 32_000

BITMAP_PORT: Final = "bitmap:port"
HASH_IP: Final = "hash:ip"
HASH_IP_PORT: Final = "hash:ip,port"
HASH_IP_PORT_IP: Final = "hash:ip,port,ip"
HASH_IP_PORT_NET: Final = "hash:ip,port,net"

# Errors of ip_set.h and its types, from 4096 on.
_ERRORS: Final = {
    4097: "protocol error",
    4098: "the kernel has no such type of set, or no module for it",
    4099: "too many sets",
    4100: "in use by a rule",
    4101: "the second set exists already",
    4102: "the sets' types differ",
    4103: "exists already",
    4104: "invalid prefix length",
    4106: "invalid family",
    4107: "timeouts are not supported",
    4108: "in use by another set",
    4109: "no IPv4 address",
    4110: "no IPv6 address",
    4352: "the set is full (maxelem)",
    4354: "invalid protocol",
    4355: "missing protocol",
}
_NAMED_REFUSALS: Final = 3


class Entry(NamedTuple):
    """An entry of any type of set; what its type does not have stays empty.

    `ip` and `ip2` are packed; `ip2` is the last address of hash:ip,port,ip, or the network of hash:ip,port,net, whose
    bits beyond `prefixlen` must be 0 (the kernel clears them, and it would read back as another entry).
    """

    ip: bytes = b""
    protocol: int = 0
    port: int = 0
    ip2: bytes = b""
    prefixlen: int = 0

    def __str__(self) -> str:
        parts = [_address_name(self.ip)] if self.ip else []
        parts += [f"{self.protocol}:{self.port}"] if self.protocol else [str(self.port)] if not self.ip else []
        if self.ip2:
            parts.append(_address_name(self.ip2) + (f"/{self.prefixlen}" if self.prefixlen else ""))
        return ",".join(parts)


class SetKind(NamedTuple):
    """What a set is: its type (this module's constants) and family; AF_UNSPEC for bitmap:port, which has all ports."""

    type: str
    family: int


class SetCounts(NamedTuple):
    """How many entries a set has, how many it may have (0 for a bitmap), and how many rules use it."""

    entries: int
    maxelem: int
    references: int


class EntriesRefusedError(ApplyError):
    """The kernel refused entries; `refused` has each one with its error. The others are in effect."""

    def __init__(self, refused: Sequence[tuple[Entry, NetlinkError]]) -> None:
        self.refused = list(refused)
        text = "; ".join(str(error) for _, error in self.refused[:_NAMED_REFUSALS])
        more = len(self.refused) - _NAMED_REFUSALS
        super().__init__(text + (f"; and {more} more" if more > 0 else ""))


class IpsetError(NetlinkError):
    """The kernel refused something about a set; `code` is an errno, or one of ip_set.h's own from 4096 on."""

    def __init__(self, code: int, what: str) -> None:
        ApplyError.__init__(self, f"{what}: {_ERRORS.get(code) or errno_text(code)}")
        self.code = code


class Ipsets(Closing):
    """The ip sets of a network namespace. A context manager; keeps one socket open.

    Errors are IpsetError where the kernel refuses, NetlinkError where the socket fails.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink
        self._revisions: dict[SetKind, int] = {}

    @classmethod
    def open(cls) -> Self:
        """Open a socket in the caller's network namespace. Raises NetlinkError."""
        return cls(Netlink.open(NETLINK_NETFILTER))

    def close(self) -> None:
        """Close the socket; the sets stay."""
        self._netlink.close()

    def create(self, name: str, kind: SetKind, *, hashsize: int = 1024, maxelem: int = 65536) -> None:
        """Make a set, the sizes of which a bitmap does not have. Refused with code EEXIST when the name is taken."""
        if kind.type == BITMAP_PORT:
            options = _port(_PORT, 0) + _port(_PORT_TO, 65535)
        else:
            options = _number(_HASHSIZE, hashsize) + _number(_MAXELEM, maxelem)
        payload = (
            _named(name)
            + attribute(_TYPE_NAME, kind.type.encode() + b"\0")
            + attribute(_REVISION, bytes([self._revision(kind)]))
            + attribute(_FAMILY, bytes([kind.family]))
            + nested(_DATA, options)
        )
        self._do(_CREATE, payload, f"create ip set {name}", NLM_F_CREATE | NLM_F_EXCL)

    def destroy(self, name: str) -> None:
        """Remove a set, if there is one; refused while a rule uses it."""
        try:
            self._do(_DESTROY, _named(name), f"destroy ip set {name}")
        except IpsetError as error:
            if error.code != errno.ENOENT:  # newer kernels accept it
                raise

    def flush(self, name: str) -> None:
        """Remove all entries."""
        self._do(_FLUSH, _named(name), f"flush ip set {name}")

    def swap(self, first: str, second: str) -> None:
        """Exchange the contents of two sets of one kind; rules that use them see the change at once."""
        payload = _named(first) + attribute(_SECOND_NAME, second.encode() + b"\0")
        self._do(_SWAP, payload, f"swap ip sets {first} and {second}")

    @understood("ip sets")
    def names(self) -> list[str]:
        """Return the names of all sets."""
        request = _HEADER + attribute(1, bytes([_PROTOCOL])) + attribute(_FLAGS, _LIST_NAMES.to_bytes(4, "big"))
        return [_text(parts[_SET_NAME]) for parts in self._dump(request, "the ip sets") if _SET_NAME in parts]

    @understood("ip sets")
    def kind(self, name: str) -> SetKind | None:
        """Return what a set is; None when there is none of that name."""
        request = _named(name) + attribute(_FLAGS, _LIST_HEADERS.to_bytes(4, "big"))
        for parts in self._dump(request, f"ip set {name}", missing=True):
            return SetKind(_text(parts[_TYPE_NAME]), parts[_FAMILY][0])
        return None

    @understood("ip sets")
    def counts(self) -> dict[str, SetCounts]:
        """Return the counts of all sets by name, whatever their size at the price of a few kilobytes."""
        request = _HEADER + attribute(1, bytes([_PROTOCOL])) + attribute(_FLAGS, _LIST_HEADERS.to_bytes(4, "big"))
        found = {}
        for parts in self._dump(request, "the ip sets"):
            data = parts.get(_DATA, b"")
            numbers = {kind: int.from_bytes(data[s:e], "big") for kind, s, e in attributes(data, 0, len(data))}
            found[_text(parts[_SET_NAME])] = SetCounts(*(numbers.get(k, 0) for k in (_COUNT, _MAXELEM, _REFERENCES)))
        return found

    @understood("ip sets")
    def entries(self, name: str) -> set[Entry]:
        """Return all entries of a set. Refused with code ENOENT when there is none of that name."""
        found = set()
        for parts in self._dump(_named(name), f"ip set {name}"):
            data = parts.get(_ENTRIES, b"")
            for _, start, end in attributes(data, 0, len(data)):
                found.add(_read_entry(data, start, end))
        return found

    def add(self, name: str, entries: Collection[Entry]) -> None:
        """Add entries; those that are there already are fine. Raises EntriesRefusedError."""
        self._change(_ADD, "add {} to", name, entries)

    def remove(self, name: str, entries: Collection[Entry]) -> None:
        """Remove entries; those that are gone already are fine. Raises EntriesRefusedError."""
        self._change(_DELETE, "remove {} from", name, entries)

    def _change(self, command: int, verb: str, name: str, entries: Collection[Entry]) -> None:
        """Send many entries a message; a message that is refused stops at its first bad entry, so each goes alone."""
        head, line = _named(name), attribute(_LINE, bytes(4))
        chunks = list(_chunks(entries))
        payloads = [head + line + attribute(_ENTRIES | _NESTED, b"".join(packed)) for _, packed in chunks]
        results = self._netlink.requests(command, payloads, f"ip set {name}")
        alone = [item for (chunk, _), (code, _) in zip(chunks, results, strict=True) if code for item in chunk]
        answers = self._netlink.requests(command, [head + _pack_entry(item) for item in alone], f"ip set {name}")
        refused = [
            (item, IpsetError(code, f"cannot {verb.format(item)} ip set {name}"))
            for item, (code, _) in zip(alone, answers, strict=True)
            if code
        ]
        if refused:
            raise EntriesRefusedError(refused)

    def _do(self, command: int, payload: bytes, what: str, flags: int = 0) -> None:
        code, _ = self._netlink.requests(command, [payload], what, flags)[0]
        if code:
            raise IpsetError(code, f"cannot {what}")

    @understood("ip sets")
    def _revision(self, kind: SetKind) -> int:
        """Return the newest revision of a type that the kernel has; asking loads its module."""
        if kind not in self._revisions:
            request = (
                _HEADER
                + attribute(1, bytes([_PROTOCOL]))
                + attribute(_TYPE_NAME, kind.type.encode() + b"\0")
                + attribute(_FAMILY, bytes([kind.family]))
            )
            what = f"the ip set type {kind.type}"
            try:
                buffers = self._netlink.ask(_TYPE, request, what)
            except NetlinkError as error:
                raise IpsetError(error.code, f"cannot use {what}") from error
            self._revisions[kind] = next(_answers(buffers), {})[_REVISION][0]
        return self._revisions[kind]

    def _dump(self, request: bytes, what: str, *, missing: bool = False) -> Iterator[dict[int, bytes]]:
        try:
            buffers = self._netlink.dump_all(_LIST, request, what)
        except NetlinkError as error:
            if missing and error.code == errno.ENOENT:
                return
            raise IpsetError(error.code, f"cannot read {what}") from error
        yield from _answers(buffers)


def _answers(buffers: Sequence[bytes]) -> Iterator[dict[int, bytes]]:
    for data in buffers:
        for at in messages(data):
            if at.kind >> 8 == _SUBSYSTEM:
                yield {kind: data[s:e] for kind, s, e in attributes(data, at.start + len(_HEADER), at.end)}


def _named(name: str) -> bytes:
    return _HEADER + attribute(1, bytes([_PROTOCOL])) + attribute(_SET_NAME, name.encode() + b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode()


def _port(kind: int, port: int) -> bytes:
    return attribute(kind | _BIG_ENDIAN, port.to_bytes(2, "big"))


def _number(kind: int, value: int) -> bytes:
    return attribute(kind | _BIG_ENDIAN, value.to_bytes(4, "big"))


def _chunks(entries: Collection[Entry]) -> Iterator[tuple[list[Entry], list[bytes]]]:
    items: list[Entry] = []
    packed: list[bytes] = []
    used = 0
    for entry in entries:
        data = _pack_entry(entry)
        if used + len(data) > _LIST_LIMIT:
            yield items, packed
            items, packed, used = [], [], 0
        items.append(entry)
        packed.append(data)
        used += len(data)
    if items:
        yield items, packed


def _pack_address(kind: int, ip: bytes) -> bytes:
    size = len(ip)
    inner = 1 if size == 4 else 2  # IPSET_ATTR_IPADDR_IPV4, _IPV6
    return _ADDRESS.pack(8 + size, kind | _NESTED, 4 + size, inner | _BIG_ENDIAN) + ip


def _pack_entry(entry: Entry) -> bytes:
    ip, protocol, port, ip2, prefixlen = entry
    inner = _pack_address(_IP, ip) if ip else b""
    if protocol:
        inner += _PORT_AND_PROTOCOL.pack(6, _PORT | _BIG_ENDIAN, port.to_bytes(2, "big"), 5, _PROTO, protocol)
    elif not ip:
        inner += _port(_PORT, port)
    if ip2:
        inner += _pack_address(_IP2, ip2)
    if prefixlen:
        inner += attribute(_CIDR2, bytes([prefixlen]))
    return nested(_DATA, inner)


def _read_entry(data: bytes, start: int, end: int) -> Entry:
    parts = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
    protocol = parts.get(_PROTO, b"\0")[0]
    port = int.from_bytes(parts.get(_PORT, b""), "big")
    prefixlen = parts.get(_CIDR2, b"\0")[0]
    return Entry(parts.get(_IP, b"")[4:], protocol, port, parts.get(_IP2, b"")[4:], prefixlen)


def _address_name(ip: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET if len(ip) == 4 else socket.AF_INET6, ip)
