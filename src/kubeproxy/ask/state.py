"""/debug/state: what is programmed for each Service, and which versions of which objects that is. JSON or text.

Read from the planner when asked; nothing is kept for it. Services are written a few at a time, with the event loop
running in between: what changes meanwhile is seen as it is when its turn comes. What may be asked is in state_query.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from heapq import merge
from ipaddress import ip_address, summarize_address_range
from typing import Any, Final, Literal, Protocol

from msgspec import Struct

from kubeproxy.ask.state_query import Query, parse_query
from kubeproxy.ask.state_text import node_text, service_text
from kubeproxy.model.absence import lacks_port
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, destination_text, place_text, unpack
from kubeproxy.model.compile import of_another_proxy, skipped
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
from kubeproxy.model.planner import Change, Planner
from kubeproxy.observe.http import JSON, TEXT, Request, Response, refused
from kubeproxy.observe.standing import WORST_FIRST, FamilyStanding, shown, trouble
from kubeproxy.observe.text import json_bytes, printable
from kubeproxy.release import build

_AT_ONCE: Final = 16  # Services written before the loop has its turn: 1 ms
_RUN: Final = 200  # names looked at before the loop has its turn: below 1 ms

Json = dict[str, Any]

_ACTIONS: Final[Mapping[Action, str]] = {
    Action.CLUSTER: "endpoints",
    Action.CLUSTER_MASQUERADE: "endpoints, masqueraded",
    Action.LOCAL: "local endpoints",
    Action.LOCAL_MASQUERADE: "local endpoints, masqueraded",
    Action.REJECT: "reject",
    Action.DROP: "drop",
}


class Health(Protocol):
    """What is shown of the proxy's health."""

    def unready(self) -> dict[str, str]:
        """Return why the proxy is not ready, by the name of the check; empty when it is."""

    def last_updated(self, family: str) -> str | None:
        """Return when everything queued was programmed the last time, None for never."""


class KernelProgress(Struct, frozen=True):
    """How far the kernel is: the Services with changes on their way to it, the plans that it last took of a Service,
    and how each family stands. `complete` is the state of a Service of which nothing is missing.
    """

    queued: Callable[[], Mapping[ServiceName, Change]]
    committed: Callable[[ServiceName], Sequence[ServicePlan]]
    standings: Callable[[], tuple[FamilyStanding, ...]]
    complete: Literal["programmed", "planned"] = "programmed"


class ProgrammedState:
    """Answers /debug/state."""

    def __init__(self, mode: str, planner: Planner, kernel: KernelProgress, health: Health) -> None:
        self.kernel = kernel
        self.health = health
        self._mode = mode
        self._planner = planner

    def handle(self, request: Request) -> Response:
        """Answer a request; see docs/operating.md."""
        try:
            query = parse_query(request)
        except ValueError as error:
            return refused(400, str(error))
        if query.namespace and query.name and self.verdict((query.namespace, query.name)) is None:
            return refused(404, unwatched((query.namespace, query.name)))
        return Response(200, TEXT if query.text else JSON, self._pieces(query))

    def node(self) -> Json:
        """Return what holds for all Services."""
        world, unready = self._planner.world, self.health.unready()
        kernels = {standing.family: shown(standing) for standing in self.kernel.standings()}
        families: Json = {}
        for family in world.families:
            ours = world.of(family) or FamilyGlobals()
            families[family.label] = {
                **kernels[family],
                "lastSynced": self.health.last_updated(family.label),
                "nodeAddresses": _texts(ours.node_ips),
                "nodePortAddresses": "all but loopback" if ours.nodeport_ips is None else _texts(ours.nodeport_ips),
                "podTraffic": _detector(ours.detector),
            }
        return {
            "version": build(),
            "mode": self._mode,
            "node": world.node_name,
            "zone": world.zone,
            "ready": not unready,
            "unready": unready,
            "families": families,
            "serviceCount": len(self._planner.services),
            "pendingCount": len(self.kernel.queued()) + self._planner.dirty,
        }

    def verdict(self, name: ServiceName) -> tuple[str, str] | None:
        """Return the state of a Service, and the reason of one that needs any; None when it is unknown."""
        planner, queued = self._planner, name in self.kernel.queued()
        service, compiled = planner.services.get(name), planner.compiled.get(name)
        if service is None and not queued and not _proxy_names(planner.slices.get(name, {})):
            return None
        plans = (*(compiled or NOTHING).plans, *self.kernel.committed(name))
        unsound = self._unsound({plan.key.family for plan in plans})
        reasons = "; ".join(f"{family}: {why}" for _, family, why in unsound)
        if service is None and queued:
            return "deleting", reasons
        if unsound:
            return min((state for state, _, _ in unsound), key=WORST_FIRST.index), reasons
        if queued or (service is not None and (compiled is None or planner.is_dirty(name))):
            return "pending", ""
        if not (compiled or NOTHING).plans:
            return "ignored", self._why_ignored(name)
        return self.kernel.complete, ""

    def service(self, name: ServiceName) -> Json | None:
        """Return what is programmed for a Service, None when it is unknown."""
        verdict = self.verdict(name)
        if verdict is None:
            return None
        planner, (state, reason) = self._planner, verdict
        service, pieces = planner.services.get(name), planner.slices.get(name, {})
        means = planner.compiled.get(name, NOTHING)
        found: Json = {"namespace": name[0], "name": name[1], "state": state}
        if service is not None:
            found["resourceVersion"] = service.metadata.resource_version
        if state != "deleting":
            found["slices"] = {piece: pieces[piece].version for piece in sorted(pieces)}
            if zones := {a: zone for piece in pieces.values() for a, zone in (piece.zones or {}).items()}:
                found["zones"] = {unpack(address): zones[address] for address in sorted(zones)}
        if reason:
            found["reason"] = reason
        if service is not None and not planner.is_dirty(name):
            found["ports"] = [_port(plan, pieces.values()) for plan in means.plans]
        if state not in {self.kernel.complete, "ignored"}:
            found["committed"] = [_port(plan, pieces.values()) for plan in self.kernel.committed(name)]
        _add_rest(found, means)
        return found

    def _unsound(self, families: Collection[Family]) -> list[tuple[str, str, str]]:
        """Return state, label and reason of those of some families whose kernel may lack what it took."""
        standings = self.kernel.standings() if families else ()
        return [
            (wrong[0], standing.family.label, wrong[1])
            for standing in standings
            if standing.family in families and (wrong := trouble(standing)) is not None
        ]

    def _why_ignored(self, name: ServiceName) -> str:
        """Return why nothing is programmed for a Service that is known, if only from its EndpointSlices."""
        service = self._planner.services.get(name)
        if service is None:
            return of_another_proxy(_proxy_names(self._planner.slices[name])[0])
        families = " and ".join(family.label for family in self._planner.world.families)
        return skipped(service) or f"it has no port and address that can be used on this node ({families})"

    async def _names(self, query: Query) -> AsyncGenerator[ServiceName, None]:
        """Yield the Services that may be meant, in order, without looking at 44,000 in one go."""
        if query.namespace and query.name:
            yield (query.namespace, query.name)
            return
        planner = self._planner
        known = list({**planner.services, **self.kernel.queued(), **planner.slices})
        runs = []
        for start in range(0, len(known), _RUN):
            runs.append(sorted(filter(query.covers, known[start : start + _RUN])))
            await asyncio.sleep(0)
        for count, name in enumerate(merge(*runs), 1):
            yield name
            if count % _RUN == 0:
                await asyncio.sleep(0)  # those that are passed over take time as well

    async def _pieces(self, query: Query) -> AsyncGenerator[bytes, None]:
        """Write the node, and the Services in the order of their names."""
        node = self.node()
        yield node_text(node) if query.text else _open(node)
        count, batch, last, more = 0, bytearray(), None, False
        async for name in self._names(query):
            found = self.service(name) if query.finds(self._planner, name) else None
            if found is None:
                continue  # deleted meanwhile, or only slices of it are known
            if query.limit and count == query.limit:
                more = True
                break
            batch += service_text(found) if query.text else (b",\n" if count else b"\n") + json_bytes(found)
            count, last = count + 1, name
            if count % _AT_ONCE == 0:
                yield bytes(batch)
                batch.clear()
                await asyncio.sleep(0)
        token = f"{last[0]}/{last[1]}" if more and last is not None else ""
        if query.text:
            batch += f"\nmore: add continue={printable(token)}\n".encode() * bool(token)
        else:
            batch += b'\n],"continue":' + json_bytes(token or None) + b"}\n"
        yield bytes(batch)


def unwatched(name: ServiceName) -> str:
    """Return why there is no answer for a Service that is unknown."""
    return (
        f"no Service {name[0]}/{name[1]} that is watched: there is none, it is headless (spec.clusterIP is None), or"
        " another proxy's (label service.kubernetes.io/service-proxy-name)"
    )


def _proxy_names(slices: Mapping[str, Slice]) -> list[str]:
    """Return the values of the label by which a Service is another proxy's, as its EndpointSlices have it."""
    return [piece.proxy_name for piece in slices.values() if piece.proxy_name is not None]


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
    """Add how connections are shared, where that is not evenly."""
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


def _open(node: Json) -> bytes:
    """Return the JSON of the node, open for the list of Services."""
    return json_bytes(node)[:-1] + b',\n"services":['
