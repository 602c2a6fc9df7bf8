"""In what the modes differ for a client. Each mode says its own, for who explains what becomes of a packet."""

from __future__ import annotations

from typing import NamedTuple

from kubeproxy.model.addresses import Family


class Habits(NamedTuple):
    """In what the proxies of different modes differ when nobody serves a connection.

    `guards_addresses`: other ports of a cluster IP are refused, and addresses of ServiceCIDRs that no Service has
    dropped. `refuses_node`: this node's own connections to external addresses are refused like all others, not sent
    on to wherever their route leads. `ranges_first`: source ranges apply to a Service without endpoints as well.
    `resets_tcp`: families in which TCP is refused by a reset, in place of an ICMP error. `loopback`: families in which
    NodePorts answer on loopback, where they answer on all local addresses. `closes_everywhere`: a NodePort that nobody
    serves is refused or dropped on all local addresses, those included on which NodePorts do not answer.
    """

    guards_addresses: bool = True
    refuses_node: bool = True
    ranges_first: bool = True
    resets_tcp: tuple[Family, ...] = (Family.IPV4,)
    loopback: tuple[Family, ...] = ()
    closes_everywhere: bool = False
