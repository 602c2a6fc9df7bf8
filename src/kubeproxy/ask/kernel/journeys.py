"""Combines trace steps of packets into journeys."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.kernel.nftables.tables import HOOKS, TABLE_FAMILIES, Hook
from kubeproxy.kernel.nftables.trace import ANSWERS, Headers, Step
from kubeproxy.model.addresses import PROTOCOLS, place_text

DROP, ACCEPT, STOLEN, QUEUE = 0, 1, 2, 3
LEFT, REFUSED = "left by another kube-proxy: ", "refused"

UNTRACKS = re.compile(r"\bnotrack\b")
REWRITES = re.compile(r"\b(snat|masquerade|netmap)\b", re.IGNORECASE)  # changes the source
TRANSLATES = re.compile(r"\b(dnat|redirect)\b", re.IGNORECASE)  # changes the destination
ZONES = re.compile(r"\bct (zone set\b|key 17\b.*\bsreg\b)")  # assigns a zone of connection tracking (NFT_CT_ZONE)
CHOSEN = re.compile(r"\bdnat to ([^\s\"]+)")  # matches the destination in the text of a rule
_RST = 0x04
_ICMP = (1, 58)  # of IPv4 and of IPv6
_REASONS = {
    **dict.fromkeys(((1, 0x0300), (58, 0x0100)), "no route"),
    **dict.fromkeys(((1, 0x0301), (58, 0x0103)), "host unreachable"),
    **dict.fromkeys(((1, 0x0303), (58, 0x0104)), "port unreachable"),
    **dict.fromkeys(((1, 0x0309), (1, 0x030A), (1, 0x030D), (58, 0x0101)), "administratively prohibited"),
    **dict.fromkeys(((1, 0x0304), (58, 0x0200)), "packet too big"),
    **dict.fromkeys(((1, 0x0B00), (58, 0x0300)), "hop limit exceeded"),
}
"""Names of ICMP errors, keyed by protocol, and by type and code."""
_REDIRECTS = frozenset({(1, 5), (58, 137)})
"""ICMP redirects, by protocol and type, with which a router names a shorter way but still forwards the packet."""
_NEAR = 16  # maximum number of earlier packets to look through for the packet of a step
RuleKey = tuple[int, str, str, int]  # family of the table, table, chain, handle


class DecidedFlow(NamedTuple):
    """The answer of `why` for a flow. `unrouted` returns the reason why the kernel does not route the flow's packets,
    or ''. `unserved` is the reason why the proxy does not translate the packets, or ''. `untranslated` returns the
    reason why the kernel lacks the translating rules; '' if unknown. `ends` is a text of the endpoints from which the
    proxy's rules choose; '' for none."""

    unrouted: Callable[[], str] = str
    unserved: str = ""
    untranslated: Callable[[], str] = str
    ends: str = ""


UNDECIDED = DecidedFlow()


class Decision(NamedTuple):
    """The decision of a chain of this program, as text. `left` means that the chain belongs to a mode other than the
    running mode."""

    text: str
    left: bool = False


class KnownRules(NamedTuple):
    """Texts and meanings of the rules that packets matched."""

    texts: Mapping[RuleKey, str]
    base_chains: Mapping[tuple[int, str, str], Hook]
    decision: Callable[[str, str], Decision | None]
    """Returns the decision of this program's (table, chain), or None for another chain."""
    untraced: Callable[[], str] = str  # findings on rules of iptables-legacy; '' without such rules
    legacy: int = 0  # the total number of iptables-legacy rules
    decided: DecidedFlow = UNDECIDED
    without_room: Callable[[], str] = str  # the finding of a full connection table; '' if it has room
    addresses: Callable[[], Container[str]] = frozenset  # this node's addresses


class Met(Struct, frozen=True, rename="camel"):
    """A packet in one base chain."""

    hook: str
    table: str
    chain: str
    destination: str  # the packet's destination before this chain
    words: tuple[str, ...]  # the rules and decisions that matched
    verdict: str
    rules: tuple[str, ...] = ()  # the texts of the rules in `words`
    left: bool = False  # another kube-proxy left a chain that the packet passed


class Journey(Struct, frozen=True, rename="camel"):
    """The path of one packet through this node."""

    direction: str  # 'request' or 'answer'
    refusal: str  # 'reset', 'ICMP error', or '' for another packet
    source: str
    destination: str
    met: tuple[Met, ...]
    lost: str  # the reason why the packet ended on this node; '' if it continued
    last: str  # the last hook that the packet passed
    reason: str = ""  # the name of the ICMP error
    local: bool = False  # this node sent the packet
    leaves: str = ""  # the interface through which the packet leaves; '' if unknown


class _Run(NamedTuple):
    headers: Headers
    steps: list[Step]


def journeys(steps: Iterable[Step], ruleset: KnownRules, own_table: str, late: Container[int] = ()) -> list[Journey]:
    """Combine trace steps into journeys, ordered by their first step. Omit packets that `own_table` did not mark, the
    `late` packets, and ICMP redirects."""
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
    marked = (runs for runs in packets if _marks(runs, own_table) and runs[0].steps[0].packet not in late)
    kept = (runs for runs in marked if (runs[0].headers.protocol, runs[0].headers.flags >> 8) not in _REDIRECTS)
    return [_journey(runs, ruleset, own_table) for runs in kept]


def _marks(runs: Iterable[_Run], own_table: str) -> list[str]:
    """Return this program's chains that marked a packet for tracing; empty if another program requested the trace."""
    return [step.chain for run in runs for step in run.steps if step.table == own_table and step.handle]


def _continued(packets: Sequence[Sequence[_Run]], headers: Headers) -> int:
    """Return the index of the journey to which a step belongs, or the next index for a new journey. The kernel's trace
    id of a packet changes on translation, and when the packet passes loopback or a bridge."""
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
        next((hook for run in reversed(runs) if (hook := _hook(run, ruleset))), ""),
        _REASONS.get((first.protocol, first.flags), ""),
        not first.came_by,
        _interface_name(runs[-1].headers.leaves_by),
    )


def _interface_name(index: int) -> str:
    with suppress(OSError):  # also for 0
        return socket.if_indextoname(index)
    return ""


def _refusal(headers: Headers) -> str:
    if headers.protocol in _ICMP:
        return "ICMP error"
    return "reset" if headers.protocol == PROTOCOLS["TCP"] and headers.flags & _RST else ""


def _hook(run: _Run, ruleset: KnownRules) -> str:
    step = run.steps[0]
    base = ruleset.base_chains.get((step.family, step.table, step.chain))
    return HOOKS[base.number] if base is not None and base.number < len(HOOKS) else ""


def _met(run: _Run, ruleset: KnownRules) -> Met:
    step = run.steps[0]
    words = dict.fromkeys(_words(run, ruleset))
    return Met(
        _hook(run, ruleset),
        f"{TABLE_FAMILIES.get(step.family, step.family)} {step.table}",
        step.chain,
        place_text(run.headers.destination, run.headers.destination_port),
        tuple(text if rule is None else f'rule "{rule}"' for text, rule, _ in words),
        _verdict(run.steps[-1], ruleset),
        tuple(rule for _, rule, _ in words if rule is not None),
        any(left for *_, left in words),
    )


def _words(run: _Run, ruleset: KnownRules) -> Iterator[tuple[str, str | None, bool]]:
    """Yield the decisions of this program's chains as (text, None, Decision.left), and the matching rules of other
    programs as ('', rule, False). In consecutive decisions, the prefix LEFT appears only once."""
    shown, decide = False, ruleset.decision
    for step in run.steps:
        decision = decide(step.table, step.chain)
        if decision is not None:
            yield LEFT * (decision.left and not shown) + decision.text, None, decision.left
            shown = decision.left
            if shown and step.verdict == ACCEPT and CHOSEN.search(_text(step, ruleset)):
                yield "", _text(step, ruleset), False
        elif step.kind == "rule" and step.handle and (not step.leads_to or decide(step.table, step.leads_to) is None):
            yield "", _text(step, ruleset), False


def _text(step: Step, ruleset: KnownRules) -> str:
    return ruleset.texts.get((step.family, step.table, step.chain, step.handle), f"handle {step.handle}")


def _verdict(step: Step, ruleset: KnownRules) -> str:
    if step.verdict == DROP and step.kind != "policy" and "reject" in _text(step, ruleset).lower():
        return REFUSED
    verdicts = {DROP: "dropped", ACCEPT: "accepted", STOLEN: "taken", QUEUE: "queued for a program"}
    return verdicts.get(step.verdict, "goes on")


def _lost(run: _Run, ruleset: KnownRules) -> str:
    step = run.steps[-1]
    if step.verdict not in {DROP, QUEUE}:
        return ""
    where = f"table {TABLE_FAMILIES.get(step.family, step.family)} {step.table}, chain {step.chain}"
    decision = ruleset.decision(step.table, step.chain)
    whose, why = ("which is not ours", "") if decision is None else ("which is ours", f": {decision.text}")
    if decision is not None and decision.left:
        whose, why = LEFT + decision.text, ""
    if step.kind == "policy":
        return f"dropped by the policy of {where}, {whose}"
    return f'{_verdict(step, ruleset)} by rule "{_text(step, ruleset)}" of {where}, {whose}{why}'
