"""Requests, responses and routes of the HTTP servers. A page is a function that takes a Request and returns a Response.
server.py listens, connection.py parses and sends; other packages contain the pages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NamedTuple

from kubeproxy.model.addresses import is_loopback, pack
from kubeproxy.server.text import clean, printable

Headers = tuple[tuple[str, str], ...]
TEXT: Final[Headers] = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
JSON: Final[Headers] = (("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff"))


class Request(NamedTuple):
    """A request: the method, and the path and the query as sent (percent-encoded). `accept`, `accept_encoding`, `host`,
    `origin` and `site` (Sec-Fetch-Site) are headers; '' for a missing header. `neighbour` is the User-Agent header of a
    client on this node; '' for other clients. `peer` is the client's address, and `local` the server's address; '' on a
    unix socket."""

    method: str
    path: str
    query: str
    accept: str = ""
    accept_encoding: str = ""
    body: bytes = b""
    neighbour: str = ""
    peer: str = ""
    local: str = ""
    host: str = ""
    origin: str = ""
    site: str = ""

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """The names and values of the query, in order."""
        from urllib.parse import parse_qsl  # noqa: PLC0415 - only for requests with a query

        return parse_qsl(self.query, keep_blank_values=True)


Pieces = AsyncGenerator[bytes, None]


class Response(NamedTuple):
    """A response; for HEAD its body is not sent. If the body is a generator, its pieces are sent as fast as the client
    reads, and the event loop runs between pieces. The generator is closed when the client disconnects. admission.py
    does not count a response that `lasts` until the client disconnects; the page must limit the number of such
    responses."""

    status: int
    headers: Headers
    body: bytes | Pieces
    lasts: Literal["until sent", "until the client goes"] = "until sent"


def refused(status: int, text: str) -> Response:
    """Return the response to a refused request; `text`, which may quote the client or an object, is sanitised."""
    return Response(status, TEXT, f"{printable(clean(text))}\n".encode())


Handler = Callable[[Request], Response]
"""A function that answers a request of any method. The function must be fast, because it runs on the event loop. After
an exception the client gets status 500."""

READ: Final = frozenset(("GET", "HEAD"))


def routes(table: Mapping[str, Handler], any_method: AbstractSet[str] = frozenset()) -> Handler:
    """Return a handler that selects a page by its exact path, and answers 404 for unknown paths. Methods other than GET
    and HEAD get 405, except on the paths in `any_method`."""

    def choose(request: Request) -> Response:
        handler = table.get(request.path)
        if handler is not None and request.path in any_method:
            return handler(request)
        return read_only(handler)(request) if handler else Response(404, TEXT, b"404 page not found\n")

    return choose


def read_only(handler: Handler) -> Handler:
    """Return a handler that answers 405 to all methods except GET and HEAD."""

    def checked(request: Request) -> Response:
        if request.method in READ:
            return handler(request)
        return Response(405, (*TEXT, ("Allow", "GET, HEAD")), b"method not allowed\n")

    return checked


def refused_host(host: str, local_address: str, known: Collection[str] = ()) -> str | None:
    """Return the reason to refuse a request because of its Host header; None if it may be answered. The check protects
    against DNS rebinding.

    `host` is '' without the header, for example in requests of load balancers; `local_address` is the server's address
    of the connection; `known` are names in lower case that the operator configured. If evil.example resolves to
    127.0.0.1, its page in a browser on this node could read the answers, but its requests have the host evil.example.
    On loopback the Host must therefore be an address, localhost or a known name. On other addresses every name is
    accepted, because Prometheus and load balancers may use a name, and an attacker in that network needs no browser."""
    local = pack(local_address)
    if not host or local is None or not is_loopback(local):
        return None
    name = host_name(host)
    candidates = (name.partition("%")[0], host.partition("%")[0])  # the second candidate is for ::1 without brackets
    if name == "localhost" or name in known or any(map(pack, candidates)):
        return None
    return "on this address only a Host header of localhost or an IP address is answered (against DNS rebinding)"


def host_name(host: str) -> str:
    """Return the name in a Host header in lower case. The port, the final dot, and the brackets of an IPv6 address are
    removed."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() else host).rstrip(".").lower()
