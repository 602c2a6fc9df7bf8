"""Which Host headers are answered, so that no web page that is open on this node can read our pages.

A page of evil.example may have its name resolved to 127.0.0.1 (DNS rebinding); its requests then come from here, and
the browser shows the answers to the page. They cannot but name evil.example as the host. So on loopback only addresses
and localhost are answered. On the node's other addresses any name is: Prometheus and load balancers may use one, and
whoever is on that network can ask as well without a browser.
"""

from __future__ import annotations

import socket
from collections.abc import Collection


def refused_host(host: str, local_address: str, known: Collection[str] = ()) -> str | None:
    """Return why a request is not answered, None when it is.

    `host` is its Host header, '' for none, as of load balancers; `local_address` is the one that it was sent to.
    `known` are names, in small letters, that an operator vouches for.
    """
    if not host or not is_loopback(local_address):
        return None
    name = host_name(host)
    if name == "localhost" or name in known or _is_address(name) or _is_address(host):  # ::1 without brackets
        return None
    return "on this address only a Host header of localhost or an IP address is answered (against DNS rebinding)"


def host_name(host: str) -> str:
    """Return a Host header in small letters without its port and last dot, an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() else host).rstrip(".").lower()


def is_loopback(address: str) -> bool:
    """Return whether a local address is one that no other machine can ask."""
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def _is_address(name: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, name.partition("%")[0])
        except OSError:
            continue
        return True
    return False
