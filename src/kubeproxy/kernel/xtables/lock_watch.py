"""Changes of legacy iptables by other programs: in the size of a table, and by their taking of the lock.

The kernel counts no changes of legacy tables. A change that keeps the size shows only by the lock, which programs also
take to list rules. If the file cannot be watched, the lock never seems taken. Source: struct ipt_getinfo in
include/uapi/linux/netfilter_ipv4/ip_tables.h; the same for ip6_tables.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from functools import cache
from pathlib import Path
from typing import Final, Self

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.inotify import IN_DELETE_SELF, IN_IGNORED, IN_OPEN, Inotify
from kubeproxy.kernel.xtables import xtables_lock
from kubeproxy.model.addresses import Family

_GET_INFO: Final = 64  # IPT_SO_GET_INFO, IP6T_SO_GET_INFO
_INFO: Final = struct.Struct("=32s13I")  # name, hooks, 5 entry points, 5 underflows, number of entries, bytes
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class TableInfo:
    """A socket that reads the sizes of the legacy tables of a family, in microseconds. Needs CAP_NET_ADMIN."""

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
        """Return the sizes of a table: other numbers mean that it was changed. Raises ApplyError."""
        # socket.getsockopt cannot pass the name of the table.
        buffer = ctypes.create_string_buffer(_INFO.pack(table.encode(), *[0] * 13), _INFO.size)
        size = ctypes.c_uint32(_INFO.size)
        if _LIBC.getsockopt(self._socket.fileno(), self._level, _GET_INFO, buffer, ctypes.byref(size)) != 0:
            raise ApplyError(f"cannot read the size of the iptables table {table}: {os.strerror(ctypes.get_errno())}")
        return tuple(_INFO.unpack(buffer.raw)[1:])


class LockWatch:
    """Watches one lock file, for all backends of the process, which call one at a time."""

    def __init__(self, path: Path, inotify: Inotify) -> None:
        self._path = path
        self._inotify = inotify
        self._taken = 0

    @classmethod
    def open(cls, path: Path) -> Self:
        """Watch a file from now on; it is created if it is missing."""
        watching = cls(path, Inotify.open())
        watching._add()
        return watching

    def taken(self) -> int:
        """Return how often other programs opened the lock file, at least; the number grows with each time."""
        if IN_OPEN & (mask := self._inotify.happened()):
            self._taken += 1
        if IN_IGNORED & mask:  # another file has the name now
            self._add()
        return self._taken

    def forget(self) -> None:
        """Ignore events since the last call: this process caused them."""
        if IN_IGNORED & self._inotify.happened():
            self._add()

    def _add(self) -> None:
        if self._inotify.fileno() < 0:
            return
        try:
            os.close(os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            return
        self._inotify.watch(self._path, IN_OPEN | IN_DELETE_SELF)


@cache
def _of(path: Path) -> LockWatch:
    return LockWatch.open(path)


def lock_watch() -> LockWatch:
    """Return the watch of the lock file that the commands use."""
    xtables_lock.lock()  # opens the file, which is not to be seen
    return _of(xtables_lock.path())
