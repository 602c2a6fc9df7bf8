"""Checks of the kernel's routes for one connection: to its Service, to its endpoints, and back to its client."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import inf

from msgspec.structs import replace

from kubeproxy.ask.checks.node import CheckedNode, arrival, bypassed, filtered_paths, number
from kubeproxy.ask.checks.settings import FORWARDING_OF, Setting, changed_back, few, filtered_ways
from kubeproxy.ask.checks.strangers import of_chain
from kubeproxy.ask.finding import NOTHING, PICKED_AGAIN, STOPS, Diagnosis, Effect, End, Harm, Severity
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.route import default_gateway, local_addresses, silent_neighbour, way_out
from kubeproxy.kernel.routing_policy import RoutedPacket, marks, refusal, routing_tables
from kubeproxy.meaning.firewall import MASQUERADED, Marking, PassingPacket, SourceTranslation
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.addresses import Family, family_of, is_loopback, place_text, unpack, within
from kubeproxy.model.world import pod_cidrs, used_pod_networks

_FORWARDING = FORWARDING_OF[Family.IPV4]
_FROM_LOOPBACK = "net/ipv4/conf/all/route_localnet"
_SILENT = frozenset({errno.EINVAL, errno.EXDEV})


def refused(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check whether the kernel refuses to route a packet of the checked connection, or would refuse it with a mark that
    other programs may set. Raises KubeProxyError."""
    tables = cache(routing_tables)  # read once, and only for a refused packet

    def refused_by(packet: RoutedPacket) -> str:
        return tables(family_of(packet.destination)).refusing(packet)

    yield from _if_marked(node, refused_by)
    yield from _doubtful(node)
    astray, strays = set[tuple[bytes, str]](), list[Diagnosis]()
    loopback = is_loopback(node.packet.destination) if node.packet is not None else False
    stopped: dict[tuple[bytes | None, str, bool], list[RoutedPacket]] = {}  # one finding for one cause
    for packet in dict.fromkeys(node.routed):
        code = refusal(packet)
        if not code:
            continue
        if code == errno.EHOSTUNREACH and packet.arrival and number(_FORWARDING.format(packet.arrival)) == 0:
            continue  # `unforwarded` reports interfaces that forward no packets
        by, is_silent = refused_by(packet), code in _SILENT
        asked = node.packet
        is_first = asked is not None and packet.destination == asked.destination and not packet.arrival
        if is_first and not node.direct:
            yield _untranslated(packet, by)
        elif is_silent and not by and loopback and number(_FROM_LOOPBACK) == 0:
            if not astray:
                yield from _kept_on_loopback()
            astray.add((packet.destination, packet.arrival))
        elif is_silent and not by and packet.source is not None and packet.arrival:
            if (packet.source, packet.arrival) not in astray:
                of_client = asked is not None and packet.source == asked.source
                ends = [] if of_client else node.ends_at(packet.source)
                strays.append(_astray(packet, unpack(packet.source), node.harm(ends or [None])))
            astray.add((packet.source, packet.arrival))
        else:
            stopped.setdefault((packet.source, by, is_silent), []).append(packet)
    for (_, by, is_silent), packets in stopped.items():
        again = is_silent and all(node.ends_at(one.destination) for one in packets)
        yield _stopped(packets, by, node.harm(_ends(node, packets), again=again), is_silent=is_silent)
    yield from strays


def _ends(node: CheckedNode, packets: Iterable[RoutedPacket]) -> frozenset[End | None]:
    """Return the endpoints that are destinations or sources of packets. None stands for packets before an endpoint is
    picked."""
    each = (node.ends_at(one.destination) or node.ends_at(one.source) or (None,) for one in packets)
    return frozenset[End | None]().union(*each)


def unanswered(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check whether the next hop of a packet of the checked connection answers ARP or neighbour discovery. A neighbour
    entry with the state FAILED may be old."""
    for packet in {one.destination: one for one in node.routed}.values():
        text, is_itself = "", False
        with suppress(NetlinkError):  # `refused` reports packets without a route
            text, is_itself = silent_neighbour(packet.destination)
        is_client = node.packet is not None and packet.destination == node.packet.source
        if text and (is_client or not is_itself):  # probes report silent endpoints
            end = unpack(packet.destination)
            yield Diagnosis(
                severity=Severity.BROKEN if "INCOMPLETE" in text else Severity.UNKNOWN,
                about="routes",
                what=f"the next hop of packets to {end} is silent: {text}",
                why="the packets do not leave this node",
                fix=f"see `ip route get {end}`: correct the route, or have that next hop answer",
                harm=node.harm(node.ends_at(packet.destination) or node.ends_at(packet.source or b"") or [None]),
            )


def by_default(node: CheckedNode, away: Mapping[str, bytes]) -> Iterator[Diagnosis]:
    """Yield a note about pods on other nodes to which packets leave by the default route, if this Node has a podCIDR.
    `away` contains the pods' addresses by text. Raises NetlinkError."""
    found: dict[bytes, list[str]] = {}
    for text, address in away.items() if away and node.facts and pod_cidrs(node.facts.node) else ():
        if gateway := default_gateway(address):
            found.setdefault(gateway, []).append(text)
    for gateway, ends in found.items():
        what = f"packets to {', '.join(ends)} leave by the default route, to {unpack(gateway)}"
        why = "normal where that gateway routes the pods' addresses; else the route to that node's podCIDR is missing"
        yield Diagnosis(Severity.NOTE, "routes", what, why)


def on_uplink(node: CheckedNode, client: bytes) -> Iterator[Diagnosis]:
    """Check whether the kernel drops packets of a pod of another node that arrive on this Node's uplink, because this
    Node's route to the pod uses another uplink. Raises NetlinkError."""
    out, own = way_out(bytes(len(client)), client), local_addresses(family_of(client))
    uplinks = {bypassed(address, out, own) for _, part in node.parts for address in part.node_ips} - {""}
    for packet in (RoutedPacket(client, end[0], name) for end in sorted(node.targets)[:1] for name in uplinks):
        if refusal(packet) in _SILENT:
            yield replace(_astray(packet, unpack(client), NOTHING), severity=Severity.UNKNOWN, about="arrival")


def misled(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check whether answers to a client that is a pod of this node leave by an uplink instead of the interface of the
    pod's network. Endpoints in this network are not affected. Raises NetlinkError."""
    asked, facts = node.packet, node.facts
    if asked is None or asked.source is None or facts is None or node.bridge:
        return
    own, anywhere = local_addresses(family_of(asked.source)), bytes(len(asked.source))
    pods = used_pod_networks(facts.node, family_of(asked.source), [one.ip for one in own])
    out = way_out(anywhere, asked.source) if within(asked.source, pods) else ""
    near = bypassed(asked.source, out, own) if out else ""
    lost = [end for end in node.targets if near and way_out(anywhere, end[0]) != near]
    if lost:
        client = unpack(asked.source)
        yield Diagnosis(
            severity=Severity.BROKEN,
            about="routes",
            what=f"answers to {client} leave by {out}, although it is in the network of {near}",
            why="the client is a pod of this node, and gets no answer",
            fix=f"see `ip route get {client}`: delete that route, or correct it",
            harm=node.harm(lost),
        )


_End = tuple[Diagnosis, str, PassingPacket]
"""A finding with the beginning of its text, the end of the text, and a packet. Between beginning and end, the complete
text names the packet's endpoint."""


def _by_finding(found: Iterable[_End]) -> Iterator[Diagnosis]:
    """Yield each finding once, with the endpoints of all its packets."""
    ends: dict[tuple[Diagnosis, str], dict[str, None]] = {}
    for one, rest, packet in found:
        ends.setdefault((one, rest), {})[place_text(packet.destination, packet.port)] = None
    for (one, rest), several in ends.items():
        yield replace(one, what=f"{one.what} {few([*several])} {rest}")


def moved_sources(node: CheckedNode) -> Iterator[Diagnosis]:
    """Report chains of other programs that give packets of the checked connection another source. If this source is no
    address of this node, answers may not return to this node. Raises NetlinkError."""
    return _by_finding(_moved_sources(node))


def _moved_sources(node: CheckedNode) -> Iterator[_End]:
    leaving = [one for one in node.passing if one.hook == "postrouting" and one.purpose is CompiledFor.REQUEST]
    # If the proxy masquerades first, no other chain translates the source.
    requests = [one if node.end_of(one) in node.masqueraded else one._replace(before=inf) for one in leaving]
    own = {one.ip for one in local_addresses(family_of(requests[0].destination))} if requests else set()
    for one in (each for firewall in node.others for each in firewall.sources(requests)):
        is_own, is_masqueraded = one.sources <= {*own, MASQUERADED}, node.end_of(one.packet) in node.masqueraded
        if one.sources <= {one.packet.source} - {None}:
            if is_masqueraded and (one.packet.source is not None or is_loopback(one.packet.original[0])):
                yield _accepted(one), "before the proxy's chain, which masquerades them", one.packet
            continue
        if is_own and (one.packet.source is None or is_masqueraded):
            continue
        known = [unpack(address) if address else "of this node" for address in one.sources if address is not None]
        severity, why = Severity.NOTE, "the endpoint, and network policies, see this address as the client"
        if not is_own:
            severity = Severity.UNKNOWN
            why = "it is no address of this node: the connection passes only if answers to it arrive on this node"
        fix = f"have {one.where} {one.chain} use an address of this node, or leave packets to endpoints out of it"
        finding = of_chain(one, severity, "source", f"{'gives' if one.sure else 'may give'} packets to", why, fix)
        source = " or ".join(sorted(known)) or "address of a map or range"
        yield finding, f"the source {source} at the hook postrouting", one.packet


def remarked(node: CheckedNode) -> Iterator[Diagnosis]:
    """Report chains of other programs that clear the proxy's mark in packets that must be masqueraded, or set this mark
    in packets of pods and other hosts that should not be masqueraded."""
    return _by_finding(_remarked(node))


def _remarked(node: CheckedNode) -> Iterator[_End]:
    requests = [one for one in node.passing if one.purpose is CompiledFor.REQUEST]
    for one in (each for firewall in node.others for each in firewall.marking(requests)):
        bit, end = node.mark, node.end_of(one.packet)
        packets, hook = f"the proxy's mark {bit:#x} in packets to", f"at the hook {one.packet.hook}"
        fix = f"have {one.where} {one.chain} set its own bits only, with a mask, and keep this bit"
        if one.packet.marks[1]:
            if any(not mark & bit for mark in one.marks):
                yield _unmasqueraded(one, f"{'clears' if one.sure else 'may clear'} {packets}", fix), hook, one.packet
            continue
        kept = (node.targets if end is None else {end}) - node.masqueraded
        if kept and one.packet.source in node.ends and any(mark & bit for mark in one.marks):
            effect = f"{'sets' if one.sure else 'may set'} {packets}"
            why = (
                "the proxy masquerades them: the endpoint, and network policies, see this node's address as the client"
            )
            yield of_chain(one, Severity.NOTE, "source", effect, why, fix), hook, one.packet


def _accepted(one: SourceTranslation) -> Diagnosis:
    """Return the finding for a chain that accepts packets before the proxy's chain could masquerade them."""
    fix = f"exclude packets to endpoints from that rule of {one.where} {one.chain}, or move it to a chain after the "
    return _unmasqueraded(one, f"{'accepts' if one.sure else 'may accept'} packets to", f"{fix}proxy's chain")


def _unmasqueraded(one: Marking | SourceTranslation, effect: str, fix: str) -> Diagnosis:
    """Return the finding for a chain of another program that keeps packets from being masqueraded."""
    why = (
        "they are not masqueraded: the endpoint sees the client's address, and the connection passes only if answers "
        "to the client return through this node"
    )
    return of_chain(one, Severity.UNKNOWN if one.sure else Severity.NOTE, "source", effect, why, fix)


def _kept_on_loopback() -> Iterator[Diagnosis]:
    """Return the finding for the sysctl that blocks IPv4 packets with a loopback address, and answers to them, on all
    links except loopback."""
    for one in changed_back([Setting(_FROM_LOOPBACK, 1, 0)]):
        yield replace(one, severity=Severity.BROKEN, about="routes", harm=STOPS)


def _if_marked(node: CheckedNode, refused_by: Callable[[RoutedPacket], str]) -> Iterator[Diagnosis]:
    """Check for packet marks with which policy routing would refuse a packet, and for chains that set such marks.
    `refused_by` returns the refusing rule."""
    tested = marks() - {node.mark} if node.routed else ()
    routed = list(dict.fromkeys(node.routed))
    refused_with = {mark: packet for mark in tested for packet in reversed(routed) if _is_lost(packet, mark)}
    early = [one for one in node.passing if one.hook in {"prerouting", "output"}] if refused_with else ()
    is_lost, named, found = cache(_is_lost), set[int](), dict[Marking, list[RoutedPacket]]()
    for one in (each for firewall in (node.others if early else ()) for each in firewall.marking(early)):
        for packet in routed:
            lost = [mark for mark in one.marks if is_lost(packet, mark)] if _is_way_of(packet, one.packet, node) else ()
            named.update(lost)
            if lost:
                sure = one.sure and one.packet.hook == "prerouting"  # at the hook output, only some chains reroute
                key = one._replace(packet=node.passing[0], marks=frozenset({min(lost)}), sure=sure)
                several = found.setdefault(key, [])
                several += [packet] if packet not in several else []
    for each, several in found.items():
        yield _lost_by_mark(each, several, refused_by(_with(several[0], min(each.marks))), node)
    for mark, packet in refused_with.items():
        if not any(each & mark == mark for each in named):
            yield Diagnosis(
                severity=Severity.NOTE,
                about="routes",
                what=f"the kernel would not route packets to {unpack(packet.destination)} with the mark {mark:#x}: "
                f"{refused_by(_with(packet, mark)) or 'no table has a route'}",
                why="if a program sets this mark, the connection is dropped or refused; no evaluated chain sets it",
                fix="see which programs set it (`nft list ruleset`, `iptables-save`), and leave this connection out",
            )


def _is_lost(packet: RoutedPacket, mark: int) -> bool:
    """Return whether the kernel routes a packet only without this mark."""
    return bool(refusal(_with(packet, mark))) and not refusal(packet)


def _with(packet: RoutedPacket, mark: int) -> RoutedPacket:
    return packet._replace(mark=mark | packet.mark)


def _is_way_of(routed: RoutedPacket, passing: PassingPacket, node: CheckedNode) -> bool:
    """Return whether `passing`, a request or an answer at a hook before routing, may be routed as `routed`."""
    if passing.purpose is CompiledFor.ANSWER:
        return routed.source == passing.source
    if routed.destination == passing.destination and not routed.arrival:  # the mark changes the first packet's route
        return True
    return bool(node.ends_at(routed.destination)) and passing.destination in {*passing.original[:1], routed.destination}


def _lost_by_mark(found: Marking, lost: Sequence[RoutedPacket], by: str, node: CheckedNode) -> Diagnosis:
    """Return the finding for packets that a chain marks, and that the kernel does not route with this mark."""
    targets = ", ".join(dict.fromkeys(unpack(one.destination) for one in lost))
    effect = f"{'gives' if found.sure else 'may give'} packets to {targets} the mark {min(found.marks):#x}"
    effect += f", with which the kernel does not route them: {by or 'no table has a route'}"
    fix = f"leave this connection out of the rules of {found.where} {found.chain}, or add a route for the mark"
    severity, about, harm = Severity.UNKNOWN, "mark", NOTHING
    if found.sure:
        severity, about, harm = Severity.BROKEN, "routes", node.harm(_ends(node, lost))
    return of_chain(found, severity, about, effect, "they are dropped or refused", fix, harm)


def _doubtful(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check whether a strict reverse path filter drops a client's packets if they arrive on the interface that has
    their destination address. If the route to the client uses another uplink, the incoming interface is unknown."""
    asked = node.packet
    if asked is None or asked.source is None or asked.interface or arrival(node, asked):
        return
    out, own = way_out(asked.destination, asked.source), local_addresses(family_of(asked.source))
    is_near = any(
        asked.source == one.ip or (one.interface == out and within(asked.source, [one.network])) for one in own
    )
    known = is_near or any(part.detector.holds(asked.source, "") for _, part in node.parts)
    for path in filtered_paths(node) if not known and bypassed(asked.destination, out, own) else ():
        if path.address == unpack(asked.destination) and not path.clients:
            for one in filtered_ways([path._replace(out=out)]):
                yield replace(one, severity=Severity.UNKNOWN, about="arrival")


def _untranslated(packet: RoutedPacket, by: str) -> Diagnosis:
    """Return the finding for a packet from this node to a Service to which no route leads."""
    what = f"this node has no route to {unpack(packet.destination)}" + f", {by}" * bool(by)
    why = (
        "the kernel routes packets of this node before any rule applies, and programs get an error such as ENETUNREACH"
    )
    fix = (
        "see that the interface of the default route is up (ip link, ip route), or add a route for the "
        "addresses of Services; any will do, as the rules replace the address"
    )
    if by:
        table, address = by.partition(" in table ")[2].partition(" ")[0], unpack(packet.destination)
        own = f"; for this address alone, `ip route replace {address} dev INTERFACE table {table}`, with any interface"
        own += " that is up, as the rules replace the address"
        fix = "have the program that added it leave the addresses of Services out" + own * bool(table)
    return Diagnosis(Severity.BROKEN, "routes", what, why, fix, STOPS)


def _astray(packet: RoutedPacket, source: str, harm: Harm) -> Diagnosis:
    """Return the finding for a packet that the reverse path filter drops."""
    out = way_out(bytes(len(packet.destination)), packet.source or b"")
    loose = f"; net.ipv4.conf.{packet.arrival}.rp_filter=2 (loose) is enough only if answers that leave by {out} arrive"
    return Diagnosis(
        severity=Severity.BROKEN,
        about="routes",
        what=f"the kernel drops packets of {source} that arrive on {packet.arrival}",
        why=f"its own route to {source} leaves by {out or 'no interface'} (reverse path filter)",
        fix=f"see `ip route get {source}`: correct that route, or add a route by {packet.arrival}"
        + loose * (bool(out) and family_of(packet.destination) is Family.IPV4),
        harm=harm,
    )


def _stopped(packets: Sequence[RoutedPacket], by: str, harm: Harm, *, is_silent: bool) -> Diagnosis:
    """Return the finding for packets that have no route, or that a policy routing rule or a route refuses."""
    packet, ends = packets[0], ", ".join(dict.fromkeys(unpack(one.destination) for one in packets))
    source = unpack(packet.source) if packet.source is not None else ""
    asked = f"ip route get {unpack(packet.destination)}" + f" from {source}" * bool(source)
    asked += f" iif {packet.arrival}" * bool(packet.arrival) + f" mark {packet.mark:#x}" * bool(packet.mark)
    dropped = PICKED_AGAIN if harm.effect is Effect.DELAYS else "these packets are dropped, and clients see a timeout"
    return Diagnosis(
        severity=Severity.BROKEN,
        about="routes",
        what=f"the kernel does not route packets of {source or 'this node'} to {ends}: {by or 'no table has a route'}",
        why=dropped if is_silent else "the kernel refuses them as unreachable",
        fix=f"see `{asked}`: {'leave these packets out of that rule or route' if by else 'add a route'}",
        harm=harm,
    )
