"""Sets of packet properties, as values: addresses as intervals, protocol and port as bits, interfaces as bits.

An address set is a sorted tuple of disjoint, inclusive intervals of integers. A set of protocols and ports is an
integer: bit `port` of block 0 (TCP), 1 (UDP) or 2 (SCTP), or bit `protocol` of block 3 for all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

Addresses = tuple[tuple[int, int], ...]
"""Sorted, disjoint, inclusive intervals."""

TCP, UDP, SCTP = 6, 17, 132
BLOCKS: Final = {TCP: 0, UDP: 1, SCTP: 2}
NAMES: Final = {TCP: "tcp", UDP: "udp", SCTP: "sctp"}
PORTS: Final = 1 << 16
_BLOCK: Final = (1 << PORTS) - 1
OTHERS: Final = ((1 << 256) - 1 & ~sum(1 << each for each in BLOCKS)) << 3 * PORTS
EVERY: Final = (1 << 3 * PORTS) - 1 | OTHERS
"""All protocols and ports."""


def meet(first: Addresses, second: Addresses) -> Addresses:
    """Return the intersection of two address sets."""
    if len(second) == 1:
        low, high = second[0]
        return tuple([(max(a, low), min(b, high)) for a, b in first if a <= high and b >= low])
    return tuple([(max(a, c), min(b, d)) for a, b in first for c, d in second if a <= d and b >= c])


def minus(first: Addresses, second: Addresses) -> Addresses:
    """Return the first address set without the second."""
    for low, high in second:
        left = []
        for a, b in first:
            if b < low or a > high:
                left.append((a, b))
                continue
            if a < low:
                left.append((a, low - 1))
            if b > high:
                left.append((high + 1, b))
        first = tuple(left)
    return first


def union(parts: Iterable[tuple[int, int]]) -> Addresses:
    """Return the address set of intervals that may overlap or touch."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def holds(addresses: Addresses, value: int) -> bool:
    """Return whether an address is in a set."""
    at = bisect_right(addresses, (value, 1 << 128))
    return at > 0 and addresses[at - 1][1] >= value


@lru_cache(maxsize=65536)
def service(protocol: int, port: int) -> int:
    """Return the set of one protocol and port."""
    return 1 << (BLOCKS[protocol] * PORTS + port) if protocol in BLOCKS else 0


@lru_cache(maxsize=256)
def protocol_set(protocol: int) -> int:
    """Return the set of all ports of a protocol."""
    return _BLOCK << BLOCKS[protocol] * PORTS if protocol in BLOCKS else 1 << (3 * PORTS + protocol)


@lru_cache(maxsize=256)
def protocol_range(low: int, high: int) -> int:
    """Return the set of all ports of a range of protocols."""
    found = 0
    for each in range(low, high + 1):
        found |= protocol_set(each)
    return found


@lru_cache(maxsize=4096)
def port_range(low: int, high: int) -> int:
    """Return the set of a range of ports, of all protocols that have ports."""
    block = ((1 << (high - low + 1)) - 1) << low
    return block | block << PORTS | block << 2 * PORTS


@lru_cache(maxsize=65536)
def point(services: int) -> tuple[int, int] | None:
    """Return protocol and port of a set that has one element; the port of a protocol without ports is 0."""
    if services.bit_count() != 1:
        return None
    return first_of(services)


def first_of(services: int) -> tuple[int, int]:
    """Return protocol and port of the first element of a set."""
    bit = (services & -services).bit_length() - 1
    block, port = divmod(bit, PORTS)
    return ((TCP, UDP, SCTP)[block], port) if block < 3 else (bit - 3 * PORTS, 0)
