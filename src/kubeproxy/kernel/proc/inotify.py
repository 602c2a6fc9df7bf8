"""Watches files and directories with inotify(7), through libc."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final, Self

# linux/inotify.h
IN_ATTRIB, IN_CLOSE_WRITE, IN_OPEN, IN_MOVED_FROM, IN_MOVED_TO = 0x4, 0x8, 0x20, 0x40, 0x80
IN_CREATE, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF, IN_IGNORED = 0x100, 0x200, 0x400, 0x800, 0x8000
IN_ONLYDIR: Final = 0x1000000

_EVENT: Final = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_BUFFER: Final = 65536
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """An inotify descriptor, which can watch any number of paths. If the descriptor is -1, there are no events."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls) -> Self:
        """Open an inotify descriptor; the result's descriptor is -1 if the system's limit is reached."""
        return cls(_LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there are events."""
        return self._descriptor

    def watch(self, path: str | os.PathLike[str], mask: int) -> bool:
        """Watch a path for events; return whether the path can be watched."""
        if self._descriptor < 0:
            return False
        watched: int = _LIBC.inotify_add_watch(self._descriptor, os.fsencode(path), ctypes.c_uint32(mask))
        return watched >= 0

    def happened(self) -> int:
        """Return the events since the last call as one mask; 0 if there are none."""
        mask = 0
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, _BUFFER)
            except BlockingIOError:
                break
            offset = 0
            while offset + _EVENT.size <= len(data):
                _, event, _, length = _EVENT.unpack_from(data, offset)
                mask |= event
                offset += _EVENT.size + length
        return mask

    def close(self) -> None:
        """Stop watching. A second call has no effect."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
