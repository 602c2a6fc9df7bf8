"""A small HTTP/1.1 client for one API server, with persistent connections, and streams for watches. Failures raise
typed errors (status.py). The client never repeats a request that may have had an effect."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple

from kubeproxy.api.cluster import Cluster, connection_reason
from kubeproxy.api.connection import OBJECT, ApiConnection, BytesSink, Exchange, is_looked_up
from kubeproxy.api.credentials import Headers
from kubeproxy.api.proxy import open_tunnel
from kubeproxy.api.source import Route, Trouble
from kubeproxy.api.status import ConnectionFailed, StatusError, decode_status
from kubeproxy.engine.pacing import wait_briefly
from kubeproxy.release import NUMBER, architecture

log = logging.getLogger("kubeproxy.api")

CONNECT_TIMEOUT = 10.0  # maximum seconds to open a connection, including the TLS handshake

REQUEST_TIMEOUT = 30.0
"""Seconds without a received byte after which a request fails; a long list may take longer if bytes keep arriving."""

_ACCEPT = "application/json;drop=metadata.managedFields"  # KEP-5958; an older API server ignores the parameter
_MAX_IDLE = 4
_IDLE_LIFETIME = 60.0
_HAPPY_EYEBALLS_DELAY = 0.25  # RFC 8305, 5


class Finished(NamedTuple):
    """A finished request, for metrics."""

    method: str
    host: str  # the server's host:port
    code: str  # the status or '<error>'
    seconds: float  # seconds until the complete answer, or until the headers of a stream
    sent: int  # size of the request's body in bytes
    received: int | None  # Content-Length of the answer; None without this header


OnRequest = Callable[[Finished], None]


def user_agent() -> str:
    """Return the User-Agent of this program, in the form of the Go components."""
    return f"kube-proxy/v{NUMBER} (linux/{architecture()}) kubernetes/python"


class Contact:
    """Records whether the API server can be reached. Logs each change of this state, but not each failed attempt."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._answers = asyncio.Event()
        self._trouble = Trouble(lambda text: log.warning("Waiting for the API server at %s", text))

    @property
    def trouble(self) -> str:
        """The reason why the server cannot be reached; '' for a reachable server."""
        return self._trouble.text

    def failed(self, reason: str) -> None:
        """Record that a connection failed or was lost."""
        self._trouble.met(reason)
        self._answers.clear()

    def answered(self) -> None:
        """Record that the server answered, with success or an error."""
        if self._trouble.over():
            log.info("The API server at %s answers", self._url)
            self._answers.set()

    async def pause(self, delay: float) -> None:
        """Wait `delay` seconds after a failure, or until another request gets an answer."""
        await wait_briefly(self._answers, delay)


class HttpClient:
    """An HTTP client for the API server of `cluster`, for one event loop, until `close`."""

    def __init__(
        self, cluster: Cluster, *, on_request: OnRequest | None = None, connect_timeout: float = CONNECT_TIMEOUT
    ) -> None:
        self.cluster = cluster
        self._on_request = on_request
        self._connect_timeout = connect_timeout
        self._user_agent = user_agent()
        self._route = cluster.server.authority + (f" through {cluster.proxy}" if cluster.proxy else "")
        self.places = Route()
        self.contact = Contact(cluster.server.url)
        self._idle: list[ApiConnection] = []
        self._open: set[ApiConnection] = set()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        content_type: str = "application/json",
        timeout: float = REQUEST_TIMEOUT,
        most: int = OBJECT,
    ) -> Exchange:
        """Send a request and return its complete exchange, with a body of at most `most` bytes. `path` starts with a
        slash and includes the query. Raises StatusError for any status except 2xx. Raises another SourceError for a
        missing or incomplete answer, after which it is unknown whether the request had an effect."""
        watch = self._stopwatch(method, len(body))
        try:
            headers = await self.cluster.credentials.headers()
            request = self._encode(method, path, headers, body, content_type)
            exchange = await self._exchange(request, watch, timeout=timeout, repeatable=method == "GET", most=most)
        finally:
            watch.stop()
        self._raise_for_status(exchange, headers)
        return exchange

    async def stream(
        self,
        path: str,
        sink: BytesSink,
        *,
        on_open: Callable[[], None],
        header_timeout: float = REQUEST_TIMEOUT,
        idle_timeout: float,
    ) -> None:
        """GET `path` and pass the body to `sink` as it arrives; return when the server ends the answer. `on_open` is
        called when the server has accepted the request. Raises the errors of `request` and of `sink`."""
        watch = self._stopwatch("GET", 0)

        def accepted(exchange: Exchange) -> None:
            watch.accepted(exchange)
            watch.stop()
            if exchange.streaming:
                exchange.idle_timeout = idle_timeout
                on_open()

        try:
            headers = await self.cluster.credentials.headers()
            request = self._encode("GET", path, headers, b"", "")
            exchange = await self._exchange(
                request, watch, timeout=header_timeout, repeatable=True, sink=sink, on_headers=accepted
            )
        finally:
            watch.stop()
        self._raise_for_status(exchange, headers)

    async def close(self) -> None:
        """Close all connections; running requests end with ConnectionFailed."""
        lost = [connection.lost for connection in self._open]
        for connection in list(self._open):
            connection.abort()
        if lost:
            await asyncio.wait(lost, timeout=1.0)

    def _stopwatch(self, method: str, sent: int) -> _Stopwatch:
        return _Stopwatch(self._on_request, method, self.cluster.server.authority, sent)

    async def _exchange(
        self,
        request: bytes,
        watch: _Stopwatch,
        *,
        timeout: float,
        repeatable: bool,
        most: int = OBJECT,
        sink: BytesSink | None = None,
        on_headers: Callable[[Exchange], None] | None = None,
    ) -> Exchange:
        """Send `request` on an idle connection, else on a new connection. If no byte of the answer arrives, a
        `repeatable` request is sent again, because the server may have closed the idle connection."""
        while True:
            connection, kept = await self._connect()
            exchange = Exchange(idle_timeout=timeout, most=most, sink=sink, on_headers=on_headers or watch.accepted)
            try:
                connection.start(exchange, request)
                await exchange.done
            except BaseException as error:
                connection.abort()
                if isinstance(error, ConnectionFailed) and kept and repeatable and not connection.received_any:
                    continue
                # Break the reference cycle of exchange, error and frame, because an incomplete answer may contain
                # megabytes.
                del exchange
                raise
            self._keep(connection)
            return exchange

    async def _connect(self) -> tuple[ApiConnection, bool]:
        context = await self.cluster.tls_context()
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            fresh = loop.time() - connection.last_received < _IDLE_LIFETIME
            if fresh and connection.context is context and connection.reusable:
                return connection, True
            connection.abort()
        route = self._route
        try:
            async with asyncio.timeout(self._connect_timeout):
                connection = await self._dial(context)
        except TimeoutError as error:
            host = self.cluster.proxy.host if self.cluster.proxy else self.cluster.server.host
            why = "the name cannot be resolved: no answer" if is_looked_up(host) else "no connection"
            raise ConnectionFailed(f"{route}: {why} in {self._connect_timeout:.0f} s") from error
        except UnicodeError as error:  # the name has an empty part
            raise ConnectionFailed(f"{route}: the name cannot be resolved: it is no host name") from error
        except OSError as error:
            raise ConnectionFailed(f"{route}: {connection_reason(error, self.cluster)}") from error
        self._open.add(connection)
        connection.context = context
        return connection, False

    async def _dial(self, context: ssl.SSLContext | None) -> ApiConnection:
        proxy, server = self.cluster.proxy, self.cluster.server

        def make() -> ApiConnection:
            return ApiConnection(server.authority, self._lost)

        host, port = (proxy.host, proxy.port) if proxy else (server.host, server.port)
        is_address = ":" in host or host.replace(".", "").isdigit()
        happy = None if is_address else _HAPPY_EYEBALLS_DELAY
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.places.take(frozenset((str(address[0]), port) for *_, address in found))
        if proxy is not None and context is not None:
            return await open_tunnel(proxy, self.cluster, context, make, self._user_agent, happy)
        _, connection = await asyncio.get_running_loop().create_connection(
            make, host, port, ssl=context, server_hostname=self.cluster.server_hostname, happy_eyeballs_delay=happy
        )
        return connection

    def _keep(self, connection: ApiConnection) -> None:
        if connection.reusable and len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    def _lost(self, connection: ApiConnection) -> None:
        self._open.discard(connection)
        self._idle = [kept for kept in self._idle if kept is not connection]

    def _encode(self, method: str, path: str, headers: Headers, body: bytes, content_type: str) -> bytes:
        server, proxy = self.cluster.server, self.cluster.proxy
        forwarded = proxy is not None and server.scheme == "http"  # without a tunnel, requests contain the full URL
        lines = [
            f"{method} {server.url if forwarded else server.prefix}{path} HTTP/1.1",
            f"Host: {server.authority}",
            f"User-Agent: {self._user_agent}",
            f"Accept: {_ACCEPT}",
            *(f"{name}: {value}" for name, value in headers),
            *(proxy.headers() if proxy is not None and forwarded else ()),
        ]
        if body or method not in {"GET", "DELETE"}:
            lines += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
        if any("\r" in line or "\n" in line for line in lines) or " " in path:
            raise ValueError(f"{method} {path!r}: a path or header has characters that HTTP forbids")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def _raise_for_status(self, exchange: Exchange, used: Headers) -> None:
        if 200 <= exchange.status < 300:
            return
        if exchange.status == 401:
            self.cluster.credentials.invalidate(used)
        status = decode_status(exchange.body, exchange.status)
        raise StatusError(status, retry_after=_seconds(exchange.headers.get("retry-after")))


class _Stopwatch:
    """Measures one request and reports the result once."""

    def __init__(self, report: OnRequest | None, method: str, host: str, sent: int) -> None:
        self._report = report
        self._start = time.monotonic()
        self._finished = Finished(method, host, "<error>", 0.0, sent, None)  # the same code as in client-go's metrics

    def accepted(self, exchange: Exchange) -> None:
        """Store the answer's status and length."""
        length = exchange.headers.get("content-length", "")
        received = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
        self._finished = self._finished._replace(code=str(exchange.status), received=received)

    def stop(self) -> None:
        """Report the request. A second call has no effect."""
        report, self._report = self._report, None
        if report is not None:
            report(self._finished._replace(seconds=time.monotonic() - self._start))


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 9 else None
