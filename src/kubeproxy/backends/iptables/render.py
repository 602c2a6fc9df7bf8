"""Plans to chains and rules, one service port at a time. Pure: returns text, keeps no state.

Rules are written as iptables-save prints them (upstream's input differs in the order of options, the kernel's rules
do not), each line ended by a newline. Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go syncProxyRules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

from kubeproxy.backends.iptables.names import EXT, FW, PROTOCOL_WORDS, SEP, SVC, SVL, chain_hashes, comment, port_name
from kubeproxy.backends.rules import pods_in_iptables
from kubeproxy.model.addresses import Family, Range, destination_texts, network_text, unpack
from kubeproxy.model.plan import Action, Detector, Frontend, FrontendKind, Policy, ServicePlan, Traffic

LOCALHOST_COUNTER: Final = "localhost_nps_accepted_pkts"
INVALID_COUNTER: Final = "ct_state_invalid_dropped_pkts"


class Style(NamedTuple):
    """The parts that the rules of all Services of a family have in common.

    `if_local` and `if_not_local`: matches for traffic from pods and from elsewhere, '' if pods are not recognised.
    `prefix_length`: that of a single address. `localhost_counter`: NodePort connections to loopback are counted.
    """

    if_local: str
    if_not_local: str
    prefix_length: int
    localhost_counter: bool

    @classmethod
    def of(cls, family: Family, detector: Detector, *, localhost_counter: bool) -> Style:
        """Return the style for a way to recognise pods."""
        local = pods_in_iptables(detector)
        return cls(local, f"! {local}" if local else "", 8 * family.address_size, localhost_counter)


class Detail(Enum):
    """Whether endpoint rules have a comment that names their Service and endpoint; not in a large cluster."""

    FULL = "full"
    SPARSE = "sparse"


class Dispatch(NamedTuple):
    """A service port's rules in the chains that all Services share, by table and chain."""

    filter_services: str = ""
    filter_external: str = ""
    filter_nodeports: str = ""
    filter_firewall: str = ""
    nat_services: str = ""
    nat_nodeports: str = ""


class _Port:
    """The chain names, protocol and comment in the rules of a service port."""

    __slots__ = ("ext", "fw", "hash_text", "proto", "svc", "svl", "text")

    def __init__(self, plan: ServicePlan, suffix: str) -> None:
        name = port_name(plan.key)
        self.proto = PROTOCOL_WORDS[plan.key.protocol]
        self.hash_text = name + self.proto
        self.text = comment(name)
        self.svc, self.svl, self.ext, self.fw = SVC + suffix, SVL + suffix, EXT + suffix, FW + suffix

    def internal_chain(self, traffic: Traffic) -> str:
        """Return the chain for cluster IP traffic, '' if it is not forwarded."""
        if not traffic.outside.forwards:
            return ""
        return self.svl if traffic.outside.picks_local else self.svc

    def match(self, address: str, port: int, words: str) -> str:
        """Return the matches of a rule for a frontend, with its comment."""
        label = f'-m comment --comment "{self.text}{words}"'
        return f"-d {address} -p {self.proto} {label} -m {self.proto} --dport {port}"


def suffixes(plans: Sequence[ServicePlan]) -> list[str]:
    """Return the suffixes of the names of these service ports' chains."""
    return chain_hashes([port_name(plan.key) + PROTOCOL_WORDS[plan.key.protocol] for plan in plans])


def dispatch(plan: ServicePlan, suffix: str, style: Style) -> Dispatch:
    """Return a service port's rules in the shared chains."""
    port = _Port(plan, suffix)
    lines: list[list[str]] = [[], [], [], [], [], []]
    for frontend in plan.frontends:
        if frontend.kind is FrontendKind.CLUSTER:
            _cluster_ip(plan, port, frontend, style, lines)
        elif frontend.kind is FrontendKind.NODEPORT:
            _node_port(plan, port, frontend.port, style, lines)
        else:
            _external_ip(plan, port, frontend, style, lines)
    if plan.health_port:
        lines[2].append(
            f'-A KUBE-NODEPORTS -p tcp -m comment --comment "{port.text} health check node port" '
            f"-m tcp --dport {plan.health_port} -j ACCEPT\n"
        )
    return Dispatch(*("".join(part) for part in lines))


def _cluster_ip(plan: ServicePlan, port: _Port, frontend: Frontend, style: Style, lines: list[list[str]]) -> None:
    address = f"{unpack(frontend.address)}/{style.prefix_length}"
    chain = port.internal_chain(plan.internal)
    if chain:
        lines[4].append(f"-A KUBE-SERVICES {port.match(address, frontend.port, ' cluster IP')} -j {chain}\n")
    else:
        words, target = _refusal(plan.internal)
        lines[0].append(f"-A KUBE-SERVICES {port.match(address, frontend.port, words)} -j {target}\n")


def _external_ip(plan: ServicePlan, port: _Port, frontend: Frontend, style: Style, lines: list[list[str]]) -> None:
    address = f"{unpack(frontend.address)}/{style.prefix_length}"
    balancer = frontend.kind is FrontendKind.LOADBALANCER
    closed = balancer and plan.source_ranges is not None
    if plan.usable:
        words = " loadbalancer IP" if balancer else " external IP"
        chain = port.fw if closed else port.ext
        lines[4].append(f"-A KUBE-SERVICES {port.match(address, frontend.port, words)} -j {chain}\n")
        if closed:
            words = f" traffic not accepted by {port.fw}"
            lines[3].append(f"-A KUBE-PROXY-FIREWALL {port.match(address, frontend.port, words)} -j DROP\n")
    if not plan.external.outside.forwards:
        words, target = _refusal(plan.external)
        lines[1].append(f"-A KUBE-EXTERNAL-SERVICES {port.match(address, frontend.port, words)} -j {target}\n")


def _node_port(plan: ServicePlan, port: _Port, number: int, style: Style, lines: list[list[str]]) -> None:
    if plan.usable:
        match = f'-p {port.proto} -m comment --comment "{port.text}" -m {port.proto} --dport {number}'
        if style.localhost_counter:
            lines[5].append(
                f"-A KUBE-NODEPORTS -d 127.0.0.0/8 {match} -m nfacct --nfacct-name {LOCALHOST_COUNTER} -j {port.ext}\n"
            )
        lines[5].append(f"-A KUBE-NODEPORTS {match} -j {port.ext}\n")
    if not plan.external.outside.forwards:
        words, target = _refusal(plan.external)
        lines[1].append(
            f'-A KUBE-EXTERNAL-SERVICES -p {port.proto} -m comment --comment "{port.text}{words}" '
            f"-m addrtype --dst-type LOCAL -m {port.proto} --dport {number} -j {target}\n"
        )


def _refusal(traffic: Traffic) -> tuple[str, str]:
    """Return the comment and the target for traffic that has no endpoint."""
    if traffic.outside is Action.REJECT:
        return " has no endpoints", "REJECT"
    return " has no local endpoints", "DROP"


def chains(plan: ServicePlan, suffix: str, style: Style, detail: Detail) -> dict[str, str]:
    """Return a service port's own chains in the nat table, and the rules of each."""
    port = _Port(plan, suffix)
    if not plan.usable:
        return {}
    rules_by_chain: dict[str, str] = {}
    kinds = {frontend.kind for frontend in plan.frontends}
    if kinds - {FrontendKind.CLUSTER}:
        rules_by_chain[port.ext] = _external_rules(plan, port, style)
    if FrontendKind.LOADBALANCER in kinds and plan.source_ranges is not None:
        rules_by_chain[port.fw] = _firewall_rules(port, plan.source_ranges)
    addresses: dict[str, str] = {}
    choices: list[tuple[str, list[str]]] = []
    for chain, pool in ((port.svc, plan.cluster), (port.svl, plan.local)):
        if pool:
            texts = destination_texts(pool)
            addresses |= texts
            choices.append((chain, sorted(texts)))
    ends = chain_hashes([port.hash_text + text for text in addresses])
    seps = {text: SEP + end for text, end in zip(addresses, ends, strict=True)}
    for chain, ordered in choices:
        rules = _masquerade_rule(plan, port, chain, style) if port.internal_chain(plan.internal) == chain else ""
        rules_by_chain[chain] = rules + _choice_rules(plan, port, chain, ordered, seps, detail)
    return rules_by_chain | _endpoint_chains(plan, port, addresses, seps, style, detail)


def _endpoint_chains(
    plan: ServicePlan, port: _Port, addresses: Mapping[str, str], seps: Mapping[str, str], style: Style, detail: Detail
) -> dict[str, str]:
    """Return the chain of each endpoint and its rules; `addresses` and `seps` are by destination."""
    label = f' -m comment --comment "{port.text}"' if detail is Detail.FULL else ""
    source = f"/{style.prefix_length}{label} -j KUBE-MARK-MASQ\n-A "
    proto = f" -p {port.proto}{label}"
    target = f" -m {port.proto} -j DNAT --to-destination "
    recent = " -m recent --set --name " if plan.affinity else ""
    return {
        sep: f"-A {sep} -s {addresses[text]}{source}{sep}{proto}{recent and recent + sep}{target}{text}\n"
        for text, sep in seps.items()
    }


def _masquerade_rule(plan: ServicePlan, port: _Port, chain: str, style: Style) -> str:
    """Return the rule that masquerades cluster IP traffic: all of it, or the part that does not come from pods."""
    cluster_ip = next((f for f in plan.frontends if f.kind is FrontendKind.CLUSTER), None)
    if cluster_ip is None:
        return ""
    if plan.internal.pod in (Action.CLUSTER_MASQUERADE, Action.LOCAL_MASQUERADE):
        who = ""
    elif style.if_not_local:
        who = f"{style.if_not_local} "
    else:
        return ""
    address = f"{unpack(cluster_ip.address)}/{style.prefix_length}"
    # iptables-save has the source before, and the interface after the destination; any order is the same rule.
    return f"-A {chain} {who}{port.match(address, cluster_ip.port, ' cluster IP')} -j KUBE-MARK-MASQ\n"


def _external_rules(plan: ServicePlan, port: _Port, style: Style) -> str:
    """Return the rules of the EXT chain, to which all frontends except the cluster IP jump."""
    ext = port.ext

    def label(words: str) -> str:
        return f'-m comment --comment "{words} for {port.text} external destinations"'

    if plan.policies.external is Policy.CLUSTER:
        return f"-A {ext} {label('masquerade traffic')} -j KUBE-MARK-MASQ\n-A {ext} -j {port.svc}\n"
    rules = ""
    if plan.cluster:
        node = "-m addrtype --src-type LOCAL"
        if style.if_local:
            rules = f"-A {ext} {style.if_local} {label('pod traffic')} -j {port.svc}\n"
        rules += f"-A {ext} {label('masquerade LOCAL traffic')} {node} -j KUBE-MARK-MASQ\n"
        rules += f"-A {ext} {label('route LOCAL traffic')} {node} -j {port.svc}\n"
    return rules + (f"-A {ext} -j {port.svl}\n" if plan.local else "")


def _firewall_rules(port: _Port, sources: Sequence[Range]) -> str:
    rule = f'-m comment --comment "{port.text} loadbalancer IP" -j {port.ext}\n'
    rest = f'-A {port.fw} -m comment --comment "other traffic to {port.text} will be dropped by KUBE-PROXY-FIREWALL"\n'
    return "".join([f"-A {port.fw} -s {network_text(source)} {rule}" for source in sources]) + rest


def _choice_rules(
    plan: ServicePlan, port: _Port, chain: str, texts: Sequence[str], seps: Mapping[str, str], detail: Detail
) -> str:
    """Return the rules that choose one of these destinations."""
    label = f' -m comment --comment "{port.text} -> ' if detail is Detail.FULL else ""
    starts = [f'-A {chain}{label}{text}"' for text in texts] if label else [f"-A {chain}"] * len(texts)
    names = [seps[text] for text in texts]
    rules: list[str] = []
    if plan.affinity:
        check = f" -m recent --rcheck --seconds {plan.affinity} --reap --name "
        rules = [f"{start}{check}{sep} -j {sep}\n" for start, sep in zip(starts, names, strict=True)]
    chances = map(_chance, range(len(texts), 0, -1))
    rules += [f"{start}{chance} -j {sep}\n" for start, chance, sep in zip(starts, chances, names, strict=True)]
    return "".join(rules)


@lru_cache(maxsize=4096)
def _chance(left: int) -> str:
    """Return the match for one connection in `count`, '' for all."""
    return f" -m statistic --mode random --probability {1 / left:.10f}" if left > 1 else ""
