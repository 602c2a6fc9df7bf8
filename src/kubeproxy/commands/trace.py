"""kube-proxy trace: follows packets of one flow through all hooks of this node, with the kernel's tracing.

SOURCE is the client's address, or the word node for this node itself. TARGET is ADDRESS:PORT or NAMESPACE/NAME:PORT,
followed by /udp or /sctp if the protocol is not TCP. PORT may also be the name of a Service's port; a port name needs
no protocol. If SOURCE is node or a pod of this node, the command sends one packet (a TCP SYN or an empty UDP datagram)
from the client's network namespace, or with --packets several packets, one per second. For other clients, with
--no-send, or if it cannot enter the namespace, the command sends nothing, and follows the client's own packets for
--seconds. At most 22 packets per second are traced in each direction. Exit code 0: no rule on this node drops the
packets, and each connection gets a reply; 1: a packet is dropped, or a connection gets no reply or leads to no
endpoint; 2: no packet arrived, or the outcome is unknown. If no proxy answers, TARGET must be an address, and the
command shows only the rules in the kernel. `kubectl kubeproxy trace` follows a packet on the endpoint's node, too.

  kube-proxy trace node default/web:80
  kube-proxy trace 10.244.1.7 default/web:80
  kube-proxy trace 10.244.1.7 10.96.0.10:53/udp --seconds 30
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from collections.abc import Iterator
from enum import Enum
from functools import partial

from msgspec.structs import replace

from kubeproxy.ask.checks.strangers import destinations
from kubeproxy.ask.connection import unrouted, untranslated
from kubeproxy.ask.finding import end_of
from kubeproxy.ask.kernel.journeys import UNDECIDED, DecidedFlow
from kubeproxy.ask.kernel.tracing import SENT, Limits, Opening, look
from kubeproxy.ask.kernel.verdicts import Serving, Traced
from kubeproxy.ask.question import BY_ADDRESS, addressed
from kubeproxy.ask.source import Source, knowing, source
from kubeproxy.ask.why import Explained
from kubeproxy.backends.mode import Mode
from kubeproxy.commands import exit_code, output
from kubeproxy.commands.flows import seconds
from kubeproxy.commands.paths import show_packets
from kubeproxy.errors import CANNOT_SEND, HANGS, KubeProxyError, NoAnswerError, QuestionError, Unsupported
from kubeproxy.kernel.proc.namespaces import SocketsElsewhere
from kubeproxy.model.addresses import destination_text, family_of, front_text, unpack
from kubeproxy.model.answer import Outcome, Packet
from kubeproxy.setup import modes


class Sending(Enum):
    """Whether the command sends packets from the client's network namespace."""

    IF_POSSIBLE = "if possible"
    ALWAYS = "always"
    NEVER = "never"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the client's address, or node")
    parser.add_argument("target", metavar="TARGET", help="ADDRESS:PORT[/PROTOCOL] or NAMESPACE/NAME:PORT[/PROTOCOL]")
    parser.add_argument("--seconds", type=seconds, metavar="N", default=10.0, help="seconds to wait (default 10)")
    parser.add_argument(
        "--packets",
        type=int,
        metavar="N",
        default=0,
        help="packets to send (default 1), or packets of the client to follow (default 4)",
    )
    group = parser.add_mutually_exclusive_group()
    for flag, sending, text in (
        ("--send", Sending.ALWAYS, "end with an error if the command cannot send"),
        ("--no-send", Sending.NEVER, "wait for the client's own packets"),
    ):
        default = Sending.IF_POSSIBLE
        group.add_argument(flag, dest="sending", action="store_const", const=sending, default=default, help=text)


def run(given: argparse.Namespace) -> int:
    asked = source(given)
    packet, explained, error = _question(given, asked)
    mode = None if isinstance(error, NoAnswerError) and error.kind in HANGS else mode_of(asked)
    traced = followed(asked, packet, explained, mode, given.sending, Limits(given.seconds, given.packets))
    traced = replace(traced, undecided=str(error or ""))
    output.answer(given.output, traced, lambda: show(packet, traced))
    return exit_code(wrong=traced.verdict.passed is False, unknown=traced.verdict.passed is None)


def followed(
    asked: Source, packet: Packet, explained: Explained | None, mode: Mode | None, sending: Sending, limits: Limits
) -> Traced:
    """Return the paths of a flow's packets; `explained` is the proxy's decision, if known. Raises KubeProxyError."""
    serving = serving_of(explained) if explained is not None else None
    with opening_of(packet, sending, limits.seconds) as opening:
        return look(packet, limits, mode, serving, decided_of(asked, explained), opening)


@contextlib.contextmanager
def opening_of(packet: Packet, sending: Sending, seconds: float) -> Iterator[Opening | None]:
    """Yield a function that opens sockets of the client, or None to wait for the client's own packets for `seconds`. If
    the command cannot send, print the reason to standard error. Raises KubeProxyError."""
    if sending is Sending.NEVER:
        yield None
        return
    if packet.source is None:
        yield partial(socket.socket, family_of(packet.destination))
        return
    with contextlib.ExitStack() as stack:
        client = unpack(packet.source)
        try:
            opening: Opening | None = _elsewhere(packet, stack)
        except (Unsupported, NoAnswerError) as error:
            text = f"cannot send from the network namespace of {client}: {error}"
            if sending is Sending.ALWAYS:
                raise NoAnswerError(text, kind=CANNOT_SEND) from error
            print(output.shown(f"{text}. Tracing for {seconds:g} s: let {client} connect now"), file=sys.stderr)
            opening = None
        yield opening


def _elsewhere(packet: Packet, stack: contextlib.ExitStack) -> Opening:
    """Return a function that opens sockets in the client's network namespace, which the client's address identifies.
    Raises Unsupported or NoAnswerError."""
    if packet.protocol not in SENT:
        raise NoAnswerError("only TCP and UDP packets are sent")
    if packet.source_port:
        raise NoAnswerError(f"port {packet.source_port} belongs to a connection of the client")
    try:
        return stack.enter_context(SocketsElsewhere.enter(packet.source or b"")).open
    except Unsupported as error:
        raise Unsupported(f"{error}. Fix: {_FIX}") from error


_FIX = "with the chart set podTrace, with kustomize add the component pod-trace; without a container run it as root"


def mode_of(asked: Source) -> Mode | None:
    """Return the mode of the running proxy, or None if no proxy answers."""
    try:
        return modes.named(asked.facts().mode) if asked.running else None
    except NoAnswerError:
        return None


def serving_of(explained: Explained) -> Serving | None:
    """Return the Service of a connection with all its endpoints, or None if the destination belongs to no Service."""
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
    unserved *= not (explained.why.forwarded or explained.why.outcome == Outcome.HEALTH.value)
    ends = destinations([end_of(one.address) for one in explained.why.endpoints if explained.plan is not None])
    return DecidedFlow(partial(unrouted, asked, explained), unserved, partial(untranslated, asked, explained), ends)


def _question(given: argparse.Namespace, asked: Source) -> tuple[Packet, Explained | None, KubeProxyError | None]:
    """Return the first packet, and the proxy's decision on the packet or the reason why there is no decision. Raises
    KubeProxyError if the target is a name that only a proxy can resolve."""
    try:
        knowing(asked)
        explained = asked.why(given.source, given.target)
        return addressed(given.source, explained.why.destination), explained, None
    except KubeProxyError as error:
        with contextlib.suppress(QuestionError):
            return addressed(given.source, given.target), None, error
        if isinstance(error, NoAnswerError):
            raise error.with_more(BY_ADDRESS) from error
        raise


def show(packet: Packet, traced: Traced) -> None:
    """Print the outcome of a flow as text."""
    source_ = unpack(packet.source) if packet.source is not None else "this node"
    sent = ", sent from its network namespace" * (traced.sent and packet.source is not None)
    output.say(f"trace {source_} -> {front_text(packet.destination, packet.port, packet.protocol)}{sent}")
    show_packets(traced.journeys, traced.served, traced.verdict, traced.lost, traced.legacy, traced.undecided)
