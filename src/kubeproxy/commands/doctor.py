"""kube-proxy doctor: all that is wrong with this node for Services, worst first, each with its fix.

Looks at the running proxy, its certificates and configuration file, at the kernel's parameters and tables, and at other
programs that may be in the way. Changes nothing. Ends with 0 when nothing is wrong, with 1 when something is, with 2
when that could not be told, as when no proxy answers: then it looks at what can be looked at without one, for the
mode of --config or --proxy-mode, and with --kubeconfig or --manifests for the objects that are read.
"""

from __future__ import annotations

import argparse
import os

from msgspec.structs import replace

from kubeproxy import modes
from kubeproxy.ask.checks import identity
from kubeproxy.ask.checks.checkup import CheckedNode, Checkup, look_at
from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.remote import Running
from kubeproxy.ask.source import Source, UnreadError, source
from kubeproxy.commands import NO, UNKNOWN, YES, output
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ConfigError, KubeProxyError
from kubeproxy.kernel.proc import processes

_MARKS = {Severity.BROKEN: output.BAD, Severity.DEGRADED: output.BAD, Severity.NOTE: output.NOTE}
_UNSEEN = "?"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""


def run(given: argparse.Namespace) -> int:
    """Look, and answer; return the exit code."""
    node, report = examine(given)
    _print(given, node, report)
    if any(finding.is_wrong for finding in report.findings):
        return NO
    return UNKNOWN if report.unknown else YES


def examine(given: argparse.Namespace) -> tuple[CheckedNode, Checkup]:
    """Look; return at whom, and what was found."""
    before: list[Diagnosis] = []
    silence = ""
    try:
        asked = source(given)
        node = replace(of_proxy(asked), node_ports=asked.has_node_ports())
    except KubeProxyError as error:
        before = [error.finding] if isinstance(error, UnreadError) else []
        silence = "" if before else str(error)
        config = KubeProxyConfiguration()
        try:
            config = _meant(given)
        except ConfigError as mistake:
            before += identity.configured(given.config or "the flags", str(mistake), ())
        node = CheckedNode(None, 0, modes.named(config.active_mode), config)
    report = look_at(node)
    report.findings = [*before, *report.findings]
    if silence:
        report.unknown.insert(0, silence)
    if given.manifests or given.kubeconfig:
        report.unknown.insert(0, _unasked())
    if os.geteuid():
        report.unknown.append("not run as root: what other processes do cannot be seen; use sudo")
    return node, report


def answer(node: CheckedNode, report: Checkup) -> dict[str, object]:
    """Return what was found for programs."""
    return {
        "mode": node.mode.name,
        "pid": node.pid,
        "findings": [row(finding) for finding in report.findings],
        "unknown": report.unknown,
    }


def of_proxy(asked: Source) -> CheckedNode:
    """Return what is to be looked at on the node of a proxy. Raises KubeProxyError."""
    facts = asked.facts()
    config = facts.configuration()
    pid = asked.client.pid() if isinstance(asked, Running) else 0
    return CheckedNode(facts, pid, modes.named(facts.mode), config, asked.running)


def _unasked() -> str:
    """Return what there is to say of a proxy where objects are read instead of asking it."""
    pids = ", ".join(str(process.pid) for process in processes.proxies())
    if not pids:
        return "no kube-proxy runs here"
    return f"a kube-proxy runs here (pid {pids}), and was not asked: leave out --manifests and --kubeconfig"


def _meant(given: argparse.Namespace) -> KubeProxyConfiguration:
    """Return the configuration that a proxy of these arguments would have. Raises ConfigError."""
    flags = {"config": given.config, "proxy-mode": given.proxy_mode, "hostname-override": given.hostname_override}
    return build_options(parse([f"--{name}={value}" for name, value in flags.items() if value])).config


def _print(given: argparse.Namespace, node: CheckedNode, report: Checkup) -> None:
    wrong = [finding for finding in report.findings if finding.is_wrong]
    if given.output == "json":
        output.json(answer(node, report))
        return
    facts = node.facts
    who = (
        f" (kube-proxy {facts.version}, pid {node.pid or facts.pid}, {node.mode.name} mode)"
        if facts and node.running
        else ""
    )
    name = facts.world.node_name if facts else "this node"
    count = {0: "nothing is wrong", 1: "1 thing is wrong"}.get(len(wrong), f"{len(wrong)} things are wrong")
    if not wrong and report.unknown:
        count = "nothing wrong was seen, but not everything could be looked at"
    output.say(f"{name}: {count}{who}")
    for finding in report.findings:
        output.marked(_MARKS[finding.severity], finding.what)
        output.say(f"     {finding.why}")
        output.say(f"     Fix: {finding.fix}")
    for text in report.unknown:
        output.marked(_UNSEEN, text)


def row(finding: Diagnosis) -> dict[str, str]:
    """Return a finding for programs."""
    return {
        "severity": finding.severity.name.lower(),
        "about": finding.about,
        "what": finding.what,
        "why": finding.why,
        "fix": finding.fix,
    }
