"""What a page of ours is: a function from a request to a response; and how paths choose one.

Nothing here opens a socket: server.py listens, connection.py speaks HTTP, and pages are all over this room.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Literal, NamedTuple

from kubeproxy.server.text import clean, printable

Headers = tuple[tuple[str, str], ...]
TEXT: Final[Headers] = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
JSON: Final[Headers] = (("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff"))


class Request(NamedTuple):
    """What a handler gets: the method, and path and query as sent, still percent-encoded.

    `accept`, `accept_encoding`, `host`, `origin` and `site` (Sec-Fetch-Site) are headers, '' when there is none;
    `neighbour` is the header User-Agent of a client on this node, '' of any other. `peer` is the client's address and
    `local` the one that it asked, '' on a unix socket.
    """

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
        """Return what the query gives, in its order."""
        from urllib.parse import parse_qsl  # noqa: PLC0415 - a proxy that nobody asks does without

        return parse_qsl(self.query, keep_blank_values=True)


Pieces = AsyncGenerator[bytes, None]


class Response(NamedTuple):
    """What a handler returns; the body is left out for HEAD.

    A body that is a generator is sent piece by piece, as fast as the client reads; the event loop runs in between. It
    is closed when the client goes away. One that lasts until then has no place among the connections that come and go
    (admission.py): whoever makes it bounds how many there are.
    """

    status: int
    headers: Headers
    body: bytes | Pieces
    lasts: Literal["until sent", "until the client goes"] = "until sent"


def refused(status: int, text: str) -> Response:
    """Return an answer that says why there is none; the text may hold what the client, or an object, gave."""
    return Response(status, TEXT, f"{printable(clean(text))}\n".encode())


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
