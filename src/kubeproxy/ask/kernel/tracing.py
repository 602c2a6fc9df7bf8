"""Makes the kernel trace packets of a flow, and gathers their rules and entries of connection tracking. It combines the
steps into journeys, and the journeys into a verdict in text form.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.backends.mode import FlowsEnd, Mode
from kubeproxy.errors import ApplyError, NoAnswerError, Unsupported
from kubeproxy.kernel.conntrack.tracked import entries_to, target_of
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import listing, tables
from kubeproxy.kernel.nftables.tables import HOOKS, TABLE_FAMILIES, Hook
from kubeproxy.kernel.nftables.trace import (
    ANSWERS,
    FORWARD,
    INPUT,
    OUTPUT,
    POSTROUTING,
    PREROUTING,
    REQUESTS,
    Headers,
    Mark,
    Step,
    TracedFlow,
    Traces,
    base_chains,
)
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import PROTOCOLS, destination_text, place_text, unpack
from kubeproxy.model.answer import Packet
from kubeproxy.setup import modes

MOST_STEPS = 20_000
"""Maximum number of trace steps to keep; a packet has 10 to 100."""
_SETTLE = 0.5
"""Seconds to wait for answers after the last requested packet."""
_LOOK = 0.1


class Limits(NamedTuple):
    """Limits: seconds to wait, and number of packets; `sends`: whether this node sends a packet."""

    seconds: float = 10.0
    packets: int = 4
    sends: bool = True


class Traced(Struct, frozen=True, rename="camel"):
    """The result for a flow.

    `lost` counts overruns of the kernel's messages, `legacy` the rules of iptables-legacy, which are not traced.
    """

    journeys: tuple[Journey, ...]
    served: tuple[TracedReply, ...]
    verdict: Verdict
    lost: int
    legacy: int


def look(packet: Packet, limits: Limits, mode: Mode | None) -> Traced:
    """Trace packets of a flow; `mode` is the running proxy's, None without a proxy. Raises KubeProxyError."""
    captured = _listen(packet, limits)
    decision = partial(_decision, mode)
    ruleset = KnownRules(_texts(captured.steps, decision), captured.base_chains, decision)
    found = tuple(journeys(captured.steps, ruleset, captured.table))
    served = tuple(_served(packet, found))
    proxied = mode is not None and mode.flows_end is FlowsEnd.PROXY
    made = verdict(found, served, ruleset, packet.protocol, proxied=proxied)
    return Traced(found, served, made, captured.lost, _legacy_rules())


class _Heard(NamedTuple):
    """The kernel's messages: steps, the count of overruns, the table that marked packets, and all base chains."""

    steps: list[Step]
    lost: int
    table: str
    base_chains: dict[tuple[int, str, str], Hook]


def _listen(packet: Packet, limits: Limits) -> _Heard:
    """Receive trace steps until enough packets have passed or the time is over. Raises KubeProxyError."""
    hooks = (OUTPUT,) if packet.source is None else (PREROUTING, OUTPUT)
    flow = TracedFlow(packet.source or b"", packet.destination, packet.protocol, packet.port, hooks)
    sends = packet.source is None and limits.sends
    steps: list[Step] = []
    requests: set[int] = set()
    with contextlib.ExitStack() as stack:
        traces = stack.enter_context(Traces.open())
        mark = stack.enter_context(Mark.open(flow))
        with Netlink.open() as link:
            chains = base_chains(link)
        end = time.monotonic() + limits.seconds
        if sends:
            stack.callback(_send(packet).close)
        enough = 1 if sends else limits.packets
        enough_at = float("inf")
        while (now := time.monotonic()) < min(end, enough_at + _SETTLE) and len(steps) < MOST_STEPS:
            for step in traces.until(min(now + _LOOK, end)):
                steps.append(step)
                if step.table == mark.table and step.handle and step.chain.startswith(REQUESTS):
                    requests.add(step.packet)
                    if len(requests) >= enough:
                        enough_at = min(enough_at, time.monotonic())
                if len(steps) >= MOST_STEPS:
                    break
        return _Heard(steps, traces.lost, mark.table, chains)


def _send(packet: Packet) -> socket.socket:
    """Send the first packet of a connection from this node; return its socket. Raises KubeProxyError."""
    kinds = {PROTOCOLS["TCP"]: socket.SOCK_STREAM, PROTOCOLS["UDP"]: socket.SOCK_DGRAM}
    if packet.protocol not in kinds:
        raise Unsupported("only TCP and UDP are sent from here: give --no-send, and have a client send")
    family = socket.AF_INET if len(packet.destination) == 4 else socket.AF_INET6
    sock = socket.socket(family, kinds[packet.protocol] | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect((unpack(packet.destination), packet.port))
        sock.send(b"")
    except BlockingIOError:
        return sock
    except OSError as error:
        # EPERM: a rule dropped the packet on the way out. Any other error, such as a missing route, means that no
        # packet was sent.
        if error.errno not in {errno.EPERM, errno.ECONNREFUSED}:
            sock.close()
            raise NoAnswerError(f"nothing can be sent from this node: {error.strerror}") from error
    return sock


def _decision(running: Mode | None, table: str, chain: str) -> str | None:
    """Return the decision of a chain of any of our modes; a chain of another mode than `mode` is a leftover."""
    if running is not None and (words := running.decision(table, chain)) is not None:
        return words
    words = next((found for mode in modes.every() if (found := mode.decision(table, chain)) is not None), None)
    return words if running is None or words is None else LEFT + words


def _texts(steps: Sequence[Step], decision: Callable[[str, str], str | None]) -> dict[RuleKey, str]:
    """Return the matching rules of other programs, and our rules that dropped a packet, as nft prints them."""
    wanted = {
        (step.family, step.table, step.chain)
        for step in steps
        if step.handle and (step.verdict == DROP or decision(step.table, step.chain) is None)
    }
    texts: dict[RuleKey, str] = {}
    for family, table, chain in wanted:
        with contextlib.suppress(ApplyError), Netlink.open() as link:  # the rule no longer exists: its handle is shown
            for handle, rule in tables.chain_rules(family, table, chain, link).items():
                ip = "ip6" if family == socket.AF_INET6 else "ip"
                texts[family, table, chain, handle] = listing.shortened(listing.text(rule, ip))
    return texts


def _served(packet: Packet, found: Sequence[Journey]) -> list[TracedReply]:
    """Return the conntrack entries of the traced connections."""
    clients = {one.source for one in found if one.direction == "request"}
    target = target_of(packet.destination, packet.protocol, packet.port)
    family = 2 if len(packet.destination) == 4 else 10
    with Netlink.open() as link:
        return [
            TracedReply(destination_text(entry.server), entry.answered)
            for entry in entries_to(link, family, packet.protocol, packet.port)
            if entry.target == target and destination_text(entry.client) in clients
        ]


def _legacy_rules() -> int:
    """Return the number of iptables-legacy rules, which the kernel does not trace."""
    count = 0
    for names, command in (("ip_tables_names", "iptables-legacy"), ("ip6_tables_names", "ip6tables-legacy")):
        with contextlib.suppress(OSError, ApplyError):
            if (Path("/proc/net") / names).read_text().strip():
                count += sum(len(table.rules) for table in xtables.tables(command))
    return count


DROP, ACCEPT, STOLEN, QUEUE = 0, 1, 2, 3
LEFT = "left by another kube-proxy: "
"""Prefix of the decision of a chain that belongs to another mode than the running one."""

_RST = 0x04
_ICMP = (1, 58)  # of IPv4 and of IPv6
_NEAR = 16
"""Maximum number of earlier packets that are searched for the one that a step continues."""

RuleKey = tuple[int, str, str, int]
"""A rule: family of its table, table, chain, handle."""


class KnownRules(NamedTuple):
    """Texts and meanings of the rules that packets matched.

    `decision` returns the meaning of one of our chains (table, name); the text begins with LEFT if the running proxy
    has no such chain; None for a chain of another program.
    """

    texts: Mapping[RuleKey, str]
    base_chains: Mapping[tuple[int, str, str], Hook]
    decision: Callable[[str, str], str | None]


class Met(Struct, frozen=True, rename="camel"):
    """A packet in one base chain. `words` are the rules and decisions that matched, `verdict` is the result.

    `destination` is the packet's destination at that point: translation changes it.
    """

    hook: str
    table: str
    chain: str
    destination: str
    words: tuple[str, ...]
    verdict: str


class Journey(Struct, frozen=True, rename="camel"):
    """The path of one packet through this node.

    `direction` is 'request' or 'answer'; `refusal` is 'reset', 'ICMP error', or '' for another packet; `lost` is the
    reason why it ended on this node, '' if it continued; `last` is the last hook that it passed.
    """

    direction: str
    refusal: str
    source: str
    destination: str
    met: tuple[Met, ...]
    lost: str
    last: str


class _Run(NamedTuple):
    """The steps of a packet in one base chain."""

    headers: Headers
    steps: list[Step]


def journeys(steps: Iterable[Step], ruleset: KnownRules, own_table: str) -> list[Journey]:
    """Return the journeys of packets that `own_table` marked, from trace steps, in the order of their beginnings."""
    packets: list[list[_Run]] = []
    places: dict[int, int] = {}
    for step in steps:
        if step.headers is not None:
            place = places.get(step.packet)
            if place is None:
                begins = step.table == own_table and step.handle
                place = len(packets) if begins else _continued(packets, step.headers)
                places[step.packet] = place
                if place == len(packets):
                    packets.append([])
            packets[place].append(_Run(step.headers, [step]))
        elif step.packet in places:
            packets[places[step.packet]][-1].steps.append(step)
    return [_journey(runs, ruleset, own_table) for runs in packets if _marks(runs, own_table)]


def _marks(runs: Iterable[_Run], own_table: str) -> list[str]:
    """Return our chains that marked a packet, none if another program requested its trace."""
    return [step.chain for run in runs for step in run.steps if step.table == own_table and step.handle]


def _continued(packets: Sequence[Sequence[_Run]], headers: Headers) -> int:
    """Return the index of the journey that a step continues, or the index for a new journey.

    The kernel's trace id of a packet changes on translation, and when it passes loopback or a bridge.
    """
    for place in range(len(packets) - 1, max(-1, len(packets) - 1 - _NEAR), -1):
        last = packets[place][-1].headers
        same_end = (last.source, last.source_port) == (headers.source, headers.source_port) or (
            (last.destination, last.destination_port) == (headers.destination, headers.destination_port)
        )
        if same_end and last.flags == headers.flags and headers.came_by in {last.came_by, last.leaves_by}:
            return place
    return len(packets)


def _journey(runs: Sequence[_Run], ruleset: KnownRules, own_table: str) -> Journey:
    first = runs[0].headers
    answer = _marks(runs, own_table)[0].startswith(ANSWERS)
    met = tuple(_met(run, ruleset) for run in runs if run.steps[0].table != own_table)
    lost = next((why for run in reversed(runs) if (why := _lost(run, ruleset))), "")
    return Journey(
        "answer" if answer else "request",
        _refusal(first),
        place_text(first.source, first.source_port),
        place_text(first.destination, first.destination_port),
        met,
        lost,
        _last(runs, ruleset),
    )


def _refusal(headers: Headers) -> str:
    if headers.protocol in _ICMP:
        return "ICMP error"
    return "reset" if headers.protocol == PROTOCOLS["TCP"] and headers.flags & _RST else ""


def _met(run: _Run, ruleset: KnownRules) -> Met:
    step = run.steps[0]
    base = ruleset.base_chains.get((step.family, step.table, step.chain))
    return Met(
        HOOKS[base.number] if base is not None and base.number < len(HOOKS) else "",
        f"{TABLE_FAMILIES.get(step.family, step.family)} {step.table}",
        step.chain,
        place_text(run.headers.destination, run.headers.destination_port),
        tuple(dict.fromkeys(_words(run, ruleset))),
        _verdict(run.steps[-1].verdict),
    )


def _words(run: _Run, ruleset: KnownRules) -> Iterator[str]:
    """Yield the decisions of our chains and the rules of others that matched. Consecutive decisions have the prefix
    LEFT only once."""
    shown = ""
    for step in run.steps:
        decision = ruleset.decision(step.table, step.chain)
        if decision is not None:
            yield decision.removeprefix(shown)
            shown = LEFT if decision.startswith(LEFT) else ""
        elif step.kind == "rule" and step.handle and not _leads_to_ours(step, ruleset):
            yield f'rule "{_text(step, ruleset)}"'


def _leads_to_ours(step: Step, ruleset: KnownRules) -> bool:
    return bool(step.leads_to) and ruleset.decision(step.table, step.leads_to) is not None


def _text(step: Step, ruleset: KnownRules) -> str:
    return ruleset.texts.get((step.family, step.table, step.chain, step.handle), f"handle {step.handle}")


def _verdict(code: int) -> str:
    return {DROP: "dropped", ACCEPT: "accepted", STOLEN: "taken", QUEUE: "queued for a program"}.get(code, "goes on")


def _lost(run: _Run, ruleset: KnownRules) -> str:
    """Return the rule or policy that ended a packet's journey in this chain, '' if none did."""
    step = run.steps[-1]
    if step.verdict not in {DROP, QUEUE}:
        return ""
    where = f"table {TABLE_FAMILIES.get(step.family, step.family)} {step.table}, chain {step.chain}"
    decision = ruleset.decision(step.table, step.chain)
    whose, why = ("which is not ours", "") if decision is None else ("which is ours", f": {decision}")
    if decision is not None and decision.startswith(LEFT):
        whose, why = decision, ""
    if step.kind == "policy":
        return f"dropped by the policy of {where}, {whose}"
    text = _text(step, ruleset)
    done = "queued for a program" if step.verdict == QUEUE else "refused" if "reject" in text.lower() else "dropped"
    return f'{done} by rule "{text}" of {where}, {whose}{why}'


def _last(runs: Sequence[_Run], ruleset: KnownRules) -> str:
    """Return the last hook that a packet passed, '' if unknown."""
    for run in reversed(runs):
        step = run.steps[0]
        base = ruleset.base_chains.get((step.family, step.table, step.chain))
        if base is not None and base.number < len(HOOKS):
            return HOOKS[base.number]
    return ""


class TracedReply(Struct, frozen=True):
    """The entry of a traced connection in connection tracking: its endpoint, and whether a reply arrived."""

    endpoint: str
    answered: bool


class Verdict(Struct, frozen=True, rename="camel"):
    """The result for a flow. `passed` is None if it is unknown."""

    text: str
    passed: bool | None


def verdict(
    found: Sequence[Journey], served: Sequence[TracedReply], ruleset: KnownRules, protocol: int, *, proxied: bool
) -> Verdict:
    """Return the outcome of a flow; `proxied`: the proxy on this node answers the client."""
    others = next((text for one in found if one.direction == "request" and (text := _by_others(one, served))), "")
    made = _became(found, served, ruleset, protocol, proxied=proxied and not others)
    return Verdict(made.text + others, made.passed)


def _by_others(request: Journey, served: Sequence[TracedReply]) -> str:
    """Return a text if leftover rules, not the running proxy's, chose the destination, else ''."""
    ends = [met.destination for met in request.met[1:]] + [one.endpoint for one in served[-1:]]
    for met, then in zip(request.met, ends, strict=False):
        if met.destination != then and any(words.startswith(LEFT) for words in met.words):
            return (
                f"; rules that another kube-proxy left in table {met.table} chose {then}, not the running "
                "proxy: see that no other kube-proxy runs, then restart this one, which removes them"
            )
    return ""


def _became(
    found: Sequence[Journey], served: Sequence[TracedReply], ruleset: KnownRules, protocol: int, *, proxied: bool
) -> Verdict:
    if not found:
        text = "no packet of this flow arrived: let the client send during the trace, or wait longer (--seconds)"
        return Verdict(text, None)
    for one in found:
        if one.lost:
            return Verdict(f"the {one.direction} was {one.lost}", passed=False)
    refusals = [one for one in found if one.direction == "answer" and one.refusal]
    if refusals and not any(one.direction == "answer" and not one.refusal for one in found):
        return _refused(refusals[-1], served)
    if any(one.answered for one in served):
        return _answered([one.endpoint for one in served if one.answered][-1], proxied=proxied)
    last = next((one.last for one in reversed(found) if one.direction == "request"), "")
    later = {base.number for base in ruleset.base_chains.values()} & {INPUT, FORWARD, POSTROUTING}
    if last == HOOKS[PREROUTING] and later:
        return Verdict(
            "no rule dropped it, but it went no further than prerouting: there is no route to its destination, "
            "forwarding is off (net.ipv4.ip_forward, or net.ipv4.conf.IFACE.forwarding of the interface of arrival), "
            "or rp_filter rejects its source",
            passed=False,
        )
    return _unanswered(served, last, protocol)


def _refused(answer: Journey, served: Sequence[TracedReply]) -> Verdict:
    """Return the verdict for a flow whose only answer was a refusal."""
    asked = f" for {served[-1].endpoint}" if served else ""
    if answer.refusal == "reset":
        text = f"nothing here dropped it, and {answer.source} refused it with a reset: nothing listens there"
    else:
        text = f"nothing here dropped it, and {answer.source.rpartition(':')[0]} answered{asked} with an ICMP error"
    return Verdict(text, passed=False)


def _answered(endpoint: str, *, proxied: bool) -> Verdict:
    if not proxied:
        return Verdict(f"nothing here dropped it, and {endpoint} answered", passed=True)
    text = f"nothing here dropped it, and the proxy answered, listening at {endpoint}"
    return Verdict(f"{text}; its own connection to an endpoint is another flow", passed=True)


def _unanswered(served: Sequence[TracedReply], last: str, protocol: int) -> Verdict:
    if not served:
        return Verdict("nothing here dropped it, and connection tracking has no such connection (any more)", None)
    where = "was delivered on this node" if last == HOOKS[INPUT] else "left this node"
    text = f"nothing here dropped it: it {where}, and {served[-1].endpoint} has not answered"
    if protocol == PROTOCOLS["UDP"]:
        return Verdict(f"{text}, which over UDP need not mean anything", None)
    return Verdict(text, passed=False)
