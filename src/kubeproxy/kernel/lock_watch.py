"""Tells whether another program took the lock of legacy iptables, as it does to change rules, and to list them.

The kernel counts no changes of legacy tables, so this shows those that leave a table as large as it was. By
inotify(7) through libc; best effort: where it cannot watch, nobody ever seems to have taken the lock.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from pathlib import Path
from typing import Final

from kubeproxy.kernel import xtables_lock

_IN_OPEN: Final = 0x20
_IN_DELETE_SELF: Final = 0x400
_IN_IGNORED: Final = 0x8000
_EVENT: Final = struct.Struct("iIII")  # wd, mask, cookie, length of the name that follows; a file's has none
_BUFFER: Final = 65536


class LockWatch:
    """Watches one lock file for all backends of the process, which call one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._taken = 0
        self._add()

    def taken(self) -> int:
        """Return how often others were seen at the lock: another number means that they were there once more."""
        if _IN_OPEN & (mask := self._read()):
            self._taken += 1
        if _IN_IGNORED & mask:  # another file has the name now
            self._add()
        return self._taken

    def forget(self) -> None:
        """Take what happened since the last question for our own doing."""
        if _IN_IGNORED & self._read():
            self._add()

    def _add(self) -> None:
        if self._fd < 0:
            return
        try:
            os.close(os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            return
        self._libc.inotify_add_watch(self._fd, os.fsencode(self._path), ctypes.c_uint32(_IN_OPEN | _IN_DELETE_SELF))

    def _read(self) -> int:
        """Return all that happened, as one mask."""
        mask = 0
        while self._fd >= 0:
            try:
                data = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                break
            for offset in range(0, len(data), _EVENT.size):
                mask |= _EVENT.unpack_from(data, offset)[1]
        return mask


@cache
def _of(path: Path) -> LockWatch:
    return LockWatch(path)


def lock_watch() -> LockWatch:
    """Return the watch of the lock file that the commands use."""
    return _of(xtables_lock.path())
