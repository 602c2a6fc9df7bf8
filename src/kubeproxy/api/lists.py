"""Single requests for commands: versions of objects, names of pods and Nodes, the server's certificate and clock. The
watches of the proxy (watch.py) do not decode the names of pods."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct

from kubeproxy.api.cluster import Cluster, Validity, connection_reason, validities
from kubeproxy.api.connection import LIST
from kubeproxy.api.decode import ObjectList, node_addresses
from kubeproxy.api.http import HttpClient
from kubeproxy.api.source import NO_HEADLESS, served
from kubeproxy.api.status import MalformedAnswer
from kubeproxy.errors import SourceError
from kubeproxy.model.addresses import FAMILIES, pack
from kubeproxy.model.objects import Node, ObjectMeta
from kubeproxy.model.plan import ServiceName

T = TypeVar("T")

_PAGE: Final = 500  # objects in one answer

_OF_SERVICE: Final = "kubernetes.io/service-name"


class Versions(Struct):
    """The resourceVersions of a Service (None for a missing Service) and of its EndpointSlices by name."""

    service: str | None = None
    slices: dict[str, str] = msgspec.field(default_factory=dict)


class _Spec(Struct):
    cluster_ip: str | None = msgspec.field(default=None, name="clusterIP")


class _Service(Struct):
    metadata: ObjectMeta
    spec: _Spec = msgspec.field(default_factory=_Spec)


class _Reference(Struct):
    name: str | None = None
    namespace: str | None = None


class _Endpoint(Struct, rename="camel"):
    addresses: list[str] | None = None
    target_ref: _Reference | None = None


class _Slice(Struct, rename="camel"):
    metadata: ObjectMeta = ObjectMeta()
    address_type: str = ""
    endpoints: list[_Endpoint] | None = None


async def versions(
    client: HttpClient, service: ServiceName | None, proxy_name: str = ""
) -> Mapping[ServiceName, Versions]:
    """Return the versions of a Service, or of all Services that a proxy with this name watches, except headless
    Services. The rights of the proxy's service account are enough. Raises SourceError."""
    where = f"/namespaces/{quote(service[0], safe='')}" if service is not None else ""
    query = {"labelSelector": served(proxy_name)}
    if service is not None:
        query["fieldSelector"] = f"metadata.name={service[1]}"
    found: dict[ServiceName, Versions] = {}
    async for one in _items(client, f"/api/v1{where}/services", query, _Service):
        if one.spec.cluster_ip != "None":
            found[one.metadata.namespace or "", one.metadata.name] = Versions(one.metadata.resource_version or "")
    async for piece in _slices(client, service, NO_HEADLESS):
        meta = piece.metadata
        owner = found.get((meta.namespace or "", (meta.labels.service_name if meta.labels else None) or ""))
        if owner is not None and piece.address_type in FAMILIES:
            owner.slices[meta.name] = meta.resource_version or ""
    return found


async def pod_names(client: HttpClient, service: ServiceName | None) -> Mapping[bytes, str]:
    """Return NAMESPACE/NAME of a Service's pods, or of all pods, by packed address. Raises SourceError."""
    names: dict[bytes, str] = {}
    async for piece in _slices(client, service, ""):
        for endpoint in piece.endpoints or ():
            pod, packed = endpoint.target_ref, map(pack, endpoint.addresses or ())
            if pod is not None and pod.name:
                name = f"{pod.namespace}/{pod.name}" if pod.namespace else pod.name
                names |= dict.fromkeys(filter(None, packed), name)
    return names


async def node_names(client: HttpClient) -> Mapping[bytes, str]:
    """Return the names of all Nodes by packed address. Raises SourceError."""
    names: dict[bytes, str] = {}
    async for node in _items(client, "/api/v1/nodes", {"limit": "100"}, Node):  # small pages: a Node has 15 KB or more
        names |= dict.fromkeys(node_addresses(node), node.metadata.name)
    return names


def _slices(client: HttpClient, service: ServiceName | None, labels: str) -> AsyncIterator[_Slice]:
    where = f"/namespaces/{quote(service[0], safe='')}" if service is not None else ""
    of_service = f"{_OF_SERVICE}={service[1]}" if service is not None else ""
    selector = ",".join(filter(None, (labels, of_service)))
    query = {"labelSelector": selector} if selector else {}
    return _items(client, f"/apis/discovery.k8s.io/v1{where}/endpointslices", query, _Slice)


async def _items(client: HttpClient, path: str, query: Mapping[str, str], kind: type[T]) -> AsyncIterator[T]:
    token: str | None = ""
    while token is not None:
        asked = {"limit": str(_PAGE), **query} | ({"continue": token} if token else {})
        response = await client.request("GET", f"{path}?{urlencode(asked)}", most=LIST)
        try:
            page = msgspec.json.decode(response.body, type=ObjectList[kind])  # type: ignore[valid-type]
        except msgspec.MsgspecError as error:
            raise MalformedAnswer(f"the answer to GET {path} cannot be read: {error}") from error
        for item in page.items or ():
            yield item
        token = page.metadata.continue_ or None


class Greeting(NamedTuple):
    """The validity of the server's certificate, the seconds by which the server's clock is ahead, and the seconds until
    the answer."""

    certificate: Validity | None
    ahead: float | None
    seconds: float


def greet(cluster: Cluster, timeout: float) -> Greeting:
    """Send a request without a token directly to the server, not through a proxy. Each step blocks for at most
    `timeout` seconds. Raises SourceError if no answer arrives. Must not be called for a cluster with a client
    certificate from an exec plugin."""
    server, silence = cluster.server, "no connection in"
    context, began = asyncio.run(cluster.tls_context()), time.monotonic()
    try:
        with socket.create_connection((server.host, server.port), timeout) as plain:
            silence = "sent nothing for"
            if context is None:
                return Greeting(None, _ahead(plain, server.authority), time.monotonic() - began)
            with context.wrap_socket(plain, server_hostname=cluster.server_hostname) as sock:
                pem = ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True) or b"")
                ahead, validity = _ahead(sock, server.authority), next(iter(validities(pem.encode())), None)
                return Greeting(validity, ahead, time.monotonic() - began)
    except TimeoutError as error:
        raise SourceError(f"{server.authority}: {silence} {timeout:.0f} s") from error
    except OSError as error:
        raise SourceError(f"{server.authority}: {connection_reason(error, cluster)}") from error


def _ahead(sock: socket.socket, host: str) -> float | None:
    connection = HTTPConnection(host)
    connection.sock = sock
    connection.request("HEAD", "/livez", headers={"Connection": "close"})
    try:
        date = connection.getresponse().getheader("Date")
        return parsedate_to_datetime(date).timestamp() - time.time() if date else None
    except (HTTPException, ValueError):
        return None
