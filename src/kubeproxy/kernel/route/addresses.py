"""The addresses of this node over rtnetlink: listing them, and being told when they change.

Which of them are node addresses, or serve NodePorts, is the model's business. Source: rtnetlink(7), RTM_GETADDR.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Self

from msgspec import Struct

from kubeproxy.kernel.netlink.protocol import (
    NETLINK_ROUTE,
    Closing,
    Netlink,
    attributes,
    messages,
    understood,
)
from kubeproxy.kernel.route.route_changes import RouteChanges

SCOPE_UNIVERSE: Final = 0
SCOPE_SITE: Final = 200
SCOPE_LINK: Final = 253
SCOPE_HOST: Final = 254

_RTM_NEWADDR: Final = 20
_RTM_GETADDR: Final = 22
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_RTMGRP_IPV4_IFADDR: Final = 0x10
_RTMGRP_IPV6_IFADDR: Final = 0x100
_IFADDRMSG: Final = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface index


class Address(Struct, frozen=True, order=True):
    """A local address: packed, with its prefix length in bits, interface name and scope (the SCOPE_ constants)."""

    ip: bytes
    prefixlen: int
    interface: str
    scope: int


def local_addresses(family: int) -> list[Address]:
    """Return the addresses of a family (AF_INET or AF_INET6) on all interfaces, in the kernel's order.

    On a point-to-point interface that is the own end. Raises NetlinkError.
    """
    with Netlink.open(NETLINK_ROUTE) as netlink:
        buffers = netlink.dump_all(_RTM_GETADDR, _IFADDRMSG.pack(family, 0, 0, 0, 0), "the local addresses")
    return listed(family, buffers, dict(socket.if_nameindex()))


@understood("addresses")
def listed(family: int, buffers: Iterable[bytes], names: Mapping[int, str]) -> list[Address]:
    """Return the addresses in the buffers of a dump; `names` are the interfaces by index. Raises ApplyError."""
    found = []
    for data in buffers:
        for at in messages(data):
            if at.kind == _RTM_NEWADDR:
                address = _address(family, data, at.start, at.end, names)
                if address is not None:
                    found.append(address)
    return found


def _address(family: int, data: bytes, start: int, end: int, names: Mapping[int, str]) -> Address | None:
    own_family, prefixlen, _, scope, index = _IFADDRMSG.unpack_from(data, start)
    parts = {kind: data[a:b] for kind, a, b in attributes(data, start + _IFADDRMSG.size, end)}
    # IFA_ADDRESS is the peer where IFA_LOCAL exists (rtnetlink(7)).
    ip = parts.get(_IFA_LOCAL, parts.get(_IFA_ADDRESS))
    if own_family != family or ip is None or index not in names:
        return None
    return Address(ip, prefixlen, names[index], scope)


class AddressMonitor(Closing):
    """Tells that addresses of either family came or went, for loop.add_reader(monitor.fileno(), ...).

    Those of some interfaces may be ignored, by name.
    """

    def __init__(self, changes: RouteChanges, ignored: AbstractSet[str]) -> None:
        self._changes = changes
        self._ignored = ignored

    @classmethod
    def open(cls, ignored: AbstractSet[str] = frozenset()) -> Self:
        """Listen from now on, in the caller's network namespace. Raises NetlinkError."""
        return cls(RouteChanges.open(_RTMGRP_IPV4_IFADDR | _RTMGRP_IPV6_IFADDR, "address changes"), ignored)

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when something changed."""
        return self._changes.fileno()

    @understood("addresses")
    def drain(self) -> bool:
        """Read all that is there without blocking; True when addresses may have changed, and are to be listed again.

        A lifetime that is renewed counts, and so do messages that were lost because too many came at once.
        """
        ignored = {_index(name) for name in self._ignored}
        return self._changes.changed(
            lambda data: any(_IFADDRMSG.unpack_from(data, at.start)[4] not in ignored for at in messages(data))
        )

    def close(self) -> None:
        """Close the socket; remove it from the loop first."""
        self._changes.close()


def _index(name: str) -> int:
    """Return an interface's index, 0 when there is none of that name."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0
