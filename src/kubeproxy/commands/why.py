"""kube-proxy why: the outcome of a connection on this node, and the reasons.

SOURCE is the client's address, or the word node for this node itself. TARGET is ADDRESS:PORT or NAMESPACE/NAME:PORT,
followed by /udp or /sctp if the protocol is not TCP. PORT may also be the name of a Service's port; a port name needs
no protocol. Prints the proxy's decision, and other causes on this node that stop the connection. Exit code 0: an
endpoint gets the connection, as far as this node can see; 1: no endpoint gets it; 2: the client is on another node,
where the command must run, or only a probe from this node failed.

  kube-proxy why 10.244.1.7 10.96.0.10:53/udp
  kube-proxy why node default/web:80
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kubeproxy.ask import lines
from kubeproxy.ask.checks.doubts import doubted, outdated
from kubeproxy.ask.connection import PROBES, tell
from kubeproxy.ask.explanation import Explanation
from kubeproxy.ask.question import BY_ADDRESS, addressed
from kubeproxy.ask.source import Source, knowing, source
from kubeproxy.ask.why import Explained
from kubeproxy.commands import exit_code, output
from kubeproxy.errors import HANGS, NoAnswerError, QuestionError

if TYPE_CHECKING:
    from kubeproxy.ask.kernel.verdicts import Traced


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the client's address (and port, as 192.0.2.7:40000), or node")
    parser.add_argument("target", metavar="TARGET", help="ADDRESS:PORT[/PROTOCOL] or NAMESPACE/NAME:PORT[/PROTOCOL]")
    parser.add_argument("--interface", default="", help="the interface on which the client's packets reach this node")
    parser.add_argument("--no-probe", action="store_true", help="do not probe the endpoints")
    parser.add_argument("--trace", action="store_true", help="then follow the packets through this node, as trace does")


def run(given: argparse.Namespace) -> int:
    asked = source(given)
    try:
        facts = knowing(asked)
    except NoAnswerError as error:
        if error.kind in HANGS and (now := _rules_now(given)):
            raise error.with_more(now) from error
        raise
    try:
        explained = asked.why(given.source, given.target, given.interface)
    except QuestionError as error:
        raise doubted(error, outdated(asked, facts)) from error
    told = tell(asked, facts, explained, PROBES if not given.no_probe else ())
    people = given.output != "json"
    if people:
        _print(told, "" if given.trace else told.why.next)
    traced = _trace(given, asked, explained, people=people) if given.trace else None
    if not people:
        output.json(told.fields() | ({"trace": traced} if traced is not None else {}))
    dropped = traced is not None and traced.verdict.passed is False
    return exit_code(wrong=told.answer == "no" or dropped, unknown=told.answer == "unknown")


def _rules_now(given: argparse.Namespace) -> str:
    """Return the translation of the connection by the rules of a proxy that hangs; '' if the rules are unreadable."""
    from kubeproxy.ask.kernel.stopped import rules_now  # noqa: PLC0415 - a running proxy needs no look

    try:
        now = rules_now(addressed(given.source, given.target))
    except QuestionError:
        return BY_ADDRESS
    return now and f"until it runs again, the present rules decide: {now}"


def _trace(given: argparse.Namespace, asked: Source, explained: Explained, *, people: bool) -> Traced:
    from kubeproxy.ask.kernel.tracing import Limits  # noqa: PLC0415 - a question without a trace does not need it
    from kubeproxy.commands import trace  # noqa: PLC0415

    packet, mode = addressed(given.source, explained.why.destination), trace.mode_of(asked)
    traced = trace.followed(asked, packet, explained, mode, trace.Sending.IF_POSSIBLE, Limits())
    if people:
        trace.show(packet, traced)
    return traced


def _print(told: Explanation, next_step: str) -> None:
    output.say(told.heading)
    for severity, text in lines.connection(told.why, told.findings):
        output.marked(severity.mark, text)
    for fix in told.fixes:
        output.say(f"Fix: {fix}")
    if next_step:
        output.say(f"Next: the rules of this node that the packets pass: {next_step}")
