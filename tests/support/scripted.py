"""A raw HTTP server for tests, whose answers a script determines byte by byte, and the recorded answers.

It uses no HTTP library, so answers can be cut, delayed and invalid in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from support.places import RECORDINGS

TLS = Path(__file__).with_name("tls")

Json = dict[str, Any]


ACCEPTING = 4
"""Turns of the event loop between the kernel's accept of a connection and its close by the server."""


class Recording:
    """One exchange of the recordings: target of the request, status, headers and body of the answer."""

    def __init__(self, name: str) -> None:
        text = (RECORDINGS / "api" / f"{name}.http").read_bytes()
        asked, _, answered = text.partition(b"\n\n")
        head, _, self.body = answered.partition(b"\r\n\r\n")
        self.target = asked.split(b"\n")[0].split()[2].decode()
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = dict(line.split(": ", 1) for line in lines[1:] if not line.startswith("content-length"))


class Request:
    """A request as received."""

    def __init__(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        self.method = method
        self.target = target
        self.path = urlsplit(target).path
        self.query = {
            key: values[0] for key, values in parse_qs(urlsplit(target).query, keep_blank_values=True).items()
        }
        self.headers = headers
        self.body = body
        self.at = time.monotonic()

    @property
    def kind(self) -> str:
        if "sendInitialEvents" in self.query:
            return "watchlist"
        return "watch" if "watch" in self.query else "list"


class Reply:
    """The actions that a script has on a connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: Any = b"", headers: Mapping[str, str] | None = None) -> None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + body)

    async def recorded(self, name: str) -> None:
        recording = Recording(name)
        await self.answer(recording.status, recording.body, recording.headers)

    async def status(self, code: int, message: str = "no", headers: Mapping[str, str] | None = None) -> None:
        await self.answer(code, {"kind": "Status", "status": "Failure", "code": code, "message": message}, headers)

    async def begin(self) -> None:
        await self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def chunk(self, data: Any) -> None:
        if not isinstance(data, bytes):
            data = json.dumps(data).encode() + b"\n"
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def forever(self) -> None:
        await asyncio.Event().wait()


Script = Callable[[Request, Reply], Awaitable[None]]
"""A function that answers a request."""


class Server:
    """Runs `script(request, reply)` for each request; an async context manager."""

    def __init__(self, script: Script, *, tls: bool = False, port: int = 0) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.connections = 0
        self.port = port
        self._tls: ssl.SSLContext | None = None
        self._tasks: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._is_over = False
        if tls:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(TLS / "server.crt", TLS / "server.key")
            self._tls.load_verify_locations(TLS / "ca.crt")
            self._tls.verify_mode = ssl.CERT_OPTIONAL

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        # asyncio of Python 3.11 loses a connection if its server closes between the accept and the creation of the
        # transport.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        self._is_over = True
        for _turn in range(ACCEPTING):
            await asyncio.sleep(0)
        self._server.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for writer in self._tasks:  # The task may be cancelled before it begins,
            writer.close()
        await self._server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_over:  # so this coroutine may never begin.
            writer.transport.abort()
            return
        self._tasks[writer] = asyncio.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while request := await self._read(reader):
                self.requests.append(request)
                await self.script(request, Reply(writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.pop(writer, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> Request | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode().strip().split("\r\n")
        method, target, _ = first.split()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Request(method, target, headers, body)


def service(name: str, version: str | int = "1", **spec: Any) -> Json:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)},
        "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 80}], **spec},
    }


def listed(*items: Json, version: str | int = "1", token: str = "", kind: str = "Service") -> Json:
    metadata = {"resourceVersion": version, "continue": token}
    return {"kind": f"{kind}List", "metadata": metadata, "items": list(items)}


KINDS = {"services": "Service", "endpointslices": "EndpointSlice", "nodes": "Node", "servicecidrs": "ServiceCIDR"}


def kind_at(path: str) -> str:
    """Return the kind of the list at a path of the API."""
    return KINDS[path.rpartition("/")[2]]


def event(kind: str, found: Json) -> Json:
    return {"type": kind, "object": found}


def bookmark(version: str | int | None, *, initial_end: bool = False, kind: str = "Service") -> Json:
    annotations = {"k8s.io/initial-events-end": "true"} if initial_end else None
    metadata = {"resourceVersion": version, "annotations": annotations}
    return event("BOOKMARK", {"kind": kind, "metadata": metadata, "spec": None})


def gone() -> Json:
    return event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true, at most 5 s."""
    for _ in range(2500):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen within 5 s")
