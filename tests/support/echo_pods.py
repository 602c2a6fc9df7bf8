"""Answers requests on port 8080 of several addresses with the request's destination address, by TCP and UDP."""

from __future__ import annotations

import selectors
import socket
import sys


def main() -> None:
    """Serve until the process is killed."""
    ready = selectors.DefaultSelector()
    for address in sys.argv[1:]:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            made = socket.socket(socket.AF_INET, kind)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, 8080))
            if kind == socket.SOCK_STREAM:
                made.listen(64)
            ready.register(made, selectors.EVENT_READ, address)
    print("ready", flush=True)
    while True:
        for key, _ in ready.select():
            serve(ready, key)


def serve(ready: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Accept a connection, or answer one request."""
    made = key.fileobj
    assert isinstance(made, socket.socket)
    if made.type == socket.SOCK_DGRAM:
        made.sendto(key.data.encode(), made.recvfrom(64)[1])
    elif made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        ready.register(made.accept()[0], selectors.EVENT_READ, key.data)
    elif made.recv(64):
        made.sendall(key.data.encode())
    else:
        ready.unregister(made)
        made.close()


main()
