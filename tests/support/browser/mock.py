"""A fake proxy: a small HTTP server that serves /ui/ with the contents that a test sets.

It implements the server's side of the page's contract. It sends the contents of `scene`; tests change these contents,
or call send()."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any, Self

from aiohttp import web

from kubeproxy.page.pages import joined
from support.browser.scene import Json, Scene, facts


class MockProxy:
    """An async context manager; a test may change the answers at any time. `seen` are the requested paths."""

    def __init__(self, scene: Scene, pid: int = 812) -> None:
        self.scene = scene
        self.facts = facts(time.time(), pid)
        self.port = 0
        self.details: dict[str, Json] = {}
        self.past: Json = {"changes": [], "seconds": []}
        self.seen: list[str] = []
        self.refuse: Mapping[str, tuple[int, str]] = {}
        self.mute = False
        """Whether the server accepts connections of pages, but sends nothing."""
        self.problems: Json | None = {"at": time.time(), "findings": [], "looking": False}
        self._pages: set[web.StreamResponse] = set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """The URL of the page."""
        return f"http://127.0.0.1:{self.port}/ui/"

    async def start(self) -> None:
        """Listen again on the previous port."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/ui/", self._page),
                web.get("/ui/api/facts", self._facts),
                web.get("/ui/api/services", self._services),
                web.get("/ui/api/service", self._service),
                web.get("/ui/api/why", self._why),
                web.get("/ui/api/events", self._events),
                web.get("/ui/api/look", self._look),
                web.get("/ui/api/find", self._find),
                web.get("/ui/api/journal", self._journal),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """End like a killed process: streams break off, and nothing listens."""
        for page in list(self._pages):
            writer = page._payload_writer
            if writer is not None and writer.transport is not None:
                writer.transport.abort()
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    @property
    def pages(self) -> int:
        """The number of connected pages."""
        return len(self._pages)

    async def send(self, event: str, message: Json) -> None:
        """Send an event to all pages."""
        for page in list(self._pages):
            with contextlib.suppress(ConnectionError, RuntimeError):
                await page.write(_event(event, message))

    async def play(self, changes_a_second: float = 40.0) -> None:
        """Send a busy cluster's feed until cancelled: changes four times a second, connections once."""
        for beat in range(1_000_000):
            at = time.time()
            await self.send("now", self.scene.change(at, self.scene.about(changes_a_second / 4)))
            if beat % 4 == 0:
                await self.send("flows", self.scene.flows(at))
            await asyncio.sleep(0.25)

    # answers

    async def _page(self, request: web.Request) -> web.Response:
        page = page_bytes()
        headers = {"Content-Security-Policy": policy(page), "Cache-Control": "no-store"}
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)

    async def _answer(self, request: web.Request, answer: Any) -> web.Response:
        self.seen.append(request.path_qs)
        if request.path in self.refuse:
            status, text = self.refuse[request.path]
            return web.Response(status=status, text=text)
        return web.json_response(answer)

    async def _facts(self, request: web.Request) -> web.Response:
        return await self._answer(request, self.facts)

    async def _services(self, request: web.Request) -> web.Response:
        return await self._answer(request, self.scene.answer())

    async def _service(self, request: web.Request) -> web.Response:
        name = request.query["name"]
        if name not in self.details and name not in self.scene.rows:
            return web.Response(status=404, text=f"no Service {name} that is watched")
        return await self._answer(request, self.details.get(name) or self.scene.detail(name))

    async def _why(self, request: web.Request) -> web.Response:
        source, target = request.query["from"], request.query["to"]
        if source != "node" and not re.fullmatch(r"[0-9a-f.:]+", source):
            return web.Response(status=400, text=f"SOURCE: expected an address or node, got {source!r}")
        return await self._answer(request, self.scene.why(source, target))

    async def _look(self, request: web.Request) -> web.Response:
        return await self._answer(request, {"after": 0.0})

    async def _journal(self, request: web.Request) -> web.Response:
        return await self._answer(request, self.past)

    async def _find(self, request: web.Request) -> web.Response:
        wanted = request.query["address"]
        rows = {name: self.scene.detail(name)["endpoints"] for name in self.scene.rows}
        found = [name for name, ends in rows.items() if any(one["address"].startswith(f"{wanted}:") for one in ends)]
        return await self._answer(request, {"services": found})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.refuse:
            status, text = self.refuse[request.path]
            return web.Response(status=status, text=text)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        if self.mute:
            await asyncio.Event().wait()
        await response.write(b"retry: 1000\n\n")
        await response.write(_event("hello", {"facts": self.facts, "revision": self.scene.revision}))
        await response.write(_event("now", self.scene.now(time.time(), [], [])))
        if self.problems is not None:
            await response.write(_event("problems", self.problems))
        self._pages.add(response)
        try:
            # aiohttp cancels this handler when the client disconnects, or the server stops.
            await asyncio.Event().wait()
        finally:
            self._pages.discard(response)
        return response


def page_bytes() -> bytes:
    """Return the page from the package's files."""
    return joined()


def policy(page: bytes) -> str:
    """Return the Content-Security-Policy of the contract for this page."""
    sources = {}
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        sources[tag] = base64.b64encode(hashlib.sha256(text).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{sources['script']}'; style-src 'sha256-{sources['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _event(event: str, message: Json) -> bytes:
    return f"event: {event}\ndata: {json.dumps(message)}\n\n".encode()
