"""What iptables mode takes from the configuration and the node once, at its start."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import NamedTuple

from kubeproxy.config.modes.description import NODEPORT_WORDS
from kubeproxy.model.addresses import Family, parse_networks


class Options(NamedTuple):
    """`localhost_nodeports` as configured; `liberal`: nf_conntrack_tcp_be_liberal; `counters`: nfacct is there."""

    localhost_nodeports: bool
    liberal: bool
    counters: bool

    def localhost(self, nodeport_ips: tuple[bytes, ...] | None) -> bool:
        """Return whether NodePorts answer on loopback, given the addresses they answer on (None for all)."""
        if not self.localhost_nodeports:
            return False
        return nodeport_ips is None or any(ipaddress.ip_address(ip).is_loopback for ip in nodeport_ips)


def names_loopback(nodeport_addresses: Iterable[str]) -> bool:
    """Return whether NodePorts answer on 127.0.0.1 by nodePortAddresses: unset, or with a network that has it."""
    words = tuple(nodeport_addresses)
    networks = parse_networks([n for word in words for n in NODEPORT_WORDS.get(word, (word,))], Family.IPV4)
    if not networks:
        return "primary" not in words  # no network of the family counts as all of them
    return any(first <= b"\x7f\0\0\1" <= last for first, last in networks)
