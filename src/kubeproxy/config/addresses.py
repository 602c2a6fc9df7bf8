"""Addresses in text as Go's net and k8s.io/utils/net read them: IPs, CIDRs, "IP:port". Pure; None means invalid.

Leading zeros in IPv4 numbers are decimal, as in Go before 1.17, which Kubernetes keeps for old configurations.
"""

from __future__ import annotations

import ipaddress

from kubeproxy.model.addresses import host_port, network_text, pack, parse_network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_ip(text: str) -> Address | None:
    """The IP address in text, an IPv4-mapped IPv6 address counting as IPv4; None when it is none (zones are none)."""
    packed = pack(text)
    return None if packed is None else ipaddress.ip_address(packed)


def parse_cidr(text: str) -> Network | None:
    """The network of an address with prefix length in text; bits beyond the prefix are dropped. None when invalid."""
    network, ip = parse_network(text), pack(text.partition("/")[0])
    if network is None or ip is None or len(ip) != len(network[0]) or text != text.strip():
        return None
    return ipaddress.ip_network(network_text(network))


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
