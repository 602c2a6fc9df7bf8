"""The routes below /ui/: the page, and the answers to its requests; access.py has the access rules.

Short answers are written at once, the list of Services a hundred at a time, with the event loop running in between.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from kubeproxy.ask.desk import Desk
from kubeproxy.ask.facts import Objects
from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.why import fields
from kubeproxy.ask.zones import Zones
from kubeproxy.config.options import PageAccess
from kubeproxy.engine.turns import in_turns
from kubeproxy.errors import QuestionError
from kubeproxy.features import CONNECTION_COUNTERS
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, pack, place_text, unpack
from kubeproxy.model.plan import Globals, ServiceName
from kubeproxy.page import ROOT
from kubeproxy.page.access import Content, refusal
from kubeproxy.page.asking import UnansweredError
from kubeproxy.page.document import SAFE, Document
from kubeproxy.page.feed import MOST_PAGES, Feed
from kubeproxy.page.rows import Row
from kubeproxy.report.pages import GZIP, takes_gzip
from kubeproxy.server.http import JSON, TEXT, Handler, Headers, Request, Response, refused

_RUN: Final = 100
"""Services that are written before the event loop runs again."""
_EVENTS: Final[Headers] = (("Content-Type", "text/event-stream"), ("X-Content-Type-Options", "nosniff"))


Ask = Callable[[Mapping[str, str]], Awaitable[bytes]]
"""Answers as `kube-proxy why -o json` does. Raises UnansweredError."""


def page_pages(
    access: PageAccess, desk: Desk, feed: Feed, row: Callable[[ServiceName], Row | None], ask: Ask
) -> dict[str, Handler]:
    """Return the routes of the page, none if no client has access; `ask` answers questions in another process."""
    if not access.networks:
        return {}
    document = Document()
    answers = {
        "facts": lambda _: _json(facts(desk)),
        "services": lambda request: _services(request, desk, feed, row),
        "service": lambda request: _service(request, desk),
        "why": lambda request: _why(request, desk, ask),
        "events": lambda request: _events(request, feed),
        "look": lambda request: _look(request, feed),
        "find": lambda request: _find(request, desk),
    }

    def moved(_: Request) -> Response:
        # A relative path, for HTTP proxies that serve the page below a path of their own.
        return Response(301, (*TEXT, ("Location", "ui/")), b"see ui/\n")

    pages: dict[str, Handler] = {ROOT[:-1]: moved, ROOT: document.handle}
    guarded = {path: _guarded(access, Content.PAGE, handler) for path, handler in pages.items()}
    return guarded | {
        f"{ROOT}api/{name}": _guarded(access, Content.STATE, handler) for name, handler in answers.items()
    }


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
            family.label: _nodeport_addresses(found.world, family) for family in found.world.families
        },
    }


def _nodeport_addresses(world: Globals, family: Family) -> list[str]:
    """Return the addresses on which NodePorts answer; if that is every address, the node's own ones."""
    ours = world.of(family)
    if ours is None:
        return []
    return [unpack(address) for address in (ours.node_ips if ours.nodeport_ips is None else ours.nodeport_ips)]


def _guarded(access: PageAccess, content: Content, handler: Handler) -> Handler:
    def checked(request: Request) -> Response:
        why = refusal(access, request, content)
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
        return refused(404, str(error))
    found, places = list(desk.objects([service])), desk.places
    assert places is not None  # noqa: S101 - a running proxy has them

    def answer(zones: Zones) -> bytes:
        return msgspec.json.encode(made | {"endpoints": list(_endpoints(found, zones))})

    async def later() -> AsyncGenerator[bytes, None]:
        yield answer(await places.zones(service))

    # An answer in pieces ends its connection, and a page sends several requests a second while endpoints change.
    zones = places.held(service) if _has_endpoints(found) else {}
    return Response(200, JSON, later() if zones is None else answer(zones))


def _has_endpoints(found: Iterable[Objects]) -> bool:
    return any(piece.endpoints for held in found for piece in held.slices.values())


def _endpoints(found: Iterable[Objects], zones: Zones) -> Iterator[dict[str, Any]]:
    """Yield every endpoint of a Service's slices, by address and port, with the conditions that decide about its use.

    An endpoint of a slice without ports (no container has the named targetPort) has an address only.
    """
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
                        "zone": (piece.zones or zones).get(endpoint.address, ""),
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
        made = desk.why(**question)
    except QuestionError as error:
        return refused(400, str(error))

    async def body() -> AsyncGenerator[bytes, None]:
        try:
            yield await ask(question)
        except UnansweredError as error:
            why = (await desk.zoned(made)).why
            unseen = Diagnosis(Severity.UNKNOWN, "node", f"what else decides on this node is not known: {error}")
            answer = {"heading": why.heading, "answer": "unknown" if why.passes else "no", "why": fields(why)}
            more = {"findings": [unseen.row()], "fixes": why.fixes, "next": why.next}
            yield msgspec.json.encode(answer | more)

    return Response(200, JSON, body())


def _events(request: Request, feed: Feed) -> Response:
    if feed.is_full:
        return refused(503, f"{MOST_PAGES} pages are open already: close one of them")
    if request.method == "HEAD":
        return Response(200, _EVENTS, b"")
    return Response(200, _EVENTS, feed.stream(), lasts="until the client goes")


def _look(request: Request, feed: Feed) -> Response:
    """Request a check for problems; open pages get the findings as an event."""
    if request.method == "HEAD":
        return _json({})
    after = feed.look_again()
    return refused(409, "no page is open that would be told of it") if after is None else _json({"after": after})


def _find(request: Request, desk: Desk) -> Response:
    """Answer with the Services that have an address, of a frontend or an endpoint: rows do not contain endpoints."""
    given = dict(request.parameters).get("address", "")
    address = pack(given)
    if address is None:
        return refused(400, f"address: expected an IPv4 or IPv6 address, got {given!r}")

    async def body() -> AsyncGenerator[bytes, None]:
        looked = ((name, desk.has_address(name, address)) for name in desk.names)
        found = ["/".join(name) async for name, has in in_turns(looked) if has]
        yield msgspec.json.encode({"services": found})

    return Response(200, JSON, body())


def _services(request: Request, desk: Desk, feed: Feed, row: Callable[[ServiceName], Row | None]) -> Response:
    pieces = _listed(desk.names, feed.news.revision, row)
    if not takes_gzip(request.accept_encoding):
        return Response(200, JSON, pieces)
    return Response(200, (*JSON, ("Content-Encoding", "gzip")), _zipped(pieces))


async def _listed(
    names: list[ServiceName], revision: int, row: Callable[[ServiceName], Row | None]
) -> AsyncGenerator[bytes, None]:
    yield b'{"revision":%d,"services":[' % revision
    first = True
    for start in range(0, len(names), _RUN):
        rows = _encoded(filter(None, map(row, names[start : start + _RUN])))
        if rows:
            yield rows if first else b"," + rows
            first = False
        await asyncio.sleep(0)
    yield b"]}\n"


def _encoded(rows: Iterable[Row]) -> bytes:
    """Return rows as items of a JSON list, without its brackets."""
    return msgspec.json.encode(list(rows))[1:-1]


async def _zipped(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    packer = zlib.compressobj(1, wbits=GZIP)
    async for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()
