"""The socket's file: private from its first moment, in place of one that a dead process left, however long its path."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_TIMEVAL = struct.Struct("ll")  # struct timeval: seconds, microseconds


def listen(path: str) -> socket.socket:
    """Return a listening unix socket at `path`; its folder is made if need be, for the owner alone.

    Raises OSError, whose text says who else listens there if somebody does.
    """
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


def connect(path: str, patience: float) -> socket.socket:
    """Return a socket connected to the process that listens at `path`, with a timeout in seconds, 0 for no waiting.

    Raises OSError.
    """
    _guard(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Where many wait to be accepted only a connect that blocks waits with them: unix(7), EAGAIN.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(int(patience * 1e6), 10**6)))
        sock.setblocking(patience > 0)
        with _short(path) as short:
            sock.connect(short)
        sock.settimeout(patience)
    except BlockingIOError as error:
        sock.close()
        raise TimeoutError(error.errno, f"nobody accepted it within {patience:g} s") from error
    except OSError:
        sock.close()
        raise
    return sock


def discard(path: str) -> None:
    """Remove the socket's file at the end, unless another process serves it by now."""
    try:
        _clear(path)
    except OSError:
        return


def _guard(path: str) -> None:
    """Refuse a folder in which every user may put a socket: root would take an answer of theirs for the proxy's."""
    folder = Path(path).parent
    if folder.stat().st_mode & stat.S_IWOTH:
        raise OSError(errno.EINVAL, f"anybody may put a socket into {folder}: take a folder that is its owner's alone")


def _clear(path: str) -> None:
    """Remove the socket of a process that is gone; nothing else is ever removed. Raises OSError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, f"{path} is there and no socket")
    pid = server(path)
    if pid is not None:
        raise OSError(errno.EADDRINUSE, f"process {pid} serves it already")
    Path(path).unlink()


def server(path: str) -> int | None:
    """Return the number of the process that listens at `path`, None if nobody does.

    Raises OSError when that cannot be told, as when it accepts nobody: the event loop does not wait for it.
    """
    try:
        with connect(path, 0.0) as sock:
            data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


@contextmanager
def _short(path: str) -> Iterator[str]:
    """Give a path to the same file that fits into the 107 bytes that the kernel takes."""
    if len(os.fsencode(path)) < 108:
        yield path
        return
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)
