"""What netfilter announces to whoever listens: its multicast groups of netlink, in the caller's network namespace."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

from kubeproxy.kernel.netlink.protocol import SOL_NETLINK, Closing, NetlinkError, netfilter_socket

_ADD_MEMBERSHIP: Final = 1
_DROP_MEMBERSHIP: Final = 2


def opened(subject: str, receive_buffer: int) -> socket.socket:
    """Return a socket that may join groups, with a receive buffer of so many bytes. Raises NetlinkError.

    `subject` is for the error: "cannot listen to SUBJECT".
    """
    try:
        return netfilter_socket(receive_buffer)
    except OSError as error:
        raise _failed(subject, error) from error


def listening(subject: str, receive_buffer: int, group: int) -> socket.socket:
    """Return a socket that hears a group from now on, to be read with `waiting`. Raises NetlinkError."""
    sock = opened(subject, receive_buffer)
    try:
        sock.setblocking(False)
        join(sock, group)
    except OSError as error:
        sock.close()
        raise _failed(subject, error) from error
    return sock


def waiting(sock: socket.socket, subject: str, lost: Callable[[], None]) -> Iterator[bytes]:
    """Yield what was announced and not read yet; call `lost` where some were lost, as too many came at once.

    Raises NetlinkError.
    """
    while True:
        try:
            data = sock.recv(1 << 15)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise _failed(subject, error) from error
            lost()
        else:
            yield data


def here() -> int:
    """Return the number of the caller's network namespace."""
    return Path("/proc/thread-self/ns/net").stat().st_ino


def join(sock: socket.socket, *groups: int) -> None:
    """Hear these groups from now on. Raises OSError."""
    for group in groups:
        sock.setsockopt(SOL_NETLINK, _ADD_MEMBERSHIP, group)


def leave(sock: socket.socket, group: int) -> None:
    """Hear a group no more; what was announced before is still there to be read. Raises OSError."""
    sock.setsockopt(SOL_NETLINK, _DROP_MEMBERSHIP, group)


class Announcements(Closing):
    """Announcements as they come, blocking. `lost` counts how often some were lost, as too many came at once."""

    def __init__(self, sock: socket.socket, subject: str) -> None:
        self._socket = sock
        self._subject = subject
        self.lost = 0

    @classmethod
    def open(
        cls,
        subject: str,
        groups: tuple[int, ...],
        receive_buffer: int,
        prepare: Callable[[socket.socket], None] = lambda _: None,
    ) -> Self:
        """Listen to groups from now on; `prepare` is called before anything is heard. Raises NetlinkError."""
        sock = opened(subject, receive_buffer)
        try:
            prepare(sock)
            join(sock, *groups)
        except OSError as error:
            sock.close()
            raise _failed(subject, error) from error
        return cls(sock, subject)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def change(self, change: Callable[[socket.socket], None]) -> None:
        """Change what is heard, by an option of the socket. Raises OSError."""
        change(self._socket)

    def until(self, end: float) -> Iterator[bytes]:
        """Yield what is announced until `end`, of time.monotonic(). Raises NetlinkError."""
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                yield self._socket.recv(1 << 15)
            except TimeoutError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise _failed(self._subject, error) from error
                self.lost += 1


def _failed(subject: str, error: OSError) -> NetlinkError:
    return NetlinkError(error.errno or errno.EIO, f"cannot listen to {subject}")
