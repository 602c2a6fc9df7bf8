"""The file of the control socket, and the framing of streams over the socket. Only the owner can access the file, from
its creation on. A new file replaces the file of an ended process. The path may be longer than the kernel's limit for
socket paths."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_TIMEVAL = struct.Struct("ll")  # struct timeval: seconds, microseconds

LENGTH = 4  # the size in bytes of the length (in network order) before each part of a stream


def framed(parts: Iterable[bytes]) -> bytes:
    """Return the parts of a stream as bytes, each part preceded by its length."""
    return b"".join(len(part).to_bytes(LENGTH, "big") + part for part in parts)


def listen(path: str) -> socket.socket:
    """Return a listening unix socket at `path`; create a missing folder, with access only for its owner. Raises
    OSError; the text names another process that listens at `path`."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _guard(path)
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        with _short(path) as short:
            sock.bind(short)
        sock.listen(16)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def connect(path: str, timeout: float) -> socket.socket:
    """Connect to the socket at `path`. The timeout is in seconds; with 0 no call blocks. Raises OSError."""
    _guard(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # If the backlog is full, only a blocking connect waits until there is room (unix(7), EAGAIN).
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(int(timeout * 1e6), 10**6)))
        sock.setblocking(timeout > 0)
        with _short(path) as short:
            sock.connect(short)
        sock.settimeout(timeout)
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError(error.errno, f"the connection was not accepted within {timeout:g} s") from error
    except OSError:
        sock.close()
        raise
    return sock


def discard(path: str) -> None:
    """Remove the socket's file, unless another process now listens at this path."""
    with suppress(OSError):
        _clear(path)


def _guard(path: str) -> None:
    """Refuse a folder in which every user may create a socket, because root would trust that socket's answers."""
    folder = Path(path).parent
    if folder.stat().st_mode & stat.S_IWOTH:
        reason = f"every user may create a socket in {folder}: use a folder that only its owner can write to"
        raise OSError(errno.EINVAL, reason)


def _clear(path: str) -> None:
    """Remove the socket of an ended process, but no other file. Raises OSError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, f"{path} exists and is not a socket")
    pid = server(path)
    if pid is not None:
        raise OSError(errno.EADDRINUSE, f"process {pid} already listens on this socket")
    Path(path).unlink()


def server(path: str) -> int | None:
    """Return the pid of the process that listens at `path`; None if no process listens. Raises OSError if the process
    is unknown, for example if the backlog is full: this function does not wait for room."""
    try:
        with connect(path, 0.0) as sock:
            return peer(sock)
    except (ConnectionRefusedError, FileNotFoundError):
        return None


def peer(sock: socket.socket) -> int:
    """Return the pid of the process that listens at the other end of a connected unix socket; 0 if the process is in
    another PID namespace."""
    pid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    return pid


@contextmanager
def _short(path: str) -> Iterator[str]:
    """Yield a path of at most 107 bytes, the kernel's limit, to the same file."""
    if len(os.fsencode(path)) < 108:
        yield path
        return
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)
