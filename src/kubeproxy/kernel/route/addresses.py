"""Addresses and routes of the network namespace, over rtnetlink: listed, looked up, and announced when they change.

`model/` decides which of them are node addresses or serve NodePorts. Source: rtnetlink(7).
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Self

from msgspec import Struct

from kubeproxy.kernel.netlink.announcements import Announcements
from kubeproxy.kernel.netlink.protocol import (
    NETLINK_ROUTE,
    Closing,
    Netlink,
    NetlinkError,
    answers,
    attribute,
    messages,
    parts,
    understood,
)
from kubeproxy.model.addresses import Range, family_of

SCOPE_UNIVERSE: Final = 0

_GET_ADDRESSES: Final = 22  # RTM_GETADDR
_ADDRESS, _LOCAL = 1, 2  # IFA_...
_GROUPS: Final = (5, 9)  # RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR
_RECEIVE_BUFFER: Final = 4 << 20
_ADDRESS_HEAD: Final = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefix length, flags, scope, interface

_GET_ROUTE: Final = 26
_TO, _FROM, _OUT, _PREFERRED = 1, 2, 4, 7  # RTA_DST, RTA_SRC, RTA_OIF, RTA_PREFSRC
_ROUTE_HEAD: Final = struct.Struct("=8BI")  # struct rtmsg
_NO_ROUTE: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL})


class Address(Struct, frozen=True, order=True):
    """A local address: packed, with its prefix length in bits, interface name and scope (RT_SCOPE_...)."""

    ip: bytes
    prefixlen: int
    interface: str
    scope: int

    @property
    def network(self) -> Range:
        """Return the first and last address of the interface's network."""
        size, bits = len(self.ip), 8 * len(self.ip) - self.prefixlen
        first = int.from_bytes(self.ip, "big") >> bits << bits
        return first.to_bytes(size, "big"), (first | (1 << bits) - 1).to_bytes(size, "big")


def local_addresses(family: int) -> list[Address]:
    """Return the addresses of a family (AF_INET or AF_INET6) on all interfaces, in the kernel's order.

    On a point-to-point interface that is the local end. Raises NetlinkError.
    """
    with Netlink.open(NETLINK_ROUTE) as netlink:
        buffers = netlink.dump_all(_GET_ADDRESSES, _ADDRESS_HEAD.pack(family, 0, 0, 0, 0), "the local addresses")
    return listed(family, buffers, dict(socket.if_nameindex()))


@understood("addresses")
def listed(family: int, buffers: Iterable[bytes], names: Mapping[int, str]) -> list[Address]:
    """Return the addresses of a family in a dump; `names` are the interfaces by index. Raises ApplyError."""
    found = []
    for data, start, end in answers(buffers, _ADDRESS_HEAD.size):
        own_family, prefixlen, _, scope, index = _ADDRESS_HEAD.unpack_from(data, start - _ADDRESS_HEAD.size)
        values = parts(data, start, end)
        # If there is a local address, the other one is that of the peer (rtnetlink(7)).
        ip = values.get(_LOCAL, values.get(_ADDRESS))
        if own_family == family and ip is not None and index in names:
            found.append(Address(ip, prefixlen, names[index], scope))
    return found


class AddressMonitor(Closing):
    """Reports that addresses of either family changed, for loop.add_reader(monitor.fileno(), ...).

    Changes of `ignored` interfaces, by name, do not count.
    """

    def __init__(self, changes: Announcements, ignored: AbstractSet[str]) -> None:
        self._changes = changes
        self._ignored = ignored

    @classmethod
    def open(cls, ignored: AbstractSet[str] = frozenset()) -> Self:
        """Receive changes from now on, in the caller's network namespace. Raises NetlinkError."""
        return cls(Announcements.open("address changes", _GROUPS, _RECEIVE_BUFFER, NETLINK_ROUTE), ignored)

    def fileno(self) -> int:
        """Return the file descriptor that is readable after a change."""
        return self._changes.fileno()

    @understood("addresses")
    def drain(self) -> bool:
        """Read all messages without blocking; return whether addresses may have changed, so that they must be listed.

        A lifetime that was renewed counts, and so do messages that the kernel dropped because too many came.
        """
        ignored = {_index(name) for name in self._ignored}
        return self._changes.changed(
            lambda data: any(_ADDRESS_HEAD.unpack_from(data, at.start)[4] not in ignored for at in messages(data))
        )

    def close(self) -> None:
        """Close the socket; remove it from the loop first."""
        self._changes.close()


def _index(name: str) -> int:
    """Return an interface's index, 0 if it is missing."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def way_out(source: bytes, destination: bytes) -> str:
    """Return the interface that a packet of this node leaves by, '' if it has no route. Addresses are packed.

    Raises NetlinkError.
    """
    index = int.from_bytes(_route(destination, attribute(_FROM, source)).get(_OUT, b""), "little")
    return dict(socket.if_nameindex()).get(index, "")


def source_for(destination: bytes) -> bytes | None:
    """Return the source address that the kernel chooses for packets to a destination, None if it has no route.

    Raises NetlinkError.
    """
    return _route(destination).get(_PREFERRED)


@understood("a route")
def _route(destination: bytes, source: bytes = b"") -> dict[int, bytes]:
    """Return the attributes of the route of this node's packets to a destination; none if there is no route."""
    bits = 8 * len(destination)
    head = _ROUTE_HEAD.pack(family_of(destination), bits, bits if source else 0, 0, 0, 0, 0, 0, 0)
    with Netlink.open(NETLINK_ROUTE) as netlink:
        try:
            buffers = netlink.ask(_GET_ROUTE, head + attribute(_TO, destination) + source, "a route")
        except NetlinkError as error:
            if error.code in _NO_ROUTE:
                return {}
            raise
    return next((parts(*place) for place in answers(buffers, _ROUTE_HEAD.size)), {})
