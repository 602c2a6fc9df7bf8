"""TCP relay: the listener of a service port, and its connections, each with one connection to an endpoint. Nothing
blocks, and at most datapath.ROOM bytes are buffered for a direction, so a slow reader slows down its sender. The end of
a stream is relayed in each direction independently; a reset is relayed as a reset. Sockets send a reset when they are
closed before both streams have ended. If the proxy dies, a client can therefore recognise an incomplete answer."""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress
from select import EPOLLERR, EPOLLET, EPOLLHUP, EPOLLIN, EPOLLOUT
from typing import Any, Final

from msgspec import Struct

from kubeproxy.backends.relay.datapath import DataPath, RelayListener
from kubeproxy.model.addresses import destination_text, unpack

DIAL_TIMEOUTS: Final = (0.25, 0.5, 1.0, 2.0)
"""Timeouts in seconds of the first, second, ... attempt to connect to an endpoint, as in kube-proxy before v1.26."""

_KIND: Final = "connections"  # kind of descriptors
BACKLOG: Final = 4096
_ACCEPTS: Final = 32  # maximum number of connections that a listener accepts in one round of events
_PAUSE: Final = 0.2  # seconds without accepting after the system had no descriptor left
_RESET: Final = struct.pack("ii", 1, 0)
_NO_RESET: Final = struct.pack("ii", 0, 0)
_NOTHING: Final = EPOLLET  # epoll then reports only errors, each once
EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
"""The errors for lack of descriptors or memory; ENOSPC is epoll's error at the limit fs.epoll.max_user_watches."""
_NO_DESCRIPTOR: Final = (
    "%s: a connection was refused, as the limit of open files leaves room for %d connections: raise it "
    "(LimitNOFILE= of the unit, ulimit -n), or take another mode for this many connections"
)
KEEPALIVE: Final = 60  # idle seconds before the first keepalive probe


def prepare(sock: socket.socket) -> None:
    """Set the options of a listener, which its connections inherit, or of a connection to an endpoint."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class TcpListener(RelayListener):
    """Accepts the connections of one service port that go to one pool. Accepted connections continue after `retarget`
    and `close`."""

    kind = _KIND

    def ready(self, fd: int, events: int) -> None:  # noqa: ARG002 - there is one socket, and one kind of event
        """Accept the waiting connections."""
        for _ in range(_ACCEPTS):
            try:
                sock, client = self.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._pause(error)
                    return
                continue  # this client has closed its connection
            descriptors = self.path.descriptors
            if descriptors.take(_KIND, 2):
                sock.setblocking(False)
                Connection(self, self.path, _Side(sock, sock.fileno()), client[0]).dial()
            else:
                self.path.complain("connections", _NO_DESCRIPTOR, self.key, descriptors.room(_KIND) // 2)
                sock.close()

    def _pause(self, error: OSError) -> None:
        path = self.path
        path.complain("accept", "%s: cannot accept connections: %s; raise the limit of open files", self.key, error)
        path.rewatch(self.sock.fileno(), _NOTHING)
        path.later(_PAUSE, self._go_on)

    def _go_on(self) -> None:
        if self.sock.fileno() >= 0:
            self.path.rewatch(self.sock.fileno(), EPOLLIN)


class _Side(Struct, eq=False):
    sock: socket.socket
    fd: int
    held: memoryview | None = None  # bytes that did not fit into the other side's buffer
    ended: bool = False  # its stream has ended
    shut: bool = False  # the end of the stream was relayed to the other side
    watching: int = 0


class Connection(Struct, eq=False):
    """A client's connection and the connection to its endpoint."""

    _listener: TcpListener
    _path: DataPath
    _client: _Side
    _from: str
    _server: _Side | None = None
    _failed: set[bytes] = set()
    _late: set[bytes] = set()
    _slow: int = 0  # number of endpoints that timed out; a refusal does not count, because it takes no time
    _trying: bytes = b""
    _why: str = "there is none"
    _timer: Any = None

    # -- finding an endpoint ----------------------------------------------------------------------------------------

    def dial(self) -> None:
        """Try the next endpoint; if no endpoint is left, end the client's connection."""
        while self._slow < len(DIAL_TIMEOUTS):
            endpoint = self._pick()
            if endpoint is None:
                break
            self._trying = endpoint
            try:
                sock = self._connect(endpoint)
            except OSError as error:
                self._note_failure(str(error))
                if error.errno in EXHAUSTED:
                    break
                continue
            self._server = _Side(sock, sock.fileno(), watching=EPOLLOUT)
            self._timer = self._path.later(DIAL_TIMEOUTS[self._slow], self._too_late)
            return
        self._path.complain(
            str(self._listener.key),
            "%s: a connection was reset, because no endpoint of the Service accepted a connection: %s",
            self._listener.key,
            self._why,
        )
        self.close()

    def _pick(self) -> bytes | None:
        """Return an untried endpoint, else an endpoint that timed out; the timeout grows with each attempt."""
        balancer = self._listener.balancer
        found = balancer.pick(self._from, self._failed)
        if found is None and self._late:
            self._failed -= self._late
            self._late.clear()
            found = balancer.pick(self._from, self._failed)
        return found

    def _connect(self, endpoint: bytes) -> socket.socket:
        sock = socket.socket(self._listener.key.family, socket.SOCK_STREAM)
        try:
            prepare(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, self._path.mark)
            with suppress(BlockingIOError):
                sock.connect((unpack(endpoint[:-2]), int.from_bytes(endpoint[-2:], "big")))
            self._path.watch(sock, self, EPOLLOUT)
        except OSError:
            sock.close()
            raise
        return sock

    def _note_failure(self, why: str) -> None:
        self._failed.add(self._trying)
        self._why = f"{destination_text(self._trying)}: {why}"

    def _too_late(self) -> None:
        self._slow += 1
        self._drop_server()
        self._late.add(self._trying)
        self._note_failure("no answer in time")
        self.dial()

    def _drop_server(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._server is not None:
            self._path.release(self._server.sock)
            self._server = None

    def _dialled(self, server: _Side) -> None:
        if code := server.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._drop_server()
            self._note_failure(os.strerror(code))
            self.dial()
            return
        self._timer.cancel()
        self._timer = None
        self._watch(server, self._client)
        self._client.watching = EPOLLIN
        try:
            self._path.watch(self._client.sock, self, EPOLLIN)
        except OSError as error:
            self._path.complain("watch", "%s: a connection was reset: %s", self._listener.key, error)
            self.close()

    # -- carrying ---------------------------------------------------------------------------------------------------

    def ready(self, fd: int, events: int) -> None:
        """Relay the bytes that are available; see Watched."""
        server = self._server
        if server is None:
            return
        if self._timer is not None:
            self._dialled(server)
            return
        side, other = (self._client, server) if fd == self._client.fd else (server, self._client)
        try:
            if other.held is not None and events & (EPOLLOUT | EPOLLHUP):
                sent = side.sock.send(other.held)
                other.held = other.held[sent:] or None
            if side.held is None and not side.ended and events & (EPOLLIN | EPOLLHUP | EPOLLERR):
                self._carry(side, other)
                while events & EPOLLERR and side.held is None and not side.ended:
                    self._carry(side, other)  # bytes that the peer sent before the reset
        except BlockingIOError:
            pass
        except OSError:
            events = EPOLLERR
        if events & EPOLLERR:
            self.close()
        elif side.shut and other.shut:
            for each in (side, other):
                each.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_RESET)
            self.close()
        else:
            self._watch(side, other)
            self._watch(other, side)

    def _carry(self, side: _Side, other: _Side) -> None:
        came, rest = self._path.carry(side.fd, other.fd)
        if rest:
            side.held = memoryview(rest)
        elif not came:
            side.ended = True
            other.sock.shutdown(socket.SHUT_WR)
            side.shut = True

    def _watch(self, side: _Side, other: _Side) -> None:
        """Watch a side for bytes that the other side can take, and for room for bytes that the other side holds."""
        reading = 0 if side.ended or side.held is not None else EPOLLIN
        events = reading | (EPOLLOUT if other.held is not None else 0) or _NOTHING
        if side.watching != events:
            side.watching = events
            self._path.rewatch(side.fd, events)

    def close(self) -> None:
        """Close both connections; send a reset unless both streams have ended."""
        if self._client.fd < 0:
            return
        self._client.fd = -1
        self._drop_server()
        self._path.release(self._client.sock)
        self._path.descriptors.give(_KIND, 2)
