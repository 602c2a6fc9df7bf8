"""Traffic without pause: new TCP connections and UDP requests, and long-lived connections, each counted.

A connection fails if it is refused, ends early, or if the client had to send its SYN twice: the first SYN was dropped,
even if the kernel's second attempt hides it. Clients close by reset, so that no TIME_WAIT makes a server take a new
connection for an old one.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from lab.netns import run_in
from lab.probes import bind_next
from support.live import Front, Live
from support.modes import GUEST

REQUEST = b"GET / HTTP/1.1\r\nHost: whoami\r\n\r\n"
PAUSE = 0.1 if GUEST else 0.005
"""Seconds between two requests of a stream: about 150 per second from each stream, less on one slow CPU."""
FLOW = 15 if GUEST else 60
"""Requests of each stream that are enough to show failures."""
GIVE_UP = 10.0
TOTAL_RETRANS = 100
"""Offset of tcpi_total_retrans in struct tcp_info of linux/tcp.h."""


class Stream(NamedTuple):
    """A stream of requests: client, address and protocol;

    `kind` is tcp, udp, or lasting for repeated requests on one connection.
    """

    place: str
    kind: str
    front: Front

    def __str__(self) -> str:
        return f"{self.kind} from {self.place} to {self.front.address}:{self.front.port}"


DUAL = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}


def streams(live: Live, name: str = "web", families: tuple[str, ...] = ("IPv4", "IPv6")) -> list[Stream]:
    """All kinds of traffic to a NodePort Service."""
    found = []
    for family in families:
        cluster, nodeport = live.front(name, "cluster", family), live.front(name, "nodeport", family)
        found += [
            Stream("outside", "tcp", nodeport),
            Stream("pod", "tcp", cluster),
            Stream("outside", "udp", nodeport),
            Stream("pod", "udp", cluster),
            Stream("outside", "lasting", nodeport),
            Stream("pod", "lasting", cluster),
        ]
    return [*found, Stream("node", "tcp", live.front(name))]


class _Said(msgspec.Struct):
    pod: str


_decode = msgspec.json.Decoder(_Said).decode


class Traffic:
    """An async context manager; `failures` has a line for each failure, `asked` counts requests by stream.

    Its start waits until each stream has sent the number of requests in `first`.
    """

    def __init__(self, live: Live, *streams: Stream, first: int = FLOW) -> None:
        self.failures: list[str] = []
        self.asked = dict.fromkeys(streams, 0)
        self.pods: dict[Stream, set[str]] = {stream: set() for stream in streams}
        self._live = live
        self._first = first
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._began = time.monotonic()

    async def __aenter__(self) -> Self:
        for stream in self.asked:
            namespace = self._live.cluster.namespace_of(stream.place)
            work = self._last if stream.kind == "lasting" else self._repeat
            thread = threading.Thread(target=self._guard, args=(namespace, work, stream), name=str(stream))
            self._threads.append(thread)
            thread.start()
        try:
            await self.flow(self._first)
        except BaseException:
            self._over.set()  # No other code ends the threads, and a process does not end before its threads.
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    async def flow(self, count: int = FLOW) -> None:
        """Wait until every stream has sent this number of further requests."""
        wanted = {stream: asked + count for stream, asked in self.asked.items()}

        def done() -> bool:
            return bool(self.failures) or all(self.asked[stream] >= wanted[stream] for stream in wanted)

        await self._live.until(done, f"{count} more questions of each stream: {self.asked}, want {wanted}")

    def clear(self) -> None:
        """Forget the pods that have answered."""
        for pods in self.pods.values():
            pods.clear()

    def _guard(self, namespace: str, work: Callable[[Stream], None], stream: Stream) -> None:
        try:
            run_in(namespace, lambda: work(stream))
        except Exception as error:
            self._fail(stream, error)

    def _fail(self, stream: Stream, why: object) -> None:
        if len(self.failures) < 50:
            self.failures.append(f"{time.monotonic() - self._began:.3f} s: {stream}: {why!r}")

    def _repeat(self, stream: Stream) -> None:
        while not self._over.is_set():
            try:
                self.pods[stream].add(_once(stream.front, stream.kind))
            except OSError as error:
                self._fail(stream, error)
            self.asked[stream] += 1
            time.sleep(PAUSE)

    def _last(self, stream: Stream) -> None:
        with connected(stream.front) as sock:
            while not self._over.is_set():
                self.pods[stream].add(question(sock))
                self.asked[stream] += 1
                time.sleep(PAUSE)


def connected(
    front: Front, patience: float = GIVE_UP, protocol: str = "tcp", ports: Iterator[int] | None = None
) -> socket.socket:
    """Return a connection, from the next of its `ports` if there are any; a TCP connection must need only one SYN.

    `patience` is in seconds. Raises OSError.
    """
    family = socket.AF_INET6 if ":" in front.address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM)
    try:
        sock.settimeout(patience)
        if protocol == "tcp":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if ports is not None:
            bind_next(sock, "::" if family == socket.AF_INET6 else "0.0.0.0", ports)
        sock.connect(front)
        if protocol == "tcp":
            check_first_syn(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_first_syn(sock: socket.socket) -> None:
    """Raise ConnectionError if a connection needed more than one SYN."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TOTAL_RETRANS + 4)
    if int.from_bytes(info[TOTAL_RETRANS:], "little"):
        raise ConnectionError("the first SYN was lost")


def _once(front: Front, protocol: str) -> str:
    with connected(front, protocol=protocol) as sock:
        return question(sock)


def question(sock: socket.socket) -> str:
    """Send one request and return the pod that answered. Raises OSError."""
    sock.sendall(REQUEST)
    received = b""
    while not received.endswith(b"}\n"):
        data = sock.recv(4096)
        if not data:
            raise ConnectionError("ended early")
        received += data
    return _decode(received[received.find(b"{") :]).pod


def kept(traffic: Traffic) -> bool:
    """Return whether every lasting connection has reached only one pod."""
    return all(len(pods) == 1 for stream, pods in traffic.pods.items() if stream.kind == "lasting")
