"""Requests of the lab: without an answer, and with invalid answers."""

from __future__ import annotations

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

from lab import probes
from support.namespaces import run
from support.own_network import own_network


def test_a_udp_question_leaves_from_a_port_that_is_free(monkeypatch) -> None:
    """A proxy in userspace mode uses thousands of ports of its node: a port in use is no reason for 'unreachable'."""
    with own_network():
        run("ip", "link", "set", "lo", "up")
        with socket.socket(type=socket.SOCK_DGRAM) as taken, socket.socket(type=socket.SOCK_DGRAM) as server:
            taken.bind(("", 0))
            server.bind(("127.0.0.1", 0))
            ports = [taken.getsockname()[1], *range(33000, 33010)]
            monkeypatch.setattr(probes, "_SOURCE_PORTS", itertools.cycle(ports))
            assert probes.ask("udp", *server.getsockname(), timeout=0.05) == "timeout"
            assert server.recvfrom(10)[1][1] in range(33000, 33010)


def test_a_tcp_question_ends_its_connection_by_reset() -> None:
    """A server's TIME_WAIT would make a later connection from the same port send its SYN twice."""
    said = b'{"pod": "a1", "node": "node-a", "ip": "127.0.0.1", "port": 80, "client": "127.0.0.1"}'
    ends: list[str] = []

    def serve(server: socket.socket) -> None:
        with server.accept()[0] as accepted:
            accepted.recv(1000)
            answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(said), said)
            accepted.sendall(answer[:50])
            accepted.sendall(answer[50:])
            try:
                accepted.recv(1000)
            except ConnectionResetError:
                ends.append("reset")

    with own_network():
        run("ip", "link", "set", "lo", "up")
        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
            served = threads.submit(serve, server)
            found = probes.ask("tcp", *server.getsockname())
            served.result()
    assert isinstance(found, probes.Answer)
    assert found.pod == "a1"
    assert ends == ["reset"]
