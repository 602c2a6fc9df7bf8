"""Constructs virtual and real servers of IPVS from addresses as text."""

from __future__ import annotations

import socket
from typing import Any

from kubeproxy.kernel.ipvs import RealServer, VirtualServer, server_key

TCP, UDP, SCTP = socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_SCTP


def packed(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)


def server(ip: str, port: int = 80, protocol: int = TCP, **traits: Any) -> VirtualServer:
    return VirtualServer(server_key(packed(ip), protocol, port), **traits)


def real(ip: str, port: int = 8080, **traits: Any) -> RealServer:
    return RealServer(packed(ip) + port.to_bytes(2, "big"), **traits)
