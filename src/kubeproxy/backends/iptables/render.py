"""Converts plans of Services to the text of chains and rules, one service port at a time. Pure. Rules have the form in
which iptables-save prints them, each line ended by a newline. The Go kube-proxy writes the options in another order,
but the rules in the kernel are the same. Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go syncProxyRules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

from kubeproxy.backends.iptables import skeleton
from kubeproxy.backends.iptables.skeleton import PROTOCOL_WORDS, Place, RuleSettings, chain_hashes, port_name
from kubeproxy.model.addresses import Range, destination_texts, network_text, unpack
from kubeproxy.model.plan import Action, Frontend, FrontendKind, Policy, ServicePlan, Traffic

Lines = dict[Place, str]
"""Rules by table and chain."""


class _Port:
    __slots__ = ("ext", "fw", "hash_text", "proto", "svc", "svl", "text")

    def __init__(self, plan: ServicePlan, suffix: str) -> None:
        name = port_name(plan.key)
        self.proto = PROTOCOL_WORDS[plan.key.protocol]
        self.hash_text = name + self.proto
        self.text = skeleton.comment(name)
        self.svc, self.svl, self.ext, self.fw = (
            skeleton.SVC + suffix,
            skeleton.SVL + suffix,
            skeleton.EXT + suffix,
            skeleton.FW + suffix,
        )

    def internal_chain(self, traffic: Traffic) -> str:
        """Return the chain for cluster IP traffic, or '' if there are no endpoints."""
        if not traffic.outside.forwards:
            return ""
        return self.svl if traffic.outside.picks_local else self.svc

    def match(self, address: str, port: int, words: str = "", local: str = "") -> str:
        """Return the match for the packets of a frontend; a NodePort has no address. `words` are the comment's text
        after the name, `local` is a match for the node's addresses."""
        destination = f"-d {address} " if address else ""
        label = f'-m comment --comment "{self.text}{words}"'
        return f"{destination}-p {self.proto} {label}{local} -m {self.proto} --dport {port}"


def suffixes(plans: Sequence[ServicePlan]) -> list[str]:
    """Return the hash of each service port; the names of a port's chains end with its hash."""
    return chain_hashes([port_name(plan.key) + PROTOCOL_WORDS[plan.key.protocol] for plan in plans])


def dispatch(plan: ServicePlan, suffix: str, settings: RuleSettings) -> Lines:
    """Return a service port's rules in the chains that all Services share."""
    port = _Port(plan, suffix)
    lines: defaultdict[Place, str] = defaultdict(str)
    for frontend in plan.frontends:
        address = f"{unpack(frontend.address)}/{settings.prefix_length}" if frontend.address else ""
        if frontend.kind is FrontendKind.CLUSTER:
            if chain := port.internal_chain(plan.internal):
                match = port.match(address, frontend.port, " cluster IP")
                lines[skeleton.NAT_SERVICES] += f"-A KUBE-SERVICES {match} -j {chain}\n"
        elif plan.usable and frontend.kind is FrontendKind.NODEPORT:
            _node_port(port, frontend.port, settings, lines)
        elif plan.usable:
            _external_ip(plan, port, frontend, address, lines)
        _refuse(port, frontend, address, plan.traffic(frontend).outside, lines)
    if plan.health_port:
        lines["filter", "KUBE-NODEPORTS"] += (
            f'-A KUBE-NODEPORTS -p tcp -m comment --comment "{port.text} health check node port" '
            f"-m tcp --dport {plan.health_port} -j ACCEPT\n"
        )
    return dict(lines)


def _external_ip(plan: ServicePlan, port: _Port, frontend: Frontend, address: str, lines: Lines) -> None:
    balancer = frontend.kind is FrontendKind.LOADBALANCER
    closed = balancer and plan.source_ranges is not None
    match = port.match(address, frontend.port, " loadbalancer IP" if balancer else " external IP")
    lines[skeleton.NAT_SERVICES] += f"-A KUBE-SERVICES {match} -j {port.fw if closed else port.ext}\n"
    if closed:
        match = port.match(address, frontend.port, f" traffic not accepted by {port.fw}")
        lines["filter", "KUBE-PROXY-FIREWALL"] += f"-A KUBE-PROXY-FIREWALL {match} -j DROP\n"


def _node_port(port: _Port, number: int, settings: RuleSettings, lines: Lines) -> None:
    if settings.localhost_counter:
        counted = f"-m nfacct --nfacct-name {skeleton.LOCALHOST_COUNTER}"
        match = port.match("127.0.0.0/8", number)
        lines[skeleton.NAT_NODEPORTS] += f"-A KUBE-NODEPORTS {match} {counted} -j {port.ext}\n"
    lines[skeleton.NAT_NODEPORTS] += f"-A KUBE-NODEPORTS {port.match('', number)} -j {port.ext}\n"


def _refuse(port: _Port, frontend: Frontend, address: str, action: Action, lines: Lines) -> None:
    if action.forwards:
        return
    chain = "KUBE-SERVICES" if frontend.kind is FrontendKind.CLUSTER else "KUBE-EXTERNAL-SERVICES"
    words, target = (" has no endpoints", "REJECT") if action is Action.REJECT else (" has no local endpoints", "DROP")
    match = port.match(address, frontend.port, words, "" if address else " -m addrtype --dst-type LOCAL")
    lines["filter", chain] += f"-A {chain} {match} -j {target}\n"


def chains(plan: ServicePlan, suffix: str, settings: RuleSettings, commented: bool) -> dict[str, str]:
    """Return a service port's own chains of the nat table, each with its rules. `commented` (False in a large cluster):
    rules of endpoints have comments with the Service's name."""
    port = _Port(plan, suffix)
    if not plan.usable:
        return {}
    rules_by_chain: dict[str, str] = {}
    kinds = {frontend.kind for frontend in plan.frontends}
    if kinds - {FrontendKind.CLUSTER}:
        rules_by_chain[port.ext] = _external_rules(plan, port, settings)
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
    seps = {text: skeleton.SEP + end for text, end in zip(addresses, ends, strict=True)}
    for chain, ordered in choices:
        rules = _masquerade_rule(plan, port, chain, settings) if port.internal_chain(plan.internal) == chain else ""
        rules_by_chain[chain] = rules + _choice_rules(plan, port, chain, ordered, seps, commented)
    return rules_by_chain | _endpoint_chains(plan, port, addresses, seps, settings, commented)


def _endpoint_chains(
    plan: ServicePlan,
    port: _Port,
    addresses: Mapping[str, str],
    seps: Mapping[str, str],
    settings: RuleSettings,
    commented: bool,
) -> dict[str, str]:
    label = f' -m comment --comment "{port.text}"' if commented else ""
    source = f"/{settings.prefix_length}{label} -j KUBE-MARK-MASQ\n-A "
    proto = f" -p {port.proto}{label}"
    target = f" -m {port.proto} -j DNAT --to-destination "
    recent = " -m recent --set --name " if plan.affinity else ""
    return {
        sep: f"-A {sep} -s {addresses[text]}{source}{sep}{proto}{recent and recent + sep}{target}{text}\n"
        for text, sep in seps.items()
    }


def _masquerade_rule(plan: ServicePlan, port: _Port, chain: str, settings: RuleSettings) -> str:
    cluster_ip = next((f for f in plan.frontends if f.kind is FrontendKind.CLUSTER), None)
    if cluster_ip is None:
        return ""
    if plan.internal.pod in (Action.CLUSTER_MASQUERADE, Action.LOCAL_MASQUERADE):
        source = ""
    elif settings.if_local:
        source = f"! {settings.if_local} "
    else:
        return ""
    address = f"{unpack(cluster_ip.address)}/{settings.prefix_length}"
    # iptables-save prints source, destination and interface in this order; the order of matches has no effect.
    return f"-A {chain} {source}{port.match(address, cluster_ip.port, ' cluster IP')} -j KUBE-MARK-MASQ\n"


def _external_rules(plan: ServicePlan, port: _Port, settings: RuleSettings) -> str:
    ext = port.ext

    def label(words: str) -> str:
        return f'-m comment --comment "{words} for {port.text} external destinations"'

    if plan.policies.external is Policy.CLUSTER:
        return f"-A {ext} {label('masquerade traffic')} -j KUBE-MARK-MASQ\n-A {ext} -j {port.svc}\n"
    rules = ""
    if plan.cluster:
        node = "-m addrtype --src-type LOCAL"
        if settings.if_local:
            rules = f"-A {ext} {settings.if_local} {label('pod traffic')} -j {port.svc}\n"
        rules += f"-A {ext} {label('masquerade LOCAL traffic')} {node} -j KUBE-MARK-MASQ\n"
        rules += f"-A {ext} {label('route LOCAL traffic')} {node} -j {port.svc}\n"
    return rules + (f"-A {ext} -j {port.svl}\n" if plan.local else "")


def _firewall_rules(port: _Port, sources: Sequence[Range]) -> str:
    rule = f'-m comment --comment "{port.text} loadbalancer IP" -j {port.ext}\n'
    rest = f'-A {port.fw} -m comment --comment "other traffic to {port.text} will be dropped by KUBE-PROXY-FIREWALL"\n'
    return "".join([f"-A {port.fw} -s {network_text(source)} {rule}" for source in sources]) + rest


def _choice_rules(
    plan: ServicePlan, port: _Port, chain: str, texts: Sequence[str], seps: Mapping[str, str], commented: bool
) -> str:
    label = f' -m comment --comment "{port.text} -> ' if commented else ""
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
    """Return the match that selects one in `left` connections at random; '' to select all."""
    return f" -m statistic --mode random --probability {1 / left:.10f}" if left > 1 else ""
