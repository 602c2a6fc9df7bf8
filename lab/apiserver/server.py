"""The HTTP server: maps paths to resources and methods to verbs, decodes and encodes bodies, authenticates, causes
faults.

Semantics live in rest, listing and watching. The caller provides functions that open the listening sockets, so one
server can be reached in several network namespaces.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aiohttp import web

from lab.apiserver import discovery, openapi, openapi_protobuf, status
from lab.apiserver.authentication import Tokens
from lab.apiserver.authorization import Rbac, Request
from lab.apiserver.faults import Faults
from lab.apiserver.options import verb_of
from lab.apiserver.paths import Target, parse_path
from lab.apiserver.resources import GROUPS
from lab.apiserver.rest import Rest
from lab.apiserver.status import ApiError, Json
from lab.apiserver.store import Store
from lab.apiserver.verbs import Verbs, answer, wants

log = logging.getLogger("lab.apiserver")

MAX_BODY = 64 * 1024 * 1024
ACCEPTING = 4
"""Turns of the event loop after which an accepted connection has a transport and can be closed."""
SERVICE_CIDRS = ("10.96.0.0/16", "fd00:10:96::/112")


class Listener(NamedTuple):
    """A function that opens one listening socket, and its TLS context (None: plain HTTP)."""

    open: Callable[[], socket.socket]
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The settings of a server. `tokens` maps bearer tokens to users; without tokens requests are not authenticated.

    With `rbac` every request is authenticated and authorized.
    """

    service_cidrs: tuple[str, ...] = SERVICE_CIDRS
    tokens: dict[str, str] = field(default_factory=dict)
    denied_users: frozenset[str] = frozenset()
    rbac: Rbac | None = None
    history: int = 50_000
    bookmark_period: float = 60.0
    watch_list: bool = True


def loopback(port: int = 0) -> socket.socket:
    """Return a listening socket on 127.0.0.1."""
    return socket.create_server(("127.0.0.1", port), backlog=256)


async def _accept_no_more(servers: Sequence[asyncio.Server]) -> None:
    """Wait until every accepted connection has a transport, so that it can be closed.

    If a server closes earlier, asyncio of Python 3.11 never closes the connection, and the client waits forever."""
    for server in servers:
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(ACCEPTING):
        await asyncio.sleep(0)


class ApiServer:
    """The API server: `store` and `rest` can be used in this process; HTTP works after start()."""

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        self.store = Store(self.config.history)
        self.rest = Rest(self.store, self.config.service_cidrs)
        self.tokens = Tokens(self.config.tokens)
        self.faults = Faults(fail_watch_list=not self.config.watch_list)
        self._runner: web.AppRunner | None = None
        self._listeners: list[Listener] = []
        self._servers: list[asyncio.Server] = []
        self._verbs = Verbs(self.rest, self.faults, self.config.bookmark_period)
        self.rest.create_system_objects()

    # life

    async def start(self, *listeners: Listener) -> None:
        """Serve on the listeners' sockets until close()."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        self._runner = runner
        self._listeners = list(listeners)
        await self.listen()

    def set_listeners(self, *listeners: Listener) -> None:
        """Set the listeners that the next listen() opens."""
        self._listeners = list(listeners)

    async def listen(self) -> None:
        """Open the listening sockets (again)."""
        if self._servers or self._runner is None or self._runner.server is None:
            return
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            server = await loop.create_server(self._runner.server, sock=listener.open(), ssl=listener.tls)
            self._servers.append(server)

    async def refuse(self) -> None:
        """Close the listening sockets and every connection: clients are refused until listen()."""
        servers, self._servers = self._servers, []
        await _accept_no_more(servers)
        for server in servers:
            server.close()
        self.drop_connections()
        for server in servers:
            await server.wait_closed()

    def drop_connections(self) -> None:
        """Reset every open connection."""
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()

    def end_watches(self) -> None:
        """End every watch in an orderly way, as a server that restarts does."""
        self._verbs.end_watches()

    async def close(self) -> None:
        """Stop the server and close all connections."""
        self.end_watches()
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for server in servers:
            await server.wait_closed()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return (address, port) of each listening socket."""
        return [s.getsockname()[:2] for server in self._servers for s in server.sockets]

    # requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            target = parse_path(request.path)
            if struck := await self._strike(request, target.resource.plural if target else ""):
                return struck
            user = self._authenticate(request)
            if target is None:
                return self._not_a_resource(request)
            self._authorize(user, request, target)
            return await self._verbs.dispatch(request, target)
        except ApiError as e:
            response = answer(e.body, e.code)
            if e.code in {429, 503, 504}:
                response.headers["Retry-After"] = "1"
            return response

    async def _strike(self, request: web.Request, plural: str) -> web.Response | None:
        """Cause the faults that precede the handling of a request; return an answer if a fault ends the request."""
        if not self.faults.hits(plural):
            return None
        await self.faults.wait()
        if self.faults.take("reset") and request.transport is not None:
            request.transport.abort()
            return web.Response()
        if self.faults.take("fail"):
            code = self.faults.fail_code
            raise ApiError(code, "InternalError", "the lab was asked to fail")
        return None

    def _authenticate(self, request: web.Request) -> str:
        tls = request.transport.get_extra_info("peercert") if request.transport else None
        if tls:
            names = {key: value for part in tls.get("subject", ()) for key, value in part}
            if user := names.get("commonName"):
                return str(user)
        if not self.tokens and self.config.rbac is None:
            return "system:admin"
        user = self.tokens.user_of(request.headers.get("Authorization", ""))
        if user is None:
            raise status.unauthorized()
        return user

    def _authorize(self, user: str, request: web.Request, target: Target) -> None:
        resource = target.resource
        named = f"{resource.plural}/{target.subresource}" if target.subresource else resource.plural
        verb = verb_of(request.method, request.query, target.name)
        wish = Request(user, verb, resource.group, named, target.namespace, target.name)
        allowed = user not in self.config.denied_users
        if self.config.rbac is not None:
            allowed = self.config.rbac.allows(wish) and allowed
        if not allowed:
            raise status.forbidden(user, verb, named, resource.group, target.namespace, target.name)

    # The path is not the path of a resource.

    def _not_a_resource(self, request: web.Request) -> web.Response:
        path = request.path.rstrip("/")
        # The server no longer supports v2beta1, so kubectl up to 1.29, which supports nothing newer, gets the lists of
        # each group.
        wants_aggregated = wants(request, "APIGroupDiscoveryList", "v2")
        if path in {"/healthz", "/livez", "/readyz"}:
            return web.Response(text="ok")
        if path in {"/api", "/apis"} and wants_aggregated:
            groups = ("",) if path == "/api" else GROUPS
            return answer(discovery.aggregated(groups), content_type=discovery.AGGREGATED)
        body = self._document(path)
        if body is None:
            return web.Response(text="404 page not found\n", status=404)
        if path == "/openapi/v2" and "protobuf" in request.headers.get("Accept", ""):
            content_type = {"Content-Type": openapi_protobuf.CONTENT_TYPE}
            return web.Response(body=openapi_protobuf.document(body), headers=content_type)
        return answer(body)

    def _document(self, path: str) -> Json | None:
        if path == "/api":
            host, port = (self.addresses or [("", 0)])[0]
            return discovery.api_versions(f"{host}:{port}")
        version = discovery.VERSION["gitVersion"]
        fixed: dict[str, Callable[[], Json]] = {
            "/version": lambda: discovery.VERSION,
            "/apis": discovery.group_list,
            "/openapi/v2": functools.partial(openapi.v2, version),
            "/openapi/v3": openapi.v3_index,
        }
        for group in ("", *GROUPS):
            base = openapi.base(group)
            fixed[f"/{base}"] = functools.partial(discovery.resource_list, group)
            fixed[f"/openapi/v3/{base}"] = functools.partial(openapi.v3, group, version)
            if group:
                fixed[f"/apis/{group}"] = functools.partial(discovery.one_group, group)
        make = fixed.get(path)
        return make() if make else None
