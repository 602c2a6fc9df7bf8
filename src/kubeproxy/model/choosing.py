"""Finds the eligible endpoints of a connection with their probabilities, and the other endpoints with the reasons.
Pure. Only answers to questions (answer.py) use this module. Plans do not contain the reasons, which follow from slices
and pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from kubeproxy.model import maglev
from kubeproxy.model.addresses import PORT_BYTES, PROTOCOL_NAMES
from kubeproxy.model.balancing import WEIGHT, WEIGHTS, balance_requests
from kubeproxy.model.ejection import EJECT
from kubeproxy.model.endpoints import Endpoint, Slice
from kubeproxy.model.objects import Service
from kubeproxy.model.plan import (
    Frontend,
    Globals,
    Hashing,
    HashKey,
    Policy,
    Pool,
    ServicePlan,
    ServicePortKey,
)
from kubeproxy.model.planner import Planner
from kubeproxy.wording import counted

UNPLACED: Final = "endpoints[].nodeName"
"""The `field` of an Absent endpoint without the name of a Node in its slice."""


class ClientAddress(NamedTuple):
    """A client: its packed address (None: the node selects one of its addresses), and its port (0 if unknown)."""

    address: bytes | None
    port: int


def shares(plan: ServicePlan, policy: Policy, client: ClientAddress) -> Mapping[bytes, float]:
    """Return the endpoints in a policy's pool that may get a client's connection, with their probabilities. Repeated
    destinations (see ServicePlan.at_port) become one endpoint."""
    pool = plan.local if policy is Policy.LOCAL else plan.cluster
    weights, hashing = plan.weights(policy), plan.balance.hashing if plan.balance is not None else None
    if hashing is None:
        found, whole = dict.fromkeys(pool, 0.0), sum(weights) or len(pool)
        for destination, weight in zip(pool, weights or (1,) * len(pool), strict=True):
            found[destination] += weight / whole
        return found
    table, slot = maglev.fill(pool, weights, hashing.size), _slot(hashing, client)
    if slot is not None:
        return {table[slot]: 1.0}
    counts = Counter(table)
    return {destination: counts[destination] / hashing.size for destination in pool if counts[destination]}


def carried(plan: ServicePlan) -> ServicePlan:
    """Return the plan for connections that the proxy relays itself: weights apply, hashing does not."""
    return plan if plan.balance is None else replace(plan, balance=replace(plan.balance, hashing=None))


def sharing_text(plan: ServicePlan, policy: Policy, client: ClientAddress) -> Iterator[str]:
    """Yield texts about weights, drained endpoints and hashing, which make shares unequal."""
    weights = plan.weights(policy)
    if weights:
        yield f"the endpoints have weights from {min(weights)} to {max(weights)}, which determine the shares"
    if plan.balance is None:
        return
    if plan.balance.drained:
        yield f"{counted(len(plan.balance.drained), 'endpoint')} drained: weight 0, no new connections"
    if plan.balance.hashing is not None:
        yield _hashed(plan.balance.hashing, client)


def _slot(hashing: Hashing, client: ClientAddress) -> int | None:
    return maglev.slot_of(hashing, client.address, client.port) if client.address is not None else None


def _hashed(hashing: Hashing, client: ClientAddress) -> str:
    decides = "address decides" if hashing.key is HashKey.CLIENT else "address and port decide"
    slot = _slot(hashing, client)
    where = f"slot {slot} of {hashing.size}" if slot is not None else f"a table of {hashing.size} slots"
    return f"Maglev: the client's {decides}, in the same way on every node ({where})"


class Absent(NamedTuple):
    """An endpoint that is not eligible."""

    destination: bytes  # packed address and port; port 0 if its slice does not contain the port
    slice_name: str  # '' for a deleted endpoint
    reason: str
    field: str  # the field or flag that is the cause


def absent(planner: Planner, plan: ServicePlan, frontend: Frontend, pool: Pool) -> tuple[Absent, ...]:
    """Return the endpoints in a service port's slices that are not in its pool on this node, and then the deleted
    endpoints whose connections are reset."""
    return tuple(_absent(planner, plan, frontend, frozenset(pool)))


def _absent(planner: Planner, plan: ServicePlan, frontend: Frontend, pool: Collection[bytes]) -> Iterator[Absent]:
    key, service = plan.key, (plan.key.namespace, plan.key.name)
    drained = plan.balance.drained if plan.balance is not None else ()
    ejected = planner.ejections.reasons(plan)
    for name, piece in planner.slices.get(service, {}).items():
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
                    yield Absent(destination, name, *_weightless(piece, endpoint, planner.services.get(service)))
                elif destination in ejected:
                    yield Absent(destination, name, f"ejected on this node: {ejected[destination]}", EJECT)
                else:
                    yield Absent(destination, name, *_reason(endpoint, planner.world, plan.policy(frontend)))
    for gone in planner.departures.gone_from(service) if planner.departures is not None else ():
        address, protocol = gone[:-3], gone[-3]
        if len(address) == key.family.address_size and protocol == key.protocol:
            reason = "deleted after its termination; connections to the endpoint are reset"
            yield Absent(address + gone[-2:], "", reason, "--reset-gone-endpoints")


def endpoint_states(slices: Iterable[Slice], key: ServicePortKey) -> Counter[str]:
    """Return the number of endpoints of a service port's family by state: READY, "not ready", "terminating". If no
    endpoint has the port, all endpoints have the state NO_PORT."""
    ends, others, named = dict[bytes, Endpoint](), 0, (key.port_name, key.protocol)
    for piece in slices:
        if piece.family is key.family:
            found = piece.endpoints if piece.ports else piece.particular or ()
            others += len(found)
            if any(named == (port.name, port.protocol) for port in piece.ports):
                ends |= {one.address: one for one in found}
    if not ends:
        return +Counter({NO_PORT: others})
    return Counter(READY if one.ready else "terminating" if one.terminating else "not ready" for one in ends.values())


READY, NO_PORT = "ready", "without the port"


def _weightless(piece: Slice, endpoint: Endpoint, service: Service | None) -> tuple[str, str]:
    if piece.weight == 0:
        return "the endpoint's weight is 0: drained, but established connections continue", WEIGHT
    asked = balance_requests(service.metadata.annotations if service is not None else None, [])
    by_zone = asked.nodes.get(endpoint.node) != 0 and asked.zones.get(endpoint.zone) == 0
    where = f"zone {endpoint.zone}" if by_zone else endpoint.node or "no node"
    return f"the weight of {where} is 0: drained, but established connections continue", WEIGHTS


def _reason(endpoint: Endpoint, world: Globals, policy: Policy) -> tuple[str, str]:
    node, zone = world.node_name, world.zone
    if not endpoint.ready:
        if not endpoint.terminating:
            return "not ready", "conditions.ready"
        if not endpoint.serving:
            return "terminating and no longer serving", "conditions.serving"
    if policy is Policy.LOCAL and endpoint.node != node:
        if not endpoint.node:
            return "its slice names no node, and the policy is Local", UNPLACED
        return f"it is on {endpoint.node}, and the policy is Local", "nodeName"
    if not endpoint.ready:
        return "terminating, while other endpoints are ready", "conditions.terminating"
    return _hint(endpoint, node, zone)


def _hint(endpoint: Endpoint, node: str, zone: str) -> tuple[str, str]:
    if endpoint.nodes and node not in endpoint.nodes:
        return f"the hints name {', '.join(endpoint.nodes)}", "hints.forNodes"
    if endpoint.zones and zone not in endpoint.zones:
        return f"the hints name {', '.join(endpoint.zones)}, and this node is in {zone or 'no zone'}", "hints.forZones"
    return "another entry with the same address and port is used", "addresses"
