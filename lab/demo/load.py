"""A client that sends requests without pause, in a separate process, so that only the network delays it.

    python -m lab.demo.load udp|tcp FIRST_SOURCE_PORT

It runs inside the client's namespace. It reads commands from stdin, one per line, and answers each on stdout:

    aim ADDRESS PORT    send all further requests there
    rest                send no requests
    mark                forget the answers so far

Between commands it writes a line for the first answer of each kind (a pod's name, or a failure such as "refused") since
the mark: {"who": ..., "sent": T, "heard": T}, where T is in seconds of the machine's monotonic clock, which all
processes share. When stdin ends, it writes the totals. UDP requests leave every 0.3 ms, each from a different port,
without waiting for earlier answers, so the time of a change is measured to 0.3 ms. TCP connections follow one another.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import select
import socket
import sys
import time
from collections import deque
from typing import Any

from lab.probes import Answer, NoAnswer, ask

UDP_EVERY = 0.0003
UDP_PATIENCE = 0.05
TCP_EVERY = 0.001
TCP_PATIENCE = 1.0
LAST_SOURCE_PORT = 32000
"""Below the kernel's range of ephemeral ports, and below the ports of probes.py."""


class Record:
    """The answers by kind (a pod's name or a failure): their number, and the times of the first and the last."""

    def __init__(self) -> None:
        self.asked = 0
        self.counts: dict[str, int] = {}
        self.last_sent: dict[str, float] = {}
        self._seen: set[str] = set()

    def mark(self) -> None:
        """Report the first answer of each kind again."""
        self._seen.clear()

    def add(self, who: str, sent: float, heard: float) -> None:
        """Record an outcome, and write it if it is the first of its kind."""
        self.counts[who] = self.counts.get(who, 0) + 1
        self.last_sent[who] = max(sent, self.last_sent.get(who, sent))
        if who not in self._seen:
            self._seen.add(who)
            write({"who": who, "sent": sent, "heard": heard})

    def total(self) -> dict[str, Any]:
        """Return the last line, with the totals."""
        return {"asked": self.asked, "counts": self.counts, "last_sent": self.last_sent}


def write(line: dict[str, Any]) -> None:
    """Write one line of output."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


class Commands:
    """Reads commands from stdin."""

    def __init__(self, record: Record) -> None:
        self.target: tuple[str, int] | None = None
        self.ended = False
        self._record = record
        self._waiting = b""

    def read(self) -> None:
        """Carry out the received commands; set `ended` when stdin ends."""
        data = os.read(sys.stdin.fileno(), 4096)
        self.ended = not data
        *lines, self._waiting = (self._waiting + data).split(b"\n")
        for line in lines:
            match line.decode().split():
                case ["aim", address, port]:
                    self.target = (address, int(port))
                case ["rest"]:
                    self.target = None
                case _:
                    self._record.mark()
            write({"done": line.decode()})


class Datagrams:
    """UDP requests without an answer yet."""

    def __init__(self, record: Record, first_port: int) -> None:
        self._record = record
        self._ports = itertools.cycle([*range(first_port, LAST_SOURCE_PORT), *range(1100, first_port)])
        self._sent: dict[socket.socket, float] = {}
        self._order: deque[socket.socket] = deque()

    def sockets(self) -> list[socket.socket]:
        """The sockets that wait for an answer."""
        return list(self._sent)

    def ask(self, address: str, port: int) -> None:
        """Send one request."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sent = time.monotonic()
        try:
            sock.bind(("", next(self._ports)))
            sock.connect((address, port))
            sock.send(b"?")
        except OSError as e:
            sock.close()
            # A port in use is no result about the Service; an error from the route at once is a result.
            if e.errno != errno.EADDRINUSE:
                self._record.asked += 1
                self._record.add("unreachable", sent, time.monotonic())
            return
        self._record.asked += 1
        self._sent[sock] = sent
        self._order.append(sock)

    def hear(self, sock: socket.socket) -> None:
        """Read a received answer."""
        try:
            who = str(json.loads(sock.recv(2048))["pod"])
        except OSError:
            who = NoAnswer.REFUSED.value
        except (ValueError, KeyError):
            who = NoAnswer.GARBLED.value
        self._record.add(who, self._sent.pop(sock), time.monotonic())
        sock.close()

    def give_up(self, patience: float) -> None:
        """Close the sockets that have waited longer than the timeout."""
        before = time.monotonic() - patience
        while self._order and (self._order[0] not in self._sent or self._sent[self._order[0]] < before):
            sock = self._order.popleft()
            if sock in self._sent:
                self._record.add(NoAnswer.TIMEOUT.value, self._sent.pop(sock), time.monotonic())
                sock.close()


def flood(record: Record, first_port: int) -> None:
    """Send UDP requests until stdin ends."""
    commands, datagrams = Commands(record), Datagrams(record, first_port)
    due = time.monotonic()
    while not commands.ended:
        now = time.monotonic()
        if commands.target is not None and now >= due:
            datagrams.ask(*commands.target)
            due = max(due + UDP_EVERY, now)
        wait = max(0.0, due - time.monotonic()) if commands.target is not None else UDP_PATIENCE
        readable, _, _ = select.select([sys.stdin, *datagrams.sockets()], [], [], wait)
        for source in readable:
            if isinstance(source, socket.socket):
                datagrams.hear(source)
            else:
                commands.read()
        datagrams.give_up(UDP_PATIENCE)
    deadline = time.monotonic() + UDP_PATIENCE
    while datagrams.sockets() and time.monotonic() < deadline:
        for source in select.select(datagrams.sockets(), [], [], 0.005)[0]:
            datagrams.hear(source)
    datagrams.give_up(0.0)


def connect(record: Record) -> None:
    """Open TCP connections until stdin ends."""
    commands = Commands(record)
    while not commands.ended:
        wait = TCP_EVERY if commands.target is not None else None
        if select.select([sys.stdin], [], [], wait)[0]:
            commands.read()
        elif commands.target is not None:
            sent = time.monotonic()
            record.asked += 1
            answer = ask("tcp", *commands.target, TCP_PATIENCE)
            who = answer.pod if isinstance(answer, Answer) else answer.value
            record.add(who, sent, time.monotonic())


def main() -> None:
    """Send requests with these arguments."""
    record = Record()
    if sys.argv[1] == "udp":
        flood(record, int(sys.argv[2]))
    else:
        connect(record)
    write({"total": record.total()})


if __name__ == "__main__":
    main()
