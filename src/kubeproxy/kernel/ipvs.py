"""IPVS over generic netlink: reads virtual servers and real servers, changes them in batches, and sets timeouts.
Sources: include/uapi/linux/ip_vs.h, net/netfilter/ipvs/ip_vs_ctl.c and include/uapi/linux/genetlink.h of Linux 6.18."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.model.addresses import PROTOCOL_NAMES, destination_text, family_of, place_text

GENERIC: Final = struct.Struct("=BBH")
"""struct genlmsghdr, the header of messages of generic netlink: command, version, reserved field."""
_CONTROL: Final = 0x10  # GENL_ID_CTRL
_GET_FAMILY: Final = 3  # CTRL_CMD_GETFAMILY
_FAMILY_ID, _FAMILY_NAME = 1, 2

# Flags of a virtual server. Only the schedulers sh and mh use FALLBACK and PORT.
PERSISTENT, ONE_PACKET = 0x1, 0x4
FALLBACK: Final = 0x8  # chooses the next server if the hashed server has weight 0
PORT: Final = 0x10  # hashes the client's port as well: kube-proxy sets this flag with mh
_SETTABLE: Final = PERSISTENT | ONE_PACKET | FALLBACK | PORT | 0x20  # 0x2, HASHED, is set by the kernel

# Forwarding methods to a real server. kube-proxy uses masquerading (NAT); other programs may use any method.
MASQUERADE: Final = 0

_GET_SERVICE, _GET_DESTINATION, _SET_CONFIG = 4, 8, 12

_VERSION: Final = 1
# IPVS_CMD_ATTR_...
_SERVICE, _DESTINATION = 1, 2
_TIMEOUTS: Final = (4, 5, 6)  # tcp, tcp_fin, udp
# IPVS_SVC_ATTR_...
_FAMILY, _PROTOCOL, _ADDRESS, _PORT, _SCHEDULER = 1, 2, 3, 4, 6
_FLAGS, _TIMEOUT, _NETMASK = 7, 8, 9
# IPVS_DEST_ATTR_...
_REAL_ADDRESS, _REAL_PORT, _FORWARDING, _WEIGHT, _UPPER_THRESHOLD = 1, 2, 3, 4, 5
_LOWER_THRESHOLD, _ACTIVE, _INACTIVE, _REAL_FAMILY = 6, 7, 8, 11

# The attributes that identify a virtual server: address family, protocol, address, port. One call packs all four, which
# makes batches fast. The length of an attribute includes its header of four bytes, and no padding.
_KEY: Final = struct.Struct("=HHHxx HHHxx HH16s HH2sxx")
# The attributes after the scheduler's name (of variable length): flags and mask, timeout, netmask.
_TRAITS: Final = struct.Struct("=HHII HHI HH4s")
_NESTING: Final = struct.Struct("=HH")
# Attributes of a real server. A request to add or change a real server has four more attributes: forwarding method,
# weight, two thresholds.
_DESTINATION_KEY: Final = struct.Struct("=HH HH16s HH2sxx HHHxx")
_DESTINATION_ALL: Final = struct.Struct("=HH HH16s HH2sxx HHHxx HHI HHI HHI HHI")
# The offsets of address and port in each of the two structures.
_AT_ADDRESS, _AT_PORT = 8, 28

_REAL_NUMBERS: Final = (_FORWARDING, _WEIGHT, _ACTIVE, _INACTIVE)
_REAL: Final = (_REAL_ADDRESS, _REAL_PORT, *_REAL_NUMBERS)


class Verb(IntEnum):
    """Commands of the kernel (IPVS_CMD_...)."""

    ADD_SERVICE = 1
    SET_SERVICE = 2
    DELETE_SERVICE = 3
    ADD_SERVER = 5
    SET_SERVER = 6
    DELETE_SERVER = 7


class VirtualServer(NamedTuple):
    """A virtual server. `flags` are constants of this module; `timeout` is the persistence timeout in seconds. `key` is
    the result of server_key. PERSISTENT needs a timeout above 0. Persistence groups clients by the first `prefixlen`
    bits of their addresses; 0 means all bits."""

    key: bytes
    scheduler: str = "rr"
    flags: int = 0
    timeout: int = 0
    prefixlen: int = 0


class RealServer(NamedTuple):
    """A real server. The numbers of connections are read-only; a real server with weight 0 gets no new connections.
    `key` identifies the real server in its virtual server: packed address, and port in two bytes, network order."""

    key: bytes
    weight: int = 1
    active: int = 0
    inactive: int = 0
    forwarding: int = MASQUERADE


class ServerChange(NamedTuple):
    """One change: the verb, the virtual server, and the real server if the verb needs a real server. Deleting a virtual
    server deletes its real servers. Deletions use only the keys."""

    command: Verb
    server: VirtualServer
    real: RealServer | None = None

    def __str__(self) -> str:
        key = self.server.key
        kind = PROTOCOL_NAMES.get(key[-3], str(key[-3]))
        name = f"virtual server {kind} {place_text(key[:-3], int.from_bytes(key[-2:], 'big'))}"
        word = self.command.name.partition("_")[0].lower().replace("set", "change")
        if self.real is None:
            return f"{word} {name} ({self.server.scheduler})"
        return f"{word} real server {destination_text(self.real.key)} of {name}"


class Timeouts(NamedTuple):
    """Seconds after which the kernel removes an idle connection; `set_timeouts` skips a value of 0."""

    tcp: int
    tcp_fin: int
    udp: int


class Ipvs(nl.Closing):
    """The virtual servers of a network namespace. A context manager that keeps one socket open. `kind` is the message
    type that generic netlink assigned to IPVS. Raises NetlinkError when the socket fails."""

    def __init__(self, netlink: nl.Netlink, kind: int) -> None:
        self._netlink = netlink
        self._kind = kind
        self._reader = RealServerReader()

    @classmethod
    def open(cls) -> Self:
        """Open a socket in the caller's network namespace. Raises Unsupported if the module of IPVS is not loaded."""
        netlink = nl.Netlink.open(nl.NETLINK_GENERIC)
        try:
            return cls(netlink, family_id(netlink, "IPVS"))
        except BaseException:
            netlink.close()
            raise

    def close(self) -> None:
        """Close the socket; virtual and real servers are not deleted."""
        self._netlink.close()

    def apply(self, changes: Sequence[ServerChange]) -> None:
        """Apply all changes in order, with as few system calls as possible. Raises RefusedError. Codes: EEXIST if an
        added object exists, ESRCH if the virtual server is missing, ENOENT if the real server or scheduler is
        missing."""
        results = self._netlink.requests(self._kind, list(_payloads(changes)), "IPVS")
        refused = [
            (change, nl.NetlinkError(code, f"cannot {change}", text))
            for change, (code, text) in zip(changes, results, strict=True)
            if code
        ]
        if refused:
            raise nl.RefusedError(refused)

    @nl.understood("IPVS")
    def servers(self) -> list[VirtualServer]:
        """Return all virtual servers except those that a firewall mark identifies."""
        request = GENERIC.pack(_GET_SERVICE, _VERSION, 0)
        return [
            server
            for data, start, end in self._dump(request, _SERVICE, "the virtual servers")
            if (server := _read_server(data, start, end)) is not None
        ]

    @nl.understood("IPVS")
    def destinations(self, key: bytes) -> dict[bytes, RealServer]:
        """Return the real servers of a virtual server; {} if the virtual server is missing."""
        request = GENERIC.pack(_GET_DESTINATION, _VERSION, 0) + packed_key(key)
        entries = self._dump(request, _DESTINATION, "the real servers")
        return {real.key: real for real in self._reader.read(entries, len(key) - 3)}

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """Set the connection timeouts, except values of 0. Raises NetlinkError."""
        packed = [nl.attribute(kind, struct.pack("=I", value)) for kind, value in zip(_TIMEOUTS, timeouts, strict=True)]
        payload = GENERIC.pack(_SET_CONFIG, _VERSION, 0) + b"".join(packed)
        self._netlink.request(self._kind, payload, f"set the IPVS timeouts to {timeouts}")

    def _dump(self, request: bytes, wanted: int, what: str) -> Iterator[tuple[bytes, int, int]]:
        for data, first, last in nl.answers(self._netlink.dump_all(self._kind, request, what), GENERIC.size):
            for kind, start, end in nl.attributes(data, first, last):
                if kind == wanted:
                    yield data, start, end


@nl.understood("generic netlink")
def family_id(netlink: nl.Netlink, name: str) -> int:
    """Return the message type of a family of generic netlink. Raises Unsupported if the kernel has no such family."""
    request = GENERIC.pack(_GET_FAMILY, 1, 0) + nl.text_attribute(_FAMILY_NAME, name)
    # Dump all families, because a dump does not fail if the wanted family is missing.
    for place in nl.answers(netlink.dump_all(_CONTROL, request, "the generic netlink families"), GENERIC.size):
        found = nl.parts(*place)
        if nl.text_of(found.get(_FAMILY_NAME, b"")) == name:
            return nl.host_number(found[_FAMILY_ID])
    raise Unsupported(f"the kernel has no generic netlink family {name}: its module is not loaded")


def server_key(address: bytes, protocol: int, port: int) -> bytes:
    """Return the key of a virtual server: packed address, protocol, and port in two bytes, network order."""
    return address + bytes((protocol,)) + port.to_bytes(2, "big")


def packed_key(key: bytes) -> bytes:
    """Return the attribute that identifies a virtual server."""
    return _NESTING.pack(4 + _KEY.size, _SERVICE | nl.NLA_F_NESTED) + _key_attributes(key)


def _key_attributes(key: bytes) -> bytes:
    family = family_of(key[:-3])
    return _KEY.pack(6, _FAMILY, family, 6, _PROTOCOL, key[-3], 20, _ADDRESS, key[:-3], 6, _PORT, key[-2:])


def packed(change: ServerChange) -> bytes:
    """Pack a change."""
    command, server, real = change
    head = GENERIC.pack(command, _VERSION, 0)
    if command in {Verb.ADD_SERVICE, Verb.SET_SERVICE}:
        inner = _key_attributes(server.key) + _traits(server)
        return head + _NESTING.pack(4 + len(inner), _SERVICE | nl.NLA_F_NESTED) + inner
    head += packed_key(server.key)
    if real is None:
        return head
    return head + _about_real_server(command, real.key, real.weight, real.forwarding)


def _about_real_server(command: int, destination: bytes, weight: int, forwarding: int) -> bytes:
    address, port = destination[:-2], destination[-2:]
    key = (20, _REAL_ADDRESS, address, 6, _REAL_PORT, port, 6, _REAL_FAMILY, family_of(address))
    if command == Verb.DELETE_SERVER:
        return _DESTINATION_KEY.pack(_DESTINATION_KEY.size, _DESTINATION | nl.NLA_F_NESTED, *key)
    traits = (8, _FORWARDING, forwarding, 8, _WEIGHT, weight, 8, _UPPER_THRESHOLD, 0, 8, _LOWER_THRESHOLD, 0)
    return _DESTINATION_ALL.pack(_DESTINATION_ALL.size, _DESTINATION | nl.NLA_F_NESTED, *key, *traits)


def _payloads(changes: Iterable[ServerChange]) -> Iterator[bytes]:
    """Yield each change as a message. A message about a real server is joined from pieces, for speed."""
    last, name = b"", b""
    for change in changes:
        command, (key, *_), real = change
        if real is None or real.forwarding != MASQUERADE:
            yield packed(change)
            continue
        if key != last:
            last, name = key, packed_key(key)
        address, port = real.key[:-2], real.key[-2:]
        head, front, middle, end = pieces(command, family_of(address), real.weight)
        yield b"".join((head, name, front, address, middle, port, end))


class Pieces(NamedTuple):
    """The constant bytes of the messages for masqueraded real servers of equal weight. A full sync sends one message
    per endpoint. The message consists, in this order, of `head`, the virtual server's packed key, `front`, the address,
    `middle`, the port (two bytes) and `end`."""

    head: bytes
    front: bytes
    middle: bytes
    end: bytes


@lru_cache(maxsize=64)
def pieces(command: int, family: int, weight: int) -> Pieces:
    """Return the constant bytes for ADD_SERVER, SET_SERVER or DELETE_SERVER."""
    size = _address_size(family)
    whole = _about_real_server(command, bytes(size + 2), weight, MASQUERADE)
    return Pieces(
        GENERIC.pack(command, _VERSION, 0),
        whole[:_AT_ADDRESS],
        whole[_AT_ADDRESS + size : _AT_PORT],
        whole[_AT_PORT + 2 :],
    )


def _traits(server: VirtualServer) -> bytes:
    size = len(server.key) - 3
    prefixlen = server.prefixlen or 8 * size
    if size == 4:
        netmask = (0xFFFFFFFF << 32 - prefixlen & 0xFFFFFFFF).to_bytes(4, "big")
    else:
        # For IPv6 the value of the attribute "netmask" is a prefix length (ip_vs_add_service).
        netmask = prefixlen.to_bytes(4, sys.byteorder)
    scheduler = nl.text_attribute(_SCHEDULER, server.scheduler)
    flags = (12, _FLAGS, server.flags & _SETTABLE, _SETTABLE)
    return scheduler + _TRAITS.pack(*flags, 8, _TIMEOUT, server.timeout, 8, _NETMASK, netmask)


def _read_server(data: bytes, start: int, end: int) -> VirtualServer | None:
    found = nl.parts(data, start, end)
    if _ADDRESS not in found:
        return None
    family = nl.host_number(found[_FAMILY])
    size = _address_size(family)
    key = server_key(found[_ADDRESS][:size], nl.host_number(found[_PROTOCOL]), int.from_bytes(found[_PORT], "big"))
    netmask = nl.host_number(found[_NETMASK])
    prefixlen = netmask if family == socket.AF_INET6 else netmask.bit_count()
    scheduler = nl.text_of(found.get(_SCHEDULER, b""))
    flags = nl.host_number(found[_FLAGS][:4]) & _SETTABLE
    return VirtualServer(key, scheduler, flags, nl.host_number(found[_TIMEOUT]), prefixlen % (8 * size))


class RealServerReader:
    """Reads real servers by the byte layout of the first entry, four times as fast as by parsing each attribute. If an
    entry has another layout, the reader uses that layout for the following entries."""

    def __init__(self) -> None:
        self._struct = struct.Struct("")
        self._headers: tuple[int, ...] = ()
        self._wanted: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple

    def read(self, entries: Iterable[tuple[bytes, int, int]], size: int) -> Iterator[RealServer]:
        """Yield the real server of each (buffer, start, end). Addresses have `size` bytes."""
        for data, start, end in entries:
            values = self._values(data, start, end)
            if values is None:
                self._learn(data, start, end)
                values = self._values(data, start, end)
            if values is None:
                raise ApplyError("the kernel describes a real server in an unknown layout")
            address, port, forwarding, weight, active, inactive = self._wanted(values)
            yield RealServer(address[:size] + port, weight, active, inactive, forwarding)

    def _values(self, data: bytes, start: int, end: int) -> tuple[Any, ...] | None:
        if not self._headers or end - start < self._struct.size:
            return None
        values = self._struct.unpack_from(data, start)
        return values if values[::2] == self._headers else None

    def _learn(self, data: bytes, start: int, end: int) -> None:
        headers: list[int] = []
        places: dict[int, int] = {}
        layout = "="
        for kind, first, last in nl.attributes(data, start, end):
            length = last - first
            padding = "x" * (-length & 3 if first + length < end else 0)
            places[kind] = 2 * len(headers) + 1
            headers.append(nl.host_number(data[first - 4 : first]))
            if kind in _REAL_NUMBERS and length != 4:
                raise ApplyError("the kernel describes a real server with a number whose length is not four bytes")
            layout += f"I{'I' if kind in _REAL_NUMBERS else f'{length}s'}{padding}"
            if all(wanted in places for wanted in _REAL):
                break
        else:
            raise ApplyError("the kernel's description of a real server lacks an attribute")
        self._struct, self._headers = struct.Struct(layout), tuple(headers)
        self._wanted = itemgetter(*(places[wanted] for wanted in _REAL))


def _address_size(family: int) -> int:
    return 4 if family == socket.AF_INET else 16
