"""A running ApiServer of the lab, and a client for it, for the tests in tests/lab."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp

from lab.apiserver.server import ApiServer, Listener, ServerConfig, loopback

Json = dict[str, Any]


class Client:
    def __init__(self, server: ApiServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session
        host, port = server.addresses[0]
        self.url = f"http://{host}:{port}"

    async def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request; return the status, and the decoded JSON or text."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | (headers or {}) if data is not None else headers
        async with self.session.request(method, self.url + path, data=data, headers=headers) as r:
            text = await r.read()
            is_json = r.headers.get("Content-Type", "").startswith("application/json")
            return r.status, json.loads(text) if is_json else text.decode()

    async def patch(self, path: str, body: object, kind: str = "strategic-merge-patch") -> tuple[int, Any]:
        return await self.call("PATCH", path, body, {"Content-Type": f"application/{kind}+json"})

    @contextlib.asynccontextmanager
    async def watch(self, path: str) -> AsyncIterator[Callable[[], Awaitable[Json | None]]]:
        """Yields a function that waits for the next event (None at the end of the stream)."""
        async with self.session.get(self.url + path) as r:
            assert r.status == 200

            async def following() -> Json | None:
                line = await asyncio.wait_for(r.content.readline(), 5)
                return json.loads(line) if line else None

            yield following


def with_server(test: Callable[[Client], Awaitable[None]], config: ServerConfig | None = None) -> None:
    """Run an async test against a server on loopback."""

    async def main() -> None:
        server = ApiServer(config)
        await server.start(Listener(loopback))
        try:
            connector = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(connector=connector) as session:
                await test(Client(server, session))
        finally:
            await server.close()

    asyncio.run(main())
