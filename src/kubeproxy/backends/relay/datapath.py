"""The relay's thread: an asyncio loop, the watched sockets, and the limit of descriptors. The thread is independent of
protocols: see tcp.py and userspace/udp.py. A separate epoll watches the sockets, and the loop watches the
epoll, so a socket is registered once, and its events create no callback, handle or task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import select
import socket
import threading
import time
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from fcntl import F_SETPIPE_SZ, fcntl
from typing import ClassVar, Final, Protocol, Self, TypeVar

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.processes import shares
from kubeproxy.model.plan import Pool, ServicePortKey

log = logging.getLogger("kubeproxy.relay")

T = TypeVar("T")

SWITCH_INTERVAL: Final = 0.5e-3
"""Python's switch interval in seconds: the time for which a busy engine thread may delay the relay's thread. While the
engine is busy, one connection relays 4,000 requests a second with this value, and 900 with Python's default of 5 ms."""

ROOM: Final = 256 << 10
"""The maximum number of bytes to move at a time, and to buffer for one direction if its receiver is slow."""

_PIPE: Final = 1 << 20  # larger than ROOM, because a pipe slot of one page may contain only a fragment of a packet
_EVENTS: Final = 256
_QUIET: Final = 10.0  # seconds between two log lines about the same subject
_TIMEOUT: Final = 30.0


class Watched(Protocol):
    """Receives the events of a socket. Called on the loop's thread."""

    @abstractmethod
    def ready(self, fd: int, events: int) -> None:
        """Handle the events of a socket: a mask of EPOLLIN and other flags."""

    def close(self) -> None:
        """Close all sockets."""


class DescriptorBudget:
    """Limit and use of file descriptors for traffic, by kind (such as "connections"). Each listener uses one
    descriptor. A quarter of the descriptors is reserved for each kind that has listeners, so that many clients of one
    kind cannot exclude clients of other kinds. (The Go kube-proxy had no such limit; at the system's limit it accepted
    no connection.)"""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._used: Counter[str] = Counter()
        self._listeners: Counter[str] = Counter()

    def listen(self, kind: str) -> None:
        """Add a listener of a kind."""
        self._listeners[kind] += 1
        self.limit -= 1

    def unlisten(self, kind: str) -> None:
        """Remove a listener of a kind."""
        self._listeners[kind] -= 1
        self.limit += 1

    def room(self, kind: str) -> int:
        """Return the number of descriptors for a kind, if all other kinds use no more than their reserve."""
        return self.limit - sum(self._kept for other, count in self._listeners.items() if count and other != kind)

    def take(self, kind: str, count: int) -> bool:
        """Reserve descriptors for a kind; return False if too few are free."""
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
        """Release descriptors of a kind."""
        self.used -= count
        self._used[kind] -= count

    @property
    def _kept(self) -> int:
        return max(0, self.limit // 4)


class DataPath:
    """An asyncio loop in a separate thread. Other threads may call only `call` and `stop`. `open` returns a running
    data path. `udp_idle` is in seconds; `pipe` contains the descriptors of the reading and the writing end."""

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
        self.buffer = memoryview(bytearray(65536))  # for one datagram of any size
        self._pipe = pipe
        self._epoll = epoll
        self._watched: dict[int, Watched] = {}
        self._released: list[socket.socket] = []
        self._dispatching = False
        self._logged: dict[str, float] = {}
        self._loop = loop
        self._thread = threading.Thread(target=loop.run_forever, name="relay", daemon=True)

    @classmethod
    def open(cls, udp_idle: float, limit: int | None = None) -> Self:
        """Start a thread; `limit`: descriptors for traffic, by default the relay's share of the process's limit."""
        descriptors = DescriptorBudget(shares().relayed if limit is None else limit)
        path = cls(udp_idle, descriptors, select.epoll(), _new_pipe(), asyncio.new_event_loop())
        path._loop.add_reader(path._epoll.fileno(), path._dispatch)
        path._thread.start()
        return path

    # -- other threads --------------------------------------------------------------------------------------------

    def call(self, work: Callable[[], T]) -> T:
        """Run a function on the loop's thread; return its result. Raises ApplyError if it fails or takes too long."""

        async def run() -> T:
            return work()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(_TIMEOUT)
        except TimeoutError as error:
            future.cancel()
            raise ApplyError(f"the relay did not answer in {_TIMEOUT:.0f} s") from error
        except OSError as error:
            raise ApplyError(f"the relay: {error.strerror}") from error

    def stop(self) -> None:
        """Stop accepting, reset every connection, and end the thread. A second call has no effect."""
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

    # -- the loop's thread ----------------------------------------------------------------------------------------

    def watch(self, sock: socket.socket, watched: Watched, events: int) -> None:
        """Pass the events of a socket to `watched`. Raises OSError at the system's limit of watches."""
        fd = sock.fileno()
        self._epoll.register(fd, events)
        self._watched[fd] = watched

    def rewatch(self, fd: int, events: int) -> None:
        """Change the events for which a socket is watched."""
        self._epoll.modify(fd, events)

    def release(self, sock: socket.socket) -> None:
        """Close a socket after the present round of events, so that its descriptor is not reused during the round."""
        self._watched.pop(sock.fileno(), None)
        if self._dispatching:
            self._released.append(sock)
        else:
            sock.close()

    def later(self, seconds: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function after a delay."""
        return self._loop.call_later(seconds, work)

    def complain(self, about: str, message: str, *values: object) -> None:
        """Log an error, at most once in _QUIET seconds for each subject."""
        now = time.monotonic()
        if now >= self._logged.get(about, 0.0):
            if len(self._logged) > 1000:
                self._logged.clear()
            self._logged[about] = now + _QUIET
            log.error(message, *values)

    def carry(self, source: int, target: int) -> tuple[int, bytes]:
        """Move the available bytes from one TCP socket to another, at most ROOM, without copying them. Returns two
        values: the number of bytes read (0 at the end of the stream), and the bytes for which the target had no room.
        Raises OSError; BlockingIOError if no byte is available."""
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
                _read(reading, left)  # discarded, so that these bytes do not reach another connection
            raise
        return came, b""

    def _dispatch(self) -> None:
        self._dispatching = True
        for fd, events in self._epoll.poll(0, _EVENTS):
            watched = self._watched.get(fd)
            if watched is not None:
                try:
                    watched.ready(fd, events)
                except Exception:  # a bug in one connection must not end all other connections
                    log.exception("A connection failed with an unexpected error")
                    watched.close()
        self._dispatching = False
        for sock in self._released:
            sock.close()
        self._released.clear()


def _new_pipe() -> tuple[int, int]:
    pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # the limit /proc/sys/fs/pipe-max-size may be smaller; any size works
        fcntl(pipe[1], F_SETPIPE_SZ, _PIPE)
    return pipe


def _read(fd: int, count: int) -> bytes:
    parts = []
    while count:
        parts.append(os.read(fd, count))
        count -= len(parts[-1])
    return b"".join(parts)


CLIENTS: Final = 1 << 16
"""Maximum number of clients in a listener's affinity table; beyond it, the client with the longest idle time is
removed."""


class Balancer:
    """Picks the endpoint of the next connection: round robin over one pool, with affinity of clients. Each round
    contains every endpoint once, in a new random order. With a fixed order, two clients that connect in turn would each
    reach only every second endpoint."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool: Pool = ()
        self._members: frozenset[bytes] = frozenset()
        self._affinity = 0
        self._round: list[bytes] = []
        self._clients: OrderedDict[str, tuple[bytes, float]] = OrderedDict()

    def retarget(self, pool: Pool, affinity: int) -> None:
        """Replace pool and affinity timeout (seconds, 0: none). Clients keep endpoints that are still in the pool."""
        if pool != self._pool:
            self._pool, self._members = pool, frozenset(pool)
            self._round.clear()
        self._affinity = affinity
        if not affinity:
            self._clients.clear()

    def pick(self, client: str, failed: Container[bytes] = ()) -> bytes | None:
        """Return the endpoint for a new connection of a client, or None if all are in `failed`."""
        if not self._affinity:
            return self._next(failed)
        now = self._clock()
        endpoint, until = self._clients.get(client, (b"", 0.0))
        if until <= now or endpoint not in self._members or endpoint in failed:
            found = self._next(failed)
            if found is None:
                return None
            endpoint = found
        self._clients[client] = (endpoint, now + self._affinity)
        self._clients.move_to_end(client)
        if len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)
        return endpoint

    def _next(self, failed: Container[bytes]) -> bytes | None:
        # The rest of this round may contain only failed endpoints; the next round contains every endpoint.
        for _ in range(2 * len(self._pool)):
            if not self._round:
                self._round = list(self._pool)
                random.shuffle(self._round)
            endpoint = self._round.pop()
            if endpoint not in failed:
                return endpoint
        return None


class RelayListener(Watched):
    """A listening socket of one service port for one pool; `kind` is the kind of its descriptors."""

    kind: ClassVar[str]

    def __init__(self, path: DataPath, sock: socket.socket, key: ServicePortKey) -> None:
        self.path = path
        self.key = key
        self.port: int = sock.getsockname()[1]
        self.balancer = Balancer()
        self.sock = sock
        self._is_open = False

    def open(self) -> None:
        """Begin to receive, unless the listener receives already. Raises OSError at the system's limit of watches."""
        if not self._is_open:
            self.path.watch(self.sock, self, select.EPOLLIN)
            self.path.descriptors.listen(self.kind)
            self._is_open = True

    def retarget(self, pool: Pool, affinity: int, serving: Pool) -> None:  # noqa: ARG002 - for UdpListener
        """Replace the endpoints and the affinity timeout."""
        self.balancer.retarget(pool, affinity)

    def close(self) -> None:
        """Stop receiving."""
        if self._is_open:
            self.path.descriptors.unlisten(self.kind)
        self.path.release(self.sock)
