"""Scripts of lists and watches for the scripted server, and a function that runs a reflector against them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from kubeproxy.api.recovery import WatchListSupport
from kubeproxy.api.source import ListPace, WatchTarget, targets
from kubeproxy.api.watch import ApiSource, Reflector
from kubeproxy.model.events import Deleted, Event, Rejected, Replaced, Upserted
from support.scripted import Json, Reply, Request, Script, Server, eventually, kind_at, listed

T = TypeVar("T")

PACE = ListPace(first=0.02, first_connect=0.01, cap=0.1, quiet=0.15, relist=0.01, short_watch=0.02, absent=0.05)
SERVICES, SLICES, NODES, CIDRS = targets("node-a")


class Seen(list[str]):
    """A sink that records its input as words."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.raw: list[Event] = []

    def __call__(self, events: Sequence[Event]) -> None:
        self.batches.append(len(events))
        for found in events:
            self.raw.append(found)
            match found:
                case Replaced(_, objects, kept):
                    words = ["=", *sorted(item.metadata.name for item in objects)]
                    words += [f"kept:{name}" for _, name in sorted(kept or ())]
                    self.append(" ".join(words))
                case Upserted(_, item):
                    self.append(f"+{item.metadata.name}")
                case Deleted(_, _, name):
                    self.append(f"-{name}")
                case Rejected(_, _, name, _, field):
                    self.append(f"!{name} {field}")

    async def until(self, count: int) -> None:
        await eventually(lambda: len(self) >= count)


def watch(
    script: Script,
    use: Callable[[Seen, Server, Reflector], Awaitable[T]],
    *,
    target: WatchTarget = SERVICES,
    plain: bool = True,
    pace: ListPace = PACE,
    credentials: Credentials | None = None,
) -> T:
    """Run a reflector against `script` together with `use(seen, server, reflector)`; return the result of `use`."""

    async def main() -> T:
        async with Server(script) as server:
            cluster = Cluster(parse_server(server.url, "test"), Trust(), credentials or Credentials())
            client = HttpClient(cluster)
            seen = Seen()
            support = WatchListSupport()
            support.supported = not plain
            reflector = Reflector(client, target, seen, support=support, pace=pace)
            async with running(reflector, client):
                return await use(seen, server, reflector)

    return asyncio.run(main())


@contextlib.asynccontextmanager
async def running(source: ApiSource | Reflector, client: HttpClient) -> AsyncIterator[None]:
    """Make a source, or a reflector, follow a server during the body."""
    task = asyncio.create_task(source.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()


def kinds(server: Server) -> list[str]:
    return [request.kind for request in server.requests]


def scripted(*steps: Script) -> Script:
    """Return a script from coroutine functions, one per request; the last one is repeated."""
    left = list(steps)

    async def script(request: Request, reply: Reply) -> None:
        step = left.pop(0) if len(left) > 1 else left[0]
        await step(request, reply)

    return script


def lists(*items: Json, version: str | int = "1") -> Script:
    async def step(request: Request, reply: Reply) -> None:
        await reply.answer(200, listed(*items, version=version, kind=kind_at(request.path)))

    return step


def watches(*lines: Any, then: str = "forever") -> Script:
    async def step(request: Request, reply: Reply) -> None:
        await reply.begin()
        for line in lines:
            await reply.chunk(line)
        if then == "forever":
            await reply.forever()
        elif then == "end":
            await asyncio.sleep(2 * PACE.short_watch)
            await reply.end()
        elif then == "end at once":
            await reply.end()
        else:
            reply.reset()
            await reply.forever()

    return step


def fails(code: int, message: str = "no", **headers: str) -> Script:
    async def step(request: Request, reply: Reply) -> None:
        await reply.status(code, message, headers)

    return step
