"""The client of a measurement, as one process: probes until a new endpoint answers, connects, streams.

As a program it executes JSON commands (companion.py) in a separate namespace.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from bench import bursts
from bench.companion import say
from bench.network import configure
from bench.worker import die_with_parent, enter_new_namespace

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, so that no port waits
_PAUSE = 50e-6  # seconds between probes, about 100 us in all
_LATE_CONNECTION = 0.5  # seconds
_LATE, _LATE_PAUSE = 0.05, 1e-3  # seconds after which it probes less often, because flows would accumulate


class Landing:
    """The time of the first packet at the expected endpoint, by the endpoint's clock (ns), and the number of probes."""

    def __init__(self, expected: str) -> None:
        self.expected = expected
        self.at = 0
        self.probes = 0

    def take(self, answer: bytes) -> None:
        """Process an answer of pods.py."""
        address, _, at = answer.decode().partition(" ")
        if address == self.expected and (not self.at or int(at) < self.at):
            self.at = int(at)


def probe_udp(target: tuple[str, int], landing: Landing, limit: float) -> None:
    """Send datagrams, each a new flow, until the expected endpoint answers one."""
    began, waiting = time.monotonic(), list[socket.socket]()
    try:
        while not landing.at and (spent := time.monotonic() - began) < limit:
            probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            probe.setblocking(False)
            with contextlib.suppress(OSError):  # no endpoint yet: refused
                probe.connect(target)
                probe.send(b"?")
            landing.probes += 1
            waiting.append(probe)
            time.sleep(_PAUSE if spent < _LATE else _LATE_PAUSE)
            waiting = [link for link in waiting if not _answered(link, landing)]
            while len(waiting) > 200:
                waiting.pop(0).close()
    finally:
        for link in waiting:
            link.close()


def _answered(link: socket.socket, landing: Landing) -> bool:
    try:
        landing.take(link.recv(64))
    except BlockingIOError:
        return False
    except OSError:
        pass
    link.close()
    return True


def probe_tcp(target: tuple[str, int], landing: Landing, limit: float) -> None:
    """Connect repeatedly until the expected endpoint accepts."""
    began = time.monotonic()
    while not landing.at and (spent := time.monotonic() - began) < limit:
        landing.probes += 1
        with contextlib.suppress(OSError), socket.create_connection(target, timeout=1) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            landing.take(link.recv(64))
        time.sleep(_PAUSE if spent < _LATE else _LATE_PAUSE)


PROBES: dict[str, Callable[[tuple[str, int], Landing, float], None]] = {"UDP": probe_udp, "TCP": probe_tcp}


def connect_times(target: tuple[str, int], count: int) -> list[float]:
    """Return the seconds to open each of `count` connections."""
    found = []
    for _ in range(count):
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        began = time.perf_counter()
        link.connect(target)
        found.append(time.perf_counter() - began)
        link.close()
    return found


def knock(target: tuple[str, int], rate: int, seconds: float, patience: float) -> dict[str, float]:
    """Begin connections at a rate for some seconds; return the numbers of failed and of late connections, and the
    longest time.

    A connection fails if it is refused, or not established within `patience` seconds; after half a second it counts as
    late.
    """
    selector, began, waiting = selectors.DefaultSelector(), time.perf_counter(), dict[socket.socket, float]()
    begun, failed, taken = 0, 0, list[float]()
    while (now := time.perf_counter()) < began + seconds or waiting:
        while begun < min(now - began, seconds) * rate:
            link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            link.setblocking(False)
            link.connect_ex(target)
            selector.register(link, selectors.EVENT_WRITE)
            waiting[link], begun = time.perf_counter(), begun + 1
        over = [link for link, since in waiting.items() if now - since > patience]
        ready = [key.fileobj for key, _ in selector.select(0.5 / rate)]
        for link in {*over, *ready}:  # type: ignore[assignment]
            spent = time.perf_counter() - waiting.pop(link)
            if link in ready and not link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                taken.append(spent)
            else:
                failed += 1
            selector.unregister(link)
            link.close()
    late = sum(spent >= _LATE_CONNECTION for spent in taken)
    return {"failed": failed, "delayed": late, "longest": max(taken), "count": begun}


def alternating(groups: list[list[str]], ports: list[int], count: int) -> list[list[float]]:
    """Return the seconds to open connections to several groups of addresses, one to each group in turn.

    The address in a group is random, so that each of many endpoints gets as few connections as from a Service's
    clients.
    """
    choose = random.Random(1).choice
    turns = [
        [connect_times((choose(addresses), port), 1)[0] for addresses, port in zip(groups, ports, strict=True)]
        for _ in range(count)
    ]
    return [list(taken) for taken in zip(*turns, strict=True)]


def throughput(target: tuple[str, int], seconds: float) -> float:
    """Return the bytes per second of one stream."""
    chunk = memoryview(bytes(1 << 18))
    with socket.create_connection(target, timeout=5) as link:
        sent, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            sent += link.send(chunk)
    return sent / spent


class Lasting:
    """Persistent connections, used for several measurements."""

    def __init__(self, target: tuple[str, int], connections: int, protocol: str) -> None:
        kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
        self._links = [socket.socket(socket.AF_INET, kind) for _ in range(connections)]
        for link in self._links:
            link.connect(target)

    def stream(self, seconds: float) -> float:
        """Send as much as possible on all connections; return the bytes per second."""
        chunk, sent = memoryview(bytes(1 << 17)), 0
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                link.setblocking(False)
                selector.register(link, selectors.EVENT_WRITE)
            began = time.perf_counter()
            while (spent := time.perf_counter() - began) < seconds:
                for key, _ in selector.select(1):
                    link = key.fileobj  # type: ignore[assignment]
                    with contextlib.suppress(BlockingIOError):
                        sent += link.send(chunk)
        return sent / spent

    def datagrams(self, seconds: float, size: int) -> None:
        """Send small datagrams on the sockets in turn."""
        payload, sends = bytes(size), [link.send for link in self._links]
        sends *= max(1, 64 // len(sends))
        over = time.perf_counter() + seconds
        while time.perf_counter() < over:
            for send in sends:
                with contextlib.suppress(ConnectionError):
                    send(payload)

    def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            link.close()


def echoes(target: tuple[str, int], connections: int, seconds: float, size: int) -> list[float]:
    """Return the seconds of each request, with one outstanding request on each persistent connection."""
    selector, found = selectors.DefaultSelector(), list[float]()
    request, sent = bytes(size), dict[socket.socket, float]()
    links = [socket.create_connection(target, timeout=5) for _ in range(connections)]
    for link in links:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(link, selectors.EVENT_READ)
        sent[link] = time.perf_counter()
        link.send(request)
    over = time.perf_counter() + seconds
    while (now := time.perf_counter()) < over:
        for key, _ in selector.select(1):
            link = key.fileobj  # type: ignore[assignment]
            if len(link.recv(size)) != size:
                raise ConnectionError("an answer came in pieces")
            now = time.perf_counter()
            found.append(now - sent[link])
            sent[link] = now
            link.send(request)
    for link in links:
        link.close()
    return found


def requests(target: tuple[str, int], count: int, size: int) -> list[float]:
    """Return the seconds of each request on a new connection, one after the other."""
    found, request = list[float](), bytes(size)
    for _ in range(count):
        began = time.perf_counter()
        with socket.create_connection(target, timeout=5) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            link.send(request)
            link.recv(size)
            found.append(time.perf_counter() - began)
    return found


def checked(target: tuple[str, int], size: int) -> float:
    """Return the bytes per second of a stream; raise if its length or checksum differs from the sent data."""
    block = random.Random(1).randbytes(1_000_003)
    twice, length, checksum = memoryview(block * 2), 0, 0
    began = time.perf_counter()
    with socket.create_connection(target, timeout=60) as link:
        while length < size:
            at = length % len(block)
            chunk = twice[at : at + min(1 << 18, size - length)]
            count = link.send(chunk)
            length, checksum = length + count, zlib.crc32(chunk[:count], checksum)
        link.shutdown(socket.SHUT_WR)
        answer = link.recv(100).decode()
    if answer != f"{length} {checksum}":
        raise ValueError(f"sent {length} bytes with checksum {checksum}, but {answer} arrived")
    return length / (time.perf_counter() - began)


_lasting: dict[str, Lasting] = {}


def _obey(command: dict[str, Any]) -> dict[str, Any]:  # noqa: C901 - a case for each command
    target = (command.get("address", ""), command.get("port", 0))
    match command["do"]:
        case "configure":
            configure(command)
        case "probe":
            landing = Landing(command["expected"])
            PROBES[command["protocol"]](target, landing, command["limit"])
            return {"at": landing.at, "probes": landing.probes}
        case "connect":
            began = time.perf_counter()
            seconds = connect_times(target, command["count"])
            return {"seconds": seconds, "took": time.perf_counter() - began}
        case "knock":
            return knock(target, command["rate"], command["limit"], command["patience"])
        case "bursts":
            return {
                "seconds": bursts.alternating(command["source"], command["groups"], command["ports"], command["count"])
            }
        case "alternate":
            return {"seconds": alternating(command["groups"], command["ports"], command["count"])}
        case "echoes":
            return {"seconds": echoes(target, command["connections"], command["limit"], command["size"])}
        case "requests":
            return {"seconds": requests(target, command["count"], command["size"])}
        case "checked":
            return {"rate": checked(target, command["size"])}
        case "last":
            _lasting[command["name"]] = Lasting(target, command["connections"], command["protocol"])
        case "streams":
            return {"rate": _lasting[command["name"]].stream(command["seconds"])}
        case "datagrams":
            _lasting[command["name"]].datagrams(command["seconds"], command["size"])
        case "end":
            _lasting.pop(command["name"]).close()
        case "stream":
            return {"rate": throughput(target, command["seconds"])}
    return {}


def main() -> None:
    """Execute commands until the parent has ended."""
    die_with_parent()
    enter_new_namespace()
    say()
    for line in sys.stdin.buffer:
        say(**_obey(msgspec.json.decode(line)))


if __name__ == "__main__":
    main()
