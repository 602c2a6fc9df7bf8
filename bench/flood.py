"""Clients that pipeline HTTP requests without pause and read the answers, for `hostile`.

`python -m bench.flood HOST PORT CONNECTIONS` executes JSON commands (companion.py).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time

import msgspec

from bench.companion import say
from bench.worker import die_with_parent

REQUESTS = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 4000
SOURCE = "10.9.0.2"
"""Another address than the proxy's, so that the proxy does not count the client as one of the node itself."""


class Flood:
    """A number of connections, each opened again when it is closed."""

    def __init__(self, server: tuple[str, int], connections: int) -> None:
        self._server = server
        self._selector = selectors.DefaultSelector()
        for _ in range(connections):
            self._connect()

    def run(self, seconds: float) -> int:
        """Write and read as much as possible for some seconds; return the number of sent bytes."""
        sent, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            for key, events in self._selector.select(0.1):
                link = key.fileobj
                assert isinstance(link, socket.socket)
                try:
                    if events & selectors.EVENT_READ and not link.recv(1 << 18):
                        raise ConnectionResetError
                    if events & selectors.EVENT_WRITE:
                        sent += link.send(REQUESTS)
                except BlockingIOError:
                    pass
                except OSError:
                    self._selector.unregister(link)
                    link.close()
                    self._connect()
        return sent

    def _connect(self) -> None:
        link = socket.socket()
        link.bind((SOURCE, 0))
        link.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            link.connect(self._server)
        self._selector.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE)


def main(host: str, port: str, connections: str) -> None:
    """Execute commands until the parent has ended."""
    die_with_parent()
    flood = Flood((host, int(port)), int(connections))
    say()
    while line := sys.stdin.buffer.readline():
        say(sent=flood.run(msgspec.json.decode(line)["seconds"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
