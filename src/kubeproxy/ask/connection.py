"""The complete answer about one connection on this node: the proxy's plan, the kernel, other programs, and the
endpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from kubeproxy.ask.checks import checkup, packets, ports, programming, returns, routes, strangers, whereabouts
from kubeproxy.ask.checks.node import CheckedNode, arrival, delivering_bridge, unforwarded, unreflecting_bridges
from kubeproxy.ask.explanation import Explanation
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import MISLEADS, NOTHING, STOPS, Diagnosis, Effect, End, Probe, Severity, end_of
from kubeproxy.ask.kernel import present, probing
from kubeproxy.ask.places import own_address
from kubeproxy.ask.source import Source
from kubeproxy.ask.why import NODEPORTS, POLICIES, Explained, Target, Why, to_other_node
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.backends.relay.tcp import DIAL_TIMEOUTS
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.nftables.tables import HOOKS, INGRESS
from kubeproxy.meaning.firewall import ForeignTranslation, PassingPacket
from kubeproxy.model.addresses import PROTOCOLS, family_of, pack, unpack
from kubeproxy.model.answer import Outcome, Packet
from kubeproxy.model.world import LOOPBACK, PRIMARY
from kubeproxy.setup import host

PROBES = (PROTOCOLS["TCP"], PROTOCOLS["UDP"])  # protocols of the probes of endpoints


def tell(asked: Source, facts: Facts, explained: Explained, probed: Collection[int] = PROBES) -> Explanation:
    """Add to an answer the findings about this node, and the probes of endpoints. Raises KubeProxyError."""
    why, packet = explained.why, explained.packet
    if why.is_inside:
        return Explanation(why)
    if why.elsewhere is not None:
        found = tell(asked, facts, sent, ()).findings if asked.running and (sent := to_other_node(explained)) else ()
        return Explanation(why, tuple(one for one in found if one.is_wrong and (one.harm == STOPS or one.harm.ends)))
    node = replace(checkup.checked(asked, facts), family=family_of(packet.destination))
    at_proxy = _ends_at_proxy(node, explained)
    why, findings = _kept(asked, facts, explained, at_proxy=at_proxy)
    astray = returns.astray(node, explained, why)
    ends = (replace(one, returns=one.returns and one.address not in astray) for one in why.endpoints)
    why = replace(why, endpoints=tuple(_seen(tuple(ends), packet)))
    probes = present.all_of(why.endpoints, packet.protocol) if packet.protocol in probed else ()
    findings += returns.unreturned(why, astray, node)
    way = node
    if asked.running:
        silent = _silent_client(explained, probed)
        misnamed = list(_misnamed(node, facts, why))
        way = _whole_way(node, why, explained)
        findings += [*misnamed, *_of_running(asked, facts, way, why, explained, probes, silent)]
        why = replace(why, fixes=() if misnamed else why.fixes)
    else:
        findings += _without_proxy(asked, node, why, explained)
    if any(one.about == "source" for one in findings):  # another program determines the source that endpoints see
        why = replace(why, endpoints=tuple(replace(one, client="") for one in why.endpoints))
    lost = Explanation(why, tuple(findings)).surely_lost
    findings += probing.findings(way, explained, why, probes, at_proxy=at_proxy, lost=lost)
    told = Explanation(why, tuple(findings), probes)
    return _retried(told) if at_proxy and packet.protocol == PROTOCOLS["TCP"] else told


def _kept(asked: Source, facts: Facts, explained: Explained, *, at_proxy: bool) -> tuple[Why, list[Diagnosis]]:
    """Return the answer with only the endpoint to which a flow or session affinity binds the client, and the findings
    on the binding. If the client is not bound to an endpoint, the answer keeps all endpoints."""
    why = explained.why
    pin = present.pinned(explained) if asked.running and not at_proxy else None
    in_kernel = asked.running and not explained.relayed  # the proxy itself remembers the clients that it relays
    kept = pin[0] if pin else present.remembered(facts, explained) if in_kernel else None
    held = tuple(replace(one, share=1.0) for one in why.endpoints if one.address == kept)
    if pin and why.endpoints and not held:  # the flow's address is no endpoint any more
        held = (Target(pin[0], 1.0, why.endpoints[0].masqueraded),)
    findings = list(pin[1:] if pin else present.affinity(why, kept))
    return replace(why, endpoints=held) if held else why, findings


def _silent_client(explained: Explained, probed: Collection[int]) -> bytes | None:
    """Return the client if it is on another node and does not answer a datagram, else None. If `probed` is empty, no
    datagram is sent, and a client on another node counts as silent."""
    client = explained.packet.source if explained.client_node else None
    return client if client is not None and not (probed and present.is_heard(client)) else None


def _whole_way(node: CheckedNode, why: Why, explained: Explained) -> CheckedNode:
    """Return the result of `_way`. If rules redirect the connection to the proxy's listener, add the packets that go
    to the listener."""
    way = _way(node, why, explained)
    if why.forwarded and _ends_at_proxy(node, explained) and not explained.relayed:
        with suppress(KubeProxyError, OSError):  # the checks of other programs' rules report unreadable rules
            return replace(way, passing=[*way.passing, *_to_listener(way)])
    return way


def _of_running(
    asked: Source,
    facts: Facts,
    way: CheckedNode,
    why: Why,
    explained: Explained,
    probes: Sequence[Probe],
    silent: bytes | None,
) -> Iterator[Diagnosis]:
    """Yield the findings on the kernel and on other programs while the proxy runs. `silent` is a client on another node
    that does not answer."""
    around = checkup.look_at_way(way) if why.forwarded else checkup.look_at_answer(way)
    if explained.relayed or why.outcome == Outcome.HEALTH.value:
        around.look("port", lambda: ports.asked(way, asked, explained.packet, why.steps[0].field))
    kernel = present.look(asked, facts, explained) if explained.plan is not None else ()
    if why.forwarded and not explained.relayed and any(one.is_wrong for one in kernel):
        ends = {end_of(one.address) for one in explained.why.endpoints}  # of all endpoints, even for a bound client
        kernel = _untranslated(kernel, *checkup.all_translations(way), ends)
    reached = {one.address for one in probes if not (one.failed or one.unanswered)}
    away = probing.away(why, explained)
    pods = {f"{one} on {where}": end_of(one)[0] for one, where in away.items() if one not in reached}
    if silent is not None:  # perhaps the route to the client is wrong
        pods[f"{why.source} on {explained.client_node}"] = silent
        around.look("reverse path filter", lambda: routes.on_uplink(way, silent))
    around.look("default route", lambda: routes.by_default(way, pods))
    yield from (*kernel, *_hairpin(way, why), *_around(around))


def unrouted(asked: Source, explained: Explained) -> str:
    """Return a text of the findings and fixes about routes, forwarding, bridges and rules of other programs. If some of
    these findings harm the connection, the text omits the other findings. Without findings, return ''."""
    why, report = explained.why, checkup.Checkup([], [])
    with suppress(KubeProxyError, OSError):
        node = replace(checkup.checked(asked, asked.facts()), family=family_of(explained.packet.destination))
        way = _way(node, why, explained)
        report.look("routes", lambda: routes.refused(way))
        report.look(
            "firewalls", lambda: strangers.dropping(checkup.surely_dropped(way.others, way.passing), way.harm_of)
        )
        report.look("forwarding", lambda: unforwarded(way) if "forward" in way.hooks else ())
        report.look("hairpin mode", lambda: _hairpin(way, why))
        if explained.client_node and (client := explained.packet.source):
            report.look("reverse path filter", lambda: routes.on_uplink(way, client))
    sure = [one for one in report.findings if one.harm != NOTHING]
    return "; ".join(f"{one.text}. Fix: {one.fix}" for one in sure or report.findings)


def untranslated(asked: Source, explained: Explained) -> str:
    """Return the findings and fixes on changes that the kernel refuses, and on differences between plan and kernel; ''
    for none."""
    found: list[Diagnosis] = []
    with suppress(KubeProxyError, OSError):
        facts = asked.facts()
        family = family_of(explained.packet.destination)
        found += programming.standing([one for one in facts.standings if one.family is family], facts.began)
        found += present.look(asked, facts, explained) if explained.plan is not None else ()
    return "; ".join(f"{one.text}. Fix: {one.fix}" for one in found if one.is_wrong)


def _untranslated(
    kernel: tuple[Diagnosis, ...], found: Sequence[ForeignTranslation], is_all: bool, ends: Collection[End] = ()
) -> tuple[Diagnosis, ...]:
    """Return `kernel`, the differences between plan and kernel. If no rule translates the connection, the first
    difference gets the harm STOPS; otherwise its text names the addresses to which rules lead, except `ends`."""
    first, *others = kernel
    if is_all and not found:
        return replace(first, harm=STOPS), *others
    there = dict.fromkeys(end for one in found for end in one.ends) if ends else {}
    stray = [end for end in there if end not in ends]
    if not stray or not all(one.sure for one in found):
        return kernel
    also = "also " * (len(stray) < len(there))
    return replace(first, what=f"{first.what}; its rules {also}lead to {strangers.destinations(stray)}"), *others


def _retried(told: Explanation) -> Explanation:
    """Return the answer for a TCP connection that ends at the proxy, which tries another endpoint if the first
    fails."""
    lost = told.lost(Effect.LOSES)
    silent = lost - {end_of(one.address) for one in told.probes if one.refused}
    if len(silent) >= len(DIAL_TIMEOUTS) or not lost < told.ends:
        return told
    found = (
        replace(one, severity=Severity.NOTE, why=_OTHER_ENDPOINT, harm=NOTHING) if one.harm.ends else one
        for one in told.findings
    )
    return replace(told, findings=tuple(found))


_OTHER_ENDPOINT: Final = (
    f"the proxy connects to another endpoint, after {DIAL_TIMEOUTS[0]:g} s if this one does not answer"
)


def _misnamed(node: CheckedNode, facts: Facts, why: Why) -> Iterator[Diagnosis]:
    """If policy Local finds no endpoint on this node, or NodePorts answer only on the Node's addresses, check whether
    the proxy is configured with another node's name."""
    names, by_name = checkup.Checkup([], []), set(POLICIES)
    if PRIMARY in (node.config.node_port_addresses or node.config.of_mode.nodeport_addresses):
        by_name.add(NODEPORTS)
    if any(not step.passes and step.field in by_name for step in why.steps):
        names.look("Node", lambda: whereabouts.registered(facts))
    yield from (replace(one, harm=MISLEADS) for one in names.findings if one.severity is Severity.BROKEN)


def _without_proxy(asked: Source, node: CheckedNode, why: Why, explained: Explained) -> Iterator[Diagnosis]:
    """Report that the answer follows only from objects, and list the rules in the kernel, which apply while no proxy
    runs."""
    away = whereabouts.elsewhere(node, f"kubectl kubeproxy why {why.client} {why.destination}")
    if away is not None:
        yield replace(away, what=f"{away.what}; the answer follows from the objects alone")
        return
    proxies, flags = node.proxies, asked.flags
    severity, unasked = Severity.NOTE if proxies else Severity.UNKNOWN, strangers.unasked(proxies, node.control)
    known = "decision follows from the objects" if proxies else "answer follows from the objects alone"
    yield Diagnosis(severity, "proxy", f"{unasked.text}; the {known}")
    if proxies:
        yield from _beside(asked, node, explained, unasked)
        return
    now, left = checkup.Checkup([], []), checkup.Checkup([], [])
    now.look("translation", lambda: checkup.translated_now(_way(node, why, explained)))
    left.look("rules of kube-proxies", lambda: checkup.rules_left(node, forwarded=True))
    yield from _around(now)
    for one in _around(left):
        fix = one.fix and f"compare them with the objects (`kube-proxy verify{flags}`), and {one.fix}"
        yield replace(one, severity=Severity.UNKNOWN, fix=fix, harm=NOTHING)


def _beside(asked: Source, node: CheckedNode, explained: Explained, unasked: strangers.Unasked) -> Iterator[Diagnosis]:
    """Compare the answer with the rules of a running proxy that was not asked. That proxy may hang, or may have older
    objects. If the comparison is not possible, the answer is unknown."""
    facts, plan = node.facts, explained.plan
    if facts is None or plan is None:
        yield from _while_hanging(node, explained) if unasked.hangs else ()
        return
    if not all(one.ours for one in node.proxies):
        yield Diagnosis(Severity.UNKNOWN, "proxy", f"{strangers.OTHER_LAYOUT}; `kube-proxy trace` follows a packet")
        return
    try:
        if not node.own_traces:
            what, fix = f"the kernel has no rules of {node.mode.name} mode to compare", "give the proxy's --config"
            yield Diagnosis(Severity.UNKNOWN, "proxy", what, fix=fix)
            return
        kernel = present.look(asked, facts, explained)
        if node.mode.flows_end is FlowsEnd.PROXY and unasked.hangs:
            what = "the rules lead to the listeners of the proxy, which hangs"
            kernel = (Diagnosis(Severity.BROKEN, "proxy", what, fix=unasked.fix, harm=STOPS), *kernel)
        elif unasked.hangs and any(one.is_wrong for one in kernel):
            kernel = (*_while_hanging(node, explained), *kernel)
        elif any(one.is_wrong for one in kernel):
            way = _way(node, explained.why, explained)
            kernel = _untranslated(kernel, *checkup.all_translations(way), way.targets)
    except (KubeProxyError, OSError) as error:
        kernel = (Diagnosis(Severity.NOTE, "kernel", f"the rules in the kernel cannot be read: {error}"),)
    for one in kernel:
        is_open = one.severity is Severity.NOTE and len(kernel) == 1
        yield (
            replace(one, severity=Severity.UNKNOWN, about="proxy")
            if is_open
            else replace(one, fix=one.fix and unasked.fix)
        )


def _while_hanging(node: CheckedNode, explained: Explained) -> Iterator[Diagnosis]:
    """Report the destinations of a hanging proxy's rules. A destination that is no endpoint in the present objects is
    an error if kube-proxy forwards the connection."""
    now, why = checkup.Checkup([], []), explained.why
    now.look("translation", lambda: checkup.translated_now(_way(node, why, explained), strangers.HANGING))
    for one in _around(now):
        is_old = one.about == strangers.PRESENT and one.severity is Severity.UNKNOWN and why.forwarded
        harm = MISLEADS if one.table else STOPS  # without a table, no rule translates the connection
        yield replace(one, severity=Severity.BROKEN, fix=strangers.RESUME, harm=harm) if is_old else one


def _seen(endpoints: Sequence[Target], packet: Packet) -> Iterator[Target]:
    """Yield the endpoints, each with the client's address in packets to this endpoint. If packets are masqueraded, the
    kernel picks this address by the route to the endpoint, which this function looks up only for probed endpoints."""
    own = packet.source
    if own is None and not all(one.masqueraded for one in endpoints):
        own = own_address(packet.destination)
    for number, one in enumerate(endpoints):
        client = None if one.masqueraded else packet.source
        if number < present.MOST:
            client = own_address(pack(one.host) or b"") if one.masqueraded else own
        yield replace(one, client=unpack(client) if client is not None else "")


def _hairpin(node: CheckedNode, why: Why) -> Iterator[Diagnosis]:
    ends = (one for one in why.endpoints if one.masqueraded)
    share = sum(one.share for one in ends if one.host == why.source)
    if share:
        yield from unreflecting_bridges(node, pack(why.source), share)


def _around(report: checkup.Checkup) -> Iterator[Diagnosis]:
    """Yield the node's findings: unknown ones unchanged, others as errors if they harm the connection, else notes."""
    for each in report.findings:
        severity = Severity.BROKEN if each.harm.effect is not Effect.NOTHING else Severity.NOTE
        yield each if each.severity is Severity.UNKNOWN else replace(each, severity=severity)
    for text in report.unknown:
        yield Diagnosis(Severity.UNKNOWN, "node", f"a check was impossible: {text}")


def _ends_at_proxy(node: CheckedNode, explained: Explained) -> bool:
    """Return whether the client's connection ends at the proxy, which opens a second connection to an endpoint."""
    return explained.relayed or (node.mode.flows_end is FlowsEnd.PROXY and not explained.why.direct)


def _way(node: CheckedNode, why: Why, explained: Explained) -> CheckedNode:
    """Return the node with a connection's hooks and packets. Connections that begin or end on this node do not pass
    the hook forward. In a mode that ends connections at the proxy, the proxy's own connections to endpoints begin on
    this node. `why` is the answer without endpoints that session affinity excludes."""
    packet = explained.packet
    source, family = packet.source, family_of(packet.destination)
    local = host.packed_local_addresses((family,))[family]
    taken_in = bool(node.mode.interface) and not why.direct
    is_between_pods = why.direct and source and not {source, packet.destination} & set(local)
    bridge = delivering_bridge(source, packet.destination) if is_between_pods and source else ""
    whole = packets.CheckedConnection(packet, local, taken_in, arrival(node, packet), node.mark, why.direct, bridge)
    ends = [(*end_of(one.address), one.masqueraded) for one in why.endpoints]
    known = ends[: present.MOST]
    at_proxy, relayed = _ends_at_proxy(node, explained), explained.relayed
    crosses = not at_proxy and not whole.is_local and any(address not in local for address, _, _ in known)
    balance = explained.plan.balance if explained.plan is not None else None
    is_kept = why.affinity or whole.taken_in or at_proxy or packet.protocol != PROTOCOLS["TCP"]
    is_kept = is_kept or (balance is not None and balance.hashing is not None)
    passing = list(packets.early(whole)) if why.forwarded and not relayed else list(_to_node(whole, node, why))
    for address, number, masqueraded in known:
        if at_proxy:
            passing += packets.own_packets(Packet(None, address, packet.protocol, number), local)
        else:
            passing += packets.translated(whole, (address, number), masqueraded=masqueraded)
    seen_as_node = frozenset(end[:2] for end in known if end[2])
    covered = why.outcome in _ANSWERED or (
        0 < len(known) == len(why.endpoints)
        and not (whole.taken_in or (at_proxy and not relayed))
        and not (whole.is_local and any(end[0] in local for end in known))
    )
    hooks = frozenset((*HOOKS, INGRESS)) - {"output" if crosses else "forward"}
    return replace(
        node,
        hooks=frozenset((*(one.hook for one in passing), INGRESS)) if covered and why.forwarded else hooks,
        packet=packet,
        first=next(packets.early(whole)),
        targets=frozenset(end[:2] for end in ends),
        passing=passing,
        possible=list(packets.masqueraded_answers(passing, seen_as_node, local)),
        masqueraded=seen_as_node,
        ends=[one for one in (source, *(end[0] for end in known)) if one and one not in local],
        served=bool(why.service),
        covered=covered,
        refused=why.outcome == Outcome.REFUSED.value,
        answers=relayed or (why.outcome in _ANSWERED and packet.destination in local),
        picked_again=frozenset(one[:2] for one in known if not is_kept),
        bridge=bridge,
        routed=() if bridge else list(packets.routed(whole, () if at_proxy else known)),
    )


def _to_listener(way: CheckedNode) -> Iterator[PassingPacket]:
    """Yield the packets of a connection that the kernel's rules redirect to the proxy's listener."""
    assert way.packet is not None  # noqa: S101 - the way of a connection has a packet
    family = family_of(way.packet.destination)
    local = host.packed_local_addresses((family,))[family]
    whole = packets.CheckedConnection(way.packet, local, arrival=arrival(way, way.packet))
    for address, port in checkup.listeners(way):
        if any(address) or whole.is_local:
            end = address if any(address) else LOOPBACK[family]
            yield from packets.translated(replace(whole, local=(*local, end)), (end, port), masqueraded=False)


_ANSWERED: Final = frozenset({Outcome.HEALTH.value, Outcome.NOT_OURS.value})
"""Outcomes of connections that the node itself answers: the proxy, or another program."""


def _to_node(whole: packets.CheckedConnection, node: CheckedNode, why: Why) -> Iterator[PassingPacket]:
    """Yield the packets of a connection that this node itself answers, or that rules at the hooks input and forward
    reject."""
    if why.forwarded or why.outcome in _ANSWERED:
        yield from packets.to_node(whole) if whole.packet.destination in whole.local else ()
    elif node.mode.comparable and why.outcome == Outcome.REFUSED.value and not whole.is_local:
        yield from packets.rejected(whole)
