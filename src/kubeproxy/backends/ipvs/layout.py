"""What ipvs mode keeps in the kernel, by name: the interface, the ipsets and their types, the schedulers.

Pure data. Names and types are those of kube-proxy v1.36 (pkg/proxy/ipvs), so that either finds its way in what the
other left. Our own are DROP and DROP_OUTSIDE: there, a local policy without local endpoints is served by others.
"""

from __future__ import annotations

from enum import IntFlag, StrEnum
from typing import Final, NamedTuple

from kubeproxy.model.addresses import Family

INTERFACE: Final = "kube-ipvs0"
"""The dummy interface that carries the addresses of Services, so that their packets come in at all."""

MAX_SET_NAME: Final = 31  # IPSET_MAXNAMELEN is 32 with the final zero
MAX_ELEMENTS: Final = 1 << 20
"""Entries that a hash set may hold; the kernel's default of 65,536 ends at some 20,000 Services."""


class SetId(StrEnum):
    """Our ipsets, by their IPv4 names."""

    LOOP_BACK = "KUBE-LOOP-BACK"  # endpoint, its port, and itself as the client: hairpin
    CLUSTER_IP = "KUBE-CLUSTER-IP"
    EXTERNAL_IP = "KUBE-EXTERNAL-IP"
    EXTERNAL_IP_LOCAL = "KUBE-EXTERNAL-IP-LOCAL"
    LOAD_BALANCER = "KUBE-LOAD-BALANCER"  # all of them, the two below as well
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
    IPVS_IPS = "KUBE-IPVS-IPS"  # what kube-ipvs0 carries
    DROP = "KUBE-DROP"  # address and port of frontends that drop everybody
    DROP_OUTSIDE = "KUBE-DROP-OUTSIDE"  # of those that serve pods and this node only

    def named(self, family: Family) -> str:
        """Return the set's name in a family, cut to what the kernel takes, as kube-proxy does."""
        if family is Family.IPV4:
            return str(self)
        return self.replace("KUBE-", "KUBE-6-", 1)[:MAX_SET_NAME]


class SetType(StrEnum):
    """The kernel's set types that are used; the words say what an entry consists of."""

    ADDRESS = "hash:ip"
    SERVICE = "hash:ip,port"
    SERVICE_ADDRESS = "hash:ip,port,ip"
    SERVICE_NETWORK = "hash:ip,port,net"
    PORT = "bitmap:port"


TYPES: Final[dict[SetId, SetType]] = {
    SetId.LOOP_BACK: SetType.SERVICE_ADDRESS,
    SetId.LOAD_BALANCER_SOURCE_IP: SetType.SERVICE_ADDRESS,
    SetId.LOAD_BALANCER_SOURCE_CIDR: SetType.SERVICE_NETWORK,
    SetId.NODE_PORT_TCP: SetType.PORT,
    SetId.NODE_PORT_LOCAL_TCP: SetType.PORT,
    SetId.NODE_PORT_UDP: SetType.PORT,
    SetId.NODE_PORT_LOCAL_UDP: SetType.PORT,
    SetId.HEALTH_CHECK_NODE_PORT: SetType.PORT,
    SetId.IPVS_IPS: SetType.ADDRESS,
}


def type_of(set_id: SetId) -> SetType:
    """Return a set's type; most hold an address, a protocol and a port."""
    return TYPES.get(set_id, SetType.SERVICE)


class Entry(NamedTuple):
    """An entry of a set; what its type does not have stays empty."""

    ip: bytes = b""
    protocol: int = 0
    port: int = 0
    ip2: bytes = b""
    prefixlen: int = 0


class Flag(IntFlag):
    """Flags of a virtual server (include/uapi/linux/ip_vs.h)."""

    NONE = 0
    PERSISTENT = 0x0001
    FALLBACK = 0x0008  # sh, mh: the next server when the one that the hash says has weight 0, instead of refusal
    SOURCE_PORT = 0x0010  # sh, mh: the source port goes into the hash


class Scheduler(NamedTuple):
    """How a virtual server picks: the flags it gets, and whether it passes servers of weight 0 by."""

    flags: Flag = Flag.NONE
    skips_draining: bool = True


DEFAULT_SCHEDULER: Final = "rr"
SCHEDULERS: Final[dict[str, Scheduler]] = {
    "rr": Scheduler(),
    "wrr": Scheduler(),
    "lc": Scheduler(),
    "wlc": Scheduler(),
    "sed": Scheduler(),
    "nq": Scheduler(),
    # A hash knows no weight 0 (net/netfilter/ipvs/ip_vs_sh.c, ip_vs_mh.c): without the fallback a draining server
    # refuses its share of the clients. kube-proxy gives mh the port flag, and neither of them the fallback.
    "sh": Scheduler(Flag.FALLBACK),
    "mh": Scheduler(Flag.FALLBACK | Flag.SOURCE_PORT),
    # dh has no fallback at all (ip_vs_dh.c): its servers go at once.
    "dh": Scheduler(skips_draining=False),
}
