"""What a running proxy serves at its socket. The commands put it into words, and look at the kernel themselves.

Short answers are made at once. Long ones go a few Services at a time, with the event loop running in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import msgspec

from kubeproxy.ask.desk import Desk
from kubeproxy.ask.zones import Places, with_zones
from kubeproxy.control.wire import stream
from kubeproxy.errors import QuestionError
from kubeproxy.model.plan import ServiceName
from kubeproxy.observe.http import TEXT, Handler, Request, Response

_PACKED = (("Content-Type", "application/msgpack"),)
_RUN = 100
"""Services written before the loop has its turn: about a millisecond."""


def control_pages(desk: Desk, places: Places) -> dict[str, Handler]:
    """Return the routes of the socket."""

    def why(request: Request) -> Response:
        given = dict(request.parameters)
        try:
            made = desk.why(given.get("source", ""), given.get("target", ""), given.get("interface", ""))
        except QuestionError as error:
            return Response(400, TEXT, str(error).encode())

        async def body() -> AsyncGenerator[bytes, None]:
            yield msgspec.msgpack.encode(msgspec.structs.replace(made, why=await with_zones(made.why, places)))

        return Response(200, _PACKED, body())

    def services(request: Request) -> Response:
        # Those whose names are given, as NAMESPACE/NAME; all when none is.
        given = [value.partition("/") for key, value in request.parameters if key == "name"]
        return Response(
            200, _PACKED, _streamed(desk.services, [(space, name) for space, _, name in given] or desk.names)
        )

    def service(request: Request) -> Response:
        namespace, _, name = dict(request.parameters).get("name", "").partition("/")
        try:
            return Response(200, _PACKED, msgspec.msgpack.encode(desk.service((namespace, name))))
        except QuestionError as error:
            return Response(404, TEXT, str(error).encode())

    def names(request: Request) -> Response:
        prefix = dict(request.parameters).get("prefix", "")
        return Response(200, TEXT, "".join(f"{name}\n" for name in desk.beginning(prefix)).encode())

    return {
        "/facts": lambda _: Response(200, _PACKED, msgspec.msgpack.encode(desk.facts())),
        "/node-ports": lambda _: Response(200, _PACKED, msgspec.msgpack.encode(desk.has_node_ports())),
        "/why": why,
        "/services": services,
        "/objects": lambda _: Response(200, _PACKED, _streamed(desk.objects, desk.watched)),
        "/service": service,
        "/names": names,
    }


Answers = Callable[[Sequence[ServiceName]], Iterable[object]]


async def _streamed(answers: Answers, names: Sequence[ServiceName]) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(names), _RUN):
        yield stream(answers(names[start : start + _RUN]))
        await asyncio.sleep(0)
