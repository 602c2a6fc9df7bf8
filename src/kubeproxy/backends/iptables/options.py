"""What iptables mode takes from the configuration and the node once, at its start."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple


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
