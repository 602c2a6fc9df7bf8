"""Tells whether another program took the lock of legacy iptables, as it does to change rules, and to list them.

The kernel counts no changes of legacy tables, so this shows those that leave a table as large as it was. Where the
file cannot be watched, nobody ever seems to have taken the lock.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Self

from kubeproxy.kernel.proc.inotify import IN_DELETE_SELF, IN_IGNORED, IN_OPEN, Inotify
from kubeproxy.kernel.xtables import xtables_lock


class LockWatch:
    """Watches one lock file for all backends of the process, which call one at a time."""

    def __init__(self, path: Path, inotify: Inotify) -> None:
        self._path = path
        self._inotify = inotify
        self._taken = 0

    @classmethod
    def open(cls, path: Path) -> Self:
        """Watch a file from now on; it is made where it is missing."""
        watching = cls(path, Inotify.open())
        watching._add()
        return watching

    def taken(self) -> int:
        """Return how often others were seen at the lock: another number means that they were there once more."""
        if IN_OPEN & (mask := self._inotify.happened()):
            self._taken += 1
        if IN_IGNORED & mask:  # another file has the name now
            self._add()
        return self._taken

    def forget(self) -> None:
        """Take what happened since the last question for our own doing."""
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
