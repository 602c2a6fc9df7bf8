"""The fixed objects of ipvs mode in the kernel: the interface, the ipsets, the schedulers, and the iptables rules.
Pure, and independent of Services. Names and types are those of kube-proxy v1.36 (pkg/proxy/ipvs), so that each of the
two proxies can take over the other's objects. The Go kube-proxy does not have DROP and DROP_OUTSIDE: if a traffic
policy is Local but no endpoint is local, the Go kube-proxy uses endpoints of other nodes."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from kubeproxy.backends.rules import Jump, pods_in_iptables
from kubeproxy.kernel import ipset
from kubeproxy.kernel.ipvs import FALLBACK, PERSISTENT, PORT, VirtualServer
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FamilyGlobals, Globals

MAX_SET_NAME: Final = 31  # IPSET_MAXNAMELEN is 32, including the final NUL
MAX_ELEMENTS: Final = 1 << 20
"""Maximum number of entries of a hash set; the kernel's default of 65,536 is only enough for about 20,000 Services."""


class IpsetId(StrEnum):
    """Our ipsets, by their IPv4 names."""

    LOOP_BACK = "KUBE-LOOP-BACK"  # endpoint, its port, and the endpoint's address as the client (hairpin)
    CLUSTER_IP = "KUBE-CLUSTER-IP"
    EXTERNAL_IP = "KUBE-EXTERNAL-IP"
    EXTERNAL_IP_LOCAL = "KUBE-EXTERNAL-IP-LOCAL"
    LOAD_BALANCER = "KUBE-LOAD-BALANCER"  # all load balancer addresses, including those of the next two sets
    LOAD_BALANCER_LOCAL = "KUBE-LOAD-BALANCER-LOCAL"
    LOAD_BALANCER_FW = "KUBE-LOAD-BALANCER-FW"  # load balancer addresses with source ranges
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
    DROP_OUTSIDE = "KUBE-DROP-OUTSIDE"  # address and port of frontends that serve only pods and this node

    def named(self, family: Family) -> str:
        """Return the set's name in a family, cut to the kernel's limit, as kube-proxy does."""
        if family is Family.IPV4:
            return str(self)
        return self.replace("KUBE-", "KUBE-6-", 1)[:MAX_SET_NAME]


TYPES: Final[dict[IpsetId, str]] = {
    IpsetId.LOOP_BACK: ipset.HASH_IP_PORT_IP,
    IpsetId.LOAD_BALANCER_SOURCE_IP: ipset.HASH_IP_PORT_IP,
    IpsetId.LOAD_BALANCER_SOURCE_CIDR: ipset.HASH_IP_PORT_NET,
    IpsetId.NODE_PORT_TCP: ipset.BITMAP_PORT,
    IpsetId.NODE_PORT_LOCAL_TCP: ipset.BITMAP_PORT,
    IpsetId.NODE_PORT_UDP: ipset.BITMAP_PORT,
    IpsetId.NODE_PORT_LOCAL_UDP: ipset.BITMAP_PORT,
    IpsetId.HEALTH_CHECK_NODE_PORT: ipset.BITMAP_PORT,
    IpsetId.IPVS_IPS: ipset.HASH_IP,
}


def kind_of(set_id: IpsetId, family: Family) -> ipset.SetKind:
    """Return a set's type; most sets have entries of address, protocol and port."""
    kind = TYPES.get(set_id, ipset.HASH_IP_PORT)
    return ipset.SetKind(kind, socket.AF_UNSPEC if kind == ipset.BITMAP_PORT else family)


class Addresses(NamedTuple):
    """The node's addresses without loopback, in two groups: those of kube-ipvs0, and those of all other interfaces."""

    bound: frozenset[bytes]
    own: frozenset[bytes]


class Scheduler(NamedTuple):
    """Properties of a scheduler: the flags of its virtual servers, and whether it skips real servers with weight 0."""

    name: str
    flags: int = 0
    skips_draining: bool = True

    def server(self, key: bytes, affinity: int = 0) -> VirtualServer:
        """Return a virtual server with this scheduler; `affinity` is in seconds."""
        return VirtualServer(key, self.name, self.flags | (PERSISTENT if affinity else 0), affinity)


DEFAULT_SCHEDULER: Final = "rr"
_ODD: Final = (
    # The hashes of sh and mh ignore weight 0 (net/netfilter/ipvs/ip_vs_sh.c, ip_vs_mh.c). Without the fallback flag, a
    # draining server's share of the clients would be refused. The Go kube-proxy sets only the port flag, for mh.
    Scheduler("sh", FALLBACK),
    Scheduler("mh", FALLBACK | PORT),
    # dh has no fallback flag (ip_vs_dh.c), so its real servers are deleted without draining.
    Scheduler("dh", skips_draining=False),
)
_BY_NAME: Final = {scheduler.name: scheduler for scheduler in _ODD}


def scheduler_named(name: str) -> Scheduler:
    """Return a scheduler's properties by its name ('' means the default); the kernel checks unknown names."""
    return _BY_NAME.get(name) or Scheduler(name or DEFAULT_SCHEDULER)


JUMPS: Final = (
    Jump("filter", "INPUT", "KUBE-NODE-PORT", "kubernetes health check rules"),
    Jump("filter", "INPUT", "KUBE-PROXY-FIREWALL", "kube-proxy firewall rules"),
    Jump("filter", "FORWARD", "KUBE-PROXY-FIREWALL", "kube-proxy firewall rules"),
    Jump("filter", "INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter"),
    Jump("filter", "FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules"),
    Jump("nat", "OUTPUT", "KUBE-SERVICES", "kubernetes service portals"),
    Jump("nat", "PREROUTING", "KUBE-SERVICES", "kubernetes service portals"),
    Jump("nat", "POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules"),
)

OWN_CHAIN: Final = "KUBE-IPVS-FILTER"
"""A chain that only ipvs mode has."""

_NEW: Final = "-m conntrack --ctstate NEW"
_LOCAL: Final = "-m addrtype --src-type LOCAL"
DROP_IN_NAT: Final = '-m comment --comment "drop: nobody reads this queue" -j NFQUEUE --queue-num 65535'
"""NFQUEUE in place of DROP, which iptables refuses in nat. The kernel drops a packet to a queue without a reader
(nf_queue); the sender gets no error, and no conntrack entry remains."""


_RULES: Final = f"""
filter KUBE-FORWARD -m mark --mark <mark>/<mark> -j ACCEPT
filter KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT

filter KUBE-NODE-PORT [HEALTH_CHECK_NODE_PORT dst] -j ACCEPT
filter KUBE-PROXY-FIREWALL {_NEW} [LOAD_BALANCER_FW] -j KUBE-SOURCE-RANGES-FIREWALL

filter KUBE-SOURCE-RANGES-FIREWALL [LOAD_BALANCER_SOURCE_CIDR dst,dst,src] -j RETURN
filter KUBE-SOURCE-RANGES-FIREWALL [LOAD_BALANCER_SOURCE_IP dst,dst,src] -j RETURN
filter KUBE-SOURCE-RANGES-FIREWALL -j DROP

# Connections that a local policy excludes are dropped. Services' addresses give no access to the node's own ports.
filter KUBE-IPVS-FILTER -m conntrack ! --ctstate NEW -j RETURN
filter KUBE-IPVS-FILTER [DROP] -j DROP
filter KUBE-IPVS-FILTER [DROP_OUTSIDE]<not pods> -m addrtype ! --src-type LOCAL -j DROP
filter KUBE-IPVS-FILTER [LOAD_BALANCER] -j RETURN
filter KUBE-IPVS-FILTER [CLUSTER_IP] -j RETURN
filter KUBE-IPVS-FILTER [EXTERNAL_IP] -j RETURN
filter KUBE-IPVS-FILTER [EXTERNAL_IP_LOCAL] -j RETURN
filter KUBE-IPVS-FILTER [HEALTH_CHECK_NODE_PORT dst] -j RETURN
filter KUBE-IPVS-FILTER [IPVS_IPS dst] -j REJECT

# This node's own connections to frontends that drop everybody, and to load balancers that it may not use. The kernel
# picks the frontend's own address as the source; LOAD_BALANCER_SOURCE_IP admits it if a node address is allowed.
nat KUBE-SERVICES [DROP] {_LOCAL} {DROP_IN_NAT}
nat KUBE-SERVICES [LOAD_BALANCER_FW] [! LOAD_BALANCER_SOURCE_IP dst,dst,src] \
[! LOAD_BALANCER_SOURCE_CIDR dst,dst,src] {_LOCAL} {DROP_IN_NAT}
nat KUBE-SERVICES [LOAD_BALANCER_FW] [! LOAD_BALANCER_SOURCE_IP dst,dst,src] [IPVS_IPS src] {_LOCAL} {DROP_IN_NAT}
nat KUBE-SERVICES -s <loopback> -j RETURN
nat KUBE-SERVICES [LOAD_BALANCER] -j KUBE-LOAD-BALANCER
nat KUBE-SERVICES [CLUSTER_IP]<masqueraded> -j KUBE-MARK-MASQ
nat KUBE-SERVICES [EXTERNAL_IP] -j KUBE-MARK-MASQ
nat KUBE-SERVICES [EXTERNAL_IP_LOCAL] {_LOCAL} -j KUBE-MARK-MASQ
# Accepted before the NodePorts are looked up, because the sets of NodePorts contain ports without addresses.
nat KUBE-SERVICES [EXTERNAL_IP] -j ACCEPT
nat KUBE-SERVICES [EXTERNAL_IP_LOCAL] -j ACCEPT
nat KUBE-SERVICES [CLUSTER_IP] -j ACCEPT
nat KUBE-SERVICES [LOAD_BALANCER] -j ACCEPT
nat KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT

nat KUBE-NODE-PORT -p tcp [NODE_PORT_LOCAL_TCP dst] {_LOCAL} -j KUBE-MARK-MASQ
nat KUBE-NODE-PORT -p tcp [NODE_PORT_LOCAL_TCP dst] -j RETURN
nat KUBE-NODE-PORT -p tcp [NODE_PORT_TCP dst] -j KUBE-MARK-MASQ
nat KUBE-NODE-PORT -p udp [NODE_PORT_LOCAL_UDP dst] {_LOCAL} -j KUBE-MARK-MASQ
nat KUBE-NODE-PORT -p udp [NODE_PORT_LOCAL_UDP dst] -j RETURN
nat KUBE-NODE-PORT -p udp [NODE_PORT_UDP dst] -j KUBE-MARK-MASQ
nat KUBE-NODE-PORT -p sctp [NODE_PORT_LOCAL_SCTP] {_LOCAL} -j KUBE-MARK-MASQ
nat KUBE-NODE-PORT -p sctp [NODE_PORT_LOCAL_SCTP] -j RETURN
nat KUBE-NODE-PORT -p sctp [NODE_PORT_SCTP] -j KUBE-MARK-MASQ

nat KUBE-LOAD-BALANCER [LOAD_BALANCER_LOCAL] {_LOCAL} -j KUBE-MARK-MASQ
nat KUBE-LOAD-BALANCER [LOAD_BALANCER_LOCAL] -j RETURN
nat KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ

nat KUBE-MARK-MASQ -j MARK --or-mark <mark>

nat KUBE-POSTROUTING [LOOP_BACK dst,dst,src] -j MASQUERADE
nat KUBE-POSTROUTING -m mark ! --mark <mark>/<mark> -j RETURN
# A packet that comes through again, as within a tunnel, is not masqueraded again.
nat KUBE-POSTROUTING -j MARK --xor-mark <mark>
nat KUBE-POSTROUTING -j MASQUERADE --random-fully
"""
"""Table, chain and rule. [SET FIELDS] matches an ipset; without FIELDS, it matches destination address and port."""

_SET: Final = re.compile(r"\[(! )?(\w+)(?: ([a-z,]+))?\]")
_LINES: Final = [line.split(" ", 2) for line in _RULES.splitlines() if line and not line.startswith("#")]
CHAINS: Final = {
    table: tuple(dict.fromkeys(chain for place, chain, _ in _LINES if place == table)) for table in ("filter", "nat")
}
"""Our chains by table, in the order in which they are created."""


class Rules:
    """The iptables rules of one family, by table and chain; the rules exist even if the sets are empty.

    Source: kube-proxy v1.36 pkg/proxy/ipvs writeIptablesRules. There are two differences. This node's own connections
    under policy Local are masqueraded. Own connections that must be dropped are dropped in nat, because IPVS handles
    them before filter OUTPUT (ip_vs_local_request4 has priority NF_IP_PRI_NAT_DST + 2). All chains have the Go
    kube-proxy's names, so the Go kube-proxy replaces them at a take-over, and removes them with --cleanup."""

    def __init__(self, family: Family, world: Globals) -> None:
        self._family = family
        pods = pods_in_iptables((world.of(family) or FamilyGlobals()).detector)
        values = {
            "<not pods>": f" ! {pods}" if pods else "",
            # The source of the node's own connections is the Service's address, which is on kube-ipvs0.
            "<masqueraded>": "" if world.masquerade_all else f" ! {pods}" if pods else f" {_LOCAL}",
            "<mark>": f"{world.masquerade_mark:#x}",
            "<loopback>": "127.0.0.0/8" if family is Family.IPV4 else "::1/128",
        }
        self.tables: dict[str, dict[str, list[str]]] = {
            table: {chain: [] for chain in chains} for table, chains in CHAINS.items()
        }
        for table, chain, rule in _LINES:
            filled = re.sub("<[a-z ]+>", lambda found: values[found[0]], rule)
            self.tables[table][chain].append(_SET.sub(self._match, filled))

    def _match(self, found: re.Match[str]) -> str:
        name = IpsetId[found[2]].named(self._family)
        return f"-m set {found[1] or ''}--match-set {name} {found[3] or 'dst,dst'}"

    def text(self, tables: Sequence[str], missing: Sequence[Jump]) -> str:
        """Return the inputs of iptables-restore that rewrite our chains, and insert missing jumps at the beginning of
        built-in chains."""
        lines = []
        for table in tables:
            chains = self.tables[table]
            lines.append(f"*{table}")
            lines += (f":{chain} - [0:0]" for chain in chains)
            lines += (f"-I {jump.rule}" for jump in reversed(missing) if jump.table == table)
            lines += (f"-A {chain} {rule}" for chain, rules in chains.items() for rule in rules)
            lines.append("COMMIT")
        return "\n".join(lines) + "\n"

    def references(self, set_id: IpsetId) -> int:
        """Return the number of rules that match a set. The kernel counts references to a set, so a missing rule is
        found without listing rules."""
        word = f"--match-set {set_id.named(self._family)} "
        return sum(word in rule for chains in self.tables.values() for rules in chains.values() for rule in rules)
