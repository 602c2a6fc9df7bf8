"""The lock of legacy iptables, and detection of changes that other programs make in legacy tables.

The commands can wait for the lock (-w), but they report neither the duration nor the holder, and they cannot hold the
lock from the time when we read a table until they change it. The kernel does not count changes of legacy tables. If a
change leaves the size of a table the same, the only sign of the change is that a program took the lock. Programs use
the lock also to list rules. If the lock file cannot be watched, its use is not detected. Sources: iptables' xshared.c;
struct ipt_getinfo in include/uapi/linux/netfilter_ipv4/ip_tables.h, and in ip6_tables.h."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.inotify import IN_DELETE_SELF, IN_IGNORED, IN_OPEN, Inotify
from kubeproxy.model.addresses import Family

_POLL: Final = 0.02  # seconds
_LOOK: Final = 0.5
"""Seconds between checks whether the lock's path still refers to the open file."""
_GLANCE: Final = 1.0
"""Seconds between two attempts to take the lock in iptables before 1.8.8."""
_BUSY: Final = 4.0
"""Seconds for which this process may hold the lock, with only short pauses, while other programs wait. Programs that
wait with the option -w 5 fail after 5 s."""
_VARIABLE: Final = "XTABLES_LOCKFILE"


class Waited(NamedTuple):
    """The seconds for which another program held the lock, and that program's name ('' if unknown)."""

    seconds: float
    holder: str


NOT_WAITED: Final = Waited(0.0, "")


class LockHeldError(ApplyError):
    """Another program held the lock of legacy iptables until the timeout; a later attempt may succeed."""


class NotReleasedError(LockHeldError):
    """Another program held the lock until the timeout; `waited` contains the duration and the program."""

    def __init__(self, path: Path, waited: Waited) -> None:
        self.waited = waited
        super().__init__(f"{waited.holder} has held the iptables lock ({path}) for more than {waited.seconds:.0f} s")


def path() -> Path:
    """Return the lock file that the commands use."""
    return Path(os.environ.get(_VARIABLE) or "/run/xtables.lock")


@contextmanager
def nobodys_lock() -> Iterator[None]:
    """Make the commands lock another file, because all network namespaces share the usual lock. Use it only for a
    namespace in which no other program changes tables, and never in a process that changes the node's tables."""
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
    """A place in the kernel's queue for the lock of a file. A process can leave the queue. A process that only polls
    may never find a busy lock free, because the kernel passes the lock from one waiting process to the next. flock(2)
    waits without a timeout, so a thread calls flock. Until the call returns, no other code in this process may lock or
    unlock the same open file. If the thread gets the lock after `leave`, the thread releases the lock immediately."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._left = False
        self._ours = False

    @classmethod
    def open(cls, file: int) -> Self:
        """Start to wait for an open file's lock. Raises OSError or RuntimeError for lack of a descriptor or thread."""
        place = cls(os.dup(file))
        try:
            threading.Thread(target=place._wait, name="lock", daemon=True).start()
        except RuntimeError:
            os.close(place._file)
            raise
        return place

    def came(self, seconds: float) -> bool:
        """Wait for the lock for at most `seconds`; return whether this process has the lock."""
        self._over.wait(seconds)
        return self._ours

    def leave(self) -> bool:
        """Leave the queue, until `come_back`. Return True if this process already has the lock."""
        with self._deciding:
            self._left = True
            return self._ours

    def come_back(self) -> bool:
        """Enter the queue again. If the kernel granted or refused the lock after `leave`, return False; the
        caller then opens a new place."""
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
    """The lock file, for all threads of the process. One thread at a time holds the lock, and may acquire it again. The
    file remains open, so that LockWatch counts only opens by other programs."""

    def __init__(self, path: Path, nobodys: int) -> None:
        self._path = path
        self._nobodys = nobodys
        self._file = -1
        self._held = 0
        self._waited = NOT_WAITED
        self._place: Place | None = None  # this process's place in the queue for the open file
        self._wanted = False  # whether another program waited while this process held the lock
        self._released = float("-inf")
        self._busy_since = float("-inf")

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return a lock that is not held."""
        lock = cls(path, os.memfd_create("nobodys-lock", os.MFD_CLOEXEC))
        lock._reopen()
        return lock

    @contextmanager
    def held(self, timeout: float) -> Iterator[Waited]:
        """Hold the lock during the `with` body, after at most `timeout` seconds of waiting; yield a Waited. Raises
        NotReleasedError, with the holder, after the timeout. A file that cannot be opened is not locked, because the
        command reports this error."""
        if not self._held:
            self._give_way()
            self._waited = self._take(timeout)
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
        """Record that another program waits for the lock."""
        self._wanted = True

    def _give_way(self) -> None:
        """If other programs wait, and this process has held the lock for _BUSY seconds with only short pauses, leave
        the lock free for _GLANCE seconds, in which a process that polls can take it."""
        now = time.monotonic()
        free = now - self._released
        if free < _GLANCE and self._wanted and now - self._busy_since >= _BUSY:
            time.sleep(_GLANCE - free)
            free = _GLANCE
        if free >= _GLANCE:
            self._busy_since, self._wanted = time.monotonic(), False

    def start(self) -> dict[str, Any]:
        """Return the arguments of subprocess.Popen for a command that changes rules while the lock is held. The command
        locks another file, and inherits a descriptor that holds this lock until the command ends, even if this process
        is killed."""
        if self._file < 0:
            return {}
        environment = {**os.environ, _VARIABLE: f"/proc/self/fd/{self._nobodys}"}
        return {"env": environment, "pass_fds": (self._file, self._nobodys)}

    def _take(self, timeout: float) -> Waited:
        began = time.monotonic()
        holder = ""
        while not self._taken():
            holder = holder or _holder(self._file)
            seconds = time.monotonic() - began
            if seconds >= timeout and (self._place is None or not self._place.leave()):
                raise NotReleasedError(self._path, Waited(seconds, holder or "another program"))
            self._wait(min(_LOOK, max(0.0, timeout - seconds)))
        return Waited(time.monotonic() - began, holder) if holder else NOT_WAITED

    def _taken(self) -> bool:
        """Acquire the lock if it is free, or if the kernel has granted it to this process's place in the queue; return
        whether it is held. Without a lock file, the result is True. Raises ApplyError."""
        if not self._is_current():
            self._reopen()
        if self._file < 0:
            return True
        if self._place is not None and self._place.come_back():
            return False
        self._place = None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # succeeds if this process already holds the lock
        except BlockingIOError:
            return False
        except OSError as error:
            raise ApplyError(f"cannot take the iptables lock ({self._path}): {error.strerror}") from error
        if self._is_current():
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)  # The file was removed just now: other programs lock a new file.
        return False

    def _wait(self, seconds: float) -> None:
        if self._place is None:
            try:
                self._place = Place.open(self._file)
            except (OSError, RuntimeError):  # the process has no free descriptor, or cannot start a thread
                time.sleep(min(seconds, _POLL))
                return
        self._place.came(seconds)

    def _is_current(self) -> bool:
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


_lock_of: Final = cache(Lock.open)


def lock() -> Lock:
    """Return the lock that the commands use."""
    return _lock_of(path())


def _holder(file: int) -> str:
    """Return the holder as 'command (pid 42)', or 'another program' if /proc/locks does not show it."""
    inode = os.fstat(file).st_ino
    try:
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # A line of /proc/locks is `1: FLOCK  ADVISORY  WRITE 42 00:19:1234 0 EOF`.
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode) and words[4] > "0":
                command = Path(f"/proc/{int(words[4])}/comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{command} (pid {words[4]})"
    except (OSError, ValueError):
        pass
    return "another program"


_GET_INFO: Final = 64  # IPT_SO_GET_INFO, IP6T_SO_GET_INFO
_INFO: Final = struct.Struct("=32s13I")  # name, hooks, 5 entry points, 5 underflows, number of entries, bytes
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class TableInfo:
    """A socket that reads the sizes of a family's legacy tables; a read takes microseconds. Needs CAP_NET_ADMIN."""

    def __init__(self, family: Family, opened: socket.socket) -> None:
        self._level = socket.IPPROTO_IPV6 if family is Family.IPV6 else socket.IPPROTO_IP
        self._socket = opened

    @classmethod
    def open(cls, family: Family) -> Self:
        """Open a socket in the network namespace of the caller."""
        return cls(family, socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def info(self, table: str) -> tuple[int, ...]:
        """Return the sizes of a table; if they differ from earlier sizes, the table was changed. Raises ApplyError."""
        # socket.getsockopt cannot pass the name of the table.
        buffer = ctypes.create_string_buffer(_INFO.pack(table.encode(), *[0] * 13), _INFO.size)
        size = ctypes.c_uint32(_INFO.size)
        if _LIBC.getsockopt(self._socket.fileno(), self._level, _GET_INFO, buffer, ctypes.byref(size)) != 0:
            raise ApplyError(f"cannot read the size of the iptables table {table}: {os.strerror(ctypes.get_errno())}")
        return tuple(_INFO.unpack(buffer.raw)[1:])


class LockWatch:
    """Watches one lock file for all backends of the process. The backends do not call the methods at the same time."""

    def __init__(self, path: Path, inotify: Inotify) -> None:
        self._path = path
        self._inotify = inotify
        self._taken = 0

    @classmethod
    def open(cls, path: Path) -> Self:
        """Watch the lock file at a path; a missing file is created."""
        watching = cls(path, Inotify.open())
        watching._add()
        return watching

    def taken(self) -> int:
        """Return a counter that grows when another program opens the lock file; the counter may miss some opens."""
        if IN_OPEN & (mask := self._inotify.happened()):
            self._taken += 1
        if IN_IGNORED & mask:  # now the path refers to another file
            self._add()
        return self._taken

    def forget(self) -> None:
        """Ignore the events that have arrived; this process caused them."""
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


_watch_of: Final = cache(LockWatch.open)


def lock_watch() -> LockWatch:
    """Return the watch of the lock file that the commands use."""
    lock()  # opens the file before the watch begins, so that the watch does not count this use of the file
    return _watch_of(path())
