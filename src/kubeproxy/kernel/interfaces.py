"""The interfaces of this network namespace over rtnetlink: those that carry Ethernet frames, and that some changed.

Source: rtnetlink(7), RTM_GETLINK.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Final, Self

from kubeproxy.kernel.netlink import (
    NETLINK_ROUTE,
    Netlink,
    NetlinkError,
    attributes,
    grow_receive_buffer,
    messages,
)

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


class InterfaceMonitor:
    """Tells that interfaces came, went or changed; to be asked now and then, as nobody waits for it."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened

    @classmethod
    def open(cls) -> Self:
        """Listen from now on, in the caller's network namespace. Raises NetlinkError."""
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        opened = socket.socket(socket.AF_NETLINK, kind, NETLINK_ROUTE)
        try:
            grow_receive_buffer(opened)
            opened.bind((0, _RTMGRP_LINK))
        except OSError as error:
            opened.close()
            raise NetlinkError(error.errno or errno.EIO, "cannot listen for interfaces") from error
        return cls(opened)

    def changed(self) -> bool:
        """Read all that is there without blocking; True when interfaces may be others, also when messages were lost."""
        changed = False
        while True:
            try:
                self._socket.recv(64 * 1024)
            except BlockingIOError:
                return changed
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise NetlinkError(error.errno or errno.EIO, "cannot listen for interfaces") from error
            changed = True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
