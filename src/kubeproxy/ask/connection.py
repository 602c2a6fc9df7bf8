"""The full answer for one connection on this node: the proxy's plan, the kernel, other programs, and the endpoints.

To check other programs' rules, it computes the packets of the connection at the hooks of this node: requests before and
after translation, and answers. Translation at a hook has the priority NF_IP_PRI_NAT_DST or NF_IP_PRI_NAT_SRC. Chains
with the same priority may run before or after it. At the hook output, the interface follows from the route to the
original destination, even after translation. Source: include/uapi/linux/netfilter_ipv4.h, and
net/netfilter/ipvs/ip_vs_core.c, of Linux 6.18.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.ask.checks import strangers
from kubeproxy.ask.checks.checkup import Checkup, NodeRules, checked, look_at_answer, look_at_way, surely_dropped
from kubeproxy.ask.checks.node import CheckedNode, arrival, unreflecting_bridges
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import STOPS, Diagnosis, Effect, End, Harm, Severity
from kubeproxy.ask.kernel import present
from kubeproxy.ask.source import Source
from kubeproxy.ask.why import Explained, Target, Why
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.nftables.tables import HOOKS, INGRESS
from kubeproxy.kernel.route import source_for, way_out
from kubeproxy.kernel.routing_policy import RoutedPacket
from kubeproxy.meaning.firewall import PassingPacket
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.addresses import PROTOCOLS, Family, family_of, pack
from kubeproxy.model.answer import Outcome, Packet
from kubeproxy.setup import host, modes

PROBES = (PROTOCOLS["TCP"], PROTOCOLS["UDP"])
"""Protocols of the probes of endpoints."""
_FOREIGN: Final = ("firewall", "notrack")
_OPEN: Final = ("endpoints", "proxy", "arrival", *_FOREIGN)
"""The checks that can make the whole answer unknown."""


class Explanation(Struct, frozen=True):
    """An answer: the proxy's decision, and findings of the kernel, of the rest of this node, and of the endpoints."""

    why: Why
    findings: tuple[Diagnosis, ...] = ()
    probes: tuple[present.Probe, ...] = ()

    @property
    def stopped(self) -> bool:
        """Whether a finding stops the connection."""
        return any(finding.is_wrong for finding in self.findings)

    @property
    def answer(self) -> str:
        """Whether an endpoint gets the connection: yes, no, or unknown. Unknown means that another node decides, that
        no kube-proxy runs here, or that only this node's probe failed.
        """
        if self.why.elsewhere is not None:
            return "unknown"
        if not self.why.passes or self.stopped:
            return "no"
        return "unknown" if any(map(self._leaves_open, _OPEN)) else "yes"

    @property
    def _ends(self) -> frozenset[End]:
        """All endpoints of the connection."""
        return frozenset(present.end_of(one.address) for one in self.why.endpoints)

    def _lost(self, *effects: Effect) -> frozenset[End]:
        """Return the endpoints to which findings with these effects stop packets."""
        return frozenset().union(*(one.harm.ends for one in self.findings if one.harm.effect in effects))

    def _leaves_open(self, about: str) -> bool:
        """Return whether a finding makes the answer unknown: a failed probe that may not concern the client, or a
        missing proxy.
        """
        return any(one.severity is Severity.UNKNOWN and one.about == about for one in self.findings)

    @property
    def heading(self) -> str:
        """The answer in one line."""
        untracked = next((one for one in self.findings if one.about == "notrack"), None) if self.why.forwarded else None
        if untracked is not None and untracked.severity is not Severity.UNKNOWN:
            end = "no endpoint gets it" if untracked.is_wrong else "a program of this node gets it"
            return self.why.heading_with(f"not translated, {end} ({untracked.severity.mark})")
        stop = next((one for one in self.findings if one.harm == STOPS and one.is_wrong), None)
        failing = self._lost(Effect.LOSES)
        if self.why.passes and (stop is not None or self._lost(Effect.DELAYS) | failing >= self._ends > frozenset()):
            cause = stop.what if stop is not None else "no endpoint is reached"
            return self.why.heading_with(f"it does not get through: {cause} (x)")
        taken = any(one.about == "leftovers" and one.is_wrong for one in self.findings)
        more = ", but not all is well (x)" * (self.why.passes and self.answer == "no" and not taken)
        if failing and self.why.passes:
            lost = sum(one.share for one in self.why.endpoints if present.end_of(one.address) in failing)
            more = f", but {lost:.1%} of the connections do not get through (x)"
        if self.why.elsewhere is None and self.answer == "unknown":
            failed = all(one.failed for one in self.probes)
            one = "no endpoint accepted a connection from" if failed else "an endpoint did not answer"
            more += f", but {one} this node (?)" * self._leaves_open("endpoints")
            more += ", unless its packets arrive by another interface (?)" * self._leaves_open("arrival")
            more += ", unless another program's rules come first (?)" * any(map(self._leaves_open, _FOREIGN))
        refused = self.why.outcome == Outcome.REFUSED.value
        dropped = refused and any(one.about == "firewall" and one.is_wrong for one in self.findings)
        more += ", unless another kube-proxy's rules take it first (x)" * taken
        is_planned = self.why.forwarded and self._leaves_open("proxy")
        heading = self.why.heading_with("kube-proxy would forward it") if is_planned else self.why.heading
        return heading + more + ", unless a firewall of this node drops it first (x)" * dropped

    @property
    def fixes(self) -> list[str]:
        """The fixes that would let the connection pass."""
        causes = [one for one in self.findings if one.is_wrong or one.severity is Severity.UNKNOWN]
        return list(dict.fromkeys((*self.why.fixes, *(one.fix for one in causes if one.fix))))

    def fields(self) -> dict[str, object]:
        """Return it for programs."""
        return {
            "heading": self.heading,
            "answer": self.answer,
            "why": self.why,
            "findings": [finding.row() for finding in self.findings],
            "probes": self.probes,
            "fixes": self.fixes,
            "next": self.why.next,
        }


def tell(asked: Source, facts: Facts, explained: Explained, probed: Collection[int] = PROBES) -> Explanation:
    """Add findings of the node, and probes of endpoints by these protocols, to an answer; `facts` are those of its
    source. Raises KubeProxyError.
    """
    why, packet = explained.why, explained.packet
    if why.elsewhere is not None:
        return Explanation(why)
    node, rules = checked(asked, facts), NodeRules()
    translates = asked.running and node.mode.flows_end is FlowsEnd.ENDPOINTS
    pin = present.pinned(explained) if translates else None
    kept = pin[0] if pin else present.remembered(facts, explained) if asked.running else None
    held = tuple(replace(one, share=1.0) for one in why.endpoints if one.address == kept)
    if pin and why.endpoints and not held:  # the flow's address is no endpoint any more
        held = (Target(pin[0], 1.0, why.endpoints[0].masqueraded),)
    if held:
        why = replace(why, endpoints=held)
    probes = present.all_of(why.endpoints, packet.protocol) if packet.protocol in probed else ()
    findings = [*(pin[1:] if pin else present.affinity(why, kept)), *_unreturned(why)]
    if asked.running:
        way = _way(node, why, explained)
        around = look_at_way(way, rules) if why.forwarded else look_at_answer(way, rules)
        kernel = present.look(asked, facts, explained) if explained.plan is not None else ()
        findings += [*kernel, *_hairpin(way, why), *_around(around)]
    else:
        findings += _unasked(node)
    findings += present.findings(probes, _probed_for(node, rules, packet, why, probes))
    return Explanation(why, tuple(findings), probes)


def _probed_for(
    node: CheckedNode, rules: NodeRules, packet: Packet, why: Why, probes: Sequence[present.Probe]
) -> present.ProbedFor:
    """Return two values: the clients that failed probes concern, and the chains that stop this node's packets."""
    failed = {present.end_of(one.address): one.address for one in probes if one.failed}
    if not failed:
        return present.ProbedFor()
    local = host.packed_local_addresses(tuple(Family), modes.interfaces())
    is_node = packet.source is None or any(packet.source in each for each in local.values())
    is_node = is_node or node.mode.flows_end is FlowsEnd.PROXY
    own = () if is_node else [one.address for one in why.endpoints if not one.masqueraded]
    try:
        sent = [Packet(source_for(address), address, packet.protocol, port) for address, port in failed]
        passing = [each for one in sent for each in own_packets(one, local[family_of(one.destination)])]
        blocked = {failed[drop.packet.original]: drop for drop in reversed(surely_dropped(rules.others, passing))}
    except (KubeProxyError, OSError):
        blocked = {}  # if a proxy runs, other checks report unreadable rules
    # Packets like those of probes are not translated. Translated packets are covered by the checks of a running proxy.
    untranslated = node.mode.flows_end is FlowsEnd.PROXY or (is_node and not node.running)
    return present.ProbedFor(untranslated, own, blocked)


def _unasked(node: CheckedNode) -> Iterator[Diagnosis]:
    """Yield the finding that the answer follows from objects only: without a proxy on this node, it is hypothetical."""
    proxies = node.proxies
    severity = Severity.NOTE if proxies else Severity.UNKNOWN
    yield Diagnosis(severity, "proxy", f"{strangers.unasked(proxies)}; the answer is from the objects alone")


def _unreturned(why: Why) -> Iterator[Diagnosis]:
    """Report endpoints whose answers do not return through this node. Only this node could reverse the translation."""
    reason, fix = "the endpoint is the client itself and is not masqueraded, because it has no nodeName", ""
    for is_client in (True, False):
        lost = [one for one in why.endpoints if not one.returns and one.is_unnamed(why.source) is is_client]
        if lost:
            what = f"{sum(one.share for one in lost):.1%} of the connections time out"
            harm = Harm(Effect.LOSES, frozenset(present.end_of(one.address) for one in lost))
            yield Diagnosis(Severity.DEGRADED, "masquerade", what, reason, fix, harm)
        reason = (
            "client and endpoint are on other nodes, and policy Local keeps the client's address: the endpoint answers "
            "the client directly, with an address that the client did not ask"
        )
        fix = (
            "have pods use the Service's cluster IP, or the NodePort of their own node; or set "
            "spec.externalTrafficPolicy to Cluster"
        )


def _hairpin(node: CheckedNode, why: Why) -> Iterator[Diagnosis]:
    """Check the bridge of a client that may reach itself."""
    ends = (one for one in why.endpoints if one.masqueraded)
    share = sum(one.share for one in ends if one.host == why.source)
    if share:
        yield from unreflecting_bridges(node, pack(why.source), share)


def _around(report: Checkup) -> Iterator[Diagnosis]:
    """Yield the node's findings, with the severity for this connection: a certain or a possible cause."""
    for each in report.findings:
        severity = Severity.BROKEN if each.harm.effect is not Effect.NOTHING else Severity.NOTE
        yield each if each.severity is Severity.UNKNOWN else replace(each, severity=severity)
    for text in report.unknown:
        yield Diagnosis(Severity.UNKNOWN, "node", f"could not be looked at: {text}")


def _way(node: CheckedNode, why: Why, explained: Explained) -> CheckedNode:
    """Return the hooks to check for a connection. Connections that begin or end on this node are not forwarded.

    In a mode that ends connections at the proxy, the proxy's own connections to endpoints begin here. `why` is
    the answer with the endpoints that session affinity leaves.
    """
    packet = explained.packet
    source, family = packet.source, family_of(packet.destination)
    local = host.packed_local_addresses((family,), modes.interfaces())[family]
    whole = CheckedConnection(packet, local, bool(node.mode.interface), arrival(node, packet))
    ends = [(*present.end_of(one.address), one.masqueraded) for one in why.endpoints]
    known = ends[: present.MOST]
    at_proxy = node.mode.flows_end is FlowsEnd.PROXY
    crosses = not at_proxy and not whole.is_local and any(address not in local for address, _, _ in known)
    balance = explained.plan.balance if explained.plan is not None else None
    is_kept = why.affinity or whole.taken_in or at_proxy or packet.protocol != PROTOCOLS["TCP"]
    is_kept = is_kept or (balance is not None and balance.hashing is not None)
    passing = list(early(whole)) if why.forwarded else list(_to_node(whole, node, why))
    for address, number, masqueraded in known:
        if at_proxy:
            passing += own_packets(Packet(None, address, packet.protocol, number), local)
        else:
            passing += translated(whole, (address, number), masqueraded=masqueraded)
    return replace(
        node,
        family=family,
        hooks=frozenset((*HOOKS, INGRESS)) - {"output" if crosses else "forward"},
        packet=packet,
        targets=frozenset(end[:2] for end in ends),
        passing=passing,
        masqueraded=frozenset((address, port) for address, port, masqueraded in known if masqueraded),
        ends=[
            address for address in (source, *(address for address, _, _ in known)) if address and address not in local
        ],
        served=bool(why.service),
        covered=_TO_NODE
        if why.outcome in _ANSWERED
        else covered(whole, known)
        if not at_proxy and 0 < len(known) == len(why.endpoints)
        else (),
        refused=why.outcome == Outcome.REFUSED.value,
        answers=why.outcome in _ANSWERED and packet.destination in local,
        picked_again=frozenset(one[:2] for one in known if not is_kept),
        routed=list(routed(whole, () if at_proxy else known, node.mark)),
    )


_ANSWERED: Final = frozenset({Outcome.HEALTH.value, Outcome.NOT_OURS.value})
"""Outcomes of connections that the node itself answers: the proxy, or another program."""
_TO_NODE: Final = frozenset({"prerouting", "input", "output", "postrouting"})
"""The hooks at which `to_node` yields every packet of a connection that this node answers."""


def _to_node(whole: CheckedConnection, node: CheckedNode, why: Why) -> Iterator[PassingPacket]:
    """Yield the packets of a connection that this node itself answers, or that rules at its hook input reject."""
    if why.outcome in _ANSWERED:
        yield from to_node(whole) if whole.packet.destination in whole.local else ()
        return
    at_input = whole.packet.destination in whole.local and not whole.is_local
    if node.mode.comparable and why.outcome == Outcome.REFUSED.value and at_input:
        # Two chains with the same priority may run in any order.
        yield from to_node(whole, before=_FILTER + 1)


_FIRST, _LAST = -math.inf, math.inf
_FILTER: Final = 0  # NF_IP_PRI_FILTER, the priority of the proxy's chains that reject
_DESTINATION: Final = -100  # NF_IP_PRI_NAT_DST
_SOURCE: Final = 100  # NF_IP_PRI_NAT_SRC
_SERVERS: Final = 98  # the priorities of IPVS at the hooks input and forward
_NONE: Final = ""
_LOOPBACK: Final = "lo"


class CheckedConnection(Struct, frozen=True, dict=True):
    """A connection: its first incoming packet (the source is None if the node picks the source), and this node's
    addresses.

    `taken_in`: the packet is delivered locally, through the hook input, before it is sent to an endpoint (ipvs).
    `arrival`: the interface of incoming packets, '' for the interface of the route to the client. The kernel is asked
    once for each route of the connection as a whole. Properties raise NetlinkError.
    """

    packet: Packet
    local: Collection[bytes]
    taken_in: bool = False
    arrival: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the connection begins on this node."""
        return self.packet.source is None or self.packet.source in self.local

    @cached_property
    def client(self) -> bytes | None:
        """The client's address, which the kernel picks for this node itself; None without a route."""
        return self.packet.source if self.packet.source is not None else source_for(self.packet.destination)

    @property
    def interface(self) -> str | None:
        """The incoming interface, derived from the routes if it is not given; None if unknown."""
        return self.arrival if self.arrival and not self.is_local else self.way_back

    @cached_property
    def way_back(self) -> str | None:
        """The outgoing interface of answers to a client elsewhere, '' for a client of this node; None if unknown."""
        return _NONE if self.is_local or self.packet.source is None else interface_to(self.packet.source)

    @cached_property
    def first_way(self) -> tuple[str, str | None]:
        """The incoming and outgoing interface at the hook output, for a connection that begins on this node."""
        return _NONE, _LOOPBACK if self.packet.destination in self.local else interface_to(self.packet.destination)


def interface_to(address: bytes) -> str | None:
    """Return the outgoing interface of packets to an address, None without a route. Raises NetlinkError."""
    return way_out(bytes(len(address)), address) or None


def early(connection: CheckedConnection) -> Iterator[PassingPacket]:
    """Yield the first packet before it is translated. Raises NetlinkError."""
    packet, entrance = connection.packet, connection.interface
    hook, ways = ("output", connection.first_way) if connection.is_local else ("prerouting", (entrance, _NONE))
    made = _Made(packet, ways)
    if connection.taken_in:
        yield made.request(hook, _FIRST, _LAST)
        yield made.request("input", _FIRST, _SERVERS)
    else:
        yield made.request(hook, _FIRST, _DESTINATION)._replace(tracked=True)


def translated(connection: CheckedConnection, end: tuple[bytes, int], *, masqueraded: bool) -> Iterator[PassingPacket]:
    """Yield the packets of a connection to one endpoint, and the endpoint's answers. Raises NetlinkError."""
    packet, entrance, destination = connection.packet, connection.interface, end[0]
    exit_ = _LOOPBACK if destination in connection.local else interface_to(destination)
    here = connection.is_local
    forwarded = not here and exit_ != _LOOPBACK
    made = _Made(packet, (entrance, exit_), end, not connection.taken_in)
    if connection.taken_in:
        yield made.request("output", _FIRST, _LAST, (_NONE, exit_))
    elif here:
        yield made.request("output", _DESTINATION, _LAST, connection.first_way)
    else:
        yield made.request("prerouting", _DESTINATION, _LAST, (entrance, _NONE))
    if forwarded and not connection.taken_in:
        yield made.request("forward", _FIRST, _LAST)
    if exit_ == _LOOPBACK:
        yield made.request("input", _FIRST, _SOURCE, (_LOOPBACK if here else entrance, _NONE))
        if here:
            return
    else:
        yield made.request("postrouting", _FIRST, _SOURCE, (None, exit_))
    if connection.client is not None:
        yield from _answers(made, connection, connection.client, masqueraded=masqueraded)


def routed(connection: CheckedConnection, ends: Sequence[tuple[bytes, int, bool]], mark: int) -> Iterator[RoutedPacket]:
    """Yield the packets of a connection at the kernel's routing decisions. Raises NetlinkError.

    `ends`: see `covered`; `mark` is the mark of packets to masquerade.
    """
    packet, arrival, here, client = connection.packet, connection.interface, connection.is_local, connection.client
    if here:
        yield RoutedPacket(packet.source, packet.destination)
    for address, port, masqueraded in ends if client is not None else ():
        near = address in connection.local
        if connection.taken_in:
            yield RoutedPacket(None, address, _NONE, 0, packet.protocol, port)
        elif arrival is not None:
            yield RoutedPacket(client, address, arrival, mark * masqueraded, packet.protocol, port)
        exit_ = _NONE if near else interface_to(address)
        if client is not None and exit_ is not None and not (here and near):
            yield RoutedPacket(address, client, exit_)
    if not ends and arrival and packet.destination in connection.local:
        yield RoutedPacket(client, packet.destination, arrival)


def covered(connection: CheckedConnection, ends: Sequence[tuple[bytes, int, bool]]) -> Collection[str]:
    """Return the hooks at which `early` and `translated` yield every packet of a connection to all its endpoints.
    `ends` has for each endpoint its address, its port, and whether the connection to it is masqueraded. An answer to a
    masqueraded connection has the node's address until it is translated back.
    """
    here = connection.is_local
    if connection.taken_in or (here and any(address in connection.local for address, _, _ in ends)):
        return ()
    if any(masqueraded for _, _, masqueraded in ends):
        return ("forward", "postrouting", "input", "output") if here else ("forward", "postrouting", "input")
    return ("prerouting", "forward", "postrouting", "input", "output")


def own_packets(packet: Packet, local: Collection[bytes]) -> Iterator[PassingPacket]:
    """Yield the packets of this node's own connection to an address without translation. Raises NetlinkError."""
    if packet.destination in local:
        return
    exit_, client = interface_to(packet.destination), source_for(packet.destination)
    made = _Made(packet, (_NONE, exit_), (packet.destination, packet.port), False)
    yield made.request("output", _FIRST, _LAST, (_NONE, exit_))
    yield made.request("postrouting", _FIRST, _SOURCE, (None, exit_))
    if client is not None:
        yield made.answer("prerouting", _FIRST, _LAST, client, (exit_, _NONE))
        yield made.answer("input", _FIRST, _SOURCE, client, (exit_, _NONE))


def to_node(connection: CheckedConnection, before: float = _LAST) -> Iterator[PassingPacket]:
    """Yield the packets of a connection to this node's own address that no rule translates. Raises NetlinkError.

    If `before` is given, yield only packets for chains of the hook input with a lower priority, and no answers.
    """
    packet, here = connection.packet, connection.is_local
    entrance, back = (_LOOPBACK, _LOOPBACK) if here else (connection.interface, connection.way_back)
    made = _Made(packet, (entrance, _NONE), (packet.destination, packet.port), False)
    if here:
        yield made.request("output", _FIRST, _LAST, (_NONE, _LOOPBACK))
        yield made.request("postrouting", _FIRST, _SOURCE, (None, _LOOPBACK))
    yield made.request("prerouting", _FIRST, _LAST)
    yield made.request("input", _FIRST, min(before, _SOURCE))
    if before == _LAST and (client := connection.client) is not None:
        yield made.answer("output", _FIRST, _LAST, client, (_NONE, back))
        yield made.answer("postrouting", _FIRST, _SOURCE, client, (None, back))
        if here:
            yield made.answer("prerouting", _FIRST, _LAST, client, (_LOOPBACK, _NONE))
            yield made.answer("input", _FIRST, _SOURCE, client, (_LOOPBACK, _NONE))


def _answers(
    made: _Made, connection: CheckedConnection, client: bytes, *, masqueraded: bool
) -> Iterator[PassingPacket]:
    exit_, back = made.interfaces[1], connection.way_back
    out = None if masqueraded else back
    hook, ways = ("output", (_NONE, out)) if exit_ == _LOOPBACK else ("prerouting", (exit_, _NONE))
    seen = source_for(made.end[0]) if masqueraded and made.end is not None else client
    if seen is not None:
        yield made.answer(hook, _FIRST, _DESTINATION, seen, ways)._replace(tracked=made.by_rules)
    yield made.answer(hook, _DESTINATION, _LAST, client, ways)
    if connection.is_local:
        yield made.answer("input", _FIRST, _SOURCE, client, ways)
        return
    before = _SERVERS if connection.taken_in else _LAST
    if exit_ != _LOOPBACK:
        yield made.answer("forward", _FIRST, before, client, (exit_, back))
    if not connection.taken_in:
        yield made.answer("postrouting", _FIRST, _SOURCE, client, (None, back))


class _Made(NamedTuple):
    """The common fields of the packets of a connection; `end` is the endpoint, None before an endpoint is chosen."""

    packet: Packet
    interfaces: tuple[str | None, str | None]
    end: tuple[bytes, int] | None = None
    by_rules: bool = True

    def request(
        self, hook: str, after: float, before: float, interfaces: tuple[str | None, str | None] | None = None
    ) -> PassingPacket:
        """Return the first packet at a hook; `interfaces` are by default the two interfaces of the whole path."""
        end = self.end or (self.packet.destination, self.packet.port)
        changed = self.by_rules and self.end is not None
        return self._passing((hook, after, before), self.packet.source, end, interfaces or self.interfaces, changed)

    def answer(
        self, hook: str, after: float, before: float, client: bytes, interfaces: tuple[str | None, str | None]
    ) -> PassingPacket:
        """Return a packet of the endpoint to the client at a hook."""
        source, port = self.end or (self.packet.destination, self.packet.port)
        made = self._passing((hook, after, before), source, (client, port), interfaces, self.by_rules)
        return made._replace(purpose=CompiledFor.ANSWER)

    def _passing(
        self,
        where: tuple[str, float, float],
        source: bytes | None,
        end: tuple[bytes, int],
        interfaces: tuple[str | None, str | None],
        changed: bool,
    ) -> PassingPacket:
        original = self.packet.destination, self.packet.port
        protocol = self.packet.protocol
        return PassingPacket(*where, source, end[0], protocol, end[1], original, interfaces, changed)
