"""A client that never stops asking, as a process of its own so that nothing but the network delays it.

    python -m lab.demo.load udp|tcp FIRST_SOURCE_PORT

It runs inside the namespace that it asks from. Commands come on stdin, one a line, and each is answered on stdout:

    aim ADDRESS PORT    ask there from now on
    rest                ask nowhere
    mark                forget who has answered so far

In between it writes a line for everyone (a pod, or "refused" and the like) who answers for the first time since the
mark: {"who": ..., "sent": T, "heard": T}, T being seconds of the machine's monotonic clock, which all processes share.
When stdin ends it writes the sum of it all. UDP questions leave every 0.3 ms, each from a port of its own, whether or
not the ones before were answered: so the time of a change is seen as finely. TCP connections go one after the other.
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
"""Below the ports that the kernel gives out by itself, and below those of probes.py."""


class Record:
    """Who answered, how often, and when first and last."""

    def __init__(self) -> None:
        self.asked = 0
        self.counts: dict[str, int] = {}
        self.last_sent: dict[str, float] = {}
        self._seen: set[str] = set()

    def mark(self) -> None:
        """Report everyone anew."""
        self._seen.clear()

    def add(self, who: str, sent: float, heard: float) -> None:
        """Note an outcome, and write it if it is the first of its kind."""
        self.counts[who] = self.counts.get(who, 0) + 1
        self.last_sent[who] = max(sent, self.last_sent.get(who, sent))
        if who not in self._seen:
            self._seen.add(who)
            write({"who": who, "sent": sent, "heard": heard})

    def total(self) -> dict[str, Any]:
        """The last line."""
        return {"asked": self.asked, "counts": self.counts, "last_sent": self.last_sent}


def write(line: dict[str, Any]) -> None:
    """One line of output."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


class Commands:
    """What comes on stdin."""

    def __init__(self, record: Record) -> None:
        self.target: tuple[str, int] | None = None
        self.ended = False
        self._record = record
        self._waiting = b""

    def read(self) -> None:
        """Do what has come; sets `ended` at the end."""
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
    """Questions by UDP that are on their way."""

    def __init__(self, record: Record, first_port: int) -> None:
        self._record = record
        self._ports = itertools.cycle([*range(first_port, LAST_SOURCE_PORT), *range(1100, first_port)])
        self._sent: dict[socket.socket, float] = {}
        self._order: deque[socket.socket] = deque()

    def sockets(self) -> list[socket.socket]:
        """Those that wait for an answer."""
        return list(self._sent)

    def ask(self, address: str, port: int) -> None:
        """Send one question."""
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
            # A port in use says nothing of the Service; a way that is refused at once does.
            if e.errno != errno.EADDRINUSE:
                self._record.asked += 1
                self._record.add("unreachable", sent, time.monotonic())
            return
        self._record.asked += 1
        self._sent[sock] = sent
        self._order.append(sock)

    def hear(self, sock: socket.socket) -> None:
        """Take the answer that has come."""
        try:
            who = str(json.loads(sock.recv(2048))["pod"])
        except OSError:
            who = NoAnswer.REFUSED.value
        except (ValueError, KeyError):
            who = NoAnswer.GARBLED.value
        self._record.add(who, self._sent.pop(sock), time.monotonic())
        sock.close()

    def give_up(self, patience: float) -> None:
        """Close those that have waited too long."""
        before = time.monotonic() - patience
        while self._order and (self._order[0] not in self._sent or self._sent[self._order[0]] < before):
            sock = self._order.popleft()
            if sock in self._sent:
                self._record.add(NoAnswer.TIMEOUT.value, self._sent.pop(sock), time.monotonic())
                sock.close()


def flood(record: Record, first_port: int) -> None:
    """Ask by UDP until stdin ends."""
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
    """Ask by TCP until stdin ends."""
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
    """Ask as the arguments say."""
    record = Record()
    if sys.argv[1] == "udp":
        flood(record, int(sys.argv[2]))
    else:
        connect(record)
    write({"total": record.total()})


if __name__ == "__main__":
    main()
