"""Creates any number of connection tracking entries in a network namespace, without packets or other programs."""

from __future__ import annotations

from itertools import islice, product

from kubeproxy.kernel.conntrack.tracked import level
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, NLM_F_CREATE, Netlink, attribute, nested
from kubeproxy.model.addresses import pack

LEAKING = "10.244.0.2"
"""The client of all entries."""

_NEW = 1 << 8
_DELETE = _NEW | 2
_HEAD = b"\2\0\0\0"  # for IPv4
_ANSWERED = attribute(3, (14).to_bytes(4, "big"))  # with the flag assured

Place = tuple[str, int]
"""Return the packed form of an address with a port."""


def _one_tuple(kind: int, source: bytes, destination: bytes, ports: tuple[int, int]) -> bytes:
    numbers = (attribute(2, ports[0].to_bytes(2, "big")), attribute(3, ports[1].to_bytes(2, "big")))
    addresses = nested(1, attribute(1, source), attribute(2, destination))
    return nested(kind, addresses, nested(2, attribute(1, b"\x11"), *numbers))


def _timeout(seconds: int) -> bytes:
    return attribute(7, seconds.to_bytes(4, "big"))


def begin(client: Place, target: Place, server: Place) -> int:
    """Create a UDP flow of IPv4 with a translation from a target to a server; return 0, or the errno of the refusal."""
    way = _way(client, target) + _one_tuple(2, pack(server[0]) or b"", pack(client[0]) or b"", (server[1], client[1]))
    return _request(_NEW, way + _timeout(120) + _ANSWERED, NLM_F_CREATE)


def end(client: Place, target: Place) -> int:
    """Delete a UDP flow of IPv4; return 0, or the errno of the refusal."""
    return _request(_DELETE, _way(client, target))


def _way(client: Place, target: Place) -> bytes:
    return _one_tuple(1, pack(client[0]) or b"", pack(target[0]) or b"", (client[1], target[1]))


def _request(kind: int, attributes: bytes, flags: int = 0) -> int:
    with Netlink.open(NETLINK_NETFILTER) as link:
        ((code, _),) = link.requests(kind, [_HEAD + attributes], "a flow", flags)
    return code


def fill(count: int) -> int:
    """Create answered UDP flows of one client in the thread's network namespace; return the number of all entries."""
    client, server = pack(LEAKING) or b"", pack("203.0.113.77") or b""
    rest = _timeout(60) + _ANSWERED
    pairs = islice(product(range(1024, 65000), range(1, 100)), count)
    payloads = (
        _HEAD + _one_tuple(1, client, server, (a, b)) + _one_tuple(2, server, client, (b, a)) + rest for a, b in pairs
    )
    with Netlink.open(NETLINK_NETFILTER) as link:
        while chunk := list(islice(payloads, 50_000)):
            link.requests(_NEW, chunk, "entries", NLM_F_CREATE)
        return level(link).entries


def limit() -> int:
    """Return the maximum number of entries."""
    with Netlink.open(NETLINK_NETFILTER) as link:
        return level(link).limit


def flush() -> None:
    """Delete all entries of the thread's network namespace."""
    with Netlink.open(NETLINK_NETFILTER) as link:
        link.requests(_DELETE, [_HEAD], "a flush")
