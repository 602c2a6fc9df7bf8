"""kube-proxy doctor: all problems of this node with Services, worst first, each with its fix.

The command checks the running proxy, its certificates and configuration file, the kernel's parameters and tables, and
other programs that may interfere. It changes nothing. Exit code 0: no problem; 1: a problem; 2: unknown, for example if
no proxy answers. If no proxy runs, the command makes all checks that need no proxy: for the mode of --config or
--proxy-mode, and for the objects of --kubeconfig or --manifests."""

from __future__ import annotations

import argparse

from kubeproxy.ask.checks.checkup import Checkup
from kubeproxy.ask.checks.doctor import answer, examine
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.finding import clock
from kubeproxy.commands import exit_code, output
from kubeproxy.wording import counted


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(given: argparse.Namespace) -> int:
    node, report = examine(given)
    output.answer(given.output, answer(node, report), lambda: _print(node, report))
    return exit_code(wrong=any(finding.is_wrong for finding in report.findings), unknown=report.unknown)


def _print(node: CheckedNode, report: Checkup) -> None:
    wrong = [finding for finding in report.findings if finding.is_wrong]
    facts = node.facts
    who = (
        f" (kube-proxy {facts.version}, pid {node.pid or facts.pid}, {node.mode.name} mode)"
        if facts and node.running
        else ""
    )
    name = facts.world.node_name if facts else "this node"
    count = f"{counted(len(wrong), 'thing', 'is')} wrong" if wrong else "nothing is wrong"
    if not wrong and report.unknown:
        count = "no problem was found, but some checks could not run"
    output.say(f"{name}: {count}{who}")
    first = len(report.unknown) if facts is None else 0  # if no proxy runs, the reason comes first
    for text in report.unknown[:first]:
        output.marked(output.UNSEEN, text)
    for finding in report.findings:
        since = f", since {clock(finding.since)}" if finding.since else ""
        output.marked(finding.severity.mark, f"{finding.what}{since}")
        output.say(f"     {finding.why}")
        output.say(f"     Fix: {finding.fix}")
    for text in report.unknown[first:]:
        output.marked(output.UNSEEN, text)
