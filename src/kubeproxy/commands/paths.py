"""Prints traced packets as text, for `kube-proxy trace` and for the plugin for kubectl. This module imports no HTTP
library, because the plugin has none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kubeproxy.ask.kernel.journeys import Journey
from kubeproxy.ask.kernel.verdicts import TracedReply, Verdict
from kubeproxy.commands import output
from kubeproxy.wording import counted

_SHOWN = 6  # paths in the text


def show_packets(
    journeys: Sequence[Journey],
    served: Iterable[TracedReply],
    verdict: Verdict,
    lost: int,
    legacy: int,
    undecided: str,
) -> None:
    """Print each different path of packets once, and the verdict. For the other arguments see Traced."""
    if undecided:
        output.marked(output.UNSEEN, f"{undecided}. Only the rules in the kernel are shown, not the proxy's decision")
    unanswered = {("request", one.source) for one in served if one.unanswered}
    ways: dict[tuple[object, ...], list[Journey]] = {}
    for one in journeys:
        is_silent = (one.direction, one.source) in unanswered
        ways.setdefault((one.direction, one.refusal, one.reason, is_silent, *_lines_by_chain(one)), []).append(one)
    for one, *others in list(ways.values())[:_SHOWN]:
        is_silent = (one.direction, one.source) in unanswered
        why = ": ".join(filter(None, (one.refusal, one.reason, "no answer" * (is_silent and not one.lost))))
        alike = f", and {counted(len(others), 'more packet')} through the same rules" if others else ""
        what = f"{one.direction} {one.source} -> {one.destination}{f' ({why})' if why else ''}{alike}"
        output.marked(output.BAD if one.lost or one.refusal else output.NOTE if is_silent else output.OK, what)
        for line in _lines_by_chain(one):
            output.say(line)
    if more := sum(map(len, list(ways.values())[_SHOWN:])):
        output.marked(output.NOTE, f"packets on further paths: {more}; -o json prints all packets")
    output.say(f"Verdict: {verdict.text}")
    if lost:
        output.marked(output.NOTE, f"{lost} times the kernel dropped traces, so some steps are missing")
    if legacy:
        output.marked(output.NOTE, f"rules of iptables-legacy that the kernel's tracing does not show: {legacy}")


def _lines_by_chain(one: Journey) -> list[str]:
    lines = []
    before = one.destination
    for met in one.met:
        to = f" (to {met.destination})" if met.destination != before else ""
        before = met.destination
        words = "; ".join(met.words) or "nothing matched"
        lines.append(f"       {met.hook:<11} {met.table} {met.chain}{to}: {words}: {met.verdict}")
    return lines
