"""The versions of Services and EndpointSlices that the API server has now: for commands that ask whether a proxy lags.

Lists, a page at a time, of what a proxy watches; nothing is watched. Read by the rights that a kube-proxy has.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from kubeproxy.api.client import ApiClient
from kubeproxy.api.pages import items
from kubeproxy.api.targets import NO_HEADLESS, NO_PROXY_NAME
from kubeproxy.model.addresses import FAMILIES

_OF_SERVICE = "kubernetes.io/service-name"


class Versions(Struct):
    """The resourceVersion of a Service, None when there is none, and those of its EndpointSlices by name."""

    service: str | None = None
    slices: dict[str, str] = msgspec.field(default_factory=dict)


class _Meta(Struct, rename="camel"):
    name: str
    namespace: str = ""
    resource_version: str = ""
    labels: Mapping[str, str] | None = None


class _ServiceSpec(Struct, rename={"cluster_ip": "clusterIP"}):
    cluster_ip: str | None = None


class _Service(Struct):
    metadata: _Meta
    spec: _ServiceSpec = msgspec.field(default_factory=_ServiceSpec)


class _Slice(Struct, rename="camel"):
    metadata: _Meta
    address_type: str = ""


async def versions(client: ApiClient, service: tuple[str, str] | None) -> Mapping[tuple[str, str], Versions]:
    """Return the versions of a Service (namespace, name), or of all that a proxy watches: those of no cluster IP too.

    Raises SourceError.
    """
    where = f"/namespaces/{service[0]}" if service is not None else ""
    query = {"labelSelector": NO_PROXY_NAME}
    if service is not None:
        query["fieldSelector"] = f"metadata.name={service[1]}"
    found: dict[tuple[str, str], Versions] = {}
    async for one in items(client, f"/api/v1{where}/services", query, _Service):
        if one.spec.cluster_ip != "None":
            found[one.metadata.namespace, one.metadata.name] = Versions(one.metadata.resource_version)
    query = {"labelSelector": NO_HEADLESS + (f",{_OF_SERVICE}={service[1]}" if service is not None else "")}
    async for piece in items(client, f"/apis/discovery.k8s.io/v1{where}/endpointslices", query, _Slice):
        owner = found.get((piece.metadata.namespace, (piece.metadata.labels or {}).get(_OF_SERVICE, "")))
        if owner is not None and piece.address_type in FAMILIES:
            owner.slices[piece.metadata.name] = piece.metadata.resource_version
    return found
