"""A small HTTP/1.1 server for health and metrics, answered by functions, on the event loop.

It parses with httptools, bounds what a client may send, hold or leave unread, and binds again every 5 s where an
address is taken. A body that takes long to make is sent in pieces as they come. What is served is decided elsewhere
(health.py, pages.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from http import HTTPStatus
from typing import Final, NamedTuple

import httptools

from kubeproxy.errors import ApplyError

_log = logging.getLogger("kubeproxy.observe")

RETRY_SECONDS: Final = 5.0  # as kube-proxy waits between attempts to serve healthz and metrics
REQUEST_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 90.0
LINGER_SECONDS: Final = 2.0
REQUEST_BYTES: Final = 16 * 1024
_PIECE: Final = 4096
_BACKLOG: Final = 128
UNREAD_BYTES: Final = 1024 * 1024
CONNECTIONS: Final = 256

Headers = tuple[tuple[str, str], ...]
TEXT: Final[Headers] = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
JSON: Final[Headers] = (("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff"))


_KEPT_HEADERS: Final = frozenset((b"accept", b"accept-encoding"))


class Request(NamedTuple):
    """What a handler gets: the method, and path and query as sent, still percent-encoded.

    `accept` and `accept_encoding` are the headers of these names, '' when there is none.
    """

    method: str
    path: str
    query: str
    accept: str = ""
    accept_encoding: str = ""
    body: bytes = b""


Pieces = AsyncGenerator[bytes, None]


class Response(NamedTuple):
    """What a handler returns; the body is left out for HEAD.

    A body that is a generator is sent piece by piece, as fast as the client reads; the event loop runs in between. It
    is closed when the client goes away.
    """

    status: int
    headers: Headers
    body: bytes | Pieces


Handler = Callable[[Request], Response]
"""Answers on the event loop, to any method: it must be quick.

When it raises, the client gets a 500 and the log the traceback.
"""


READ: Final = frozenset(("GET", "HEAD"))


def routes(table: Mapping[str, Handler], any_method: AbstractSet[str] = frozenset()) -> Handler:
    """Return a handler that passes on by exact path, and answers 404 for others.

    Pages are read only, with 405 for all but GET and HEAD, apart from those of `any_method`.
    """

    def choose(request: Request) -> Response:
        handler = table.get(request.path)
        if handler is not None and request.path in any_method:
            return handler(request)
        return read_only(handler)(request) if handler else Response(404, TEXT, b"404 page not found\n")

    return choose


def read_only(handler: Handler) -> Handler:
    """Return a handler that answers 405 to all but GET and HEAD."""

    def checked(request: Request) -> Response:
        if request.method in READ:
            return handler(request)
        return Response(405, (*TEXT, ("Allow", "GET, HEAD")), b"method not allowed\n")

    return checked


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Raises OSError.

    Both unspecified addresses take both families, as in Go; other IPv6 addresses take only theirs.
    """
    wildcard = host in {"0.0.0.0", "::", ""}  # noqa: S104 - compared, and asked for by the configuration
    if wildcard:
        try:
            return _bind(socket.AF_INET6, "::", port, only_v6=False)
        except OSError as error:
            if host == "::" or error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                raise
        return _bind(socket.AF_INET, "0.0.0.0", port, only_v6=False)  # noqa: S104
    return bind_exactly(host, port)


def bind_exactly(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket of the family of its address, even if that is unspecified. Raises OSError."""
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


class HttpServer:
    """One handler served on one or more addresses. Made, then started and stopped on the event loop's thread.

    `name` is for the log, such as 'healthz'; `bind` makes its sockets.
    """

    def __init__(self, name: str, handler: Handler, bind: Callable[[str, int], socket.socket] = bind) -> None:
        self.name = name
        self._handler = handler
        self._bind = bind
        self._sockets: list[socket.socket] = []
        self._connections: dict[_Connection, None] = {}
        self._retries: set[asyncio.Task[None]] = set()
        self._accepting: set[asyncio.Task[None]] = set()
        self._stopped = False

    def start(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Listen on all (host, port) pairs now, or on none. Raises ApplyError naming the address that is taken."""
        sockets: list[socket.socket] = []
        for host, port in addresses:
            try:
                sockets.append(self._bind(host, port))
            except OSError as error:
                for sock in sockets:
                    sock.close()
                raise ApplyError(f"cannot serve {self.name} on {_shown(host, port)}: {error.strerror}") from error
        self._sockets += sockets
        for sock in sockets:
            self._listen(sock)

    def start_retrying(
        self,
        addresses: Sequence[tuple[str, int]],
        failed: Callable[[ApplyError], None],
        interval: float = RETRY_SECONDS,
    ) -> bool:
        """Listen as `start`, and try again every `interval` seconds while that fails; return whether it worked at once.

        `failed` is called for each attempt that failed.
        """
        try:
            self.start(addresses)
        except ApplyError as error:
            failed(error)
            self._spawn(self._retry(addresses, failed, interval), self._retries)
            return False
        return True

    @property
    def ports(self) -> list[int]:
        """The ports that are listened on, in the order asked for."""
        return [sock.getsockname()[1] for sock in self._sockets]

    def close(self) -> None:
        """Stop listening for good and drop all connections; the addresses are free at once. Safe to call twice."""
        self._stopped = True
        for task in self._retries:
            task.cancel()
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()
        for connection in list(self._connections):
            connection.abort()

    async def stop(self) -> None:
        """Close, and wait until tasks and connections are gone. Safe to call twice."""
        self.close()
        await asyncio.gather(*self._retries, *self._accepting, return_exceptions=True)
        await asyncio.gather(*(connection.lost.wait() for connection in self._connections))

    def _spawn(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # Not asyncio.Server: closing that one between an accept() and the task that it starts loses the connection's
    # socket (CPython 3.11), and its start is a coroutine, where `start` here has done its work when it returns.

    def _listen(self, sock: socket.socket) -> None:
        if not self._stopped:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_BACKLOG):
            try:
                accepted, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no more file descriptors or memory: readable until there are, so wait
                _log.warning("Cannot accept a connection to %s: %s", self.name, error)
                loop.remove_reader(sock)
                loop.call_later(1, self._listen, sock)
                return
            accepted.setblocking(False)
            self._spawn(self._adopt(accepted), self._accepting)

    async def _adopt(self, accepted: socket.socket) -> None:
        def make() -> _Connection:
            return _Connection(self._handler, self._opened, self._lost)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, accepted)
        except OSError:
            accepted.close()

    async def _retry(
        self, addresses: Sequence[tuple[str, int]], failed: Callable[[ApplyError], None], interval: float
    ) -> None:
        while True:
            await asyncio.sleep(interval)
            try:
                self.start(addresses)
            except ApplyError as error:
                failed(error)
            else:
                _log.info("Serving %s on %s at last", self.name, ", ".join(_shown(*a) for a in addresses))
                return

    def _opened(self, connection: _Connection) -> None:
        if self._stopped:
            connection.abort()  # it was accepted just before the end
        if len(self._connections) >= CONNECTIONS:
            # The oldest goes: it is idle, or held open to keep health checks out.
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.abort()
        self._connections[connection] = None

    def _lost(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _head(response: Response, version: str, more: Sequence[str]) -> bytes:
    """Return status line and headers."""
    status = HTTPStatus(response.status)
    lines = [f"HTTP/{version} {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in response.headers]
    lines.append(f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}")
    return "\r\n".join([*lines, *more, "", ""]).encode("latin-1", "replace")


class _Connection(asyncio.Protocol):
    """One client's connection. The parser's callbacks (on_...) are called from data_received."""

    def __init__(
        self, handler: Handler, opened: Callable[[_Connection], None], lost: Callable[[_Connection], None]
    ) -> None:
        self._handler = handler
        self._tell_opened = opened
        self._tell_lost = lost
        self.lost = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self._received = 0
        self._closing = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._stream: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Drop the connection without sending what is left."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_server makes
        self._transport = transport
        self._wait(REQUEST_SECONDS)
        self._tell_opened(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._tell_lost(self)
        self.lost.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.cancel()
        # They refer back to us: cycles would be left to the collector, which seldom works.
        self._parser = self._stream = self._timer = None
        self._transport = None

    def pause_writing(self) -> None:
        # The client does not read: ask it nothing more, and give it some time.
        self._writable.clear()
        if self._transport is not None:
            self._transport.pause_reading()
        self._wait(REQUEST_SECONDS)

    def resume_writing(self) -> None:
        self._writable.set()
        if self._transport is not None and not self._closing:
            self._transport.resume_reading()
        self._wait(IDLE_SECONDS)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if self._closing or parser is None:
            return
        if self._received == 0:
            self._wait(REQUEST_SECONDS)
        try:
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                self._received += len(piece)
                parser.feed_data(piece)
                if self._received > REQUEST_BYTES:
                    self._refuse(431)
                    return
        except httptools.HttpParserUpgrade:
            self._close()  # answered already, without changing the protocol
        except httptools.HttpParserError:
            self._refuse(400)

    def on_message_begin(self) -> None:
        self._url = self._body = b""
        self._headers.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in _KEPT_HEADERS:
            self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        parser = self._parser
        if self._closing or parser is None or self._transport is None or self._transport.is_closing():
            return  # or the client is gone, with more requests sent at once
        self._received = 0
        method = parser.get_method().decode("ascii", "replace")
        keep = parser.should_keep_alive() and not parser.should_upgrade()
        version = parser.get_http_version()
        response = self._answer(method)
        if not isinstance(response.body, bytes):
            if method != "HEAD":
                self._closing = True  # it is the last answer on this connection
                self._stream = asyncio.get_running_loop().create_task(self._send_pieces(response, version))
                return
            response = response._replace(body=b"")
        self._send(response, version, body=method != "HEAD", keep=keep)
        if keep:
            self._wait(IDLE_SECONDS)
        else:
            self._close()

    def _answer(self, method: str) -> Response:
        try:
            path, _, query = self._url.decode("ascii", "replace").partition("?")
            accept, encoding = (
                self._headers.get(name, b"").decode("ascii", "replace") for name in (b"accept", b"accept-encoding")
            )
            return self._handler(Request(method, path, query, accept, encoding, self._body))
        except Exception:
            _log.exception("Serving %r failed", self._url)
            return Response(500, TEXT, b"internal error\n")

    def _send(self, response: Response, version: str, *, body: bool, keep: bool) -> None:
        if self._transport is None or not isinstance(response.body, bytes):
            return
        more = [f"Content-Length: {len(response.body)}"]
        if not keep:
            more.append("Connection: close")
        elif version == "1.0":
            more.append("Connection: keep-alive")
        self._transport.write(_head(response, version, more) + (response.body if body else b""))
        if self._transport.get_write_buffer_size() > UNREAD_BYTES:
            self._closing = True
            self.abort()

    async def _send_pieces(self, response: Response, version: str) -> None:
        """Send a body piece by piece and close; HTTP/1.0 has no chunks, and the connection's end is the body's."""
        chunked = version != "1.0"
        assert not isinstance(response.body, bytes)  # noqa: S101 - on_message_complete looked
        async with aclosing(response.body) as pieces:
            try:
                self._write(_head(response, version, ["Connection: close", *["Transfer-Encoding: chunked"] * chunked]))
                async for piece in pieces:
                    if piece:
                        self._write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                    self._wait(IDLE_SECONDS if self._writable.is_set() else REQUEST_SECONDS)
                    await self._writable.wait()
            except Exception:
                _log.exception("Serving %r failed", self._url)
                self.abort()  # a body without an end is seen to be cut
                return
        self._write(b"0\r\n\r\n" * chunked)
        if self._transport is not None:
            self._transport.close()
            self._wait(REQUEST_SECONDS)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _refuse(self, status: int) -> None:
        if not self._closing:
            text = f"{status} {HTTPStatus(status).phrase}\n".encode()
            self._send(Response(status, TEXT, text), "1.1", body=True, keep=False)
            self._linger()

    def _close(self) -> None:
        if not self._closing and self._transport is not None:
            self._closing = True
            self._transport.close()
            self._wait(REQUEST_SECONDS)

    def _linger(self) -> None:
        """Close for writing, and for good when the client did: closing on unread data would reset what was sent."""
        if not self._closing and self._transport is not None:
            self._closing = True
            self._transport.write_eof()
            self._wait(LINGER_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Drop the connection unless something happens within that time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)
