"""IPVS over generic netlink: virtual servers, their real servers, timeouts; in batches, and read back.

Which servers there should be is a backend's affair. Sources: include/uapi/linux/ip_vs.h and
net/netfilter/ipvs/ip_vs_ctl.c of Linux 6.18.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.generic import GENERIC, family_id
from kubeproxy.kernel.netlink.protocol import (
    NETLINK_GENERIC,
    Closing,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
    messages,
    understood,
)

# Flags of a virtual server. The schedulers sh and mh read the last two.
PERSISTENT: Final = 0x1
ONE_PACKET: Final = 0x4
FALLBACK: Final = 0x8  # to the next server when the hashed one has weight 0
PORT: Final = 0x10  # the client's port is hashed too: kube-proxy sets it with mh
_SETTABLE: Final = PERSISTENT | ONE_PACKET | FALLBACK | PORT | 0x20  # not 0x2, HASHED, which the kernel sets itself

# How packets get to a real server; kube-proxy masquerades (NAT), the others are of other programs.
MASQUERADE: Final = 0

ADD_SERVICE: Final = 1
SET_SERVICE: Final = 2
DELETE_SERVICE: Final = 3
_GET_SERVICE: Final = 4
ADD_DESTINATION: Final = 5
SET_DESTINATION: Final = 6
DELETE_DESTINATION: Final = 7
_GET_DESTINATION: Final = 8
_SET_CONFIG: Final = 12
_GET_CONFIG: Final = 13

_VERSION: Final = 1
# IPVS_CMD_ATTR_...: what a message holds.
_SERVICE: Final = 1
_DESTINATION: Final = 2
_TIMEOUTS: Final = (4, 5, 6)  # tcp, tcp_fin, udp
# IPVS_SVC_ATTR_...: a virtual server.
_FAMILY: Final = 1
_PROTOCOL: Final = 2
_ADDRESS: Final = 3
_PORT: Final = 4
_SCHEDULER: Final = 6
_FLAGS: Final = 7
_TIMEOUT: Final = 8
_NETMASK: Final = 9
# IPVS_DEST_ATTR_...: a real server.
_REAL_ADDRESS: Final = 1
_REAL_PORT: Final = 2
_FORWARDING: Final = 3
_WEIGHT: Final = 4
_UPPER_THRESHOLD: Final = 5
_LOWER_THRESHOLD: Final = 6
_ACTIVE: Final = 7
_INACTIVE: Final = 8
_PERSISTENT: Final = 9
_REAL_FAMILY: Final = 11
_NESTED: Final = 0x8000

# The attributes of a service that name it, as one piece: address family, protocol, address, port. Lengths include the
# attribute's own header of four bytes, padding does not count. Packing all at once is what makes a batch cheap.
_KEY: Final = struct.Struct("=HHHxx HHHxx HH16s HH2sxx")
# Scheduler comes apart, since its length varies; then flags and mask, timeout, netmask.
_TRAITS: Final = struct.Struct("=HHII HHI HH4s")
_NESTING: Final = struct.Struct("=HH")
# Address, port, address family; for adding and setting also forwarding method, weight and both thresholds.
_DESTINATION_KEY: Final = struct.Struct("=HH HH16s HH2sxx HHHxx")
_DESTINATION_ALL: Final = struct.Struct("=HH HH16s HH2sxx HHHxx HHI HHI HHI HHI")
# Where address and port are in either of them.
_AT_ADDRESS: Final = 8
_AT_PORT: Final = 28

_SERVICE_COMMANDS: Final = {ADD_SERVICE: "add", SET_SERVICE: "change", DELETE_SERVICE: "delete"}
_DESTINATION_COMMANDS: Final = {ADD_DESTINATION: "add", SET_DESTINATION: "change", DELETE_DESTINATION: "delete"}
_REAL_NUMBERS: Final = (_FORWARDING, _WEIGHT, _ACTIVE, _INACTIVE, _PERSISTENT)
_REAL: Final = (_REAL_ADDRESS, _REAL_PORT, *_REAL_NUMBERS)
_NAMED_REFUSALS: Final = 3


class ServerKey(NamedTuple):
    """What names a virtual server: AF_INET or AF_INET6, IPPROTO_ number, packed address, port."""

    family: int
    protocol: int
    address: bytes
    port: int


class VirtualServer(NamedTuple):
    """A virtual server. `flags` are this module's constants; `timeout` is that of persistence, in seconds.

    PERSISTENT wants a timeout above 0. `prefixlen` groups clients for persistence, in bits; 0 is the whole address.
    """

    key: ServerKey
    scheduler: str = "rr"
    flags: int = 0
    timeout: int = 0
    prefixlen: int = 0


class DestinationKey(NamedTuple):
    """What names a real server within its virtual server: packed address, port. Its family is the virtual server's."""

    address: bytes
    port: int


class RealServer(NamedTuple):
    """A real server; the counts of connections are read only. Weight 0 gets no new connections."""

    key: DestinationKey
    weight: int = 1
    active: int = 0
    inactive: int = 0
    persistent: int = 0
    forwarding: int = MASQUERADE


class Operation(NamedTuple):
    """One change: an ADD_, SET_ or DELETE_ command, the virtual server, and the real server where the command has one.

    Deleting a virtual server deletes its real servers. Only the keys matter to deletions.
    """

    command: int
    server: VirtualServer
    real: RealServer | None = None

    def __str__(self) -> str:
        name = f"virtual server {_socket_name(self.server.key.address, self.server.key.port, self.server.key.protocol)}"
        if self.real is None:
            return f"{_SERVICE_COMMANDS[self.command]} {name} ({self.server.scheduler})"
        key = self.real.key
        return f"{_DESTINATION_COMMANDS[self.command]} real server {_socket_name(key.address, key.port)} of {name}"


class RefusedError(ApplyError):
    """The kernel refused some operations of a batch; `refused` has each one with its error. The others are in effect.

    Codes are errno's: EEXIST for adding what is there, ESRCH for a missing virtual server, ENOENT for a missing real
    server or scheduler.
    """

    def __init__(self, refused: Sequence[tuple[Operation, NetlinkError]]) -> None:
        self.refused = list(refused)
        text = "; ".join(str(error) for _, error in self.refused[:_NAMED_REFUSALS])
        more = len(self.refused) - _NAMED_REFUSALS
        super().__init__(text + (f"; and {more} more" if more > 0 else ""))


class Timeouts(NamedTuple):
    """How long connections are kept, in seconds; 0 leaves one as it is when they are set."""

    tcp: int
    tcp_fin: int
    udp: int


Servers = dict[ServerKey, tuple[VirtualServer, dict[DestinationKey, RealServer]]]


class Ipvs(Closing):
    """The virtual servers of a network namespace. A context manager; keeps one socket open.

    `kind` is the number that generic netlink gave to IPVS. Raises NetlinkError when the socket fails.
    """

    def __init__(self, netlink: Netlink, kind: int) -> None:
        self._netlink = netlink
        self._kind = kind
        self._reader = RealServerReader()

    @classmethod
    def open(cls) -> Self:
        """Open a socket in the caller's network namespace. Raises Unsupported when the kernel has no IPVS loaded."""
        netlink = Netlink.open(NETLINK_GENERIC)
        try:
            return cls(netlink, family_id(netlink, "IPVS"))
        except BaseException:
            netlink.close()
            raise

    def close(self) -> None:
        """Close the socket; the servers stay."""
        self._netlink.close()

    def apply(self, operations: Sequence[Operation]) -> None:
        """Do all operations in order, in as few sends as possible. Raises RefusedError when some were refused."""
        self.send([packed(operation) for operation in operations], operations.__getitem__)

    def send(self, payloads: Sequence[bytes], named: Callable[[int], Operation]) -> None:
        """Do operations that are packed already; `named` returns one by its number. Raises RefusedError."""
        results = self._netlink.requests(self._kind, payloads, "IPVS")
        refused = [
            (operation := named(number), NetlinkError(code, f"cannot {operation}", text))
            for number, (code, text) in enumerate(results)
            if code
        ]
        if refused:
            raise RefusedError(refused)

    @understood("IPVS")
    def servers(self) -> list[VirtualServer]:
        """Return all virtual servers but those that stand for a firewall mark."""
        request = GENERIC.pack(_GET_SERVICE, _VERSION, 0)
        return [
            server
            for data, start, end in self._dump(request, _SERVICE, "the virtual servers")
            if (server := _read_server(data, start, end)) is not None
        ]

    @understood("IPVS")
    def destinations(self, key: ServerKey) -> dict[DestinationKey, RealServer]:
        """Return the real servers of a virtual server; none when it is missing."""
        request = GENERIC.pack(_GET_DESTINATION, _VERSION, 0) + packed_key(key)
        entries = self._dump(request, _DESTINATION, "the real servers")
        return {real.key: real for real in self._reader.read(entries, _address_size(key.family))}

    def dump(self) -> Servers:
        """Return everything. The kernel lists real servers for one virtual server at a time: 30 us for each."""
        return {server.key: (server, self.destinations(server.key)) for server in self.servers()}

    @understood("IPVS")
    def timeouts(self) -> Timeouts:
        """Return the timeouts of connections."""
        found: dict[int, bytes] = {}
        for data in self._netlink.ask(self._kind, GENERIC.pack(_GET_CONFIG, _VERSION, 0), "the IPVS timeouts"):
            for at in messages(data):
                if at.kind == self._kind:
                    found |= {kind: data[s:e] for kind, s, e in attributes(data, at.start + GENERIC.size, at.end)}
        return Timeouts(*(_number(found.get(kind, b"")) for kind in _TIMEOUTS))

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """Set the timeouts of connections, leaving those that are 0. Raises NetlinkError."""
        parts = [attribute(kind, struct.pack("=I", value)) for kind, value in zip(_TIMEOUTS, timeouts, strict=True)]
        payload = GENERIC.pack(_SET_CONFIG, _VERSION, 0) + b"".join(parts)
        code, text = self._netlink.requests(self._kind, [payload], "the IPVS timeouts")[0]
        if code:
            raise NetlinkError(code, f"cannot set the IPVS timeouts to {timeouts}", text)

    def _dump(self, request: bytes, wanted: int, what: str) -> Iterator[tuple[bytes, int, int]]:
        """Yield (buffer, start, end) of the attributes of each entry. All is read first: the socket is used again."""
        for data in self._netlink.dump_all(self._kind, request, what):
            for at in messages(data):
                if at.kind == self._kind:
                    for kind, start, end in attributes(data, at.start + GENERIC.size, at.end):
                        if kind == wanted:
                            yield data, start, end


def packed_key(key: ServerKey) -> bytes:
    """Pack what names a virtual server."""
    return _NESTING.pack(4 + _KEY.size, _SERVICE | _NESTED) + _key_attributes(key)


def _key_attributes(key: ServerKey) -> bytes:
    family, protocol, address, port = key
    number = port.to_bytes(2, "big")
    return _KEY.pack(6, _FAMILY, family, 6, _PROTOCOL, protocol, 20, _ADDRESS, address, 6, _PORT, number)


def packed(operation: Operation) -> bytes:
    """Pack an operation."""
    command, server, real = operation
    head = GENERIC.pack(command, _VERSION, 0)
    if command in {ADD_SERVICE, SET_SERVICE}:
        inner = _key_attributes(server.key) + _traits(server)
        return head + _NESTING.pack(4 + len(inner), _SERVICE | _NESTED) + inner
    head += packed_key(server.key)
    if real is None:
        return head
    whole = _about_real_server(command, server.key.family, *real.key, real.weight, real.forwarding)
    return head + whole


def _about_real_server(command: int, family: int, address: bytes, port: int, weight: int, forwarding: int) -> bytes:
    key = (20, _REAL_ADDRESS, address, 6, _REAL_PORT, port.to_bytes(2, "big"), 6, _REAL_FAMILY, family)
    if command == DELETE_DESTINATION:
        return _DESTINATION_KEY.pack(_DESTINATION_KEY.size, _DESTINATION | _NESTED, *key)
    traits = (8, _FORWARDING, forwarding, 8, _WEIGHT, weight, 8, _UPPER_THRESHOLD, 0, 8, _LOWER_THRESHOLD, 0)
    return _DESTINATION_ALL.pack(_DESTINATION_ALL.size, _DESTINATION | _NESTED, *key, *traits)


class Pieces(NamedTuple):
    """What messages about masqueraded real servers of one weight have in common: a full sync has one for each endpoint.

    A message is `head`, what packed_key gives, `front`, the address, `middle`, the port in two bytes, and `end`.
    """

    head: bytes
    front: bytes
    middle: bytes
    end: bytes


@lru_cache(maxsize=64)
def pieces(command: int, family: int, weight: int) -> Pieces:
    """Return them for ADD_DESTINATION, SET_DESTINATION or DELETE_DESTINATION."""
    size = _address_size(family)
    whole = _about_real_server(command, family, bytes(size), 0, weight, MASQUERADE)
    return Pieces(
        GENERIC.pack(command, _VERSION, 0),
        whole[:_AT_ADDRESS],
        whole[_AT_ADDRESS + size : _AT_PORT],
        whole[_AT_PORT + 2 :],
    )


def _traits(server: VirtualServer) -> bytes:
    prefixlen = server.prefixlen or 8 * _address_size(server.key.family)
    if server.key.family == socket.AF_INET:
        netmask = (0xFFFFFFFF << 32 - prefixlen & 0xFFFFFFFF).to_bytes(4, "big")
    else:
        netmask = prefixlen.to_bytes(4, sys.byteorder)  # the attribute's name notwithstanding: ip_vs_add_service
    scheduler = attribute(_SCHEDULER, server.scheduler.encode() + b"\0")
    flags = (12, _FLAGS, server.flags & _SETTABLE, _SETTABLE)
    return scheduler + _TRAITS.pack(*flags, 8, _TIMEOUT, server.timeout, 8, _NETMASK, netmask)


def _read_server(data: bytes, start: int, end: int) -> VirtualServer | None:
    found = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
    if _ADDRESS not in found:
        return None
    family = _number(found[_FAMILY])
    size = _address_size(family)
    key = ServerKey(family, _number(found[_PROTOCOL]), found[_ADDRESS][:size], int.from_bytes(found[_PORT], "big"))
    netmask = _number(found[_NETMASK])
    prefixlen = netmask if family == socket.AF_INET6 else netmask.bit_count()
    scheduler = found.get(_SCHEDULER, b"").rstrip(b"\0").decode()
    flags = _number(found[_FLAGS][:4]) & _SETTABLE
    return VirtualServer(key, scheduler, flags, _number(found[_TIMEOUT]), prefixlen % (8 * size))


class RealServerReader:
    """Reads real servers. All entries of a kernel have the same attributes in the same order: learned from the first.

    That takes a quarter of the time of looking at each attribute; an entry that is otherwise is learned anew.
    """

    def __init__(self) -> None:
        self._struct = struct.Struct("")
        self._headers: tuple[int, ...] = ()
        self._wanted: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple

    def read(self, entries: Iterable[tuple[bytes, int, int]], size: int) -> Iterator[RealServer]:
        """Yield the real server of each (buffer, start, end); addresses have `size` bytes."""
        for data, start, end in entries:
            values = self._values(data, start, end)
            if values is None:
                self._learn(data, start, end)
                values = self._values(data, start, end)
            if values is None:
                raise ApplyError("the kernel lists a real server in a way that is not known")
            address, port, forwarding, weight, active, inactive, persistent = self._wanted(values)
            key = DestinationKey(address[:size], int.from_bytes(port, "big"))
            yield RealServer(key, weight, active, inactive, persistent, forwarding)

    def _values(self, data: bytes, start: int, end: int) -> tuple[Any, ...] | None:
        """Return headers and values in turn, None where the layout is another one."""
        if not self._headers or end - start < self._struct.size:
            return None
        values = self._struct.unpack_from(data, start)
        return values if values[::2] == self._headers else None

    def _learn(self, data: bytes, start: int, end: int) -> None:
        headers: list[int] = []
        places: dict[int, int] = {}
        layout = "="
        for kind, first, last in attributes(data, start, end):
            length = last - first
            padding = "x" * (-length & 3 if first + length < end else 0)
            places[kind] = 2 * len(headers) + 1
            headers.append(int.from_bytes(data[first - 4 : first], sys.byteorder))
            if kind in _REAL_NUMBERS and length != 4:
                raise ApplyError("the kernel lists a real server with a number that has no four bytes")
            layout += f"I{'I' if kind in _REAL_NUMBERS else f'{length}s'}{padding}"
            if all(wanted in places for wanted in _REAL):
                break
        else:
            raise ApplyError("the kernel lists a real server without all of its attributes")
        self._struct, self._headers = struct.Struct(layout), tuple(headers)
        self._wanted = itemgetter(*(places[wanted] for wanted in _REAL))


def _number(data: bytes) -> int:
    return int.from_bytes(data, sys.byteorder)


def _address_size(family: int) -> int:
    return 4 if family == socket.AF_INET else 16


def _socket_name(address: bytes, port: int, protocol: int | None = None) -> str:
    text = socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)
    name = f"[{text}]:{port}" if ":" in text else f"{text}:{port}"
    protocols = {socket.IPPROTO_TCP: "TCP", socket.IPPROTO_UDP: "UDP", 132: "SCTP"}
    return name if protocol is None else f"{protocols.get(protocol, str(protocol))} {name}"
