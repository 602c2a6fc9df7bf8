"""Checks of other programs: a second kube-proxy, rules that another kube-proxy left, firewalls that drop packets to
endpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from kubeproxy.ask.finding import MISLEADS, NOTHING, PICKED_AGAIN, STOPS, Diagnosis, Effect, End, Harm, Severity
from kubeproxy.backends.leftovers import is_ours
from kubeproxy.backends.mode import FlowsEnd, Trace
from kubeproxy.control.client import Client
from kubeproxy.kernel.chains import LEGACY, Chain, RuleChain
from kubeproxy.kernel.nftables.tables import INGRESS
from kubeproxy.kernel.proc.processes import ProxyProcess
from kubeproxy.meaning.firewall import (
    ZONES,
    Drop,
    Filter,
    ForeignTranslation,
    Marking,
    PassingPacket,
    SourceTranslation,
)
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.addresses import Family, place_text

_FORWARDED: Final = frozenset({"prerouting", "forward", "postrouting"})
_IN_THE_WAY: Final = _FORWARDED | {"input", "output", INGRESS}


class Unasked(NamedTuple):
    """A text about kube-proxies that run on this node although the command was given another source of objects;
    `hangs`: the proxy at the control socket does not answer."""

    text: str
    hangs: bool = False

    @property
    def fix(self) -> str:
        """The text of a fix that makes a hanging proxy run again, or makes the command ask the running proxy."""
        return RESUME if self.hangs else self.text


RESUME: Final = (
    "if a signal stopped the proxy, send SIGCONT; else read its log, and end it: kubelet or systemd restarts it"
)
"""The fix for a proxy that hangs."""


def unasked(proxies: Sequence[ProxyProcess], control: str = "") -> Unasked:
    """Return a text about these running kube-proxies, and whether the proxy at the control socket hangs. `control` is
    the path of the control socket; '' for none."""
    pids = ", ".join(str(process.pid or "in another PID namespace") for process in proxies)
    if not pids:
        return Unasked("no kube-proxy runs here")
    if control and (silence := Client(control).silence()):
        return Unasked(f"a kube-proxy runs here (pid {pids}), and hangs: {silence}", hangs=True)
    return Unasked(f"a kube-proxy runs here (pid {pids}), and was not asked: leave out --manifests and --kubeconfig")


OTHER_LAYOUT: Final = "the rules of the Go kube-proxy have another layout, and are not compared with the objects"


def unevaluated(found: Iterable[Chain]) -> Iterator[Diagnosis]:
    """Report chains of other programs that this command cannot evaluate."""
    for one in found:
        what = f"table {one.family} {one.table}, chain {one.name} may drop packets, and is not evaluated"
        why = (
            f"if a connection hangs, a rule of this table may be the cause (`nft list table {one.family} {one.table}`)"
        )
        fix = "let it accept packets of the pod network and of Services"
        yield Diagnosis(Severity.NOTE, "firewall", what, why, fix)


def second(others: Iterable[tuple[ProxyProcess, str]], mode: str, caught: str = "") -> Iterator[Diagnosis]:
    """Check for other kube-proxies, given with their modes ('' if unknown); `mode` is the running proxy's mode.
    `caught` describes their rules for the checked connection; '' for none."""
    for process, theirs in others:
        kind = "another kube-proxy of this program" if process.ours else "the Go kube-proxy"
        shown = f" in {theirs} mode" if theirs else ""
        same = "each may remove the other's rules" if theirs == mode else "both translate the same connections"
        what = f"{kind} runs here too (pid {process.pid}){shown}{caught}"
        why = f"two kube-proxies write rules for the same Services: {same}, and connections may reach deleted endpoints"
        fix = (
            "stop one kube-proxy: a second DaemonSet, a unit of systemd, or a process that was started by hand; "
            "docs/migrate.md describes the change from one kube-proxy to the other"
        )
        yield Diagnosis(Severity.BROKEN, "leftovers" if caught else "proxies", what, why, fix, MISLEADS)


def with_rules(place: str, ends: Sequence[End] = ()) -> str:
    """Return a text that there are rules for the checked connection's destination, and that they lead to `ends`; ''
    if no connection is checked."""
    return f", with rules for {place}{leading(ends)}" * bool(place)


def left_over(traces: Iterable[Trace], mode: str, place: str = "", ends: Sequence[End] = ()) -> Iterator[Diagnosis]:
    """Check for rules of modes that differ from the running `mode` ('' if none runs), for one `place` or for all places
    (''). `ends` are the destinations of the rules."""
    caught = with_rules(place, ends)
    traces = list(traces)
    places = [trace.what for trace in traces]
    if places and mode:
        what, why = f"{LEFT}: {', '.join(places)}{caught}", "connections may still be sent to deleted endpoints"
        yield Diagnosis(Severity.DEGRADED, "leftovers", what, why, _REMOVAL, MISLEADS, leads=tuple(ends))
    if places and not mode:
        yield Diagnosis(
            severity=Severity.DEGRADED,
            about="leftovers",
            what=f"rules without a proxy that answers: {', '.join(places)}",
            why="; ".join(dict.fromkeys(trace.alone for trace in traces)),
            fix="start the proxy again, which adopts its own rules and removes the others. Only if this node shall "
            "have no kube-proxy: `kube-proxy --cleanup` removes the rules, and ends every Service on the node",
            harm=MISLEADS,
        )


def of_tables_left(found: Iterable[Diagnosis], left: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Yield findings on chains of other programs. `left` maps leftover tables of other kube-proxies to their modes. A
    finding on such a table names the leftover and its removal; a note on such a table is omitted."""
    for one in found:
        mode = left.get(one.table, "")
        if not mode:
            yield one
        elif one.severity is not Severity.NOTE or one.about == "translation":
            yield replace(one, what=f"{LEFT} in {mode} mode: {one.what}", fix=_REMOVAL, left_mode=mode)


def leading(ends: Sequence[End]) -> str:
    """Return a text about the destinations of leftover rules; '' without destinations."""
    return f", to {destinations(ends)}" * bool(ends)


LEFT: Final = "left by another kube-proxy"
_REMOVAL: Final = "make sure that no other kube-proxy runs, then restart this one: it removes the other's rules"


def both_variants(chains: Iterable[RuleChain]) -> Iterator[Diagnosis]:
    """Check for a kube-proxy's chains in both variants of iptables."""
    counts: defaultdict[Family, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for chain in chains:
        if is_ours(chain.name):
            counts[chain.family][chain.variant] += 1
    for family, by_variant in counts.items():
        if len(by_variant) > 1:
            shown = " and ".join(f"{count} in {variant}" for variant, count in sorted(by_variant.items()))
            what = f"both variants of iptables have a kube-proxy's {family.label} chains: {shown}"
            why = "packets pass the chains of both; outdated chains send connections to deleted endpoints"
            fix = "restart the proxy, which removes the chains of the variant that it does not use"
            yield Diagnosis(Severity.DEGRADED, "leftovers", what, why, fix, MISLEADS)


EITHER_FIRST: Final = (
    "packets pass the chains of both: either may translate the connection first, by the order of the tables' creation"
)


def _by_chain(drops: Iterable[Drop]) -> Iterator[tuple[list[Drop], str]]:
    places: dict[tuple[str, str, str, bool, str], list[Drop]] = {}
    for one in sorted(drops, key=lambda drop: drop.unordered):
        is_answer = one.packet.purpose is CompiledFor.ANSWER
        several = places.setdefault((one.where, one.chain, one.packet.hook, is_answer, one.verdict), [])
        if not several or several[0].unordered is one.unordered:
            several.append(one)
    for (*_, is_answer, _), several in places.items():
        packets = [one.packet for one in several]
        known = [(end, one.port) for one in packets if (end := one.source if is_answer else one.destination)]
        if ends := dict.fromkeys(place_text(*end) for end in known):
            yield several, f"{'the answers of' if is_answer else 'what goes to'} {', '.join(ends)}"


def dropping(
    drops: Iterable[Drop], harm: HarmOfPackets = lambda *_, **__: STOPS, bridges: Collection[str] = ()
) -> Iterator[Diagnosis]:
    """Report chains of other programs that surely drop a connection, or that drop it in one of two possible orders of
    chains. A client sends a silently dropped request again, and the repeated request picks an endpoint again, because
    connection tracking stores a connection only after its first packet has passed all hooks. A TCP reset to a client on
    one of these `bridges` has the endpoint's address as its source, and no rule translates this address back
    (nf_send_reset in net/ipv4/netfilter/nf_reject_ipv4.c)."""
    drops = [one for one in drops if not one.untracks]
    stops = harm([one.packet for one in drops if not one.unordered]) == STOPS
    for several, packets in _by_chain(drops):
        one = several[0]
        is_request = one.packet.purpose is CompiledFor.REQUEST
        verdict = " or ".join(dict.fromkeys(one.verdict.replace("resets", "rejects").split(" or ")))
        unseen = one.verdict == "resets" and one.packet.translated and one.packet.interfaces[0] in bridges
        refuses = "rejects" in verdict and not unseen
        found = harm([each.packet for each in several], again=not (refuses or stops))
        why = "the client sees a timeout"
        if is_request and refuses:
            why = "the client is refused" if verdict == "rejects" else why + ", or is refused"
        elif found.effect is Effect.DELAYS:
            why = PICKED_AGAIN
        if unseen:
            why = f"a reset does not reach clients on the bridge {one.packet.interfaces[0]}: {why}"
        effect = f"{'may drop' if one.unordered else verdict} {packets} at the hook {one.packet.hook}"
        shown = _listing(one.where, one.chain, "`kube-proxy trace` shows the rule, if it is one")
        fix = f"let {one.where} {one.chain} accept it; {shown}"
        if one.unordered:
            yield of_chain(one, Severity.UNKNOWN, "firewall", effect, _UNORDERED, fix)
        else:
            yield of_chain(one, Severity.BROKEN, "firewall", effect, why, fix, found)


def of_chain(
    one: Drop | Filter | ForeignTranslation | Marking | SourceTranslation,
    severity: Severity,
    about: str,
    effect: str,
    why: str,
    fix: str = "",
    harm: Harm = NOTHING,
) -> Diagnosis:
    """Return the finding for a chain of another program that has this effect."""
    return Diagnosis(severity, about, f"{one.where}, chain {one.chain}: {effect}", why, fix, harm, table=one.where)


def _listing(where: str, chain: str, traced: str) -> str:
    """Return the command that lists the rules of a chain of legacy iptables, which the kernel does not trace; return
    `traced` for another chain."""
    return f"`{where} -S {chain}` lists its rules" if where.partition(" ")[0] in LEGACY.values() else traced


HarmOfPackets = Callable[..., Harm]  # returns the harm of lost packets, as CheckedNode.harm_of does
_UNMARKED: Final = " that are not masqueraded"
_UNORDERED: Final = (
    "it has the priority of a chain that translates the connection, so it may run before or after that chain, by the "
    "order of their creation; `kube-proxy trace` shows it"
)


def untracking(
    drops: Iterable[Drop], harm: HarmOfPackets = lambda *_, **__: STOPS, *, is_answered: bool
) -> Iterator[Diagnosis]:
    """Report chains of other programs that surely exclude a connection, or its answers, from connection tracking.
    `is_answered` means that a program on this node listens on the destination, and receives untranslated packets."""
    for several, packets in _by_chain(one for one in drops if one.untracks):
        one, about, severity = several[0], "firewall", Severity.BROKEN
        where = f"connection tracking at the hook {one.packet.hook}"
        if one.verdict == ZONES:
            effect = f"{'may put' if one.unordered else 'puts'} {packets} into a zone of {where}"
            effect += ", and not the packets of the other direction"
            why = "no rule translates the answers back: the client takes them for packets of another connection"
            fix = f"have {one.where} {one.chain} set the same zone in both directions, or leave these packets out of it"
        else:
            of_answers = one.packet.purpose is CompiledFor.ANSWER
            about = about if of_answers else "notrack"
            severity = Severity.NOTE if is_answered and not of_answers else severity
            effect = f"{'may take' if one.unordered else 'takes'} {packets} out of {where}"
            end = "the program of this node that listens there gets" if is_answered else "no endpoint gets"
            why = "the client takes them for packets of another connection" if of_answers else f"{end} them"
            why = f"no rule translates such packets{' back' * of_answers}: {why}"
            why = _UNORDERED if one.unordered else why
            fix = f"leave these packets out of the rule notrack of {one.where} {one.chain}"
        severity = Severity.UNKNOWN if one.unordered else severity
        found = harm([each.packet for each in several]) if severity is Severity.BROKEN else NOTHING
        yield of_chain(one, severity, about, effect, why, fix, found)


def zones_of_one_direction(
    drops: list[Drop], end_of: Callable[[PassingPacket], End | None], passing: Iterable[PassingPacket]
) -> list[Drop]:
    """If both requests and answers get a conntrack zone, which may be the same zone, return the drops for other
    reasons, and a drop of the requests to each endpoint with answers that get no zone. Otherwise return all drops."""
    zoned = [one for one in drops if one.verdict == ZONES]
    answered = {end_of(one.packet) for one in zoned if one.packet.purpose is CompiledFor.ANSWER}
    requests = [one for one in zoned if one.packet.purpose is CompiledFor.REQUEST]
    if not (answered and requests):
        return drops
    kept = [one for one in drops if one.verdict != ZONES]
    answering = (end_of(one) for one in passing if one.purpose is CompiledFor.ANSWER)
    lost = {end for end in answering if end is not None and end not in answered}
    packets = (requests[0].packet._replace(destination=address, port=port) for address, port in lost)
    return [*kept, *(requests[0]._replace(packet=one) for one in packets)]


def translating(found: Iterable[ForeignTranslation], forwarded: bool, served: bool) -> Iterator[Diagnosis]:
    """Report chains of other programs that translate a connection; `forwarded` means that the proxy would forward the
    connection; `served` means that the destination belongs to a Service. If the destination belongs to no Service, the
    outcome is unknown."""
    for one in found:
        target = place_text(*one.packet.original)
        severity = Severity.NOTE if forwarded or served else Severity.UNKNOWN
        if forwarded and one.sure:
            severity = Severity.UNKNOWN if one.unordered else Severity.BROKEN
        why = _UNORDERED if one.unordered else "a connection is translated once, by the first matching rule"
        fix = f"leave {target} out of the rules of {one.where} {one.chain}" if forwarded else ""
        harm = MISLEADS if severity is Severity.BROKEN else NOTHING
        yield Diagnosis(severity, "translation", translation(one), why, fix, harm, table=one.where)


def translating_now(found: Iterable[ForeignTranslation], endpoints: Collection[End], until: str) -> Iterator[Diagnosis]:
    """Report chains that translate a connection while no kube-proxy runs, or while the kube-proxy hangs; `endpoints`
    are the endpoints in the present objects. Findings begin with `until`, which is UNTIL or HANGING."""
    for one in found:
        old = [end for end in one.ends if end not in endpoints]
        missing = f"in the objects, {place_text(*one.packet.original)} has no endpoint {destinations(old)}"
        reason = missing if old else "the objects have these endpoints too"
        severity = Severity.UNKNOWN if old or not one.sure else Severity.NOTE
        yield Diagnosis(severity, PRESENT, until + translation(one), reason, table=one.where)


UNTIL: Final = "until a kube-proxy runs, "
HANGING: Final = "while the proxy hangs, "
PRESENT: Final = "present rules"
"""Names the check of the kernel's rules, which determine where connections go until a kube-proxy runs and answers."""


def translation(one: ForeignTranslation) -> str:
    """Return a text about a chain and the destinations of its translation."""
    verb = "translates" if one.sure and not one.unordered else "may translate"
    target, ends = place_text(*one.packet.original), destinations(one.ends)
    leads = f" to {ends}" * (ends != target)
    return f"{one.where}, chain {one.chain}: {verb} {target}{leads} at the hook {one.packet.hook}"


def destinations(ends: Sequence[End]) -> str:
    """Return a text about the destinations of a translation."""
    shown = [place_text(*end) if any(end[0]) else f"this node, port {end[1]}" for end in ends[:_LISTED]]
    return " or ".join([*shown, *([f"{len(ends) - _LISTED} others"] if len(ends) > _LISTED else [])])


_LISTED: Final = 10  # destinations in a text


def _tracking(filters: Iterable[Filter]) -> Iterator[Diagnosis]:
    for one in filters:
        if one.untracks:
            effect = f"takes packets out of connection tracking at the hook {one.hook}"
            why = "no rule translates them, so no endpoint gets them; a program such as a DNS cache may answer"
            fix = "see which packets the rule is for; let it match no packets to Services that only kube-proxy serves"
            yield of_chain(one, Severity.NOTE, "firewall", effect, why, fix)
        if one.zones:
            effect = f"puts packets into a zone of connection tracking at {one.hook}"
            why = "answers that are tracked in another zone than their requests are not translated back"
            fix = "see that it sets the same zone for both directions of a connection"
            yield of_chain(one, Severity.NOTE, "firewall", effect, why, fix)


_ONLY_MARKED: Final = (
    "only KUBE-FORWARD accepts new connections: NodePorts pass under policy Cluster; connections of pods to cluster "
    "IPs, and all connections with policy Local, time out"
)
_NONE_ACCEPTED: Final = (
    "none of the chain's rules accepts new connections: packets to endpoints are dropped, and clients see a timeout"
)


def firewalls(
    filters: Sequence[Filter],
    flows_end: FlowsEnd,
    ends_here: bool,
    harm: Callable[[Filter], Harm] = lambda _: STOPS,
    direct: str = "",
) -> Iterator[Diagnosis]:
    """Report chains of other programs that drop packets to endpoints. `ends_here` means that connections end at this
    node. `direct` is the destination of the checked connection if no rule translates it."""
    noted: dict[str, list[Filter]] = {}
    what, rules, options = "translated packets", "`ct status dnat accept`", "`-m conntrack --ctstate DNAT -j ACCEPT`"
    if direct:
        what = f"the packets to {direct} and their answers"
        rules = f"`ip{'6' * (':' in direct)} daddr {direct} accept` and `ct state established accept`"
        options = f"`-d {direct} -j ACCEPT` and `-m conntrack --ctstate ESTABLISHED -j ACCEPT`"
    for one in filters:
        through = one.hook in _FORWARDED or (one.hook == "input" and (flows_end is FlowsEnd.PROXY or ends_here))
        if one.closes and not one.accepts and through:
            effect = f"drops all new connections{_UNMARKED * one.marked} at the hook {one.hook}"
            shown = _listing(one.where, one.chain, "`kube-proxy trace` shows a packet's way")
            fix = f"let it accept {what}: {rules} in {one.where} {one.chain}, or for iptables {options}; {shown}"
            why = _ONLY_MARKED if one.marked else _NONE_ACCEPTED
            yield of_chain(one, Severity.BROKEN, "firewall", effect, why, fix, harm(one))
        elif one.hook in _IN_THE_WAY and (one.closes or one.drops):
            noted.setdefault(one.where, []).append(one)
    yield from () if direct else _tracking(filters)
    for where, chains in noted.items():
        shown = ", ".join(f"{chain.chain} at {chain.hook}" for chain in chains)
        what = f"{where} may drop packets too: {shown}"
        why = "a firewall is no mistake, but if a connection hangs, a rule of the firewall may be the cause"
        fix = _listing(where, chains[0].chain, "`kube-proxy trace SRC DST:PORT` shows which rule drops a connection")
        yield Diagnosis(Severity.NOTE, "firewall", what, why, fix, table=where)
