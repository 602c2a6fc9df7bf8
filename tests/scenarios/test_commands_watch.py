"""`kube-proxy services -w`, `verify -w` and `conntrack -w` with a running proxy, read through a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support import forking
from support.answers import valid
from support.live import TIMEOUT, Live
from support.modes import modes

every_mode = modes("nftables", "iptables-nft", "userspace")


class Watching:
    """A running command with -w, and the lines that it prints to a pipe."""

    def __init__(self, command: forking.Forked, lines: asyncio.StreamReader) -> None:
        self.command = command
        self._lines = lines

    async def line(self, *said: str) -> str:
        """Return the next line that contains all of these texts."""
        async with asyncio.timeout(2 * TIMEOUT):
            async for data in self._lines:
                text = data.decode().rstrip("\n")
                if all(part in text for part in said):
                    return text
        raise AssertionError(f"it ended without a line with {said}")


@asynccontextmanager
async def watch(live: Live, *words: str) -> AsyncIterator[Watching]:
    """Run a command, whose standard output is a pipe; the reader closes the pipe at the end."""
    reader, writer = os.pipe()
    where = ("--control-socket", str(live.proxy.control))
    command = await forking.fork(live.cluster.namespace_of("node"), [*words, "-w", *where], writer, 2)
    os.close(writer)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(reader, "rb"))
    try:
        yield Watching(command, lines)
    finally:
        transport.close()
        async with asyncio.timeout(2 * TIMEOUT):
            await command.wait()


@every_mode
async def test_services_that_change(live: Live) -> None:
    live.service("watched", "a1")
    await live.expect(live.front("watched"), {"pod": live.mode.seen("a1")})
    async with watch(live, "services") as rows, watch(live, "services", "watched", "-o", "json") as one:
        await rows.line("SERVICE")
        await rows.line("default/watched ", "programmed  1 ")
        first = valid("service", await one.line())
        assert first["name"] == "watched"
        live.endpoints("watched", "a1 b1")
        assert (await rows.line("default/watched ", "  programmed  2  "))[13:].startswith("changed ")
        row = valid("watched", await one.line(live.ips["b1"]["IPv4"]))
        assert (row["change"], row["key"], row["row"]["name"]) == ("changed", "default/watched", "watched")
        live.service("later", "a1")
        assert (await rows.line("default/later "))[13:].startswith("new ")
        live.cluster.delete("services", "later")
        assert (await rows.line("default/later ", "gone"))[13:].startswith("gone ")
        one.command.send_signal(signal.SIGINT)
        assert await one.command.wait() == 0


@every_mode
async def test_the_numbers_of_connections(live: Live) -> None:
    live.service("numbered", "a1")
    front = live.front("numbered")
    await live.programmed(front, "a1")
    async with watch(live, "conntrack", "--seconds", "0.2", "-o", "json") as counts:
        valid("conntrack", await counts.line())
        await live.expect(front, {"pod": "a1"}, "tcp")
        row = json.loads(await counts.line("default/numbered"))
        assert row["row"]["entries"] >= 1


@modes("nftables")
async def test_differences_that_appear_and_are_gone(live: Live) -> None:
    adding = asyncio.Event()

    async def go_on() -> None:
        while not adding.is_set():  # the proxy repairs it
            await live.cluster.exec("node", ["nft", "add", "element", "ip", "kube-proxy", *STRAY])
            await asyncio.sleep(0.02)

    async with watch(live, "verify") as differences:
        await differences.line("ok ", " in the kernel as planned")
        harming = asyncio.create_task(go_on())
        try:
            assert (await differences.line("no Service's: ", "10.96.99.99"))[13:].startswith("new ")
        finally:
            adding.set()
            await harming
        assert (await differences.line("no Service's: ", "10.96.99.99"))[13:].startswith("gone ")


STRAY = ("cluster-ips", "{ 10.96.99.99 }")  # an element without a Service
