"""The pods of a measurement, in one process: answers each probe with the probe's destination address and the time.

As a program it executes JSON commands (companion.py) in a separate namespace.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.companion import say
from bench.network import configure
from bench.worker import die_with_parent, enter_new_namespace

PORT = 8080
SINK_PORT = 8081
ECHO_PORT = 8082
CHECK_PORT = 8083
DRAIN_PORT = 8084
_BACKLOG = 4096


class Answering:
    """Sockets that answer 'ADDRESS NANOSECONDS' on UDP and TCP."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.kept: list[socket.socket] = []

    def add(self, address: str) -> None:
        """Answer on an address, or on all addresses ('')."""
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        datagrams.bind((address, PORT))
        datagrams.setblocking(False)
        self._selector.register(datagrams, selectors.EVENT_READ, lambda: _datagram(datagrams, address))
        connections = socket.create_server((address, PORT), backlog=_BACKLOG)
        connections.setblocking(False)
        self._selector.register(connections, selectors.EVENT_READ, lambda: _connection(connections, address))


def _datagram(listening: socket.socket, address: str) -> None:
    _, peer = listening.recvfrom(64)
    listening.sendto(f"{address} {time.monotonic_ns()}".encode(), peer)


def _connection(listening: socket.socket, address: str) -> None:
    link, _ = listening.accept()
    now = time.monotonic_ns()
    with link, contextlib.suppress(ConnectionError):  # a probe that already has an answer has closed its socket
        link.send(f"{address} {now}".encode())


def _accept_and_drop(listening: socket.socket) -> None:
    """Accept connections and close them at once, until the process ends."""
    while True:
        listening.accept()[0].close()


def _sink(listening: socket.socket) -> None:
    """Receive all bytes, one stream after the other; the kernel discards them (MSG_TRUNC, tcp(7))."""
    room = bytearray(4 << 20)
    while True:
        link, _ = listening.accept()
        with link:
            while link.recv_into(room, len(room), socket.MSG_TRUNC):
                pass


def _drain(listening: socket.socket) -> None:
    """Receive all bytes on any number of streams at once."""
    selector, room = selectors.DefaultSelector(), bytearray(4 << 20)
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            link: socket.socket = key.fileobj  # type: ignore[assignment]
            if link is listening:
                selector.register(listening.accept()[0], selectors.EVENT_READ)
                continue
            try:
                if link.recv_into(room, len(room), socket.MSG_TRUNC):
                    continue
            except ConnectionError:
                pass
            selector.unregister(link)
            link.close()


def _drop() -> socket.socket:
    """Return a socket for datagrams that no process reads: the kernel drops them after their arrival."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    datagrams.bind(("", DRAIN_PORT))
    return datagrams


def _arrived() -> int:
    """Return the number of datagrams that arrived at a socket of this namespace, read or dropped."""
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Udp:")]
    found = dict(zip(lines[0], lines[1], strict=True))
    return int(found["InDatagrams"]) + int(found["RcvbufErrors"])


def _echo(listening: socket.socket) -> None:
    """Send received bytes back, on any number of connections."""
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            link: socket.socket = key.fileobj  # type: ignore[assignment]
            if link is listening:
                link = listening.accept()[0]
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(link, selectors.EVENT_READ)
                continue
            try:
                asked = link.recv(1 << 16)
                if asked:
                    link.sendall(asked)
                    continue
            except ConnectionError:
                pass
            selector.unregister(link)
            link.close()


def _check(listening: socket.socket) -> None:
    """Answer each stream, after its end, with its length and checksum."""
    room = memoryview(bytearray(1 << 20))
    while True:
        link, _ = listening.accept()
        with link:
            length = checksum = 0
            while count := link.recv_into(room):
                length, checksum = length + count, zlib.crc32(room[:count], checksum)
            link.sendall(f"{length} {checksum}".encode())


_WORKS = {
    PORT: _accept_and_drop,
    SINK_PORT: _sink,
    ECHO_PORT: _echo,
    CHECK_PORT: _check,
    DRAIN_PORT: _drain,
}


def main() -> None:
    """Execute commands until the parent has ended."""
    die_with_parent()
    enter_new_namespace()
    selector = selectors.DefaultSelector()
    answering = Answering(selector)

    def command() -> None:
        line = sys.stdin.buffer.readline()
        if not line:
            sys.exit(0)
        _obey(msgspec.json.decode(line), answering)

    selector.register(sys.stdin, selectors.EVENT_READ, command)
    say()
    while True:
        for key, _ in selector.select():
            work: Callable[[], None] = key.data
            work()


def _obey(command: dict[str, Any], answering: Answering) -> None:
    match command["do"]:
        case "configure":
            configure(command)
        case "answer":
            for address in command["addresses"]:
                answering.add(address)
        case "nft":
            subprocess.run(["nft", "-f", "-"], input=command["text"], text=True, check=True)
        case "arrived":
            say(count=_arrived())
            return
        case "accept":
            answering.kept.append(_drop())
            for port, work in _WORKS.items():
                listening = socket.create_server(("", port), backlog=_BACKLOG)
                threading.Thread(target=work, args=(listening,), daemon=True).start()
    say()


if __name__ == "__main__":
    main()
