"""Compares an answer's plan with the kernel. Implements `kube-proxy verify`, which compares API server, plans and
kernel. Probes endpoints from this node by a TCP connect, or by a UDP datagram, which an unused port refuses.

Packets of pods and of outside clients take other paths than probes, and network policies may treat them differently. An
answered probe shows that the endpoint listens. A failed probe is evidence only for clients that are masqueraded to this
node's address."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import AS_CLIENT, MISLEADS, NOTHING, Diagnosis, Effect, End, Harm, Probe, Severity, end_of
from kubeproxy.ask.kernel.looks import Seen, examiners
from kubeproxy.ask.kernel.looks import look as look_at
from kubeproxy.ask.kernel.verdicts import kept_flow
from kubeproxy.ask.lines import REPAIR, difference
from kubeproxy.ask.snapshot import unwatched
from kubeproxy.ask.source import Source, knowing
from kubeproxy.ask.why import Explained, Target, Why
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.backends.state import Finding
from kubeproxy.errors import ApplyError, KubeProxyError, NoAnswerError, Unsupported
from kubeproxy.kernel.conntrack.tracked import Tracked, entries_to, target_of
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.route import silent_neighbour, source_for
from kubeproxy.model.addresses import (
    PORT_BYTES,
    PROTOCOL_NAMES,
    PROTOCOLS,
    destination_text,
    family_of,
    place_of_text,
    place_text,
    unpack,
)
from kubeproxy.model.answer import Packet
from kubeproxy.model.plan import ServiceName
from kubeproxy.release import build, different
from kubeproxy.setup import modes
from kubeproxy.wording import counted

_SHOWN = 10


def look(asked: Source, facts: Facts, explained: Explained) -> tuple[Diagnosis, ...]:
    """Compare the kernel's rules with the plan of an answer. The answer must have a plan. Raises KubeProxyError."""
    assert explained.plan is not None  # noqa: S101 - the caller checked
    key = explained.plan.key
    try:
        with examiners(facts, [key.family]) as kernel:
            seen = look_at(asked.services, kernel, [(key.namespace, key.name)])
    except (ApplyError, Unsupported) as error:
        return (_line(Severity.NOTE, f"the kernel's rules could not be read: {error}"),)
    if seen.on_their_way or seen.unstable:
        return (_line(Severity.NOTE, f"a change of {key.namespace}/{key.name} is on its way into the kernel"),)
    return tuple(_lines(explained.why, facts, seen.findings))


def remembered(facts: Facts, explained: Explained) -> str | None:
    """Return the endpoint to which session affinity binds the client of an answer; '' if the client is not bound yet.
    Return None without affinity, or if the mode cannot read the endpoint. Raises KubeProxyError."""
    plan, why = explained.plan, explained.why
    if plan is None or not why.affinity:
        return None
    try:
        client = explained.packet.source or source_for(explained.packet.destination)
        if client is None:
            return None
        # For a range of ports, the kernel stores the endpoint's port that belongs to the Service's first port.
        with examiners(facts, [plan.key.family]) as kernel:
            telling = [each.remembered for each in kernel if each.remembered]
            found = {
                destination_text(one if one in plan.serving else one[:-2] + PORT_BYTES[explained.packet.port])
                for remembered_by in telling
                for one in remembered_by(plan, client, explained.policy)
            }
    except (ApplyError, Unsupported):
        return None
    return next((one.address for one in why.endpoints if one.address in found), "") if telling else None


def flows_to(packet: Packet) -> list[Tracked]:
    """Return the conntrack entries with a packet's destination. Raises ApplyError."""
    target = target_of(packet.destination, packet.protocol, packet.port)
    with Netlink.open() as link:
        found = entries_to(link, family_of(packet.destination), packet.protocol, packet.port)
        return [entry for entry in found if entry.target == target]


def selection_of(packet: Packet, entry: Tracked) -> str:
    """Return the arguments of conntrack(8) that select an entry with the packet's destination."""
    family = "" if len(packet.destination) == 4 else "-f ipv6 "
    return (
        f"{family}-p {PROTOCOL_NAMES[packet.protocol].lower()} -s {unpack(entry.client[:-2])} "
        f"--sport {int.from_bytes(entry.client[-2:])} -d {unpack(packet.destination)} --dport {packet.port}"
    )


def pinned(explained: Explained) -> tuple[str, Diagnosis] | None:
    """Return the endpoint of the flow with the client's port, and the finding on the flow; None without such a flow. A
    closed TCP connection is ignored, because a new connection replaces its entry. Raises ApplyError."""
    plan, packet = explained.plan, explained.packet
    if plan is None or packet.source is None or not packet.source_port:
        return None
    client = packet.source + PORT_BYTES[packet.source_port]
    for entry in flows_to(packet):
        if entry.client == client and not entry.over:
            endpoint = destination_text(entry.server)
            what = f"connection tracking keeps the client's port {packet.source_port} at {endpoint} (read now)"
            if entry.server in plan.serving:
                return endpoint, _line(Severity.FINE, what)
            what += f", which is no endpoint of {explained.why.service}"
            kept = kept_flow(packet.protocol, selection_of(packet, entry), answered=entry.answered)
            if kept.continues:
                return endpoint, _line(Severity.NOTE, f"{what}: {kept.text}")
            return endpoint, _line(Severity.BROKEN, what, kept.text)
    return None


def affinity(why: Why, kept: str | None) -> Iterator[Diagnosis]:
    """Yield the finding on session affinity; `kept` is the result of `remembered`."""
    if kept:
        yield _line(Severity.FINE, f"session affinity keeps this client at {kept} (read now)")
    elif kept is not None:
        yield _line(Severity.NOTE, "session affinity keeps this client at no endpoint yet (read now)")
    elif why.forwarded and why.affinity:
        yield _line(Severity.NOTE, "a client that session affinity binds to an endpoint gets only this endpoint")


def _lines(why: Why, facts: Facts, findings: Sequence[Finding]) -> Iterator[Diagnosis]:
    count = len(why.endpoints)
    there = sum(not any(finding.misses(one.address) for finding in findings) for one in why.endpoints)
    severity = Severity.BROKEN if findings else Severity.FINE
    if not count:
        words = "is not what the kernel has" if findings else "is what the kernel has"
        yield _line(severity, f"{why.outcome} {words} (read now)")
    elif modes.named(facts.mode).flows_end is FlowsEnd.PROXY:
        words = "do not lead" if findings else "lead"
        yield _line(severity, f"the kernel's rules {words} to the proxy's listener as planned (read now)")
    else:
        severity = Severity.FINE if there == count else Severity.BROKEN
        yield _line(severity, f"the kernel has {there} of {counted(count, 'endpoint')} (read now)")
    for finding in findings[:_SHOWN]:
        yield _line(Severity.BROKEN, difference(*finding), REPAIR)
    if len(findings) > _SHOWN:
        yield _line(
            Severity.NOTE, f"and {counted(len(findings) - _SHOWN, 'more difference')}; `kube-proxy verify` has them"
        )


def _line(severity: Severity, what: str, fix: str = "") -> Diagnosis:
    return Diagnosis(severity, "kernel", what, fix=fix, harm=MISLEADS if severity is Severity.BROKEN else NOTHING)


class Report(Struct, frozen=True):
    """The differences between kernel and plans, the proxy's outdated objects, and problems as sentences."""

    facts: Facts
    seen: Seen
    behind: Sequence[Finding]
    troubles: Sequence[str]
    ports: Sequence[Diagnosis] = ()  # ports of Services that other programs use
    fix: str = REPAIR  # of the differences

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.seen.findings or self.behind or self.ports)

    def is_complete(self, names: Sequence[ServiceName]) -> bool:
        """Return whether all Services could be compared."""
        return not ((names and self.seen.on_their_way) or self.troubles or self.seen.unstable)

    def fields(self) -> dict[str, object]:
        """Return the report in the form of JSON."""
        seen = self.seen
        return {
            "mode": self.facts.mode,
            "services": seen.services,
            "findings": [finding._asdict() for finding in seen.findings],
            "behind": [finding._asdict() for finding in self.behind],
            "ports": [finding.row() for finding in self.ports],
            "onTheirWay": ["/".join(name) for name in seen.on_their_way],
            "restless": ["/".join(name) for name in seen.unstable],
            "caveats": seen.caveats,
            "troubles": self.troubles,
        }


def verify(asked: Source, names: Sequence[ServiceName], *, api: bool) -> Report:
    """Compare these Services, or all Services. Their objects in a running proxy are also compared with the API
    server if Services are named, or if `api` is set. Raises KubeProxyError."""
    facts = asked.facts()
    if asked.running and facts.version != build().name:
        reason = "nothing was compared, because each version has its own layout of rules"
        raise KubeProxyError(f"{reason}: {different(facts.version)}")
    knowing(asked)
    troubles = list(_troubles(facts))
    fix = _REFUSED if any(one.refusal for one in facts.standings) else REPAIR
    if not asked.running:
        from kubeproxy.ask.checks import checkup, strangers, whereabouts  # noqa: PLC0415 - only without a proxy
        from kubeproxy.ask.kernel.stopped import of_another_mode  # noqa: PLC0415 - only without a proxy

        node = checkup.checked(asked, facts)
        whereabouts.must_be_here(node, " ".join(("kubectl kubeproxy verify", *map("/".join, names))))
        proxies = node.proxies
        unasked = strangers.unasked(proxies, node.control)
        fix = unasked.fix if proxies else _START
        troubles += [unasked.text] * unasked.hangs
        if other := of_another_mode(node, unasked.text):
            raise NoAnswerError(f"{other.what}; nothing was compared. Fix: {other.fix}")
    with examiners(facts, facts.world.families) as kernel:
        seen = look_at(asked.services, kernel, names)
    if names and not (seen.services or seen.on_their_way):
        troubles.append(unwatched(names[0]))
    behind: list[Finding] = []
    if asked.running and not facts.manifests and (names or api):
        from kubeproxy.ask import cluster  # noqa: PLC0415 - a look at the kernel alone does not need it

        try:
            behind = cluster.behind(asked.services, facts, names)
        except NoAnswerError as error:
            troubles.append(str(error))
    held = _ports(asked, facts, names) if asked.running else ()
    return Report(facts, seen, behind, troubles, held, fix)


_START: Final = "start kube-proxy on this node, which corrects the rules; the command queried no proxy"
_REFUSED: Final = "the proxy cannot repair them while the kernel refuses its changes; `kube-proxy doctor` has the cause"


def _ports(asked: Source, facts: Facts, names: Sequence[ServiceName]) -> list[Diagnosis]:
    from kubeproxy.ask.checks import checkup, ports  # noqa: PLC0415 - `why` does not need it

    wanted = {"/".join(name) for name in names}
    listeners = [one for one in asked.listeners() if not wanted or one.service in wanted]
    return list(ports.of_services(checkup.checked(asked, facts), listeners))


def _troubles(facts: Facts) -> Iterator[str]:
    for part, why in facts.unready.items():
        yield f"the proxy is not ready, {part}: {why}"
    for one in facts.standings:
        if one.refusal:
            yield f"the kernel refuses the {one.family.label} changes: {one.refusal}"
        if one.difference:
            yield f"the proxy is repairing ({one.family.label}): {one.difference}"


TIMEOUT = 1.0  # seconds to wait for a connection
_UDP_TIMEOUT = 0.2
MOST = 20  # endpoints that are probed
_TCP, _UDP = PROTOCOLS["TCP"], PROTOCOLS["UDP"]


def all_of(endpoints: Sequence[Target], protocol: int) -> tuple[Probe, ...]:
    """Probe the first MOST endpoints at the same time; SCTP is not probed."""
    if protocol not in {_TCP, _UDP} or not endpoints:
        return ()
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - most questions need no probe

    chosen = [one.address for one in endpoints[:MOST]]
    with ThreadPoolExecutor(len(chosen)) as pool:
        return tuple(pool.map(partial(_attempt, protocol), chosen))


class OwnCause(NamedTuple):
    """A reason why only this node's own packets, such as those of probes, do not reach an endpoint. `sure` is False if
    the reason may not apply."""

    reason: str
    fix: str = ""
    sure: bool = True


class ProbedFor(NamedTuple):
    """The connection for which probes are made."""

    is_node: bool = True  # the connection's packets have the same path as packets of probes
    own_address: Collection[str] = ()  # the endpoints that receive the client's own address
    stopped: Mapping[str, OwnCause] = {}  # causes that concern only this node's own packets, by endpoint
    routed: bool = False  # another check asks the kernel for the routes of the connection's own packets
    away: Mapping[str, str] = {}  # the endpoints on other nodes, with the node
    here: Mapping[str, str] = {}  # endpoints in `away` that have an address of this node, with its interface
    lost: Collection[End] = ()  # the endpoints that the connection certainly does not reach

    def may_differ(self, probe: Probe) -> bool:
        """Return whether the endpoint may accept the connection although it does not accept this probe."""
        return probe.address in self.own_address and probe.problem != _BLACKHOLE


def findings(probes: Sequence[Probe], connection: ProbedFor) -> Iterator[Diagnosis]:
    """Yield one finding for all endpoints that answered, and one finding for each endpoint that did not answer."""
    reached = [one for one in probes if not (one.failed or one.unanswered)]
    if reached:
        each = ", ".join(f"{one.address} {one.seconds * 1000:.1f} ms" for one in reached)
        yield Diagnosis(Severity.FINE, "endpoints", f"{reached[0].protocol} from this node: {each}")
    if quiet := [one for one in probes if one.unanswered]:
        what = f"{quiet[0].protocol} from this node: no reply, nothing refused it"
        why = "a listening program need not reply to an empty datagram, so silence proves nothing"
        yield Diagnosis(Severity.NOTE, "endpoints", f"{what}: {', '.join(one.address for one in quiet)}", why)
    explained = {*connection.here, *(address for address, own in connection.stopped.items() if own.sure)}
    explained |= {one.address for one in probes if end_of(one.address) in connection.lost}
    wrong = [one for one in probes if one.failed and not one.absent and one.address not in explained]
    for one in (one for one in probes if one.failed):
        yield from (replace(found, endpoint=one.address) for found in _failure(one, wrong, connection))


def _failure(one: Probe, wrong: Sequence[Probe], connection: ProbedFor) -> Iterator[Diagnosis]:
    """Yield the finding for a failed probe; `wrong` has the failed probes without a known cause."""
    what = f"{one.protocol} from this node to {one.address}: {one.problem}"
    own = connection.stopped.get(one.address)
    if own and own.sure:
        if connection.is_node:
            yield Diagnosis(Severity.BROKEN, "endpoints", what, own.reason, own.fix, _lost(one))
        else:
            yield Diagnosis(Severity.NOTE, "endpoints", what, f"{own.reason}; other checks cover the connection")
    elif one.problem == _BLACKHOLE and connection.routed:
        yield Diagnosis(Severity.NOTE, "endpoints", what, "the routes of the connection itself are checked as well")
    elif one.address in connection.here or (one.absent and one.address in connection.away):
        yield _elsewhere(one, what, connection)
    elif one.absent:
        fix = f"nothing on this node's links has the address {place_of_text(one.address)[0]}: {_RUNS}"
        yield Diagnosis(Severity.BROKEN, "endpoints", what, fix=fix, harm=_lost(one))
    elif end_of(one.address) in connection.lost:
        yield Diagnosis(Severity.NOTE, "endpoints", what)
    elif own:
        closed = ", ".join(each.address for each in wrong if each.refused and each.address in connection.stopped)
        rest = f"nothing listens on {closed}: {_LISTENS}"
        rest = rest if one.refused else f"look at the pod network, at {_POLICIES}"
        yield Diagnosis(Severity.UNKNOWN, "endpoints", what, own.reason, f"{own.fix}; if none does, {rest}")
    elif connection.may_differ(one):
        cause, verb = ("nothing listens", "rejects") if one.refused else (_GONE, "drops")
        why = f"{cause}, or {_PERHAPS_CLIENT.format(verb)}"
        yield Diagnosis(Severity.UNKNOWN, "endpoints", what, why, _fix(one, wrong, connection))
    else:
        yield Diagnosis(Severity.BROKEN, "endpoints", what, fix=_fix(one, wrong, connection), harm=_lost(one))


def _fix(probe: Probe, wrong: Sequence[Probe], connection: ProbedFor) -> str:
    """Return the fix for all endpoints that failed in the same way. If they refuse probes, the fix has two lists: the
    endpoints that certainly refuse the client, and the endpoints that may accept the client."""
    alike = [one for one in wrong if one.refused is probe.refused and one.address not in connection.stopped]
    sure = ", ".join(one.address for one in alike if not connection.may_differ(one))
    perhaps = ", ".join(one.address for one in alike if connection.may_differ(one))
    client = f"{AS_CLIENT.format(perhaps)}look at {_POLICIES if probe.refused else _NETWORK}"
    if not probe.refused:
        return client if connection.may_differ(probe) else f"this node does not reach {sure}: look at {_NETWORK}"
    closed = [f"nothing listens on {sure}"] * bool(sure) + [f"perhaps nothing listens on {perhaps}"] * bool(perhaps)
    rest = [" Or a NetworkPolicy or a firewall rejects this node: let it pass"] * bool(sure)
    rest += [f" If it listens, {client}"] * bool(perhaps)
    return f"{' and '.join(closed)}: {_LISTENS}{'.'.join(rest)}"


_GONE: Final = "the pod is gone, or the pod network loses packets"
_LISTENS: Final = "is targetPort right, and does the process listen on the pod's address rather than on 127.0.0.1?"
_POLICIES: Final = (
    "the NetworkPolicies that select the pod, and at the rules in its network namespace (`nft list ruleset`, "
    "`iptables-save`)"
)
_NETWORK: Final = (
    "the route to it (`ip route get`) and the next hop's entry in `ip neighbour`, on this node and, for the way back, "
    f"on the endpoint's node; at the network between them; at {_POLICIES}; see whether the pod still runs"
)
_RUNS: Final = (
    "does the pod run, and is its interface up? If it is gone, see whether an EndpointSlice still has it (`kubectl get "
    "endpointslices -A -o yaml`, and the log of kube-controller-manager)"
)
_PERHAPS_CLIENT: Final = (
    "a NetworkPolicy or a firewall {} packets of this node, and perhaps of the client: the endpoint sees the client's "
    "own address, so only a connection of the client shows it"
)
_BLACKHOLE: Final = "its route is a blackhole"


def _elsewhere(probe: Probe, what: str, connection: ProbedFor) -> Diagnosis:
    host, node = place_of_text(probe.address)[0], connection.away[probe.address]
    interface, reason = connection.here.get(probe.address, ""), ""
    fix = f"the endpoint is on {node}: see `ip route get {host}`: does it lead there? If so, see whether the pod runs"
    if interface:
        reason = f"this node itself has the address {host} on {interface}, so packets to the endpoint do not leave it"
        fix = f"the endpoint is on {node}: delete the address on {interface}, or correct nodeName in the EndpointSlice"
    return Diagnosis(Severity.BROKEN, "endpoints", what, reason, fix, _lost(probe))


def _lost(probe: Probe) -> Harm:
    return Harm(Effect.LOSES, frozenset({end_of(probe.address)}))


def _attempt(protocol: int, address: str) -> Probe:
    """Connect; over UDP, send an empty datagram. A closed UDP port answers with an ICMP error; an open UDP port does
    not answer."""
    began, family = time.monotonic(), socket.AF_INET6 if address.startswith("[") else socket.AF_INET
    kind, timeout = (socket.SOCK_DGRAM, _UDP_TIMEOUT) if protocol == _UDP else (socket.SOCK_STREAM, TIMEOUT)
    failure = None
    try:
        with socket.socket(family, kind | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(timeout)
            sock.connect(place_of_text(address))
            if protocol == _UDP:
                sock.send(b"")
                sock.recv(1)
    except OSError as error:
        failure = error
    made = Probe(address, PROTOCOL_NAMES[protocol], time.monotonic() - began)
    return made if failure is None else _failed(made, failure, is_udp=protocol == _UDP)


def _failed(made: Probe, error: OSError, *, is_udp: bool) -> Probe:
    if isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH:
        silent, absent = "", False
        with suppress(KubeProxyError):
            silent, absent = silent_neighbour(end_of(made.address)[0])
        what = "no answer" if is_udp else f"no answer within {TIMEOUT:.0f} s"
        what = "no route to host" if error.errno == errno.EHOSTUNREACH else what
        if is_udp and isinstance(error, TimeoutError) and not silent:
            return replace(made, absent=absent, unanswered=True)
        return replace(made, problem=what + f", as {silent}" * bool(silent), absent=absent)
    if error.errno == errno.ECONNREFUSED:
        return replace(made, problem="refused", refused=True)
    if error.errno == errno.EINVAL:  # the kernel's error for a blackhole route
        return replace(made, problem=_BLACKHOLE)
    return replace(made, problem=os.strerror(error.errno or errno.EIO).lower())


def is_heard(client: bytes) -> bool:
    """Send an empty datagram to a client on another node; return whether an answer or a refusal arrives. If neither
    arrives, wait until the kernel has searched for the next hop, so that the next hop's neighbour entry has a state."""
    made = _attempt(_UDP, place_text(client, _DISCARD))
    if made.failed and not made.refused:
        time.sleep(TIMEOUT - _UDP_TIMEOUT)
    return not (made.failed or made.unanswered) or made.refused


_DISCARD: Final = 9
"""A port on which normally no program listens."""
