"""The interfaces of this network namespace over rtnetlink: those that carry Ethernet frames, and that some changed.

Source: rtnetlink(7), RTM_GETLINK.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from kubeproxy.kernel.netlink.protocol import NETLINK_ROUTE, Netlink, attributes, messages
from kubeproxy.kernel.route.route_changes import RouteChanges

_RTM_NEWLINK: Final = 16
_RTM_GETLINK: Final = 18
_RTMGRP_LINK: Final = 1
_NAME: Final = 3  # IFLA_IFNAME
_ETHERNET: Final = 1  # ARPHRD_ETHER
_IFINFOMSG: Final = struct.Struct("=BxHiII")  # family, type, index, flags, which flags


def ethernet_interfaces() -> dict[int, str]:
    """Return index and name of interfaces that carry Ethernet frames: no loopback, no tunnels. Raises NetlinkError."""
    with Netlink.open(NETLINK_ROUTE) as netlink:
        buffers = netlink.dump_all(_RTM_GETLINK, _IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0), "the interfaces")
    found: dict[int, str] = {}
    for data in buffers:
        for at in messages(data):
            if at.kind != _RTM_NEWLINK:
                continue
            _, kind, index, _, _ = _IFINFOMSG.unpack_from(data, at.start)
            if kind == _ETHERNET:
                parts = {name: data[a:b] for name, a, b in attributes(data, at.start + _IFINFOMSG.size, at.end)}
                found[index] = parts[_NAME].rstrip(b"\0").decode(errors="replace")
    return found


def interface_changes() -> RouteChanges:
    """Return what tells that interfaces came, went or changed. Raises NetlinkError."""
    return RouteChanges.open(_RTMGRP_LINK, "interfaces")
