"""The names of pods by their addresses, as EndpointSlices have them: for commands, since the proxy has no use for them.

One list, a page at a time; nothing is watched.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from kubeproxy.api.client import ApiClient
from kubeproxy.api.status import MalformedAnswer
from kubeproxy.model.addresses import pack

_PAGE = 500


class _Reference(Struct):
    kind: str | None = None
    name: str | None = None
    namespace: str | None = None


class _Endpoint(Struct, rename="camel"):
    addresses: list[str] | None = None
    target_ref: _Reference | None = None


class _Slice(Struct):
    endpoints: list[_Endpoint] | None = None


class _ListMeta(Struct):
    continue_: str | None = msgspec.field(default=None, name="continue")


class _List(Struct):
    metadata: _ListMeta
    items: list[_Slice] | None = None


async def pod_names(client: ApiClient, service: tuple[str, str] | None) -> Mapping[bytes, str]:
    """Return NAMESPACE/NAME of pods by packed address: those of a Service (namespace, name), or of all.

    Raises SourceError.
    """
    where = f"/namespaces/{service[0]}" if service is not None else ""
    query = {"limit": str(_PAGE)}
    if service is not None:
        query["labelSelector"] = f"kubernetes.io/service-name={service[1]}"
    names: dict[bytes, str] = {}
    while True:
        path = f"/apis/discovery.k8s.io/v1{where}/endpointslices?{urlencode(query)}"
        response = await client.http.request("GET", path)
        try:
            page = msgspec.json.decode(response.body, type=_List)
        except msgspec.MsgspecError as error:
            raise MalformedAnswer(f"the EndpointSlices cannot be read: {error}") from error
        for piece in page.items or ():
            names.update(_names(piece))
        if not page.metadata.continue_:
            return names
        query["continue"] = page.metadata.continue_


def _names(piece: _Slice) -> Mapping[bytes, str]:
    found: dict[bytes, str] = {}
    for endpoint in piece.endpoints or ():
        target = endpoint.target_ref
        if target is not None and target.name:
            name = f"{target.namespace}/{target.name}" if target.namespace else target.name
            found |= {address: name for text in endpoint.addresses or () if (address := pack(text)) is not None}
    return found
