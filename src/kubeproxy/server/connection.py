"""One client's HTTP/1.1 connection, parsed with httptools, with limits on its requests, their time and unread answers.
A connection gets at most one answer per turn of the event loop, and a client gets a share of the loop's time
(admission.py). A body that takes long to generate is sent in pieces."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final

import httptools

from kubeproxy.server.admission import Budget, peer_of
from kubeproxy.server.http import TEXT, Handler, Request, Response, refused_host

_log = logging.getLogger("kubeproxy.server")

REQUEST_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 90.0
LINGER_SECONDS: Final = 2.0
LINGER_BYTES: Final = 64 * 1024
REQUEST_BYTES: Final = 16 * 1024
UNREAD_BYTES: Final = 1024 * 1024
PIPELINED: Final = 8  # limit of waiting requests per connection
REFUSAL_SECONDS: Final = 0.01  # seconds that a refused request takes from its client's share of the event loop
_PIECE: Final = 512
_KEPT_HEADERS: Final = frozenset((b"accept", b"accept-encoding", b"host", b"user-agent", b"origin", b"sec-fetch-site"))


def _head(response: Response, version: str, more: Sequence[str]) -> bytes:
    status = HTTPStatus(response.status)
    lines = [f"HTTP/{version} {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in response.headers]
    lines.append(f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}")
    return "\r\n".join([*lines, *more, "", ""]).encode("latin-1", "replace")


class ServerConnection(asyncio.BufferedProtocol):
    """One client's connection. `data_received` calls the parser, which calls the on_... methods.

    One turn of the event loop reads at most REQUEST_BYTES from a connection; an asyncio.Protocol would read 256 KiB.
    `lost` is called when the connection is closed, `lasting` at the start of an answer that continues until the client
    closes the connection. `names` are the Host names, in addition to localhost, that are answered on loopback; `budget`
    limits the time of answers."""

    # ruff: noqa: D102 - asyncio.BufferedProtocol and httptools document their callbacks

    def __init__(
        self,
        handler: Handler,
        lost: Callable[[ServerConnection], None],
        lasting: Callable[[ServerConnection], None] = lambda _: None,
        names: Collection[str] = (),
        budget: Budget | None = None,
    ) -> None:
        self._handler = handler
        self._budget = budget or Budget()
        self._client = b""
        self._is_remote = False
        self._waiting: deque[tuple[Request, str, bool]] = deque()  # request, version, whether the connection is kept
        self._next: asyncio.Handle | None = None  # the timer for the answer to the next request
        self._tell_lost = lost
        self._tell_lasting = lasting
        self._names = names
        self.lost = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._local_address = self._peer = ""
        self._given_up = False
        self._timer: asyncio.TimerHandle | None = None
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self._buffer = bytearray()
        self._received = 0
        self._closing = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._stream: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Drop the connection and its unsent data; before `connection_made`, this takes effect in `connection_made`."""
        self._given_up = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport
        self._local_address = (transport.get_extra_info("sockname") or ("",))[0]
        self._peer = (transport.get_extra_info("peername") or ("",))[0]
        if self._peer:  # all clients of a unix socket count as one
            self._client = peer_of(self._peer)
            self._is_remote = self._peer != self._local_address and not ip_address(self._peer).is_loopback
        if self._given_up:
            transport.abort()
        else:
            self._wait(REQUEST_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._tell_lost(self)
        self.lost.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.cancel()
        if self._next is not None:
            self._next.cancel()
        # Break reference cycles with this object. Otherwise it would remain until a run of the garbage collector, which
        # is rare.
        self._parser = self._stream = self._timer = self._next = None
        self._transport = None

    def pause_writing(self) -> None:
        # The client does not read: accept no further requests, and drop the connection unless the client reads soon.
        self._writable.clear()
        if self._transport is not None:
            self._transport.pause_reading()
        self._wait(REQUEST_SECONDS)

    def resume_writing(self) -> None:
        self._writable.set()
        if self._transport is not None and not self._closing:
            self._transport.resume_reading()
        self._wait(IDLE_SECONDS)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        self._buffer = bytearray(REQUEST_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data, self._buffer = bytes(self._buffer[:nbytes]), bytearray()
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client, and begin to answer complete requests."""
        parser = self._parser
        if self._closing or parser is None:
            # Each read takes time of the event loop, so bytes without an answer are limited.
            self._received += len(data)
            if self._received > LINGER_BYTES:
                self.abort()
            return
        if self._received == 0:
            self._wait(REQUEST_SECONDS)
        try:
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                self._received += len(piece)
                parser.feed_data(piece)
                if self._is_closing():
                    return
                if self._received > REQUEST_BYTES:
                    self._refuse(431)
                    return
        except httptools.HttpParserUpgrade:
            self._close()  # the request is answered without an upgrade of the protocol
        except httptools.HttpParserError:
            self._refuse(400)

    def on_message_begin(self) -> None:
        self._url = self._body = b""
        self._headers = {}

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
            return  # the connection is closing, possibly because the client sent several requests and disconnected
        self._received = 0
        if len(self._waiting) >= PIPELINED:
            self._refuse(429)
            return
        keep = parser.should_keep_alive() and not parser.should_upgrade()
        self._waiting.append((self._request(parser.get_method()), parser.get_http_version(), keep))
        if self._next is None:
            self._admit()

    def _request(self, method: bytes) -> Request:
        def header(name: bytes) -> str:
            return self._headers.get(name, b"").decode("ascii", "replace")

        path, _, query = self._url.decode("ascii", "replace").partition("?")
        return Request(
            method.decode("ascii", "replace"),
            path,
            query,
            accept=header(b"accept"),
            accept_encoding=header(b"accept-encoding"),
            body=self._body,
            neighbour=header(b"user-agent") if self._peer == self._local_address else "",
            peer=self._peer,
            local=self._local_address,
            host=header(b"host"),
            origin=header(b"origin"),
            site=header(b"sec-fetch-site"),
        )

    def _admit(self) -> None:
        """Answer the oldest waiting request as soon as its client's share of the event loop allows it."""
        self._next = None
        if self._waiting and not self._closing:
            delay = self._budget.reserve(self._client, remote=self._is_remote)
            if delay:
                self._next = asyncio.get_running_loop().call_later(delay, self._answer_oldest)
            else:
                self._answer_oldest()

    def _answer_oldest(self) -> None:
        self._next = None
        if self._closing or self._transport is None or self._transport.is_closing():
            return
        began = time.monotonic()
        self._respond(*self._waiting.popleft())
        self._budget.spend(self._client, time.monotonic() - began, remote=self._is_remote)
        if not self._closing:
            self._next = asyncio.get_running_loop().call_soon(self._admit)

    def _respond(self, request: Request, version: str, keep: bool) -> None:
        response = self._answer(request)
        if not isinstance(response.body, bytes):
            if request.method != "HEAD":
                self._closing = True  # this is the last answer on this connection
                if response.lasts == "until the client goes":
                    self._tell_lasting(self)
                self._stream = asyncio.get_running_loop().create_task(self._send_pieces(response, version))
                return
            response = response._replace(body=b"")
        self._send(response, version, body=request.method != "HEAD", keep=keep)
        if keep:
            self._wait(IDLE_SECONDS)
        else:
            self._close()

    def _answer(self, request: Request) -> Response:
        try:
            if (why := refused_host(request.host, self._local_address, self._names)) is not None:
                return Response(403, TEXT, f"{why}\n".encode())
            return self._handler(request)
        except Exception:
            _log.exception("Serving %r failed", request.path)
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
        """Send a body piece by piece, then close the connection; in HTTP/1.0, which has no chunks, the close ends the
        body."""
        chunked = version != "1.0"
        assert not isinstance(response.body, bytes)  # noqa: S101 - checked in _respond
        self._wait(IDLE_SECONDS)  # the first piece may take as long as later pieces
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
                self.abort()  # the end of the body is not sent, so the client notices the error
                return
        self._write(b"0\r\n\r\n" * chunked)
        if self._transport is not None:
            self._transport.close()
            self._wait(REQUEST_SECONDS)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _refuse(self, status: int) -> None:
        """Refuse a request. Close for writing, and later completely, because a close with unread data resets the
        connection."""
        if not self._closing and self._transport is not None:
            text = f"{status} {HTTPStatus(status).phrase}\n".encode()
            self._send(Response(status, TEXT, text), "1.1", body=True, keep=False)
            self._closing = True
            self._received = 0
            self._transport.write_eof()
            self._wait(LINGER_SECONDS)
            self._budget.spend(self._client, REFUSAL_SECONDS, remote=self._is_remote)

    def _close(self) -> None:
        if not self._closing and self._transport is not None:
            self._closing = True
            self._transport.close()
            self._wait(REQUEST_SECONDS)

    def _is_closing(self) -> bool:
        return self._closing

    def _wait(self, seconds: float) -> None:
        """Drop the connection after `seconds`, unless this method is called again before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)
