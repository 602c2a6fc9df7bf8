"""Answers for all pods of a cluster over HTTP and UDP with the name of the pod and the address of the client.

The answer to GET /echo?msg=TEXT, and to the datagram "echo TEXT", is TEXT.

Runs as a separate process with only the standard library (no imports from this package). Reads commands from stdin, one
JSON object per line, and answers each on stdout:

    {"id": 1, "do": "open", "uid": "4f1", "netns": "kd-x-pod1", "pod": "web-abcde", "node": "node-a",
     "ports": [["TCP", 3000]]}
    {"id": 2, "do": "close", "uid": "4f1"}

(The first is one line.) Sockets are opened inside the pod's network namespace, which several pods may share, and this
process serves them. The process ends when its stdin ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
IPV6_RECVPKTINFO, IPV6_PKTINFO = 49, 50  # linux/in6.h
IN6_PKTINFO = struct.Struct("16sI")
MAX_REQUEST = 16384
ECHO, ECHO_DATAGRAM = b"/echo?msg=", b"echo "

_libc = ctypes.CDLL(None, use_errno=True)


def plain(address: str) -> str:
    """Return an address without the prefix ::ffff: of IPv4 addresses on a dual-stack socket."""
    return address.removeprefix("::ffff:").partition("%")[0]


def open_inside(netns: str, kinds: list[tuple[str, int]]) -> list[socket.socket]:
    """Listening sockets inside a network namespace, one for each (protocol, port)."""
    opened: list[socket.socket] = []
    failure: list[OSError] = []

    def work() -> None:
        try:
            fd = os.open(Path("/run/netns", netns), os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _libc.setns(fd, CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"entering {netns}")
            finally:
                os.close(fd)
            for protocol, port in kinds:
                opened.append(listener(protocol, port))
        except OSError as e:
            failure.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failure:
        for sock in opened:
            sock.close()
        raise failure[0]
    return opened


def listener(protocol: str, port: int) -> socket.socket:
    """A dual-stack socket that waits for connections or datagrams on every address."""
    kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
    sock = socket.socket(socket.AF_INET6, kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if protocol == "UDP":
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVPKTINFO, 1)
        sock.bind(("::", port))
        if protocol == "TCP":
            sock.listen(256)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class Connection:
    """One TCP connection: answers each HTTP request, and stays open unless the client asks to close it."""

    def __init__(self, sock: socket.socket, said: bytes) -> None:
        self.sock = sock
        self.received = b""
        self.said = said

    def on_readable(self) -> bool:
        """Read and answer a request; return whether the connection stays open."""
        try:
            data = self.sock.recv(65536)
            if not data:
                return False
            self.received += data
            while b"\r\n\r\n" in self.received:
                request, _, self.received = self.received.partition(b"\r\n\r\n")
                stays = b"HTTP/1.0" not in request and b"connection: close" not in request.lower()
                ends = b"keep-alive" if stays else b"close"
                head = (
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: %s\r\n\r\n"
                )
                target = request.split(b" ", 2)[1:2]
                body = target[0].removeprefix(ECHO) if target and target[0].startswith(ECHO) else self.said
                self.sock.sendall(head % (len(body), ends) + body)
                if not stays:
                    return False
        except OSError:
            return False
        return len(self.received) < MAX_REQUEST


class Whoami:
    """All sockets of all pods in one loop."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.sockets: dict[str, set[socket.socket]] = {}

    def open(self, uid: str, netns: str, pod: str, node: str, ports: list[tuple[str, int]]) -> None:
        """Open the sockets of a pod, and answer requests to it."""
        self.sockets.setdefault(uid, set())
        for (protocol, port), sock in zip(ports, open_inside(netns, ports), strict=True):
            who = {"pod": pod, "node": node, "proto": protocol.lower(), "port": port}
            handler = self._accept if protocol == "TCP" else self._datagram
            self._register(uid, sock, functools.partial(handler, uid, sock, who))

    def close(self, uid: str) -> None:
        """Stop answering for a pod, and end its connections."""
        for sock in list(self.sockets.pop(uid, ())):
            self.selector.unregister(sock)
            sock.close()

    def _register(self, uid: str, sock: socket.socket, handler: Callable[[], None]) -> None:
        self.sockets[uid].add(sock)
        self.selector.register(sock, selectors.EVENT_READ, handler)

    def _drop(self, uid: str, sock: socket.socket) -> None:
        self.sockets.get(uid, set()).discard(sock)
        self.selector.unregister(sock)
        sock.close()

    def _accept(self, uid: str, sock: socket.socket, who: dict[str, Any]) -> None:
        try:
            accepted, peer = sock.accept()
        except OSError:
            return
        accepted.setblocking(True)
        accepted.settimeout(1.0)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = who | {"ip": plain(accepted.getsockname()[0]), "client": plain(peer[0]), "clientPort": peer[1]}
        connection = Connection(accepted, json.dumps(said).encode() + b"\n")

        def readable() -> None:
            if not connection.on_readable():
                self._drop(uid, accepted)

        self._register(uid, accepted, readable)

    def _datagram(self, _uid: str, sock: socket.socket, who: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            data, ancillary, _flags, peer = sock.recvmsg(65536, socket.CMSG_SPACE(IN6_PKTINFO.size))
            asked = next((c[2] for c in ancillary if c[1] == IPV6_PKTINFO), b"")
            address = asked[:16]
            here = plain(socket.inet_ntop(socket.AF_INET6, address)) if address else ""
            said = who | {"ip": here, "client": plain(peer[0]), "clientPort": peer[1]}
            # The answer to a datagram leaves from the address that the client sent to, not from the pod's first
            # address.
            source = [(socket.IPPROTO_IPV6, IPV6_PKTINFO, IN6_PKTINFO.pack(address, 0))] if address else []
            is_echo = data.startswith(ECHO_DATAGRAM)
            answer = data.removeprefix(ECHO_DATAGRAM) if is_echo else json.dumps(said).encode() + b"\n"
            sock.sendmsg([answer], source, 0, peer)

    def command(self, line: bytes) -> bytes:
        """Carry out the command in a line; return the answer."""
        asked = json.loads(line)
        answer: dict[str, Any] = {"id": asked["id"]}
        try:
            if asked["do"] == "open":
                ports = [(str(protocol), int(port)) for protocol, port in asked["ports"]]
                self.open(asked["uid"], asked["netns"], asked["pod"], asked["node"], ports)
            else:
                self.close(asked["uid"])
        except OSError as e:
            answer["error"] = str(e)
        return json.dumps(answer).encode() + b"\n"

    def run(self, commands: int, answers: int) -> None:
        """Serve until the descriptor of commands ends."""
        self.selector.register(commands, selectors.EVENT_READ, None)
        waiting = b""
        while True:
            for key, _ in self.selector.select():
                if key.data is not None:
                    key.data()
                    continue
                data = os.read(commands, 65536)
                if not data:
                    return
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    os.write(answers, self.command(line))
                # A command may have closed sockets that this round of events still contains: poll again.
                break


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        Whoami().run(sys.stdin.fileno(), sys.stdout.fileno())
