"""The checked node, and the findings about its sysctls, interfaces, bridges and tables."""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from msgspec import Struct, field

from kubeproxy.ask.checks import settings
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import MISLEADS, STOPS, Diagnosis, Effect, End, Harm, Severity
from kubeproxy.ask.flows import fullness
from kubeproxy.ask.flows.users import ServedPorts
from kubeproxy.backends.leftovers import is_ours
from kubeproxy.backends.mode import FlowsEnd, Mode, Sight, Trace
from kubeproxy.config.load import read_text
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.control.listener import server
from kubeproxy.errors import ConfigError, KubeProxyError
from kubeproxy.kernel import chains, route
from kubeproxy.kernel.conntrack.tracked import Level, entries
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink, NetlinkError
from kubeproxy.kernel.nftables.tables import HOOKS, INGRESS
from kubeproxy.kernel.proc import processes
from kubeproxy.kernel.proc.sysctl import NF_CONNTRACK_MAX, read_sysctl
from kubeproxy.kernel.route import SCOPE_UNIVERSE, SYS, Address, bridges, hairpin_ports, local_addresses, way_out
from kubeproxy.kernel.routing_policy import RoutedPacket
from kubeproxy.meaning.firewall import Firewall, PassingPacket
from kubeproxy.meaning.found import firewalls
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.addresses import Family, Range, family_of, unpack, within
from kubeproxy.model.answer import Packet
from kubeproxy.model.plan import FamilyGlobals
from kubeproxy.setup import host, modes

_ELSEWHERE = b"\xc6\x33\x64\x01"  # 198.51.100.1, an address reserved for documentation (RFC 5737)
_ROUTES = Path("/proc/thread-self/net/route")
_STRICT = 1  # of rp_filter
_ETHERNET = "1"  # ARPHRD_ETHER
_WIRED = "DEVTYPE=vlan", "DEVTYPE=bond", "DEVTYPE=bridge"


class NodeRules:
    """The chains of a node, the rules of kube-proxies and of other programs, and the running kube-proxies. Each of
    these is read once per answer. Raises KubeProxyError."""

    _others: list[Firewall] | None = None

    @cached_property
    def nf_tables(self) -> list[chains.Chain]:
        """The chains of nf_tables."""
        return chains.chains()

    @cached_property
    def sight(self) -> Sight:
        """The chains of nf_tables and iptables."""
        return Sight(self.nf_tables, chains.iptables_chains(self.nf_tables))

    @cached_property
    def traces(self) -> dict[str, list[Trace]]:
        """The rules of each mode, by the mode's name."""
        return {mode.name: mode.traces(self.sight) for mode in modes.every()}

    @cached_property
    def processes(self) -> list[processes.ProxyProcess]:
        """The kube-proxies among the processes in /proc."""
        return processes.proxies()

    @cached_property
    def every(self) -> list[Firewall]:
        """The tables of all programs, including kube-proxies."""
        return firewalls(self.nf_tables, frozenset())

    def others(self, node: CheckedNode) -> list[Firewall]:
        """Return the tables of other programs, including other kube-proxies if the node's proxy runs."""
        if self._others is None:
            own = [node.mode] if node.running else modes.every()
            owns = node.mode.operations().owns
            self._others = firewalls(
                self.nf_tables,
                frozenset(mode.table for mode in own if mode.table),
                lambda chain: is_ours(chain) and (not node.running or owns("nat", chain)),
            )
        return self._others


class CheckedNode(Struct, frozen=True):
    """The node to check. The fields from `family` on, except `rules`, restrict the checks to one connection."""

    facts: Facts | None  # None if no proxy answers
    pid: int  # of the proxy, in this PID namespace; 0 without a proxy
    mode: Mode  # the running mode, or else the intended mode
    config: KubeProxyConfiguration  # the running configuration, or else the intended one
    running: bool = False  # the facts come from a running proxy
    control: str = ""  # the control socket of a proxy that may run without being queried; '' for none
    node_ports: bool = False  # a Service has a NodePort
    family: Family | None = None  # None for both
    hooks: Collection[str] = (*HOOKS, INGRESS)  # the netfilter hooks that the connection passes
    packet: Packet | None = None  # of the connection
    targets: frozenset[End] = frozenset()  # endpoints of the connection
    first: PassingPacket | None = None  # the first packet before any program translates it
    passing: Sequence[PassingPacket] = ()  # packets of the connection at these hooks
    possible: Sequence[PassingPacket] = ()  # possible further packets of the connection at these hooks
    masqueraded: frozenset[End] = frozenset()  # the endpoints that see this node's address as the client's address
    ends: Collection[bytes] = ()  # addresses of the client and the endpoints, except this node's
    served: bool = True  # the destination belongs to a Service of this proxy
    refused: bool = False  # the proxy's rules reject the connection
    answers: bool = False  # the proxy itself answers
    picked_again: frozenset[End] = frozenset()  # if a first packet to one of them is lost, the next picks again
    covered: bool = False  # `passing` and `possible` contain all packets of the connection
    bridge: str = ""  # the bridge that delivers packets from pod to pod, so that the kernel does not route them
    routed: Collection[RoutedPacket] = ()  # packets of the connection at the kernel's routing decisions
    rules: NodeRules = field(default_factory=NodeRules)

    @property
    def families(self) -> tuple[Family, ...]:
        """The families to check: the connection's family, or all that the proxy programs or would program."""
        if self.family is not None:
            return (self.family,)
        return self.facts.world.families if self.facts is not None else host.families()

    @property
    def parts(self) -> list[tuple[Family, FamilyGlobals]]:
        """The globals of each family to check; none if no proxy answers."""
        known = self.facts.world.parts if self.facts is not None else {}
        return [(family, known[family]) for family in self.families if family in known]

    @property
    def direct(self) -> bool:
        """Whether the destination is an endpoint's own address, which no rule of the proxy matches."""
        return bool(self.targets) and not self.served

    @property
    def bridged(self) -> bool:
        """Whether a bridge delivers the packets from pod to pod, bypassing IP rules."""
        return any(one.name == self.bridge and self.family not in one.filtered for one in bridges())

    @property
    def proxies(self) -> list[processes.ProxyProcess]:
        """The kube-proxies that run on this node: processes in /proc, and the process that listens on the control
        socket, if it may be in this network namespace. /proc does not show a proxy in another PID namespace, or with
        another name in its command line."""
        found, pid = self.rules.processes, None
        with suppress(OSError):
            pid = server(self.control) if self.control else None
        is_known = pid is None or pid in {process.pid for process in found} or processes.is_elsewhere(pid)
        return found if is_known else [*found, processes.ProxyProcess(pid or 0, (), ours=True)]

    @property
    def second(self) -> list[processes.ProxyProcess]:
        """The other kube-proxies that run on this node; none if no proxy answered."""
        return [one for one in (self.rules.processes if self.running else ()) if one.pid != self.pid]

    @property
    def own_traces(self) -> list[Trace]:
        """The rules of the node's mode in the kernel. Raises KubeProxyError."""
        return self.rules.traces[self.mode.name]

    @property
    def others(self) -> list[Firewall]:
        """The tables of other programs, as in NodeRules. Raises KubeProxyError."""
        return self.rules.others(self)

    @property
    def mark(self) -> int:
        """The mark of packets that are masqueraded."""
        return 1 << self.config.masquerades.masquerade_bit

    def harm(self, lost: Iterable[End | None], *, again: bool = False) -> Harm:
        """Return the harm to the checked connection if packets of these endpoints are lost. None stands for packets
        before an endpoint is picked. `again` means that only requests are lost, and that clients, which get no refusal,
        send them again."""
        ends = frozenset(lost)
        if self.packet is None or None in ends or ends >= self.targets > frozenset():
            return STOPS
        known = frozenset(end for end in ends if end is not None)
        effect = Effect.DELAYS if again and known <= self.picked_again else Effect.LOSES
        return Harm(effect, known) if known else MISLEADS

    def harm_of(self, lost: Collection[PassingPacket], *, again: bool = False) -> Harm:
        """Return the harm if these packets are lost; `again` means that the senders get no refusal and repeat the
        packets."""
        requested = {self.end_of(each) for each in lost if each.purpose is CompiledFor.REQUEST}
        ends = set(map(self.end_of, lost))
        return self.harm(ends, again=again and ends == requested)

    def end_of(self, packet: PassingPacket) -> End | None:
        """Return the endpoint that is source or destination of a packet, or None before an endpoint is picked."""
        is_answer = packet.purpose is CompiledFor.ANSWER and packet.source is not None
        end = (packet.source if is_answer else packet.destination) or b"", packet.port
        return end if end in self.targets else None

    def ends_at(self, address: bytes | None) -> set[End]:
        """Return the endpoints with this address."""
        return {end for end in self.targets if end[0] == address}

    def concerns(self, family: Family | None) -> bool:
        """Return whether a family must be checked. The family None stands for both families."""
        return self.family is None or family is None or family is self.family

    def path(self, text: str) -> Path:
        """Return the path under which this program can read a file of the proxy, even if the proxy has another mount
        namespace."""
        seen = Path(f"/proc/{self.pid}/root", text.lstrip("/"))
        return seen if self.pid and text.startswith("/") and seen.exists() else Path(text)


def mode_of(process: processes.ProxyProcess) -> str:
    """Return the mode of a kube-proxy by its arguments or its configuration file; '' if unknown."""
    path = processes.value_of(process.arguments, "config")
    if not path:
        return processes.value_of(process.arguments, "proxy-mode")
    try:
        config, _ = read_text(Path(f"/proc/{process.pid}/root", path.lstrip("/")).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        return ""
    return config.active_mode if process.ours else config.mode


def _entrances() -> set[str]:
    """Return the interfaces on which packets arrive; a bridge stands for its ports."""
    names = {name for _, name in socket.if_nameindex()} - modes.interfaces() - {"lo"}
    return {name for name in names if not (SYS / name / "master").exists()}


def unforwarded(node: CheckedNode) -> Iterator[Diagnosis]:
    """Report the interfaces from which the kernel does not forward the packets of the checked connection. If no
    connection is checked, report the interfaces from which it forwards nothing. IPv4 depends on the sysctl of the
    incoming interface (ip_route_input_slow in net/ipv4/route.c). IPv6 depends on the sysctl of all interfaces, or on
    force_forwarding of the incoming interface (ip6_forward in net/ipv6/ip6_output.c of Linux 6.17)."""
    if node.mode.flows_end is FlowsEnd.PROXY and not node.direct:
        return
    names = _entrances()
    for family in node.families:
        everywhere = number(settings.FORWARDING[family]) == 0
        closed = sorted(name for name in names if _is_closed(family, name, everywhere=everywhere))
        if node.packet is not None:
            every = {bridge.name for bridge in bridges()}
            filtered = filtering_bridges(node) if family is Family.IPV6 else ()
            forwarded = [each for each in node.passing if each.hook == "forward"]
            passing = [each for each in forwarded if not _stays(each, filtered if each.translated else every)]
            lost = [each for each in passing if each.interfaces[0] in closed]
            harm = node.harm_of(lost, again=True)
            if lost and everywhere and len(lost) == len(passing):
                yield settings.forwarding(family, harm)
            elif lost:
                ways = {each.interfaces[0] for each in lost}
                yield from settings.entrances(family, [name for name in closed if name in ways], Severity.BROKEN, harm)
        elif everywhere and len(closed) == len(names):
            yield settings.forwarding(family)
        else:
            served = _served(node, family) if closed else frozenset()
            yield from settings.entrances(family, [name for name in closed if name in served], Severity.BROKEN)
            yield from settings.entrances(family, [name for name in closed if name not in served], Severity.NOTE)


def _is_closed(family: Family, name: str, *, everywhere: bool) -> bool:
    """Return whether packets that arrive on an interface are not forwarded; `everywhere` means that the family's sysctl
    in settings.FORWARDING is 0."""
    if family is Family.IPV6 and not everywhere:
        return False
    value = number(settings.FORWARDING_OF[family].format(name))
    return value == 0 or (value is None and everywhere)


def _stays(packet: PassingPacket, among: Collection[str]) -> bool:
    """Return whether a packet does not leave one of these bridges. IP does not forward an untranslated packet between
    ports of a bridge, nor, in IPv6, a packet that is translated on the bridge (br_nf_pre_routing_finish_ipv6 in
    net/bridge/br_netfilter_ipv6.c)."""
    return packet.interfaces[0] == packet.interfaces[1] and packet.interfaces[0] in among


def _served(node: CheckedNode, family: Family) -> frozenset[str]:
    """Return the interfaces with an address of the Node or of pods, and interfaces without an address but with an IPv4
    route (to a pod)."""
    addresses = local_addresses(family)
    parts = [part for each, part in node.parts if each is family]
    known = {one.interface for one in addresses for part in parts if one.ip in part.node_ips or _is_pods(part, one)}
    routed = {name for _, _, name in _ipv4_routes()} if family is Family.IPV4 else set()
    return frozenset(known | routed - {one.interface for one in addresses})


def interfaces_down(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check for interfaces that are down although the Node, pods or the connection need them."""
    roles: dict[str, str] = {}
    harms: dict[str, Harm] = {}
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
    if node.packet is not None:  # only interfaces in the network of client or endpoint; without such a network, uplinks
        lost: dict[str, set[End | None]] = {}
        for end in node.ends:
            near = {name for name, held in networks.items() if within(end, held)}
            for name in near or uplinks:  # with several candidates, the packets' interface is unknown
                ends: set[End | None] = {None} if end == node.packet.source else {*node.ends_at(end)}
                lost.setdefault(name, set()).update(ends if len(near or uplinks) == 1 else ())
        roles = {name: role for name, role in roles.items() if name in lost}
        harms = {name: node.harm(ends) for name, ends in lost.items()}
    yield from settings.down(route.interfaces(), roles, {bridge.name for bridge in bridges()}, harms)


def changed_sysctls(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check for sysctls that the running proxy set and another program changed."""
    if not node.running:
        return  # no proxy runs, so no sysctl was set
    wanted = [*host.conntrack_sysctls(node.config.conntrack), *node.mode.operations().sysctls(node.config)]
    made = [
        settings.Setting(key, value, number(key))
        for key, value in wanted
        if key not in settings.FORWARDING.values() and (node.node_ports or not key.endswith("route_localnet"))
    ]
    yield from settings.changed_back(made)


def number(key: str) -> int | None:
    """Return a sysctl's value, or None if it cannot be read."""
    try:
        return int(read_sysctl(key))
    except (KubeProxyError, ValueError):
        return None


def full_conntrack() -> Iterator[Diagnosis]:
    """Check whether the connection table is nearly full."""
    level = Level(int(read_sysctl("net/netfilter/nf_conntrack_count")), int(read_sysctl(NF_CONNTRACK_MAX)))
    found = fullness.Fillers(ServedPorts((), {}))
    if level.entries >= settings.FILLING * level.limit > 0:  # reading takes 5 us per entry
        with suppress(NetlinkError), Netlink.open(NETLINK_NETFILTER) as link:
            for family in Family:
                for entry in entries(link, family):
                    found.add(entry)
    room = settings.tracked(*level, fullness.fixes(level, found))
    return settings.filled(room, "conntrack")


def conntrack_without_room() -> list[Diagnosis]:
    """Return the finding of a full connection table, which makes a server unreachable; [] if the table has room or
    cannot be read."""
    with suppress(KubeProxyError):
        return [one for one in full_conntrack() if one.severity is Severity.BROKEN]
    return []


def full_rooms(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check whether the mode's tables with a limit are nearly full."""
    for room in node.mode.operations().rooms(node.families):
        yield from settings.filled(room, "room")


def filtered_paths(node: CheckedNode) -> Iterator[settings.InterfacePath]:
    """Yield the interfaces that have a strict reverse path filter, and that may receive packets of clients from other
    networks."""
    part = node.facts.world.ipv4 if node.facts is not None else None
    if part is None:
        return
    inner = {bridge.name for bridge in bridges()} | {"lo"}
    everywhere = number("net/ipv4/conf/all/rp_filter") or 0
    own = [one for one in local_addresses(Family.IPV4) if one.interface not in modes.interfaces()]
    paths = []
    for address in own:
        if address.interface in inner or address.scope != SCOPE_UNIVERSE or _is_pods(part, address):
            continue
        if part.nodeport_ips is not None and address.ip not in part.nodeport_ips:
            continue
        if max(everywhere, number(f"net/ipv4/conf/{address.interface}/rp_filter") or 0) == _STRICT:
            out = way_out(address.ip, _ELSEWHERE)
            is_node = address.ip in part.node_ips
            paths.append(settings.InterfacePath(address.interface, unpack(address.ip), out, is_node))
    # Each route is compared with `own`, which omits the thousands of Service addresses of ipvs mode.
    routes = [one for one in _ipv4_routes() if one[1] and not part.detector.holds(one[0], "")] if paths else []
    astray = [(near, *one) for one in routes if (near := bypassed(one[0], one[2], own))]
    for path in paths:
        yield path
        for near, first, bits, by in astray:
            if near == path.interface:
                yield path._replace(out=by, clients=f"{unpack(first)}/{bits}")


def arrival(node: CheckedNode, packet: Packet) -> str:
    """Return the interface on which a client's packets arrive: the interface in `packet` if packets can arrive there,
    else the interface of the client's network. '' stands for the interface of the route to the client. Raises
    NetlinkError."""
    if packet.interface and packet.interface in _entrances():
        return packet.interface
    if packet.source is None or family_of(packet.source) is Family.IPV6:  # IPv6 has no reverse path filter
        return ""
    near = bypassed(packet.source, way_out(bytes(4), packet.source), local_addresses(Family.IPV4))
    pods = (part.detector for family, part in node.parts if near and family is Family.IPV4)
    return "" if any(each.holds(packet.source, packet.interface) for each in pods) else near


def bypassed(address: bytes, out: str, own: Sequence[Address]) -> str:
    """Return the interface of an address's network if packets to the address leave through another uplink (`out`), else
    ''. `own` are this node's addresses. A tunnel, an interface stacked on the network's interface (such as macvlan),
    and an interface without an address (such as a pod's) do not count as another uplink."""
    near = sorted({one.interface for one in own if within(address, [one.network])})
    if not near or out in near or not any(one.interface == out and one.scope == SCOPE_UNIVERSE for one in own):
        return ""
    kind = (SYS / out / "type").read_text(encoding="ascii").strip(), (SYS / out / "uevent").read_text(encoding="utf-8")
    is_wired = kind[0] == _ETHERNET and ("DEVTYPE=" not in kind[1] or any(one in kind[1] for one in _WIRED))
    return near[0] if is_wired and not (SYS / out / f"lower_{near[0]}").exists() else ""


def _ipv4_routes() -> Iterator[tuple[bytes, int, str]]:
    for line in _ROUTES.read_text(encoding="utf-8").splitlines()[1:]:
        name, destination, *rest = line.split()
        yield int(destination, 16).to_bytes(4, sys.byteorder), int(rest[5], 16).bit_count(), name


def filtering_bridges(node: CheckedNode) -> frozenset[str]:
    """Return the bridges on which packets of the checked family pass the IP rules."""
    return frozenset(bridge.name for bridge in bridges() if node.family in bridge.filtered)


def delivering_bridge(*ends: bytes) -> str:
    """Return the bridge of the network that contains all these addresses of pods; '' for none. The bridge delivers
    packets from pod to pod by their MAC addresses, without a route. Raises NetlinkError."""
    names, own = {bridge.name for bridge in bridges()}, local_addresses(family_of(ends[0]))
    near = (one for one in own if one.interface in names and all(within(end, [one.network]) for end in ends))
    return next((one.interface for one in near), "")


def unfiltered_bridges(node: CheckedNode) -> Iterator[Diagnosis]:
    """Check for bridges of pods on which packets bypass the IP rules. If client and endpoint are on one such bridge,
    the endpoint answers the client directly, unless the connection is masqueraded."""
    met = [each for each in node.passing if each.hook == "forward" and each.interfaces[0] == each.interfaces[1]]
    lost = [each for each in met if not node.direct and node.end_of(each) not in node.masqueraded]
    names = {each.interfaces[0] for each in lost}
    of_pods = [one for one in _pod_interfaces(node) if node.packet is None or one[0] in names]
    return settings.bridged(bridges(), of_pods, node.mode.flows_end, node.harm_of(lost))


def unreflecting_bridges(node: CheckedNode, client: bytes | None = None, share: float = 0) -> Iterator[Diagnosis]:
    """Check for bridges that do not send a pod's connection to itself back to the pod, for all pods or for one client.
    Only modes that translate packets on the bridge need hairpin mode. `settings.hairpin` describes `share`."""
    if node.mode.flows_end is FlowsEnd.PROXY or node.mode.interface:
        return
    harm = node.harm(node.ends_at(client) & node.masqueraded)
    used = [(way_out(bytes(len(client)), client), family_of(client))] if client is not None else _pod_interfaces(node)
    for bridge in bridges():
        if any((bridge.name, family) in used for family in bridge.filtered):
            ports = hairpin_ports(bridge.name)
            port = route.bridge_port(bridge.name, client) if client is not None else ""
            yield from settings.hairpin(bridge.name, {port: ports[port]} if port in ports else ports, share, harm)


def _pod_interfaces(node: CheckedNode) -> list[tuple[str, Family]]:
    return [
        (one.interface, family) for family, part in node.parts for one in local_addresses(family) if _is_pods(part, one)
    ]


def _is_pods(part: FamilyGlobals, address: Address) -> bool:
    return part.detector.holds(address.ip, address.interface)
