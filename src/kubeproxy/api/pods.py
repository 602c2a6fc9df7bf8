"""The names of pods by their addresses, as EndpointSlices have them: for commands, since the proxy has no use for them.

One list, a page at a time; nothing is watched.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kubeproxy.api.client import ApiClient
from kubeproxy.api.pages import ListMeta, pages
from kubeproxy.model.addresses import pack


class _Reference(Struct):
    kind: str | None = None
    name: str | None = None
    namespace: str | None = None


class _Endpoint(Struct, rename="camel"):
    addresses: list[str] | None = None
    target_ref: _Reference | None = None


class _Slice(Struct):
    endpoints: list[_Endpoint] | None = None


class _List(Struct):
    metadata: ListMeta
    items: list[_Slice] | None = None


async def pod_names(client: ApiClient, service: tuple[str, str] | None) -> Mapping[bytes, str]:
    """Return NAMESPACE/NAME of pods by packed address: those of a Service (namespace, name), or of all.

    Raises SourceError.
    """
    where = f"/namespaces/{service[0]}" if service is not None else ""
    where = f"/namespaces/{service[0]}" if service is not None else ""
    query = {"labelSelector": f"kubernetes.io/service-name={service[1]}"} if service is not None else {}
    names: dict[bytes, str] = {}
    async for page in pages(client, f"/apis/discovery.k8s.io/v1{where}/endpointslices", query, _List):
        for piece in page.items or ():
            names.update(_names(piece))
    return names


def _names(piece: _Slice) -> Mapping[bytes, str]:
    found: dict[bytes, str] = {}
    for endpoint in piece.endpoints or ():
        target = endpoint.target_ref
        if target is not None and target.name:
            name = f"{target.namespace}/{target.name}" if target.namespace else target.name
            found |= {address: name for text in endpoint.addresses or () if (address := pack(text)) is not None}
    return found
