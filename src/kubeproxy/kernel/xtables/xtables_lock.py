"""The lock that programs hold while they change legacy iptables, taken so that its holder can be named.

The commands wait for it themselves (-w), but do not report for how long or for which program, and release it between
our reading of a table and their change. Source: iptables' xshared.c.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, Self

from kubeproxy.errors import ApplyError

_POLL: Final = 0.02  # seconds
_LOOK: Final = 0.5
"""Seconds between checks that the open file still has the name."""
_GLANCE: Final = 1.0
"""Seconds between two attempts of iptables before 1.8.8 to take the lock."""
_BUSY: Final = 4.0
"""Seconds for which this process may hold it nearly always while others wait: with -w 5 they give up after 5 s."""
_VARIABLE: Final = "XTABLES_LOCKFILE"


class Waited(NamedTuple):
    """Seconds for which another program held the lock, and its name, '' if unknown."""

    seconds: float
    holder: str


NOT_WAITED: Final = Waited(0.0, "")


class LockHeldError(ApplyError):
    """Another program held the lock of legacy iptables all the time; a later try may succeed."""


class NotReleasedError(LockHeldError):
    """Another program held the lock for as long as the caller waited, which is in `waited`."""

    def __init__(self, path: Path, waited: Waited) -> None:
        self.waited = waited
        super().__init__(f"{waited.holder} has held the iptables lock ({path}) for more than {waited.seconds:.0f} s")


class Start(NamedTuple):
    """How to start a command: its environment, None for that of this process, and the descriptors to inherit."""

    environment: Mapping[str, str] | None = None
    descriptors: tuple[int, ...] = ()


def path() -> Path:
    """Return the lock file that the commands use."""
    return Path(os.environ.get(_VARIABLE) or "/run/xtables.lock")


@contextmanager
def nobodys_lock() -> Iterator[None]:
    """Make the commands lock another file, in a network namespace in which no other program changes tables.

    The lock is the same in all namespaces. Not for a process that changes the node's own tables.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


class Place:
    """A place in the kernel's queue for the lock of a file, which can be left.

    A waiter that only polls may never find a busy lock free: the kernel passes it from one waiting process to the next.
    flock(2) waits without a timeout, so a thread does it. Until then nothing else in this process may lock or unlock
    the same open file. A lock obtained after the place was left is released at once.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._left = False
        self._ours = False

    @classmethod
    def open(cls, file: int) -> Self:
        """Start to wait for the lock of an open file. Raises OSError or RuntimeError without a descriptor or thread."""
        place = cls(os.dup(file))
        try:
            threading.Thread(target=place._wait, name="lock", daemon=True).start()
        except RuntimeError:
            os.close(place._file)
            raise
        return place

    def came(self, seconds: float) -> bool:
        """Wait for so many seconds; return whether this process has the lock."""
        self._over.wait(seconds)
        return self._ours

    def leave(self) -> bool:
        """Leave the queue, unless `come_back` follows; return True if this process has the lock already."""
        with self._deciding:
            self._left = True
            return self._ours

    def come_back(self) -> bool:
        """Enter again; return False if the lock was obtained or refused meanwhile: then a new place is needed."""
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


class Lock:
    """A lock file for the whole process: one thread at a time, which may take it again.

    The file stays open, so that lock_watch sees only other programs open it.
    """

    def __init__(self, path: Path, nobodys: int) -> None:
        self._path = path
        self._nobodys = nobodys
        self._file = -1
        self._held = 0
        self._waited = NOT_WAITED
        self._place: Place | None = None  # in the queue for the open file
        self._wanted = False  # by others, while it was ours
        self._released = float("-inf")
        self._busy_since = float("-inf")

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return a lock that is not held."""
        lock = cls(path, os.memfd_create("nobodys-lock", os.MFD_CLOEXEC))
        lock._reopen()
        return lock

    @contextmanager
    def held(self, patience: float) -> Iterator[Waited]:
        """Acquire the lock within this many seconds; yield the seconds spent waiting.

        Raises NotReleasedError, with the holder, after that time. A file that cannot be opened is not locked: the
        command reports the error itself.
        """
        if not self._held:
            self._give_way()
            self._waited = self._take(patience)
        self._held += 1
        try:
            yield self._waited
        finally:
            self._held -= 1
            if not self._held:
                self._released = time.monotonic()
                if self._file >= 0:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def wanted(self) -> None:
        """Note that another program waits for it."""
        self._wanted = True

    def _give_way(self) -> None:
        """Release the lock long enough for a polling waiter to take it, after this process held it nearly always."""
        now = time.monotonic()
        free = now - self._released
        if free < _GLANCE and self._wanted and now - self._busy_since >= _BUSY:
            time.sleep(_GLANCE - free)
            free = _GLANCE
        if free >= _GLANCE:
            self._busy_since, self._wanted = time.monotonic(), False

    def start(self) -> Start:
        """Return how to start a command that changes rules while the lock is held.

        It takes another lock, and has this one too: should this process be killed, it is held until the command ends.
        """
        if self._file < 0:
            return Start()
        return Start(
            {**os.environ, _VARIABLE: f"/proc/self/fd/{self._nobodys}"},
            (self._file, self._nobodys),
        )

    def _take(self, patience: float) -> Waited:
        began = time.monotonic()
        holder = ""
        while not self._taken():
            holder = holder or _holder(self._file)
            seconds = time.monotonic() - began
            if seconds >= patience and (self._place is None or not self._place.leave()):
                raise NotReleasedError(self._path, Waited(seconds, holder or "another program"))
            self._wait(min(_LOOK, max(0.0, patience - seconds)))
        return Waited(time.monotonic() - began, holder) if holder else NOT_WAITED

    def _taken(self) -> bool:
        """Take it if it is free, or was obtained, or has no file; return whether it was. Raises ApplyError."""
        if not self._is_current():
            self._reopen()
        if self._file < 0:
            return True
        if self._place is not None and self._place.come_back():
            return False
        self._place = None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # succeeds also if this process has it already
        except BlockingIOError:
            return False
        except OSError as error:
            raise ApplyError(f"cannot take the iptables lock ({self._path}): {error.strerror}") from error
        if self._is_current():
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the file was removed just now: other programs create a new one
        return False

    def _wait(self, seconds: float) -> None:
        """Wait for it in the kernel's queue, as all other programs do."""
        if self._place is None:
            try:
                self._place = Place.open(self._file)
            except (OSError, RuntimeError):  # no descriptor, or no thread
                time.sleep(min(seconds, _POLL))
                return
        self._place.came(seconds)

    def _is_current(self) -> bool:
        """Return whether the open file still has the name."""
        if self._file < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            return False

    def _reopen(self) -> None:
        if self._place is not None:
            self._place.leave()
            self._place = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return


@cache
def _of(path: Path) -> Lock:
    return Lock.open(path)


def lock() -> Lock:
    """Return the lock that the commands use."""
    return _of(path())


def _holder(file: int) -> str:
    """Return 'command (pid 42)' of the holder, 'another program' if it is not visible."""
    inode = os.fstat(file).st_ino
    try:
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # 1: FLOCK  ADVISORY  WRITE 42 00:19:1234 0 EOF
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode) and words[4] > "0":
                command = Path(f"/proc/{int(words[4])}/comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{command} (pid {words[4]})"
    except (OSError, ValueError):
        pass
    return "another program"
