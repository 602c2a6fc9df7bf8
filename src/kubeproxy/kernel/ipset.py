"""IP sets over netlink: creates and reads sets, and adds and removes many entries in one message. Sources:
include/uapi/linux/netfilter/ipset/ip_set.h and net/netfilter/ipset/ of Linux 6.18."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.model.addresses import unpack

_SUBSYSTEM: Final = 6  # NFNL_SUBSYS_IPSET

_CREATE, _DESTROY, _SWAP, _LIST = _SUBSYSTEM << 8 | 2, _SUBSYSTEM << 8 | 3, _SUBSYSTEM << 8 | 6, _SUBSYSTEM << 8 | 7
_ADD, _DELETE, _TYPE = _SUBSYSTEM << 8 | 9, _SUBSYSTEM << 8 | 10, _SUBSYSTEM << 8 | 13

# Attributes of commands.
_SET_NAME, _TYPE_NAME, _SECOND_NAME, _REVISION, _FAMILY = 2, 3, 3, 4, 5
_FLAGS, _DATA = 6, 7
_ENTRIES: Final = 8  # IPSET_ATTR_ADT
_LINE: Final = 9
_LIST_HEADERS: Final = 4  # IPSET_FLAG_LIST_HEADER

# Attributes of entries, and of the creation of a set.
_IP, _PORT, _PORT_TO, _PROTO, _HASHSIZE = 1, 4, 5, 7, 18
_MAXELEM, _IP2, _CIDR2 = 19, 20, 21
_COUNT: Final = 24  # IPSET_ATTR_ELEMENTS
_REFERENCES: Final = 25
_BIG_ENDIAN: Final = 0x4000  # NLA_F_NET_BYTEORDER

_HEADER_SIZE: Final = 4  # struct nfgenmsg
_HEAD: Final = nl.netfilter_header(socket.AF_INET) + nl.attribute(1, b"\6")  # attribute 1: ipset's protocol version
_ADDRESS: Final = struct.Struct("=HHHH")
_PORT_AND_PROTOCOL: Final = struct.Struct("=HH2sxx HHBxxx")
# Maximum size of a list in bytes: its length is a 16-bit number, and the kernel sends a refused message back in full.
_LIST_LIMIT: Final = 32_000

BITMAP_PORT: Final = "bitmap:port"
HASH_IP: Final = "hash:ip"
HASH_IP_PORT: Final = "hash:ip,port"
HASH_IP_PORT_IP: Final = "hash:ip,port,ip"
HASH_IP_PORT_NET: Final = "hash:ip,port,net"

# Error codes of ip_set.h and of the set types.
_ERRORS: Final = {
    4097: "protocol error",
    4098: "the kernel lacks this set type, or its module",
    4099: "too many sets",
    4100: "a rule uses the set",
    4101: "the second set exists already",
    4102: "the sets' types differ",
    4103: "exists already",
    4104: "invalid prefix length",
    4106: "invalid family",
    4107: "timeouts are not supported",
    4108: "another set uses the set",
    4109: "no IPv4 address",
    4110: "no IPv6 address",
    4352: "the set is full (maxelem)",
    4354: "invalid protocol",
    4355: "missing protocol",
}


class SetEntry(NamedTuple):
    """An entry of any set type; fields that the type lacks are empty. `ip` and `ip2` are packed. `ip2` is the last
    address of hash:ip,port,ip, or the network of hash:ip,port,net. Bits of the network after `prefixlen` must be 0,
    because the kernel clears these bits and would return another entry."""

    ip: bytes = b""
    protocol: int = 0
    port: int = 0
    ip2: bytes = b""
    prefixlen: int = 0

    def __str__(self) -> str:
        texts = [unpack(self.ip)] if self.ip else []
        texts += [f"{self.protocol}:{self.port}"] if self.protocol else [str(self.port)] if not self.ip else []
        if self.ip2:
            texts.append(unpack(self.ip2) + (f"/{self.prefixlen}" if self.prefixlen else ""))
        return ",".join(texts)


class SetKind(NamedTuple):
    """A set's type (a constant of this module) and family; the family of bitmap:port is AF_UNSPEC."""

    type: str
    family: int


class SetCounts(NamedTuple):
    """A set's number of entries, capacity (0 for a bitmap), number of rules that use it, and type."""

    entries: int
    maxelem: int
    references: int
    kind: SetKind | None = None


class IpsetError(nl.NetlinkError):
    """The kernel refused a request about a set. `code` is an errno, or a code of ip_set.h (4096 or higher)."""

    def __init__(self, code: int, what: str, _: str = "") -> None:
        ApplyError.__init__(self, f"{what}: {_ERRORS.get(code) or nl.errno_text(code)}")
        self.code = code


class Ipsets(nl.Netlink):
    """The IP sets of a network namespace. The methods raise IpsetError when the kernel refuses, and NetlinkError when
    the socket fails."""

    refusal = IpsetError

    def create(self, name: str, kind: SetKind, *, hashsize: int = 1024, maxelem: int = 65536) -> None:
        """Create a set; a bitmap ignores the sizes. Raises IpsetError with code EEXIST if the name exists."""
        if kind.type == BITMAP_PORT:
            options = _port(_PORT, 0) + _port(_PORT_TO, 65535)
        else:
            options = nl.number_attribute(_HASHSIZE | _BIG_ENDIAN, hashsize)
            options += nl.number_attribute(_MAXELEM | _BIG_ENDIAN, maxelem)
        payload = (
            _named(name)
            + nl.text_attribute(_TYPE_NAME, kind.type)
            + nl.attribute(_REVISION, bytes([self._revision(kind)]))
            + nl.attribute(_FAMILY, bytes([kind.family]))
            + nl.nested(_DATA, options)
        )
        self.request(_CREATE, payload, f"create ip set {name}", nl.NLM_F_CREATE | nl.NLM_F_EXCL)

    def destroy(self, name: str) -> None:
        """Remove a set, if it exists. Raises IpsetError while a rule uses the set."""
        self.request(_DESTROY, _named(name), f"destroy ip set {name}", accepted=(errno.ENOENT,))

    def swap(self, first: str, second: str) -> None:
        """Exchange the contents of two sets of one type, atomically for the rules that use these sets."""
        payload = _named(first) + nl.text_attribute(_SECOND_NAME, second)
        self.request(_SWAP, payload, f"swap ip sets {first} and {second}")

    @nl.understood("ip sets")
    def counts(self) -> dict[str, SetCounts]:
        """Return the counts of all sets by name. The call is fast, because the kernel sends no entries."""
        found = {}
        for one in self._listed(_HEAD + nl.number_attribute(_FLAGS, _LIST_HEADERS), "the ip sets"):
            numbers = nl.numbers(one.get(_DATA, b""))
            entries, most, uses = (numbers.get(kind, 0) for kind in (_COUNT, _MAXELEM, _REFERENCES))
            kind = SetKind(nl.text_of(one[_TYPE_NAME]), one[_FAMILY][0])
            found[nl.text_of(one[_SET_NAME])] = SetCounts(entries, most, uses, kind)
        return found

    @nl.understood("ip sets")
    def entries(self, name: str) -> set[SetEntry]:
        """Return all entries of a set. Raises IpsetError with code ENOENT if the set is missing."""
        found: set[SetEntry] = set()
        for one in self._listed(_named(name), f"ip set {name}"):
            data = one.get(_ENTRIES, b"")
            found.update(_read_entry(nl.parts(data, start, end)) for _, start, end in nl.attributes(data, 0, len(data)))
        return found

    def add(self, name: str, entries: Collection[SetEntry]) -> None:
        """Add entries; an entry that exists is no error. Raises RefusedError."""
        self._change(_ADD, "add {} to", name, entries)

    def remove(self, name: str, entries: Collection[SetEntry]) -> None:
        """Remove entries; a missing entry is no error. Raises RefusedError."""
        self._change(_DELETE, "remove {} from", name, entries)

    def _change(self, command: int, verb: str, name: str, entries: Collection[SetEntry]) -> None:
        """Send many entries per message. If the kernel refuses a message, send each of its entries alone."""
        head, line = _named(name), nl.attribute(_LINE, bytes(4))
        chunks = list(_chunks(entries))
        payloads = [head + line + nl.attribute(_ENTRIES | nl.NLA_F_NESTED, b"".join(packed)) for _, packed in chunks]
        results = self.requests(command, payloads, f"ip set {name}")
        alone = [item for (chunk, _), (code, _) in zip(chunks, results, strict=True) if code for item in chunk]
        answers = self.requests(command, [head + _pack_entry(item) for item in alone], f"ip set {name}")
        refused = [
            (item, IpsetError(code, f"cannot {verb.format(item)} ip set {name}"))
            for item, (code, _) in zip(alone, answers, strict=True)
            if code
        ]
        if refused:
            raise nl.RefusedError(refused)

    @nl.understood("ip sets")
    def _revision(self, kind: SetKind) -> int:
        """Return the newest revision of a set type that the kernel supports. The request loads the type's module."""
        request = _HEAD + nl.text_attribute(_TYPE_NAME, kind.type) + nl.attribute(_FAMILY, bytes([kind.family]))
        what = f"the ip set type {kind.type}"
        ((code, _, places),) = self.inquire(_TYPE, [request], what)
        if code:
            raise IpsetError(code, f"cannot use {what}")
        ((data, start, end),) = places
        return nl.parts(data, start + _HEADER_SIZE, end)[_REVISION][0]

    def _listed(self, request: bytes, what: str) -> Iterator[dict[int, bytes]]:
        return (nl.parts(*place) for place in nl.answers(self.dump_all(_LIST, request, what), _HEADER_SIZE))


def _named(name: str) -> bytes:
    return _HEAD + nl.text_attribute(_SET_NAME, name)


def _port(kind: int, port: int) -> bytes:
    return nl.number_attribute(kind | _BIG_ENDIAN, port, 2)


def _chunks(entries: Collection[SetEntry]) -> Iterator[tuple[list[SetEntry], list[bytes]]]:
    items: list[SetEntry] = []
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
    return _ADDRESS.pack(8 + size, kind | nl.NLA_F_NESTED, 4 + size, inner | _BIG_ENDIAN) + ip


def _pack_entry(entry: SetEntry) -> bytes:
    ip, protocol, port, ip2, prefixlen = entry
    inner = _pack_address(_IP, ip) if ip else b""
    if protocol:
        inner += _PORT_AND_PROTOCOL.pack(6, _PORT | _BIG_ENDIAN, port.to_bytes(2, "big"), 5, _PROTO, protocol)
    elif not ip:
        inner += _port(_PORT, port)
    if ip2:
        inner += _pack_address(_IP2, ip2)
    if prefixlen:
        inner += nl.attribute(_CIDR2, bytes([prefixlen]))
    return nl.nested(_DATA, inner)


def _read_entry(found: Mapping[int, bytes]) -> SetEntry:
    protocol = found.get(_PROTO, b"\0")[0]
    port = int.from_bytes(found.get(_PORT, b""), "big")
    prefixlen = found.get(_CIDR2, b"\0")[0]
    return SetEntry(found.get(_IP, b"")[4:], protocol, port, found.get(_IP2, b"")[4:], prefixlen)
