"""Checks whether this machine is the node in question: the proxy's Node, or any node of the cluster."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from kubeproxy.ask.checks import identity
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.errors import KubeProxyError, NoAnswerError
from kubeproxy.kernel.proc import processes
from kubeproxy.model.addresses import Family
from kubeproxy.setup import host

_KUBELETS = ("kubelet", "kubelite", "k3s")
"""The name of the process in which the kubelet runs begins with one of these words."""


def own_addresses() -> set[bytes]:
    """Return the packed addresses of this machine. Raises ApplyError."""
    local = host.packed_local_addresses(tuple(Family))
    return {address for each in local.values() for address in each}


def registered(facts: Facts) -> Iterator[Diagnosis]:
    """Check whether the Node with the proxy's node name exists, and is this machine. Raises ApplyError."""
    yield from identity.registered(
        facts.node, facts.world.node_name, socket.gethostname().lower(), waits=bool(facts.awaits)
    )
    if facts.node_deleted:
        yield identity.deleted(facts.world.node_name)
    if facts.node is not None:
        yield from identity.addressed(facts.node, own_addresses())


def networked(node: CheckedNode, facts: Facts) -> Iterator[Diagnosis]:
    """Check the podCIDRs of the proxy's Node. Raises ApplyError."""
    if facts.node is not None:
        local_mode, networks = node.config.local_mode, node.config.cluster_cidrs
        yield from identity.networked(facts.node, local_mode, networks, own_addresses())


def elsewhere(node: CheckedNode, command: str) -> Diagnosis | None:
    """Return the finding that this machine is not the node in question, or None if it may be the node, or if a proxy
    answered. `command` asks the nodes' proxies. Raises ApplyError."""
    if node.running:
        return None
    facts = node.facts
    if facts is not None and (away := identity.elsewhere(facts.node, own_addresses())):
        fix = (
            f"ask its proxy: `{command} --node {facts.world.node_name}`; if this machine is that Node, have the "
            "kubelet register its address again (--node-ip)"
        )
        return Diagnosis(Severity.UNKNOWN, "proxy", away, fix=fix)
    if facts is not None and (facts.node is not None or facts.reach is None or not facts.reach.nodes_listed):
        return None
    if node.proxies or _has_rules(node) or (facts is None and processes.named(_KUBELETS)):
        return None
    sign = f"there is no Node {facts.world.node_name}" if facts is not None else "no kubelet runs here"
    what = f"this machine is no node: {sign}, no kube-proxy runs, and the kernel has no rules of a kube-proxy"
    is_one = "give the name of its Node with --hostname-override" if facts is not None else "give its --config"
    fix = f"ask the nodes' proxies: `{command}`; if this machine is a node, {is_one}"
    return Diagnosis(Severity.UNKNOWN, "proxy", what, fix=fix)


def must_be_here(node: CheckedNode, command: str) -> None:
    """Raise NoAnswerError if this machine is not the node in question, as `elsewhere` decides."""
    away = elsewhere(node, command)
    if away is not None:
        raise NoAnswerError(f"{away.text}. Fix: {away.fix}")


def _has_rules(node: CheckedNode) -> bool:
    """Return whether the kernel has, or may have, rules of a kube-proxy."""
    try:
        return any(node.rules.traces.values())
    except (KubeProxyError, OSError):
        return True
