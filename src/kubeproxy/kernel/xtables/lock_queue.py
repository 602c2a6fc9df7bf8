"""A place in the kernel's queue for the lock of a file, which can be left.

Who looks now and then whether a lock is free may never find it so where many want it: it goes from one who waits in the
kernel to the next. flock(2) waits there without an end, so that a thread of its own has to.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from typing import Self


class Place:
    """A place in the queue. While it is open nobody else of this process may lock, or unlock, the same open file.

    A lock that comes when the place was left is let go at once.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._left = False
        self._ours = False

    @classmethod
    def open(cls, file: int) -> Self:
        """Wait for the lock of an open file from now on. Raises OSError or RuntimeError, for want of room."""
        place = cls(os.dup(file))
        try:
            threading.Thread(target=place._wait, name="lock", daemon=True).start()
        except RuntimeError:
            os.close(place._file)
            raise
        return place

    def came(self, seconds: float) -> bool:
        """Wait for so many seconds; return whether the lock is ours."""
        self._over.wait(seconds)
        return self._ours

    def leave(self) -> bool:
        """Want the lock no more, but for `come_back`; return True if it is ours already."""
        with self._deciding:
            self._left = True
            return self._ours

    def come_back(self) -> bool:
        """Want it again; return False if it came, or was refused, meanwhile: then a new place is needed."""
        with self._deciding:
            self._left = False
            return not self._over.is_set()

    def _wait(self) -> None:
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)
            with self._deciding:
                self._ours = not self._left
                if self._left:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                self._over.set()
        self._over.set()
        os.close(self._file)
