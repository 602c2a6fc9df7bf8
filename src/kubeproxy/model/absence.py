"""Why an endpoint of a Service gets no new connections here, though an EndpointSlice has it. Pure.

Only for people who ask: plans do not carry it, the slices and the pool that was chosen say it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from kubeproxy.model.addresses import PORT_BYTES, PROTOCOL_NAMES
from kubeproxy.model.balancing import NO_WISHES, WEIGHT, WEIGHTS, Wishes
from kubeproxy.model.endpoints import Endpoint, Slice
from kubeproxy.model.plan import ServicePortKey


class Absent(NamedTuple):
    """An endpoint that is left out: its packed address and port (0 where its slice has no such port), its slice, why,
    and the field that says so. One that is gone is in no slice (''), and what the flag does is why it is told.
    """

    destination: bytes
    slice_name: str
    reason: str
    field: str


def absent(
    slices: Mapping[str, Slice],
    key: ServicePortKey,
    pool: Collection[bytes],
    node: str,
    zone: str,
    *,
    local_only: bool,
    drained: Collection[bytes] = (),
    asked: Wishes = NO_WISHES,
) -> Iterator[Absent]:
    """Yield the endpoints of a service port's slices that are not in its pool on this node.

    `local_only` says that the policy that applies is Local; `drained` are those whose weight is 0, as
    the slices say or the Service's annotations, which are `asked`.
    """
    for name, piece in slices.items():
        if piece.family is not key.family:
            continue
        numbers = [port.port for port in piece.ports if (port.name, port.protocol) == (key.port_name, key.protocol)]
        if not numbers:
            has = ", ".join(f"{port.name or 'unnamed'} ({PROTOCOL_NAMES[port.protocol]})" for port in piece.ports)
            reason = f"the slice has no port {key.port_name or 'without a name'} ({PROTOCOL_NAMES[key.protocol]})"
            for endpoint in piece.endpoints if piece.ports else piece.particular or ():
                yield Absent(endpoint.address + PORT_BYTES[0], name, f"{reason}; it has {has or 'none'}", "ports")
        for number in numbers:
            for endpoint in piece.endpoints:
                destination = endpoint.address + PORT_BYTES[number]
                if destination in pool:
                    continue
                if destination in drained:
                    yield Absent(destination, name, *_weightless(piece, endpoint, asked))
                else:
                    yield Absent(destination, name, *_reason(endpoint, node, zone, local_only=local_only))


def lacks_port(slices: Iterable[Slice], key: ServicePortKey) -> bool:
    """Return whether there are endpoints of a service port's family, and none of them has the port."""
    pieces = [piece for piece in slices if piece.family is key.family and (piece.particular or piece.nodes)]
    named = (key.port_name, key.protocol)
    return bool(pieces) and all((port.name, port.protocol) != named for piece in pieces for port in piece.ports)


def departed(gone: Iterable[bytes], key: ServicePortKey) -> Iterator[Absent]:
    """Yield the endpoints that are gone for good, as gone.Departed has them, of a port's family and protocol."""
    reason = "it is gone: it was terminating when it left the slices; connections to it are reset"
    for one in gone:
        address, protocol = one[:-3], one[-3]
        if len(address) == key.family.address_size and protocol == key.protocol:
            yield Absent(address + one[-2:], "", reason, "--reset-gone-endpoints")


def _weightless(piece: Slice, endpoint: Endpoint, asked: Wishes) -> tuple[str, str]:
    if piece.weight == 0:
        return "its weight is 0: it is drained, and keeps the connections that it has", WEIGHT
    zone = piece.zones.get(endpoint.address, "") if piece.zones else ""
    by_zone = asked.nodes.get(endpoint.node) != 0 and asked.zones.get(zone) == 0
    where = f"zone {zone}" if by_zone else endpoint.node or "no node"
    return f"the weight of {where} is 0: it is drained, and keeps the connections it has", WEIGHTS


def _reason(endpoint: Endpoint, node: str, zone: str, *, local_only: bool) -> tuple[str, str]:
    """Return why, and the field."""
    if not endpoint.ready:
        if not endpoint.terminating:
            return "it is not ready", "conditions.ready"
        if not endpoint.serving:
            return "it is terminating and does not serve any more", "conditions.serving"
    if local_only and endpoint.node != node:
        return f"it is on {endpoint.node or 'no node'}, and the policy is Local", "nodeName"
    if not endpoint.ready:
        return "it is terminating, and others are ready", "conditions.terminating"
    return _hint(endpoint, node, zone)


def _hint(endpoint: Endpoint, node: str, zone: str) -> tuple[str, str]:
    if endpoint.nodes and node not in endpoint.nodes:
        return f"it is meant for {', '.join(endpoint.nodes)}", "hints.forNodes"
    if endpoint.zones and zone not in endpoint.zones:
        return f"it is meant for {', '.join(endpoint.zones)}, this node is in {zone or 'no zone'}", "hints.forZones"
    return "another entry of the same address and port counts", "addresses"
