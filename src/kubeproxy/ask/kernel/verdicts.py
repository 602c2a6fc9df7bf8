"""The outcome of a traced flow, from the journeys of its packets and its conntrack entries, as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
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


class Traced(Struct, frozen=True, rename="camel"):
    """The result for a flow. `lost` is the number of overruns of the kernel's messages. `legacy` is the number of
    iptables-legacy rules, which are not traced. `departed` means that a request left this node for the endpoint of
    the last entry, and no answer arrived. `sent` means that the command sent packets from the client's network
    namespace. `lost_answers` is the result of FollowedFlow.lost_answers. `undecided` is the reason why the proxy's
    decision on the flow is unknown; '' if the decision is known."""

    journeys: tuple[Journey, ...]
    served: tuple[TracedReply, ...]
    verdict: Verdict
    lost: int
    legacy: int
    departed: bool
    sent: bool
    lost_answers: str
    undecided: str = ""


class _Outcome(NamedTuple):
    """A verdict, and a possible cause that the text names only if no other cause is known."""

    text: str
    passed: bool | None
    guess: str = ""


class FollowedFlow(NamedTuple):
    """A traced flow. `proxied` means that the proxy on this node answers the client. `serving` is None if the Service
    is unknown. `silent` is the text of `silent_neighbour` for the endpoint."""

    found: Sequence[Journey]
    served: Sequence[TracedReply]
    ruleset: KnownRules
    protocol: int
    proxied: bool = False
    serving: Serving | None = None
    silent: str = ""

    def verdict(self) -> Verdict:
        """Return the outcome of the flow."""
        decided, others = self.ruleset.decided, self.others
        refused, untracked = self._refused(), self._untracked()
        made = refused or self._became()
        if untracked is not None and not made.passed:
            passed = untracked.passed if refused is None else False
            text = f"{untracked.text}; {made.text}"
            made = untracked if made.passed is None else made._replace(text=text, passed=passed)
        if made.passed is False and decided.unserved and not any(one.existed for one in self.served):
            made = made._replace(text=f"{made.text}; no rule of the proxy translates it: {decided.unserved}")
        passed = False if any(not one.existed for one in self.strays) else made.passed
        if others is None:
            strayed = self._strayed() or self._left() * (made.passed is False)
            untraced = "" if strayed or made.passed is not False else self.ruleset.untraced()
            more = strayed + f"; {_UNTRACED}: {untraced}" * bool(untraced)
            return Verdict(made.text + (more or made.guess), passed)
        table, chosen = others
        what = f"rules that another kube-proxy left in table {table} chose {chosen}, not the running proxy"
        if self.serving is not None and not self.proxied and chosen not in self.serving.endpoints:
            what += f", and it is no endpoint of {self.serving.service}"
        text = f"{made.text}; {what}" if made.passed else f"{what}; {made.text}"
        return Verdict(f"{text}: {_RESTART}", passed)

    @property
    def requests(self) -> list[Journey]:
        """The requests of the flow."""
        return [one for one in self.found if one.direction == "request"]

    @property
    def answers(self) -> list[Journey]:
        """The answers of the flow."""
        return [one for one in self.found if one.direction == "answer"]

    @property
    def without_entry(self) -> list[Journey]:
        """The last request of each connection that has no entry in connection tracking."""
        known = {one.source for one in self.served}
        return [one for source, one in {one.source: one for one in self.requests}.items() if source not in known]

    @property
    def others(self) -> tuple[str, str] | None:
        """The table of leftover rules that chose the destination instead of this proxy's rules, and the destination."""
        return next((chosen for one in self.requests if (chosen := self.by_others(one))), None)

    def by_others(self, request: Journey) -> tuple[str, str] | None:
        """Return `others` for one request."""
        for place, met in enumerate(request.met):
            if met.left:
                # A packet without a route passes no later chain, and has no conntrack entry, so only the rule shows its
                # destination.
                rules = [found[1] for rule in met.rules if (found := CHOSEN.search(rule))]
                later = [one.destination for one in request.met[place + 1 :]] + [
                    one.endpoint for one in self.served[-1:]
                ]
                chosen = next(iter((*rules, *later)), met.destination)
                if chosen != met.destination:
                    return met.table, chosen
        return None

    @property
    def strays(self) -> list[TracedReply]:
        """The connections that lead to an address that is not an endpoint of their Service."""
        serving = None if self.proxied else self.serving
        return [one for one in self.served if serving is not None and one.endpoint not in serving.endpoints]

    @property
    def _endpoint(self) -> str:
        """The endpoint of the last connection. Without a conntrack entry: the destination that leftover rules chose,
        else the destination to which the last request was translated, else the endpoints from which the proxy's rules
        choose, or '' if other rules may have chosen."""
        if self.served:
            return self.served[-1].endpoint
        if (others := self.others) is not None:
            return others[1]
        request = next((one for one in reversed(self.requests) if one.met), None)
        if request is None or self.proxied:
            return ""
        if request.met[-1].destination != request.destination:
            return request.met[-1].destination
        is_left = any(met.left for met in request.met)
        return "" if is_left or self.ruleset.legacy or _foreign(request, TRANSLATES) else self.ruleset.decided.ends

    def departed(self, made: Verdict) -> bool:
        """Return whether a request left this node for the endpoint of the last entry and got no answer."""
        ended = (one.lost or (one.local and one.refusal) for one in self.found)
        if self.proxied or made.passed or self.silent or not self.served or self.served[-1].answered or any(ended):
            return False
        return any(one.last not in {HOOKS[PREROUTING], HOOKS[INPUT]} for one in self.requests)

    def lost_answers(self) -> str:
        """Return a text about a rule of another program because of which the kernel may not recognise answers; '' for
        none. Such a rule gives requests a source address that this node does not have, or a zone of connection
        tracking."""
        sources = {one.source: one.client for one in self.served if not one.answered and one.client}
        for request in self.found:
            client = sources.get(request.source, "")
            rule = _foreign(request, REWRITES) if client and client != place_of_text(request.source)[0] else ""
            if rule and client not in self.ruleset.addresses():
                what = "which is no address of this node, so answers do not return to this node"
                return f"{rule} gives it the source {client}, {what}"
        zoned = next(filter(None, (_foreign(one, ZONES) for one in self.requests)), "")
        return zoned and f"{zoned} puts it into a zone of connection tracking: {_ZONED}"

    # -- causes --------------------------------------------------------------------------------------------------------

    def _untracked(self) -> _Outcome | None:
        """Return the outcome of requests that a rule of another program exempts from connection tracking, or None for
        other requests. A program of this node, such as a DNS cache, may answer requests that are delivered to this
        node."""
        untracked = [one for one in self.without_entry if _foreign(one, UNTRACKS)]
        if not untracked:
            return None
        text = f"{_foreign(untracked[-1], UNTRACKS)} takes the request out of connection tracking"
        if untracked[-1].last == HOOKS[INPUT]:
            return _Outcome(f"{text}; it was delivered on this node, and its answer cannot be traced", None)
        if self.serving is None:
            return _Outcome(f"{text}, so its answer cannot be traced", None)
        return _Outcome(f"{text}, so no rule translates it to an endpoint of {self.serving.service}", passed=False)

    def _cause(self) -> str:
        """Return the rule that may cause missing answers; without such a rule, the command that tests for other
        causes."""
        lost = self.lost_answers()
        return f"; {lost}" if lost else f" ({_SHOWS})"

    def _left(self) -> str:
        """Return a text if leftover rules of another kube-proxy were the last rules that a request passed, else ''.
        Without a later chain, the trace does not show the destination that these rules chose."""
        last = next((one.met[-1] for one in reversed(self.requests) if one.met and not one.lost), None)
        if last is None or not last.left:
            return ""
        return f"; its last rules are those that another kube-proxy left in table {last.table}: {_RESTART}"

    def _strayed(self) -> str:
        """Return a text if a connection leads to an address that is not an endpoint of its Service, else ''."""
        stray, decided = next(reversed(self.strays), None), self.ruleset.decided
        if stray is None or self.serving is None or (decided.unserved and not stray.existed):
            return ""
        # A request's `destination` is the destination before any translation.
        if stray.endpoint in {one.destination for one in self.requests} and not stray.existed:
            cause = decided.untranslated() or "`kube-proxy verify` compares the proxy's rules with the kernel"
            return f"; no rule translated it to an endpoint of {self.serving.service}: {cause}"
        what = f"; {stray.endpoint} is no endpoint of {self.serving.service}, and"
        if not stray.existed:
            untraced = self.ruleset.untraced()
            more = f"; {_UNTRACED}: {untraced}" if untraced else ""
            chosen = (_foreign(one, TRANSLATES) for one in self.requests if one.source == stray.source)
            rules = next(filter(None, chosen), "rules of this node")
            return f"{what} {rules} chose it for this new connection{more}"
        kept = kept_flow(self.protocol, stray.selection, answered=stray.answered or stray.earlier)
        return f"{what} its entry in connection tracking, older than the trace, keeps the flow there: {kept.text}"

    def _possible(self) -> str:
        """Return the causes that `why` finds if packets go no further than prerouting; if `why` finds none, return all
        possible causes."""
        return self.ruleset.decided.unrouted() or _UNSEEN * bool(self.ruleset.legacy) + _UNROUTED

    def _undropped(self, subject: str = "nothing here") -> str:
        """Return the text that nothing dropped a packet, or, if there are rules of iptables-legacy, that no traced rule
        dropped the packet."""
        return f"{'no rule that the kernel traces' if self.ruleset.legacy else subject} dropped it"

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _became(self) -> _Outcome:
        if not self.found:
            text = "no packet of this flow arrived: let the client send during the trace, or wait longer (--seconds)"
            return _Outcome(text, None)
        if any(one.answered for one in self.served):
            return self._replied()
        if self.without_entry and (full := self.ruleset.without_room()):
            return _Outcome(f"{self._undropped('no rule')}, but {full}", passed=False)
        if self.silent:
            return _Outcome(f"nothing here dropped it, but it did not leave this node: {self.silent}", passed=False)
        last = self.requests[-1].last if self.requests else ""
        later = {base.number for base in self.ruleset.base_chains.values()} & {INPUT, FORWARD, POSTROUTING}
        if later and (last == HOOKS[PREROUTING] or (last == HOOKS[OUTPUT] and not self.served)):
            causes = self._possible() if last == HOOKS[PREROUTING] else self.ruleset.decided.unrouted()
            if causes:
                it = f"it (for {self._endpoint})" if self._endpoint else "it"
                text = f"{self._undropped('no rule')}, but {it} went no further than {last}: {causes}"
                return _Outcome(text, passed=False)
        ways = dict.fromkeys(one.leaves for one in self.requests if one.leaves)
        where = f"left by {' or '.join(ways)}" if ways else "left this node"
        return self._unanswered("was delivered on this node" if last == HOOKS[INPUT] else where)

    def _replied(self) -> _Outcome:
        """Return the outcome of a flow with a connection that its endpoint answered."""
        failed, is_proxys = self._failed(), self.proxied and self.others is None
        endpoints = [one.endpoint for one in self.served if one.answered and one.endpoint not in failed]
        endpoint = ", ".join(dict.fromkeys(endpoints or [one.endpoint for one in self.served if one.answered]))
        if not is_proxys and self._unreturned():
            text = f"{self._undropped('no rule')}, but the answers of {endpoint} went no further than prerouting: "
            return _Outcome(text + self._possible(), passed=False)
        text = f"nothing here dropped it, and {endpoint} answered"
        if is_proxys:
            text = f"nothing here dropped it, and the proxy answered, listening at {endpoint}"
            text += "; its own connection to an endpoint is another flow"
        if not failed:
            return _Outcome(text, passed=True)
        text = "; ".join((text, *failed.values()))
        if "" in failed or any(one.unanswered for one in self.served):
            text += f": {self.silent}" if self.silent else self._cause()
        return self._unless_udp(text)

    def _unreturned(self) -> bool:
        """Return whether requests were forwarded, and answers were not. A request in a chain at the hook forward shows
        that the trace sees forwarded packets."""
        forwarded = any(met.hook == HOOKS[FORWARD] for one in self.requests for met in one.met)
        return forwarded and {one.last for one in self.answers} == {HOOKS[PREROUTING]}

    def _refused(self) -> _Outcome | None:
        """Return the outcome of a flow with lost packets or with only refusals as answers; None for other flows."""
        silent = f"; {self.silent}" * bool(self.silent)
        for one in self.found:
            if one.lost:
                return _Outcome(f"the {one.direction} was {one.lost}{silent}", passed=False)
        answers, endpoint = self.answers, self._endpoint
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
            text += f": {causes}" if answer.local and (causes := self.ruleset.decided.unrouted()) else ""
        more = f", or a rule of iptables-legacy rejected it {_LEGACY}" * bool(self.ruleset.legacy)
        return _Outcome(f"{self._undropped()}, {text}{more}{silent}", passed=False)

    def _failed(self) -> dict[str, str]:
        """Return a text for each endpoint that refused connections or did not answer them; the key '' stands for
        connections that ended before the routing. Retransmissions belong to one connection. The kernel deletes the
        entry of a refused connection (nf_conntrack_tcp_packet in net/netfilter/nf_conntrack_proto_tcp.c)."""
        answers = {one.source for one in self.answers if not one.refusal}
        resets = {(one.source, one.destination) for one in self.answers if one.refusal == "reset"}
        refused = Counter(end for end, _ in resets if end not in answers)
        silent = Counter(one.endpoint for one in self.served if one.unanswered)
        texts = {end: f"{end} refused it with a reset ({counted(n, 'connection')})" for end, n in refused.items()}
        texts |= {end: f"{end} did not ({counted(n, 'connection')})" for end, n in silent.items()}
        if ended := [one for one in self.without_entry if one.last in _BEFORE_ROUTING]:
            full = self.ruleset.without_room()
            end = f"{counted(len(ended), 'connection')} went no further than {ended[-1].last}"
            texts[""] = f"{end}, as {full}" if full else end
        return texts

    def _unanswered(self, where: str) -> _Outcome:
        undropped = self._undropped()
        if not self.served:
            return _Outcome(f"{undropped}, and connection tracking has no such connection (any more)", None)
        where = f"{undropped}: it {where}, and"
        endpoints = ", ".join(dict.fromkeys(one.endpoint for one in self.served))
        if any(one.earlier for one in self.served):
            text = f"no answer of {endpoints} came during the trace; the connection was answered earlier"
            return _Outcome(f"{where} {text}", passed=False)
        made = self._unless_udp(f"{where} connection tracking saw no answer of {endpoints}{self._cause()}")
        return made._replace(
            guess=f"; a rule of iptables-legacy may have dropped it {_LEGACY}" * bool(self.ruleset.legacy)
        )

    def _unless_udp(self, text: str) -> _Outcome:
        """Return the outcome that connections were not answered, which is certain except over UDP."""
        if self.protocol == PROTOCOLS["UDP"]:
            return _Outcome(f"{text}, which over UDP need not mean anything", None)
        return _Outcome(text, passed=False)


_RESTART = "see that no other kube-proxy runs, then restart this one, which removes them"
_ZONED = "answers without the same zone do not count as answers of this connection"
_UNTRACED = "the kernel does not trace iptables-legacy"
_LEGACY = "(`iptables-legacy-save`, for IPv6 `ip6tables-legacy-save`, lists these rules)"
_UNSEEN = f"a rule of iptables-legacy dropped it {_LEGACY}, "
_UNROUTED = (
    "there is no route to its destination, forwarding is off (net.ipv4.ip_forward, or "
    "net.ipv4.conf.IFACE.forwarding of the interface of arrival), rp_filter rejects its source, or nothing answers "
    "ARP for its destination behind a bridge"
)
_BEFORE_ROUTING = frozenset({HOOKS[PREROUTING], HOOKS[OUTPUT]})
_SHOWS = "`kube-proxy why` tests whether this node stops the answers; if not, the endpoint or the network does"


def _foreign(request: Journey, pattern: re.Pattern[str]) -> str:
    """Return the rule of another program that a request matched, and that contains text of this pattern; '' without
    such a rule."""
    rules = ((met, rule) for met in request.met for rule in met.rules)
    place = 'rule "{}" of table {}, chain {}, which is not ours,'
    return next((place.format(rule, met.table, met.chain) for met, rule in rules if pattern.search(rule)), "")


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
