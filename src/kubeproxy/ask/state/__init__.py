"""The state of the node and of a Service as JSON values, with the versions of the objects behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address, summarize_address_range
from typing import Any, Final

from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.model.addresses import PROTOCOL_NAMES, destination_text, place_text, unpack
from kubeproxy.model.choosing import lacks_port
from kubeproxy.model.endpoints import Slice
from kubeproxy.model.plan import (
    NOTHING,
    Action,
    Balance,
    Compiled,
    Detector,
    FamilyGlobals,
    Frontend,
    HashKey,
    Pool,
    ServiceName,
    ServicePlan,
)
from kubeproxy.release import build

Json = dict[str, Any]

SCHEMA_VERSION: Final = 1
"""The version of docs/answers.schema.json: it grows when a field is removed, or gets another type or meaning."""

_ACTIONS: Final[Mapping[Action, str]] = {
    Action.CLUSTER: "endpoints",
    Action.CLUSTER_MASQUERADE: "endpoints, masqueraded",
    Action.LOCAL: "local endpoints",
    Action.LOCAL_MASQUERADE: "local endpoints, masqueraded",
    Action.REJECT: "reject",
    Action.DROP: "drop",
}


def node(snapshot: Snapshot) -> Json:
    """Return the state of the node."""
    world, unready = snapshot.planner.world, snapshot.health.unready()
    kernels = {standing.family: standing.shown() for standing in snapshot.engine.standings}
    families: Json = {}
    for family in world.families:
        ours = world.of(family) or FamilyGlobals()
        families[family.label] = {
            **kernels[family],
            "lastSynced": snapshot.health.last_updated(family.label),
            "nodeAddresses": _texts(ours.node_ips),
            "nodePortAddresses": "all but loopback" if ours.nodeport_ips is None else _texts(ours.nodeport_ips),
            "podTraffic": _detector(ours.detector),
        }
    return {
        "schemaVersion": SCHEMA_VERSION,
        "version": build().name,
        "mode": snapshot.mode.name,
        "node": world.node_name,
        "zone": world.zone,
        "ready": not unready,
        "unready": unready,
        "families": families,
        "serviceCount": len(snapshot.planner.services),
        "pendingCount": snapshot.pending,
    }


def service(snapshot: Snapshot, name: ServiceName) -> Json | None:
    """Return the state of a Service, None if it is unknown."""
    verdict = snapshot.verdict(name)
    if verdict is None:
        return None
    planner, (state, reason) = snapshot.planner, verdict
    known, pieces = planner.services.get(name), planner.slices.get(name, {})
    means = planner.compiled.get(name, NOTHING)
    found: Json = {"namespace": name[0], "name": name[1], "state": state}
    if known is not None:
        found["resourceVersion"] = known.metadata.resource_version
    if state != "deleting":
        found["slices"] = {piece: pieces[piece].version for piece in sorted(pieces)}
        if zones := {a: zone for piece in pieces.values() for a, zone in (piece.zones or {}).items()}:
            found["zones"] = {unpack(address): zones[address] for address in sorted(zones)}
    if reason:
        found["reason"] = reason
    if known is not None and not planner.is_dirty(name):
        found["ports"] = [_port(plan, pieces.values()) for plan in means.plans]
    if state not in {snapshot.complete, "ignored"}:
        found["committed"] = [_port(plan, pieces.values()) for plan in snapshot.engine.committed(name)]
    _add_rest(found, means)
    return found


def _texts(addresses: Iterable[bytes]) -> list[str]:
    return [unpack(address) for address in addresses]


def _detector(detector: Detector) -> str:
    kinds = {"network": "from", "bridge": "in by bridge", "prefix": "in by interfaces"}
    return f"{kinds[detector.kind]} {detector.value}" if detector.implemented else "unknown"


def _pool(pool: Pool) -> list[str]:
    return [destination_text(destination) for destination in pool]


def _port(plan: ServicePlan, pieces: Collection[Slice]) -> Json:
    found: Json = {
        "name": plan.key.port_name,
        "protocol": PROTOCOL_NAMES[plan.key.protocol],
        "family": plan.key.family.label,
        "frontends": [_frontend(plan, frontend) for frontend in plan.frontends],
        "endpoints": _pool(plan.cluster),
        "localEndpoints": _pool(plan.local),
    }
    if len(plan.serving) > len(plan.cluster):
        used = {*plan.cluster, *plan.local, *(plan.balance.drained if plan.balance is not None else ())}
        if (others := tuple(one for one in plan.serving if one not in used)) or plan.balance is None:
            found["otherEndpoints"] = _pool(others)
    if not plan.usable and lacks_port(pieces, plan.key):
        name = f"named {plan.key.port_name}" if plan.key.port_name else "without a name"
        found["reason"] = f"no endpoint has a port {name} ({PROTOCOL_NAMES[plan.key.protocol]})"
    if plan.affinity:
        found["affinitySeconds"] = plan.affinity
    if plan.balance is not None:
        _add_balance(found, plan, plan.balance)
    return found


def _add_balance(found: Json, plan: ServicePlan, balance: Balance) -> None:
    """Add the shares of connections, if they are not equal."""
    pools = ("weights", plan.cluster, balance.cluster), ("localWeights", plan.local, balance.local)
    for name, pool, weights in pools:
        if weights:
            found[name] = dict(zip(_pool(pool), weights, strict=True))
    if balance.drained:
        found["drainedEndpoints"] = _pool(balance.drained)
    if balance.hashing is not None:
        over = "address" if balance.hashing.key is HashKey.CLIENT else "address and port"
        found["algorithm"] = f"Maglev, {balance.hashing.size} slots, by the client's {over}"


def _frontend(plan: ServicePlan, frontend: Frontend) -> Json:
    traffic, sources = plan.traffic(frontend), plan.sources(frontend)
    found: Json = {
        "kind": frontend.kind.name.lower(),
        "address": place_text(frontend.address, frontend.port),
        "fromPods": _ACTIONS[traffic.pod],
        "fromNode": _ACTIONS[traffic.node],
        "fromOutside": _ACTIONS[traffic.outside],
    }
    if sources is not None:
        found["sources"] = [text for ends in sources for text in _networks(*ends)]
    return found


def _networks(first: bytes, last: bytes) -> list[str]:
    ends = ip_address(first), ip_address(last)
    return [str(network) for network in summarize_address_range(*ends)]


def _add_rest(found: Json, compiled: Compiled) -> None:
    if compiled.health is not None:
        counts = {family.label: count for family, count in compiled.health.counts}
        found["healthCheck"] = {"port": compiled.health.port, "localEndpoints": counts}
    if compiled.problems:
        found["problems"] = [f"{problem.field}: {problem.reason}" for problem in compiled.problems]
