"""Entries of connection tracking in a network namespace, as many as wanted, without a packet."""

from __future__ import annotations

from itertools import islice, product

from kubeproxy.kernel.conntrack.tracked import level
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, NLM_F_CREATE, Netlink, attribute, nested
from kubeproxy.model.addresses import pack

LEAKING = "10.244.0.2"
"""The client of all of them."""

_NEW = 1 << 8


def _one_tuple(kind: int, source: bytes, destination: bytes, ports: tuple[int, int]) -> bytes:
    numbers = (attribute(2, ports[0].to_bytes(2, "big")), attribute(3, ports[1].to_bytes(2, "big")))
    addresses = nested(1, attribute(1, source), attribute(2, destination))
    return nested(kind, addresses, nested(2, attribute(1, b"\x11"), *numbers))


def fill(count: int) -> int:
    """Make so many answered UDP flows of one client in the thread's network namespace; return the entries then."""
    client, server = pack(LEAKING) or b"", pack("203.0.113.77") or b""
    rest = attribute(7, (60).to_bytes(4, "big")) + attribute(3, (14).to_bytes(4, "big"))  # timeout; answered, assured
    pairs = islice(product(range(1024, 65000), range(1, 100)), count)
    payloads = (
        b"\2\0\0\0" + _one_tuple(1, client, server, (a, b)) + _one_tuple(2, server, client, (b, a)) + rest
        for a, b in pairs
    )
    with Netlink.open(NETLINK_NETFILTER) as link:
        while chunk := list(islice(payloads, 50_000)):
            link.requests(_NEW, chunk, "entries", NLM_F_CREATE)
        return level(link).entries


def limit() -> int:
    """How many entries there may be."""
    with Netlink.open(NETLINK_NETFILTER) as link:
        return level(link).limit


def flush() -> None:
    """Delete all entries of the thread's network namespace."""
    with Netlink.open(NETLINK_NETFILTER) as link:
        link.requests(_NEW | 2, [b"\2\0\0\0"], "a flush")
