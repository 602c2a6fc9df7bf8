"""Gathers the facts for the checks of ask/checks from the running proxy, /proc and netlink, and writes nothing. A check
that cannot run is reported as unknown, and the other checks still run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.api.source import Reach
from kubeproxy.ask.checks import (
    contact,
    greeting,
    identity,
    ports,
    programming,
    routes,
    settings,
    strangers,
    whereabouts,
)
from kubeproxy.ask.checks import node as nodes
from kubeproxy.ask.checks.node import CheckedNode, mode_of
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import Diagnosis, End, Severity, worst_first
from kubeproxy.ask.source import Running, Source
from kubeproxy.backends.mode import FlowsEnd, Mode, Trace
from kubeproxy.config.load import read_text
from kubeproxy.config.types import KubeProxyConfiguration, differences, made_strict
from kubeproxy.errors import ConfigError, KubeProxyError, Unsupported
from kubeproxy.kernel import chains
from kubeproxy.kernel.proc import processes
from kubeproxy.kernel.proc.processes import Listening, listening
from kubeproxy.kernel.route import local_addresses
from kubeproxy.meaning.firewall import Drop, Filter, Firewall, ForeignTranslation, PassingPacket
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.addresses import PROTOCOLS, Family, family_of, pack, place_text, unpack
from kubeproxy.model.answer import Packet
from kubeproxy.release import build
from kubeproxy.setup import host, modes

_OUTRANKED = ("hostnameOverride:", "logging.")  # fields that a flag may set even with a configuration file


class Checkup(Struct):
    """Findings in order of severity, and sentences about checks that could not run."""

    findings: list[Diagnosis]
    unknown: list[str]

    def look(self, what: str, findings: Callable[[], Iterable[Diagnosis]]) -> bool:
        """Add the findings of a check, or add the error of the check to `unknown`; return whether there are
        findings."""
        try:
            seen = list(findings())
        except (KubeProxyError, OSError) as error:
            self.unknown.append(f"{what}: {error}")
            return False
        self.findings += seen
        return bool(seen)


def checked(asked: Source, facts: Facts) -> CheckedNode:
    """Return the node that a proxy's facts describe, for the checks. Raises KubeProxyError."""
    config = facts.configuration()
    pid = asked.client.pid() if isinstance(asked, Running) else 0
    return CheckedNode(facts, pid, modes.named(facts.mode), config, asked.running, asked.control)


def look_at(node: CheckedNode) -> Checkup:
    """Run all checks."""
    report = Checkup([], [])
    if node.facts is not None:
        _look_at_proxy(report, node, node.facts)
    _look_at_way(report, node)
    report.look("what the mode needs", lambda: _able(node))
    report.look("sysctls", lambda: nodes.changed_sysctls(node))
    report.look("hairpin mode", lambda: nodes.unreflecting_bridges(node))
    report.look("reverse path filter", lambda: settings.filtered_ways(nodes.filtered_paths(node)))
    report.look("room in the kernel", lambda: nodes.full_rooms(node))
    report.findings = worst_first(report.findings)
    return report


def look_at_way(node: CheckedNode) -> Checkup:
    """Check the state of the proxy and other parts of the node, for a connection that the proxy forwards."""
    report = Checkup([], []) if node.direct else look_at_knowledge(node)
    _look_at_way(report, node)
    report.findings = worst_first(report.findings)
    return report


def look_at_knowledge(node: CheckedNode) -> Checkup:
    """Check whether the proxy's objects are outdated, and whether the kernel accepts the proxy's changes."""
    report = Checkup([], [])
    if node.facts is not None:
        facts, reach = node.facts, node.facts.reach
        standings = [one for one in facts.standings if node.concerns(one.family)]
        report.look("kernel", lambda: programming.standing(standings, facts.began))
        if reach is not None:
            report.look("API server", lambda: greeting.outdated(node, reach))
        if facts.node_deleted:
            report.findings.append(identity.deleted(facts.world.node_name))
    return report


def look_at_answer(node: CheckedNode) -> Checkup:
    """Check the state of the proxy, leftover rules and chains of other programs, for a connection that the proxy does
    not forward. If the node itself `answers`, report chains that may drop the connection's packets; otherwise report
    chains that certainly drop the packets in `passing`."""
    report = look_at_knowledge(node)
    if any(one.about == "api" for one in report.findings):
        report.look("conntrack", nodes.conntrack_without_room)
        report.findings = worst_first(report.findings)
    is_seen = _sees_rules(report, node)
    report.look("routes", lambda: routes.refused(node))
    report.look("forwarding", lambda: nodes.unforwarded(node) if node.refused else ())
    if is_seen:
        report.look("rules of other kube-proxies", lambda: rules_left(node, forwarded=False))
        report.look("translation by other programs", lambda: _translations(node, forwarded=False))
        if node.answers:
            report.look("firewalls", lambda: _chains(node, ends_here=True))
        elif node.passing:
            report.look(
                "firewalls",
                lambda: strangers.dropping(surely_dropped(node.others, node.passing, silently=node.refused)),
            )
    return report


def _sees_rules(report: Checkup, node: CheckedNode) -> bool:
    """Return whether the rules of this node can be read; add the error to `unknown` if not."""
    try:
        return bool(node.rules.sight)
    except (KubeProxyError, OSError) as error:
        report.unknown.append(f"rules of nf_tables and iptables: {error}")
        return False


def _look_at_way(report: Checkup, node: CheckedNode) -> None:
    is_seen = _sees_rules(report, node)
    report.look("rules of devices", lambda: strangers.unevaluated(chains.unevaluated()))
    if node.bridged:
        if is_seen:
            report.look("rules", lambda: _chains(node, ends_here=False))
        report.look("interfaces", lambda: nodes.interfaces_down(node))
        return
    if is_seen:
        report.look("rules", lambda: _rules(node))
    report.look("other proxies", lambda: _other_kube_proxies(node))
    if "forward" in node.hooks:
        report.look("forwarding", lambda: nodes.unforwarded(node))
        report.look("bridges", lambda: nodes.unfiltered_bridges(node))
    report.look("conntrack", nodes.full_conntrack)
    report.look("interfaces", lambda: nodes.interfaces_down(node))
    report.look("routes", lambda: routes.refused(node))
    report.look("way back", lambda: routes.misled(node))
    if node.packet is not None and is_seen:
        report.look("sources", lambda: routes.moved_sources(node))
        report.look("marks", lambda: routes.remarked(node))
    report.look("next hops", lambda: routes.unanswered(node))


def _look_at_proxy(report: Checkup, node: CheckedNode, facts: Facts) -> None:
    second, covered = node.second, set[str]()
    if facts.reach is not None:
        reach = facts.reach
        if report.look("API server", lambda: contact.reached(reach, facts.began)):
            covered |= {"api"} if facts.listed else facts.unready.keys()
        report.look("certificates", lambda: contact.expiring(reach.certificates, time.time()))
        _look_at_server(report, node, reach)
        if facts.node is not None or reach.nodes_listed:
            named = report.look("Node", lambda: whereabouts.registered(facts))
            named |= report.look("pod networks", lambda: whereabouts.networked(node, facts))
            covered |= facts.unready.keys() if named and facts.awaits else set()
    standings = [one for one in facts.standings if not (second and one.difference)]  # a second proxy causes differences
    if facts.writes and report.look("kernel", lambda: programming.standing(standings, facts.began, _bare(node))):
        covered.add("kernel")
    covered |= {"kernel"} if len(standings) < len(facts.standings) else set()
    covered |= {"sync"} if any(one.refusal for one in standings) else set()
    rest = {part: why for part, why in facts.unready.items() if part not in covered}
    report.look("readiness", lambda: programming.unready(rest))
    report.look("version", lambda: programming.versions(facts.version, build().name, facts.started, time.time()))
    if facts.config_file and node.running:
        report.look("configuration file", lambda: _configured(node, facts.config_file))
    if node.pid:
        report.look("ports", lambda: ports.own(node, {one.pid for one in second}))
        open_files = processes.descriptors(node.pid)
        if open_files is not None:
            report.look("descriptors", lambda: settings.opened(open_files, node.pid))
        else:
            report.unknown.append(f"descriptors: /proc/{node.pid}/fd cannot be read by this command")


def _bare(node: CheckedNode) -> set[Family]:
    """Return the families without rules of the node's mode in the kernel; none if the rules cannot be read."""
    with suppress(KubeProxyError, OSError):
        traces = {one.family for one in node.own_traces}
        return set() if None in traces else set(node.families) - traces
    return set()


def _look_at_server(report: Checkup, node: CheckedNode, reach: Reach) -> None:
    """Send a request to the API server. If the server does not answer, report this cause, and not its effects: missing
    lists and watches."""
    greeted = Checkup([], [])
    greeted.look("API server's certificate and clock", lambda: greeting.greeted(node, reach))
    if any(one.about == "api" and one.severity is Severity.BROKEN for one in greeted.findings):
        report.findings = [one for one in report.findings if one.about != "api"]
    report.findings += greeted.findings
    report.unknown += greeted.unknown


def _configured(node: CheckedNode, path: str) -> Iterator[Diagnosis]:
    try:
        config, _ = read_text(node.path(path).read_text(encoding="utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        yield from identity.configured(path, f"{path}: {'; '.join(str(error).splitlines())}", ())
    except OSError as error:
        yield from identity.configured(path, f"{path}: {error.strerror}", ())
    else:
        config = made_strict(config) if node.config.strict else config  # --strict also changes the values in the file
        lines = [line for line in differences(node.config, config) if not line.startswith(_OUTRANKED)]
        yield from identity.configured(path, "", lines)


def _able(node: CheckedNode) -> Iterator[Diagnosis]:
    bind = pack(node.config.bind_address) or b""
    primary = family_of(bind) if any(bind) else None
    look = partial(node.mode.operations().look, node.config)
    try:
        able = host.supported(node.families, primary, look)
    except Unsupported as error:
        yield from programming.able(str(error), Severity.BROKEN, "the proxy cannot start or restart")
    else:
        only = f"Services are served by {able.families[0].label} alone"
        yield from programming.able(able.lack, Severity.DEGRADED, only)


def _rules(node: CheckedNode) -> Iterator[Diagnosis]:
    if node.running and not node.direct:
        if node.facts is None or node.facts.writes:
            standings = node.facts.standings if node.facts is not None else ()
            refusals = {one.family: one.refusal for one in standings if one.refusal}
            # If no connection is checked, `standing` has already reported the families with refused changes.
            families = [one for one in node.families if one not in refusals or node.packet is not None]
            yield from programming.there(node.own_traces, families, node.mode.name, refusals)
    elif not node.running and not node.proxies:
        yield from programming.absent(chain.from_iterable(node.rules.traces.values()))
    if not node.second:
        yield from rules_left(node, forwarded=True)
    yield from _translations(node, forwarded=True)
    yield from _chains(node, ends_here=bool(node.mode.interface))


def _other_kube_proxies(node: CheckedNode) -> Iterator[Diagnosis]:
    packet, caught, second = node.packet, "", node.second
    if second and packet is not None and _traces_left(node, forwarded=True):
        caught = strangers.with_rules(place_text(packet.destination, packet.port))
    return strangers.second([(one, mode_of(one)) for one in second], node.mode.name, caught)


def _left_tables(node: CheckedNode) -> dict[str, str]:
    others = [mode for mode in modes.every() if mode.table and mode.name != node.mode.name]
    return {f"table {family} {mode.table}": mode.name for mode in others for family in chains.IP_FAMILIES}


_OF_IP = frozenset({"ip", "ip6", "inet"})
"""Families of tables. A bridged packet passes their chains only if the sysctls bridge-nf-call-... are 1."""


def _chains(node: CheckedNode, *, ends_here: bool) -> Iterator[Diagnosis]:
    """Check the chains of other programs, and tables that other kube-proxies left."""
    return strangers.of_tables_left(_foreign_chains(node, ends_here=ends_here), _left_tables(node))


def _foreign_chains(node: CheckedNode, *, ends_here: bool) -> Iterator[Diagnosis]:
    """Check the chains of other programs; `ends_here` means that connections end on this node."""
    filters: list[Filter] = []
    drops: list[Drop] = []
    bypassed = _OF_IP if node.bridged else frozenset()
    for firewall in node.others:
        if firewall.family in bypassed:
            continue
        if node.concerns(chains.IP_FAMILIES.get(firewall.family)):
            harmless = firewall.harmless((*node.passing, *node.possible)) if node.covered else frozenset()
            filters += [one for one in firewall.filters() if one.hook in node.hooks and one.chain not in harmless]
            drops += firewall.drops(node.passing)
    # If the node itself answers, no packet is translated, and only the chains in `drops` certainly stop the connection.
    # Chains of kube-proxy accept masqueraded packets.
    safe = [one for one in filters if one.marked and node.masqueraded and not _unreachable_behind(node, one)]
    filters = [one._replace(accepts=one.accepts or node.answers or one in safe) for one in filters]
    # Each chain has at most one finding. A finding says that the chain drops every packet, drops this connection, or
    # may drop this connection.
    closed = {(one.where, one.chain) for one in filters if one.closes and not one.accepts}
    drops = [one for one in drops if (one.where, one.chain) not in closed]
    drops = strangers.zones_of_one_direction(drops, node.end_of, node.passing)
    yield from strangers.dropping(drops, node.harm_of, nodes.filtering_bridges(node))
    if any(one.untracks for one in drops):
        yield from strangers.untracking(drops, node.harm_of, is_answered=_is_answered(node))
    sure = {(one.where, one.chain) for one in drops}
    filters = [one for one in filters if (one.where, one.chain) not in sure]
    direct = unpack(node.packet.destination) if node.packet is not None and node.direct else ""
    yield from strangers.firewalls(
        filters,
        node.mode.flows_end,
        ends_here,
        lambda one: node.harm(_unreachable_behind(node, one), again=True),
        direct,
    )


def _unreachable_behind(node: CheckedNode, closed: Filter) -> set[End | None]:
    requests = [each for each in node.passing if each.hook == closed.hook and each.purpose is CompiledFor.REQUEST]
    return set(map(node.end_of, requests)) - (node.masqueraded if closed.marked else frozenset())


def _is_answered(node: CheckedNode) -> bool:
    asked = node.packet
    if asked is None or asked.protocol == PROTOCOLS["SCTP"]:
        return False
    bound = listening(family_of(asked.destination), asked.protocol)
    return Listening(asked.destination, asked.port) in bound


def surely_dropped(
    others: Iterable[Firewall], passing: Collection[PassingPacket], *, silently: bool = False
) -> list[Drop]:
    """Return the chains of other programs that surely drop some of these packets; `silently` omits chains that reject
    packets, as this proxy's rules in iptables' filter table do. Raises KubeProxyError."""
    drops = (drop for one in others for drop in one.drops(passing, silently=silently))
    return [one for one in drops if not (one.unordered or one.untracks)]


def leftovers(mode: Mode, packet: Packet) -> list[Diagnosis]:
    """Return the findings on rules of other kube-proxies that match a connection. Raises KubeProxyError."""
    family = family_of(packet.destination)
    node = CheckedNode(None, 0, mode, KubeProxyConfiguration(), running=True, family=family, packet=packet)
    return list(rules_left(node, forwarded=True))


def _as_sent(packet: Packet) -> Packet:
    own = {one.ip for one in local_addresses(family_of(packet.destination))}
    return packet._replace(source=None) if packet.source in own else packet


def _traces_left(node: CheckedNode, *, forwarded: bool) -> list[Trace]:
    owns, packet = node.mode.operations().owns, node.packet
    left = [] if node.running else [*node.own_traces]
    others = [mode for mode in modes.every() if mode.name != node.mode.name]
    left += [trace for mode in others for trace in mode.traces(node.rules.sight, owns)]
    left = [one for one in left if node.concerns(one.family)]
    if packet is None:
        return left
    asked = _as_sent(packet)
    return [one for one in left if one.catches(asked, forwarded)]


def rules_left(node: CheckedNode, *, forwarded: bool) -> Iterator[Diagnosis]:
    """Check for leftover rules of other kube-proxies. For one connection, `forwarded` or not, check only the rules that
    match the connection."""
    packet = node.packet
    if node.running or not node.proxies:
        left = _traces_left(node, forwarded=forwarded)
        place = place_text(packet.destination, packet.port) if packet is not None else ""
        first = node.first if left and node.running else None
        found = [one for each in node.others for one in each.translations(first)] if first is not None else []
        ends = list(dict.fromkeys(end for one in found if one.unordered for end in one.ends))
        resets = "; this ends the connections of all Services of this node"
        resets *= node.running and node.mode.flows_end is FlowsEnd.PROXY
        for one in strangers.left_over(left, node.mode.name if node.running else "", place, ends):
            yield replace(one, fix=one.fix + resets)
    twice = list(strangers.both_variants(one for one in node.rules.sight.xtables if node.concerns(one.family)))
    if twice and packet is not None:
        asked = _as_sent(packet)
        there = sum(one.catches(asked, forwarded) for one in chain.from_iterable(node.rules.traces.values()))
        twice = twice if there > node.served else []
        if twice and node.first is not None:
            every, _ = all_translations(node)
            away = (end for one in every if one.where.startswith("ip") for end in one.ends if end not in node.targets)
            leads = tuple(dict.fromkeys(away))
            caught = strangers.with_rules(place_text(packet.destination, packet.port), leads)
            twice = [replace(one, what=one.what + caught, leads=leads) for one in twice]
            if forwarded and node.running:  # the proxy's rules match the connection, too
                twice = [replace(one, severity=Severity.UNKNOWN, why=strangers.EITHER_FIRST) for one in twice]
    yield from twice


def _translations(node: CheckedNode, *, forwarded: bool) -> Iterator[Diagnosis]:
    first = node.first
    if first is None:
        return
    if not forwarded or node.direct or node.answers:  # the proxy does not translate the connection
        first = first._replace(before=inf)
    found = [one for each in node.others for one in each.translations(first)]
    if any(one.unordered for one in found):  # the finding on leftovers covers chains of another kube-proxy
        left = {trace.program for trace in _traces_left(node, forwarded=forwarded)}
        found = [one for one in found if not (one.unordered and one.where.partition(" ")[0] in left)]
    yield from strangers.of_tables_left(strangers.translating(found, forwarded, node.served), _left_tables(node))


def translated_now(node: CheckedNode, until: str = strangers.UNTIL) -> Iterator[Diagnosis]:
    """Check for rules that translate a connection while no proxy runs, or while the proxy hangs: rules of other
    programs, and leftover rules. Findings on leftover rules begin with `until`, which is UNTIL or HANGING."""
    yield from _translations(node, forwarded=True)
    every, is_all = all_translations(node)
    foreign = {one for each in node.others for one in each.translations(_first_packet(node))}
    yield from strangers.translating_now([one for one in every if one not in foreign], node.targets, until)
    if node.targets and node.served and not every and is_all:
        what = f"{until}no rule in the kernel translates {place_text(*_first_packet(node).original)}"
        yield Diagnosis(Severity.UNKNOWN, strangers.PRESENT, what, "no endpoint gets the connection")


def all_translations(node: CheckedNode) -> tuple[list[ForeignTranslation], bool]:
    """Return the chains that may translate a connection, and whether the list is complete."""
    by_ipvs = any(mode.interface and node.rules.traces[mode.name] for mode in modes.every())
    found = [one for each in node.rules.every for one in each.translations(_first_packet(node))]
    return found, not by_ipvs and all(each.whole for each in node.rules.every)


def _first_packet(node: CheckedNode) -> PassingPacket:
    assert node.first is not None  # noqa: S101 - callers ask about a connection
    return node.first._replace(before=inf)


def listeners(node: CheckedNode) -> set[End]:
    """Return the addresses and ports to which the mode's own table translates the checked connection. An address of
    zeros stands for this node. Raises KubeProxyError."""
    own = [each for each in node.rules.every if each.where.endswith(f" {node.mode.table}")]
    return {end for each in own for one in each.translations(_first_packet(node)) for end in one.ends}
