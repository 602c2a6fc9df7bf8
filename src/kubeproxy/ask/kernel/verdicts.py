"""The outcome of a traced flow, from the journeys of its packets and its conntrack entries, as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.ask.kernel.journeys import CHOSEN, REWRITES, TRANSLATES, UNTRACKS, ZONES, Journey, KnownRules
from kubeproxy.kernel.nftables.tables import HOOKS
from kubeproxy.kernel.nftables.trace import FORWARD, INPUT, OUTPUT, POSTROUTING, PREROUTING
from kubeproxy.model.addresses import PROTOCOLS, place_of_text
from kubeproxy.wording import counted


class TracedReply(Struct, frozen=True):
    """The entry of a traced connection in connection tracking."""

    endpoint: str
    answered: bool  # a reply arrived during the trace
    earlier: bool = False  # a reply arrived before the trace
    selection: str = ""  # arguments of conntrack(8) that select the entry
    existed: bool = False  # the entry is older than the trace
    client: str = ""  # the client's address in packets to the endpoint
    source: str = ""  # the client's address and port in packets to the Service

    @property
    def unanswered(self) -> bool:
        """Whether no reply ever arrived. An established connection may send packets that need no reply."""
        return not (self.answered or self.earlier)


class Serving(NamedTuple):
    """The traced Service as NAMESPACE/NAME, and all its endpoints, including those that get no new connections.
    `relayed` means that the flow ends at the proxy, which carries the connection."""

    service: str
    endpoints: frozenset[str]
    relayed: bool = False


class Verdict(Struct, frozen=True, rename="camel"):
    """The result for a flow. `passed` is None if the outcome is unknown."""

    text: str
    passed: bool | None


def verdict(
    found: Sequence[Journey],
    served: Sequence[TracedReply],
    ruleset: KnownRules,
    protocol: int,
    *,
    proxied: bool,
    serving: Serving | None = None,
    silent: str = "",
) -> Verdict:
    """Return the outcome of a flow. `proxied` means that the proxy on this node answers the client. `serving` is None
    if the Service is unknown. `silent` is the text of `silent_neighbour` for the endpoint."""
    untracked = _untracked(found, served, serving)
    if proxied:
        serving = None
    others = next((words for one in found if one.direction == "request" and (words := by_others(one, served))), None)
    chosen = others[1] if others is not None else "" if proxied else _chosen(found, ruleset)
    endpoint = served[-1].endpoint if served else chosen
    refused = _refused(found, endpoint, ruleset)
    if refused and silent:
        refused = Verdict(f"{refused.text}; {silent}", passed=False)
    made = refused or _became(
        found, served, ruleset, protocol, proxied=proxied and not others, silent=silent, endpoint=endpoint
    )
    if untracked is not None and not made.passed:
        passed = untracked.passed if refused is None else False
        made = Verdict(untracked.text + f"; {made.text}" * (made.passed is False), passed)
    if made.passed is False and ruleset.decided.unserved and not any(one.existed for one in served):
        made = Verdict(f"{made.text}; no rule of the proxy translates it: {ruleset.decided.unserved}", passed=False)
    passed = False if any(not one.existed for one in _strays(served, serving)) else made.passed
    if others is None:
        strayed = _strayed(found, served, serving, ruleset, protocol) or _left(found) * (made.passed is False)
        untraced = "" if strayed or made.passed is not False else ruleset.untraced()
        is_guess = ruleset.legacy and _NO_ANSWER in made.text and not (strayed or untraced)
        guess = f"; a rule of iptables-legacy may have dropped it {_LEGACY}" * bool(is_guess)
        return Verdict(made.text + strayed + f"; {_UNTRACED}: {untraced}" * bool(untraced) + guess, passed)
    table, chosen = others
    what = f"rules that another kube-proxy left in table {table} chose {chosen}, not the running proxy"
    if serving is not None and chosen not in serving.endpoints:
        what += f", and it is no endpoint of {serving.service}"
    text = f"{made.text}; {what}" if made.passed else f"{what}; {made.text}"
    return Verdict(f"{text}: {_RESTART}", passed)


_RESTART = "see that no other kube-proxy runs, then restart this one, which removes them"


def _untracked(found: Sequence[Journey], served: Sequence[TracedReply], serving: Serving | None) -> Verdict | None:
    """Return the verdict on requests that a rule of another program exempts from connection tracking, or None for other
    requests. A program of this node, such as a DNS cache, may answer requests that are delivered to this node."""
    untracked = [one for one in without_entry(found, served) if _foreign(one, UNTRACKS)]
    if not untracked:
        return None
    text = f"{_foreign(untracked[-1], UNTRACKS)} takes the request out of connection tracking"
    if untracked[-1].last == HOOKS[INPUT]:
        return Verdict(f"{text}; it was delivered on this node, and its answer cannot be traced", None)
    if serving is None:
        return Verdict(f"{text}, so its answer cannot be traced", None)
    return Verdict(f"{text}, so no rule translates it to an endpoint of {serving.service}", passed=False)


def _foreign(request: Journey, pattern: re.Pattern[str]) -> str:
    """Return the rule of another program that a request matched, and that has a text with this pattern; '' without such
    a rule."""
    rules = ((met, rule) for met in request.met for rule in met.rules)
    place = 'rule "{}" of table {}, chain {}, which is not ours,'
    return next((place.format(rule, met.table, met.chain) for met, rule in rules if pattern.search(rule)), "")


def lost_answers(found: Sequence[Journey], served: Sequence[TracedReply], ruleset: KnownRules) -> str:
    """Return a text about a rule of another program because of which the kernel may not recognise answers; '' for none.
    Such a rule gives requests a source address that this node does not have, or a zone of connection tracking."""
    sources = {one.source: one.client for one in served if not one.answered and one.client}
    for request in found:
        client = sources.get(request.source, "")
        rule = _foreign(request, REWRITES) if client and client != place_of_text(request.source)[0] else ""
        if rule and client not in ruleset.addresses():
            what = "which is no address of this node, so answers do not return to this node"
            return f"{rule} gives it the source {client}, {what}"
    zoned = next(filter(None, (_foreign(one, ZONES) for one in found if one.direction == "request")), "")
    return zoned and f"{zoned} puts it into a zone of connection tracking: {_ZONED}"


_ZONED = "answers without the same zone do not count as answers of this connection"


def _cause(found: Sequence[Journey], served: Sequence[TracedReply], ruleset: KnownRules) -> str:
    """Return the rule that may cause missing answers; without such a rule, the command that tests for other causes."""
    lost = lost_answers(found, served, ruleset)
    return f"; {lost}" if lost else f" ({_SHOWS})"


def _left(found: Sequence[Journey]) -> str:
    """Return a text if leftover rules of another kube-proxy were the last rules that a request passed, else ''. Without
    a later chain, the trace does not show the destination that these rules chose."""
    requests = (one for one in reversed(found) if one.direction == "request")
    last = next((one.met[-1] for one in requests if one.met and not one.lost), None)
    if last is None or not last.left:
        return ""
    return f"; its last rules are those that another kube-proxy left in table {last.table}: {_RESTART}"


def by_others(request: Journey, served: Sequence[TracedReply]) -> tuple[str, str] | None:
    """Return the table of leftover rules that chose the destination instead of this proxy's rules, and the
    destination."""
    for place, met in enumerate(request.met):
        if met.left:
            # A packet without a route passes no later chain, and has no conntrack entry, so only the rule shows its
            # destination.
            rules = [found[1] for rule in met.rules if (found := CHOSEN.search(rule))]
            later = [one.destination for one in request.met[place + 1 :]] + [one.endpoint for one in served[-1:]]
            chosen = next(iter((*rules, *later)), met.destination)
            if chosen != met.destination:
                return met.table, chosen
    return None


def _chosen(found: Sequence[Journey], ruleset: KnownRules) -> str:
    """If the trace shows that the last request was translated, return its destination after the translation.
    Otherwise return the endpoints from which the proxy's rules choose, or '' if other rules may have chosen."""
    request = next((one for one in reversed(found) if one.direction == "request" and one.met), None)
    if request is None or request.met[-1].destination != request.destination:
        return request.met[-1].destination if request is not None else ""
    is_left = any(met.left for met in request.met)
    return "" if is_left or ruleset.legacy or _foreign(request, TRANSLATES) else ruleset.decided.ends


def _strays(served: Sequence[TracedReply], serving: Serving | None) -> list[TracedReply]:
    """Return the connections that lead to an address that is not an endpoint of their Service."""
    return [one for one in served if serving is not None and one.endpoint not in serving.endpoints]


def _strayed(
    found: Sequence[Journey], served: Sequence[TracedReply], serving: Serving | None, ruleset: KnownRules, protocol: int
) -> str:
    """Return a text if a connection leads to an address that is not an endpoint of its Service, else ''."""
    stray = next(reversed(_strays(served, serving)), None)
    if stray is None or serving is None or (ruleset.decided.unserved and not stray.existed):
        return ""
    requests = [one for one in found if one.direction == "request"]
    # A request's `destination` is the destination before any translation.
    if stray.endpoint in {one.destination for one in requests} and not stray.existed:
        cause = ruleset.decided.untranslated() or "`kube-proxy verify` compares the proxy's rules with the kernel"
        return f"; no rule translated it to an endpoint of {serving.service}: {cause}"
    what = f"; {stray.endpoint} is no endpoint of {serving.service}, and"
    if not stray.existed:
        untraced = ruleset.untraced()
        more = f"; {_UNTRACED}: {untraced}" if untraced else ""
        chosen = (_foreign(one, TRANSLATES) for one in requests if one.source == stray.source)
        rules = next(filter(None, chosen), "rules of this node")
        return f"{what} {rules} chose it for this new connection{more}"
    kept = kept_flow(protocol, stray.selection, answered=stray.answered or stray.earlier)
    return f"{what} its entry in connection tracking, older than the trace, keeps the flow there: {kept.text}"


class KeptFlow(NamedTuple):
    """The advice for the client of a flow to an address that is not an endpoint: how the client gets an endpoint."""

    text: str
    continues: bool  # deleting the flow's conntrack entry would end an established connection


def kept_flow(protocol: int, selection: str, *, answered: bool) -> KeptFlow:
    """Return the advice for a flow to an address that is not an endpoint of its Service; TracedReply describes
    `selection`."""
    if answered and protocol != PROTOCOLS["UDP"]:
        text = (
            "an established connection continues as long as this address answers, and new connections get an endpoint: "
            "the client chooses again if it closes this one"
        )
        return KeptFlow(text, continues=True)
    text = f"this removes the entry, so that the next packet gets an endpoint: `conntrack -D {selection}`"
    return KeptFlow(text, continues=False)


def _became(
    found: Sequence[Journey],
    served: Sequence[TracedReply],
    ruleset: KnownRules,
    protocol: int,
    *,
    proxied: bool,
    silent: str,
    endpoint: str,
) -> Verdict:
    if not found:
        text = "no packet of this flow arrived: let the client send during the trace, or wait longer (--seconds)"
        return Verdict(text, None)
    if any(one.answered for one in served):
        return _replied(found, served, ruleset, protocol, proxied=proxied, silent=silent)
    if without_entry(found, served) and (full := ruleset.without_room()):
        return Verdict(f"{_undropped(ruleset, 'no rule')}, but {full}", passed=False)
    if silent:
        return Verdict(f"nothing here dropped it, but it did not leave this node: {silent}", passed=False)
    request = next((one for one in reversed(found) if one.direction == "request"), None)
    last = request.last if request is not None else ""
    later = {base.number for base in ruleset.base_chains.values()} & {INPUT, FORWARD, POSTROUTING}
    if later and (last == HOOKS[PREROUTING] or (last == HOOKS[OUTPUT] and not served)):
        causes = ruleset.decided.unrouted() or _possible(ruleset) * (last == HOOKS[PREROUTING])
        if causes:
            it = f"it (for {endpoint})" if endpoint else "it"
            text = f"{_undropped(ruleset, 'no rule')}, but {it} went no further than {last}: {causes}"
            return Verdict(text, passed=False)
    ways = dict.fromkeys(one.leaves for one in found if one.direction == "request" and one.leaves)
    where = f"left by {' or '.join(ways)}" if ways else "left this node"
    where = "was delivered on this node" if last == HOOKS[INPUT] else where
    return _unanswered(served, where, protocol, ruleset, _cause(found, served, ruleset))


def _replied(
    found: Sequence[Journey],
    served: Sequence[TracedReply],
    ruleset: KnownRules,
    protocol: int,
    *,
    proxied: bool,
    silent: str,
) -> Verdict:
    """Return the verdict for a flow with a connection that its endpoint answered."""
    failed = _failed(found, served, ruleset)
    endpoints = [one.endpoint for one in served if one.answered and one.endpoint not in failed]
    endpoint = ", ".join(dict.fromkeys(endpoints or [one.endpoint for one in served if one.answered]))
    if not proxied and _unreturned(found):
        causes = ruleset.decided.unrouted() or _possible(ruleset)
        text = f"{_undropped(ruleset, 'no rule')}, but the answers of {endpoint} went no further than prerouting: "
        return Verdict(text + causes, passed=False)
    made = _answered(endpoint, proxied=proxied)
    is_silent = "" in failed or any(one.unanswered for one in served)
    cause = (f": {silent}" if silent else _cause(found, served, ruleset)) if is_silent else ""
    return _partly(made, failed, protocol, cause) if failed else made


def _unreturned(found: Sequence[Journey]) -> bool:
    """Return whether requests were forwarded, and no answer was. A request in a chain at the hook forward shows that
    the trace sees forwarded packets."""
    forward = HOOKS[FORWARD]
    forwarded = any(met.hook == forward for one in found if one.direction == "request" for met in one.met)
    answers = [one.last for one in found if one.direction == "answer"]
    return forwarded and bool(answers) and {*answers} == {HOOKS[PREROUTING]}


def _possible(ruleset: KnownRules) -> str:
    """Return the possible causes of a packet's end after prerouting if `why` finds no cause."""
    return _UNSEEN * bool(ruleset.legacy) + (
        "there is no route to its destination, forwarding is off (net.ipv4.ip_forward, or "
        "net.ipv4.conf.IFACE.forwarding of the interface of arrival), rp_filter rejects its source, or nothing answers "
        "ARP for its destination behind a bridge"
    )


def departed(found: Sequence[Journey], served: Sequence[TracedReply], made: Verdict, *, silent: str) -> bool:
    """Return whether a request left this node for the endpoint of the last entry and got no answer; `verdict` describes
    `silent`."""
    ended = (one.lost or (one.local and one.refusal) for one in found)
    if made.passed or silent or not served or served[-1].answered or any(ended):
        return False
    here = {HOOKS[PREROUTING], HOOKS[INPUT]}
    return any(one.direction == "request" and one.last not in here for one in found)


_UNTRACED = "the kernel does not trace iptables-legacy"
_LEGACY = "(`iptables-legacy-save`, for IPv6 `ip6tables-legacy-save`, lists these rules)"
_UNSEEN = f"a rule of iptables-legacy dropped it {_LEGACY}, "


def _undropped(ruleset: KnownRules, subject: str = "nothing here") -> str:
    """Return the text that nothing dropped a packet, or, if there are rules of iptables-legacy, that no traced rule
    dropped the packet."""
    return f"{'no rule that the kernel traces' if ruleset.legacy else subject} dropped it"


def _refused(found: Sequence[Journey], endpoint: str, ruleset: KnownRules) -> Verdict | None:
    """Return the verdict for a flow with lost packets or with only refusals as answers; return None for other flows."""
    for one in found:
        if one.lost:
            return Verdict(f"the {one.direction} was {one.lost}", passed=False)
    answers = [one for one in found if one.direction == "answer"]
    if not answers or not all(one.refusal for one in answers):
        return None
    answer = answers[-1]
    text = f"and {answer.source} refused it with a reset: nothing listens there"
    text += ", or a firewall on its way or in its pod rejects this client" * (not answer.local)
    if answer.refusal != "reset":
        asked = f" for {endpoint}" if endpoint else ""
        text = f"and {answer.source.rpartition(':')[0]} answered{asked} with an ICMP error"
        if answer.local:
            text = f"but this node could not reach {endpoint or 'its destination'}"
        text += f" ({answer.reason})" if answer.reason else ""
        text += f": {causes}" if answer.local and (causes := ruleset.decided.unrouted()) else ""
    more = f", or a rule of iptables-legacy rejected it {_LEGACY}" * bool(ruleset.legacy)
    return Verdict(f"{_undropped(ruleset)}, {text}{more}", passed=False)


def _answered(endpoint: str, *, proxied: bool) -> Verdict:
    if not proxied:
        return Verdict(f"nothing here dropped it, and {endpoint} answered", passed=True)
    text = f"nothing here dropped it, and the proxy answered, listening at {endpoint}"
    return Verdict(f"{text}; its own connection to an endpoint is another flow", passed=True)


def without_entry(found: Sequence[Journey], served: Sequence[TracedReply]) -> list[Journey]:
    """Return the last request of each connection that has no entry in connection tracking."""
    requests = {one.source: one for one in found if one.direction == "request"}
    known = {one.source for one in served}
    return [one for source, one in requests.items() if source not in known]


def _failed(found: Sequence[Journey], served: Sequence[TracedReply], ruleset: KnownRules) -> dict[str, str]:
    """Return a text for each endpoint that refused connections or did not answer them; the text of '' is about
    connections that ended before the routing. Retransmissions belong to one connection. The kernel deletes the entry of
    a refused connection (nf_conntrack_tcp_packet in net/netfilter/nf_conntrack_proto_tcp.c)."""
    answers = {one.source for one in found if one.direction == "answer" and not one.refusal}
    resets = {(one.source, one.destination) for one in found if one.refusal == "reset" and one.direction == "answer"}
    refused = Counter(end for end, _ in resets if end not in answers)
    silent = Counter(one.endpoint for one in served if one.unanswered)
    texts = {end: f"{end} refused it with a reset ({counted(n, 'connection')})" for end, n in refused.items()}
    texts |= {end: f"{end} did not ({counted(n, 'connection')})" for end, n in silent.items()}
    if ended := [one for one in without_entry(found, served) if one.last in _BEFORE_ROUTING]:
        full = ruleset.without_room()
        end = f"{counted(len(ended), 'connection')} went no further than {ended[-1].last}"
        texts[""] = f"{end}, as {full}" if full else end
    return texts


_BEFORE_ROUTING = frozenset({HOOKS[PREROUTING], HOOKS[OUTPUT]})


def _partly(made: Verdict, failed: Mapping[str, str], protocol: int, cause: str) -> Verdict:
    """Return the verdict if some connections were answered, and others `failed`."""
    text = "; ".join((made.text, *failed.values())) + cause
    if protocol == PROTOCOLS["UDP"]:
        return Verdict(f"{text}, which over UDP need not mean anything", None)
    return Verdict(text, passed=False)


_SHOWS = "`kube-proxy why` tests whether this node stops the answers; if not, the endpoint or the network does"


_NO_ANSWER = "connection tracking saw no answer"


def _unanswered(served: Sequence[TracedReply], where: str, protocol: int, ruleset: KnownRules, cause: str) -> Verdict:
    undropped = _undropped(ruleset)
    if not served:
        return Verdict(f"{undropped}, and connection tracking has no such connection (any more)", None)
    where = f"{undropped}: it {where}, and"
    endpoints = ", ".join(dict.fromkeys(one.endpoint for one in served))
    if any(one.earlier for one in served):
        text = f"no answer of {endpoints} came during the trace; the connection was answered earlier"
        return Verdict(f"{where} {text}", passed=False)
    text = f"{where} {_NO_ANSWER} of {endpoints}{cause}"
    if protocol == PROTOCOLS["UDP"]:
        return Verdict(f"{text}, which over UDP need not mean anything", None)
    return Verdict(text, passed=False)
