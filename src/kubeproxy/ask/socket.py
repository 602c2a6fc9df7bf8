"""The routes of the control socket, which pass questions to the Desk of a running proxy. Long answers are written a few
Services at a time, and the event loop runs in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kubeproxy.ask.why import Explained
from kubeproxy.control.listener import framed
from kubeproxy.errors import QuestionError
from kubeproxy.model.plan import ServiceName
from kubeproxy.server.http import TEXT, Handler, Request, Response

if TYPE_CHECKING:
    from kubeproxy.ask.desk import Desk

_PACKED = (("Content-Type", "application/msgpack"),)
_RUN = 100  # Services (1 ms of work) before the event loop runs


def socket_pages(desk: Desk) -> dict[str, Handler]:
    """Return the routes of the socket."""

    def answered(make: Callable[[Mapping[str, str]], object]) -> Handler:
        def handle(request: Request) -> Response:
            try:
                made = make(dict(request.parameters))
            except QuestionError as error:
                return Response(404, TEXT, str(error).encode())
            if isinstance(made, Explained):
                return Response(200, _PACKED, _placed(desk, made))
            return Response(200, _PACKED, msgspec.msgpack.encode(made))

        return handle

    def services(request: Request) -> Response:
        names = [_name(value) for key, value in request.parameters if key == "name"]
        return Response(200, _PACKED, _streamed(desk.services, names or desk.snapshot.names))

    def names(request: Request) -> Response:
        # Completion must be fast, and lines of text need no decoder for msgpack.
        found = desk.beginning(dict(request.parameters).get("prefix", ""))
        return Response(200, TEXT, "".join(f"{name}\n" for name in found).encode())

    return {
        "/facts": answered(lambda _: desk.facts()),
        "/node-ports": answered(lambda _: desk.has_node_ports()),
        "/listeners": answered(lambda _: desk.listeners()),
        "/why": answered(lambda given: desk.why(**{"source": "", "target": "", **given})),
        "/services": services,
        "/objects": lambda _: Response(200, _PACKED, _streamed(desk.objects, desk.watched)),
        "/changes": answered(lambda given: desk.changes(int(given.get("after", "0")), float(given.get("since", "0")))),
        "/service": answered(lambda given: desk.service(_name(given.get("name", "")))),
        "/names": names,
    }


def _name(text: str) -> ServiceName:
    namespace, _, name = text.partition("/")
    return (namespace, name)


async def _placed(desk: Desk, made: Explained) -> AsyncGenerator[bytes, None]:
    yield msgspec.msgpack.encode(await desk.placed(made))


async def _streamed(
    answers: Callable[[Sequence[ServiceName]], Iterable[object]], names: Sequence[ServiceName]
) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(names), _RUN):
        yield framed(map(msgspec.msgpack.encode, answers(names[start : start + _RUN])))
        await asyncio.sleep(0)
