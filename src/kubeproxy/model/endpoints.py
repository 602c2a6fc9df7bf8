"""Selects the endpoints of a Service that take new connections, by readiness, termination and topology. Source:
docs/reference.md "Service semantics"; kube-proxy v1.36 pkg/proxy/topology.go and endpointslicecache.go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import lt
from socket import inet_pton
from sys import intern
from typing import Final, NamedTuple

from msgspec import Struct

from kubeproxy.model import objects
from kubeproxy.model.addresses import FAMILIES, PORT_BYTES, PROTOCOLS, Family, family_of, pack
from kubeproxy.model.plan import Globals, Pool, Problem


class Endpoint(Struct, frozen=True, gc=False):
    """An endpoint of an EndpointSlice: one address with its state."""

    address: bytes
    node: str = ""
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zones: tuple[str, ...] = ()  # the hints: zones and nodes that should use this endpoint
    nodes: tuple[str, ...] = ()
    zone: str = ""  # the endpoint's own zone


class SlicePort(NamedTuple):
    """A port of a slice: name and protocol identify the service port; `port` is the endpoints' port."""

    name: str
    protocol: int
    port: int


class Slice(Struct, frozen=True, gc=False):
    """An EndpointSlice reduced to the used fields. If all endpoints are ready and none has hints (the usual case),
    `particular` is None, `destinations` contains the endpoints, and `nodes` and `zones` contain their nodes and
    zones in the same order."""

    family: Family
    ports: tuple[SlicePort, ...]
    destinations: tuple[tuple[bytes, ...], ...]  # for each port: sorted destinations without duplicates
    nodes: tuple[str, ...]  # '' for none
    zones: tuple[str, ...] = ()
    particular: tuple[Endpoint, ...] | None = None  # None, or all endpoints in full form
    triggered: str | None = None
    problems: tuple[Problem, ...] = ()
    version: str | None = None  # the resourceVersion
    proxy_name: str | None = None  # the label service-proxy-name, copied from the Service by the controller
    weight: int | None = None  # the value of the weight annotation

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints in full form."""
        if self.particular is not None:
            return self.particular
        placed = zip(self.destinations[0], self.nodes, self.zones, strict=True)
        return tuple([Endpoint(destination[:-2], node, zone=zone) for destination, node, zone in placed])

    def holds(self, address: bytes) -> bool:
        """Return whether an endpoint has this packed address."""
        if self.particular is not None:
            return any(endpoint.address == address for endpoint in self.particular)
        return address + PORT_BYTES[self.ports[0].port] in self.destinations[0]


class PackedSlice(Struct, frozen=True, gc=False):
    """An EndpointSlice from a list, packed after decoding, because a decoded slice needs ten times the memory."""

    metadata: objects.ObjectMeta
    address_type: str
    piece: Slice | None  # None if the slice belongs to no Service, or its address type cannot be programmed


def packed(source: objects.EndpointSlice) -> PackedSlice:
    """Return the packed form of a slice."""
    labels = source.metadata.labels
    piece = parse_slice(source) if labels is not None and labels.service_name else None
    return PackedSlice(source.metadata, source.address_type, piece)


def parse_slice(source: objects.EndpointSlice) -> Slice | None:
    """Return the packed form of a slice, with `problems` for invalid entries; None if its type is not IPv4 or IPv6."""
    family = FAMILIES.get(source.address_type)
    if family is None:
        return None
    ports, wrong_ports = _ports(source.ports or ())
    annotations = source.metadata.annotations
    triggered = annotations.last_change_trigger_time if annotations is not None else None
    version, labels = source.metadata.resource_version, source.metadata.labels
    proxy = labels.service_proxy_name if labels is not None else None
    weight = None
    if annotations is not None and (annotations.weight is not None or annotations.cilium_weight is not None):
        weight, wrong_weight = _slice_weight(annotations)
        wrong_ports += wrong_weight
    entries = source.endpoints or ()
    if ports and not [e for e in entries if e.hints is not None or ((c := e.conditions) is not None and c != _USUAL)]:
        plain = _plain(entries, ports, family)
        if plain is not None:
            return Slice(family, ports, *plain, None, triggered, wrong_ports, version, proxy, weight)
    particular, problems = _one_by_one(entries, family)
    wrong = (*wrong_ports, *problems)
    return Slice(family, ports, (), (), (), particular, triggered, wrong, version, proxy, weight)


FULL: Final = 100  # the default weight of an endpoint, and the maximum


def annotation_field(name: str) -> str:
    """Return the path of an annotation in an object's metadata."""
    return f"metadata.annotations[kube-proxy-py/{name}]"


def read_number(text: str, most: int = FULL) -> int | None:
    """Parse a number from 0 to `most` (by default the maximum weight); return None if the text is invalid."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else -1
    return number if 0 <= number <= most else None


def _slice_weight(annotations: objects.Annotations) -> tuple[int | None, tuple[Problem, ...]]:
    text, field = annotations.weight, annotation_field("weight")
    if text is None:
        text, field = annotations.cilium_weight or "", "metadata.annotations[service.cilium.io/weight]"
    weight = read_number(text.strip())
    if weight is not None:
        return weight, ()
    reason = f"{text[:64]!r} is no weight from 0 to {FULL}; the annotation is ignored"
    return None, (Problem(field, reason),)


_IPV6 = Family.IPV6  # looked up once, as in model.compile
_AFTER_MAPPED = b"\0" * 9 + b"\x01"
"""A value that sorts after every IPv4-mapped IPv6 address, and before every IPv6 address of a pod."""


def _plain(
    entries: Sequence[objects.SliceEndpoint], ports: Sequence[SlicePort], family: Family
) -> tuple[tuple[tuple[bytes, ...], ...], tuple[str, ...], tuple[str, ...]] | None:
    """Return the destinations of each port, the nodes and the zones, in the order of the addresses; None if an address
    is missing, repeated, or in an unusual form. The code creates no object per endpoint, because the first list may
    contain 100,000 endpoints."""
    number = PORT_BYTES[ports[0].port]
    try:
        first = [inet_pton(family, e.addresses[0]) + number for e in entries]  # type: ignore[index]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # _one_by_one reports the wrong entry
    # 100,000 endpoints have few different nodes and zones: interned names share memory and compare fast.
    nodes: Sequence[str] = [intern(e.node_name or "") for e in entries]
    zones: Sequence[str] = [intern(e.zone or "") for e in entries]
    if not all(map(lt, first, islice(first, 1, None))):
        at = dict(zip(first, zip(nodes, zones, strict=True), strict=True))
        if len(at) < len(first):
            return None
        first.sort()
        nodes, zones = zip(*[at[destination] for destination in first], strict=True)
    if family is _IPV6 and first and first[0] < _AFTER_MAPPED:
        return None
    if len(ports) == 1:
        return (tuple(first),), tuple(nodes), tuple(zones)
    others = [tuple([d[:-2] + number for d in first]) for number in [PORT_BYTES[port.port] for port in ports[1:]]]
    return (tuple(first), *others), tuple(nodes), tuple(zones)


def _one_by_one(entries: Sequence[objects.SliceEndpoint], family: Family) -> tuple[tuple[Endpoint, ...], list[Problem]]:
    problems: list[Problem] = []
    endpoints: list[Endpoint] = []
    for i, entry in enumerate(entries):
        address = pack(entry.addresses[0]) if entry.addresses else None
        if address is None or family_of(address) is not family:
            shown = repr(entry.addresses[0][:64]) if entry.addresses else "none"
            problems.append(Problem(f"endpoints[{i}].addresses[0]", f"{shown} is not an {family.label} address"))
            continue
        endpoints.append(_particular(address, entry))
    return tuple(endpoints), problems


def _ports(entries: Sequence[objects.EndpointPort]) -> tuple[tuple[SlicePort, ...], tuple[Problem, ...]]:
    if len(entries) == 1:  # the usual case; results are cached, because many slices have equal ports
        return _one_port(entries[0].name, entries[0].protocol, entries[0].port)
    problems: list[Problem] = []
    return tuple(_read_ports(entries, problems)), tuple(problems)


@lru_cache(maxsize=1024)
def _one_port(
    name: str | None, protocol: str | None, port: int | None
) -> tuple[tuple[SlicePort, ...], tuple[Problem, ...]]:
    problems: list[Problem] = []
    return tuple(_read_ports((objects.EndpointPort(port, name, protocol),), problems)), tuple(problems)


def _read_ports(entries: Iterable[objects.EndpointPort], problems: list[Problem]) -> Iterable[SlicePort]:
    for i, entry in enumerate(entries):
        protocol = PROTOCOLS.get(entry.protocol or "TCP")
        if protocol is None:
            problems.append(Problem(f"ports[{i}].protocol", f"{(entry.protocol or '')[:64]!r} is not TCP, UDP or SCTP"))
        elif not entry.port:
            continue  # nil means "all ports", to which no proxy can forward; ignored as in the Go kube-proxy
        elif not 0 < entry.port < 65536:
            problems.append(Problem(f"ports[{i}].port", f"{entry.port} is not between 1 and 65535"))
        else:
            yield SlicePort(entry.name or "", protocol, entry.port)


_USUAL = objects.EndpointConditions(ready=True, serving=True, terminating=False)
_UNKNOWN = objects.EndpointConditions()


def _particular(address: bytes, entry: objects.SliceEndpoint) -> Endpoint:
    c, hints = entry.conditions or _UNKNOWN, entry.hints
    ready, serving, terminating = c.ready is not False, c.serving is not False, c.terminating is True
    node, zone = intern(entry.node_name or ""), intern(entry.zone or "")
    zones, nodes = (_names(hints.for_zones), _names(hints.for_nodes)) if hints is not None else ((), ())
    return Endpoint(address, node, ready, serving, terminating, zones, nodes, zone)


def _names(entries: list[objects.NameHint] | None) -> tuple[str, ...]:
    return tuple(entry.name for entry in entries) if entries else ()


class Selection(NamedTuple):
    """The selected endpoints of one service port: the pools for new connections, and the serving endpoints."""

    cluster: Pool
    local: Pool
    serving: Pool  # all endpoints that may keep established connections
    local_addresses: Pool  # the addresses of the pools' endpoints on this node
    usable: bool  # whether an endpoint on any node can take a connection


NONE = Selection((), (), (), (), False)


def offers(slices: Iterable[Slice]) -> Mapping[tuple[str, int], Sequence[tuple[Slice, int]]]:
    """Return the slices of each port (by name and protocol), each with the port's index in the slice."""
    found: dict[tuple[str, int], list[tuple[Slice, int]]] = {}
    for piece in slices:
        for number, port in enumerate(piece.ports):
            found.setdefault((port.name, port.protocol), []).append((piece, number))
    return found


def select(matched: Sequence[tuple[Slice, int]], world: Globals, uses_cluster: bool, uses_local: bool) -> Selection:
    """Return the pools of a service port from the slices that contain the port. `uses_cluster` and `uses_local`:
    whether the Service's policies use the cluster pool, and the local pool; an unused pool is empty."""
    if not matched:
        return NONE
    for piece, _ in matched:
        if piece.particular is not None:
            return _select_any(_merge(matched, world.node_name), world, uses_cluster, uses_local)
    return _select_all(matched, world.node_name, uses_cluster, uses_local)


def _select_all(matched: Sequence[tuple[Slice, int]], node: str, uses_cluster: bool, uses_local: bool) -> Selection:
    parts = [piece.destinations[port] for piece, port in matched]
    everyone = parts[0] if len(parts) == 1 else tuple(sorted(set().union(*parts)))
    cluster = everyone if uses_cluster else ()
    near = [(piece, port) for piece, port in matched if node in piece.nodes]
    if not near:
        return Selection(cluster, (), everyone, (), bool(everyone))
    here = {
        destination
        for piece, port in near
        for destination, at in zip(piece.destinations[port], piece.nodes, strict=True)
        if at == node
    }
    local = tuple(sorted(here)) if uses_local else ()
    return Selection(cluster, local, everyone, tuple(sorted({d[:-2] for d in here})), True)


def _merge(matched: Sequence[tuple[Slice, int]], node: str) -> dict[bytes, Endpoint]:
    """Return the endpoints by destination. Of endpoints with the same destination, prefer an endpoint that does
    not terminate, and then a local endpoint."""
    merged: dict[bytes, Endpoint] = {}
    for piece, number in matched:
        port = PORT_BYTES[piece.ports[number].port]
        for endpoint in piece.endpoints:
            destination = endpoint.address + port
            other = merged.get(destination)
            if other is None or _rank(endpoint, node) > _rank(other, node):
                merged[destination] = endpoint
    return merged


def _rank(e: Endpoint, node: str) -> tuple[bool, bool, bool, bool, tuple[str, ...], tuple[str, ...], str]:
    return not e.terminating, e.node == node, e.ready, e.serving, e.zones, e.nodes, e.node


def _select_any(merged: dict[bytes, Endpoint], world: Globals, uses_cluster: bool, uses_local: bool) -> Selection:
    node = world.node_name
    ready = {d: e for d, e in merged.items() if e.ready}
    draining = {d: e for d, e in merged.items() if not e.ready and e.serving and e.terminating}
    cluster: Pool = ()
    if uses_cluster:
        reachable = _topology(ready.values(), node, world.zone)
        cluster = tuple(sorted(d for d, e in ready.items() if reachable(e)) or sorted(draining))
    local: Pool = ()
    if uses_local:
        local = tuple(
            sorted(d for d, e in ready.items() if e.node == node)
            or sorted(d for d, e in draining.items() if e.node == node)
        )
    here = {merged[d].address for d in (*cluster, *local) if merged[d].node == node}
    serving = tuple(sorted(d for d, e in merged.items() if e.ready or e.serving))
    return Selection(cluster, local, serving, tuple(sorted(here)), bool(ready or draining))


def _topology(ready: Iterable[Endpoint], node: str, zone: str) -> Callable[[Endpoint], bool]:
    """Return the filter that applies hints: by node if every endpoint has node hints and a hint names this node; else
    by zone if every endpoint has zone hints and a hint names this zone; else no endpoint is
    filtered out. Source: KEP-3015 (PreferSameNode, PreferSameZone), KEP-2433."""
    endpoints = list(ready)
    if endpoints and all(e.nodes for e in endpoints) and any(node in e.nodes for e in endpoints):
        return lambda e: node in e.nodes
    if endpoints and zone and all(e.zones for e in endpoints) and any(zone in e.zones for e in endpoints):
        return lambda e: zone in e.zones
    return lambda _: True
