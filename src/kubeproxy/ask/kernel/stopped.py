"""The rules that a stopped proxy left, compared with the objects of one Service."""

from __future__ import annotations

from msgspec.structs import replace

from kubeproxy.ask.checks import checkup, strangers, whereabouts
from kubeproxy.ask.desk import Desk
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.kernel.looks import examiners, look
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.backends.state import Kind
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.addresses import destination_text
from kubeproxy.model.plan import ServiceName

_FROM_OBJECTS = "the answer is from the objects alone"


def left_behind(asked: Desk, facts: Facts, name: ServiceName) -> Diagnosis:
    """Return what serves a Service whose objects were read without a proxy: a running proxy that was not asked, the
    rules of a stopped one, or nothing.
    """
    node = checkup.checked(asked, facts)
    if node.proxies:
        return Diagnosis(Severity.NOTE, "proxy", f"{strangers.unasked(node.proxies)}; {_FROM_OBJECTS}")
    try:
        if away := whereabouts.elsewhere(node, f"kubectl kubeproxy services {'/'.join(name)}"):
            return replace(away, severity=Severity.NOTE, what=f"{away.what}; {_FROM_OBJECTS}")
        if not any(True for _ in node.mode.traces(checkup.NodeRules(node).sight)):
            what = f"no kube-proxy runs here, and the kernel has no rules of {node.mode.name} mode"
            return Diagnosis(Severity.NOTE, "proxy", f"{what}; {_FROM_OBJECTS}")
        return _compared(asked, facts, name, node.mode.flows_end)
    except (KubeProxyError, OSError) as error:
        what = f"no kube-proxy was asked, and the rules in the kernel cannot be read ({error}); {_FROM_OBJECTS}"
        return Diagnosis(Severity.NOTE, "proxy", what)


def _compared(asked: Desk, facts: Facts, name: ServiceName, flows_end: FlowsEnd) -> Diagnosis:
    service, begin = "/".join(name), "no kube-proxy runs here: the rules of the stopped proxy"
    fix = "start kube-proxy on this node"
    if flows_end is FlowsEnd.PROXY:
        what = f"{begin} lead to its listeners, which are closed, so nothing serves {service}"
        return Diagnosis(Severity.BROKEN, "proxy", what, fix=fix)
    with examiners(facts, facts.world.families) as kernel:
        found = look(asked.services, kernel, [name]).findings
    plans = [plan for one in asked.services([name]) for plan in one.plans]
    ends = {one for plan in plans for pool in (plan.cluster, plan.local) for one in pool}
    lacking = [f"{one.what} " for one in found if one.kind is Kind.MISSING]
    lost = {one for one in ends if any(f"endpoint {destination_text(one)} " in what for what in lacking)}
    what = f"{begin} still serve {len(ends) - len(lost)} of {len(ends)} endpoints of {service} (read now)"
    if not found:
        why = "changes of Services and endpoints do not get into the kernel"
        return Diagnosis(Severity.UNKNOWN, "proxy", what, why, fix)
    list_them = f"`kube-proxy verify {service}{asked.flags}` lists the differences"
    why = f"they differ from what the objects and this configuration need; {list_them}"
    return Diagnosis(Severity.BROKEN, "proxy", what, why, fix)
