"""Zones of endpoints, names of pods and of Nodes, as objects have them: for people who ask; nothing is watched.

The proxy decodes slices without names, and without zones but for Services that weigh by them (zones.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote

from msgspec import Struct

from kubeproxy.api.client import ApiClient
from kubeproxy.api.pages import items
from kubeproxy.model.addresses import pack
from kubeproxy.model.objects import Node
from kubeproxy.model.plan import ServiceName


class _Reference(Struct):
    name: str | None = None
    namespace: str | None = None


class _Endpoint(Struct, rename="camel"):
    addresses: list[str] | None = None
    zone: str | None = None
    target_ref: _Reference | None = None


class _Slice(Struct):
    endpoints: list[_Endpoint] | None = None


async def zones_of(client: ApiClient, service: ServiceName) -> Mapping[bytes, str]:
    """Return the zones of a Service's endpoints by packed address, of those that have one. Raises SourceError."""
    return {address: one.zone async for address, one in _endpoints(client, service) if one.zone}


async def pod_names(client: ApiClient, service: ServiceName | None) -> Mapping[bytes, str]:
    """Return NAMESPACE/NAME of pods by packed address: those of a Service, or of all. Raises SourceError."""
    names: dict[bytes, str] = {}
    async for address, one in _endpoints(client, service):
        pod = one.target_ref
        if pod is not None and pod.name:
            names[address] = f"{pod.namespace}/{pod.name}" if pod.namespace else pod.name
    return names


async def node_names(client: ApiClient) -> Mapping[bytes, str]:
    """Return the names of all Nodes by packed address. Raises SourceError."""
    names: dict[bytes, str] = {}
    async for node in items(client, "/api/v1/nodes", {"limit": "100"}, Node):  # one has 15 KB or more
        for entry in (node.status.addresses if node.status is not None else None) or ():
            if (address := pack(entry.address)) is not None:
                names[address] = node.metadata.name
    return names


async def _endpoints(client: ApiClient, service: ServiceName | None) -> AsyncIterator[tuple[bytes, _Endpoint]]:
    """Yield the endpoints of a Service, or of all, with each of their packed addresses."""
    where = f"/namespaces/{quote(service[0], safe='')}" if service is not None else ""
    query = {"labelSelector": f"kubernetes.io/service-name={service[1]}"} if service is not None else {}
    async for piece in items(client, f"/apis/discovery.k8s.io/v1{where}/endpointslices", query, _Slice):
        for endpoint in piece.endpoints or ():
            for text in endpoint.addresses or ():
                if (address := pack(text)) is not None:
                    yield address, endpoint
