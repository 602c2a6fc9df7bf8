"""The zones of a Service's endpoints, for people who ask: one list, a page at a time; nothing is watched.

Slices are decoded without zones, but for Services that weigh by them (zones.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import quote

from msgspec import Struct

from kubeproxy.api.client import ApiClient
from kubeproxy.api.pages import ListMeta, pages
from kubeproxy.model.addresses import pack
from kubeproxy.model.plan import ServiceName


class _Endpoint(Struct):
    addresses: list[str] | None = None
    zone: str | None = None


class _Slice(Struct):
    endpoints: list[_Endpoint] | None = None


class _List(Struct):
    metadata: ListMeta
    items: list[_Slice] | None = None


async def zones_of(client: ApiClient, service: ServiceName) -> Mapping[bytes, str]:
    """Return the zones of a Service's endpoints by packed address, of those that have one. Raises SourceError."""
    namespace, name = service
    path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"
    zones: dict[bytes, str] = {}
    async for page in pages(client, path, {"labelSelector": f"kubernetes.io/service-name={name}"}, _List):
        zones.update(_zones(endpoint for piece in page.items or () for endpoint in piece.endpoints or ()))
    return zones


def _zones(endpoints: Iterable[_Endpoint]) -> Iterable[tuple[bytes, str]]:
    for endpoint in endpoints:
        for text in (endpoint.addresses or ()) if endpoint.zone else ():
            address = pack(text)
            if address is not None and endpoint.zone:
                yield address, endpoint.zone
