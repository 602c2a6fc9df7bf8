"""kube-proxy why: what becomes of a connection on this node, and why.

SOURCE is the client's address, or the word node for this node itself. TARGET is ADDRESS:PORT or NAMESPACE/NAME:PORT,
with /udp or /sctp after it unless it is TCP. Ends with 0 when an endpoint gets the connection, with 1 when not.

  kube-proxy why 10.244.1.7 10.96.0.10:53/udp
  kube-proxy why node default/web:80
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kubeproxy.commands import NO, YES, output, present, probe
from kubeproxy.commands.source import Source, source
from kubeproxy.model.answer import Outcome
from kubeproxy.seeing.question import addressed
from kubeproxy.seeing.why import Explained, Missing, Target, Why, fields

if TYPE_CHECKING:
    from kubeproxy.commands.tracing import Traced

_SHOWN = 10
"""Endpoints that are listed one by one; `-o json` has them all."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("source", metavar="SOURCE", help="the client's address (and port, as 192.0.2.7:40000), or node")
    parser.add_argument("target", metavar="TARGET", help="ADDRESS:PORT[/PROTOCOL] or NAMESPACE/NAME:PORT[/PROTOCOL]")
    parser.add_argument("--interface", default="", help="the interface by which it comes in, if pods are told by that")
    parser.add_argument("--no-probe", action="store_true", help="do not try to reach the endpoints")
    parser.add_argument("--trace", action="store_true", help="then follow its packets through this node, as trace does")


def run(given: argparse.Namespace) -> int:
    """Answer; return the exit code."""
    asked = source(given)
    explained = asked.why(given.source, given.target, given.interface)
    probes: tuple[probe.Probe, ...] = ()
    if explained.plan is not None and explained.why.endpoints and not given.no_probe:
        probes = probe.all_of(explained.why.endpoints, explained.plan.key.protocol)
    held = present.look(asked, explained) if asked.running and explained.plan is not None else ()
    people = given.output != "json"
    if people:
        _print(explained, held, probes)
    traced = _trace(given, asked, explained.why, people=people) if given.trace else None
    if not people:
        answer = {"why": fields(explained.why), "kernel": held, "probes": probes}
        output.json(answer | ({"trace": traced} if traced is not None else {}))
    passes = explained.why.outcome in {Outcome.FORWARDED.value, Outcome.HEALTH.value}
    wrong = any(one.mark == output.BAD for one in held) or any(one.failed for one in probes)
    dropped = traced is not None and traced.verdict.passed is False
    return YES if passes and not dropped and not wrong else NO


def _trace(given: argparse.Namespace, asked: Source, why: Why, *, people: bool) -> Traced:
    """Follow packets of the flow; print what became of them, for people. Raises KubeProxyError."""
    from kubeproxy.commands import trace, tracing  # noqa: PLC0415 - it needs much that a question does not

    packet = addressed(given.source, why.destination)
    traced = tracing.look(packet, tracing.Limits(), trace.end_of(asked))
    if people:
        trace.show(packet, traced)
    return traced


def _print(explained: Explained, held: Sequence[present.Line], probes: Sequence[probe.Probe]) -> None:
    why = explained.why
    output.say(f"{why.source} -> {why.destination}: {_outcome(why)}")
    for step in why.steps:
        field = f" ({step.field})" if step.field else ""
        output.marked(output.OK if step.passes else output.BAD, f"{step.text}{field}")
    _print_endpoints(why.endpoints)
    _print_missing(why.missing)
    for one in held:
        output.marked(one.mark, one.text)
    for line in probe.lines(probes):
        output.marked(output.BAD if line.failed else output.OK, line.text)
    for fix in (*why.fixes, *present.fixes(held), *probe.fixes(probes)):
        output.say(f"Fix: {fix}")


def _outcome(why: Why) -> str:
    return f"{why.outcome}, the client sees {why.client_sees}"


def _print_endpoints(endpoints: tuple[Target, ...]) -> None:
    for one in endpoints[:_SHOWN]:
        where = f" on {one.node}" * bool(one.node) + f" in zone {one.zone}" * bool(one.zone)
        source_ = ", sees this node as the client" if one.masqueraded else ""
        output.marked(output.NOTE, f"{one.share:.1%} to {one.address}{where}{source_}")
    if len(endpoints) > _SHOWN:
        others = {one.share for one in endpoints[_SHOWN:]}
        each = f", {min(others):.1%} each" if len(others) == 1 else ""
        output.marked(output.NOTE, f"and {len(endpoints) - _SHOWN} more{each}")


def _print_missing(missing: tuple[Missing, ...]) -> None:
    for one in missing[:_SHOWN]:
        where = f"{one.field} in EndpointSlice {one.slice}" if one.slice else one.field
        output.marked(output.NOTE, f"not to {one.address}: {one.reason} ({where})")
    if len(missing) > _SHOWN:
        output.marked(output.NOTE, f"nor to {len(missing) - _SHOWN} others; -o json has them")
