"""The chains that all Services share, and how packets get into them. Pure.

Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go iptablesJumpChains and syncProxyRules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kubeproxy.backends.iptables.render import INVALID_COUNTER
from kubeproxy.backends.rules import Jump
from kubeproxy.model.addresses import Family, is_loopback, unpack

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


class SharedChain(NamedTuple):
    """The rules of a chain that belongs to no single Service: blocks of lines in any order, and the last lines."""

    blocks: Sequence[str]
    last: str = ""

    @property
    def text(self) -> str:
        """Return all rules."""
        return "".join(self.blocks) + self.last


class StartOptions(NamedTuple):
    """Settings of the configuration and the node that are read once, at the start.

    `localhost_nodeports`: as configured. `liberal`: nf_conntrack_tcp_be_liberal. `counters`: the kernel has nfacct,
    None while unknown.

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


class RuleSettings(NamedTuple):
    """The inputs of the shared rules, apart from the Services.

    `localhost`: NodePorts answer on loopback. `liberal`: the kernel accepts TCP segments out of window. `counters`: the
    kernel has named counters. `nodeport_ips`: None for all local addresses.
    """

    family: Family
    mark: int
    localhost: bool
    liberal: bool
    counters: bool
    random_fully: bool
    nodeport_ips: tuple[bytes, ...] | None


def forward_rules(settings: RuleSettings) -> str:
    """Return the rules of KUBE-FORWARD."""
    counted = f" -m nfacct --nfacct-name {INVALID_COUNTER}" if settings.counters else ""
    # Packets that conntrack calls invalid would reach a client untranslated and end its connection (issue 74839).
    invalid = "" if settings.liberal else f"-A KUBE-FORWARD -m conntrack --ctstate INVALID{counted} -j DROP\n"
    mark = f"{settings.mark:#x}"
    return invalid + (
        f'-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark {mark}/{mark} -j ACCEPT\n'
        '-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" '
        "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
    )


def masquerade_rules(settings: RuleSettings) -> str:
    """Return the rules of KUBE-POSTROUTING and KUBE-MARK-MASQ."""
    mark = f"{settings.mark:#x}"
    fully = " --random-fully" if settings.random_fully else ""
    return (
        f"-A KUBE-POSTROUTING -m mark ! --mark {mark}/{mark} -j RETURN\n"
        # The mark is cleared, so that a packet that passes the stack again is not masqueraded again.
        f"-A KUBE-POSTROUTING -j MARK --xor-mark {mark}\n"
        '-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" '
        f"-j MASQUERADE{fully}\n"
        f"-A KUBE-MARK-MASQ -j MARK --or-mark {mark}\n"
    )


def fixed_chains(settings: RuleSettings) -> dict[tuple[str, str], SharedChain]:
    """Return the chains that no Service changes, by table and name."""
    lines = masquerade_rules(settings).splitlines(keepends=True)
    found = {
        ("nat", chain): SharedChain(["".join([line for line in lines if line.startswith(f"-A {chain} ")])])
        for chain in ("KUBE-POSTROUTING", "KUBE-MARK-MASQ")
    }
    return found | {("filter", "KUBE-FORWARD"): SharedChain([forward_rules(settings)])}


def nodeport_rules(settings: RuleSettings) -> str:
    """Return the rules at the end of KUBE-SERVICES that jump to KUBE-NODEPORTS."""
    rule = f'-m comment --comment "{_LAST}"'
    if settings.nodeport_ips is not None:
        length = 8 * settings.family.address_size
        return "".join(
            [f"-A KUBE-SERVICES -d {unpack(ip)}/{length} {rule} -j KUBE-NODEPORTS\n" for ip in settings.nodeport_ips]
        )
    but = "! -d ::1/128 " if settings.family is Family.IPV6 else "" if settings.localhost else "! -d 127.0.0.0/8 "
    return f"-A KUBE-SERVICES {but}{rule} -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n"
