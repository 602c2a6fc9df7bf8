"""The lock that programs hold while they change legacy iptables: taking it so that one can tell who else holds it.

The commands wait for it themselves (-w), but do not say for how long nor for whom, and let go of it between our look at
a table and their change of it. Source: iptables' xshared.c.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, Self

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables.lock_queue import Place

_POLL: Final = 0.02  # seconds
_LOOK: Final = 0.5
"""Seconds between looks whether the file that is waited for is still the one that others lock."""
_GLANCE: Final = 1.0
"""Seconds between two looks of iptables before 1.8.8 at a lock that it waits for."""
_BUSY: Final = 4.0
"""Seconds for which it may be ours nearly all the time though others want it: with -w 5 they look for 5 s."""
_VARIABLE: Final = "XTABLES_LOCKFILE"


class Waited(NamedTuple):
    """How many seconds the lock was another's, and whose, '' when that is not known."""

    seconds: float
    holder: str


NOT_WAITED: Final = Waited(0.0, "")


class NotReleasedError(ApplyError):
    """The lock was another's for as long as one was willing to wait, which `waited` says."""

    def __init__(self, path: Path, waited: Waited) -> None:
        self.waited = waited
        super().__init__(f"{waited.holder} has held the iptables lock ({path}) for more than {waited.seconds:.0f} s")


class Start(NamedTuple):
    """How a command is started: its environment, None for ours, and the descriptors that it gets."""

    environment: Mapping[str, str] | None = None
    descriptors: tuple[int, ...] = ()


def path() -> Path:
    """Return the lock file that the commands use."""
    return Path(os.environ.get(_VARIABLE) or "/run/xtables.lock")


@contextmanager
def nobodys_lock() -> Iterator[None]:
    """Have the commands lock a file that means nothing to others: in a network namespace of one's own nobody changes
    anything beside them, and the lock knows no namespaces. Not for a process that changes the node's own tables.
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


class Lock:
    """One lock file, as all of this process take it: one at a time, and who has it may take it again.

    The file stays open, so that who watches it (lock_watch) sees others alone open it.
    """

    def __init__(self, path: Path, nobodys: int) -> None:
        self._path = path
        self._nobodys = nobodys
        self._file = -1
        self._held = 0
        self._waited = NOT_WAITED
        self._place: Place | None = None  # in the queue of who wants the file that is open
        self._wanted = False  # by others, while it was ours
        self._released = float("-inf")
        self._busy_since = float("-inf")

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return one, which is not held."""
        lock = cls(path, os.memfd_create("nobodys-lock", os.MFD_CLOEXEC))
        lock._reopen()
        return lock

    @contextmanager
    def held(self, patience: float) -> Iterator[Waited]:
        """Hold it, after waiting for so many seconds at most; yield how long that was.

        Raises NotReleasedError that names the holder when the time is over. A file that cannot be opened is not held:
        the command says itself what is wrong with it.
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
        """Take note that somebody else wants it while it is held."""
        self._wanted = True

    def _give_way(self) -> None:
        """Leave it free for as long as whoever wants it takes to look, if it hardly was for a while."""
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
        """Take it if it is free, has come, or cannot be taken at all; return whether it was. Raises ApplyError."""
        if not self._is_current():
            self._reopen()
        if self._file < 0:
            return True
        if self._place is not None and self._place.come_back():
            return False
        self._place = None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says yes also if it is ours already
        except BlockingIOError:
            return False
        except OSError as error:
            raise ApplyError(f"cannot take the iptables lock ({self._path}): {error.strerror}") from error
        if self._is_current():
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)  # somebody removed the file just now: the next ones make another
        return False

    def _wait(self, seconds: float) -> None:
        """Wait for it as all the others do: where many want it, who only looks whether it is free never finds it so."""
        if self._place is None:
            try:
                self._place = Place.open(self._file)
            except (OSError, RuntimeError):  # no descriptor, or no thread
                time.sleep(min(seconds, _POLL))
                return
        self._place.came(seconds)

    def _is_current(self) -> bool:
        """Return whether the file that is open is the one that has the name now."""
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
    """Return 'command (pid 42)' of the process that holds the lock, 'another program' when it cannot be seen."""
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
