"""Finds the Nodes of addresses in answers. A caller waits only briefly, and gets no error; if no answer comes, the Node
is unknown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from kubeproxy.ask.question import Elsewhere
from kubeproxy.ask.why import Explained, moved
from kubeproxy.engine.pacing import Clock
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.route import source_for
from kubeproxy.model.addresses import unpack

log = logging.getLogger("kubeproxy.control")

TIMEOUT: Final = 1.0  # maximum seconds that a caller waits for the lock, and then for the answer
LASTING: Final = 3.0
"""Seconds for which an answer, or its absence, is reused, because pages and commands may ask often."""


class Places:
    """A cache of the names of Nodes. `read` fetches these names by packed address. Only one request runs at a time."""

    def __init__(self, read: Callable[[], Awaitable[Mapping[bytes, str]]], clock: Clock = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._turn = asyncio.Lock()
        self._read_at = float("-inf")
        self._names: Mapping[bytes, str] = {}

    async def node(self, address: bytes) -> str:
        """Return the name of the Node with an address; '' if no such Node is known. Never raises."""
        try:
            async with asyncio.timeout(TIMEOUT):
                await self._turn.acquire()
        except TimeoutError:
            return ""
        try:
            if self._clock() - self._read_at >= LASTING:
                self._names = await self._fetched()
                self._read_at = self._clock()
            return self._names.get(address, "")
        finally:
            self._turn.release()

    async def _fetched(self) -> Mapping[bytes, str]:
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._read()
        except (KubeProxyError, OSError) as error:
            log.debug("Nodes are unknown error=%r", str(error))
        except Exception:
            log.exception("Nodes are unknown after an internal error")
        return {}


async def with_node(made: Explained, places: Places) -> Explained:
    """Return the answer. If the client is another Node, or the destination is a NodePort at another Node's address, the
    answer states that the other Node handles the connection."""
    why, source = made.why, made.why.source
    for address, end in made.unplaced:
        node = await places.node(address)
        if node not in {"", made.world.node_name}:
            field = f"status.addresses of Node {node}"
            there = Elsewhere(node, f"{unpack(address)} is {node}'s own address", field, end)
            if made.packet.source is None:  # on the other node, the word node means that node itself
                source = unpack(own) if (own := own_address(address)) is not None else ""
            question = moved(replace(why, source=source), there)
            return replace(made, why=replace(why, elsewhere=there, fixes=question.fixes))
    return made


def own_address(destination: bytes) -> bytes | None:
    """Return the source address that the kernel picks for this node's packets, or None if it cannot be determined."""
    with suppress(KubeProxyError):
        return source_for(destination)
    return None
