"""The HTTP servers' sockets: binds them, retries every 5 s while an address is in use, and accepts connections.
admission.py limits the connections, connection.py serves each of them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Collection
from typing import Final

from msgspec import Struct

from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import host_port
from kubeproxy.server.admission import PROCESS, Admission
from kubeproxy.server.connection import ServerConnection
from kubeproxy.server.http import Handler

_log = logging.getLogger("kubeproxy.server")

RETRY_SECONDS: Final = 5.0  # seconds between attempts to serve healthz and metrics, as in the Go kube-proxy
_BACKLOG: Final = 1024
_ACCEPTED: Final = 16  # connections accepted per turn of the event loop; accepting them takes some 2 ms
_PAUSE: Final = 0.005  # seconds without accepting after a flooding client's connection was closed


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Raises OSError. At an unspecified address (0.0.0.0 or ::) the socket accepts both
    families, as in Go; at other IPv6 addresses it accepts only IPv6."""
    if host not in {"0.0.0.0", "::", ""}:  # noqa: S104 - no bind here
        return bind_exactly(host, port)
    try:
        return _bind(socket.AF_INET6, "::", port, only_v6=False)
    except OSError as error:
        if host == "::" or error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
            raise
    return bind_exactly("0.0.0.0", port)  # noqa: S104


def bind_exactly(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket that accepts only its address's family, also at :: or 0.0.0.0. Raises OSError."""
    return _bind(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port, only_v6=True)


def _bind(family: int, host: str, port: int, *, only_v6: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


class HttpServer(Struct):
    """Serves one handler on one address. All calls must be on the event loop's thread. `name` is the name for the log,
    such as 'healthz'; `bind` creates the socket; `admission` counts the connections of all servers in the process,
    except those with a lasting answer; `names` are Host names that are accepted on loopback."""

    name: str
    handler: Handler
    bind: Callable[[str, int], socket.socket] = bind
    admission: Admission = PROCESS
    names: Collection[str] = ()
    _socket: socket.socket | None = None
    _connections: set[ServerConnection] = set()
    _retry: asyncio.TimerHandle | None = None
    _accepting: set[asyncio.Task[None]] = set()
    _stopped: bool = False

    def start(self, address: tuple[str, int]) -> None:
        """Listen on (host, port). Raises ApplyError, which names the address."""
        try:
            if not self.admission.may_listen():
                raise OSError(errno.EMFILE, "the limit of open files is too low for these servers; raise LimitNOFILE")
            self._socket = self.bind(*address)
        except OSError as error:
            raise ApplyError(f"cannot serve {self.name} on {_shown(*address)}: {error.strerror}") from error
        self.admission.listening += 1
        self._listen(self._socket)

    def start_retrying(
        self, address: tuple[str, int], failed: Callable[[ApplyError], None], interval: float = RETRY_SECONDS
    ) -> None:
        """Listen on (host, port); after a failure, call `failed` and try again every `interval` seconds."""
        try:
            self.start(address)
        except ApplyError as error:
            failed(error)
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(interval, self.start_retrying, address, failed, interval)
        else:
            if self._retry is not None:
                _log.info("Serving %s on %s after failed attempts", self.name, _shown(*address))

    @property
    def port(self) -> int:
        """The port of the socket."""
        assert self._socket is not None  # noqa: S101 - after `start`
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Close the socket and all connections; the address is free immediately. A second call has no effect."""
        self._stopped = True
        if self._retry is not None:
            self._retry.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self.admission.listening -= 1
            self._socket.close()
            self._socket = None
        for connection in list(self._connections):
            connection.abort()

    async def stop(self) -> None:
        """Close, and wait until tasks and connections have ended. A second call has no effect."""
        self.close()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await asyncio.gather(*(connection.lost.wait() for connection in self._connections))

    # asyncio.Server is not used, because its start is a coroutine, and because the socket of a connection leaks if the
    # server is closed between accept() and the start of the connection's task (CPython 3.11).

    def _listen(self, sock: socket.socket) -> None:
        if not self._stopped:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        if not self.admission.has_room():
            self.admission.make_room()
        refused = False
        for _ in range(_ACCEPTED):
            if not self.admission.has_room():
                break  # the socket remains readable until a connection is dropped
            try:
                accepted, address = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # no file descriptors or memory: the socket stays readable, so pause
                _log.warning("Cannot accept a connection to %s: %s", self.name, error)
                self._pause(sock, 1)
                return
            client = address[0] if isinstance(address, tuple) else "::1"  # all clients of a unix socket count as one
            if self.admission.is_flooding(client):
                accepted.close()
                refused = True
            else:
                self._open(accepted, client)
        if refused:
            self._pause(sock, _PAUSE)

    def _pause(self, sock: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)
        loop.call_later(seconds, self._listen, sock)

    def _open(self, accepted: socket.socket, client: str) -> None:
        accepted.setblocking(False)
        budget = self.admission.budget
        connection = ServerConnection(self.handler, self._lost, self.admission.leave, self.names, budget)
        self._connections.add(connection)
        self.admission.enter(connection, client)
        task = asyncio.get_running_loop().create_task(self._adopt(connection, accepted))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _adopt(self, connection: ServerConnection, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except OSError:
            accepted.close()
            self._lost(connection)

    def _lost(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self.admission.leave(connection)


def _shown(host: str, port: int) -> str:
    return host if "/" in host else host_port(host, port)  # a unix socket has a path
