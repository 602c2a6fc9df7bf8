"""What rtnetlink announces of the caller's network namespace: that addresses, or interfaces, may be others now."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Self

from kubeproxy.kernel.netlink.protocol import NETLINK_ROUTE, Closing, NetlinkError, grow_receive_buffer


class RouteChanges(Closing):
    """Announcements of some multicast groups, read without blocking; `subject` is for errors."""

    def __init__(self, opened: socket.socket, subject: str) -> None:
        self._socket = opened
        self._subject = subject

    @classmethod
    def open(cls, groups: int, subject: str) -> Self:
        """Listen from now on to groups, a bit each (RTMGRP_ of linux/rtnetlink.h). Raises NetlinkError."""
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        opened = socket.socket(socket.AF_NETLINK, kind, NETLINK_ROUTE)
        try:
            grow_receive_buffer(opened)
            opened.bind((0, groups))
        except OSError as error:
            opened.close()
            raise _failed(subject, error) from error
        return cls(opened, subject)

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when something changed."""
        return self._socket.fileno()

    def changed(self, matters: Callable[[bytes], bool] = lambda _: True) -> bool:
        """Read all that is there; return whether any of it matters. What was lost, as too much came at once, does.

        `matters` is asked of the messages of one read, until one does. Raises NetlinkError.
        """
        found = False
        while True:
            try:
                data = self._socket.recv(64 * 1024)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise _failed(self._subject, error) from error
                found = True
            else:
                found = found or matters(data)

    def close(self) -> None:
        """Close the socket; remove it from a loop first."""
        self._socket.close()


def _failed(subject: str, error: OSError) -> NetlinkError:
    return NetlinkError(error.errno or errno.EIO, f"cannot listen for {subject}")
