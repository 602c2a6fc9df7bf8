"""The data path of userspace mode on loopback: a listener of the proxy, with endpoints and clients in threads.

As a program it relays to one given destination (in hexadecimal) until it is killed.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kubeproxy.backends.relay.datapath import DataPath
from kubeproxy.backends.userspace.listeners import Assignment, ListenerName, Listeners, PoolKind
from kubeproxy.backends.userspace.udp import Sessions
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.plan import ServicePortKey
from support.namespaces import run
from support.own_network import own_network

TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
TIMEOUT = 30.0
LOOPBACK = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}


class Stage:
    """A new network namespace with a data path."""

    def __init__(self, limit: int | None = None, ports: range = range(0), udp_idle: float = 0.25) -> None:
        self.path = DataPath.open(udp_idle, limit)
        self.listeners = Listeners(self.path, Sessions(self.path), ports)

    def carry(
        self,
        endpoints: Sequence[socket.socket | bytes],
        protocol: int = TCP,
        family: Family = Family.IPV4,
        name: str = "web",
        affinity: int = 0,
    ) -> tuple[str, int]:
        """Set the endpoints of a service port; return the address of its listener."""
        pool = tuple(e if isinstance(e, bytes) else destination(e) for e in endpoints)
        listener = ListenerName(ServicePortKey("ns", name, "", protocol, family), PoolKind.CLUSTER)
        self.listeners.take({listener: Assignment(pool, affinity, pool)})
        port = self.listeners.port(listener)
        assert port is not None
        return LOOPBACK[family], port


@contextmanager
def stage(limit: int | None = None, ports: range = range(0), udp_idle: float = 0.25) -> Iterator[Stage]:
    """Yield a stage, and end it."""
    with own_network():
        run("ip", "link", "set", "lo", "up")
        made = Stage(limit, ports, udp_idle)
        try:
            yield made
        finally:
            made.path.stop()


def destination(sock: socket.socket) -> bytes:
    """Return the packed address and port of a socket."""
    address: str
    port: int
    address, port = sock.getsockname()[:2]
    return (pack(address) or b"") + port.to_bytes(2, "big")


def endpoint(protocol: int = TCP, family: Family = Family.IPV4) -> socket.socket:
    """Return a listening socket of an endpoint."""
    sock = socket.socket(family, socket.SOCK_STREAM if protocol == TCP else socket.SOCK_DGRAM)
    sock.bind((LOOPBACK[family], 0))
    if protocol == TCP:
        sock.listen(1000)
    sock.settimeout(TIMEOUT)
    return sock


def nowhere() -> bytes:
    """Return a destination that refuses connections, because nothing listens there."""
    with endpoint() as sock:
        return destination(sock)


def connect(where: tuple[str, int]) -> socket.socket:
    """A client's connection."""
    sock = socket.create_connection(where, TIMEOUT)
    sock.setsockopt(TCP, socket.TCP_NODELAY, 1)
    return sock


def accept(listening: socket.socket) -> socket.socket:
    """An endpoint's connection."""
    sock, _ = listening.accept()
    sock.settimeout(TIMEOUT)
    return sock


def reset(sock: socket.socket) -> None:
    """End a connection with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def received(sock: socket.socket, most: int = 1 << 16) -> tuple[bytes, bool]:
    """Return all bytes until the stream ends, and whether it ended with a reset."""
    parts: list[bytes] = []
    while True:
        try:
            part = sock.recv(most)
        except ConnectionResetError:
            return b"".join(parts), True
        if not part:
            return b"".join(parts), False
        parts.append(part)


@contextmanager
def doing(*work: Callable[[], None]) -> Iterator[None]:
    """Run functions in threads during the body; their exceptions are raised at the end."""
    errors: list[BaseException] = []

    def guarded(each: Callable[[], None]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def main(endpoints: str) -> None:
    """Relay to one destination, and print the port."""
    print(Stage().carry([bytes.fromhex(endpoints)])[1], flush=True)
    time.sleep(2 * TIMEOUT)


if __name__ == "__main__":
    main(sys.argv[1])
