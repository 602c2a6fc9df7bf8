"""A port of this machine that leads into a namespace: both directions, without a listener, and until it is closed."""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
from collections.abc import Iterator

import pytest

from lab.forward import Forward
from lab.netns import open_socket_in

PORT = 8080


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"forward-{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)


async def _say(port: int, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    try:
        return await reader.read(100)
    finally:
        writer.close()


async def test_a_port_leads_into_a_namespace(namespace: str) -> None:
    async def loud(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer, _ = writer.get_extra_info("peername")
        writer.write(f"{peer} says ".encode() + (await reader.read(100)).upper())
        await writer.drain()
        writer.close()

    inside = open_socket_in(namespace, lambda: socket.create_server(("127.0.0.1", PORT)))
    async with Forward(namespace, PORT) as forward, await asyncio.start_server(loud, sock=inside):
        assert await _say(forward.port, b"hello") == b"127.0.0.1 says HELLO"
        async with Forward(namespace, PORT, wanted=forward.port) as second:
            assert second.port != forward.port
            assert await _say(second.port, b"again") == b"127.0.0.1 says AGAIN"


async def test_connections_are_closed_only_from_outside(namespace: str) -> None:
    async with Forward(namespace, PORT) as forward:
        assert await _say(forward.port, b"hello") == b""
        inside = open_socket_in(namespace, lambda: socket.create_server(("127.0.0.1", PORT)))
        reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
        with inside:
            inside.settimeout(5)
            accepted, _ = await asyncio.to_thread(inside.accept)
    with accepted:
        assert await reader.read() == b""
        assert await asyncio.to_thread(accepted.recv, 1) == b""
    writer.close()
