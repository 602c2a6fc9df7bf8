"""Names and types of ipvs mode's objects in the kernel: the interface, the ipsets, the schedulers.

Pure data. Names and types are those of kube-proxy v1.36 (pkg/proxy/ipvs), so that either proxy can take over the
other's objects. Our own are DROP and DROP_OUTSIDE: the Go kube-proxy sends traffic under a local policy without local
endpoints to endpoints of other nodes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from kubeproxy.kernel.ipset import (
    BITMAP_PORT,
    HASH_IP,
    HASH_IP_PORT,
    HASH_IP_PORT_IP,
    HASH_IP_PORT_NET,
    SetEntry,
    SetKind,
)
from kubeproxy.kernel.ipvs import FALLBACK, PORT
from kubeproxy.model.addresses import Family

MAX_SET_NAME: Final = 31  # IPSET_MAXNAMELEN is 32 with the final zero
MAX_ELEMENTS: Final = 1 << 20
"""Maximum number of entries of a hash set; the kernel's default of 65,536 is enough for some 20,000 Services only."""


class IpsetId(StrEnum):
    """Our ipsets, by their IPv4 names."""

    LOOP_BACK = "KUBE-LOOP-BACK"  # endpoint, its port, and itself as the client: hairpin
    CLUSTER_IP = "KUBE-CLUSTER-IP"
    EXTERNAL_IP = "KUBE-EXTERNAL-IP"
    EXTERNAL_IP_LOCAL = "KUBE-EXTERNAL-IP-LOCAL"
    LOAD_BALANCER = "KUBE-LOAD-BALANCER"  # all load balancer addresses, also those of the next two
    LOAD_BALANCER_LOCAL = "KUBE-LOAD-BALANCER-LOCAL"
    LOAD_BALANCER_FW = "KUBE-LOAD-BALANCER-FW"  # those with source ranges
    LOAD_BALANCER_SOURCE_IP = "KUBE-LOAD-BALANCER-SOURCE-IP"
    LOAD_BALANCER_SOURCE_CIDR = "KUBE-LOAD-BALANCER-SOURCE-CIDR"
    NODE_PORT_TCP = "KUBE-NODE-PORT-TCP"
    NODE_PORT_LOCAL_TCP = "KUBE-NODE-PORT-LOCAL-TCP"
    NODE_PORT_UDP = "KUBE-NODE-PORT-UDP"
    NODE_PORT_LOCAL_UDP = "KUBE-NODE-PORT-LOCAL-UDP"
    NODE_PORT_SCTP = "KUBE-NODE-PORT-SCTP-HASH"
    NODE_PORT_LOCAL_SCTP = "KUBE-NODE-PORT-LOCAL-SCTP-HASH"
    HEALTH_CHECK_NODE_PORT = "KUBE-HEALTH-CHECK-NODE-PORT"
    IPVS_IPS = "KUBE-IPVS-IPS"  # the addresses of kube-ipvs0
    DROP = "KUBE-DROP"  # address and port of frontends that drop all clients
    DROP_OUTSIDE = "KUBE-DROP-OUTSIDE"  # of frontends that serve pods and this node only

    def named(self, family: Family) -> str:
        """Return the set's name in a family, cut to the kernel's limit, as kube-proxy does."""
        if family is Family.IPV4:
            return str(self)
        return self.replace("KUBE-", "KUBE-6-", 1)[:MAX_SET_NAME]


TYPES: Final[dict[IpsetId, str]] = {
    IpsetId.LOOP_BACK: HASH_IP_PORT_IP,
    IpsetId.LOAD_BALANCER_SOURCE_IP: HASH_IP_PORT_IP,
    IpsetId.LOAD_BALANCER_SOURCE_CIDR: HASH_IP_PORT_NET,
    IpsetId.NODE_PORT_TCP: BITMAP_PORT,
    IpsetId.NODE_PORT_LOCAL_TCP: BITMAP_PORT,
    IpsetId.NODE_PORT_UDP: BITMAP_PORT,
    IpsetId.NODE_PORT_LOCAL_UDP: BITMAP_PORT,
    IpsetId.HEALTH_CHECK_NODE_PORT: BITMAP_PORT,
    IpsetId.IPVS_IPS: HASH_IP,
}


def kind_of(set_id: IpsetId, family: Family) -> SetKind:
    """Return a set's type; most sets have entries of address, protocol and port."""
    kind = TYPES.get(set_id, HASH_IP_PORT)
    return SetKind(kind, socket.AF_UNSPEC if kind == BITMAP_PORT else family)


Entries = Mapping[IpsetId, Iterable[SetEntry]]


class Addresses(NamedTuple):
    """The node's addresses without loopback: of kube-ipvs0, and of all other interfaces."""

    bound: frozenset[bytes]
    own: frozenset[bytes]


class Scheduler(NamedTuple):
    """Properties of a scheduler: the flags of its virtual servers, and whether it skips real servers of weight 0."""

    name: str
    flags: int = 0
    skips_draining: bool = True


DEFAULT_SCHEDULER: Final = "rr"
_ODD: Final = (
    # The hashes of sh and mh ignore weight 0 (net/netfilter/ipvs/ip_vs_sh.c, ip_vs_mh.c): without the fallback flag a
    # draining server's share of the clients would be refused. kube-proxy gives mh the port flag, and neither of them
    # the fallback flag.
    Scheduler("sh", FALLBACK),
    Scheduler("mh", FALLBACK | PORT),
    # dh has no fallback flag (ip_vs_dh.c): its real servers are deleted at once.
    Scheduler("dh", skips_draining=False),
)
_BY_NAME: Final = {scheduler.name: scheduler for scheduler in _ODD}


def scheduler_named(name: str) -> Scheduler:
    """Return the properties of a scheduler by its name, '' for the default one.

    Unknown names are accepted: the kernel checks them.
    """
    return _BY_NAME.get(name) or Scheduler(name or DEFAULT_SCHEDULER)
