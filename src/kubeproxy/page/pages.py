"""The page: its routes below /ui/, the answers to its requests, and the access rules. The list of Services is written
in steps of a hundred, between which the event loop runs."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from kubeproxy.ask.desk import Desk
from kubeproxy.ask.facts import Objects
from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.source import knowing
from kubeproxy.config.options import PageAccess
from kubeproxy.engine.pacing import in_turns
from kubeproxy.errors import NoAnswerError, QuestionError
from kubeproxy.features import CONNECTION_COUNTERS
from kubeproxy.model.addresses import PROTOCOL_NAMES, is_loopback, pack, place_text, unpack, within
from kubeproxy.model.plan import ServiceName
from kubeproxy.model.world import nodeport_addresses
from kubeproxy.page import ROOT
from kubeproxy.page.beside import Flows, FormQuestions, Problems, Tell, UnansweredError
from kubeproxy.page.feed import MOST_PAGES, Feed
from kubeproxy.page.news import News
from kubeproxy.report.journal import Journal
from kubeproxy.report.metrics import GZIP, takes_gzip
from kubeproxy.server.http import JSON, TEXT, Handler, Headers, Request, Response, host_name, refused

_RUN: Final = 100  # Services to write before the event loop runs
_EVENTS: Final[Headers] = (("Content-Type", "text/event-stream"), ("X-Content-Type-Options", "nosniff"))


Ask = Callable[[Mapping[str, str]], Awaitable[bytes]]
"""A function that returns the answer of `kube-proxy why -o json`. Raises UnansweredError."""


def page_pages(access: PageAccess, desk: Desk, feed: Feed, ask: Ask) -> dict[str, Handler]:
    """Return the routes of the page; none if no client has access. `ask` answers questions in another process."""
    if not access.networks:
        return {}
    answers = {
        "facts": lambda _: _json(facts(desk)),
        "services": lambda request: _services(request, desk, feed),
        "service": lambda request: _service(request, desk),
        "why": lambda request: _why(request, desk, ask),
        "events": lambda _: _events(feed),
        "look": lambda request: _look(request, feed),
        "find": lambda request: _find(request, desk),
        "journal": lambda _: _json({"changes": (kept := feed.news.journal).past().entries, "seconds": [*kept.seconds]}),
    }

    def moved(_: Request) -> Response:
        # The path is relative, because an HTTP proxy may serve the page below another path.
        return Response(301, (*TEXT, ("Location", "ui/")), b"see ui/\n")

    pages: dict[str, Handler] = {ROOT[:-1]: moved, ROOT: _document}
    guarded = {path: _guarded(access, handler, is_state=False) for path, handler in pages.items()}
    return guarded | {f"{ROOT}api/{name}": _guarded(access, each, is_state=True) for name, each in answers.items()}


def facts(desk: Desk) -> dict[str, Any]:
    """Return the state of the whole proxy in the format of the page."""
    found = desk.facts()
    return {
        "node": found.world.node_name,
        "version": found.version,
        "mode": found.mode,
        "pid": found.pid,
        "started": found.started,
        "services": found.services,
        "endpointSlices": found.endpoint_slices,
        "ready": not found.unready,
        "unready": found.unready,
        "connectionCounters": CONNECTION_COUNTERS.value(found.world),
        "nodePortAddresses": {
            family.label: list(map(unpack, nodeport_addresses(found.world, family))) for family in found.world.families
        },
    }


def _guarded(access: PageAccess, handler: Handler, *, is_state: bool) -> Handler:
    def checked(request: Request) -> Response:
        why = refusal(access, request, is_state=is_state)
        response = handler(request) if why is None else refused(403, why)
        return response._replace(headers=(*response.headers, *SAFE))

    return checked


def _json(value: Any) -> Response:
    return Response(200, JSON, msgspec.json.encode(value))


def _service(request: Request, desk: Desk) -> Response:
    namespace, _, name = dict(request.parameters).get("name", "").rpartition("/")
    service = (namespace or "default", name)
    try:
        made = desk.service(service)
    except QuestionError as error:
        try:
            knowing(desk)
        except NoAnswerError as early:
            return refused(503, f"nothing is listed yet: {early}")
        return refused(404, str(error))
    return _json(made | {"endpoints": list(_endpoints(desk.objects([service])))})


def _endpoints(found: Iterable[Objects]) -> Iterator[dict[str, Any]]:
    """Yield every endpoint in a Service's slices, sorted by address and port, with its conditions. A slice has no ports
    if no container has the named targetPort; its endpoints then have only an address."""
    for held in found:
        for name, piece in held.slices.items():
            for endpoint in piece.endpoints:
                for port in piece.ports or (None,):
                    yield {
                        "address": place_text(endpoint.address, port.port)
                        if port is not None
                        else unpack(endpoint.address),
                        "port": port and port.name,
                        "protocol": port and PROTOCOL_NAMES[port.protocol],
                        "slice": name,
                        "node": endpoint.node,
                        "zone": endpoint.zone,
                        "ready": endpoint.ready,
                        "serving": endpoint.serving,
                        "terminating": endpoint.terminating,
                        "forZones": endpoint.zones,
                        "forNodes": endpoint.nodes,
                    }


def _why(request: Request, desk: Desk, ask: Ask) -> Response:
    given = dict(request.parameters)
    question = {"source": given.get("from", ""), "target": given.get("to", ""), "interface": given.get("interface", "")}
    try:
        knowing(desk)
        made = desk.why(**question)
    except NoAnswerError as error:
        return refused(503, str(error))
    except QuestionError as error:
        return refused(400, str(error))

    async def body() -> AsyncGenerator[bytes, None]:
        try:
            yield await ask(question)
        except UnansweredError as error:
            why = (await desk.placed(made)).why
            unseen = Diagnosis(Severity.UNKNOWN, "node", f"could not be checked: {_UNCHECKED}: {error}")
            heading = why.heading + ", but nothing else on this node could be checked (?)" * why.passes
            answer = {"heading": heading, "answer": "unknown" if why.passes else "no", "why": why}
            more = {"findings": [unseen.row()], "fixes": why.fixes, "next": why.next}
            yield msgspec.json.encode(answer | more)

    return Response(200, JSON, body())


_UNCHECKED: Final = "the rules in the kernel, other programs, routes and endpoints"


def _events(feed: Feed) -> Response:
    if feed.is_full:
        return refused(503, f"{MOST_PAGES} pages are already open: close a page")
    return Response(200, _EVENTS, feed.stream(), lasts="until the client goes")


def _look(request: Request, feed: Feed) -> Response:
    if request.method == "HEAD":
        return _json({})
    after = feed.look_again()
    return refused(409, "no page is open to receive the event") if after is None else _json({"after": after})


def _find(request: Request, desk: Desk) -> Response:
    given = dict(request.parameters).get("address", "")
    address = pack(given)
    if address is None:
        return refused(400, f"address: expected an IPv4 or IPv6 address, got {given!r}")

    async def body() -> AsyncGenerator[bytes, None]:
        looked = ((name, desk.has_address(name, address)) for name in desk.snapshot.names)
        found = ["/".join(name) async for name, has in in_turns(looked) if has]
        yield msgspec.json.encode({"services": found})

    return Response(200, JSON, body())


def _services(request: Request, desk: Desk, feed: Feed) -> Response:
    pieces = _listed(desk.snapshot.names, feed.news)
    if not takes_gzip(request.accept_encoding):
        return Response(200, JSON, pieces)
    return Response(200, (*JSON, ("Content-Encoding", "gzip")), _zipped(pieces))


async def _listed(names: list[ServiceName], news: News) -> AsyncGenerator[bytes, None]:
    yield b'{"revision":%d,"services":[' % news.revision
    first = True
    for start in range(0, len(names), _RUN):
        rows = msgspec.json.encode(list(filter(None, map(news.row, names[start : start + _RUN]))))[1:-1]  # no brackets
        if rows:
            yield rows if first else b"," + rows
            first = False
        await asyncio.sleep(0)
    yield b"]}\n"


async def _zipped(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    packer = zlib.compressobj(1, wbits=GZIP)
    async for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


SAFE: Final[Headers] = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
)
"""The headers of every answer below /ui."""
_HTML: Final[Headers] = (("Content-Type", "text/html; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
_PART: Final = rb"^\{\{([\w.]+)\}\}\n"
_INLINE: Final = rb"<%b(?:\s[^>]*)?>(.*?)</%b\s*>"


def _document(_: Request) -> Response:
    try:
        return _page()
    except OSError as error:
        reason = f"a file of page/site cannot be read ({error.strerror}): install kube-proxy anew\n"
        return Response(404, TEXT, reason.encode())


@cache
def _page() -> Response:
    return page(joined())


def joined() -> bytes:
    """Return site/page.html, in which the file NAME of the same folder replaces each line {{NAME}}. Raises OSError."""
    from importlib import resources  # noqa: PLC0415 - not loaded by a proxy without an open page

    site = resources.files(__package__).joinpath("site")
    html = site.joinpath("page.html").read_bytes()
    return re.sub(_PART, lambda found: site.joinpath(found[1].decode()).read_bytes(), html, flags=re.MULTILINE)


def page(html: bytes) -> Response:
    """Return the response with a page. The hashes in its Content-Security-Policy allow only the page's own scripts and
    styles."""
    policy = (
        "default-src 'none'",
        " ".join(["script-src", *(_hashes(html, b"script") or ["'none'"])]),
        " ".join(["style-src", *(_hashes(html, b"style") or ["'none'"])]),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return Response(200, (*_HTML, ("Content-Security-Policy", "; ".join(policy))), html)


def _hashes(html: bytes, element: bytes) -> list[str]:
    from base64 import b64encode  # noqa: PLC0415 - as above
    from hashlib import sha256  # noqa: PLC0415

    found = re.finditer(_INLINE % (element, element), html, re.DOTALL | re.IGNORECASE)
    # A browser replaces CRLF by LF before it computes the hash.
    texts = [one[1].replace(b"\r\n", b"\n").replace(b"\r", b"\n") for one in found]
    return list(dict.fromkeys(f"'sha256-{b64encode(sha256(text).digest()).decode()}'" for text in texts))


_OWN_SITE: Final = frozenset(("", "same-origin", "none"))
"""The accepted values of Sec-Fetch-Site: missing (not a browser), the page itself, an address that a user typed."""


def refusal(access: PageAccess, request: Request, *, is_state: bool) -> str | None:
    """Return the reason to refuse a request, or None. The decision depends on the client's address, the Host header,
    and, for requests of the node's state, the requesting site in a browser's headers. The page itself contains no data
    of this node, and links from other sites may open it.

    A browser also sends the requests of other sites' pages. Sec-Fetch-Site and Origin name the requesting site. If
    another site's name resolves to this proxy's address (DNS rebinding), Host contains this name."""
    peer = _address(request.peer)
    if peer is None or not within(peer, access.networks):
        return (
            f"the page is not available to clients at {request.peer}: connect over loopback, as with kubectl "
            f"port-forward or ssh -L, or add the client's network to --page-from"
        )
    name = host_name(request.host)
    if not _is_known(name, request.local, access):
        return (
            f"the page does not answer to the host name {name!r} (against DNS rebinding): use localhost, or add the "
            "name to --page-hosts"
        )
    if is_state:
        if request.origin and request.origin.lower().partition("://")[2] != request.host.lower():
            return f"only the page of this proxy may send this request, not pages of {request.origin}"
        if request.site not in _OWN_SITE:
            return "only the page of this proxy may send this request, not pages of another site"
    return None


def _is_known(name: str, local: str, access: PageAccess) -> bool:
    """Return whether a Host's name is localhost, a loopback address, the connection's local address, or a name in
    --page-hosts."""
    if name == "localhost" or name in access.hosts:
        return True
    address = _address(name)
    if address is None:
        return False
    return is_loopback(address) or address == _address(local) or unpack(address) in access.hosts


def _address(text: str) -> bytes | None:
    return pack(text.partition("%")[0])


class Whole:
    """The page of one proxy with its feed."""

    def __init__(self, desk: Desk, journal: Journal) -> None:
        snapshot, options = desk.snapshot, desk.snapshot.options
        news, planner, socket = News(snapshot, journal), snapshot.planner, options.control_socket

        def looks(tell: Tell) -> tuple[Flows, Problems]:
            return Flows(snapshot.mode.name, planner, tell), Problems(planner, socket, tell)

        self._feed = Feed(news, lambda: facts(desk), lambda pages: setattr(journal, "audience", pages), looks)
        self.handlers: Mapping[str, Handler] = page_pages(options.page, desk, self._feed, FormQuestions(socket).why)

    async def close(self) -> None:
        """End the tasks for pages, and wait for their end."""
        await self._feed.close()
