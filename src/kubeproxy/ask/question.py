"""Parses an operator's question: a source, and a destination that is an address or the name of a Service. Finds the
node of a client by slices, podCIDRs and the configured pod network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import ip_address, ip_network
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from kubeproxy.ask.snapshot import Snapshot, unwatched
from kubeproxy.errors import QuestionError
from kubeproxy.model.addresses import (
    PROTOCOL_NAMES,
    PROTOCOLS,
    Family,
    family_of,
    is_loopback,
    pack,
    parse_networks,
    unpack,
    within,
)
from kubeproxy.model.answer import Packet
from kubeproxy.model.compile import skipped
from kubeproxy.model.objects import LABEL, Node
from kubeproxy.model.plan import Frontend, FrontendKind, Globals, ServiceName, ServicePlan
from kubeproxy.model.world import pod_cidrs, used_pod_networks

NODE = "node"  # the name of this node as a source
BY_ADDRESS: Final = "with an address in place of the Service's name the command reads the rules in the kernel"
_SHOWN = 3  # Services in other namespaces that an error message proposes


def packet(snapshot: Snapshot, source: str, target: str, interface: str = "") -> Packet:
    """Return the first packet of a connection from `source` to `target`. Raises QuestionError.

    A source is an address, with an optional port as in 192.0.2.7:40000, or `node`. A target is ADDRESS:PORT,
    NAMESPACE/NAME:PORT, or NAME:PORT for the namespace default, followed by /PROTOCOL unless the protocol is TCP. A
    Service's name means its first cluster IP of the source's family. PORT may also be the name of a Service's port,
    which implies the protocol."""
    where, number, protocol = _parted(target)
    client = source_of(source)
    destination = pack(where.strip("[]")) if "/" not in where else None
    if destination is None:
        if not _names_service(where):
            raise QuestionError(
                f"{where!r} is no IP address and no Service; expected ADDRESS:PORT or NAMESPACE/NAME:PORT"
            )
        namespace, slash, own = where.partition("/")
        name = (namespace, own) if slash else ("default", where)
        destination, number, protocol = _service_address(snapshot, name, number, protocol, client[0])
    here = client[0] is None or is_loopback(client[0]) or client[0] in snapshot.addresses
    if is_loopback(destination) and not (here or interface):
        raise QuestionError(f"{unpack(destination)} is {source}'s own loopback: its packets do not reach this node")
    return _packet(client, destination, protocol, number, interface)


def addressed(source: str, target: str) -> Packet:
    """Return the first packet of a connection to ADDRESS:PORT; no Snapshot is needed. Raises QuestionError."""
    where, number, protocol = _parted(target)
    destination = pack(where.strip("[]"))
    if destination is None:
        raise QuestionError(f"{where!r} is no IP address")
    return _packet(source_of(source), destination, protocol, number)


def _packet(
    source: tuple[bytes | None, int], destination: bytes, protocol: str, number: str, interface: str = ""
) -> Packet:
    client, client_port = source
    if client is not None and len(client) != len(destination):
        raise QuestionError(f"{unpack(client)} and the destination are of different IP families")
    return Packet(client, destination, PROTOCOLS[protocol or "TCP"], _port(number), interface, client_port)


def _parted(target: str) -> tuple[str, str, str]:
    where, colon, end = target.rpartition(":")
    number, slash, protocol = end.partition("/")
    if not colon and _names_service(target):
        return target, "", ""
    if not colon or (":" in where and not where.startswith("[")):
        raise QuestionError(
            f"{target!r} has no port; expected ADDRESS:PORT[/PROTOCOL], as 10.96.0.10:53/udp, [fd00::1]:80 or "
            "default/web:80"
        )
    if slash and protocol.upper() not in PROTOCOLS:
        raise QuestionError(f"{protocol!r} is no protocol of Services; expected tcp, udp or sctp")
    return where, number, protocol.upper()


def source_of(text: str) -> tuple[bytes | None, int]:
    """Return the client's address (None for this node) and the client's port (0 for none)."""
    if text == NODE:
        return None, 0
    where, _, port = text.rpartition(":") if text.count(":") == 1 or "]:" in text else (text, "", "")
    source = pack(where.strip("[]"))
    if source is None:
        raise QuestionError(f"{text!r} is no IP address; expected the client's address, or {NODE!r} for this node")
    return source, _port(port) if port else 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536):
        raise QuestionError(f"port: expected a number from 1 to 65535, got {text!r}")
    return int(text)


def _names_service(text: str) -> bool:
    parts = text.split("/")
    return len(parts) <= 2 and all(LABEL.fullmatch(part) for part in parts)


def no_such_port(service: str, port: str, protocol: str, ports: Iterable[str]) -> QuestionError:
    """Return the error for a port that is not one of a Service's `ports`, or for a question without a port ('')."""
    wrong = " ".join(filter(None, ("no", protocol, "port", port))) if port else "no port in this question"
    return QuestionError(f"Service {service} has {wrong}; it has {', '.join(dict.fromkeys(ports))} (spec.ports)")


def _service_address(
    snapshot: Snapshot, name: ServiceName, port: str, protocol: str, client: bytes | None
) -> tuple[bytes, str, str]:
    service = "/".join(name)
    compiled = snapshot.planner.compiled.get(name)
    known = snapshot.planner.services.get(name)
    if compiled is None or known is None:
        raise QuestionError(
            f"{unwatched(name)}; `kubectl -n {name[0]} get service {name[1]} --show-labels` tells which"
            + "".join(_hints(snapshot, name))
        )
    if reason := skipped(known, snapshot.planner.world):
        raise QuestionError(f"Service {service} has no address on this node: {reason}")
    family = family_of(client) if client is not None else None
    offered = list(_cluster_ips(compiled.plans, family))
    asked = protocol or "TCP" * port.isdigit()
    for plan, frontend in offered if port else ():
        its_own = PROTOCOL_NAMES[frontend.protocol]
        if asked in {"", its_own} and port in {str(frontend.port), plan.key.port_name}:
            return frontend.address, str(frontend.port), its_own
    if offered and port.isdigit():
        return offered[0][1].address, port, protocol
    ports = [f"{plan.key.port_name} {frontend.port_text}".strip() for plan, frontend in offered]
    if ports:
        raise no_such_port(service, port, protocol, ports)
    kind = f"{family.label} " if family is not None else ""
    raise QuestionError(f"Service {service} has no {kind}cluster IP with a port (spec.clusterIPs)")


def _hints(snapshot: Snapshot, name: ServiceName) -> Iterator[str]:
    same = sorted(space for space, other in snapshot.planner.services if other == name[1])
    if same:
        yield "; there is " + ", ".join(f"{space}/{name[1]}" for space in same[:_SHOWN])
    reach = snapshot.reach()
    if reach is not None and reach.trouble:
        yield f"; it may be new: the API server cannot be reached, {reach.trouble}"


def _cluster_ips(plans: tuple[ServicePlan, ...], family: Family | None) -> Iterator[tuple[ServicePlan, Frontend]]:
    for plan in plans:
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.CLUSTER and family in {None, plan.key.family}:
                yield plan, frontend


WhichEnd: TypeAlias = Literal["client", "destination"]


class Elsewhere(Struct, frozen=True, rename="camel"):
    """The other node that handles a connection: the node's name ('' if unknown), the reason, the object's field that
    is the cause, and whether the client or the destination is on that node."""

    node: str
    reason: str
    field: str
    end: WhichEnd = "client"


class Home(NamedTuple):
    """The node of a client, by slices, podCIDRs and the configured pod network."""

    other: Elsewhere | None  # the client's node, or None if it is this node or unknown
    is_own: bool  # the client is this node, or certainly a pod of this node
    may_be_node: bool  # neither an endpoint, a pod nor this node has the address, but another Node may have it


def home(snapshot: Snapshot, source: bytes | None) -> Home:
    """Return the node of a client; `source` is None for this node. The proxy does not watch other Nodes' addresses."""
    if source is None:
        return Home(None, is_own=True, may_be_node=False)
    planner, local, family = snapshot.planner, snapshot.addresses, family_of(source)
    own = planner.world.node_name
    node, found = planner.nodes.get(own), dict(nodes_of(snapshot, source))
    used, networks, ours = used_pod_networks(node, family, local), pod_cidrs(node), planner.world.of(family)
    is_pod = ours is not None and ours.detector.holds(source, "")
    other = None
    if source not in local and own not in found:
        if found:
            where, slice_name = next(iter(found.items()))
            other = Elsewhere(where, f"{unpack(source)} is on {where}", f"nodeName in EndpointSlice {slice_name}")
        # Some CNI plugins do not assign pod addresses from podCIDRs. If this node has an address in its podCIDRs, its
        # plugin assigns pod addresses from them.
        elif (
            is_pod
            and used
            and not (counted_host(planner.world, node, source) or within(source, parse_networks(networks, family)))
        ):
            reason = f"{unpack(source)} is a pod's, and of none of this node's pod networks ({', '.join(networks)})"
            other = Elsewhere("", reason, "spec.podCIDRs of this Node")
    return Home(other, own in found or within(source, used), not (is_pod or found or source in local))


_NODES_OF_A_CLUSTER: Final = 8
"""The prefix of all pods' network is usually this many bits shorter than the prefix of one node's pod network."""


def counted_host(world: Globals, node: Node | None, client: bytes) -> str:
    """Return an address of this Node that the configured pod network contains, if the network also contains the client;
    hosts then count as pods, and the client may be a host. Return '' if the network contains only pods, or if the
    client is probably a pod, because its address is near this Node's podCIDRs."""
    part = world.of(family_of(client))
    if part is None or part.detector.kind != "network" or not part.detector.holds(client, ""):
        return ""
    own = [ip_network(one, strict=False) for one in pod_cidrs(node)]
    near = [one.supernet(min(_NODES_OF_A_CLUSTER, one.prefixlen)) for one in own]
    if any(ip_address(client) in one for one in near):
        return ""
    return next((unpack(one) for one in part.node_ips if part.detector.holds(one, "")), "")


def nodes_of(snapshot: Snapshot, address: bytes) -> Iterator[tuple[str, str]]:
    """Yield the nodeNames that EndpointSlices have for an address, each with the slice's name."""
    for (namespace, _), pieces in snapshot.planner.slices.items():
        for name, piece in pieces.items():
            if piece.family is family_of(address) and piece.holds(address):
                for endpoint in piece.endpoints:
                    if endpoint.address == address and endpoint.node:
                        yield endpoint.node, f"{namespace}/{name}"
