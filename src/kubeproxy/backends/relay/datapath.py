"""The thread that carries bytes: an asyncio loop, the sockets that it watches, and what bounds them.

Knows no Service and no protocol; tcp.py and udp.py do. Sockets are watched by an epoll of our own, that the loop
watches in turn: a socket is registered once, and no callback, handle or task is made for its events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from fcntl import F_SETPIPE_SZ, fcntl
from typing import Final, Protocol, Self, TypeVar

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.descriptors import shares

log = logging.getLogger("kubeproxy.relay")

T = TypeVar("T")

SWITCH_INTERVAL: Final = 0.5e-3
"""Seconds that the engine's thread may keep the data path's waiting, each time both have something to do.

With Python's own 5 ms, one connection gets 900 requests a second through beside a busy engine; with this, 4,000.
"""

ROOM: Final = 256 << 10
"""Bytes that are carried at a time, and the most that is kept of one direction when its receiver is slow."""

_PIPE: Final = 1 << 20  # its slots hold one piece of a packet each, so that it needs more of them than ROOM has pages
_EVENTS: Final = 256
_QUIET: Final = 10.0  # seconds between two log lines about one thing
_PATIENCE: Final = 30.0


class Watched(Protocol):
    """Who gets the events of a socket. Called on the loop's thread."""

    def ready(self, fd: int, events: int) -> None:
        """Something happened: EPOLLIN and the like."""

    def close(self) -> None:
        """Let go of all sockets."""


class DescriptorBudget:
    """How many file descriptors traffic may use, and does, by what it is for. Each listener makes that one less.

    Of each kind that has listeners a quarter is kept for it: however many clients of another kind come, its own are
    served. (The Go kube-proxy had no limit of its own; when the system's was reached, nothing was accepted any more.)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._used: Counter[str] = Counter()
        self._listeners: Counter[str] = Counter()

    def listen(self, kind: str) -> None:
        """Count a listener in."""
        self._listeners[kind] += 1
        self.limit -= 1

    def unlisten(self, kind: str) -> None:
        """Count a listener out."""
        self._listeners[kind] -= 1
        self.limit += 1

    def room(self, kind: str) -> int:
        """Return how many of a kind there may be, when all others use no more than is kept for them."""
        return self.limit - sum(self._kept for other, count in self._listeners.items() if count and other != kind)

    def take(self, kind: str, count: int) -> bool:
        """Count some in, unless that would be too many."""
        kept = 0
        for other, listeners in self._listeners.items():
            if listeners and other != kind:
                kept += max(0, self._kept - self._used[other])
        if self.used + count + kept > self.limit:
            return False
        self.used += count
        self._used[kind] += count
        return True

    def give(self, kind: str, count: int) -> None:
        """Count some out."""
        self.used -= count
        self._used[kind] -= count

    @property
    def _kept(self) -> int:
        return max(0, self.limit // 4)


class DataPath:
    """The loop in its thread. `call` and `stop` are for other threads, all else is for the loop's own.

    `open` makes one that runs. `udp_idle` is in seconds, `pipe` has the descriptors of a reading and a writing end.
    """

    def __init__(
        self,
        udp_idle: float,
        descriptors: DescriptorBudget,
        epoll: select.epoll,
        pipe: tuple[int, int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.udp_idle = udp_idle
        self.mark = 0
        self.descriptors = descriptors
        self.buffer = memoryview(bytearray(65536))  # one datagram, wherever it goes
        self._pipe = pipe
        self._epoll = epoll
        self._watched: dict[int, Watched] = {}
        self._released: list[socket.socket] = []
        self._dispatching = False
        self._said: dict[str, float] = {}
        self._loop = loop
        self._thread = threading.Thread(target=loop.run_forever, name="relay", daemon=True)

    @classmethod
    def open(cls, udp_idle: float, limit: int | None = None) -> Self:
        """Start a thread; `limit` is how many descriptors traffic may use, without it the share that is kept for it."""
        descriptors = DescriptorBudget(shares().relayed if limit is None else limit)
        path = cls(udp_idle, descriptors, select.epoll(), _new_pipe(), asyncio.new_event_loop())
        path._loop.add_reader(path._epoll.fileno(), path._dispatch)
        path._thread.start()
        return path

    # -- other threads ----------------------------------------------------------------------------------------------

    def call(self, work: Callable[[], T]) -> T:
        """Do something on the loop's thread, return its result. Raises ApplyError when it fails or takes too long."""

        async def run() -> T:
            return work()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(_PATIENCE)
        except TimeoutError as error:
            future.cancel()
            raise ApplyError(f"the relay did not answer in {_PATIENCE:.0f} s") from error
        except OSError as error:
            raise ApplyError(f"the relay: {error.strerror}") from error

    def stop(self) -> None:
        """Accept nothing more, and end every connection (with a reset) and the thread. May be called again."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for watched in set(self._watched.values()):
            watched.close()
        self._epoll.close()
        for fd in self._pipe:
            os.close(fd)
        self._loop.close()

    # -- the loop's thread ------------------------------------------------------------------------------------------

    def watch(self, sock: socket.socket, watched: Watched, events: int) -> None:
        """Have events of a socket told to somebody. Raises OSError when the system watches too many already."""
        fd = sock.fileno()
        self._epoll.register(fd, events)
        self._watched[fd] = watched

    def rewatch(self, fd: int, events: int) -> None:
        """Watch a socket for other events."""
        self._epoll.modify(fd, events)

    def release(self, sock: socket.socket) -> None:
        """Close a socket, watched or not: at the end of a round of events, as its number must not be taken before."""
        self._watched.pop(sock.fileno(), None)
        if self._dispatching:
            self._released.append(sock)
        else:
            sock.close()

    def later(self, seconds: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        """Do something later."""
        return self._loop.call_later(seconds, work)

    def complain(self, about: str, message: str, *values: object) -> None:
        """Log an error, once in a while for each thing that it is about."""
        now = time.monotonic()
        if now >= self._said.get(about, 0.0):
            if len(self._said) > 1000:
                self._said.clear()
            self._said[about] = now + _QUIET
            log.error(message, *values)

    def carry(self, source: int, target: int) -> tuple[int, bytes]:
        """Move what there is from one TCP socket to another, ROOM bytes at most, without copying it.

        Returns how much came (0 at the end of the stream) and what of it the target had no room for. Raises OSError,
        BlockingIOError when there is nothing to move.
        """
        reading, writing = self._pipe
        came = os.splice(source, writing, ROOM, flags=os.SPLICE_F_NONBLOCK)
        left = came
        try:
            while left:
                left -= os.splice(reading, target, left, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            return came, _read(reading, left)
        except OSError:
            with contextlib.suppress(BlockingIOError):
                _read(reading, left)  # lost with its target, and not to come to another one
            raise
        return came, b""

    def _dispatch(self) -> None:
        self._dispatching = True
        for fd, events in self._epoll.poll(0, _EVENTS):
            watched = self._watched.get(fd)
            if watched is not None:
                try:
                    watched.ready(fd, events)
                except Exception:  # a mistake in the way of one connection must not end all others
                    log.exception("A connection failed in a way that is not provided for")
                    watched.close()
        self._dispatching = False
        for sock in self._released:
            sock.close()
        self._released.clear()


def _new_pipe() -> tuple[int, int]:
    pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # /proc/sys/fs/pipe-max-size may be smaller: it works with any
        fcntl(pipe[1], F_SETPIPE_SZ, _PIPE)
    return pipe


def _read(fd: int, count: int) -> bytes:
    parts = []
    while count:
        parts.append(os.read(fd, count))
        count -= len(parts[-1])
    return b"".join(parts)
