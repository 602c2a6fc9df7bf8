"""Removing the unanswered connections to an endpoint: answered ones and those to other endpoints remain."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from kubeproxy.kernel.conntrack.tracked import DESTINATION_TRANSLATED, Wanted, entries
from kubeproxy.kernel.conntrack.unanswered import Unanswered
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.model.addresses import PORT_BYTES, host_port, pack
from support import nft
from support.namespaces import inside, namespace, run

PLACES = {
    "ip": (socket.AF_INET, "192.0.2.1", ("10.0.0.2", "10.0.0.3")),
    "ip6": (socket.AF_INET6, "2001:db8::1", ("fd00::2", "fd00::3")),
}
TRANSLATED = Wanted(DESTINATION_TRANSLATED, DESTINATION_TRANSLATED)


def key(endpoint: str, protocol: int = 6) -> bytes:
    return (pack(endpoint) or b"") + bytes((protocol,)) + PORT_BYTES[3000]


def rules(ip: str, vip: str, endpoints: tuple[str, str]) -> str:
    """Rules that translate ports 80 and 81, and drop all packets to the first endpoint except the first SYN."""
    first, second = (host_port(each, 3000) for each in endpoints)
    return f"""
add table {ip} ground
add chain {ip} ground nat {{ type nat hook output priority -100 ; }}
add rule {ip} ground nat {ip} daddr {vip} tcp dport 80 dnat to {first}
add rule {ip} ground nat {ip} daddr {vip} tcp dport 81 dnat to {second}
add chain {ip} ground input {{ type filter hook input priority 0 ; }}
add rule {ip} ground input {ip} daddr {endpoints[0]} ct state new limit rate over 1/day burst 1 packets drop
"""


@pytest.mark.parametrize("ip", list(PLACES))
def test_only_unanswered_connections_to_the_endpoints_are_removed(ip: str) -> None:
    family, vip, endpoints = PLACES[ip]

    def scene() -> None:
        nft.run(rules(ip, vip, endpoints))
        with ExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("", 3000), family=family, backlog=9))
            for port in (80, 81):
                stack.enter_context(socket.create_connection((vip, port), timeout=5))
                stack.enter_context(listening.accept()[0])
            waiting = [stack.enter_context(socket.socket(family)) for _ in range(3)]
            for made in waiting:
                made.setblocking(False)
                made.connect_ex((vip, 80))
            unanswered = stack.enter_context(Unanswered())
            assert unanswered.remove({key(endpoints[1]), key(endpoints[0], 17)}) == 0
            assert unanswered.remove({key(endpoints[0])}) == 3
            for made in waiting:  # the clients repeat their SYNs
                made.close()
            unanswered.remove({key(endpoints[0])})
            link = stack.enter_context(Netlink.open())
            left = sorted(one.server[:-2] for one in entries(link, family, TRANSLATED))
            assert left == [pack(each) for each in endpoints]

    with namespace() as name:
        for address in (*endpoints, vip):
            run("ip", "-n", name, "address", "add", address, "dev", "lo")
        inside(name, scene)
