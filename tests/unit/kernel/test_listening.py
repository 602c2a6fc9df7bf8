"""Listening sockets, as reported by the kernel."""

from __future__ import annotations

import socket

from kubeproxy.kernel.proc.processes import Listening, listening
from kubeproxy.model.addresses import Family

TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP


def test_tcp_and_udp_by_address_and_port():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(("0.0.0.0", 0))
        here = Listening(bytes((127, 0, 0, 1)), server.getsockname()[1])
        everywhere = Listening(bytes(4), datagrams.getsockname()[1])
        assert here in listening(Family.IPV4, TCP)
        assert everywhere in listening(Family.IPV4, UDP)
        assert here not in listening(Family.IPV6, TCP)
    assert here not in listening(Family.IPV4, TCP)
