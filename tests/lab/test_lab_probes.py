"""Questions of the lab: what no server answered, and what only seems so."""

from __future__ import annotations

import itertools
import socket

from lab import probes
from support.namespaces import run
from support.own_network import own_network


def test_a_udp_question_leaves_from_a_port_that_is_free(monkeypatch) -> None:
    """A proxy in userspace mode has thousands of ports of its node: one of them is no reason to be 'unreachable'."""
    with own_network():
        run("ip", "link", "set", "lo", "up")
        with socket.socket(type=socket.SOCK_DGRAM) as taken, socket.socket(type=socket.SOCK_DGRAM) as server:
            taken.bind(("", 0))
            server.bind(("127.0.0.1", 0))
            ports = [taken.getsockname()[1], *range(33000, 33010)]
            monkeypatch.setattr(probes, "_SOURCE_PORTS", itertools.cycle(ports))
            assert probes.ask("udp", *server.getsockname(), timeout=0.05) == "timeout"
            assert server.recvfrom(10)[1][1] in range(33000, 33010)
