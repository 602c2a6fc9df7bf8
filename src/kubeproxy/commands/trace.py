"""kube-proxy trace: follows packets of one flow through all hooks of this node, with the kernel's tracing.

SOURCE is the client's address, or the word node for this node itself. TARGET is ADDRESS:PORT or NAMESPACE/NAME:PORT,
with /udp or /sctp after it unless it is TCP; a port of a Service may be given by its name alone. If SOURCE is node, the
command sends a packet (a TCP SYN or an empty UDP datagram), with --packets one per second, with --no-send none; for
other clients it follows their packets for --seconds. At most 22 packets per second are traced in each direction. Exit
code 0: no rule on this node drops the packets and a reply arrives; 1: otherwise; 2: no packet arrived, or the outcome
is unknown. `kubectl kubeproxy trace` follows a packet on the endpoint's node, too.

  kube-proxy trace node default/web:80
  kube-proxy trace 10.244.1.7 10.96.0.10:53/udp --seconds 30
"""

from __future__ import annotations

import argparse
import contextlib
from functools import partial

from kubeproxy.ask.connection import unrouted
from kubeproxy.ask.kernel.journeys import UNDECIDED, DecidedFlow, Serving
from kubeproxy.ask.kernel.tracing import Limits, Traced, look
from kubeproxy.ask.question import addressed
from kubeproxy.ask.source import Source, knowing, source
from kubeproxy.ask.why import Explained
from kubeproxy.backends.mode import Mode
from kubeproxy.commands import exit_code, output
from kubeproxy.commands.flows import seconds
from kubeproxy.commands.paths import show_packets
from kubeproxy.errors import KubeProxyError, NoAnswerError, QuestionError
from kubeproxy.model.addresses import destination_text, front_text, unpack
from kubeproxy.model.answer import Outcome, Packet
from kubeproxy.setup import modes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the client's address, or node")
    parser.add_argument("target", metavar="TARGET", help="ADDRESS:PORT[/PROTOCOL] or NAMESPACE/NAME:PORT[/PROTOCOL]")
    parser.add_argument("--seconds", type=seconds, metavar="N", default=10.0, help="seconds to wait (default 10)")
    parser.add_argument(
        "--packets", type=int, metavar="N", default=0, help="packets to follow (4), or to send from the node (1)"
    )
    parser.add_argument("--no-send", action="store_true", help="from the node: wait for packets without sending one")


def run(given: argparse.Namespace) -> int:
    asked = source(given)
    packet, explained = _question(given, asked)
    serving = serving_of(explained) if explained is not None else None
    limits = Limits(given.seconds, given.packets, not given.no_send)
    traced = look(packet, limits, mode_of(asked), serving, decided_of(asked, explained))
    output.answer(given.output, traced, lambda: show(packet, traced))
    return exit_code(wrong=traced.verdict.passed is False, unknown=traced.verdict.passed is None)


def mode_of(asked: Source) -> Mode | None:
    """Return the mode of the running proxy; None if no proxy answers."""
    try:
        return modes.named(asked.facts().mode) if asked.running else None
    except NoAnswerError:
        return None


def serving_of(explained: Explained) -> Serving | None:
    """Return the Service of a connection with all its endpoints; None if the destination belongs to no Service."""
    if explained.plan is None:
        return None
    unused = (one.address for one in explained.why.missing if one.slice)
    endpoints = frozenset((*map(destination_text, explained.plan.serving), *unused))
    return Serving(explained.why.service, endpoints, explained.relayed)


def decided_of(asked: Source, explained: Explained | None) -> DecidedFlow:
    """Return the running proxy's decision on the flow, from the answer of `why`."""
    if explained is None or not asked.running or explained.why.elsewhere is not None:
        return UNDECIDED
    unserved = "; ".join(one.text for one in explained.why.steps if not one.passes)
    is_own = explained.why.outcome == Outcome.NOT_OURS.value
    return DecidedFlow(partial(unrouted, asked, explained), unserved * is_own)


def _question(given: argparse.Namespace, asked: Source) -> tuple[Packet, Explained | None]:
    """Return the first packet of the flow to trace, and the answer of `why` if there is one. Raises KubeProxyError."""
    with contextlib.suppress(QuestionError):
        packet = addressed(given.source, given.target)
        with contextlib.suppress(KubeProxyError):
            return packet, asked.why(given.source, given.target)
        return packet, None
    knowing(asked)
    explained = asked.why(given.source, given.target)
    return addressed(given.source, explained.why.destination), explained


def show(packet: Packet, traced: Traced) -> None:
    """Print the outcome of a flow as text."""
    source_ = unpack(packet.source) if packet.source is not None else "this node"
    output.say(f"trace {source_} -> {front_text(packet.destination, packet.port, packet.protocol)}")
    show_packets(traced.journeys, traced.verdict, traced.lost, traced.legacy)
