"""Questions to whoami servers: sockets and waiting, without a process for each question.

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
a node's masquerading happens to give the same port."""
# Each UDP question leaves from a port of its own, so that no earlier flow in conntrack is met again.
_SOURCE_PORTS = itertools.cycle(range(33000, 60000))
_TRIES = 1000


class NoAnswer(StrEnum):
    """Why there was no answer; compares equal to the plain words."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    GARBLED = "garbled"
    """Something answered that is no whoami."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a whoami said: the pod and its node, the address and port that it was asked on, and the client it saw."""

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
    """One question by tcp or udp, from an address of the namespace when `source` names one; `timeout` in seconds."""
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
    """Take the next port that nobody else on the node has: a proxy that carries bytes has thousands of them.

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
    """Whether an answer has the length that it says; one that says none ends with its connection."""
    head, end, body = received.partition(b"\r\n\r\n")
    length = _LENGTH.search(head + b"\r\n") if end else None
    return length is not None and len(body) >= int(length[1])


def _udp(sock: socket.socket) -> bytes:
    # A drop on the way out fails here, as a reject does; which of them it is, the wait for the answer tells.
    with contextlib.suppress(PermissionError):
        sock.send(b"?")
    return sock.recv(2048)


def ask_many(
    proto: str, address: str, port: int, count: int, timeout: float = 0.5, source: str | None = None
) -> list[Answer | NoAnswer]:
    """`count` questions, one after the other."""
    return [ask(proto, address, port, timeout, source) for _ in range(count)]


def http_get(address: str, port: int, path: str, timeout: float = 1.0) -> tuple[int, bytes]:
    """(status, body) of a plain HTTP GET. Raises OSError."""
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
