"""The lab's API server in a separate process inside the namespace of a measurement, filled with Services."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import msgspec

from bench import objects
from bench.companion import Companion, say
from bench.worker import die_with_parent


class ApiProcess:
    """The server, controlled from the parent process."""

    def __init__(self) -> None:
        self._process = Companion("bench.apiserver")
        self.url = f"http://127.0.0.1:{self._process.hello['port']}"
        self._lock = threading.Lock()

    def load(self, size: objects.Size) -> None:
        """Create Services and their slices."""
        self._process.ask("load", size=str(size))

    def put(self, storage: str, body: str) -> int:
        """Write one object; return the start of the write, in ns of the monotonic clock. Callable from any thread."""
        with self._lock:
            return int(self._process.ask("put", storage=storage, body=body)["at"])

    def remove(self, storage: str, key: tuple[str, str]) -> None:
        """Delete one object. Callable from any thread."""
        with self._lock:
            self._process.ask("remove", storage=storage, key=key)

    @property
    def pid(self) -> int:
        """Return the id of the server's process."""
        return self._process.pid

    def close(self) -> None:
        """Stop the server."""
        self._process.close()


async def _serve() -> None:
    # Only the child needs aiohttp.
    from lab.apiserver.server import ApiServer, Listener, ServerConfig, loopback  # noqa: PLC0415

    server = ApiServer(ServerConfig(service_cidrs=(objects.SERVICE_CIDR,)))
    await server.start(Listener(loopback))
    addresses = [{"type": "InternalIP", "address": objects.NODE_IP}]
    server.store.put("nodes", {"metadata": {"name": objects.NODE}, "spec": {}, "status": {"addresses": addresses}})
    reader = asyncio.StreamReader(limit=64 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say(port=server.addresses[0][1])
    while line := await reader.readline():
        command = msgspec.json.decode(line)
        if command["do"] == "put":
            body = msgspec.json.decode(command["body"])
            at = time.monotonic_ns()
            server.store.put(command["storage"], body)
            say(at=at)
            continue
        if command["do"] == "remove":
            namespace, name = command["key"]
            server.store.remove(command["storage"], (namespace, name))
            say()
            continue
        size = objects.parse_size(command["size"])
        lists = ("services", objects.service_pages(size)), ("endpointslices", objects.slice_pages(size))
        for storage, pages in lists:
            for page in pages:
                server.store.put_many(storage, msgspec.json.decode(page)["items"])
        say()
    await server.close()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_serve())
