"""The fixed iptables rules of ipvs mode, as iptables-restore text. Pure; none of them is about a single Service.

Source: kube-proxy v1.36 pkg/proxy/ipvs writeIptablesRules. Where it differs: this node's own connections under policy
Local are masqueraded, and those that are to be dropped are dropped in nat, for ipvs takes them before they get to
filter OUTPUT (ip_vs_local_request4 has priority NF_IP_PRI_NAT_DST + 2). All chains are kube-proxy's: those that it
writes anew when it takes over, and removes when it cleans up. The rules are there whether the sets hold anything or
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kubeproxy.backends.ipvs.layout import IpsetId
from kubeproxy.backends.rules import Jump, pods_in_iptables
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FamilyGlobals, Globals

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

CHAINS: Final = {
    "filter": (
        "KUBE-FORWARD",
        "KUBE-NODE-PORT",
        "KUBE-PROXY-FIREWALL",
        "KUBE-SOURCE-RANGES-FIREWALL",
        "KUBE-IPVS-FILTER",
    ),
    "nat": ("KUBE-SERVICES", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-MARK-MASQ", "KUBE-POSTROUTING"),
}
"""Our chains by table, in creation order."""

OWN_CHAIN: Final = "KUBE-IPVS-FILTER"
"""A chain that no other mode has."""

Chains = dict[str, Sequence[str]]
_NEW: Final = "-m conntrack --ctstate NEW"
_LOCAL_SOURCE: Final = "-m addrtype --src-type LOCAL"
DROP_IN_NAT: Final = '-m comment --comment "drop: nobody reads this queue" -j NFQUEUE --queue-num 65535'
"""iptables refuses DROP in nat. A packet for a queue that no program reads is dropped as well (nf_queue): the sender is
not told, and connection tracking forgets it."""


class Rules:
    """The rules of one family."""

    def __init__(self, family: Family, world: Globals) -> None:
        self._family = family
        pods = pods_in_iptables((world.of(family) or FamilyGlobals()).detector)
        self._not_pods = f"! {pods}" if pods else ""
        self._masquerade_all = world.masquerade_all
        self._mark = f"{world.masquerade_mark:#x}"
        self.tables: dict[str, Chains] = {
            "filter": {
                "KUBE-FORWARD": self._forward(),
                "KUBE-NODE-PORT": (f"{self._in(IpsetId.HEALTH_CHECK_NODE_PORT, 'dst')} -j ACCEPT",),
                "KUBE-PROXY-FIREWALL": (f"{_NEW} {self._in(IpsetId.LOAD_BALANCER_FW)} -j KUBE-SOURCE-RANGES-FIREWALL",),
                "KUBE-SOURCE-RANGES-FIREWALL": (*self._allowed_sources(), "-j DROP"),
                "KUBE-IPVS-FILTER": self._ipvs_filter(),
            },
            "nat": {
                "KUBE-SERVICES": self._services(),
                "KUBE-NODE-PORT": self._node_port(),
                "KUBE-LOAD-BALANCER": self._load_balancer(),
                "KUBE-MARK-MASQ": (f"-j MARK --or-mark {self._mark}",),
                "KUBE-POSTROUTING": self._postrouting(),
            },
        }

    def text(self, tables: Sequence[str], missing: Sequence[Jump]) -> str:
        """Return the restore text of tables: their chains filled anew, and the jumps that are missing put first."""
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
        """Return how many rules match a set: the kernel counts them, so that a loss shows without listing rules."""
        word = f"--match-set {set_id.named(self._family)} "
        return sum(word in rule for chains in self.tables.values() for rules in chains.values() for rule in rules)

    def _in(self, set_id: IpsetId, fields: str = "dst,dst") -> str:
        return f"-m set --match-set {set_id.named(self._family)} {fields}"

    def _not_in(self, set_id: IpsetId, fields: str) -> str:
        return f"-m set ! --match-set {set_id.named(self._family)} {fields}"

    def _allowed_sources(self) -> tuple[str, ...]:
        sets = (IpsetId.LOAD_BALANCER_SOURCE_CIDR, IpsetId.LOAD_BALANCER_SOURCE_IP)
        return tuple(f"{self._in(set_id, 'dst,dst,src')} -j RETURN" for set_id in sets)

    def _own_connections(self) -> tuple[str, ...]:
        """Drop connections of this node to what drops everybody, and to load balancers that it may not use."""
        ranged = self._in(IpsetId.LOAD_BALANCER_FW)
        not_named = self._not_in(IpsetId.LOAD_BALANCER_SOURCE_IP, "dst,dst,src")
        not_in_range = self._not_in(IpsetId.LOAD_BALANCER_SOURCE_CIDR, "dst,dst,src")
        # The source that the kernel picks is the frontend's own address, whatever the node may (render.py, _sources).
        from_service = self._in(IpsetId.IPVS_IPS, "src")
        return (
            f"{self._in(IpsetId.DROP)} {_LOCAL_SOURCE} {DROP_IN_NAT}",
            f"{ranged} {not_named} {not_in_range} {_LOCAL_SOURCE} {DROP_IN_NAT}",
            f"{ranged} {not_named} {from_service} {_LOCAL_SOURCE} {DROP_IN_NAT}",
        )

    def _forward(self) -> tuple[str, ...]:
        return (
            f"-m mark --mark {self._mark}/{self._mark} -j ACCEPT",
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        )

    def _ipvs_filter(self) -> tuple[str, ...]:
        """Drop what a local policy keeps out; keep clients from the node's own ports behind Services' addresses."""
        served = (IpsetId.LOAD_BALANCER, IpsetId.CLUSTER_IP, IpsetId.EXTERNAL_IP, IpsetId.EXTERNAL_IP_LOCAL)
        return (
            "-m conntrack ! --ctstate NEW -j RETURN",
            f"{self._in(IpsetId.DROP)} -j DROP",
            f"{self._in(IpsetId.DROP_OUTSIDE)} {self._not_pods} -m addrtype ! --src-type LOCAL -j DROP",
            *(f"{self._in(set_id)} -j RETURN" for set_id in served),
            f"{self._in(IpsetId.HEALTH_CHECK_NODE_PORT, 'dst')} -j RETURN",
            f"{self._in(IpsetId.IPVS_IPS, 'dst')} -j REJECT",
        )

    def _services(self) -> tuple[str, ...]:
        loopback = "127.0.0.0/8" if self._family is Family.IPV4 else "::1/128"
        accepted = (IpsetId.EXTERNAL_IP, IpsetId.EXTERNAL_IP_LOCAL, IpsetId.CLUSTER_IP, IpsetId.LOAD_BALANCER)
        return (
            *self._own_connections(),
            f"-s {loopback} -j RETURN",
            f"{self._in(IpsetId.LOAD_BALANCER)} -j KUBE-LOAD-BALANCER",
            self._cluster_ip(),
            f"{self._in(IpsetId.EXTERNAL_IP)} -j KUBE-MARK-MASQ",
            f"{self._in(IpsetId.EXTERNAL_IP_LOCAL)} {_LOCAL_SOURCE} -j KUBE-MARK-MASQ",
            # Before the NodePorts: their sets hold ports alone, and would match on a Service's address as well.
            *(f"{self._in(set_id)} -j ACCEPT" for set_id in accepted),
            "-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT",
        )

    def _cluster_ip(self) -> str:
        if self._masquerade_all:
            return f"{self._in(IpsetId.CLUSTER_IP)} -j KUBE-MARK-MASQ"
        if self._not_pods:
            return f"{self._in(IpsetId.CLUSTER_IP)} {self._not_pods} -j KUBE-MARK-MASQ"
        # The node's own connections get a Service's address as their source, for it is on kube-ipvs0.
        return f"{self._in(IpsetId.CLUSTER_IP)} {_LOCAL_SOURCE} -j KUBE-MARK-MASQ"

    def _load_balancer(self) -> tuple[str, ...]:
        local = self._in(IpsetId.LOAD_BALANCER_LOCAL)
        return (f"{local} {_LOCAL_SOURCE} -j KUBE-MARK-MASQ", f"{local} -j RETURN", "-j KUBE-MARK-MASQ")

    def _node_port(self) -> tuple[str, ...]:
        rules = []
        for protocol, everybody, local, fields in (
            ("tcp", IpsetId.NODE_PORT_TCP, IpsetId.NODE_PORT_LOCAL_TCP, "dst"),
            ("udp", IpsetId.NODE_PORT_UDP, IpsetId.NODE_PORT_LOCAL_UDP, "dst"),
            ("sctp", IpsetId.NODE_PORT_SCTP, IpsetId.NODE_PORT_LOCAL_SCTP, "dst,dst"),
        ):
            kept = f"-p {protocol} {self._in(local, fields)}"
            rules.append(f"{kept} {_LOCAL_SOURCE} -j KUBE-MARK-MASQ")
            rules.append(f"{kept} -j RETURN")
            rules.append(f"-p {protocol} {self._in(everybody, fields)} -j KUBE-MARK-MASQ")
        return tuple(rules)

    def _postrouting(self) -> tuple[str, ...]:
        return (
            f"{self._in(IpsetId.LOOP_BACK, 'dst,dst,src')} -j MASQUERADE",
            f"-m mark ! --mark {self._mark}/{self._mark} -j RETURN",
            # A packet that comes through again, as within a tunnel, is not masqueraded again.
            f"-j MARK --xor-mark {self._mark}",
            "-j MASQUERADE --random-fully",
        )
