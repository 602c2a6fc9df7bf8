"""Prints the answers of nodes: shared facts once, and each difference with the nodes that have it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from kubeproxy.ask import lines
from kubeproxy.ask.finding import Severity
from kubeproxy.ask.flows.users import EndpointUse, PortUse, numbers
from kubeproxy.ask.question import NODE
from kubeproxy.cluster import ends
from kubeproxy.cluster.answers import Fact, FlowsAnswer, TraceAnswer, WhyAnswer
from kubeproxy.cluster.ends import Delivery
from kubeproxy.cluster.fleet import Fleet, Reply, Shared
from kubeproxy.cluster.following import Followed
from kubeproxy.cluster.names import named
from kubeproxy.commands import output
from kubeproxy.commands.paths import show_packets
from kubeproxy.commands.watching import Row

_NODES = 10
"""The maximum number of nodes in a line; `-o json` prints all."""
_ENDS = 10
"""The maximum number of printed endpoints that were not checked."""
_FACTS = 200
"""The maximum number of printed facts that are the same on all nodes, and of printed rows of a table of flows."""


def one(
    reply: Reply, answer: WhyAnswer, known: Mapping[str, str], deliveries: Sequence[Delivery], trace: Sequence[str]
) -> None:
    """Print one node's answer of `why` like the command on the node, with names after addresses, and the results of the
    endpoints' nodes. `trace` is the command that traces the connection."""
    output.say(f"asked on {reply.node}, {_pod(reply)}")
    output.say(named(ends.heading(answer, deliveries), known))
    for severity, text in lines.connection(answer.why, answer.findings):
        output.marked(severity.mark, named(text, known))
    for each in deliveries:
        output.marked(each.severity.mark, named(each.text, known))
        for finding in each.judged.findings if each.judged is not None else ():
            output.say(f"     {finding.severity.mark:<2} {named(finding.text, known)}")
    others = ends.unchecked(answer, deliveries)
    for end in others[:_ENDS]:
        text = f"{end.node} was not asked about {end.address} ({end.share:.1%} of the connections): "
        output.marked(output.UNSEEN, named(f"{text}at most {ends.MOST} endpoints are checked", known))
    output.more(len(others) - _ENDS)
    elsewhere = ends.drops_elsewhere(answer, deliveries)
    near = [] if elsewhere else list(map(answer.named, answer.fixes))
    fixes = [*near, *(fix for each in deliveries for fix in each.fixes)]
    for fix in dict.fromkeys(fixes):
        output.say(f"Fix: {fix}")
    if answer.next:
        output.say(f"Next: the rules that the packets pass on both nodes: {shlex.join(trace)}")


def traces(followed: Followed, heading: str, fixes: Sequence[str], known: Mapping[str, str]) -> None:
    """Print the result of `trace`, and the packets on each node like the command on the node."""
    output.say(f"asked on {', '.join(f'{reply.node}, {_pod(reply)}' for reply in followed.fleet.replies if reply.pod)}")
    output.say(named(heading, known))
    for node, (client, destination) in followed.flows.items():
        answer = followed.fleet.answers.get(node)
        if isinstance(answer, TraceAnswer):
            sent = ", sent from its network namespace" * (answer.sent and client != NODE)
            output.say(f"{node}, {named(f'{client} -> {destination}', known)}{sent}:")
            show_packets(answer.journeys, answer.served, answer.verdict, answer.lost, answer.legacy, answer.undecided)
    for fix in fixes:
        output.say(f"Fix: {fix}")


def many(fleet: Fleet, known: Mapping[str, str]) -> None:
    """Print the answers of many nodes."""
    _print_counts(fleet)
    differences = fleet.differences()
    for each in differences:
        output.marked(each.fact.severity.mark, named(_difference(each, len(fleet.examined)), known))
        _print_more(each.fact, known)
    common = fleet.common()
    everywhere = f"all {len(fleet.examined)} nodes: " if len(fleet.examined) > 1 else ""
    for fact in common[:_FACTS]:
        output.marked(fact.severity.mark, f"{'' if fact.expected else everywhere}{named(fact.text, known)}")
        _print_more(fact, {})
    output.more(len(common) - _FACTS)
    if isinstance(next(iter(fleet.answers.values()), None), FlowsAnswer):
        _print_flows(fleet)
    if fleet.command == "verify" and any(each.fact.severity is Severity.BROKEN for each in differences):
        output.say(f"Fix: {lines.REPAIR_OF_NODES}")
    for reason, nodes in fleet.silent().items():
        output.marked(output.UNSEEN, named(f"no answer of {_nodes(nodes)}: {reason}", known))


def rows(fleet: Fleet, known: Mapping[str, str]) -> dict[str, Row]:
    """Return the lines that `many` prints, by their text, to compare them with later answers."""
    found = [(each.fact.severity, _difference(each, len(fleet.examined))) for each in fleet.differences()]
    found += [(fact.severity, fact.text) for fact in fleet.common()]
    found += [(Severity.UNKNOWN, f"no answer of {_nodes(nodes)}: {reason}") for reason, nodes in fleet.silent().items()]
    return {
        text: Row((f"{severity.mark:<2} {named(text, known)}",), {"severity": severity.name.lower(), "text": text})
        for severity, text in found
    }


def fields(fleet: Fleet, deliveries: Sequence[Delivery] = ()) -> dict[str, object]:
    """Return all answers and their shared facts, for JSON in the form of docs/answers.schema.json."""
    one = fleet.decision
    return {
        "command": fleet.command,
        "arguments": fleet.arguments,
        "nodes": fleet.replies,
        "differences": [
            {
                "severity": each.fact.severity.name.lower(),
                "text": each.fact.text,
                "nodes": each.nodes,
                "lacking": each.lacking,
            }
            for each in fleet.differences()
        ],
        "heading": ends.heading(one, deliveries) if one is not None else "",
        "deliveries": [
            {"severity": each.severity.name.lower(), "text": each.text, "endpoint": each.end, "node": each.reply}
            for each in deliveries
        ],
        **fleet.counts(),
    }


def _print_counts(fleet: Fleet) -> None:
    counts = fleet.counts()
    modes = [(f"{count} in {mode} mode", mode) for mode, count in counts["modes"].most_common()]
    versions = [(f"{count} of version {version}", version) for version, count in counts["versions"].most_common()]
    kinds = "".join(f", {text}" for text, _ in modes + versions)
    output.say(f"{counts['versions'].total()} of {len(fleet.replies)} nodes answered{kinds}")
    for text, kind in modes[1:] + versions[1:]:
        nodes = [reply.node for reply in fleet.replies if kind in {reply.mode, reply.version}]
        output.marked(output.NOTE, f"{text}: {_nodes(nodes)}")
    for version, count in counts["go"].most_common():
        nodes = [reply.node for reply in fleet.replies if reply.go == version]
        output.marked(output.NOTE, f"{count} with the Go kube-proxy {version}, which cannot answer: {_nodes(nodes)}")


def _difference(each: Shared, examined: int) -> str:
    count = f"{len(each.nodes)} of {examined} nodes"
    if each.lacking:
        return f"{count} lack{'s' * (len(each.nodes) == 1)} {each.fact.text}: {_nodes(each.nodes)}"
    alone = " alone" * each.fact.expected
    return f"{count}{alone}: {each.fact.text}: {_nodes(each.nodes)}"


def _print_more(fact: Fact, known: Mapping[str, str]) -> None:
    for text in (*(named(each, known) for each in fact.more), *(f"Fix: {each}" for each in fact.fixes)):
        output.say(f"     {text}")


def _nodes(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NODES} more" if len(names) > _NODES else ""
    return ", ".join(names[:_NODES]) + more


def _pod(reply: Reply) -> str:
    kinds = ", ".join(filter(None, (reply.version, reply.mode and f"{reply.mode} mode")))
    return f"pod {reply.pod}" + (f" ({kinds})" if kinds else "")


def _print_flows(fleet: Fleet) -> None:
    answers = ((node, one) for node, one in fleet.answers.items() if isinstance(one, FlowsAnswer))
    ports = [(node, port) for node, answer in answers for port in answer.ports]
    if not fleet.arguments:
        _print_uses(("SERVICE",), (((port.service,), port) for _, port in ports))
        return
    gone = {False: "no endpoint any more", True: ""}
    ends = ((port, end) for _, port in ports for end in port.endpoints)
    named = (((f"{end.address} {port.port}", f"{end.pod} {gone[end.serving]}".strip()), end) for port, end in ends)
    _print_uses(("ENDPOINT", "POD"), named)
    _print_uses(("NODE",), (((node,), port) for node, port in ports))


def _print_uses(head: Sequence[str], uses: Iterable[tuple[Sequence[str], EndpointUse | PortUse]]) -> None:
    """Print a table with the sums of uses that have the same name, the most connections first."""
    sums: dict[Sequence[str], list[float]] = {}
    for name, use in uses:
        sums[name] = [before + number for before, number in zip(sums.get(name, [0.0] * 4), numbers(use), strict=True)]
    rows = [
        (*name, f"{connections:.0f}", f"{new:.1f}", f"{unanswered:.0f}", f"{closing:.0f}")
        for name, (connections, new, unanswered, closing) in sorted(sums.items(), key=lambda row: (-row[1][0], row[0]))
    ]
    output.table((*head, "CONNECTIONS", "NEW/S", "UNANSWERED", "CLOSING"), rows, "  ", _FACTS)
