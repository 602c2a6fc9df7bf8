"""The answer of `kube-proxy doctor`: all findings of this node, even if no proxy answers."""

from __future__ import annotations

import argparse
import os

from msgspec.structs import replace

from kubeproxy.ask.checks import identity, ports, strangers, whereabouts
from kubeproxy.ask.checks.checkup import Checkup, checked, look_at
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.finding import Diagnosis, Severity, UnreadError, worst_first
from kubeproxy.ask.source import source
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ConfigError, KubeProxyError
from kubeproxy.setup import modes


def examine(given: argparse.Namespace) -> tuple[CheckedNode, Checkup]:
    """Return the node that the arguments select, and all its findings."""
    before: list[Diagnosis] = []
    silence = ""
    try:
        asked = source(given)
        node = replace(checked(asked, asked.facts()), node_ports=asked.has_node_ports())
    except KubeProxyError as error:
        before = [error.finding] if isinstance(error, UnreadError) else []
        silence = "" if before else str(error)
        if isinstance(error.__cause__, TimeoutError):
            before, silence = [_hanging(f"the proxy hangs: {silence}")], ""
        config = KubeProxyConfiguration()
        try:
            named = ("config", given.config), ("proxy-mode", given.proxy_mode)
            flags = (*named, ("hostname-override", given.hostname_override))
            config = build_options(parse([f"--{name}={value}" for name, value in flags if value])).config
        except ConfigError as mistake:
            before += identity.configured(given.config or "the flags", str(mistake), ())
        node = CheckedNode(None, 0, modes.named(config.active_mode), config, control=given.control_socket)
    if node.facts is not None or not (before or given.config or given.proxy_mode):
        whereabouts.must_be_here(node, "kubectl kubeproxy doctor")
    report = look_at(node)
    if node.running and node.facts is not None and node.facts.writes:
        report.look("ports of Services", lambda: ports.of_services(node, asked.listeners()))
    unasked = strangers.unasked(node.proxies, node.control) if given.manifests or given.kubeconfig else None
    if unasked is not None and unasked.hangs:
        before.append(_hanging(unasked.text))
    report.findings = worst_first([*before, *report.findings])
    if silence:
        report.unknown.insert(0, silence)
    if unasked is not None and not unasked.hangs:
        report.unknown.insert(0, unasked.text)
    if os.geteuid():
        report.unknown.append("not run as root, so other processes cannot be examined; use sudo")
    return node, report


def _hanging(what: str) -> Diagnosis:
    why = "changes of Services and endpoints do not reach the kernel, whose last rules remain in effect"
    return Diagnosis(Severity.BROKEN, "proxy", what, why, strangers.RESUME)


def answer(node: CheckedNode, report: Checkup) -> dict[str, object]:
    """Return the findings in the form of the JSON answer."""
    return {
        "mode": node.mode.name,
        "pid": node.pid,
        "findings": [finding.row() for finding in report.findings],
        "unknown": report.unknown,
    }
