"""A load balancer like those of clouds: it sends each new connection to a healthy node, and does not move open
connections.

It is on the host outside, and consists of nft rules that mark connections, and of routes by mark. The health of nodes
is determined by the Service's health check port if it has one, otherwise by the proxy's /healthz. With session affinity
all connections of a client go to one node."""

from __future__ import annotations

import asyncio
import functools
from types import TracebackType
from typing import Self

from lab.netns import run_in_async
from lab.probes import http_get
from lab.proxyprocess import HEALTH_PORT
from support.stage import Stage

PERIOD = 0.02
"""Seconds between two health checks of the nodes; clouds check every few seconds."""
MARKS = {"node": 1, "neighbour": 2}


class Balancer:
    """An async context manager for one Service of a cluster; `healthy` are the nodes that get new connections."""

    def __init__(self, stage: Stage, name: str = "web") -> None:
        self.healthy: tuple[str, ...] = ()
        self._stage = stage
        self._name = name
        self._front = stage.front("loadbalancer", name)
        self._rules = ""
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        chain = "add chain ip balancer out { type route hook output priority mangle; }"
        await self._run("nft", f"add table ip balancer; {chain}")
        for host, mark in MARKS.items():
            address = self._stage.live.ips[host]["IPv4"]
            await self._ip("rule", "add", "fwmark", str(mark), "lookup", str(100 + mark))
            await self._ip("route", "add", "default", "via", address, "table", str(100 + mark))
        self._watch = asyncio.create_task(self._watching())
        await self._stage.live.until(lambda: self.healthy, "a healthy node")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._run("nft", "delete table ip balancer")
        for mark in MARKS.values():
            await self._ip("rule", "del", "fwmark", str(mark))
            await self._ip("route", "flush", "table", str(100 + mark))

    async def sends_to(self, *hosts: str) -> None:
        """Wait until exactly these nodes get new connections."""
        await self._stage.live.until(lambda: set(self.healthy) == set(hosts), f"a balancer that sends to {hosts}")

    async def _watching(self) -> None:
        while True:
            states = await asyncio.gather(*(self._is_healthy(host) for host in MARKS))
            healthy = tuple(host for host, is_healthy in zip(MARKS, states, strict=True) if is_healthy)
            rules = self._script(healthy)
            if rules != self._rules:
                await self._run("nft", rules)
                self._rules = rules
            self.healthy = healthy
            await asyncio.sleep(PERIOD)

    async def _is_healthy(self, host: str) -> bool:
        port = self._stage.get(self._name)["spec"].get("healthCheckNodePort") or HEALTH_PORT
        ask = functools.partial(http_get, self._stage.live.ips[host]["IPv4"], port, "/healthz")
        try:
            status, _ = await run_in_async(self._stage.cluster.namespace_of("outside"), ask)
        except OSError:
            return False
        return status == 200

    def _script(self, healthy: tuple[str, ...]) -> str:
        to_it = f"add rule ip balancer out ip daddr {self._front.address}"
        marks = [MARKS[host] for host in healthy]
        if not marks:
            return f"flush chain ip balancer out; {to_it} ct state new drop"
        is_sticky = self._stage.get(self._name)["spec"].get("sessionAffinity") == "ClientIP"
        number = "jhash ip saddr" if is_sticky else "numgen inc"
        places = ", ".join(f"{place} : {mark}" for place, mark in enumerate(marks))
        chosen = f"{number} mod {len(marks)} map {{ {places} }}" if len(marks) > 1 else str(marks[0])
        return f"flush chain ip balancer out; {to_it} ct state new ct mark set {chosen}; {to_it} meta mark set ct mark"

    async def _ip(self, *arguments: str) -> None:
        await self._run("ip", *arguments)

    async def _run(self, *command: str) -> None:
        status, _, error = await self._stage.cluster.exec("outside", command)
        assert status == 0, f"{command}: {error}"
