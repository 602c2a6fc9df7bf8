"""Derives the globals from the configuration, the Node, the ServiceCIDRs and the local addresses. Source:
docs/reference.md "Start" 4 to 6 and 9; kube-proxy v1.36 cmd/kube-proxy/app/server_linux.go and pkg/proxy/util."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from socket import IPPROTO_TCP
from typing import Literal, NamedTuple

from msgspec import Struct, structs

from kubeproxy.features import Features
from kubeproxy.model.addresses import (
    PORT_BYTES,
    Family,
    Range,
    covers_all,
    family_of,
    is_loopback,
    merge_ranges,
    network_text,
    pack,
    parse_networks,
    within,
)
from kubeproxy.model.objects import Node, NodeAddress, NodeSpec, NodeStatus
from kubeproxy.model.plan import Detector, ExternalIPs, FamilyGlobals, Globals, Loopback

LocalMode = Literal["ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"]
PRIMARY = "primary"
TO_BE_DELETED_TAINT = "ToBeDeletedByClusterAutoscaler"


class Settings(Struct, frozen=True):
    """The settings on which the globals depend; CIDRs are text."""

    node_name: str
    families: tuple[Family, ...]
    local_mode: LocalMode = "ClusterCIDR"
    cluster_cidrs: tuple[str, ...] = ()
    bridge: str = ""
    prefix: str = ""
    nodeport_addresses: tuple[str, ...] = (PRIMARY,)  # networks, or `primary` for the node's address
    loopback_nodeports: Literal["never", "ipv4", "relayed"] = "never"  # "ipv4": by rules; "relayed": by the proxy
    bind_address: bytes = b""  # packed; b'' if unspecified
    masquerade_all: bool = False
    masquerade_mark: int = 0x4000
    external_ips: ExternalIPs = "served"
    features: Features = Features()


class Surroundings(NamedTuple):
    """The state of the node and the cluster on which the globals depend."""

    node: Node | None = None
    service_cidrs: Iterable[str] = ()
    local_addresses: Mapping[Family, Iterable[bytes]] = {}  # packed
    api_servers: Iterable[tuple[str, int]] = ()  # addresses and ports of the API server, or of the HTTP proxy to it
    ejects: bool = False  # whether any Service ejects failing endpoints


def build(settings: Settings, around: Surroundings) -> Globals:
    """Return the globals; invalid values are ignored."""
    node = around.node
    labels = node.metadata.labels if node is not None else None
    parts = {family: _family(settings, around, family) for family in settings.families}
    return Globals(
        node_name=settings.node_name,
        zone=(labels.zone or "") if labels is not None else "",
        masquerade_all=settings.masquerade_all,
        masquerade_mark=settings.masquerade_mark,
        external_ips=settings.external_ips,
        features=settings.features,
        api_servers=tuple(sorted(_server_keys(around.api_servers))),
        ejects=around.ejects,
        ipv4=parts.get(Family.IPV4),
        ipv6=parts.get(Family.IPV6),
    )


def _server_keys(places: Iterable[tuple[str, int]]) -> Iterator[bytes]:
    for text, port in places:
        address = pack(text.partition("%")[0])
        if address is not None:
            yield address + bytes((IPPROTO_TCP,)) + PORT_BYTES[port]


def node_addresses(settings: Settings, node: Node | None, family: Family) -> tuple[bytes, ...]:
    """Return the node's own address: the configured address, else an InternalIP, else an ExternalIP, else loopback."""
    if settings.bind_address and family_of(settings.bind_address) is family:
        return (settings.bind_address,)
    return (next((address for address in _by_kind(node) if family_of(address) is family), LOOPBACK[family]),)


def primary_family(settings: Settings, node: Node | None) -> Family | None:
    """Return the family of bindAddress, else the family of the Node's first address; None if both are missing."""
    if settings.bind_address:
        return family_of(settings.bind_address)
    return next(map(family_of, _by_kind(node)), None)


_KINDS = ("InternalIP", "ExternalIP")
LOOPBACK = {Family.IPV4: b"\x7f\0\0\1", Family.IPV6: b"\0" * 15 + b"\1"}


def _by_kind(node: Node | None) -> Iterator[bytes]:
    listed = listed_addresses(node)
    return (address for kind in _KINDS for entry, address in listed if entry.type == kind)


def listed_addresses(node: Node | None) -> list[tuple[NodeAddress, bytes]]:
    """Return a Node's internal and external addresses, each with its packed form; invalid addresses are omitted."""
    entries = (node.status.addresses if node is not None and node.status is not None else None) or ()
    packed = ((entry, pack(entry.address)) for entry in entries if entry.type in _KINDS)
    return [(entry, address) for entry, address in packed if address is not None]


def eligible(node: Node | None) -> bool:
    """Return whether load balancers may send traffic to a Node: the Node exists, and nothing announces its deletion."""
    if node is None or node.metadata.deletion_timestamp:
        return False
    taints = (node.spec.taints if node.spec else None) or ()
    return all(taint.key != TO_BE_DELETED_TAINT for taint in taints)


def pod_cidrs(node: Node | None) -> tuple[str, ...]:
    """Return the pod networks of a Node."""
    spec = node.spec if node is not None else None
    if spec is None:
        return ()
    return tuple(spec.pod_cidrs or ((spec.pod_cidr,) if spec.pod_cidr else ()))


def used_pod_networks(node: Node | None, family: Family, own: Collection[bytes]) -> list[Range]:
    """Return a Node's podCIDRs that contain one of its addresses (`own`), and are therefore in use. Some pod networks
    ignore the podCIDRs."""
    return [one for one in parse_networks(pod_cidrs(node), family) if any(within(each, [one]) for each in own)]


def remembering(before: Node | None, node: Node) -> Node:
    """Return `node`, with the pod networks of `before` if `node` has none, and with the addresses of `before` in each
    family without an address. NodePorts must continue to work while a Node is deleted or registered again; the Go
    kube-proxy reads these values only at its start. Changed values take effect."""
    families = {family_of(address) for _, address in listed_addresses(node)}
    lost = [entry for entry, address in listed_addresses(before) if family_of(address) not in families]
    if lost:
        kept = (node.status.addresses if node.status is not None else None) or ()
        node = structs.replace(node, status=NodeStatus([*kept, *lost]))
    if before is not None and before.spec is not None and pod_cidrs(before) and not pod_cidrs(node):
        networks = {"pod_cidr": before.spec.pod_cidr, "pod_cidrs": before.spec.pod_cidrs}
        node = structs.replace(node, spec=structs.replace(node.spec or NodeSpec(), **networks))
    return node


def _family(settings: Settings, around: Surroundings, family: Family) -> FamilyGlobals:
    own = node_addresses(settings, around.node, family)
    answering = _nodeport_ips(settings, own, around, family)
    return FamilyGlobals(
        detector=_detector(settings, around.node, family),
        node_ips=own,
        nodeport_ips=answering,
        health_check_only_ips=_health_check_only(settings, answering, around, family),
        service_cidrs=merge_ranges(parse_networks(around.service_cidrs, family)),
        loopback=_loopback(settings, family),
    )


def _loopback(settings: Settings, family: Family) -> Loopback:
    """Return the treatment of NodePorts on loopback. The proxy relays only if nodePortAddresses contains a
    loopback network (KEP-6032)."""
    if settings.loopback_nodeports != "relayed":
        served = settings.loopback_nodeports == "ipv4" and family is Family.IPV4
        return Loopback.SERVED if served else Loopback.NOTHING
    named = parse_networks(settings.nodeport_addresses, family)
    within = any(all(map(is_loopback, network)) for network in named)
    return Loopback.RELAYED if within else Loopback.REFUSED


def _detector(settings: Settings, node: Node | None, family: Family) -> Detector:
    if settings.local_mode == "BridgeInterface":
        return Detector("bridge", settings.bridge)
    if settings.local_mode == "InterfaceNamePrefix":
        return Detector("prefix", settings.prefix)
    cidrs = pod_cidrs(node) if settings.local_mode == "NodeCIDR" else settings.cluster_cidrs
    network = next(iter(parse_networks(cidrs, family)), None)
    return Detector("network", network_text(network)) if network is not None else Detector()


def _nodeport_ips(
    settings: Settings, own: tuple[bytes, ...], around: Surroundings, family: Family
) -> tuple[bytes, ...] | None:
    """Return the addresses on which NodePorts answer; None means all local addresses, or all except loopback (see
    `_loopback`)."""
    primary = PRIMARY in settings.nodeport_addresses
    ranges = parse_networks(settings.nodeport_addresses, family)
    # NodePorts answer on all addresses if no network of the family is configured, as in NewNodePortAddresses. With
    # `primary`, NodePorts answer on all addresses while the node's address is unknown: `own` is then loopback.
    if (all(map(is_loopback, own)) if primary else not ranges) or any(covers_all(network) for network in ranges):
        return None
    local = set(around.local_addresses.get(family, ()))
    chosen = [a for a in local if within(a, ranges)]
    if primary:  # omit an address that no interface has: another device translates it, so no packet to it arrives
        chosen += [a for a in own if a in local or not local]
    loopback = settings.loopback_nodeports == "ipv4" and family is Family.IPV4
    return tuple(sorted({a for a in chosen if loopback or not is_loopback(a)}))


def _health_check_only(
    settings: Settings, answering: tuple[bytes, ...] | None, around: Surroundings, family: Family
) -> tuple[bytes, ...]:
    """Return the loopback addresses on which health check ports, but no NodePorts, are served. For health checks the Go
    kube-proxy treats loopback like other addresses (GetNodeIPs in pkg/proxy/util/nodeport_addresses.go)."""
    if answering is None:  # health checks are served on every address
        return ()
    ranges = parse_networks(settings.nodeport_addresses, family)
    local = around.local_addresses.get(family, ())
    return tuple(sorted({a for a in local if is_loopback(a) and within(a, ranges)}.difference(answering)))


def compiled_from(world: Globals) -> tuple[object, ...]:
    """Return the parts of the globals on which plans depend; only backends use the other parts."""
    parts = [(family, ours.node_ips, ours.detector.implemented) for family, ours in world.parts.items()]
    return world.node_name, world.zone, world.masquerade_all, world.api_servers, parts


def nodeport_addresses(world: Globals, family: Family) -> Collection[bytes]:
    """Return the addresses at which a NodePort takes precedence over an external IP or load balancer address; these
    are the Node's own addresses if NodePorts answer on all addresses."""
    ours = world.of(family)
    if ours is None:
        return ()
    return ours.node_ips if ours.nodeport_ips is None else ours.nodeport_ips
