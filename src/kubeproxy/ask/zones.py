"""Requests the zones of endpoints and the Nodes of clients, only for answers, because the proxy itself does not need
them. A caller waits only briefly, and gets no error; if no answer comes, the zones are unknown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from kubeproxy.ask.question import Elsewhere
from kubeproxy.ask.why import Explained, Why, moved
from kubeproxy.engine.pacing import Clock, TokenBucket
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.route import source_for
from kubeproxy.model.addresses import pack, unpack
from kubeproxy.model.plan import ServiceName

log = logging.getLogger("kubeproxy.control")

Zones = Mapping[bytes, str]  # zones of endpoints by packed address; endpoints of unknown zones are missing
TIMEOUT: Final = 1.0  # maximum seconds that a caller waits for the lock, and then for the answer
LASTING: Final = 3.0
"""Seconds for which an answer, or its absence, is reused, because an open page asks at each change of a Service."""
MOST: Final = 8  # Services with cached zones
_NODES: Final = ("", "")  # the cache key for the names of Nodes by packed address; other keys are Services
BURST: Final = 20  # maximum burst of requests from all pages and commands; then one a second


class Places:
    """A cache of zones of endpoints, and of Nodes. `ask` fetches the zones of a Service from the source of objects;
    `nodes` fetches Node names by packed address. Only one request runs at a time."""

    def __init__(
        self,
        ask: Callable[[ServiceName], Awaitable[Zones]],
        clock: Clock = time.monotonic,
        nodes: Callable[[], Awaitable[Mapping[bytes, str]]] | None = None,
    ) -> None:
        self._ask = ask
        self._nodes = nodes
        self._clock = clock
        self._bucket = TokenBucket(1.0, BURST, clock)
        self._turn = asyncio.Lock()
        self._known: dict[ServiceName, tuple[float, Zones]] = {}

    def held(self, service: ServiceName) -> Zones | None:
        """Return the cached zones of a Service, or None if they are missing or too old."""
        known = self._known.get(service)
        return known[1] if known is not None and self._clock() - known[0] < LASTING else None

    async def zones(self, service: ServiceName) -> Zones:
        """Return the available zones of a Service's endpoints. Never raises."""
        try:
            async with asyncio.timeout(TIMEOUT):
                await self._turn.acquire()
        except TimeoutError:
            return {}
        try:
            return await self._zones(service)
        finally:
            self._turn.release()

    async def node(self, address: bytes) -> str:
        """Return the name of the Node with an address; '' if no such Node is known. Never raises."""
        return (await self.zones(_NODES)).get(address, "") if self._nodes is not None else ""

    async def _zones(self, service: ServiceName) -> Zones:
        held = self.held(service)
        if held is not None:
            return held
        if not self._bucket.take():
            return self._known[service][1] if service in self._known else {}
        found: Zones = {}
        try:
            async with asyncio.timeout(TIMEOUT):
                found = await (self._nodes() if self._nodes and service == _NODES else self._ask(service))
        except (KubeProxyError, OSError) as error:
            log.debug("Zones of endpoints are unknown service=%s/%s error=%r", *service, str(error))
        except Exception:
            log.exception("Zones of endpoints are unknown after an internal error service=%s/%s", *service)
        self._keep(service, found)
        return found

    def _keep(self, service: ServiceName, found: Zones) -> None:
        self._known.pop(service, None)
        while len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[service] = (self._clock(), found)


async def with_node(made: Explained, places: Places) -> Explained:
    """Return the answer. If the client is another Node, or the destination is a NodePort at another Node's address, the
    answer states that the other Node handles the connection."""
    why, host = made.why, await places.node(made.hosted) if made.hosted is not None else ""
    if made.hosted is not None and host not in {"", made.world.node_name}:
        address = unpack(made.hosted)
        there = Elsewhere(host, f"{address} is {host}'s own address", f"status.addresses of Node {host}", "destination")
        client = _own_address(made.hosted) if made.packet.source is None else why.source
        question = moved(replace(why, source=client), there)
        return replace(made, why=replace(why, elsewhere=there, fixes=question.fixes))
    node = await places.node(made.stranger) if made.stranger is not None else ""
    if node in {"", made.world.node_name}:
        return made
    there = Elsewhere(node, f"{made.why.source} is {node}'s own address", f"status.addresses of Node {node}")
    return replace(made, why=moved(made.why, there))


def _own_address(destination: bytes) -> str:
    found = None
    with suppress(KubeProxyError):
        found = source_for(destination)
    return unpack(found) if found is not None else ""


async def with_zones(why: Why, places: Places) -> Why:
    """Return the answer with the available zones of its endpoints."""
    if all(one.zone for one in why.endpoints):
        return why
    namespace, _, name = why.service.partition("/")
    zones = await places.zones((namespace, name))
    named = (replace(one, zone=one.zone or zones.get(pack(one.host) or b"", "")) for one in why.endpoints)
    return replace(why, endpoints=tuple(named))
