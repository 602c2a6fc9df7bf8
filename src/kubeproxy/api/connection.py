"""One HTTP/1.1 connection on asyncio: one exchange at a time. Retries and the choice of connections are in http.py.
data_received passes body bytes on immediately, because a delay here delays the effect of a change at the API server.
When a connection ends for any reason, its exchange ends, so that no caller waits forever."""

from __future__ import annotations

import asyncio
import copy
import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import httptools
from msgspec import Struct, field

from kubeproxy.api.status import ConnectionFailed, MalformedAnswer, os_reason

MAX_OVERHEAD: Final = 64 << 10
"""The maximum number of bytes of headers, chunk framing or trailers that may arrive without a body byte in between; the
API's headers are shorter than 2 KiB."""

OBJECT: Final = 4 << 20
"""Limit in bytes of an error, or of an answer with one object; the API server accepts objects of up to 3 MB."""

LIST: Final = 500 * 3 << 19
"""Limit in bytes of a list: a page of 500 objects of 1.5 MB each, or an unpaged list of 190,000 slices of 4 KB each."""

LEAST_PROGRESS: Final = 16 << 10
"""Bytes of an answer that must arrive in each period of AnswerProgress: 0.5 KB/s with http.REQUEST_TIMEOUT."""

_LOST: Final = 30.0
"""Seconds without a packet from the peer after which the kernel closes a connection (_SOCKET_OPTIONS)."""
_SILENT: Final = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
"""Errors of a connection that the kernel closes after _LOST (tcp_write_err in net/ipv4/tcp_timer.c)."""
_SOCKET_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)

BytesSink = Callable[[bytes], None]


class AnswerProgress:
    """The deadline of an answer (`until`): in each period of `timeout` seconds, the first byte, the end, or
    LEAST_PROGRESS more bytes must arrive. If there were no minimum, a peer that sends one byte a second could block its
    reader forever."""

    __slots__ = ("_due", "timeout", "until")

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout = timeout
        self.until = now + timeout
        self._due = 1

    def received(self, count: int, now: float) -> None:
        """Count received bytes; move the deadline after enough bytes."""
        self._due -= count
        if self._due <= 0:
            self._due = LEAST_PROGRESS
            self.until = now + self.timeout


class Exchange(Struct, kw_only=True, eq=False):
    """The answer to one request as it arrives. `done` is completed at the end of the answer, or fails with a
    SourceError.

    The body of a successful answer (2xx) goes to the `sink` as it arrives, once for each read of the socket; without a
    sink the body is collected in `body`, up to `most` bytes. The body of an error is collected up to OBJECT bytes.
    `on_headers` is called when the status is known. An exception in `sink` or `on_headers` ends the exchange."""

    idle_timeout: float
    on_headers: Callable[[Exchange], None]
    sink: BytesSink | None = None
    most: int = OBJECT
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    status: int = 0
    headers: dict[str, str] = {}
    body: bytearray = field(default_factory=bytearray)
    pieces: list[bytes] = []

    @property
    def streaming(self) -> bool:
        """Whether body bytes are passed to the sink."""
        return self.sink is not None and 200 <= self.status < 300


class ApiConnection(asyncio.Protocol):
    """An open connection. `start` begins an exchange."""

    def __init__(self, peer: str, on_lost: Callable[[ApiConnection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._overhead = 0
        self._progress = False
        self._complete = False
        self._keep_alive = True
        self.last_received = self._loop.time()  # on the loop's clock
        self._body_progress = AnswerProgress(0.0, self.last_received)
        self.received_any = False
        self.context: object = None  # the TLS context
        self.lost: asyncio.Future[None] = self._loop.create_future()  # set when the transport is closed

    def start(self, exchange: Exchange, request: bytes) -> None:
        """Send the complete `request`; pass its answer to `exchange`."""
        if self._transport is None or self._transport.is_closing():
            exchange.done.set_exception(ConnectionFailed(f"{self._peer}: the connection is closed"))
            return
        self._exchange = exchange
        self._overhead = 0
        self._complete = self.received_any = False
        self.last_received = self._loop.time()
        self._body_progress = AnswerProgress(exchange.idle_timeout, self.last_received)
        self._timer = self._loop.call_later(exchange.idle_timeout, self._check_idle)
        self._transport.write(request)

    @property
    def reusable(self) -> bool:
        """Whether the last answer is complete and the peer keeps the connection open."""
        open_ = self._transport is not None and not self._transport.is_closing() and not self.lost.done()
        return open_ and self._exchange is None and self._keep_alive

    def abort(self) -> None:
        """Close the connection immediately; a running exchange ends with ConnectionFailed."""
        self._end(ConnectionFailed(f"{self._peer}: the connection was given up"))
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and set the socket's options."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
            return
        for option in _SOCKET_OPTIONS:
            sock.setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, pass on body bytes, and end the exchange when the answer is complete."""
        exchange = self._exchange
        if exchange is None or self._parser is None:
            self.abort()  # bytes without a request
            return
        self.last_received = self._loop.time()
        self._body_progress.received(len(data), self.last_received)
        self.received_any = True
        self._progress = False
        try:
            self._parser.feed_data(data)
            if (pieces := exchange.pieces) and exchange.sink is not None:
                exchange.pieces = []
                exchange.sink(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ if isinstance(error.__context__, Exception) else error)
            return
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(MalformedAnswer(f"{self._peer}: the answer is no HTTP{_TLS_HINT * data.startswith(_ALERT)}"))
            return
        except Exception as error:
            self._fail(error)
            return
        self._overhead = 0 if self._progress else self._overhead + len(data)
        if self._overhead > MAX_OVERHEAD:
            self._fail(MalformedAnswer(f"{self._peer}: more than {MAX_OVERHEAD} bytes of headers"))
        elif self._complete:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: with success if the close of the connection ends the answer, else with ConnectionFailed."""
        exchange = self._exchange
        # Without these headers, the end of the connection marks the end of the body (RFC 9112, 6.3).
        framing = {"content-length", "transfer-encoding"}
        if exchange is not None and exc is None and exchange.status >= 200 and not framing & exchange.headers.keys():
            self._end(None)
        else:
            plain = self.context is None and not self.received_any
            what = "without an answer to HTTP" if plain else "before the end of the answer"
            why = f": {os_reason(exc)}" if isinstance(exc, OSError) else ""
            why += "; must the server's URL begin with https?" * plain
            silent = _LOST if isinstance(exc, OSError) and exc.errno in _SILENT else 0.0
            self._end(ConnectionFailed(f"{self._peer}: the connection was closed {what}{why}", silent))
        self._parser = None  # breaks the reference cycle of parser and connection
        self._on_lost(self)
        if not self.lost.done():
            self.lost.set_result(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; MAX_OVERHEAD limits the size of all headers."""
        if self._exchange is not None:
            self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status; after an interim answer (1xx), wait for the final answer."""
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:
            return
        exchange.status = parser.get_status_code()
        if exchange.status >= 200:
            self._progress = True
            self._keep_alive = parser.should_keep_alive()
            exchange.on_headers(exchange)

    def on_body(self, body: bytes) -> None:
        """Store a piece of the body: in `pieces` for the sink, else in `body`."""
        exchange = self._exchange
        if exchange is None:
            return
        self._progress = True
        if exchange.streaming:
            exchange.pieces.append(body)
            return
        most = exchange.most if exchange.status < 300 else OBJECT
        if len(exchange.body) + len(body) > most:
            raise MalformedAnswer(f"{self._peer}: the answer is longer than {most} bytes")
        exchange.body += body

    def on_message_complete(self) -> None:
        """Record the end of the answer."""
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status < 200:
            exchange.status = 0
            exchange.headers.clear()
        else:
            self._complete = True

    def _check_idle(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        until = self.last_received + exchange.idle_timeout if exchange.streaming else self._body_progress.until
        now = self._loop.time()
        if now < until:
            self._timer = self._loop.call_at(until, self._check_idle)
        elif now - self.last_received >= exchange.idle_timeout:
            self._fail(ConnectionFailed(f"{self._peer}: sent nothing for {exchange.idle_timeout:.0f} s"))
        else:
            rate = f"less than {LEAST_PROGRESS} bytes in {exchange.idle_timeout:.0f} s"
            self._fail(ConnectionFailed(f"{self._peer}: sends too slowly, {rate}"))

    def _fail(self, error: Exception) -> None:
        self._end(error)
        self.abort()

    def _end(self, error: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if exchange is None or exchange.done.done():
            return
        if error is None:
            exchange.done.set_result(None)
        else:
            exchange.done.set_exception(error)


_ALERT: Final = b"\x15\x03"  # a TLS alert (RFC 8446, 6): the answer of a TLS server to a request without TLS
_TLS_HINT: Final = ", but TLS: the server's URL must begin with https"


JOINED: Final = 10.0
"""Seconds for which equal queries share a lookup. Later queries start a new lookup: name servers may change."""


class _Lookup(NamedTuple):
    began: float
    found: asyncio.Future[list[Any] | Exception]


class Loop(asyncio.SelectorEventLoop):
    """An event loop that resolves each host name in a separate daemon thread. getaddrinfo(3) cannot be cancelled, and
    takes half a minute or more if no name server answers. In one of the loop's few worker threads, which also write to
    the kernel, the call would delay repairs and the end of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups: dict[tuple[object, ...], _Lookup] = {}

    async def getaddrinfo(  # noqa: D102 - see asyncio
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - asyncio's name
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        question = (host, port, family, type, proto, flags)
        lookup = self.lookups.get(question)
        if lookup is None or self.time() - lookup.began >= JOINED:
            lookup = self.lookups[question] = _Lookup(self.time(), self.create_future())
            threading.Thread(target=self._look_up, args=(question, lookup), name="lookup", daemon=True).start()
        found = await asyncio.shield(lookup.found)
        if isinstance(found, Exception):
            raise copy.copy(found)
        return found

    def _look_up(self, question: tuple[Any, ...], lookup: _Lookup) -> None:
        found: list[Any] | Exception
        try:
            found = socket.getaddrinfo(*question)
        except (OSError, UnicodeError) as error:
            found = error.with_traceback(None)
        with suppress(RuntimeError):  # the loop is closed
            self.call_soon_threadsafe(self._answered, question, lookup, found)

    def _answered(self, question: tuple[Any, ...], lookup: _Lookup, found: list[Any] | Exception) -> None:
        lookup.found.set_result(found)
        if self.lookups.get(question) is lookup:
            del self.lookups[question]


def is_looked_up(host: str) -> bool:
    """Return whether a lookup of a host is running in this loop."""
    loop = asyncio.get_running_loop()
    return isinstance(loop, Loop) and any(question[0] == host for question in loop.lookups)
