"""What iptables mode takes from the configuration and the node once, at its start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kubeproxy.config.modes import spelled_out
from kubeproxy.model.addresses import Family, is_loopback, parse_networks, within


class Options(NamedTuple):
    """`localhost_nodeports` as configured; `liberal`: nf_conntrack_tcp_be_liberal; `counters`: nfacct is there.

    `counters` is None while the kernel could not be asked.
    """

    localhost_nodeports: bool
    liberal: bool
    counters: bool | None

    def localhost(self, nodeport_ips: tuple[bytes, ...] | None) -> bool:
        """Return whether NodePorts answer on loopback, given the addresses they answer on (None for all)."""
        if not self.localhost_nodeports:
            return False
        return nodeport_ips is None or any(map(is_loopback, nodeport_ips))


def names_loopback(nodeport_addresses: Iterable[str]) -> bool:
    """Return whether NodePorts answer on 127.0.0.1 by nodePortAddresses: unset, or with a network that has it."""
    addresses = spelled_out(nodeport_addresses)
    networks = parse_networks(addresses, Family.IPV4)
    if not networks:
        return "primary" not in addresses  # no network of the family counts as all of them
    return within(b"\x7f\0\0\1", networks)
