"""Which way the kernel sends packets, asked of it as it would decide. Source: rtnetlink(7), RTM_GETROUTE."""

from __future__ import annotations

import errno
import socket
import struct
from typing import Final

from kubeproxy.kernel.netlink.protocol import (
    NETLINK_ROUTE,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
    messages,
    understood,
)

_GET_ROUTE: Final = 26
_NEW_ROUTE: Final = 24
_TO, _FROM, _OUT, _PREFERRED = 1, 2, 4, 7  # RTA_DST, RTA_SRC, RTA_OIF, RTA_PREFSRC
_HEAD: Final = struct.Struct("=8BI")  # struct rtmsg
_NO_WAY: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL})


def way_out(source: bytes, destination: bytes) -> str:
    """Return the interface by which what this node sends leaves, '' when it leaves by none. Addresses are packed.

    Raises NetlinkError.
    """
    index = int.from_bytes(_way(destination, attribute(_FROM, source)).get(_OUT, b""), "little")
    return dict(socket.if_nameindex()).get(index, "")


def source_for(destination: bytes) -> bytes | None:
    """Return the address of this node that the kernel chooses for what it sends there, None where it sends nothing.

    Raises NetlinkError.
    """
    return _way(destination).get(_PREFERRED)


@understood("a route")
def _way(destination: bytes, source: bytes = b"") -> dict[int, bytes]:
    """Return the attributes of the route of what this node sends, none where there is no route."""
    bits = 8 * len(destination)
    family = socket.AF_INET if bits == 32 else socket.AF_INET6
    head = _HEAD.pack(family, bits, bits if source else 0, 0, 0, 0, 0, 0, 0)
    with Netlink.open(NETLINK_ROUTE) as netlink:
        try:
            buffers = netlink.ask(_GET_ROUTE, head + attribute(_TO, destination) + source, "a route")
        except NetlinkError as error:
            if error.code in _NO_WAY:
                return {}
            raise
    for data in buffers:
        for at in messages(data):
            if at.kind == _NEW_ROUTE:
                return {kind: data[first:last] for kind, first, last in attributes(data, at.start + _HEAD.size, at.end)}
    return {}
