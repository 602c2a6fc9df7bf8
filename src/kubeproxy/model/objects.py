"""Kubernetes objects, with only the fields that the proxy uses. Source: core/v1, discovery.k8s.io/v1 and
networking.k8s.io/v1 of Kubernetes 1.36. Defaults are the API's zero values; only JSON types are validated. API servers
send null lists and maps (in a bookmark's object), so every list and map may be None."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

Resource = Literal["services", "endpointslices", "nodes", "servicecidrs"]

LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label (RFC 1123), the form of names of namespaces, Services and ports."""

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]  # the API's int32


class ApiStruct(Struct, rename="camel", frozen=True, gc=False):
    """Base class of API objects: JSON names in camelCase, unknown fields ignored, no garbage collection (no cycles)."""


PROXY_LABEL: Final = "service.kubernetes.io/service-proxy-name"
"""The label that names the proxy by which a Service is served (KEP-2447)."""


class Labels(ApiStruct, frozen=True):
    """The labels that a proxy uses."""

    service_name: str | None = field(default=None, name="kubernetes.io/service-name")
    service_proxy_name: str | None = field(default=None, name=PROXY_LABEL)
    headless: str | None = field(default=None, name="service.kubernetes.io/headless")
    zone: str | None = field(default=None, name="topology.kubernetes.io/zone")


class Annotations(ApiStruct, frozen=True):
    """The annotations that a proxy uses."""

    last_change_trigger_time: str | None = field(default=None, name="endpoints.kubernetes.io/last-change-trigger-time")
    weight: str | None = field(default=None, name="kube-proxy-py/weight")
    weights: str | None = field(default=None, name="kube-proxy-py/weights")
    slow_start: str | None = field(default=None, name="kube-proxy-py/slow-start")
    algorithm: str | None = field(default=None, name="kube-proxy-py/algorithm")
    cilium_algorithm: str | None = field(default=None, name="service.cilium.io/lb-algorithm")
    eject: str | None = field(default=None, name="kube-proxy-py/eject")
    cilium_weight: str | None = field(default=None, name="service.cilium.io/weight")
    cilium_type: str | None = field(default=None, name="service.cilium.io/type")
    cilium_source_policy: str | None = field(default=None, name="service.cilium.io/src-ranges-policy")
    port_ranges: str | None = field(default=None, name="kube-proxy-py/port-ranges")


class ObjectMeta(ApiStruct, frozen=True):
    """metadata of any object."""

    name: str = ""
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: Labels | None = None
    annotations: Annotations | None = None


class ServicePort(ApiStruct, frozen=True):
    """One entry of a Service's spec.ports."""

    port: Int32 = 0
    name: str | None = None
    protocol: str | None = None
    node_port: Int32 | None = None


class ClientIPConfig(ApiStruct, frozen=True):
    """spec.sessionAffinityConfig.clientIP."""

    timeout_seconds: Int32 | None = None


class SessionAffinityConfig(ApiStruct, frozen=True):
    """spec.sessionAffinityConfig."""

    client_ip: ClientIPConfig | None = field(default=None, name="clientIP")


class ServiceSpec(ApiStruct, frozen=True):
    """A Service's spec."""

    type: str | None = None
    cluster_ip: str | None = field(default=None, name="clusterIP")
    cluster_ips: list[str] | None = field(default=None, name="clusterIPs")
    ports: list[ServicePort] | None = None
    external_ips: list[str] | None = field(default=None, name="externalIPs")
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    load_balancer_source_ranges: list[str] | None = None
    health_check_node_port: Int32 | None = None


class LoadBalancerIngress(ApiStruct, frozen=True):
    """One entry of a Service's status.loadBalancer.ingress."""

    ip: str | None = None
    ip_mode: str | None = None


class LoadBalancerStatus(ApiStruct, frozen=True):
    """A Service's status.loadBalancer."""

    ingress: list[LoadBalancerIngress] | None = None


class ServiceStatus(ApiStruct, frozen=True):
    """A Service's status."""

    load_balancer: LoadBalancerStatus | None = None


class Service(ApiStruct, frozen=True):
    """core/v1 Service."""

    metadata: ObjectMeta
    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus | None = None


class EndpointConditions(ApiStruct, frozen=True):
    """An endpoint's conditions; None means unknown."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class NameHint(ApiStruct, frozen=True):
    """One entry of the hints forZones or forNodes."""

    name: str = ""


class EndpointHints(ApiStruct, frozen=True):
    """An endpoint's topology hints."""

    for_zones: list[NameHint] | None = None
    for_nodes: list[NameHint] | None = None


class SliceEndpoint(ApiStruct, frozen=True):
    """One entry of an EndpointSlice's endpoints."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    hints: EndpointHints | None = None
    zone: str | None = None


class EndpointPort(ApiStruct, frozen=True):
    """One entry of an EndpointSlice's ports. `port` None means all ports, to which no proxy can forward."""

    port: Int32 | None = None
    name: str | None = None
    protocol: str | None = None


class EndpointSlice(ApiStruct, frozen=True):
    """discovery.k8s.io/v1 EndpointSlice."""

    metadata: ObjectMeta
    address_type: str = ""
    endpoints: list[SliceEndpoint] | None = None
    ports: list[EndpointPort] | None = None


class Taint(ApiStruct, frozen=True):
    """One entry of a Node's spec.taints."""

    key: str = ""


class NodeSpec(ApiStruct, frozen=True):
    """A Node's spec."""

    pod_cidr: str | None = field(default=None, name="podCIDR")
    pod_cidrs: list[str] | None = field(default=None, name="podCIDRs")
    taints: list[Taint] | None = None


class NodeAddress(ApiStruct, frozen=True):
    """One entry of a Node's status.addresses."""

    type: str = ""
    address: str = ""


class NodeStatus(ApiStruct, frozen=True):
    """A Node's status."""

    addresses: list[NodeAddress] | None = None


class Node(ApiStruct, frozen=True):
    """core/v1 Node."""

    metadata: ObjectMeta
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class ServiceCIDRSpec(ApiStruct, frozen=True):
    """A ServiceCIDR's spec."""

    cidrs: list[str] | None = None


class ServiceCIDR(ApiStruct, frozen=True):
    """networking.k8s.io/v1 ServiceCIDR."""

    metadata: ObjectMeta
    spec: ServiceCIDRSpec | None = None


Object = Service | EndpointSlice | Node | ServiceCIDR

TYPES: dict[Resource, type[Service | EndpointSlice | Node | ServiceCIDR]] = {
    "services": Service,
    "endpointslices": EndpointSlice,
    "nodes": Node,
    "servicecidrs": ServiceCIDR,
}

VERSIONS: dict[Resource, str] = {
    "services": "v1",
    "endpointslices": "discovery.k8s.io/v1",
    "nodes": "v1",
    "servicecidrs": "networking.k8s.io/v1",
}
"""The apiVersion of each resource."""

NAMESPACED: frozenset[Resource] = frozenset({"services", "endpointslices"})
