"""Addresses, families and protocols as the model holds them: packed, as they go to the kernel.

A destination is an address followed by a port in network byte order: 6 bytes for IPv4, 18 for IPv6.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache

PROTOCOLS: dict[str, int] = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP, "SCTP": socket.IPPROTO_SCTP}
PROTOCOL_NAMES: dict[int, str] = {number: name for name, number in PROTOCOLS.items()}

PORT_BYTES: list[bytes] = [port.to_bytes(2, "big") for port in range(65536)]
"""Every port in network byte order: packing one is the most frequent step of a full sync."""


class Family(IntEnum):
    """An address family, with the kernel's numbers."""

    IPV4 = socket.AF_INET
    IPV6 = socket.AF_INET6

    @property
    def label(self) -> str:
        """Return the name that Kubernetes uses: 'IPv4' or 'IPv6'."""
        return "IPv4" if self is Family.IPV4 else "IPv6"

    @property
    def address_size(self) -> int:
        """Return the number of bytes of a packed address."""
        return 4 if self is Family.IPV4 else 16


FAMILIES: dict[str, Family] = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}


def pack(text: str) -> bytes | None:
    """Return the packed form of an address (4 or 16 bytes), or None when it is no address.

    Stricter than Go's legacy parser: leading zeros and zones are refused.
    """
    try:
        return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
    except (OSError, ValueError, UnicodeEncodeError):
        return None


def unpack(address: bytes) -> str:
    """Return the text form of a packed address."""
    return socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)


def family_of(address: bytes) -> Family:
    """Return the family of a packed address."""
    return Family.IPV4 if len(address) == 4 else Family.IPV6


_INET, _INET6 = int(socket.AF_INET), int(socket.AF_INET6)


def destination_text(destination: bytes) -> str:
    """Return 'address:port' or '[address]:port' of a packed destination."""
    return next(iter(destination_texts((destination,))))


@lru_cache(maxsize=1024)
def _port_text(port: bytes) -> str:
    return str(int.from_bytes(port, "big"))


def destination_texts(destinations: Iterable[bytes]) -> dict[str, str]:
    """Return the addresses of packed destinations of one family by `destination_text`, all in text form."""
    ntop = socket.inet_ntop
    found: dict[str, str] = {}
    for destination in destinations:
        address, port = destination[:-2], _port_text(destination[-2:])
        if len(address) == 4:
            text = ntop(_INET, address)
            found[f"{text}:{port}"] = text
        else:
            text = ntop(_INET6, address)
            found[f"[{text}]:{port}"] = text
    return found


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_network(text: str) -> Network | None:
    """Return the network that a CIDR names, host bits cleared as Go's ParseCIDR does; None when it is none.

    Only prefix lengths count: a netmask after the slash is refused, as there.
    """
    text = text.strip()
    if not text.rpartition("/")[2].isdecimal() or "/" not in text or "%" in text:
        return None
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


Range = tuple[bytes, bytes]
"""The first and the last packed address of a range."""


def range_of(network: Network) -> Range:
    """Return a network as a range."""
    return network.network_address.packed, network.broadcast_address.packed


def network_text(network: Range) -> str:
    """Return the CIDR of a range that is exactly one network."""
    first, last = network
    host_bits = (int.from_bytes(first, "big") ^ int.from_bytes(last, "big")).bit_length()
    return f"{unpack(first)}/{8 * len(first) - host_bits}"


def merge_networks(networks: Iterable[Network]) -> tuple[Range, ...]:
    """Return the networks of one family as disjoint, sorted ranges."""
    return merge_ranges(tuple([range_of(network) for network in networks]))


@lru_cache(maxsize=256)
def merge_ranges(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return ranges of one family as disjoint, sorted ones."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and _adjoins(merged[-1][1], first):
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def _adjoins(last: bytes, first: bytes) -> bool:
    return int.from_bytes(first, "big") <= int.from_bytes(last, "big") + 1
