"""Forwards a port of this machine's loopback into a network namespace, as `kubectl port-forward` does into a pod.

The namespace sees a client at its own loopback. Only this machine's own programs reach the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import Self

from lab.netns import open_socket_in

_CHUNK = 65536
_CONNECT_WITHIN = 2.0


class Forward:
    """An async context manager that listens on 127.0.0.1: at the port `wanted`, or at a free port if `wanted` is in
    use.
    """

    def __init__(self, namespace: str, inside: int, wanted: int = 0) -> None:
        self.port = 0
        self._namespace = namespace
        self._inside = inside
        self._wanted = wanted
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._wanted)
        except OSError:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs this callback in a task
        self._connections.add(task)
        try:
            # While a proxy restarts, nothing listens: the connection is closed, as without forwarding. asyncio's
            # streams of Python 3.11 report a cancelled handler as a failed handler.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._lead(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = open_socket_in(self._namespace, socket.socket)
        try:
            sock.setblocking(False)
            address = ("127.0.0.1", self._inside)
            async with asyncio.timeout(_CONNECT_WITHIN):  # wait_for of Python 3.11 may lose the cancellation by close()
                await asyncio.get_running_loop().sock_connect(sock, address)
            there, here = await asyncio.open_connection(sock=sock)
        except BaseException:
            sock.close()
            raise
        pumps = [asyncio.create_task(_pump(reader, here)), asyncio.create_task(_pump(there, writer))]
        try:
            # The first side that closes ends both directions: HTTP needs no half-closed connections.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            here.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
