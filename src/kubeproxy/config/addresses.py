"""Addresses in text as Go's net and k8s.io/utils/net read them: IPs, CIDRs, "IP:port". Pure; None means invalid.

Leading zeros in IPv4 numbers are decimal, as in Go before 1.17, which Kubernetes keeps for old configurations.
"""

from __future__ import annotations

import ipaddress
import re

from kubeproxy.model.addresses import host_port

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_ip(text: str) -> Address | None:
    """The IP address in text, an IPv4-mapped IPv6 address counting as IPv4; None when it is none (zones are none)."""
    if "%" in text:
        return None
    try:
        address = ipaddress.ip_address(
            re.sub(r"(?<![0-9a-fA-F:])0+(?=[0-9]+(\.|$))", "", text) if "." in text else text
        )
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def parse_cidr(text: str) -> Network | None:
    """The network of an address with prefix length in text; bits beyond the prefix are dropped. None when invalid."""
    ip, slash, length = text.partition("/")
    address = parse_ip(ip)
    if not slash or address is None or not re.fullmatch(r"[0-9]{1,3}", length):
        return None
    bits = int(length)
    if isinstance(address, ipaddress.IPv4Address) and ":" in ip:
        bits -= 96
    if not 0 <= bits <= address.max_prefixlen:
        return None
    return ipaddress.ip_network((address, bits), strict=False)


def split_host_port(text: str) -> tuple[str, str] | None:
    """Host and port of "host:port" or "[host]:port"; None when the port is missing or a colon too many."""
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        return None
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], port
    return None if any(char in host for char in ":[]") else (host, port)


def with_port(text: str, port: int) -> str:
    """The address with the port appended when it has none; text that is no address is returned as it is."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if parse_ip(bare) is None:
        return text
    return host_port(bare, port)


def is_ipv6(text: str) -> bool:
    """Whether text is an IPv6 address."""
    return isinstance(parse_ip(text), ipaddress.IPv6Address)
