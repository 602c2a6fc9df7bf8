"""Endpoints that are slow, full or restarted, and the clients of `unfounded`: one that endpoints drop, and a SYN flood.

`python -m bench.unsteady PID ROLE ADDRESS...` runs in the network namespace of a process, and answers each command
(companion.py) with its counters.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from bench import objects
from bench.companion import say
from bench.pods import PORT
from bench.worker import die_with_parent, enter_namespace

DROPPED: Final = "10.250.0.3"  # the client that the endpoints drop
FLOOD: Final = "198.18.0.0/15"  # the sources of the flood
SYNS, KNOCKS, SCANS = 300, 5, 4000  # a second
_ROOM = 4  # connections that wait at an endpoint before it is full

Outages = list[tuple[str, float, float]]
"""Addresses, and the periods in which they refuse or drop SYNs, in seconds of the machine's monotonic clock."""


def _waiting(listening: socket.socket, until: float) -> None:
    """Accept and close connections until a time."""
    while (left := until - time.monotonic()) > 0:
        listening.settimeout(left)
        with contextlib.suppress(TimeoutError):
            listening.accept()[0].close()


def steady(address: str, _: Outages) -> None:
    """Accept at once."""
    _waiting(socket.create_server((address, PORT), backlog=4096), time.monotonic() + 1e6)


def slow(address: str, _: Outages) -> None:
    """Accept waiting connections after 0.3 to 3 s."""
    listening = socket.create_server((address, PORT), backlog=4096)
    while True:
        time.sleep(random.uniform(0.3, 3))
        _waiting(listening, time.monotonic() + 0.01)


def full(address: str, outages: Outages) -> None:
    """Accept nothing for a moment, so that the queue is full and the kernel drops SYNs."""
    listening = socket.create_server((address, PORT), backlog=_ROOM)
    while True:
        _waiting(listening, time.monotonic() + random.uniform(1, 10))
        began = time.monotonic()
        time.sleep(random.uniform(0.1, 2.5))
        outages.append((address, began, time.monotonic()))


def restarted(address: str, outages: Outages) -> None:
    """Stop listening and start again at once, every twentieth time after some seconds."""
    for turn in itertools.count(1):
        with socket.create_server((address, PORT), backlog=4096) as listening:
            _waiting(listening, time.monotonic() + random.uniform(1, 4))
            began = time.monotonic()
        time.sleep(0 if turn % 20 else random.uniform(1, 4))
        with socket.create_server((address, PORT), backlog=4096):
            outages.append((address, began, time.monotonic()))


KINDS: Final = (steady, slow, full, restarted)


def _endpoints(*addresses: str) -> Callable[[], dict[str, Any]]:
    """Serve the addresses with these behaviours in turn."""
    outages: Outages = []
    for address, serve in zip(addresses, itertools.cycle(KINDS), strict=False):
        threading.Thread(target=serve, args=(address, outages), daemon=True).start()
    return lambda: {"outages": outages}


def _counted(work: Iterator[None]) -> Callable[[], dict[str, Any]]:
    """Do steps of work in a thread; return a function that returns their number."""
    counts = [0]

    def count() -> None:
        for _ in work:
            counts[0] += 1

    threading.Thread(target=count, daemon=True).start()
    return lambda: {"count": counts[0]}


def _dropped(target: str) -> Iterator[None]:
    """Begin connections, each of which repeats its SYN for some seconds."""
    links: list[socket.socket] = []
    while True:
        link = socket.socket()
        link.setblocking(False)
        link.bind((DROPPED, 0))
        link.connect_ex((target, 80))
        links.append(link)
        if len(links) > 8 * KNOCKS:
            links.pop(0).close()
        time.sleep(1 / KNOCKS)
        yield


def syn(source: bytes, sport: int, target: bytes, port: int) -> bytes:
    """Return a packet that begins a connection."""
    tcp = struct.pack("!HHIIBBHHH", sport, port, 1, 0, 5 << 4, 2, 65535, 0, 0)
    pseudo = source + target + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(tcp)) + tcp
    total = sum(struct.unpack(f"!{len(pseudo) // 2}H", pseudo))
    total = (total >> 16) + (total & 0xFFFF)
    check = ~(total + (total >> 16)) & 0xFFFF
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 0, 0, 64, socket.IPPROTO_TCP, 0, source, target)
    return head + tcp[:16] + struct.pack("!H", check) + tcp[18:]


def _flood(target: str) -> Iterator[None]:
    """Send SYNs from addresses that do not answer, half of them twice."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as link:
        while True:
            source = bytes((198, random.randint(18, 19))) + random.randbytes(2)
            packet = syn(source, random.randint(1024, 65535), socket.inet_aton(target), 80)
            for _ in range(random.randint(1, 2)):
                link.sendto(packet, (target, 0))
            time.sleep(1 / SYNS)
            yield


def _scan(services: str) -> Iterator[None]:
    """Send SYNs to Services from the client that endpoints drop, each twice: all endpoints become suspects."""
    source = socket.inet_aton(DROPPED)
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as link:
        for number in itertools.cycle(range(int(services))):
            target = objects.cluster_ip(number)
            packet = syn(source, random.randint(1024, 65535), socket.inet_aton(target), 80)
            for _ in range(2):
                link.sendto(packet, (target, 0))
            if number % 20 == 0:
                time.sleep(20 / SCANS)
            yield


def main(pid: str, role: str, *addresses: str) -> None:
    """Run until the parent has ended."""
    die_with_parent()
    enter_namespace(f"/proc/{pid}/ns/net")
    work = {"dropped": _dropped, "flood": _flood, "scan": _scan}
    report = _counted(work[role](*addresses)) if role in work else _endpoints(*addresses)
    say()
    for _ in sys.stdin.buffer:
        say(**report())


if __name__ == "__main__":
    main(*sys.argv[1:])
