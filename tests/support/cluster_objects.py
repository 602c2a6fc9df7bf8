"""Short constructors of objects and worlds, for tables of cases. Values have the form of manifests; there is no logic
of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from kubeproxy.features import BALANCING, ENTRIES, Features
from kubeproxy.model.addresses import PORT_BYTES, PROTOCOLS, Family, pack
from kubeproxy.model.endpoints import Slice, parse_slice
from kubeproxy.model.objects import (
    Annotations,
    EndpointConditions,
    EndpointHints,
    EndpointPort,
    EndpointSlice,
    Labels,
    LoadBalancerIngress,
    LoadBalancerStatus,
    NameHint,
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
    SliceEndpoint,
)
from kubeproxy.model.plan import Detector, FamilyGlobals, FrontendKind, Globals, ServicePlan

HERE = "node-a"
THERE = "node-b"
PODS = {Family.IPV4: "10.244.0.0/16", Family.IPV6: "fd00:10:244::/64"}
NODE_IPS = {Family.IPV4: "192.0.2.1", Family.IPV6: "2001:db8::1"}


def address(text: str) -> bytes:
    packed = pack(text)
    assert packed is not None, text
    return packed


def dest(text: str) -> bytes:
    """Return the packed form of '10.0.0.1:80' or '[fd00::1]:80'."""
    host, _, port = text.rpartition(":")
    return address(host.strip("[]")) + PORT_BYTES[int(port)]


def dests(*texts: str) -> tuple[bytes, ...]:
    return tuple(sorted(dest(text) for text in texts))


def key(text: str, protocol: str = "TCP") -> bytes:
    """Return a frontend's key from '10.0.0.1:80', '[fd00::1]:80', or ':30080' for a NodePort."""
    host, _, port = text.rpartition(":")
    return (address(host.strip("[]")) if host else b"") + bytes((PROTOCOLS[protocol],)) + PORT_BYTES[int(port)]


def frontend_keys(plan: ServicePlan, kind: FrontendKind) -> set[bytes]:
    return {f.key for f in plan.frontends if f.kind is kind}


def world(
    *,
    node: str = HERE,
    zone: str = "",
    detector: bool | Detector = True,
    masquerade_all: bool = False,
    families: Iterable[Family] = (Family.IPV4, Family.IPV6),
    nodeports: Literal["primary", "all", "none"] = "primary",
    balancing_entries: int = ENTRIES,
) -> Globals:
    parts = {}
    for family in families:
        found = detector if isinstance(detector, Detector) else Detector("network", PODS[family])
        parts[family] = FamilyGlobals(
            detector=found if detector else Detector(),
            node_ips=(address(NODE_IPS[family]),),
            nodeport_ips={"primary": (address(NODE_IPS[family]),), "all": None, "none": ()}[nodeports],
        )
    return Globals(
        node_name=node,
        zone=zone,
        masquerade_all=masquerade_all,
        features=Features({BALANCING.flag: balancing_entries} if balancing_entries != ENTRIES else {}),
        ipv4=parts.get(Family.IPV4),
        ipv6=parts.get(Family.IPV6),
    )


def meta(name: str, namespace: str = "default", created: str | None = None, **more: Any) -> ObjectMeta:
    return ObjectMeta(name=name, namespace=namespace, creation_timestamp=created, **more)


def service(
    name: str = "web",
    *cluster_ips: str,
    ports: Sequence[ServicePort] | None = (ServicePort(port=80),),
    ingress: Sequence[str | LoadBalancerIngress] = (),
    created: str | None = None,
    namespace: str = "default",
    annotations: Annotations | None = None,
    **spec: Any,
) -> Service:
    entries = [i if isinstance(i, LoadBalancerIngress) else LoadBalancerIngress(ip=i) for i in ingress]
    addresses = list(cluster_ips) or ["10.96.0.1"]
    return Service(
        metadata=meta(name, namespace, created, uid=f"uid-of-{name}", annotations=annotations),
        spec=ServiceSpec(
            cluster_ip=addresses[0],
            cluster_ips=addresses,
            ports=list(ports) if ports is not None else None,
            **spec,
        ),
        status=ServiceStatus(LoadBalancerStatus(entries)) if entries else None,
    )


def endpoint(
    text: str,
    node: str | None = THERE,
    *,
    ready: bool | None = None,
    serving: bool | None = None,
    terminating: bool | None = None,
    zones: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> SliceEndpoint:
    conditions = EndpointConditions(ready, serving, terminating)
    hints = None
    if zones or nodes:
        hints = EndpointHints([NameHint(z) for z in zones] or None, [NameHint(n) for n in nodes] or None)
    return SliceEndpoint([text], conditions if conditions != EndpointConditions() else None, node, hints)


def draining(text: str, node: str | None = THERE, **more: Any) -> SliceEndpoint:
    """Return an endpoint that is terminating and still serving."""
    return endpoint(text, node, ready=False, serving=True, terminating=True, **more)


def endpoint_slice(
    *endpoints: SliceEndpoint,
    name: str = "web-1",
    of: str | None = "web",
    namespace: str = "default",
    family: str = "IPv4",
    ports: Sequence[EndpointPort] | None = (EndpointPort(port=8080),),
    triggered: str | None = None,
    weight: str | None = None,
    cilium_weight: str | None = None,
    placed: Mapping[str, str] | None = None,
    version: str | None = None,
) -> EndpointSlice:
    """Return a slice; `placed` contains the zones of addresses."""
    entries = [replace(e, zone=(placed or {}).get((e.addresses or [""])[0])) for e in endpoints]
    annotations = Annotations(triggered, weight, cilium_weight=cilium_weight)
    return EndpointSlice(
        metadata=meta(
            name,
            namespace,
            uid=f"uid-of-{name}",
            labels=Labels(service_name=of) if of is not None else None,
            annotations=annotations if annotations != Annotations() else None,
            resource_version=version,
        ),
        address_type=family,
        endpoints=entries,
        ports=list(ports) if ports is not None else None,
    )


def parsed(*endpoints: SliceEndpoint, **more: Any) -> Slice:
    piece = parse_slice(endpoint_slice(*endpoints, **more))
    assert piece is not None
    return piece


def node_object(
    name: str = HERE,
    *addresses: tuple[str, str],
    pod_cidrs: Sequence[str] | None = None,
    pod_cidr: str | None = None,
    zone: str | None = None,
) -> Node:
    return Node(
        metadata=ObjectMeta(name=name, labels=Labels(zone=zone) if zone is not None else None),
        spec=NodeSpec(pod_cidr=pod_cidr, pod_cidrs=list(pod_cidrs) if pod_cidrs is not None else None),
        status=NodeStatus([NodeAddress(kind, text) for kind, text in addresses] or None),
    )
