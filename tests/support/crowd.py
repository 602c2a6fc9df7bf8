"""Crowds of UDP clients, each with a constant source port: a client that gets no more answers is lost.

One thread sends the requests of all clients in turn and receives the answers, so a thousand clients send some thousand
datagrams a second. A client is lost if it gets no answers to its requests, like real clients whose flow has a wrong
translation in connection tracking."""

from __future__ import annotations

import errno
import json
import select
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from lab.netns import run_in
from support.live import Front, Live

EACH = 0.25
"""Seconds between two requests of a client."""


class Seen(NamedTuple):
    """The last answer to a client: a pod's name or 'refused', and its time (monotonic seconds)."""

    what: str
    when: float


class Crowd:
    """A context manager: `count` clients of each (place, front), which send requests until its end."""

    def __init__(self, live: Live, ways: Sequence[tuple[str, Front]], count: int) -> None:
        self._live = live
        self._ways = ways
        self._count = count
        self._seen: dict[int, Seen] = {}
        self._who: dict[int, str] = {}
        self._fronts: dict[int, Front] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="crowd")

    def __enter__(self) -> Self:
        for place, front in self._ways:
            namespace = self._live.cluster.namespace_of(place)
            for sock in run_in(namespace, partial(_clients, front, self._count)):
                self._sockets[sock.fileno()] = sock
                self._fronts[sock.fileno()] = front
                self._who[sock.fileno()] = f"{place} port {sock.getsockname()[1]} to {front.address}:{front.port}"
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for sock in self._sockets.values():
            sock.close()

    async def all_notice(self, *what: str, among: Sequence[Front] | None = None) -> None:
        """Wait until every client (of some fronts) has received one of these answers after this call.

        Fail with the list of clients without such an answer."""
        began = time.monotonic()
        asked = [fd for fd, front in self._fronts.items() if among is None or front in among]

        async def waiting() -> str:
            late = [self._who[fd] for fd in asked if not self._noticed(fd, what, began)]
            return f"{len(late)} of {len(asked)} clients never noticed {what}: {late[:5]}" if late else ""

        await self._live.eventually(waiting)

    async def nobody_is_answered(self) -> None:
        """Wait until every client has sent a request after the last answer. Refusals do not count: ICMP has a rate."""

        def quiet() -> bool:
            answers = [seen.when for seen in self._seen.values() if seen.what != "refused"]
            return time.monotonic() - max(answers, default=0.0) > 1.5 * EACH

        await self._live.until(quiet, "no client is answered")

    def _noticed(self, fd: int, what: Sequence[str], since: float) -> bool:
        seen = self._seen.get(fd)
        return seen is not None and seen.what in what and seen.when >= since

    def _ask(self) -> None:
        poll = select.epoll()
        for fd in self._sockets:
            poll.register(fd, select.EPOLLIN)
        while not self._over.is_set():
            began = time.monotonic()
            for number, sock in enumerate(self._sockets.values(), 1):
                self._send(sock)
                self._receive(poll, 0)
                due = began + EACH * number / len(self._sockets)  # requests are spread evenly
                while (left := due - time.monotonic()) > 0:
                    self._receive(poll, left)
        poll.close()

    def _send(self, sock: socket.socket) -> None:
        try:
            sock.send(b"?")
        except OSError as error:
            self._note(sock.fileno(), error)

    def _receive(self, poll: select.epoll, timeout: float) -> None:
        for fd, _ in poll.poll(timeout):
            try:
                answer = json.loads(self._sockets[fd].recv(2048))
                self._seen[fd] = Seen(str(answer["pod"]), time.monotonic())
            except OSError as error:
                self._note(fd, error)

    def _note(self, fd: int, error: OSError) -> None:
        if error.errno == errno.ECONNREFUSED:
            self._seen[fd] = Seen("refused", time.monotonic())


def _clients(front: Front, count: int) -> list[socket.socket]:
    return [_client(front) for _ in range(count)]


def _client(front: Front) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in front.address else socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.connect(front)
    return sock
