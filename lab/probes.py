"""Sends requests to whoami servers, without a process for each request.

The functions block and use the network namespace of the thread that calls them; see netns.run_in.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

REQUEST = b"GET / HTTP/1.1\r\nHost: whoami\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: close by reset. Otherwise the server's TIME_WAIT would refuse the first SYN of a later connection to which
a node's masquerading gives the same port by chance."""
# Each UDP request leaves from a different port, so that it matches no earlier flow in conntrack.
_SOURCE_PORTS = itertools.cycle(range(33000, 60000))
_TRIES = 1000


class NoAnswer(StrEnum):
    """The reason why there was no answer; a reason compares equal to its text."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    GARBLED = "garbled"
    """A server that is not whoami answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a whoami: the pod and its node, the address and port of the request, and the client's address."""

    pod: str
    node: str
    ip: str
    port: int
    client: str
    seconds: float


_decode = msgspec.json.Decoder().decode


def _said(raw: bytes, seconds: float) -> Answer | NoAnswer:
    try:
        said = _decode(raw)
        return Answer(said["pod"], said["node"], said["ip"], said["port"], said["client"], seconds)
    except (ValueError, KeyError, TypeError):
        return NoAnswer.GARBLED


def _outcome(error: OSError) -> NoAnswer:
    if isinstance(error, TimeoutError):
        return NoAnswer.TIMEOUT
    if error.errno in {errno.ECONNREFUSED, errno.ECONNRESET}:
        return NoAnswer.REFUSED
    return NoAnswer.UNREACHABLE


def ask(proto: str, address: str, port: int, timeout: float = 0.5, source: str | None = None) -> Answer | NoAnswer:
    """Send one request by tcp or udp, from the address `source` of the namespace unless it is empty; `timeout` in
    seconds.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_STREAM if proto == "tcp" else socket.SOCK_DGRAM
    start = time.perf_counter()
    with socket.socket(family, kind) as sock:
        sock.settimeout(timeout)
        try:
            if proto == "udp":
                bind_next(sock, source or ("::" if family == socket.AF_INET6 else "0.0.0.0"))
            elif source:
                sock.bind((source, 0))
            sock.connect((address, port))
            raw = _tcp(sock) if proto == "tcp" else _udp(sock)
        except OSError as e:
            return _outcome(e)
    return _said(raw, time.perf_counter() - start) if raw else NoAnswer.REFUSED


def bind_next(sock: socket.socket, address: str, ports: Iterator[int] | None = None) -> None:
    """Bind a socket to the next port that is free on the whole node: a userspace proxy uses thousands of ports.

    Raises OSError.
    """
    for port in itertools.islice(ports or _SOURCE_PORTS, _TRIES):
        try:
            sock.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return
    raise OSError(errno.EADDRINUSE, "no port is free")


def _tcp(sock: socket.socket) -> bytes:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    sock.sendall(REQUEST)
    received = b""
    while not _is_whole(received) and (data := sock.recv(65536)):
        received += data
    return received.partition(b"\r\n\r\n")[2]


def _is_whole(received: bytes) -> bool:
    """Return whether an answer has its Content-Length; an answer without this header ends with its connection."""
    head, end, body = received.partition(b"\r\n\r\n")
    length = _LENGTH.search(head + b"\r\n") if end else None
    return length is not None and len(body) >= int(length[1])


def _udp(sock: socket.socket) -> bytes:
    # Both a dropped outgoing packet and a reject fail here; the wait for the answer distinguishes them.
    with contextlib.suppress(PermissionError):
        sock.send(b"?")
    return sock.recv(2048)


def ask_many(
    proto: str, address: str, port: int, count: int, timeout: float = 0.5, source: str | None = None
) -> list[Answer | NoAnswer]:
    """Send `count` requests, one after the other."""
    return [ask(proto, address, port, timeout, source) for _ in range(count)]


def http_get(address: str, port: int, path: str, timeout: float = 1.0) -> tuple[int, bytes]:
    """Return the status and body of a plain HTTP GET. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        sock.connect((address, port))
        sock.sendall(f"GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        received = b""
        while data := sock.recv(65536):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    parts = head.split(b" ", 2)
    if len(parts) < 2 or not parts[1].isdigit():
        raise ConnectionResetError(f"no HTTP answer from {address}:{port}")
    return int(parts[1]), body
