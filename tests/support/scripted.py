"""A raw HTTP server for tests, whose answers a script determines byte by byte, and the recorded answers.

It uses no HTTP library, so answers can be cut, delayed and invalid in any way.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from support.places import RECORDINGS

TLS = Path(__file__).with_name("tls")


ACCEPTING = 4
"""Turns of the event loop between the kernel's accept of a connection and its close by the server."""


class Recording:
    """One exchange of the recordings: target of the request, status, headers and body of the answer."""

    def __init__(self, name):
        text = (RECORDINGS / "api" / f"{name}.http").read_bytes()
        asked, _, answered = text.partition(b"\n\n")
        head, _, self.body = answered.partition(b"\r\n\r\n")
        self.target = asked.split(b"\n")[0].split()[2].decode()
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = dict(line.split(": ", 1) for line in lines[1:] if not line.startswith("content-length"))


class Request:
    """A request as received."""

    def __init__(self, method, target, headers, body):
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
    def kind(self):
        if "sendInitialEvents" in self.query:
            return "watchlist"
        return "watch" if "watch" in self.query else "list"


class Reply:
    """The actions that a script has on a connection."""

    def __init__(self, writer):
        self.writer = writer

    async def raw(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status, body=b"", headers=None):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + body)

    async def recorded(self, name):
        recording = Recording(name)
        await self.answer(recording.status, recording.body, recording.headers)

    async def status(self, code, message="no", headers=None):
        await self.answer(code, {"kind": "Status", "status": "Failure", "code": code, "message": message}, headers)

    async def begin(self):
        await self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def chunk(self, data):
        if not isinstance(data, bytes):
            data = json.dumps(data).encode() + b"\n"
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self):
        await self.raw(b"0\r\n\r\n")

    def reset(self):
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def forever(self):
        await asyncio.Event().wait()


class Server:
    """Runs `script(request, reply)` for each request; an async context manager."""

    def __init__(self, script, *, tls=False, port=0):
        self.script = script
        self.requests = []
        self.connections = 0
        self.port = port
        self._tls = None
        self._tasks = {}
        self._is_over = False
        if tls:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(TLS / "server.crt", TLS / "server.key")
            self._tls.load_verify_locations(TLS / "ca.crt")
            self._tls.verify_mode = ssl.CERT_OPTIONAL

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        # asyncio of Python 3.11 loses a connection if its server closes between the accept and the creation of the
        # transport.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        self._is_over = True
        for _ in range(ACCEPTING):
            await asyncio.sleep(0)
        self._server.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for writer in self._tasks:  # The task may be cancelled before it begins,
            writer.close()
        await self._server.wait_closed()

    def _accepted(self, reader, writer):
        if self._is_over:  # so this coroutine may never begin.
            writer.transport.abort()
            return
        self._tasks[writer] = asyncio.create_task(self._serve(reader, writer))

    async def _serve(self, reader, writer):
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
    async def _read(reader):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode().strip().split("\r\n")
        method, target, _ = first.split()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Request(method, target, headers, body)


def service(name, version="1", **spec):
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)},
        "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 80}], **spec},
    }


def listed(*items, version="1", token="", kind="Service"):
    metadata = {"resourceVersion": version, "continue": token}
    return {"kind": f"{kind}List", "metadata": metadata, "items": list(items)}


KINDS = {"services": "Service", "endpointslices": "EndpointSlice", "nodes": "Node", "servicecidrs": "ServiceCIDR"}


def kind_at(path):
    """Return the kind of the list at a path of the API."""
    return KINDS[path.rpartition("/")[2]]


def event(kind, found):
    return {"type": kind, "object": found}


def bookmark(version, *, initial_end=False, kind="Service"):
    annotations = {"k8s.io/initial-events-end": "true"} if initial_end else None
    metadata = {"resourceVersion": version, "annotations": annotations}
    return event("BOOKMARK", {"kind": kind, "metadata": metadata, "spec": None})


def gone():
    return event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})


async def eventually(condition):
    """Wait until `condition()` is true, at most 5 s."""
    for _ in range(2500):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen within 5 s")
