"""The clients of a soak: open connections, new connections and UDP requests; each result is checked.

As a program it enters the network namespace of the process with the given id, and answers the command `report`. A
connection fails if it is refused, ends early, if its SYN had to be repeated, or if an endpoint of another Service
answers."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from bench import objects
from bench.companion import say
from bench.worker import die_with_parent
from prove.soak.cluster import is_udp, owner
from prove.soak.joining import join_network_of
from support.traffic import check_first_syn

SERVICE_PORT = 80
LASTING = 200
"""Open connections: one half lasts for the whole soak, the others for a minute each."""

NEW, QUESTIONS = 40.0, 10.0
"""New TCP connections, and UDP requests, per second."""

_ASKED_EVERY = 4.0  # seconds between two requests on an open connection
_RENEWED = 60.0  # seconds
_PATIENCE = 10.0  # seconds to wait for an answer
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, so that no port waits


class Traffic:
    """The requests and the failures. `services` are the Services that are not deleted."""

    def __init__(self, services: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._tcp = [number for number in range(services) if not is_udp(number)]
        self._udp = [number for number in range(services) if is_udp(number)]
        self.asked: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.first: list[str] = []
        self.open = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()

    def begin(self) -> None:
        """Start all clients."""
        for turn in range(LASTING):
            self._start(self._last(renewed=turn % 2 == 1))
        self._start(self._repeat(NEW, self._connect_once))
        self._start(self._repeat(QUESTIONS, self._ask_once))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _repeat(self, rate: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        due = time.monotonic()
        while True:
            self._start(work())
            due += self._chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _failed(self, kind: str, number: int, error: BaseException) -> None:
        self.failures[kind] += 1
        if len(self.first) < 20:
            at = time.monotonic() - self._began
            self.first.append(f"{at:.1f} s: {kind} to Service {number} ({objects.cluster_ip(number)}): {error!r}")

    async def _last(self, *, renewed: bool) -> None:
        await asyncio.sleep(self._chance.uniform(0, _ASKED_EVERY))
        while True:
            number = self._chance.choice(self._tcp)
            over = time.monotonic() + self._chance.uniform(0.5, 1.5) * _RENEWED if renewed else float("inf")
            try:
                with await self._connected(number) as link:
                    self.open += 1
                    try:
                        while time.monotonic() < over:
                            await self._ask(link, "lasting", number)
                            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * _ASKED_EVERY)
                    finally:
                        self.open -= 1
            except (OSError, TimeoutError) as error:
                self._failed("lasting", number, error)
                await asyncio.sleep(1)

    async def _connect_once(self) -> None:
        number = self._chance.choice(self._tcp)
        try:
            with await self._connected(number) as link:
                await self._ask(link, "new", number)
        except (OSError, TimeoutError) as error:
            self._failed("new", number, error)

    async def _ask_once(self) -> None:
        number = self._chance.choice(self._udp)
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
                link.setblocking(False)
                link.connect((objects.cluster_ip(number), SERVICE_PORT))
                await self._ask(link, "udp", number)
        except (OSError, TimeoutError) as error:
            self._failed("udp", number, error)

    async def _connected(self, number: int) -> socket.socket:
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            link.setblocking(False)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            target = (objects.cluster_ip(number), SERVICE_PORT)
            async with asyncio.timeout(_PATIENCE):
                await asyncio.get_running_loop().sock_connect(link, target)
            check_first_syn(link)
        except BaseException:
            link.close()
            raise
        return link

    async def _ask(self, link: socket.socket, kind: str, number: int) -> None:
        loop, question = asyncio.get_running_loop(), self._chance.randbytes(8)
        async with asyncio.timeout(_PATIENCE):
            await loop.sock_sendall(link, question)
            answer = await loop.sock_recv(link, 64)
        if not answer:
            raise ConnectionError("it ended early")
        if answer[4:] != question or owner(answer[:4]) != number:
            raise ConnectionError(f"an endpoint of Service {owner(answer[:4])} answered: {answer.hex()}")
        self.asked[kind] += 1


async def _serve() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say(pid=os.getpid())
    traffic: Traffic | None = None
    while line := await reader.readline():
        command = msgspec.json.decode(line)
        if command["do"] == "begin":
            traffic = Traffic(command["services"], command["seed"])
            traffic.begin()
            say()
        elif traffic is not None:
            say(asked=traffic.asked, failures=traffic.failures, first=traffic.first, open=traffic.open)


if __name__ == "__main__":
    die_with_parent()
    join_network_of(int(sys.argv[1]))
    asyncio.run(_serve())
