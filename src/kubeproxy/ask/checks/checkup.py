"""Gathers the facts for the checks of ask/checks: from the running proxy, /proc and netlink. It writes nothing.

The checks are independent: one that cannot run is reported as unknown, and the others run all the same.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from kubeproxy.api.greeting import greet
from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.api.source import Reach
from kubeproxy.api.x509 import token_validity
from kubeproxy.ask.checks import contact, identity, programming, settings, strangers
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import Diagnosis, Severity, worst_first
from kubeproxy.ask.source import Running, Source
from kubeproxy.backends.mode import FlowsEnd, Mode, Sight
from kubeproxy.config.addresses import split_host_port
from kubeproxy.config.load import read_text
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.config.write import differences
from kubeproxy.errors import ConfigError, KubeProxyError, SourceError, Unsupported
from kubeproxy.kernel import chains
from kubeproxy.kernel.nftables.tables import HOOKS, INGRESS
from kubeproxy.kernel.proc import processes
from kubeproxy.kernel.proc.listening import listening
from kubeproxy.kernel.proc.port_holder import holder
from kubeproxy.kernel.proc.sysctl import NF_CONNTRACK_MAX, read_sysctl
from kubeproxy.kernel.route import links
from kubeproxy.kernel.route.addresses import SCOPE_UNIVERSE, Address, local_addresses, way_out
from kubeproxy.kernel.route.bridges import SYS, bridges
from kubeproxy.meaning.firewall import Drop, Filter, PassingPacket, firewalls
from kubeproxy.model.addresses import Family, Range, family_of, pack, place_text, unpack, within
from kubeproxy.model.answer import Packet
from kubeproxy.model.plan import FamilyGlobals
from kubeproxy.release import build
from kubeproxy.setup import host, modes

GREETING_PATIENCE = 1.0
"""Timeout in seconds for the API server: all checks of a healthy node take less than two."""

_ELSEWHERE = b"\xc6\x33\x64\x01"  # 198.51.100.1, of a network for documentation (RFC 5737)
_IP_FORWARD = settings.FORWARDING[Family.IPV4]
_ROUTES = Path("/proc/thread-self/net/route")
_OUTRANKED = ("hostnameOverride:", "logging.")
"""Fields for which a flag overrides the file."""


class CheckedNode(Struct, frozen=True):
    """The node to check: the proxy's facts, None if no proxy answers, and its pid in our namespace, 0 for none.

    `running`: the facts are those of a running proxy, not of a stand-in that only reads objects. `mode` and `config`
    are the running ones, or else the intended ones. `node_ports`: some Service has a NodePort. The other fields
    restrict the checks to one connection: its `family` (None for both), its first `packet`, the netfilter `hooks` that
    it passes, with its packets there (`passing`), the addresses of its client and endpoints without this node's
    (`ends`), whether an endpoint sees this node as the client (`masqueraded`), the interface on which the client and an
    endpoint meet that answers it without this node ('' for none: `meeting`), whether a Service of this proxy has the
    destination (`served`), whether the proxy's rules reject it (`refused`), and the hooks at which `passing` has all
    its packets (`covered`).
    """

    facts: Facts | None
    pid: int
    mode: Mode
    config: KubeProxyConfiguration
    running: bool = False
    node_ports: bool = False
    family: Family | None = None
    hooks: Collection[str] = (*HOOKS, INGRESS)
    packet: Packet | None = None
    passing: Sequence[PassingPacket] = ()
    masqueraded: bool = False
    ends: Collection[bytes] = ()
    meeting: str = ""
    served: bool = True
    refused: bool = False
    covered: Collection[str] = ()

    @property
    def families(self) -> tuple[Family, ...]:
        """The families to check: those that the proxy programs, or would program."""
        if self.family is not None:
            return (self.family,)
        return self.facts.world.families if self.facts is not None else host.families()

    @property
    def parts(self) -> list[tuple[Family, FamilyGlobals]]:
        """The globals of each family to check; empty if no proxy answers."""
        world = self.facts.world if self.facts is not None else None
        each = [(family, world.of(family)) for family in self.families] if world is not None else []
        return [(family, part) for family, part in each if part is not None]

    def concerns(self, family: Family | None) -> bool:
        """Return whether a family is to be checked; None stands for both."""
        return self.family is None or family is None or family is self.family

    def path(self, text: str) -> Path:
        """Return the path of a file of the proxy in our mount namespace, which may be another one."""
        seen = Path(f"/proc/{self.pid}/root", text.lstrip("/"))
        return seen if self.pid and text.startswith("/") and seen.exists() else Path(text)


class Checkup(Struct):
    """The findings, worst first, and the checks that could not run, as sentences."""

    findings: list[Diagnosis]
    unknown: list[str]

    def look(self, what: str, findings: Callable[[], Iterable[Diagnosis]]) -> bool:
        """Add the findings of a check, or its error to `unknown`; return whether there are findings."""
        try:
            seen = list(findings())
        except (KubeProxyError, OSError) as error:
            self.unknown.append(f"{what}: {error}")
            return False
        self.findings += seen
        return bool(seen)


def checked(asked: Source) -> CheckedNode:
    """Return the node of a proxy, for the checks. Raises KubeProxyError."""
    facts = asked.facts()
    config = facts.configuration()
    pid = asked.client.pid() if isinstance(asked, Running) else 0
    return CheckedNode(facts, pid, modes.named(facts.mode), config, asked.running)


def look_at(node: CheckedNode) -> Checkup:
    """Run all checks."""
    report = Checkup([], [])
    if node.facts is not None:
        _look_at_proxy(report, node, node.facts)
    _look_at_way(report, node)
    report.look("what the mode needs", lambda: _able(node))
    report.look("sysctls", lambda: _sysctls(node))
    report.look("reverse path filter", lambda: settings.filtered_ways(_ways(node)))
    report.look("room in the kernel", lambda: _rooms(node))
    report.findings = worst_first(report.findings)
    return report


def look_at_way(node: CheckedNode) -> Checkup:
    """Run the checks for a connection that the proxy forwards: other parts of the node, and the state of the proxy."""
    report = look_at_knowledge(node)
    _look_at_way(report, node)
    report.findings = worst_first(report.findings)
    return report


def look_at_knowledge(node: CheckedNode) -> Checkup:
    """Check whether the proxy's objects are outdated, and whether the kernel accepts its changes."""
    report = Checkup([], [])
    if node.facts is not None:
        facts, reach = node.facts, node.facts.reach
        standings = [one for one in facts.standings if node.concerns(one.family)]
        report.look("kernel", lambda: programming.standing(standings))
        if reach is not None:
            report.look("API server", lambda: contact.outdated(reach))
    return report


def look_at_answer(node: CheckedNode) -> Checkup:
    """Run the checks for a connection that the proxy does not forward: the state of the proxy, leftover rules, and
    chains of other programs that surely drop its packets (`passing`) before its answer.
    """
    report = look_at_knowledge(node)

    def left() -> Iterator[Diagnosis]:
        known = chains.chains()
        return _left(node, Sight(known, chains.iptables_chains(known)))

    report.look("rules of other kube-proxies", left)
    if node.passing:
        report.look("firewalls", lambda: strangers.dropping(surely_dropped(node.passing, silently=node.refused)))
    return report


def _look_at_way(report: Checkup, node: CheckedNode) -> None:
    try:
        known = chains.chains()
        sight = Sight(known, chains.iptables_chains(known))
    except (KubeProxyError, OSError) as error:
        report.unknown.append(f"rules of nf_tables and iptables: {error}")
    else:
        report.look("rules", lambda: _rules(node, sight))
    report.look("other proxies", lambda: _other_proxies(node))
    if "forward" in node.hooks:
        report.look("forwarding", lambda: settings.forwarding(_forwarding(node), node.mode.flows_end))
        report.look("forwarding of interfaces", lambda: _entrances(node))
        report.look("bridges", lambda: _bridges(node))
    report.look("conntrack", _conntrack)
    report.look("interfaces", lambda: _links(node))


def _look_at_proxy(report: Checkup, node: CheckedNode, facts: Facts) -> None:
    covered: set[str] = set()
    if facts.reach is not None:
        reach = facts.reach
        if report.look("API server", lambda: contact.reached(reach)):
            covered |= {"api"} if facts.listed else facts.unready.keys()
        report.look("certificates", lambda: contact.expiring(reach.certificates, time.time()))
        report.look("API server's certificate and clock", lambda: _greeted(node, reach))
        if facts.node is not None or any(one.resource == "nodes" and one.synced for one in reach.watched):
            named = report.look("Node", lambda: _registered(node, facts))
            covered |= facts.unready.keys() if named and facts.awaits else set()
    if facts.listed and not facts.awaits and report.look("kernel", lambda: programming.standing(facts.standings)):
        covered.add("kernel")
    rest = {part: why for part, why in facts.unready.items() if part not in covered}
    report.look("readiness", lambda: programming.unready(rest))
    report.look("version", lambda: programming.versions(facts.version, build().name, facts.started, time.time()))
    if facts.config_file:
        report.look("configuration file", lambda: _configured(node, facts.config_file))
    if node.pid:
        report.look("ports", lambda: identity.listening(list(_ports(node)), node.pid))
        open_files = processes.descriptors(node.pid)
        if open_files is not None:
            report.look("descriptors", lambda: settings.opened(open_files, node.pid))
        else:
            report.unknown.append(f"descriptors: /proc/{node.pid}/fd cannot be read from here")


# -- the API server ----------------------------------------------------------------------------------------------------


def _greeted(node: CheckedNode, reach: Reach) -> Iterator[Diagnosis]:
    assert node.facts is not None  # noqa: S101 - callers have a proxy
    path = node.config.client_connection.kubeconfig
    cluster = load_cluster(str(node.path(path)) if path else "", node.facts.master)
    for token in cluster.credentials.files:
        validity = token_validity(Path(token).read_text(encoding="utf-8"))
        if validity is not None:
            yield from contact.expiring({"token": validity}, time.time())
    if reach.trouble or cluster.proxy is not None or cluster.credentials.program:
        return  # already reported, or a proxy or plugin is in between
    try:
        greeting = greet(cluster, GREETING_PATIENCE)
    except SourceError as error:
        yield from contact.reached(Reach(server=reach.server, trouble=str(error), watched=(), certificates={}))
        return
    if greeting.certificate is not None:
        yield from contact.expiring({"server": greeting.certificate}, time.time())
    if greeting.ahead is not None:
        yield from contact.agreeing(greeting.ahead)


def _registered(node: CheckedNode, facts: Facts) -> Iterator[Diagnosis]:
    yield from identity.registered(
        facts.node, facts.world.node_name, socket.gethostname().lower(), waits=bool(facts.awaits)
    )
    if facts.node is not None:
        local = host.packed_local_addresses(tuple(Family), modes.interfaces())
        yield from identity.addressed(facts.node, {address for each in local.values() for address in each})
        yield from identity.networked(facts.node, node.config.local_mode)


# -- the proxy ---------------------------------------------------------------------------------------------------------


def _configured(node: CheckedNode, path: str) -> Iterator[Diagnosis]:
    try:
        config, _ = read_text(node.path(path).read_text(encoding="utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        yield from identity.configured(path, f"{path}: {'; '.join(str(error).splitlines())}", ())
    except OSError as error:
        yield from identity.configured(path, f"{path}: {error.strerror}", ())
    else:
        lines = [line for line in differences(node.config, config) if not line.startswith(_OUTRANKED)]
        yield from identity.configured(path, "", lines)


def _ports(node: CheckedNode) -> Iterator[identity.ListeningPort]:
    listened = [one for family in Family for one in listening(family, socket.IPPROTO_TCP)]
    fields = (
        ("healthzBindAddress", node.config.healthz_bind_address),
        ("metricsBindAddress", node.config.metrics_bind_address),
    )
    for field, address in fields:
        place = split_host_port(address) if address else None
        if place is not None:
            number = int(place[1])
            bound = any(one.port == number for one in listened)
            who = holder(number, "kube-proxy") if bound else None
            yield identity.ListeningPort(field, address, bound, (who.pid, who.command) if who is not None else None)


def _able(node: CheckedNode) -> Iterator[Diagnosis]:
    bind = pack(node.config.bind_address) or b""
    primary = family_of(bind) if any(bind) else None
    look = partial(node.mode.operations().look, node.config)
    try:
        able = host.supported(node.families, primary, look)
    except Unsupported as error:
        yield from programming.able(str(error), Severity.BROKEN, "the proxy does not start, or not again")
    else:
        only = f"Services are served by {able.families[0].label} alone"
        yield from programming.able(able.lack, Severity.DEGRADED, only)


# -- other programs ----------------------------------------------------------------------------------------------------


def _rules(node: CheckedNode, sight: Sight) -> Iterator[Diagnosis]:
    if node.running:
        traces = node.mode.traces(sight)
        if node.facts is None or (node.facts.listed and not node.facts.awaits):  # else nothing is written yet
            yield from programming.there(traces, node.families, node.mode.name)
    elif node.facts is not None and not processes.proxies():
        yield from programming.absent(trace for mode in modes.every() for trace in mode.traces(sight))
    yield from _left(node, sight)
    filters: list[Filter] = []
    drops: list[Drop] = []
    for firewall in firewalls(sight.nf_tables, _our_tables()):
        if node.concerns(chains.IP_FAMILIES.get(firewall.family)):
            harmless = firewall.harmless(node.passing) if node.covered else frozenset()
            filters += [
                one
                for one in firewall.filters()
                if one.hook in node.hooks and not (one.hook in node.covered and one.chain in harmless)
            ]
            drops += firewall.drops(node.passing)
    if node.masqueraded:
        filters = [one._replace(accepts=one.accepts or one.marked) for one in filters]
    # Each chain has at most one finding: it drops everything, it drops this connection, or it may drop it.
    closed = {(one.where, one.chain) for one in filters if one.closes and not one.accepts}
    drops = [one for one in drops if (one.where, one.chain) not in closed]
    yield from strangers.dropping(drops)
    sure = {(one.where, one.chain) for one in drops}
    filters = [one for one in filters if (one.where, one.chain) not in sure]
    yield from strangers.firewalls(filters, node.mode.flows_end, bool(node.mode.interface))


def _our_tables() -> frozenset[str]:
    return frozenset(mode.table for mode in modes.every() if mode.table)


def surely_dropped(passing: Collection[PassingPacket], *, silently: bool = False) -> list[Drop]:
    """Return the chains of other programs that surely drop some of these packets. Raises KubeProxyError.

    `silently`: without those that reject them, as rules of ours in the filter table of iptables do.
    """
    found = firewalls(chains.chains(), _our_tables())
    return [drop for one in found for drop in one.drops(passing, silently=silently)]


def _left(node: CheckedNode, sight: Sight) -> Iterator[Diagnosis]:
    """Check for leftovers of other kube-proxies; for one connection, for leftover rules that match it."""
    owns, packet = node.mode.operations().owns, node.packet
    left = [] if node.running else node.mode.traces(sight)
    left += [trace for mode in modes.every() if mode.name != node.mode.name for trace in mode.traces(sight, owns)]
    if node.running or not processes.proxies():
        left = [one for one in left if node.concerns(one.family) and (packet is None or one.catches(packet))]
        place = place_text(packet.destination, packet.port) if packet is not None else ""
        yield from strangers.left_over(left, node.mode.name if node.running else "", place)
    twice = list(strangers.both_variants(chain for chain in sight.xtables if node.concerns(chain.family)))
    if twice and packet is not None:
        there = [trace for mode in modes.every() for trace in mode.traces(sight) if trace.catches(packet)]
        twice = twice if len(there) > node.served else []
    yield from twice


def _other_proxies(node: CheckedNode) -> Iterator[Diagnosis]:
    if node.running:
        others = [process for process in processes.proxies() if process.pid != node.pid]
        yield from strangers.second([(process, _mode_of(process)) for process in others], node.mode.name)


def _mode_of(process: processes.ProxyProcess) -> str:
    """Return the mode of another kube-proxy by its arguments and its configuration file, '' if unknown."""
    path = processes.value_of(process.arguments, "config")
    if not path:
        return processes.value_of(process.arguments, "proxy-mode")
    try:
        config, _ = read_text(Path(f"/proc/{process.pid}/root", path.lstrip("/")).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        return ""
    return config.active_mode if process.ours else config.mode


# -- the node ----------------------------------------------------------------------------------------------------------


def _forwarding(node: CheckedNode) -> list[settings.Setting]:
    keys = [settings.FORWARDING[family] for family in node.families]
    return [settings.Setting(key, 1, _number(key)) for key in keys]


def _entrances(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check for interfaces that do not forward: those of one connection, or all.

    For IPv4 the sysctl of the interface of arrival decides, for IPv6 only the one for all interfaces
    (ip_route_input_slow in net/ipv4/route.c, ip6_forward in net/ipv6/ip6_output.c).
    """
    if node.mode.flows_end is FlowsEnd.PROXY or Family.IPV4 not in node.families or not _number(_IP_FORWARD):
        return
    inner = modes.interfaces() | {"lo"}
    closed = [
        name
        for _, name in socket.if_nameindex()
        if name not in inner
        and not (SYS / name / "master").exists()  # packets that arrive at a port of a bridge arrive by the bridge
        and _number(f"net/ipv4/conf/{name}/forwarding") == 0
    ]
    if closed and node.passing:
        # A mode with an interface for Services receives requests as local packets: only answers are forwarded.
        ways = {one.interfaces[0] for one in node.passing if one.hook == "forward"}
        yield from settings.entrances([name for name in closed if name in ways], Severity.BROKEN)
        return
    served = _served(node) if closed else frozenset()
    yield from settings.entrances([name for name in closed if name in served], Severity.BROKEN)
    yield from settings.entrances([name for name in closed if name not in served], Severity.NOTE)


def _served(node: CheckedNode) -> frozenset[str]:
    """Return interfaces with an address of the Node or of pods, or with a route (to a pod) but no address."""
    addresses = local_addresses(Family.IPV4)
    parts = [part for family, part in node.parts if family is Family.IPV4]
    known = {one.interface for one in addresses for part in parts if one.ip in part.node_ips or _is_pods(part, one)}
    routed = {line.split()[0] for line in _ROUTES.read_text(encoding="utf-8").splitlines()[1:]}
    return frozenset(known | routed - {one.interface for one in addresses})


def _links(node: CheckedNode) -> Iterator[Diagnosis]:
    roles: dict[str, str] = {}
    networks: dict[str, list[Range]] = {}
    uplinks = set()
    for family, part in node.parts:
        for address in local_addresses(family):
            networks.setdefault(address.interface, []).append(address.network)
            if address.ip in part.node_ips:
                uplinks.add(address.interface)
                roles[address.interface] = f"the Node's address {unpack(address.ip)}"
            elif _is_pods(part, address):
                roles.setdefault(address.interface, f"the address {unpack(address.ip)} of the pod network")
    if node.packet is not None:  # interfaces of its client and endpoints, else the uplinks
        near = ({name for name, held in networks.items() if within(end, held)} for end in node.ends)
        used = {name for each in near for name in each or uplinks}
        roles = {name: role for name, role in roles.items() if name in used}
    yield from settings.down(links.interfaces(), roles, {bridge.name for bridge in bridges()})


def _sysctls(node: CheckedNode) -> Iterator[Diagnosis]:
    if not node.running:
        return  # without a proxy, no sysctl was set
    wanted = [*host.conntrack_sysctls(node.config.conntrack), *node.mode.operations().sysctls(node.config)]
    known = {setting.key for setting in _forwarding(node)}
    made = [
        settings.Setting(key, value, _number(key))
        for key, value in wanted
        if key not in known and (node.node_ports or not key.endswith("route_localnet"))
    ]
    yield from settings.changed_back(made)


def _number(key: str) -> int | None:
    try:
        return int(read_sysctl(key))
    except (KubeProxyError, ValueError):
        return None


def _conntrack() -> Iterator[Diagnosis]:
    count, limit = int(read_sysctl("net/netfilter/nf_conntrack_count")), int(read_sysctl(NF_CONNTRACK_MAX))
    return settings.filled(settings.tracked(count, limit), "conntrack")


def _rooms(node: CheckedNode) -> Iterator[Diagnosis]:
    for room in node.mode.operations().rooms(node.families):
        yield from settings.filled(room, "room")


def _ways(node: CheckedNode) -> Iterator[settings.InterfacePath]:
    """Yield the interfaces with a strict reverse path filter by which clients of other networks may arrive."""
    part = node.facts.world.ipv4 if node.facts is not None else None
    inner = modes.interfaces() | {bridge.name for bridge in bridges()} | {"lo"}
    everywhere = _number("net/ipv4/conf/all/rp_filter") or 0
    for address in local_addresses(Family.IPV4):
        if part is None or address.interface in inner or address.scope != SCOPE_UNIVERSE or _is_pods(part, address):
            continue
        if part.nodeport_ips is not None and address.ip not in part.nodeport_ips:
            continue
        filtering = max(everywhere, _number(f"net/ipv4/conf/{address.interface}/rp_filter") or 0)
        if filtering == settings.STRICT:
            out = way_out(address.ip, _ELSEWHERE)
            is_node = address.ip in part.node_ips
            yield settings.InterfacePath(address.interface, unpack(address.ip), filtering, out, is_node)


def _bridges(node: CheckedNode) -> Iterator[Diagnosis]:
    of_pods = [
        (address.interface, family)
        for family, part in node.parts
        for address in local_addresses(family)
        if _is_pods(part, address) and (node.packet is None or address.interface == node.meeting)
    ]
    return settings.bridged(bridges(), of_pods, node.mode.flows_end)


def _is_pods(part: FamilyGlobals, address: Address) -> bool:
    return part.detector.holds(address.ip, address.interface)
