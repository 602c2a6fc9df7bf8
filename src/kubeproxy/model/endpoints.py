"""Which endpoints a Service has, and which of them take new connections: readiness, termination, topology.

Source: kube-proxy v1.36 pkg/proxy/topology.go and endpointslicecache.go, as REFERENCE "Service semantics" states them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from socket import inet_pton
from sys import intern
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.model.addresses import FAMILIES, PORT_BYTES, PROTOCOLS, Family
from kubeproxy.model.objects import EndpointConditions, EndpointHints, EndpointSlice, NameHint
from kubeproxy.model.plan import Pool, Problem


class Endpoint(Struct, frozen=True, gc=False):
    """One address of a slice, with its state; the port comes from the slice's ports."""

    address: bytes
    node: str | None = None
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


class SlicePort(NamedTuple):
    """A port of a slice: the service port it belongs to, and its number."""

    name: str
    protocol: int
    port: int


class Slice(Struct, frozen=True):
    """An EndpointSlice reduced to what is used. `plain`: all ready, none hinted, no address twice.

    `version` is its resourceVersion, for people who ask what a plan reflects.
    """

    family: Family
    ports: tuple[SlicePort, ...]
    endpoints: tuple[Endpoint, ...]
    plain: bool
    triggered: str | None = None
    problems: tuple[Problem, ...] = ()
    version: str | None = None


def parse_slice(source: EndpointSlice) -> Slice | None:
    """Return the slice in packed form, None for an address type that cannot be programmed (FQDN).

    Entries that make no sense are left out and named in `problems`.
    """
    family = FAMILIES.get(source.address_type)
    if family is None:
        return None
    problems: list[Problem] = []
    ports = tuple(_ports(source, problems))
    endpoints: list[Endpoint] = []
    plain = True
    for i, entry in enumerate(source.endpoints or ()):
        try:
            address = inet_pton(family, entry.addresses[0] if entry.addresses else "")
        except (OSError, ValueError):
            shown = repr(entry.addresses[0][:64]) if entry.addresses else "none"
            problems.append(Problem(f"endpoints[{i}].addresses[0]", f"{shown} is not an {family.label} address"))
            continue
        # A few node names stand in 100,000 endpoints: interned, they take no memory and compare at once.
        node = intern(entry.node_name) if entry.node_name else None
        c, hints = entry.conditions, entry.hints
        if hints is None and (c is None or (c.ready is not False and c.serving is not False and not c.terminating)):
            endpoints.append(Endpoint(address, node))
        else:
            plain = False
            endpoints.append(_particular(address, node, c or _UNKNOWN, hints))
    plain = plain and len({e.address for e in endpoints}) == len(endpoints)
    annotations = source.metadata.annotations
    triggered = annotations.last_change_trigger_time if annotations is not None else None
    version = source.metadata.resource_version
    return Slice(family, ports, tuple(endpoints), plain, triggered, tuple(problems), version)


def _ports(source: EndpointSlice, problems: list[Problem]) -> Iterable[SlicePort]:
    for i, entry in enumerate(source.ports or ()):
        protocol = PROTOCOLS.get(entry.protocol or "TCP")
        if protocol is None:
            problems.append(Problem(f"ports[{i}].protocol", f"{(entry.protocol or '')[:64]!r} is not TCP, UDP or SCTP"))
        elif not entry.port:
            continue  # nil means "all ports": nothing a proxy can forward to; kube-proxy passes it over silently
        elif not 0 < entry.port < 65536:
            problems.append(Problem(f"ports[{i}].port", f"{entry.port} is not between 1 and 65535"))
        else:
            yield SlicePort(entry.name or "", protocol, entry.port)


_UNKNOWN = EndpointConditions()


def _particular(address: bytes, node: str | None, c: EndpointConditions, hints: EndpointHints | None) -> Endpoint:
    """Return an endpoint that is not ready, or is meant for some zones or nodes."""
    zones, nodes = (_names(hints.for_zones), _names(hints.for_nodes)) if hints is not None else ((), ())
    return Endpoint(address, node, c.ready is not False, c.serving is not False, c.terminating is True, zones, nodes)


def _names(entries: list[NameHint] | None) -> tuple[str, ...]:
    return tuple(entry.name for entry in entries) if entries else ()


class Selection(NamedTuple):
    """The endpoints of one service port: who takes new connections, and who may keep old ones.

    `usable`: some endpoint anywhere could take a connection. `local_addresses` are those of the pools' endpoints on
    this node.
    """

    cluster: Pool
    local: Pool
    serving: Pool
    local_addresses: Pool
    usable: bool


class Viewpoint(NamedTuple):
    """Where the selection is made."""

    node: str
    zone: str


NONE = Selection((), (), (), (), False)


def select(
    slices: Iterable[Slice], name: str, protocol: int, view: Viewpoint, uses_cluster: bool, uses_local: bool
) -> Selection:
    """Return the pools of a service port from the slices of its Service and family.

    `uses_cluster` and `uses_local` say which pools the Service's policies can reach; one that is not used is empty.
    """
    matched = [
        (piece, PORT_BYTES[port.port])
        for piece in slices
        for port in piece.ports
        if port.name == name and port.protocol == protocol
    ]
    if not matched:
        return NONE
    if len(matched) == 1 and matched[0][0].plain:
        return _select_plain(matched[0][0], matched[0][1], view, uses_cluster, uses_local)
    return _select_any(_merge(matched, view.node), view, uses_cluster, uses_local)


def _select_plain(piece: Slice, port: bytes, view: Viewpoint, uses_cluster: bool, uses_local: bool) -> Selection:
    """One slice, all ready, no hints: nearly every Service; there is nothing to choose."""
    node = view.node
    everyone = tuple(sorted([e.address + port for e in piece.endpoints]))
    here = [e.address for e in piece.endpoints if e.node == node]
    local = tuple(sorted([a + port for a in here])) if here and uses_local else ()
    return Selection(everyone if uses_cluster else (), local, everyone, tuple(sorted(here)), bool(everyone))


def _merge(matched: list[tuple[Slice, bytes]], node: str) -> dict[bytes, Endpoint]:
    """Return the endpoints by destination. Of two alike the one that is not terminating wins, then the local one."""
    merged: dict[bytes, Endpoint] = {}
    for piece, port in matched:
        for endpoint in piece.endpoints:
            destination = endpoint.address + port
            other = merged.get(destination)
            if other is None or _rank(endpoint, node) > _rank(other, node):
                merged[destination] = endpoint
    return merged


def _rank(e: Endpoint, node: str) -> tuple[bool, bool, bool, bool, tuple[str, ...], tuple[str, ...], str]:
    return not e.terminating, e.node == node, e.ready, e.serving, e.zones, e.nodes, e.node or ""


def _select_any(merged: dict[bytes, Endpoint], view: Viewpoint, uses_cluster: bool, uses_local: bool) -> Selection:
    ready = {d: e for d, e in merged.items() if e.ready}
    draining = {d: e for d, e in merged.items() if not e.ready and e.serving and e.terminating}
    cluster: Pool = ()
    if uses_cluster:
        reachable = _topology(ready.values(), view)
        cluster = tuple(sorted(d for d, e in ready.items() if reachable(e)) or sorted(draining))
    local: Pool = ()
    if uses_local:
        node = view.node
        local = tuple(
            sorted(d for d, e in ready.items() if e.node == node)
            or sorted(d for d, e in draining.items() if e.node == node)
        )
    here = {merged[d].address for d in (*cluster, *local) if merged[d].node == view.node}
    serving = tuple(sorted(d for d, e in merged.items() if e.ready or e.serving))
    return Selection(cluster, local, serving, tuple(sorted(here)), bool(ready or draining))


def _topology(ready: Iterable[Endpoint], view: Viewpoint) -> Callable[[Endpoint], bool]:
    """Return the filter of the hints: this node if every endpoint has node hints and one names it, zones likewise.

    Source: KEP-3015 (PreferSameNode, PreferSameZone), KEP-2433 (topology aware hints).
    """
    endpoints = list(ready)
    if endpoints and all(e.nodes for e in endpoints) and any(view.node in e.nodes for e in endpoints):
        return lambda e: view.node in e.nodes
    if endpoints and view.zone and all(e.zones for e in endpoints) and any(view.zone in e.zones for e in endpoints):
        return lambda e: view.zone in e.zones
    return lambda _: True
