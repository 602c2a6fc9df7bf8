"""Checks of sysctls that other programs changed, of a full conntrack table, of descriptors, bridges and interfaces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from kubeproxy.ask.finding import MISLEADS, NOTHING, PICKED_AGAIN, STOPS, Diagnosis, Effect, Harm, Severity
from kubeproxy.backends.mode import FlowsEnd, Room
from kubeproxy.kernel.proc.processes import Descriptors
from kubeproxy.kernel.proc.sysctl import NF_CONNTRACK_MAX
from kubeproxy.kernel.route import SYSCTL, Bridge, NetworkInterface
from kubeproxy.model.addresses import Family, place_text

FULL, FILLING = 0.95, 0.8
FORWARDING: Final = {Family.IPV4: "net/ipv4/ip_forward", Family.IPV6: "net/ipv6/conf/all/forwarding"}
FORWARDING_OF: Final = {Family.IPV4: "net/ipv4/conf/{}/forwarding", Family.IPV6: "net/ipv6/conf/{}/force_forwarding"}
"""Sysctls that turn on forwarding for one interface; {} stands for its name."""
_SHOWN: Final = 2

_PERSIST: Final = "and remove the setting from the file in /etc/sysctl.d, or the program, that sets another value"


class Setting(NamedTuple):
    """A sysctl with its wanted value and its present value, which is None if the sysctl cannot be read."""

    key: str
    wanted: int
    actual: int | None


class InterfacePath(NamedTuple):
    """An interface with a strict reverse path filter and an address that clients use, and the interface through which
    answers leave."""

    interface: str
    address: str
    out: str
    is_node: bool
    clients: str = ""  # a part of the interface's network with a route by `out`; '' for clients of other networks


def forwarding(family: Family, harm: Harm = NOTHING) -> Diagnosis:
    """Return the finding for a node that forwards no packets of a family, with its `harm` to the checked connection."""
    why = (
        "connections of pods and from outside to Services are translated, and then not forwarded to endpoints: "
        "they time out"
    )
    return _should_be_on([FORWARDING[family]], Severity.BROKEN, _unforwarded(harm) or why, harm)


def _unforwarded(harm: Harm) -> str:
    """Return the effect of lost packets on a checked connection, or '' if the effect is unknown."""
    ends = few([place_text(*end) for end in sorted(harm.ends)])
    return {
        Effect.DELAYS: PICKED_AGAIN,
        Effect.LOSES: f"packets of connections to {ends} are not forwarded: they time out",
        Effect.STOPS: "the packets of this connection are not forwarded: it times out",
    }.get(harm.effect, "")


def few(names: Sequence[str]) -> str:
    """Return the first names, and the number of further names."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def entrances(
    family: Family, interfaces: Sequence[str], severity: Severity, harm: Harm = NOTHING
) -> Iterator[Diagnosis]:
    """Report interfaces from which packets are not forwarded, if the node forwards packets from other interfaces."""
    if interfaces:
        why = (
            "packets that arrive there are not forwarded, neither requests to endpoints nor answers to clients: "
            "connections time out"
        )
        keys = [FORWARDING_OF[family].format(interface) for interface in interfaces]
        yield _should_be_on(keys, severity, _unforwarded(harm) or why, harm)


def _should_be_on(keys: Sequence[str], severity: Severity, why: str, harm: Harm) -> Diagnosis:
    names = list(map(_dotted, keys))
    what = f"{few(names)} {'are' if len(names) > 1 else 'is'} 0"
    return Diagnosis(severity, "sysctl", what, why, f"sysctl -w {' '.join(f'{n}=1' for n in names)}, {_PERSIST}", harm)


def changed_back(settings: Iterable[Setting]) -> Iterator[Diagnosis]:
    """Check whether the sysctls of the configuration and of the mode are unchanged; a larger conntrack table is no
    finding."""
    for one in settings:
        enough = one.key == NF_CONNTRACK_MAX and one.actual is not None and one.actual >= one.wanted
        if one.actual is not None and one.actual != one.wanted and not enough:
            what = f"{_dotted(one.key)} is {one.actual}, it should be {one.wanted}"
            why = _effect(one.key)
            fix = f"sysctl -w {_dotted(one.key)}={one.wanted} (a restarted proxy does that), {_PERSIST}"
            yield Diagnosis(Severity.DEGRADED, "sysctl", what, why, fix)


def _effect(key: str) -> str:
    if "nf_conntrack" in key:
        return "the proxy set the value of its configuration (conntrack), and another program changed it"
    if key.endswith("route_localnet"):
        return "NodePorts do not answer on 127.0.0.1 (iptables.localhostNodePorts)"
    if "/arp_" in key:
        return "the node answers ARP for addresses of Services (ipvs.strictARP), which belong to a load balancer"
    return "the mode needs this value: otherwise connections to Services fail"


def filtered_ways(ways: Iterable[InterfacePath]) -> Iterator[Diagnosis]:
    """Check whether a strict reverse path filter drops packets of clients to an address of this node."""
    for one in ways:
        if one.out and one.out != one.interface:
            answers, senders = f"answers from {one.address} on {one.interface}", "clients from other networks"
            if one.clients:
                answers = f"answers to {one.clients}, which is on the network of {one.interface},"
                senders = one.clients
            yield Diagnosis(
                severity=Severity.DEGRADED if one.is_node else Severity.NOTE,
                about="sysctl",
                what=f"net.ipv4.conf.{one.interface}.rp_filter is strict (1), but {answers} leave by {one.out}",
                why=f"packets of {senders} to NodePorts on {one.address} are dropped without a trace",
                fix=f"have these answers leave by {one.interface} (ip route, ip rule); only if answers that leave by "
                f"{one.out} reach the clients: sysctl -w net.ipv4.conf.{one.interface}.rp_filter=2 (loose; the larger "
                f"one of this and of net.ipv4.conf.all.rp_filter counts), {_PERSIST}",
            )


def bridged(
    bridges: Iterable[Bridge], of_pods: Sequence[tuple[str, Family]], flows_end: FlowsEnd, harm: Harm = NOTHING
) -> Iterator[Diagnosis]:
    """Check whether packets between pods of the same bridge pass the rules."""
    if flows_end is FlowsEnd.PROXY:
        return
    known = {bridge.name: bridge.filtered for bridge in bridges}
    for name, family in of_pods:
        if name in known and family not in known[name]:
            what = f"{SYSCTL[family]} is off, and pods of this node are on the bridge {name}"
            why = (
                "answers of a pod to another one on this bridge are not translated back: Services time out where "
                "client and endpoint are on this node"
            )
            fix = f"modprobe br_netfilter; sysctl -w {SYSCTL[family]}=1, {_PERSIST}"
            yield Diagnosis(Severity.BROKEN, "sysctl", what, why, fix, harm)


def hairpin(bridge: str, ports: Mapping[str, bool], share: float, harm: Harm = NOTHING) -> Iterator[Diagnosis]:
    """Check hairpin mode of the bridge `ports`. If hairpin mode is off, a bridge sends no packet back through the port
    on which it arrived, and a pod cannot connect to itself through a Service. `share` is the share of one pod's
    connections that lead to itself, or 0 if all pods are checked. If packets on a bridge pass the rules, translated
    packets do not leave the bridge (br_nf_pre_routing_finish in net/bridge/br_netfilter_hooks.c)."""
    off = [name for name, is_on in ports.items() if not is_on]
    if not off:
        return
    sure = len(off) == len(ports)
    yield Diagnosis(
        severity=Severity.NOTE if not sure else Severity.BROKEN if share else Severity.DEGRADED,
        about="hairpin",
        what=f"hairpin mode is off for {'all ports' if sure and len(off) > 1 else few(off)} of the bridge {bridge}",
        why=(f"{share:.1%} of the connections" if share else "connections of a pod to a Service that leads to itself")
        + " return to the pod that opens the connections, and time out"
        + ("" if sure else " if that is the port of the pod"),
        fix=f"for the pod's port: ip link set {off[0] if len(off) == 1 else 'PORT'} type bridge_slave hairpin on; for "
        "later pods, hairpinMode: true in the configuration of the CNI plugin",
        harm=harm if sure else NOTHING,
    )


def down(
    interfaces: Iterable[NetworkInterface],
    roles: Mapping[str, str],
    bridges: Collection[str],
    harms: Mapping[str, Harm] = MappingProxyType({}),
) -> Iterator[Diagnosis]:
    """Check for interfaces that are down. `roles` maps an interface's name to the role of its address, `harms` to the
    harm if the interface is down. A bridge without carrier is ignored, because it has no ports before the first pod."""
    for one in interfaces:
        if one.name in roles and not (one.running or (one.up and one.name in bridges)):
            yield Diagnosis(
                severity=Severity.BROKEN,
                about="interfaces",
                what=f"{one.name}, which has {roles[one.name]}, {'has no carrier' if one.up else 'is down'}",
                why="no packet passes the interface: no request, no answer of an endpoint, and no packet to other "
                "nodes",
                fix="check the interface's cable, its other end, or the program that created the interface"
                if one.up
                else f"ip link set {one.name} up, and find the program that took it down; then check that its routes "
                "exist again (ip route)",
                harm=harms.get(one.name, NOTHING),
            )


def tracked(count: int, limit: int, fixes: Iterable[str] = ()) -> Room:
    """Return the use of the connection tracking table; `fixes` are texts about changes that remove entries."""
    return Room(
        "connection tracking",
        count,
        limit,
        why="when the table is full, all new connections of the node are dropped, also connections that use no Service",
        fix="; ".join(("`kube-proxy conntrack` shows its Services and clients", *fixes)),
    )


def filled(room: Room, about: str) -> Iterator[Diagnosis]:
    """Check whether a table is nearly full."""
    if room.limit > 0 and room.used >= FILLING * room.limit:
        is_full = room.used >= FULL * room.limit
        severity = Severity.BROKEN if is_full else Severity.DEGRADED
        what = f"{room.name} is {room.used * 100 // room.limit}% full: {room.used} of {room.limit}"
        harm = STOPS if room.used >= room.limit else MISLEADS if is_full else NOTHING
        yield Diagnosis(severity, about, what, room.why, room.fix, harm)


def opened(descriptors: Descriptors, pid: int) -> Iterator[Diagnosis]:
    """Check the number of the proxy's open files against its limit."""
    used, limit = descriptors
    if used >= FILLING * limit:
        what = f"the proxy (pid {pid}) has {used} open files; its limit is {limit}"
        why = "health checks, and in userspace mode connections, are refused when no descriptor is left"
        fix = "raise LimitNOFILE of its unit, or the container runtime's limit; find clients with many connections"
        yield Diagnosis(Severity.BROKEN if used >= FULL * limit else Severity.DEGRADED, "descriptors", what, why, fix)


def _dotted(key: str) -> str:
    return key.translate(str.maketrans("/.", "./"))
