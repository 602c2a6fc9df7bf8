"""Connections of Services as they begin and end, with the names of Service and pods: kube-proxy flows -f."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from kubeproxy.ask.flows.follow import Follower, Known
from kubeproxy.ask.flows.ground import Ground
from kubeproxy.ask.flows.sampling import Sampled
from kubeproxy.ask.flows.users import ServedPorts
from kubeproxy.commands import YES, output
from kubeproxy.errors import Unsupported
from kubeproxy.kernel.conntrack.events import NOT_ANNOUNCED, Events, announced
from kubeproxy.model.plan import ServiceName


def run(where: Ground, names: Sequence[ServiceName], served: ServedPorts, given: argparse.Namespace) -> int:
    """Print connections as they begin and end, until Ctrl-C or for --seconds; return the exit code."""
    if not announced():
        raise Unsupported(f"nothing can be followed: {NOT_ANNOUNCED}")
    known = Known(where, names, served)
    known.look_up_pods()
    people = given.output != "json"
    if known.trouble and people:
        output.marked(output.NOTE, f"pods are shown by their addresses: {known.trouble}")
    end = time.monotonic() + given.seconds if given.seconds else float("inf")
    with Events.open(where.wanted) as events:
        sampled = Sampled(events, _say_rate if people else _say_rate_json)
        follower = Follower(known)
        try:
            while time.monotonic() < end:
                for event, _ in sampled.for_a_while(end):
                    line = follower.line(event)
                    if line is not None and people:
                        output.say(str(line))
                    elif line is not None:
                        output.json_line(line)
                sys.stdout.flush()
                known.renew()
        except KeyboardInterrupt:
            pass
        _print_end(sampled, people=people)
    return YES


def _say_rate(one_in: int) -> None:
    text = f"one connection in {one_in} is followed from now on" if one_in > 1 else "all are followed again"
    output.marked(output.NOTE, text)


def _say_rate_json(one_in: int) -> None:
    output.json_line({"one_in": one_in})


def _print_end(sampled: Sampled, *, people: bool) -> None:
    heard, left_out, lost = sampled.heard, sampled.left_out, sampled.lost
    if not people:
        output.json_line({"heard": heard, "left_out": left_out, "lost": lost})
        return
    text = f"heard of {heard} beginnings and ends"
    if left_out:
        text += f", left out about {left_out}"
    if lost:
        text += f", and {lost} times more came than could be read: the kernel dropped some"
    output.marked(output.NOTE, text)
