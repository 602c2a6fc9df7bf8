"""An API server that is reachable only through an HTTP proxy: lists, watches and events go through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Self

import yaml

from lab.cluster import ClusterConfig, LabCluster
from lab.netns import open_socket_in
from lab.objects import API_PORT
from support.live import Live

PASSWORD = "secret-word"


class Relay:
    """An HTTP proxy on the node's loopback that connects each CONNECT to the API server, for any host name."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked: list[str] = []

    async def __aenter__(self) -> Self:
        listening = open_socket_in(self._namespace, lambda: socket.create_server(("127.0.0.1", 0)))
        self.port = listening.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=listening)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            far = open_socket_in(self._namespace, lambda: socket.create_connection(("127.0.0.1", API_PORT)))
            far_reader, far_writer = await asyncio.open_connection(sock=far)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            with contextlib.closing(far_writer):
                await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_services_are_served_when_only_a_proxy_reaches_the_api_server() -> None:
    async with LabCluster(ClusterConfig(tls=True)) as cluster:
        live = Live(cluster)
        await live.add_pods()
        live.service("web", "a1")
        async with Relay(cluster.namespace_of("node")) as relay:
            # A name that cannot be resolved, and an address in the server's certificate: the HTTP proxy resolves them.
            kubeconfig = yaml.safe_load(cluster.node_kubeconfig.read_text())
            entry = kubeconfig["clusters"][0]["cluster"]
            entry |= {
                "server": "https://api.example.invalid:6443",
                "tls-server-name": "127.0.0.1",
                "proxy-url": f"http://node:{PASSWORD}@127.0.0.1:{relay.port}",
            }
            path = cluster.folder / "through-proxy.kubeconfig"
            path.touch(mode=0o600)
            path.write_text(yaml.safe_dump(kubeconfig))
            await live.start({"clientConnection": {"kubeconfig": str(path)}})
            await live.expect(live.front("web"), {"pod": "a1"})
            live.service("later", "b1")
            await live.expect(live.front("later"), {"pod": "b1"})
            await live.until(lambda: any(e.startswith("Starting") for e in live.events("node-a")), "the event")
        assert {asked.partition("\r\n")[0] for asked in relay.asked} == {"CONNECT api.example.invalid:6443 HTTP/1.1"}
        assert live.logged("Using a proxy for the API server proxy=http://127.0.0.1:[0-9]+ server=https://api.example")
        assert PASSWORD not in live.proxy.log.read_text()
