"""Clients that send requests to Services all the time; each request is recorded. Computes the number of failures, and
the longest time without an answer.

New TCP connections and UDP flows, each from a new port, and open connections and flows. A request has failed if no
answer arrives in time, or an endpoint of another Service answers.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from lab.netns import run_in
from support.live import Front
from support.modes import GUEST
from support.traffic import connected, question

EVERY: Final = 2.0 if GUEST else 0.1
"""Seconds between two requests of a client."""

TIMEOUT: Final = 0.9
"""Timeout in seconds of a new connection or a UDP request: the kernel repeats a lost SYN after one second."""

LOST: Final = 5.0
"""Seconds without an answer after which an open connection has failed: TCP repeats lost packets."""

PORTS: Final = range(33000, 60000)
KINDS: Final = ("new TCP", "long TCP", "new UDP", "long UDP")


class Client(NamedTuple):
    """A client: its place, the frontend of a Service, its kind of requests, and the pods that may answer; `kind` is one
    of KINDS."""

    namespace: str
    place: str
    kind: str
    service: str
    front: Front
    pods: frozenset[str]

    @property
    def lasts(self) -> bool:
        """Return whether the client's connection stays open."""
        return self.kind.startswith("long")

    @property
    def protocol(self) -> str:
        """Return the protocol of the client's requests: tcp or udp."""
        return self.kind.rpartition(" ")[2].lower()

    def __str__(self) -> str:
        return f"{self.kind} from {self.place} to {self.service} {self.front.address}:{self.front.port}"


class Asked(NamedTuple):
    """One request: its beginning and end, in seconds of one clock; the reason of its failure, '' for success."""

    at: float
    over: float
    failure: str = ""


class Figures(NamedTuple):
    """The number of requests and of failed requests; the longest time without an answer for any client, in seconds."""

    asked: int
    failed: int
    gap: float

    def __str__(self) -> str:
        return f"{self.failed} of {self.asked}"


def figures(clients: Iterable[Sequence[Asked]], begin: float, end: float) -> Figures:
    """Return the results of the requests between two times; a gap counts if it overlaps this interval."""
    asked = failed = 0
    gap = 0.0
    for questions in clients:
        within = [each for each in questions if begin <= each.at < end]
        asked += len(within)
        failed += sum(bool(each.failure) for each in within)
        answers = [each.over for each in questions if not each.failure]
        borders = [*(each.at for each in questions[:1]), *answers, end]
        pairs = itertools.pairwise(borders)
        gap = max([gap, *(min(later, end) - max(one, begin) for one, later in pairs)])
    return Figures(asked, failed, gap)


class Crowd:
    """A context manager: runs each client in a thread, from its beginning to its end.

    `ask` sends one request on a socket and returns the pod that answered; it raises OSError.
    """

    def __init__(self, clients: Iterable[Client], ask: Callable[[socket.socket], str] = question) -> None:
        self._ask = ask
        self.asked: Mapping[Client, list[Asked]] = {client: [] for client in clients}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(client,)) for client in self.asked]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def figures(self, kind: str, begin: float, end: float) -> Figures:
        """Return the results of the clients of a kind."""
        return figures([list(asked) for client, asked in self.asked.items() if client.kind == kind], begin, end)

    def failures(self, begin: float, end: float) -> list[str]:
        """Return a line for each client that failed between two times."""
        lines = []
        for client, asked in self.asked.items():
            failed = [each for each in list(asked) if each.failure and begin <= each.at < end]
            if failed:
                first, last = failed[0], failed[-1]
                when = f"{first.at - begin:.2f} to {last.over - begin:.2f} s"
                lines.append(f"{client}: {len(failed)}, {when}: {first.failure}")
        return lines

    def _work(self, client: Client) -> None:
        run_in(client.namespace, lambda: (self._last if client.lasts else self._repeat)(client))

    def _repeat(self, client: Client) -> None:
        # Each client has a different order of ports: a port that is used again within two minutes may belong to a
        # connection from a time without rules, which the kernel tracks without translation for so long.
        ports = itertools.cycle(random.Random(str(client)).sample(PORTS, len(PORTS)))
        while not self._over.wait(EVERY):
            at = time.monotonic()
            try:
                with connected(client.front, TIMEOUT, client.protocol, ports) as link:
                    self._note(client, at, self._ask(link), "")
            except OSError as error:
                self._note(client, at, "", repr(error))

    def _last(self, client: Client) -> None:
        with contextlib.ExitStack() as links:
            link: socket.socket | None = None
            while not self._over.wait(EVERY):
                at = time.monotonic()
                try:
                    if link is None:
                        link = links.enter_context(connected(client.front, TIMEOUT, client.protocol))
                        link.settimeout(LOST if client.protocol == "tcp" else TIMEOUT)
                    self._note(client, at, self._ask(link), "")
                except OSError as error:
                    self._note(client, at, "", repr(error))
                    if client.protocol == "tcp":  # A UDP flow continues after a failure.
                        links.close()
                        link = None

    def _note(self, client: Client, at: float, pod: str, said: str) -> None:
        wrong = "" if pod in client.pods else said if not pod else f"{pod} answered"
        self.asked[client].append(Asked(at, time.monotonic(), wrong))
