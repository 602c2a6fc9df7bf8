"""/debug/state: the state of the node and of Services, with the versions of their objects, as JSON or text. The
parameters of a request select Services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from heapq import merge
from ipaddress import ip_address, summarize_address_range
from typing import Any, Final, NamedTuple

from kubeproxy.ask.listing import nodeport_hosts
from kubeproxy.ask.snapshot import Snapshot, unwatched
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, destination_text, host_port, pack, place_text, unpack
from kubeproxy.model.answer import refuses_node
from kubeproxy.model.balancing import weighs_zones
from kubeproxy.model.choosing import NO_PORT, READY, endpoint_states
from kubeproxy.model.endpoints import Slice
from kubeproxy.model.plan import (
    NOTHING,
    Action,
    Balance,
    Detector,
    Frontend,
    Globals,
    HashKey,
    Pool,
    ServiceName,
    ServicePlan,
    ServicePortKey,
)
from kubeproxy.model.planner import Planner
from kubeproxy.release import build
from kubeproxy.server.http import JSON, TEXT, Handler, Request, Response, refused
from kubeproxy.server.text import json_bytes, printable
from kubeproxy.wording import counted

Json = dict[str, Any]

SCHEMA_VERSION: Final = 1
"""The version of docs/answers.schema.json, which increases when a field is removed, or changes its type or meaning."""

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
    for family, ours in world.parts.items():
        families[family.label] = {
            **kernels[family],
            "lastSynced": snapshot.health.last_updated(family.label),
            "nodeAddresses": list(map(unpack, ours.node_ips)),
            "nodePortAddresses": "all but loopback"
            if ours.nodeport_ips is None
            else list(map(unpack, ours.nodeport_ips)),
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
    """Return the state of a Service, or None if the Service is unknown."""
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
        weighed = pieces.values() if known is not None and weighs_zones(known.metadata.annotations) else ()
        if zones := {one.address: one.zone for piece in weighed for one in piece.endpoints if one.zone}:
            found["zones"] = {unpack(address): zones[address] for address in sorted(zones)}
    if reason:
        found["reason"] = reason
    if known is not None and not planner.is_dirty(name):
        found["ports"] = [_port(plan, pieces.values(), snapshot) for plan in means.plans]
    if state not in {snapshot.complete, "ignored"}:
        found["committed"] = [_port(plan, pieces.values(), snapshot) for plan in snapshot.engine.committed(name)]
    if means.health is not None:
        counts = {family.label: count for family, count in means.health.counts}
        found["healthCheck"] = {"port": means.health.port, "localEndpoints": counts}
    if means.problems:
        found["problems"] = [f"{problem.field}: {problem.reason}" for problem in means.problems]
    return found


def _detector(detector: Detector) -> str:
    kinds = {"network": "from", "bridge": "in by bridge", "prefix": "in by interfaces"}
    return f"{kinds[detector.kind]} {detector.value}" if detector.implemented else "unknown"


def _pool(pool: Pool) -> list[str]:
    return [destination_text(destination) for destination in pool]


def _port(plan: ServicePlan, pieces: Collection[Slice], snapshot: Snapshot) -> Json:
    found: Json = {
        "name": plan.key.port_name,
        "protocol": PROTOCOL_NAMES[plan.key.protocol],
        "family": plan.key.family.label,
        "frontends": [_frontend(plan, frontend, snapshot) for frontend in plan.frontends],
        "endpoints": _pool(plan.cluster),
        "localEndpoints": _pool(plan.local),
    }
    if plan.port_ranges:
        found["portRanges"] = [
            _frontend(plan, span, snapshot) | {"address": unpack(span.address), "ports": span.port_text}
            for span in plan.port_ranges
        ]
    if len(plan.serving) > len(plan.cluster):
        drained = plan.balance.drained if plan.balance is not None else ()
        used = {*plan.cluster, *plan.local, *drained, *(plan.ejected or ())}
        if (others := tuple(one for one in plan.serving if one not in used)) or not (drained or plan.ejected):
            found["otherEndpoints"] = _pool(others)
    if not plan.usable and (reason := _lacking(endpoint_states(pieces, plan.key), plan.key)):
        found["reason"] = reason
    if plan.affinity:
        found["affinitySeconds"] = plan.affinity
    if plan.balance is not None:
        _add_balance(found, plan, plan.balance)
    if plan.ejected:
        reasons = snapshot.planner.ejections.reasons(plan)
        found["ejectedEndpoints"] = {destination_text(one): reasons[one] for one in plan.ejected}
    return found


def _lacking(states: Mapping[str, int], key: ServicePortKey) -> str:
    """Return the reason why a port has no available endpoint; '' if an endpoint is ready."""
    if NO_PORT in states:
        name = f"named {key.port_name}" if key.port_name else "without a name"
        return f"no endpoint has a port {name} ({PROTOCOL_NAMES[key.protocol]})"
    if READY in states:
        return ""
    texts = (f"{count} {'is' if count == 1 else 'are'} {state}" for state, count in sorted(states.items()))
    nothing = f"no EndpointSlice has an {key.family.label} endpoint: spec.selector matches no pod, or is missing"
    return ", ".join(texts) or nothing


def _add_balance(found: Json, plan: ServicePlan, balance: Balance) -> None:
    pools = ("weights", plan.cluster, balance.cluster), ("localWeights", plan.local, balance.local)
    for name, pool, weights in pools:
        if weights:
            found[name] = dict(zip(_pool(pool), weights, strict=True))
    if balance.drained:
        found["drainedEndpoints"] = _pool(balance.drained)
    if balance.hashing is not None:
        over = "address" if balance.hashing.key is HashKey.CLIENT else "address and port"
        found["algorithm"] = f"Maglev, {balance.hashing.size} slots, by the client's {over}"


def _frontend(plan: ServicePlan, frontend: Frontend, snapshot: Snapshot) -> Json:
    traffic, sources = plan.traffic(frontend), plan.sources(frontend)
    unhandled = traffic.node is Action.REJECT and not refuses_node(snapshot.mode.habits, frontend, snapshot.addresses)
    found: Json = {
        "kind": frontend.kind.name.lower(),
        "address": place_text(frontend.address, frontend.port),
        "fromPods": _ACTIONS[traffic.pod],
        "fromNode": "not handled" if unhandled else _ACTIONS[traffic.node],
        "fromOutside": _ACTIONS[traffic.outside],
    }
    if sources is not None:
        ends = (map(ip_address, each) for each in sources)
        found["sources"] = [str(network) for each in ends for network in summarize_address_range(*each)]
    return found


DRAINED: Final = "drained"
_POOLS = (
    ("endpoints", "endpoints", "weights"),
    ("localEndpoints", "local", "localWeights"),
    ("drainedEndpoints", DRAINED, ""),
    ("ejectedEndpoints", "ejected", "ejectedEndpoints"),
    ("otherEndpoints", "others", ""),
)
"""Groups of endpoints in the text: their key in the JSON, their label, and the key of their weights or reasons."""


def node_text(node: Json) -> bytes:
    """Return the lines about the node."""
    zone = f" in zone {node['zone']}" if node["zone"] else ""
    ready = "ready" if node["ready"] else "not ready"
    counts = f"{counted(node['serviceCount'], 'Service')}, {node['pendingCount']} pending"
    lines = [f"kube-proxy {node['version']}, mode {node['mode']}, node {node['node']}{zone}: {ready}, {counts}"]
    lines += [f"  {check}: {reason}" for check, reason in node["unready"].items()]
    for family, facts in node["families"].items():
        ports = facts["nodePortAddresses"]
        where = ports if isinstance(ports, str) else ", ".join(ports) or "no address"
        since = f" since {facts['wholeSince']}" if facts["wholeSince"] else ""
        seen = f"last seen whole {facts['lastSeenWhole'] or 'never'}"
        lines.append(f"{family}: {facts['state']}{since}, {seen}, last synced {facts['lastSynced'] or 'never'}")
        lines.append(f"  traffic of pods: {facts['podTraffic']}; NodePorts on: {where}")
        lines += [f"  {state}: {facts[state]}" for state in ("refused", "differs") if facts[state]]
    return _page(lines)


def service_text(found: Json, here: Globals) -> bytes:
    """Return an empty line, and then the lines of one Service. NodePorts have their addresses on the node `here`, as in
    listing.addresses."""
    lines = [f"{found['namespace']}/{found['name']}: {found['state']}{_version(found.get('resourceVersion'))}"]
    if "reason" in found:
        lines.append(f"  {found['reason']}")
    lines += [f"  slice {name}{_version(version)}" for name, version in found.get("slices", {}).items()]
    zones = found.get("zones", {})
    for zone in sorted(set(zones.values())):
        lines.append(f"  zone {zone}: {' '.join(address for address, its in zones.items() if its == zone)}")
    lines += [f"  problem: {problem}" for problem in found.get("problems", ())]
    if "healthCheck" in found:
        health = found["healthCheck"]
        counts = ", ".join(f"{count} {family}" for family, count in health["localEndpoints"].items())
        lines.append(f"  health check port {health['port']}, local endpoints: {counts}")
    committed = found.get("committed", ())
    for port in found.get("ports", ()):
        title = "wanted: " if port not in committed and "committed" in found else ""
        lines += _port_lines(port, title, here)
    for port in committed:
        if port not in found.get("ports", ()):
            lines += _port_lines(port, "last committed: ", here)
    return b"\n" + _page(lines)


def _page(lines: list[str]) -> bytes:
    return "".join(f"{printable(line)}\n" for line in lines).encode()


def _version(version: str | None) -> str:
    return f", version {version}" if version else ""  # objects from a manifest folder have no version


def _port_lines(port: Json, title: str, here: Globals) -> Iterator[str]:
    affinity = f", affinity {port['affinitySeconds']} s" if "affinitySeconds" in port else ""
    affinity += f", {port['algorithm']}" if "algorithm" in port else ""
    name = f"{port['name']} " if port["name"] else ""
    yield f"  {title}{name}{port['protocol']} {port['family']}{affinity}"
    for frontend in (*port["frontends"], *port.get("portRanges", ())):
        ways = {"pods": frontend["fromPods"], "node": frontend["fromNode"], "outside": frontend["fromOutside"]}
        parts = []
        for action in dict.fromkeys(ways.values()):
            origins = [origin for origin, given in ways.items() if given == action]
            parts.append(f"{'all' if len(origins) == 3 else ', '.join(origins)} -> {action}")
        where = " ports ".join(frontend[key] for key in ("address", "ports") if key in frontend)
        if frontend["kind"] == "nodeport":
            hosts, number = nodeport_hosts(port["family"], here), where.removeprefix("*:")
            where = ", ".join(host_port(host, number) for host in hosts) or f"port {number} at no address"
        yield f"    {frontend['kind']:12} {where:21} {'; '.join(parts)}"
        if "sources" in frontend:
            yield f"    {'':12} only from {', '.join(frontend['sources']) or 'nowhere'}"
    if "reason" in port or not any(port.get(key) for key, _, _ in _POOLS):
        yield f"    {'endpoints':12} none (x)" + (f": {port['reason']}" if "reason" in port else "")
    for label, texts in pools(port):
        yield f"    {label:12} {' '.join(texts.values())}"


def pools(port: Json) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the groups of endpoints of a port: their label, and the text of each endpoint, with its weight or the
    reason of its ejection in brackets."""
    for key, label, weights in _POOLS:
        if port.get(key):
            weighed = port.get(weights, {})
            yield label, {one: f"{one} ({weighed[one]})" if one in weighed else one for one in port[key]}


_PARAMETERS: Final = frozenset(("namespace", "name", "address", "port", "limit", "continue", "format"))
_AT_ONCE: Final = 16  # Services (1 ms of work) before the event loop runs
_RUN: Final = 200  # compared names (less than 1 ms of work) before the event loop runs
_LONGEST_NUMBER: Final = 9  # digits; a longer number is invalid


class Query(NamedTuple):
    """The parameters of a request; empty parameters select everything. `after` is the last Service of the previous
    page."""

    namespace: str = ""
    name: str = ""
    address: bytes = b""
    port: int = 0
    limit: int = 0
    after: ServiceName | None = None
    text: bool = False

    def covers(self, name: ServiceName) -> bool:
        """Return whether a Service's name matches the query."""
        return (
            self.namespace in ("", name[0]) and self.name in ("", name[1]) and (self.after is None or name > self.after)
        )

    def finds(self, planner: Planner, name: ServiceName) -> bool:
        """Return whether a Service has the address and the port, as a frontend, a NodePort, a health check port, or an
        endpoint (ready or not). An address of this node matches a NodePort only together with a port."""
        if not (self.address or self.port):
            return True
        compiled = planner.compiled.get(name, NOTHING)
        if any(self._is(planner, plan.key.family, f) for plan in compiled.plans for f in plan.all_frontends):
            return True
        check = compiled.health
        if check is not None and check.port == self.port:
            return any(self._answers(planner, family) for family, _ in check.counts)
        return bool(self.address) and self._has_endpoint(planner, name)

    def _is(self, planner: Planner, family: Family, frontend: Frontend) -> bool:
        if self.port and not frontend.port <= self.port <= frontend.last_port:
            return False
        return frontend.address == self.address if frontend.address and self.address else self._answers(planner, family)

    def _answers(self, planner: Planner, family: Family) -> bool:
        if not self.address:
            return True
        ours = planner.world.of(family)
        return bool(self.port) and ours is not None and self.address in {*ours.node_ips, *(ours.nodeport_ips or ())}

    def _has_endpoint(self, planner: Planner, name: ServiceName) -> bool:
        slices = planner.slices.get(name, {}).values()
        return any(
            piece.holds(self.address) and (not self.port or any(port.port == self.port for port in piece.ports))
            for piece in slices
        )


def parse_query(request: Request) -> Query:
    """Return the parsed query. Raises ValueError with the parameter and its expected form."""
    given = dict(request.parameters)
    if unknown := given.keys() - _PARAMETERS:
        raise ValueError(f"unknown parameter {sorted(unknown)[0]}; there are {', '.join(sorted(_PARAMETERS))}")
    after, form, address = given.get("continue", ""), given.get("format", ""), given.get("address", "")
    packed = pack(address) if address else b""
    if packed is None:
        raise ValueError(f"address: expected an IPv4 or IPv6 address, got {address!r}")
    if form not in {"", "json", "text"}:
        raise ValueError(f"format: expected json or text, got {form!r}")
    if after and "/" not in after:
        raise ValueError(f"continue: expected namespace/name, got {after!r}")
    prefers_text = "text/plain" in request.accept and "json" not in request.accept
    namespace, _, name = after.partition("/")
    return Query(
        given.get("namespace", ""),
        given.get("name", ""),
        packed,
        _number("port", given, "a number from 1 to 65535", range(1, 65536)),
        _number("limit", given, "a number", range(10**_LONGEST_NUMBER)),
        (namespace, name) if after else None,
        form == "text" or (not form and prefers_text),
    )


def _number(parameter: str, given: dict[str, str], expected: str, allowed: range) -> int:
    text = given.get(parameter, "")
    is_number = text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER
    if text and not (is_number and int(text) in allowed):
        raise ValueError(f"{parameter}: expected {expected}, got {text[:40]!r}")
    return int(text or 0)


def state_page(snapshot: Snapshot) -> Handler:
    """Return the function that answers /debug/state (see docs/operating.md). An answer is written a few Services
    per turn of the event loop, each in its state at that turn."""

    def handle(request: Request) -> Response:
        try:
            query = parse_query(request)
        except ValueError as error:
            return refused(400, str(error))
        if query.namespace and query.name and snapshot.verdict((query.namespace, query.name)) is None:
            return refused(404, unwatched((query.namespace, query.name)))
        return Response(200, TEXT if query.text else JSON, _pieces(snapshot, query))

    return handle


async def _names(snapshot: Snapshot, query: Query) -> AsyncGenerator[ServiceName, None]:
    if query.namespace and query.name:
        yield (query.namespace, query.name)
        return
    known = list(dict.fromkeys((*snapshot.names, *snapshot.planner.slices)))
    runs = []
    for start in range(0, len(known), _RUN):
        runs.append(sorted(filter(query.covers, known[start : start + _RUN])))
        await asyncio.sleep(0)
    for count, name in enumerate(merge(*runs), 1):
        yield name
        if count % _RUN == 0:
            await asyncio.sleep(0)  # skipping Services also takes time


async def _pieces(snapshot: Snapshot, query: Query) -> AsyncGenerator[bytes, None]:
    there, here = node(snapshot), snapshot.planner.world
    # The closing brace of the node's JSON is omitted, because the list of Services follows as a field of this object.
    yield node_text(there) if query.text else json_bytes(there)[:-1] + b',\n"services":['
    count, batch, last, token = 0, bytearray(), "", ""
    async for name in _names(snapshot, query):
        found = service(snapshot, name) if query.finds(snapshot.planner, name) else None
        if found is None:
            continue  # the Service was deleted, or only its slices are known
        if query.limit and count == query.limit:
            token = last
            break
        batch += service_text(found, here) if query.text else (b",\n" if count else b"\n") + json_bytes(found)
        count, last = count + 1, "/".join(name)
        if count % _AT_ONCE == 0:
            yield bytes(batch)
            batch.clear()
            await asyncio.sleep(0)
    if query.text:
        batch += f"\nmore: add continue={printable(token)}\n".encode() * bool(token)
    else:
        batch += b'\n],"continue":' + json_bytes(token or None) + b"}\n"
    yield bytes(batch)
