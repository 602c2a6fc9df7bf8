"""Addresses, families and protocols in the kernel's packed form. A destination is an address followed by a port in
network byte order: 6 bytes for IPv4, 18 for IPv6."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from socket import inet_ntop, inet_pton

_INET, _INET6 = int(socket.AF_INET), int(socket.AF_INET6)

PROTOCOLS: dict[str, int] = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP, "SCTP": socket.IPPROTO_SCTP}
PROTOCOL_NAMES: dict[int, str] = {number: name for name, number in PROTOCOLS.items()}

PORT_BYTES: list[bytes] = [port.to_bytes(2, "big") for port in range(65536)]
"""All ports in network byte order, in a table for speed: a full sync packs more ports than anything else."""


class Family(IntEnum):
    """An address family; the value is the kernel's number."""

    IPV4 = socket.AF_INET
    IPV6 = socket.AF_INET6

    @property
    def label(self) -> str:
        """The family's name in Kubernetes: 'IPv4' or 'IPv6'."""
        return "IPv4" if self is Family.IPV4 else "IPv6"

    @property
    def address_size(self) -> int:
        """The number of bytes of a packed address."""
        return 4 if self is Family.IPV4 else 16


FAMILIES: dict[str, Family] = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}


def pack(text: str) -> bytes | None:
    """Return the packed form of an address (4 or 16 bytes); None if the address is invalid or has a zone. Like
    ParseIPSloppy (k8s.io/utils/net), with which the Go kube-proxy reads stored objects, `pack` ignores leading zeros,
    and converts an IPv4-mapped IPv6 address to IPv4."""
    try:
        address = inet_pton(_INET6 if ":" in text else _INET, text)
    except (OSError, ValueError):
        address = _without_zeros(text)
    return (address[12:] if address.startswith(MAPPED) else address) or None


MAPPED = b"\0" * 10 + b"\xff\xff"  # the first bytes of an IPv4-mapped IPv6 address
_LEADING_ZEROS = re.compile(r"(?<![0-9a-fA-F])0+(?=[0-9a-fA-F])")


def _without_zeros(text: str) -> bytes:
    """Return the packed form of an address that may have leading zeros; b'' for an invalid address."""
    try:
        return inet_pton(_INET6 if ":" in text else _INET, _LEADING_ZEROS.sub("", text))
    except (OSError, ValueError):
        return b""


def unpack(address: bytes) -> str:
    """Return the text form of a packed address."""
    return inet_ntop(_INET if len(address) == 4 else _INET6, address)


def family_of(address: bytes) -> Family:
    """Return the family of a packed address."""
    return Family.IPV4 if len(address) == 4 else Family.IPV6


def endpoint_id(destination: bytes, protocol: int) -> bytes:
    """Return a destination with its protocol: packed address, protocol (1 byte) and port (2 bytes)."""
    return destination[:-2] + bytes((protocol,)) + destination[-2:]


def destination_text(destination: bytes) -> str:
    """Return 'address:port' or '[address]:port' of a packed destination."""
    return next(iter(destination_texts((destination,))))


def place_text(address: bytes, port: int) -> str:
    """Return 'address:port' or '[address]:port' of a packed address and a port; '*:port' without an address."""
    return destination_text(address + PORT_BYTES[port]) if address else f"*:{port}"


def place_of_text(text: str) -> tuple[str, int]:
    """Return the address and the port in a text that `destination_text` made."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def front_text(address: bytes, port: int, protocol: int) -> str:
    """Return an address, port and protocol as text, such as 10.96.0.10:53/udp."""
    return f"{place_text(address, port)}/{PROTOCOL_NAMES.get(protocol, str(protocol)).lower()}"


def host_port(host: str, port: int | str) -> str:
    """Return 'host:port', or '[host]:port' for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, str] | None:
    """Split "host:port" or "[host]:port" into host and port; None without a port, or with too many colons."""
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        return None
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], port
    return None if any(char in host for char in ":[]") else (host, port)


def without_brackets(text: str) -> str:
    """Remove the brackets around a text (an IPv6 address); return any other text unchanged."""
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


@lru_cache(maxsize=1024)
def _port_text(port: bytes) -> str:
    return str(int.from_bytes(port, "big"))


def destination_texts(destinations: Iterable[bytes]) -> dict[str, str]:
    """Return the address of each packed destination (all of one family) as text, by its `destination_text`."""
    return {host_port(address := unpack(each[:-2]), _port_text(each[-2:])): address for each in destinations}


Range = tuple[bytes, bytes]  # the first and the last packed address of a range


def parse_network(text: str) -> Range | None:
    """Parse a CIDR into its network, with host bits cleared; None if the CIDR is invalid, for example because it ends
    with a netmask. Like ParseCIDRSloppy (k8s.io/utils/net), with which the Go kube-proxy reads stored objects,
    `parse_network` ignores blanks around the CIDR, parses addresses like `pack`, and converts an IPv4-mapped network of
    at least 96 bits to IPv4."""
    address, slash, length = text.strip().rpartition("/")
    bits = (length.lstrip("0") or "0") if length.isascii() and length.isdigit() else ""
    if not slash or not bits or len(bits) > 3:
        return None
    packed = _without_zeros(address)
    free = 8 * len(packed) - int(bits)
    if not packed or free < 0:
        return None
    ends = int.from_bytes(packed, "big") >> free << free, int.from_bytes(packed, "big") | (1 << free) - 1
    first, last = (end.to_bytes(len(packed), "big") for end in ends)
    return (first[12:], last[12:]) if first.startswith(MAPPED) and free <= 32 else (first, last)


def parse_networks(texts: Iterable[str], family: Family) -> tuple[Range, ...]:
    """Return the networks of the valid CIDRs of a family, in the same order."""
    networks = (parse_network(text) for text in texts)
    return tuple([network for network in networks if network is not None and family_of(network[0]) is family])


def parse_cidr(text: str) -> Range | None:
    """Parse a CIDR in a configuration like Go's net.ParseCIDR; None if the CIDR is invalid. Unlike `parse_network`,
    `parse_cidr` refuses blanks and IPv4-mapped networks of less than 96 bits."""
    network, address = parse_network(text), pack(text.partition("/")[0])
    valid = network is not None and address is not None and len(address) == len(network[0]) and text == text.strip()
    return network if valid else None


def within(address: bytes, ranges: Iterable[Range]) -> bool:
    """Return whether any of the ranges contains an address."""
    return any(first <= address <= last and len(first) == len(address) for first, last in ranges)


def is_loopback(address: bytes) -> bool:
    """Return whether a packed address is in 127.0.0.0/8, or is ::1."""
    return address[0] == 127 if len(address) == 4 else address == b"\0" * 15 + b"\1"


def is_link_local(address: bytes) -> bool:
    """Return whether a packed address is in 169.254.0.0/16 or fe80::/10."""
    if len(address) == 4:
        return address[:2] == b"\xa9\xfe"
    return address[0] == 0xFE and address[1] & 0xC0 == 0x80


def is_special(address: bytes) -> bool:
    """Return whether a packed address is loopback, link-local, multicast or broadcast; no Service may have such an
    address. Source: ValidateNonSpecialIP of Kubernetes' API server, which accepts broadcast, and multicast that is not
    link-local."""
    if is_loopback(address) or is_link_local(address):
        return True
    if len(address) == 4:
        return 224 <= address[0] < 240 or address == b"\xff" * 4
    return address[0] == 0xFF


def covers_all(network: Range) -> bool:
    """Return whether a range contains every address of its family."""
    first, last = network
    return not any(first) and last.count(0xFF) == len(last)


def network_text(network: Range) -> str:
    """Return the CIDR of a range, which must be exactly one network."""
    first, last = network
    host_bits = (int.from_bytes(first, "big") ^ int.from_bytes(last, "big")).bit_length()
    return f"{unpack(first)}/{8 * len(first) - host_bits}"


@lru_cache(maxsize=256)
def merge_ranges(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return the union of ranges of one family as disjoint, sorted ranges."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and int.from_bytes(first, "big") <= int.from_bytes(merged[-1][1], "big") + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)
