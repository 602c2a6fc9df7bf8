"""Parses addresses like Go's net and k8s.io/utils/net: IPs, CIDRs, "IP:port". Pure; None means invalid. Leading zeros
in IPv4 numbers are decimal, as in Go before 1.17, which Kubernetes keeps for old configurations.
"""

from __future__ import annotations

import ipaddress

from kubeproxy.model.addresses import host_port, network_text, pack, parse_network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_ip(text: str) -> Address | None:
    """Return the IP address in a text, IPv4 for an IPv4-mapped one; None if invalid, as with a zone."""
    packed = pack(text)
    return None if packed is None else ipaddress.ip_address(packed)


def parse_cidr(text: str) -> Network | None:
    """Return the network of an address with prefix length; bits beyond the prefix are dropped. None if invalid."""
    network, ip = parse_network(text), pack(text.partition("/")[0])
    if network is None or ip is None or len(ip) != len(network[0]) or text != text.strip():
        return None
    return ipaddress.ip_network(network_text(network))


def split_host_port(text: str) -> tuple[str, str] | None:
    """Return host and port of "host:port" or "[host]:port"; None without a port, or with too many colons."""
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        return None
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], port
    return None if any(char in host for char in ":[]") else (host, port)


def with_port(text: str, port: int) -> str:
    """Return an address without a port with this port added; any other text unchanged."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if parse_ip(bare) is None:
        return text
    return host_port(bare, port)


def is_ipv6(text: str) -> bool:
    """Return whether text is an IPv6 address."""
    return isinstance(parse_ip(text), ipaddress.IPv6Address)
