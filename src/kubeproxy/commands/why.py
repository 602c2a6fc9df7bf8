"""kube-proxy why: what becomes of a connection on this node, and why.

SOURCE is the client's address, or the word node for this node itself. TARGET is ADDRESS:PORT or NAMESPACE/NAME:PORT,
with /udp or /sctp after it unless it is TCP. Says what the proxy decides, and what else on this node stops it.
Ends with 0 when an endpoint gets the connection as far as can be seen, with 1 when not, and with 2 when the client
is on another node, where it has to be asked.

  kube-proxy why 10.244.1.7 10.96.0.10:53/udp
  kube-proxy why node default/web:80
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from kubeproxy import host, modes
from kubeproxy.ask.checks.checkup import CheckedNode, Checkup, look_at_answer, look_at_way
from kubeproxy.ask.kernel import present, probe
from kubeproxy.ask.question import addressed
from kubeproxy.ask.source import Source, knowing, source
from kubeproxy.ask.why import THIS_NODE, Explained, Missing, Target, Why, fields
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.commands import NO, UNKNOWN, YES, doctor, output
from kubeproxy.kernel.nftables.chains import HOOKS
from kubeproxy.kernel.rule_walk import Aim
from kubeproxy.model.addresses import PROTOCOLS, family_of, pack

if TYPE_CHECKING:
    from kubeproxy.ask.kernel.tracing import Traced

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
    knowing(asked)
    told = tell(asked, asked.why(given.source, given.target, given.interface), PROBES if not given.no_probe else ())
    people = given.output != "json"
    if people:
        _print(told, "" if given.trace else told.why.next)
    traced = _trace(given, asked, told.why, people=people) if given.trace else None
    if not people:
        output.json(told.fields() | ({"trace": traced} if traced is not None else {}))
    dropped = traced is not None and traced.verdict.passed is False
    return NO if told.status == YES and dropped else told.status


PROBES = (PROTOCOLS["TCP"], PROTOCOLS["UDP"])
"""Protocols by which endpoints are tried."""


class Told(Struct, frozen=True):
    """An answer: what the proxy decides, what the kernel holds of it, what else on this node decides (`around`), and
    what came of connects to the endpoints.
    """

    why: Why
    held: tuple[present.MarkedLine, ...] = ()
    around: Checkup = field(default_factory=lambda: Checkup([], []))
    probes: tuple[probe.Probe, ...] = ()

    @property
    def heading(self) -> str:
        """The answer in one line."""
        wrong = self.why.passes and self.status == NO
        return self.why.heading + ", but not all is well (x)" * wrong

    @property
    def lines(self) -> Iterator[present.MarkedLine]:
        """What was looked at, in lines."""
        yield from self.held
        for finding in self.around.findings:
            mark = output.BAD if finding.stops_connections else output.NOTE
            yield present.MarkedLine(mark, f"{finding.what}: {finding.why}")
        for text in self.around.unknown:
            yield present.MarkedLine(output.NOTE, f"could not be looked at: {text}")
        for line in probe.lines(self.probes):
            yield present.MarkedLine(output.BAD if line.failed else output.OK, line.text)

    @property
    def fixes(self) -> list[str]:
        """What would let the connection pass."""
        around = [finding.fix for finding in self.around.findings if finding.stops_connections]
        return [*self.why.fixes, *present.fixes(self.held), *around, *probe.fixes(self.probes)]

    @property
    def status(self) -> int:
        """The exit code."""
        if self.why.elsewhere is not None:
            return UNKNOWN
        return YES if self.why.passes and all(line.mark != output.BAD for line in self.lines) else NO

    def fields(self) -> dict[str, object]:
        """Return it for programs."""
        lines, around = tuple(self.lines), [doctor.row(finding) for finding in self.around.findings]
        answer = {YES: "yes", NO: "no", UNKNOWN: "unknown"}[self.status]
        return {
            "heading": self.heading,
            "why": fields(self.why),
            "kernel": self.held,
            "node": {"findings": around, "unknown": self.around.unknown},
            "probes": self.probes,
            "answer": answer,
            "lines": lines,
            "fixes": self.fixes,
            "next": self.why.next,
        }


def tell(asked: Source, explained: Explained, probed: Collection[int] = PROBES) -> Told:
    """Look at what an answer is about, and try endpoints of these protocols. Raises KubeProxyError."""
    why, plan = explained.why, explained.plan
    if why.elsewhere is not None or (plan is None and not asked.running):
        return Told(why)
    if plan is None:
        return Told(why, around=look_at_answer(_way(asked, why)))
    kept = present.remembered(asked, explained) if asked.running else None
    if kept:
        why = replace(why, endpoints=tuple(replace(one, share=1.0) for one in why.endpoints if one.address == kept))
    probes = probe.all_of(why.endpoints, plan.key.protocol) if plan.key.protocol in probed else ()
    held = tuple(present.affinity(why, kept))
    if not asked.running:
        return Told(why, held, probes=probes)
    node = _way(asked, why)
    around = look_at_way(node) if why.forwarded else look_at_answer(node)
    return Told(why, (*held, *present.look(asked, explained)), around, probes)


def _way(asked: Source, why: Why) -> CheckedNode:
    """Return what is to be looked at for a connection: what begins or ends on the node is not forwarded by it.

    Where connections end at the proxy, its own ones to the endpoints begin here.
    """
    where, _, protocol = why.destination.partition("/")
    front, port = probe.place(where)
    target = Aim(None, pack(front) or b"", PROTOCOLS[protocol.upper()], port)
    node, family = doctor.of_proxy(asked), family_of(target.destination)
    local = host.packed_local_addresses((family,), modes.interfaces())[family]
    source = pack(why.source) if why.source != THIS_NODE else None
    client = source if node.mode.flows_end is FlowsEnd.ENDPOINTS else None
    ends = [(pack(where), port) for where, port in (probe.place(one.address) for one in why.endpoints[: probe.MOST])]
    begins_here = client is None or client in local
    crosses = not begins_here and any(address not in local for address, _ in ends)
    aims = [Aim(client, address, target.protocol, port) for address, port in ends if address is not None]
    hooks = frozenset(HOOKS) - {"output" if crosses else "forward"}
    first = "output" if source is None or source in local else "prerouting"
    early = {first: target._replace(source=source)}
    return replace(node, family=family, hooks=hooks, aims=aims if begins_here or crosses else (), early=early)


def _trace(given: argparse.Namespace, asked: Source, why: Why, *, people: bool) -> Traced:
    """Follow packets of the flow; print what became of them, for people. Raises KubeProxyError."""
    from kubeproxy.ask.kernel import tracing  # noqa: PLC0415 - it needs much that a question does not
    from kubeproxy.commands import trace  # noqa: PLC0415 - it needs much that a question does not

    packet = addressed(given.source, why.destination)
    traced = tracing.look(packet, tracing.Limits(), trace.mode_of(asked))
    if people:
        trace.show(packet, traced)
    return traced


def _print(told: Told, next_step: str) -> None:
    why = told.why
    output.say(told.heading)
    if why.elsewhere is not None:
        output.marked(output.BAD, f"{why.elsewhere.reason} ({why.elsewhere.field})")
    for step in why.steps:
        says = f" ({step.field})" if step.field else ""
        output.marked(output.OK if step.passes else output.BAD, f"{step.text}{says}")
    _print_endpoints(why.endpoints)
    _print_missing(why.missing)
    for line in told.lines:
        output.marked(line.mark, line.text)
    for fix in told.fixes:
        output.say(f"Fix: {fix}")
    if next_step:
        output.say(f"Next: which rules of this node its packets meet, whosever they are: {next_step}")


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
