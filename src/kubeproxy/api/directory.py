"""Tells when something changes in one directory. It never says what: look again.

Best effort: where it cannot watch, `alive` is False and the caller polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

from kubeproxy.kernel.proc import inotify

# Not IN_MODIFY: a file that is being written is read once it is closed.
_INTERESTING: Final = (
    inotify.IN_ATTRIB
    | inotify.IN_CLOSE_WRITE
    | inotify.IN_MOVED_FROM
    | inotify.IN_MOVED_TO
    | inotify.IN_CREATE
    | inotify.IN_DELETE
    | inotify.IN_DELETE_SELF
    | inotify.IN_MOVE_SELF
    | inotify.IN_ONLYDIR
)


class DirectoryWatch:
    """Calls `on_change` on the running loop after anything changed in `path`, until it is closed."""

    def __init__(self, on_change: Callable[[], None], watching: inotify.Inotify) -> None:
        self.alive = False
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._inotify = watching

    @classmethod
    def open(cls, path: str, on_change: Callable[[], None]) -> Self:
        """Watch a directory from now on; not `alive` where that cannot be done."""
        directory = cls(on_change, inotify.Inotify.open())
        directory._watch(path)
        return directory

    def _watch(self, path: str) -> None:
        self.alive = self._inotify.watch(path, _INTERESTING)
        if self.alive:
            self._loop.add_reader(self._inotify.fileno(), self._readable)
        else:
            self._inotify.close()

    def close(self) -> None:
        """Stop watching."""
        if self.alive:
            self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
        self.alive = False

    def _readable(self) -> None:
        happened = self._inotify.happened()
        if not happened:
            return
        if happened & (inotify.IN_IGNORED | inotify.IN_MOVE_SELF):
            self.close()  # the directory is gone, or is another one under this name
        self._on_change()
