"""How large a table of legacy iptables is: asked of the kernel in microseconds, whatever is in it.

Source: include/uapi/linux/netfilter_ipv4/ip_tables.h, struct ipt_getinfo; the same for ip6_tables.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from typing import Final, Self

from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family

_GET_INFO: Final = 64  # IPT_SO_GET_INFO, IP6T_SO_GET_INFO
_INFO: Final = struct.Struct("=32s13I")  # name, hooks, 5 entry points, 5 underflows, number of entries, bytes
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class TableInfo:
    """A socket that asks about the tables of a family. The kernel wants CAP_NET_ADMIN."""

    def __init__(self, family: Family, opened: socket.socket) -> None:
        self._level = socket.IPPROTO_IPV6 if family is Family.IPV6 else socket.IPPROTO_IP
        self._socket = opened

    @classmethod
    def open(cls, family: Family) -> Self:
        """Open a socket in the network namespace of the caller."""
        return cls(family, socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def info(self, table: str) -> tuple[int, ...]:
        """Return what the kernel tells of a table: other numbers mean that it was changed. Raises ApplyError."""
        # socket.getsockopt hands the kernel no name to look for.
        buffer = ctypes.create_string_buffer(_INFO.pack(table.encode(), *[0] * 13), _INFO.size)
        size = ctypes.c_uint32(_INFO.size)
        if _LIBC.getsockopt(self._socket.fileno(), self._level, _GET_INFO, buffer, ctypes.byref(size)) != 0:
            raise ApplyError(f"cannot look at the iptables table {table}: {os.strerror(ctypes.get_errno())}")
        return tuple(_INFO.unpack(buffer.raw)[1:])
