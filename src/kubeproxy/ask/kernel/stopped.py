"""Compares rules with the objects of Services, if the proxy that wrote the rules has stopped, or was not asked."""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from kubeproxy.ask.checks import checkup, packets, strangers, whereabouts
from kubeproxy.ask.checks.node import CheckedNode, NodeRules
from kubeproxy.ask.desk import Desk
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.kernel.looks import examiners, look
from kubeproxy.ask.lines import difference
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.backends.state import Kind
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.addresses import destination_text, family_of, place_text
from kubeproxy.model.answer import Packet
from kubeproxy.model.plan import ServiceName
from kubeproxy.setup import host
from kubeproxy.wording import counted

_START = "start kube-proxy on this node"
_FROM_OBJECTS = "the answer follows from the objects alone"
_DIFFER = "they differ from what the objects and this configuration need; `kube-proxy verify{}{}` lists the differences"


def rules_now(packet: Packet) -> str:
    """Return a text about the translations of a packet by the rules of all programs in the kernel; '' if the rules
    cannot be read."""
    family = family_of(packet.destination)
    local = host.packed_local_addresses((family,))[family]
    try:
        (first,) = packets.early(packets.CheckedConnection(packet, local))
        every, first = NodeRules().every, first._replace(before=inf)
        found = [strangers.translation(one) for each in every for one in each.translations(first)]
    except (KubeProxyError, OSError):
        return ""
    return "; ".join(found) or f"no rule in the kernel translates {place_text(packet.destination, packet.port)}"


def left_behind(asked: Desk, facts: Facts, name: ServiceName | None) -> Diagnosis:
    """Return the finding on the rules of a Service, or of all Services, if the objects were read without a proxy. The
    rules belong to a running proxy that was not asked, or to a stopped proxy, or there are no rules."""
    node = checkup.checked(asked, facts)
    proxies = node.proxies
    begin, unread = strangers.unasked(proxies, node.control).text, Severity.UNKNOWN if proxies else Severity.NOTE
    try:
        command = " ".join(("kubectl kubeproxy services", *(("/".join(name),) if name is not None else ())))
        if away := whereabouts.elsewhere(node, command):
            return replace(away, severity=Severity.NOTE, what=f"{away.what}; {_FROM_OBJECTS}")
        if not all(one.ours for one in proxies):
            return Diagnosis(Severity.UNKNOWN, "proxy", f"{begin}; {strangers.OTHER_LAYOUT}")
        if node.own_traces:
            return _compared(asked, facts, name, node.mode.flows_end, begin if proxies else "")
        if other := of_another_mode(node, begin):
            return replace(other, what=f"{other.what}; {_FROM_OBJECTS}")
        what = f"{begin}, and the kernel has no rules of {node.mode.name} mode"
        nothing = f"no kube-proxy serves {'/'.join(name) if name is not None else 'any Service'} on this node"
        is_unserved = not (proxies or facts.manifests)
        severity, end, fix = (Severity.BROKEN, nothing, _START) if is_unserved else (unread, _FROM_OBJECTS, "")
        return Diagnosis(severity, "proxy", f"{what}; {end}", fix=fix)
    except (KubeProxyError, OSError) as error:
        what = f"{begin}, and the rules in the kernel cannot be read ({error}); {_FROM_OBJECTS}"
        return Diagnosis(unread, "proxy", what)


def of_another_mode(node: CheckedNode, begin: str) -> Diagnosis | None:
    """Return the finding that the kernel has rules of another mode, and no rules of the node's mode; None for any other
    state. The finding begins with `begin`, which describes the kube-proxies of this node."""
    found = [name for name, traces in node.rules.traces.items() if traces]
    if not found or node.mode.name in found:
        return None
    what = f"{begin}, and the kernel has no rules of {node.mode.name} mode, but of {found[0]} mode"
    fix = f"give the --config of the {'running' if node.proxies else 'stopped'} proxy"
    return Diagnosis(Severity.UNKNOWN, "proxy", what, fix=fix)


def _compared(asked: Desk, facts: Facts, name: ServiceName | None, flows_end: FlowsEnd, unasked: str) -> Diagnosis:
    services = list(asked.services([name] if name is not None else []))
    label = "/".join(name) if name is not None else counted(len(services), "Service")
    begin, fix = "no kube-proxy runs here: the rules of the stopped proxy", _START
    if unasked:
        begin, fix = f"{unasked}; its rules", ""
        if flows_end is FlowsEnd.PROXY:
            return Diagnosis(Severity.NOTE, "proxy", f"{unasked}; {_FROM_OBJECTS}")
    elif flows_end is FlowsEnd.PROXY:
        what = f"{begin} lead to its listeners, which are closed, so nothing serves {label}"
        return Diagnosis(Severity.BROKEN, "proxy", what, fix=fix)
    with examiners(facts, {plan.key.family for one in services for plan in one.plans}) as kernel:
        found = look(asked.services, kernel, []).findings
    shared = [difference(*one) for one in found if one.service is None and one.kind is not Kind.EXTRA]
    if shared:
        what = f"{begin} lack a part that all Services need, so {label} may not answer: {shared[0]} (read now)"
        return Diagnosis(Severity.BROKEN, "proxy", what, _DIFFER.format("", asked.flags), fix)
    if name is not None:
        found = tuple(one for one in found if one.service == name)
    ends = {
        (one.name, end) for one in services for plan in one.plans for pool in (plan.cluster, plan.local) for end in pool
    }
    lost = {
        (owner, end)
        for owner, end in ends
        if any(one.service == owner and one.misses(destination_text(end)) for one in found)
    }
    what = f"{begin} still serve {len(ends) - len(lost)} of {counted(len(ends), 'endpoint')} of {label} (read now)"
    if not found:
        why = "changes of Services and endpoints do not get into the kernel"
        return (
            Diagnosis(Severity.NOTE, "proxy", what) if unasked else Diagnosis(Severity.UNKNOWN, "proxy", what, why, fix)
        )
    return Diagnosis(Severity.BROKEN, "proxy", what, _DIFFER.format(f" {label}" * bool(name), asked.flags), fix)
