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
_TO, _FROM, _OUT = 1, 2, 4  # RTA_DST, RTA_SRC, RTA_OIF
_HEAD: Final = struct.Struct("=8BI")  # struct rtmsg
_NO_WAY: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL})


@understood("a route")
def way_out(source: bytes, destination: bytes) -> str:
    """Return the interface by which what this node sends leaves, '' when it leaves by none. Addresses are packed.

    Raises NetlinkError.
    """
    bits = 8 * len(destination)
    family = socket.AF_INET if bits == 32 else socket.AF_INET6
    head = _HEAD.pack(family, bits, bits, 0, 0, 0, 0, 0, 0)
    with Netlink.open(NETLINK_ROUTE) as netlink:
        try:
            buffers = netlink.ask(_GET_ROUTE, head + attribute(_TO, destination) + attribute(_FROM, source), "a route")
        except NetlinkError as error:
            if error.code in _NO_WAY:
                return ""
            raise
    names = dict(socket.if_nameindex())
    for data in buffers:
        for at in messages(data):
            if at.kind == _NEW_ROUTE:
                parts = {
                    kind: data[first:last] for kind, first, last in attributes(data, at.start + _HEAD.size, at.end)
                }
                return names.get(int.from_bytes(parts.get(_OUT, b""), "little"), "")
    return ""
