"""The node of a client, as far as this proxy knows it: that node decides about the client's connections. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.model.addresses import family_of, parse_networks, unpack, within
from kubeproxy.model.answer import Packet
from kubeproxy.model.world import pod_cidrs


class Elsewhere(Struct, frozen=True, rename="camel"):
    """Another node decides: its name, '' if unknown, and the reason with the field behind it."""

    node: str
    reason: str
    field: str


def home(snapshot: Snapshot, source: bytes | None) -> Elsewhere | None:
    """Return the other node that a client is on; None if it is on this one, or if its node is unknown."""
    planner, local = snapshot.planner, snapshot.addresses
    if source is None or source in local:
        return None
    own = planner.world.node_name
    found = dict(_nodes(snapshot, source))
    if own in found:
        return None
    for node, slice_name in found.items():
        return Elsewhere(node, f"{unpack(source)} is on {node}", f"nodeName in EndpointSlice {slice_name}")
    networks = pod_cidrs(planner.nodes.get(own))
    ranges = parse_networks(networks, family_of(source))
    ours = planner.world.of(family_of(source))
    is_pod = ours is not None and ours.detector.holds(source, "")
    # Not all networks take pods' addresses from podCIDRs: if they do, this node itself has an address in its podCIDRs.
    if is_pod and not within(source, ranges) and any(within(one, ranges) for one in local):
        reason = f"{unpack(source)} is a pod's, and of none of this node's pod networks ({', '.join(networks)})"
        return Elsewhere("", reason, "spec.podCIDRs of this Node")
    return None


def stranger(snapshot: Snapshot, packet: Packet) -> bytes | None:
    """Return the client's address if it may be another Node's own: the proxy watches only its own Node. Else None.

    It may be if neither this node, nor an endpoint, nor a pod has it, and the destination is not this node's.
    """
    source, local = packet.source, snapshot.addresses
    if source is None or packet.interface or source in local or packet.destination in local:
        return None
    ours = snapshot.planner.world.of(family_of(source))
    is_pod = ours is not None and ours.detector.holds(source, "")
    return None if is_pod or any(_nodes(snapshot, source)) else source


def _nodes(snapshot: Snapshot, address: bytes) -> Iterator[tuple[str, str]]:
    """Yield the nodes of an address according to the slices, each with the name of a slice."""
    for (namespace, _), pieces in snapshot.planner.slices.items():
        for name, piece in pieces.items():
            if piece.family is family_of(address) and piece.holds(address):
                for endpoint in piece.endpoints:
                    if endpoint.address == address and endpoint.node:
                        yield endpoint.node, f"{namespace}/{name}"
