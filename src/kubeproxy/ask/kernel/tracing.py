"""Traces a flow's packets in the kernel, and collects the rules that they match, and their conntrack entries."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from kubeproxy.ask.checks.checkup import leftovers
from kubeproxy.ask.checks.node import conntrack_without_room
from kubeproxy.ask.finding import end_of
from kubeproxy.ask.kernel import journeys as paths
from kubeproxy.ask.kernel import verdicts
from kubeproxy.ask.kernel.present import MOST, flows_to, selection_of
from kubeproxy.backends.mode import FlowsEnd, Mode
from kubeproxy.errors import ApplyError, KubeProxyError, NoAnswerError, Unsupported
from kubeproxy.kernel.chains import LEGACY, legacy_tables
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import listing, trace
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.nftables.tables import Hook
from kubeproxy.kernel.route import local_addresses, silent_neighbour
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import PROTOCOLS, destination_text, family_of, unpack
from kubeproxy.model.answer import Packet
from kubeproxy.setup import modes

MOST_CLIENTS = 64  # maximum number of this node's addresses that get a rule each
MOST_STEPS = 20_000  # stored trace steps; a packet has 10 to 100 steps
_SETTLE = 0.5  # seconds to wait for answers after the last traced request
_LOOK = 0.1
_PACKETS = 4  # traced packets of a client by default


SENT = {PROTOCOLS["TCP"]: socket.SOCK_STREAM, PROTOCOLS["UDP"]: socket.SOCK_DGRAM}
"""The protocols of packets that the command can send, with the type of their sockets."""
Opening: TypeAlias = Callable[[socket.SocketKind], socket.socket]
"""A function that opens a socket of a type in the client's network namespace."""


class Limits(NamedTuple):
    """Seconds to wait, and the number of packets. 0 packets stands for one packet that the command sends, or for four
    packets of the client."""

    seconds: float = 10.0
    packets: int = 0


def look(
    packet: Packet,
    limits: Limits,
    mode: Mode | None,
    serving: verdicts.Serving | None = None,
    decided: paths.DecidedFlow = paths.UNDECIDED,
    opening: Opening | None = None,
) -> verdicts.Traced:
    """Trace packets of a flow; `mode` is the mode of the running proxy, or None if no proxy runs. With `opening` the
    command sends packets, one per second; otherwise it waits for packets of the client. Raises KubeProxyError."""
    before = {entry.entry_id: entry.answered for entry in flows_to(packet)}
    captured = _listen(packet, limits, opening)
    decision = partial(_decision, mode)
    legacy, rules = _legacy_rules(), _texts(captured.steps, decision)
    untraced = partial(_untraced, packet, mode) if mode is not None and legacy else str
    addresses = partial(_addresses, family_of(packet.destination))
    ruleset = paths.KnownRules(
        rules, captured.base_chains, decision, untraced, legacy, decided, _without_room, addresses
    )
    found = tuple(paths.journeys(captured.steps, ruleset, captured.table, captured.late))
    served = tuple(sorted(_served(packet, found, before), key=lambda one: not one.answered))
    proxied = (mode is not None and mode.flows_end is FlowsEnd.PROXY) or (serving is not None and serving.relayed)
    flow = verdicts.FollowedFlow(found, served, ruleset, packet.protocol, proxied, serving)
    if not any(one.lost for one in found):
        flow = flow._replace(silent=_silent(flow))
    made = flow.verdict()
    if captured.lost and made.passed is False and any(one.earlier for one in served):
        made = verdicts.Verdict(f"{made.text}; but some traced packets were lost, which may have been answers", None)
    if not found and opening is not None:
        made = verdicts.Verdict(_NOT_ARRIVED, None)
    departed, rule = flow.departed(made), flow.lost_answers()
    return verdicts.Traced(found, served, made, captured.lost, legacy, departed, opening is not None, rule)


def _silent(flow: verdicts.FollowedFlow) -> str:
    """Return the text that the next hops of all endpoints without an answer do not answer ARP or neighbour discovery;
    '' if any of them answers. A packet that does not leave a bridge has no conntrack entry: it goes to the endpoint
    that leftover rules chose, or, without such rules, to any endpoint of the Service."""
    ends = dict.fromkeys(one.endpoint for one in flow.served if not one.answered)
    if not ends and flow.without_entry:
        answered = {one.endpoint for one in flow.served}
        chosen = [by[1] for one in flow.requests if (by := flow.by_others(one))]
        known = flow.serving.endpoints if flow.serving is not None else frozenset()
        ends = dict.fromkeys(chosen or sorted(known - answered))
    texts = [silent_neighbour(end_of(one)[0])[0] for one in list(ends)[:MOST]]
    return "; ".join(texts) if all(texts) else ""


_NOT_ARRIVED = (
    "a packet was sent, but none of this flow arrived on this node: see the rules and routes in the client's network "
    "namespace (the proxy of a service mesh takes the connections of its pod there)"
)


class _Heard(NamedTuple):
    """The kernel's messages: trace steps, number of overruns, the table that marks packets for tracing, all base
    chains, and the packets that the client sent too late for an answer."""

    steps: list[trace.Step]
    lost: int
    table: str
    base_chains: dict[tuple[int, str, str], Hook]
    late: frozenset[int]


def _listen(packet: Packet, limits: Limits, opening: Opening | None) -> _Heard:
    hooks = (trace.OUTPUT,) if packet.source is None else (trace.PREROUTING, trace.OUTPUT)
    clients = (packet.source,) if packet.source is not None else _clients(family_of(packet.destination))
    flow = trace.MarkedFlow(packet.source or b"", packet.destination, packet.protocol, packet.port, hooks, clients)
    steps: list[trace.Step] = []
    requests: set[int] = set()
    late: set[int] = set()
    with contextlib.ExitStack() as stack:
        traces = stack.enter_context(trace.Traces.listen())
        mark = stack.enter_context(trace.Mark.open(flow))
        with Netlink.open() as link:
            chains = trace.base_chains(link)
        end = time.monotonic() + limits.seconds
        next_at = time.monotonic() if opening is not None else float("inf")
        enough = limits.packets or (1 if opening is not None else _PACKETS)
        enough_at, unsent = float("inf"), enough if opening is not None else 0
        while (now := time.monotonic()) < (until := min(end, enough_at) + _SETTLE * bool(requests)):
            if len(steps) >= MOST_STEPS:
                break
            if opening is not None and next_at <= now < end and unsent:
                stack.callback(_send(packet, opening).close)
                unsent, enough, next_at = unsent - 1, len(requests) + 1, now + 1.0  # one more request ends the wait
            for step in traces.steps(min(now + _LOOK, until)):
                steps.append(step)
                if step.table == mark.table and step.handle and step.chain.startswith(trace.REQUESTS):
                    (requests if now < min(end, enough_at) or step.packet in requests else late).add(step.packet)
                    if len(requests) >= enough and not unsent:
                        enough_at = min(enough_at, time.monotonic())
                if len(steps) >= MOST_STEPS:
                    break
        return _Heard(steps, traces.lost, mark.table, chains, frozenset(late))


def _clients(family: int) -> tuple[bytes, ...]:
    """Return this node's addresses, or (), which stands for all clients, if this node has more than MOST_CLIENTS
    addresses."""
    own = {one.ip for one in local_addresses(family)}
    return tuple(sorted(own)) if len(own) <= MOST_CLIENTS else ()


def _send(packet: Packet, opening: Opening) -> socket.socket:
    if packet.protocol not in SENT:
        raise Unsupported("only TCP and UDP are sent from here: give --no-send, and have a client send")
    sock = opening(SENT[packet.protocol])
    sock.setblocking(False)
    try:
        sock.connect((unpack(packet.destination), packet.port))
        sock.send(b"")
    except BlockingIOError:
        return sock
    except OSError as error:
        # After EPERM, a rule dropped the outgoing packet; after ECONNREFUSED, the packet was refused. After any other
        # error, such as a missing route, no packet was sent.
        if error.errno not in {errno.EPERM, errno.ECONNREFUSED}:
            sock.close()
            where = "this node" if packet.source is None else f"the network namespace of {unpack(packet.source)}"
            raise NoAnswerError(f"nothing can be sent from {where}: {error.strerror}") from error
    return sock


def _decision(running: Mode | None, table: str, chain: str) -> paths.Decision | None:
    if running is not None and (words := running.decision(table, chain)) is not None:
        return paths.Decision(words)
    words = next((found for mode in modes.every() if (found := mode.decision(table, chain)) is not None), None)
    return paths.Decision(words, running is not None) if words is not None else None


def _texts(
    steps: Sequence[trace.Step], decision: Callable[[str, str], paths.Decision | None]
) -> dict[paths.RuleKey, str]:
    """Return the matching rules of other programs, and this program's rules that dropped a packet, as nft prints
    them."""
    wanted = {
        (step.family, step.table, step.chain)
        for step in steps
        if step.handle
        and (step.verdict == paths.DROP or (found := decision(step.table, step.chain)) is None or found.left)
    }
    texts: dict[paths.RuleKey, str] = {}
    for family, table, chain in wanted:
        with contextlib.suppress(ApplyError), Netlink.open() as link:  # a missing rule is shown by its handle
            for handle, rule in TableReader(family, table, link).chain_rules(chain).items():
                ip = "ip6" if family == socket.AF_INET6 else "ip"
                texts[family, table, chain, handle] = listing.shortened(listing.text(rule, ip))
    return texts


def _served(
    packet: Packet, found: Sequence[paths.Journey], before: Mapping[bytes, bool]
) -> Iterator[verdicts.TracedReply]:
    """Yield the conntrack entries of the traced connections. `before` maps each older entry to whether it was answered.
    An entry that was answered before the trace keeps this status, so the status proves nothing. Such an entry is
    reported as answered only if a reply of its endpoint was traced."""
    clients = {one.source for one in found if one.direction == "request"}
    answers = {one.source for one in found if one.direction == "answer" and not one.refusal}
    for entry in flows_to(packet):
        if (source := destination_text(entry.client)) in clients:
            endpoint, earlier = destination_text(entry.server), before.get(entry.entry_id, False)
            answered = endpoint in answers if earlier else entry.answered
            existed = entry.entry_id in before
            yield verdicts.TracedReply(
                endpoint, answered, earlier, selection_of(packet, entry), existed, unpack(entry.seen), source
            )


def _untraced(packet: Packet, mode: Mode) -> str:
    try:
        return "; ".join(f"{one.text}. Fix: {one.fix}" for one in leftovers(mode, packet))
    except KubeProxyError as error:
        return f"its rules cannot be read: {error}"


def _addresses(family: int) -> set[str]:
    with contextlib.suppress(KubeProxyError):
        return {unpack(one.ip) for one in local_addresses(family)}
    return set()


def _without_room() -> str:
    return "; ".join(f"{one.text}. Fix: {one.fix}" for one in conntrack_without_room())


def _legacy_rules() -> int:
    count = 0
    for family, command in LEGACY.items():
        with contextlib.suppress(ApplyError):
            count += sum(len(table.rules) for table in xtables.tables(command)) if legacy_tables(family) else 0
    return count
