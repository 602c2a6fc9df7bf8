"""/debug/state: what is programmed for each Service, and which versions of which objects that is. JSON or text.

Read from the planner when asked; nothing is kept for it. Services are written a few at a time, with the event loop
running in between: what changes meanwhile is seen as it is when its turn comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from heapq import merge
from ipaddress import ip_address, summarize_address_range
from typing import Any, Final, NamedTuple

from kubeproxy import __version__
from kubeproxy.model.addresses import PROTOCOL_NAMES, destination_text, unpack
from kubeproxy.model.plan import (
    NOTHING,
    Action,
    Compiled,
    Detector,
    FamilyGlobals,
    Frontend,
    Pool,
    ServiceName,
    ServicePlan,
)
from kubeproxy.model.planner import Change, Planner
from kubeproxy.observe.health import ProxyHealth
from kubeproxy.observe.http import JSON, TEXT, Request, Response
from kubeproxy.observe.state_text import node_text, service_text
from kubeproxy.observe.text import clean, json_bytes, printable

_AT_ONCE: Final = 16  # Services written before the loop has its turn: 1 ms
_RUN: Final = 200  # names looked at before the loop has its turn: below 1 ms
_PARAMETERS: Final = frozenset(("namespace", "name", "address", "limit", "continue", "format"))

Json = dict[str, Any]

_ACTIONS: Final[Mapping[Action, str]] = {
    Action.CLUSTER: "endpoints",
    Action.CLUSTER_MASQUERADE: "endpoints, masqueraded",
    Action.LOCAL: "local endpoints",
    Action.LOCAL_MASQUERADE: "local endpoints, masqueraded",
    Action.REJECT: "reject",
    Action.DROP: "drop",
}


class Query(NamedTuple):
    """What is asked for; '' and 0 mean everything. `after` is the last Service of the page before, or None."""

    namespace: str = ""
    name: str = ""
    address: str = ""
    limit: int = 0
    after: ServiceName | None = None
    text: bool = False

    def covers(self, name: ServiceName) -> bool:
        """Return whether the name alone does not rule a Service out."""
        return (
            self.namespace in ("", name[0]) and self.name in ("", name[1]) and (self.after is None or name > self.after)
        )


class ProgrammedState:
    """Answers /debug/state.

    `unapplied` are the Services with changes on their way to the kernel, `refused` says why it did not take them,
    `programmed` what it has of a Service.
    """

    def __init__(
        self,
        mode: str,
        planner: Planner,
        unapplied: Callable[[], Mapping[ServiceName, Change]],
        programmed: Callable[[ServiceName], Sequence[ServicePlan]],
        health: ProxyHealth,
        refused: Callable[[], Mapping[str, str]],
    ) -> None:
        self._mode = mode
        self._planner = planner
        self._unapplied = unapplied
        self._programmed = programmed
        self._health = health
        self._refused = refused

    def handle(self, request: Request) -> Response:
        """Answer a request; see docs/operating.md."""
        try:
            query = parse_query(request)
        except ValueError as error:
            return Response(400, TEXT, f"{printable(clean(str(error)))}\n".encode())
        if query.namespace and query.name and not self._exists((query.namespace, query.name)):
            return Response(404, TEXT, f"{printable(clean(f'no Service {query.namespace}/{query.name}'))}\n".encode())
        return Response(200, TEXT if query.text else JSON, self._pieces(query))

    def node(self) -> Json:
        """Return what holds for all Services."""
        world, refused, unready = self._planner.world, self._refused(), self._health.unready()
        families: Json = {}
        for family in world.families:
            ours = world.of(family) or FamilyGlobals()
            families[family.label] = {
                "lastSynced": self._health.last_updated(family.label),
                "refused": refused.get(family.label),
                "nodeAddresses": _texts(ours.node_ips),
                "nodePortAddresses": "all but loopback" if ours.nodeport_ips is None else _texts(ours.nodeport_ips),
                "podTraffic": _detector(ours.detector),
            }
        return {
            "version": __version__,
            "mode": self._mode,
            "node": world.node_name,
            "zone": world.zone,
            "ready": not unready,
            "unready": unready,
            "families": families,
            "serviceCount": len(self._planner.services),
            "pendingCount": len(self._unapplied()) + self._planner.dirty,
        }

    def service(self, name: ServiceName) -> Json | None:
        """Return what is programmed for a Service, None when it is unknown."""
        planner, unapplied = self._planner, name in self._unapplied()
        service, compiled = planner.services.get(name), planner.compiled.get(name)
        if service is None and not unapplied:
            return None
        found: Json = {"namespace": name[0], "name": name[1], "state": "programmed"}
        shown = compiled or NOTHING
        if service is not None:
            found["resourceVersion"] = service.metadata.resource_version
            pieces = planner.slices.get(name, {})
            found["slices"] = {piece: pieces[piece].version for piece in sorted(pieces)}
        if service is None:
            found["state"] = "deleting"
        elif unapplied or compiled is None or planner.is_dirty(name):
            found["state"] = "pending"
        elif not shown.plans:
            found["state"] = "ignored"
        if service is not None and not planner.is_dirty(name):
            found["ports"] = [_port(plan) for plan in shown.plans]
        if found["state"] in {"deleting", "pending"}:
            found["programmed"] = [_port(plan) for plan in self._programmed(name)]
        _add_rest(found, shown)
        return found

    def _exists(self, name: ServiceName) -> bool:
        return name in self._planner.services or name in self._unapplied()

    async def _names(self, query: Query) -> AsyncGenerator[ServiceName, None]:
        """Yield the Services that may be meant, in order, without looking at 44,000 in one go."""
        if query.namespace and query.name:
            yield (query.namespace, query.name)
            return
        known = list({**self._planner.services, **self._unapplied()})
        runs = []
        for start in range(0, len(known), _RUN):
            runs.append(sorted(filter(query.covers, known[start : start + _RUN])))
            await asyncio.sleep(0)
        for count, name in enumerate(merge(*runs), 1):
            yield name
            if count % _RUN == 0:
                await asyncio.sleep(0)  # those that are passed over take time as well

    def _has(self, name: ServiceName, address: str) -> bool:
        plans = self._planner.compiled.get(name, NOTHING).plans
        return any(f.address and unpack(f.address) == address for plan in plans for f in plan.frontends)

    async def _pieces(self, query: Query) -> AsyncGenerator[bytes, None]:
        """Write the node, and the Services in the order of their names."""
        node = self.node()
        yield node_text(node) if query.text else _open(node)
        count, batch, last, more = 0, bytearray(), None, False
        async for name in self._names(query):
            if query.address and not self._has(name, query.address):
                continue
            found = self.service(name)
            if found is None:
                continue  # deleted meanwhile
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


def parse_query(request: Request) -> Query:
    """Return what a request asks for. Raises ValueError, which says what is wrong."""
    from urllib.parse import parse_qsl  # noqa: PLC0415 - nobody else in a running proxy parses queries

    given = dict(parse_qsl(request.query, keep_blank_values=True))
    if unknown := given.keys() - _PARAMETERS:
        raise ValueError(f"unknown parameter {sorted(unknown)[0]}; there are {', '.join(sorted(_PARAMETERS))}")
    limit, after, form = given.get("limit") or "0", given.get("continue", ""), given.get("format", "")
    if not (limit.isascii() and limit.isdigit()):
        raise ValueError(f"limit: expected a number, got {limit!r}")
    if form not in {"", "json", "text"}:
        raise ValueError(f"format: expected json or text, got {form!r}")
    if after and "/" not in after:
        raise ValueError(f"continue: expected namespace/name, got {after!r}")
    prefers_text = "text/plain" in request.accept and "json" not in request.accept
    namespace, _, name = after.partition("/")
    return Query(
        given.get("namespace", ""),
        given.get("name", ""),
        given.get("address", ""),
        int(limit),
        (namespace, name) if after else None,
        form == "text" or (not form and prefers_text),
    )


def _texts(addresses: Iterable[bytes]) -> list[str]:
    return [unpack(address) for address in addresses]


def _detector(detector: Detector) -> str:
    kinds = {"network": "from", "bridge": "in by bridge", "prefix": "in by interfaces"}
    return f"{kinds[detector.kind]} {detector.value}" if detector.implemented else "unknown"


def _pool(pool: Pool) -> list[str]:
    return [destination_text(destination) for destination in pool]


def _at(address: bytes, port: int) -> str:
    text = unpack(address) if address else "*"
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"


def _port(plan: ServicePlan) -> Json:
    found: Json = {
        "name": plan.key.port_name,
        "protocol": PROTOCOL_NAMES[plan.key.protocol],
        "family": plan.key.family.label,
        "frontends": [_frontend(plan, frontend) for frontend in plan.frontends],
        "endpoints": _pool(plan.cluster),
        "localEndpoints": _pool(plan.local),
    }
    if len(plan.serving) > len(plan.cluster):
        used = {*plan.cluster, *plan.local}
        found["otherEndpoints"] = _pool(tuple(one for one in plan.serving if one not in used))
    if plan.affinity:
        found["affinitySeconds"] = plan.affinity
    return found


def _frontend(plan: ServicePlan, frontend: Frontend) -> Json:
    traffic, sources = plan.traffic(frontend), plan.sources(frontend)
    found: Json = {
        "kind": frontend.kind.name.lower(),
        "address": _at(frontend.address, frontend.port),
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
