"""Tells when something changes in one directory, by inotify(7) through libc. It never says what: look again.

Linux only, and best effort: where it cannot watch, `alive` is False and the caller polls.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable

_IN_ATTRIB = 0x4
_IN_CLOSE_WRITE = 0x8
_IN_MOVED_FROM = 0x40
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE = 0x200
_IN_DELETE_SELF = 0x400
_IN_MOVE_SELF = 0x800
_IN_IGNORED = 0x8000
_IN_ONLYDIR = 0x1000000

# Not IN_MODIFY: a file that is being written is read once it is closed.
_INTERESTING = (
    _IN_ATTRIB
    | _IN_CLOSE_WRITE
    | _IN_MOVED_FROM
    | _IN_MOVED_TO
    | _IN_CREATE
    | _IN_DELETE
    | _IN_DELETE_SELF
    | _IN_MOVE_SELF
    | _IN_ONLYDIR
)
_EVENT = struct.Struct("iIII")  # wd, mask, cookie, length of the name that follows


class DirectoryWatch:
    """Calls `on_change` on the running loop after anything changed in `path`, until it is closed."""

    def __init__(self, path: str, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self.alive = False
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return
        if libc.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(_INTERESTING)) < 0:
            os.close(fd)
            return
        self._fd = fd
        self.alive = True
        self._loop.add_reader(fd, self._readable)

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
        self._fd = -1
        self.alive = False

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        offset = 0
        while offset + _EVENT.size <= len(data):
            _, mask, _, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + length
            if mask & (_IN_IGNORED | _IN_MOVE_SELF):
                self.close()  # the directory is gone, or is another one under this name
        self._on_change()
