"""Reads the spec and status of a Service once for all its ports and families, and names invalid fields. Pure. Source:
docs/reference.md "Service semantics"; kube-proxy v1.36 pkg/proxy/serviceport.go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.model.addresses import PROTOCOLS, Family, Range, covers_all, family_of, is_special, pack, parse_network
from kubeproxy.model.cilium import Kinds, denies, outside_of, served_kinds
from kubeproxy.model.objects import Service, ServicePort, ServiceSpec
from kubeproxy.model.plan import LONGEST_AFFINITY, Globals, Policies, Policy, Problem

DEFAULT_AFFINITY_SECONDS = 10800  # core/v1 DefaultClientIPServiceAffinitySeconds


class SpecPort(NamedTuple):
    """A valid entry of spec.ports; node_port is 0 without a NodePort."""

    name: str
    protocol: int
    port: int
    node_port: int


class ServiceFacts(Struct, frozen=True, gc=False):
    """The parts of a Service's spec that apply to all its ports and families."""

    name: tuple[str, str]
    ports: Sequence[SpecPort]
    cluster_ips: Mapping[Family, bytes]
    external_ips: Mapping[Family, Sequence[bytes]]
    balancer_ips: Mapping[Family, Sequence[bytes]]
    source_ranges: Mapping[Family, tuple[Range, ...]]  # a missing family admits all clients
    policies: Policies
    affinity: int
    health_port: int
    kinds: Kinds | None  # the kinds of frontends that are served; None if all are served


def read_spec(service: Service, world: Globals, problems: list[Problem]) -> ServiceFacts:
    """Read a Service's spec and status; add a problem for each invalid field."""
    spec, meta = service.spec, service.metadata
    ingress = service.status.load_balancer.ingress if service.status and service.status.load_balancer else None
    balancer_ips = [i.ip for i in ingress if i.ip and i.ip_mode in (None, "", "VIP")] if ingress else ()
    outside = spec.external_ips if world.external_ips == "served" else None
    # Positional arguments are faster, and this code runs for every Service.
    return ServiceFacts(
        (meta.namespace or "", meta.name),
        _ports(spec.ports or (), problems),
        _cluster_ips(spec, problems),
        _addresses(outside, "spec.externalIPs", problems) if outside else _NO_ADDRESSES,
        _addresses(balancer_ips, "status.loadBalancer.ingress", problems) if balancer_ips else _NO_ADDRESSES,
        _source_ranges(service, world, problems) if spec.load_balancer_source_ranges else _NO_RANGES,
        _policies(spec, problems),
        _affinity(spec, problems) if spec.session_affinity not in _NO_AFFINITY else 0,
        _health_port(spec, problems) if spec.health_check_node_port else 0,
        served_kinds(meta.annotations, world, problems) if meta.annotations is not None else None,
    )


_NO_AFFINITY = (None, "", "None")


def _shown(text: str | None) -> str:
    return repr((text or "")[:64])


def _ports(entries: Sequence[ServicePort], problems: list[Problem]) -> Sequence[SpecPort]:
    if len(entries) == 1 and not entries[0].node_port:  # the usual case; cached, because many ports are equal
        ports, wrong = _one_port(entries[0].port, entries[0].name, entries[0].protocol)
        problems += wrong
        return ports
    return _read_ports(entries, problems)


@lru_cache(maxsize=1024)
def _one_port(number: int, name: str | None, protocol: str | None) -> tuple[Sequence[SpecPort], Sequence[Problem]]:
    problems: list[Problem] = []
    return tuple(_read_ports((ServicePort(number, name, protocol),), problems)), tuple(problems)


def _read_ports(entries: Sequence[ServicePort], problems: list[Problem]) -> Sequence[SpecPort]:
    ports: list[SpecPort] = []
    names: set[tuple[str, int]] = set()
    numbers: set[tuple[int, int]] = set()
    node_ports: set[tuple[int, int]] = set()
    for i, entry in enumerate(entries):
        where = f"spec.ports[{i}]"
        protocol = PROTOCOLS.get(entry.protocol or "TCP")
        node_port = entry.node_port or 0
        if protocol is None:
            problems.append(
                Problem(f"{where}.protocol", f"{_shown(entry.protocol)} is not TCP, UDP or SCTP; port skipped")
            )
            continue
        if not 0 < entry.port < 65536:
            problems.append(Problem(f"{where}.port", f"{entry.port} is not between 1 and 65535; port skipped"))
            continue
        if not 0 <= node_port < 65536:
            problems.append(Problem(f"{where}.nodePort", f"{node_port} is not between 1 and 65535; no NodePort"))
            node_port = 0
        name = entry.name or ""
        if (name, protocol) in names or (protocol, entry.port) in numbers:
            problems.append(Problem(where, "repeats the name or the number of an earlier port; port skipped"))
            continue
        if (protocol, node_port) in node_ports:
            problems.append(Problem(f"{where}.nodePort", f"{node_port} is an earlier port's already; no NodePort"))
            node_port = 0
        if node_port:
            node_ports.add((protocol, node_port))
        names.add((name, protocol))
        numbers.add((protocol, entry.port))
        ports.append(SpecPort(name, protocol, entry.port, node_port))
    return ports


def _cluster_ips(spec: ServiceSpec, problems: list[Problem]) -> dict[Family, bytes]:
    usable: dict[Family, bytes] = {}
    for text in spec.cluster_ips or (spec.cluster_ip or "",):
        address = pack(text)
        if address is None or address in _UNSPECIFIED:
            field = "spec.clusterIPs" if spec.cluster_ips else "spec.clusterIP"
            problems.append(Problem(field, f"{_shown(text)} is no usable IP address; skipped"))
        else:
            usable.setdefault(family_of(address), address)
    return usable


_UNSPECIFIED = (b"\0" * 4, b"\0" * 16)
_NO_ADDRESSES: Mapping[Family, Sequence[bytes]] = {}
_NO_RANGES: Mapping[Family, tuple[Range, ...]] = {}


def _addresses(texts: Sequence[str], field: str, problems: list[Problem]) -> Mapping[Family, Sequence[bytes]]:
    by_family: dict[Family, list[bytes]] = {}
    for text in texts:
        address = pack(text)
        if address is None or not any(address):
            problems.append(Problem(field, f"{_shown(text)} is no usable IP address; skipped"))
            continue
        # The API server checks only spec.externalIPs. A Service must not take loopback or cloud metadata addresses.
        if is_special(address):
            problems.append(Problem(field, f"{_shown(text)} is loopback, link-local or multicast; skipped"))
            continue
        addresses = by_family.setdefault(family_of(address), [])
        if address not in addresses:
            addresses.append(address)
    return by_family


def _source_ranges(service: Service, world: Globals, problems: list[Problem]) -> Mapping[Family, tuple[Range, ...]]:
    """Return the source ranges of families with restricted clients. An entry /0 admits all clients of its family; an
    invalid entry admits none. If an annotation denies the ranges, return all other networks of their families."""
    texts = service.spec.load_balancer_source_ranges or ()
    restricted: dict[Family, list[Range]] = {}
    opened: set[Family] = set()
    unreadable = False
    for i, text in enumerate(texts):
        network = parse_network(text)
        if network is None:
            problems.append(Problem(f"spec.loadBalancerSourceRanges[{i}]", f"{_shown(text)} is no CIDR; skipped"))
            unreadable = True
            continue
        family = family_of(network[0])
        restricted.setdefault(family, []).append(network)
        if covers_all(network):
            opened.add(family)
    if denies(service.metadata.annotations, world, problems):
        return {family: outside_of(tuple(ranges)) for family, ranges in restricted.items()}
    if unreadable:
        for family in Family:
            restricted.setdefault(family, [])
    return {family: tuple(ranges) for family, ranges in restricted.items() if family not in opened}


def _policies(spec: ServiceSpec, problems: list[Problem]) -> Policies:
    is_external = spec.type != "ClusterIP" or bool(spec.external_ips)  # ExternallyAccessible of api/service/util.go
    policies, wrong = _read_policies(spec.internal_traffic_policy, spec.external_traffic_policy, is_external)
    problems += wrong
    return policies


@lru_cache(maxsize=32)
def _read_policies(internal: str | None, external: str | None, is_external: bool) -> tuple[Policies, Sequence[Problem]]:
    """Return the policies (one shared object for all Services with equal policies), and the problems."""
    problems: list[Problem] = []
    for text, field in ((internal, "spec.internalTrafficPolicy"), (external, "spec.externalTrafficPolicy")):
        if text not in (None, "", "Cluster", "Local"):
            problems.append(Problem(field, f"{_shown(text)} is not Cluster or Local; taken as Cluster"))
    used = (internal, external if is_external else None)
    return Policies(*[Policy.LOCAL if text == "Local" else Policy.CLUSTER for text in used]), problems


def _affinity(spec: ServiceSpec, problems: list[Problem]) -> int:
    if spec.session_affinity != "ClientIP":
        problems.append(
            Problem("spec.sessionAffinity", f"{_shown(spec.session_affinity)} is not None or ClientIP; ignored")
        )
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config is not None and config.client_ip is not None else None
    if seconds is None:
        return DEFAULT_AFFINITY_SECONDS
    if not 0 < seconds <= LONGEST_AFFINITY:
        field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
        problems.append(Problem(field, f"{seconds} is not between 1 and 86400; {DEFAULT_AFFINITY_SECONDS} is used"))
        return DEFAULT_AFFINITY_SECONDS
    return seconds


def _health_port(spec: ServiceSpec, problems: list[Problem]) -> int:
    port = spec.health_check_node_port or 0
    if spec.type != "LoadBalancer" or spec.external_traffic_policy != "Local" or not port:
        return 0
    if 0 < port < 65536:
        return port
    problems.append(Problem("spec.healthCheckNodePort", f"{port} is not between 1 and 65535; no health check"))
    return 0
