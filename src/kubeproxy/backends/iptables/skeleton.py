"""The chains that all Services share, the jumps into them, and the settings that their rules depend on. Pure.

Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go iptablesJumpChains and syncProxyRules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kubeproxy.backends.rules import Jump, pods_in_iptables
from kubeproxy.model.addresses import Family, is_loopback, unpack
from kubeproxy.model.plan import FamilyGlobals, Globals

Place = tuple[str, str]
"""A table and a chain."""

LOCALHOST_COUNTER: Final = "localhost_nps_accepted_pkts"
INVALID_COUNTER: Final = "ct_state_invalid_dropped_pkts"

CANARY: Final = "KUBE-PROXY-CANARY"
CANARY_TABLES: Final = ("mangle", "nat", "filter")
KUBELET_FIREWALL: Final = "KUBE-FIREWALL"
MARTIANS: Final = (
    f"-A {KUBELET_FIREWALL} ! -s 127.0.0.0/8 -d 127.0.0.0/8 "
    '-m comment --comment "block incoming localnet connections" '
    "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
"""Without it, route_localnet lets neighbours reach loopback (kubernetes issue 90259); kubelet has the same rule."""

_NEW: Final = "-m conntrack --ctstate NEW "
_LAST: Final = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"


_EXTERNAL: Final = "kubernetes externally-visible service portals"
_PORTALS: Final = "kubernetes service portals"
_BALANCERS: Final = "kubernetes load balancer firewall"
JUMPS: Final = (
    Jump("filter", "INPUT", "KUBE-EXTERNAL-SERVICES", _EXTERNAL, _NEW),
    Jump("filter", "FORWARD", "KUBE-EXTERNAL-SERVICES", _EXTERNAL, _NEW),
    Jump("filter", "INPUT", "KUBE-NODEPORTS", "kubernetes health check service ports"),
    Jump("filter", "FORWARD", "KUBE-SERVICES", _PORTALS, _NEW),
    Jump("filter", "OUTPUT", "KUBE-SERVICES", _PORTALS, _NEW),
    Jump("filter", "FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules"),
    Jump("filter", "INPUT", "KUBE-PROXY-FIREWALL", _BALANCERS, _NEW),
    Jump("filter", "OUTPUT", "KUBE-PROXY-FIREWALL", _BALANCERS, _NEW),
    Jump("filter", "FORWARD", "KUBE-PROXY-FIREWALL", _BALANCERS, _NEW),
    Jump("nat", "OUTPUT", "KUBE-SERVICES", _PORTALS),
    Jump("nat", "PREROUTING", "KUBE-SERVICES", _PORTALS),
    Jump("nat", "POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules"),
    Jump("filter", "INPUT", KUBELET_FIREWALL),
    Jump("filter", "OUTPUT", KUBELET_FIREWALL),
)
"""Jumps to our chains, in the order in which they are inserted at the head of the built-in chains."""


OWN_CHAINS: Final = frozenset({jump.target for jump in JUMPS} | {CANARY, "KUBE-MARK-MASQ"})
"""Our chains that belong to no single Service."""

NAT_SERVICES: Final = ("nat", "KUBE-SERVICES")
NAT_NODEPORTS: Final = ("nat", "KUBE-NODEPORTS")
SHARED: Final[tuple[Place, ...]] = (
    ("filter", "KUBE-SERVICES"),
    ("filter", "KUBE-EXTERNAL-SERVICES"),
    ("filter", "KUBE-NODEPORTS"),
    ("filter", "KUBE-PROXY-FIREWALL"),
    NAT_SERVICES,
    NAT_NODEPORTS,
)
"""The chains in which each Service may have rules, in the order in which they are written."""


class SharedChain(NamedTuple):
    """The rules of a chain that belongs to no single Service: blocks of lines in any order, and the last lines."""

    blocks: Sequence[str]
    last: str = ""

    @property
    def text(self) -> str:
        """Return all rules."""
        return "".join(self.blocks) + self.last


class StartOptions(NamedTuple):
    """Settings that are read from the configuration and the node once, at the start.

    `localhost_nodeports` as configured; `liberal`: nf_conntrack_tcp_be_liberal; `counters`: the kernel has named packet
    counters, None while it could not be asked.
    """

    localhost_nodeports: bool
    liberal: bool
    counters: bool | None


class RuleSettings(NamedTuple):
    """The inputs of a family's rules, apart from the Services.

    `nodeport_ips` is None for all local addresses; `if_local` is the match for traffic of pods, '' if there is none.
    """

    family: Family
    options: StartOptions
    mark: int
    nodeport_ips: tuple[bytes, ...] | None
    if_local: str

    @classmethod
    def of(cls, family: Family, world: Globals, options: StartOptions) -> RuleSettings:
        """Return the settings of a family. Raises ConfigError for an interface name that is invalid in rules."""
        ours = world.of(family) or FamilyGlobals()
        return cls(family, options, world.masquerade_mark, ours.nodeport_ips, pods_in_iptables(ours.detector))

    @property
    def localhost(self) -> bool:
        """Return whether NodePorts answer on loopback."""
        if self.family is not Family.IPV4 or not self.options.localhost_nodeports:
            return False
        return self.nodeport_ips is None or any(map(is_loopback, self.nodeport_ips))

    @property
    def localhost_counter(self) -> bool:
        """Return whether NodePort connections to loopback are counted."""
        return bool(self.options.counters) and self.localhost

    @property
    def prefix_length(self) -> int:
        """Return the prefix length of a single address."""
        return 8 * self.family.address_size

    @property
    def if_not_local(self) -> str:
        """Return the match for traffic that does not come from pods, '' if there is none."""
        return f"! {self.if_local}" if self.if_local else ""

    def is_like(self, other: RuleSettings) -> bool:
        """Return whether two settings give the same rules for all Services.

        Other NodePort addresses change only one shared chain, which the next sync writes.
        """
        return self.localhost == other.localhost and self._replace(nodeport_ips=other.nodeport_ips) == other


def forward_rules(settings: RuleSettings) -> str:
    """Return the rules of KUBE-FORWARD."""
    counted = f" -m nfacct --nfacct-name {INVALID_COUNTER}" if settings.options.counters else ""
    # Packets that conntrack calls invalid would reach a client untranslated and end its connection (issue 74839).
    invalid = "" if settings.options.liberal else f"-A KUBE-FORWARD -m conntrack --ctstate INVALID{counted} -j DROP\n"
    mark = f"{settings.mark:#x}"
    return invalid + (
        f'-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark {mark}/{mark} -j ACCEPT\n'
        '-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" '
        "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
    )


def fixed_chains(settings: RuleSettings) -> dict[Place, SharedChain]:
    """Return the chains that no Service changes."""
    mark = f"{settings.mark:#x}"
    postrouting = (
        f"-A KUBE-POSTROUTING -m mark ! --mark {mark}/{mark} -j RETURN\n"
        # The mark is cleared, so that a packet that passes the stack again is not masqueraded again.
        f"-A KUBE-POSTROUTING -j MARK --xor-mark {mark}\n"
        '-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" '
        "-j MASQUERADE --random-fully\n"
    )
    return {
        ("nat", "KUBE-POSTROUTING"): SharedChain([postrouting]),
        ("nat", "KUBE-MARK-MASQ"): SharedChain([f"-A KUBE-MARK-MASQ -j MARK --or-mark {mark}\n"]),
        ("filter", "KUBE-FORWARD"): SharedChain([forward_rules(settings)]),
    }


def nodeport_rules(settings: RuleSettings) -> str:
    """Return the rules at the end of KUBE-SERVICES that jump to KUBE-NODEPORTS."""
    rule = f'-m comment --comment "{_LAST}"'
    if settings.nodeport_ips is not None:
        length = settings.prefix_length
        return "".join(
            [f"-A KUBE-SERVICES -d {unpack(ip)}/{length} {rule} -j KUBE-NODEPORTS\n" for ip in settings.nodeport_ips]
        )
    but = "! -d ::1/128 " if settings.family is Family.IPV6 else "" if settings.localhost else "! -d 127.0.0.0/8 "
    return f"-A KUBE-SERVICES {but}{rule} -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n"
