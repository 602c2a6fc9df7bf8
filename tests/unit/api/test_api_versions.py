"""The versions of the server's objects that concern the proxy, read page by page."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from kubeproxy.api.lists import Versions, versions
from kubeproxy.api.status import MalformedAnswer


class Client:
    """A client that answers each path with its pages, and records the requests."""

    def __init__(self, **pages) -> None:
        self.asked: list[tuple[str, dict]] = []
        self._pages = pages

    async def request(self, method, path, most):
        parts = urlsplit(path)
        query = {key: value for key, (value,) in parse_qs(parts.query).items()}
        self.asked.append((parts.path, query))
        pages = self._pages[parts.path.rpartition("/")[2]]
        at = int(query.get("continue", "0"))
        more = {"continue": str(at + 1)} if at + 1 < len(pages) else {}
        return SimpleNamespace(body=json.dumps({"kind": "List", "metadata": more, "items": pages[at]}).encode())


def service(name, version, address="10.96.0.1", kind="ClusterIP"):
    meta = {"name": name, "namespace": "default", "resourceVersion": version}
    return {"metadata": meta, "spec": {"clusterIP": address, "type": kind}}


def piece(name, owner, version, kind="IPv4"):
    labels = {"kubernetes.io/service-name": owner}
    meta = {"name": name, "namespace": "default", "resourceVersion": version, "labels": labels}
    return {"metadata": meta, "addressType": kind}


def test_all_of_them():
    services = [[service("web", "5"), service("head", "6", "None")], [service("out", "7", "", "ExternalName")]]
    slices = [[piece("web-1", "web", "8"), piece("web-f", "web", "9", "FQDN")], [piece("head-1", "head", "9")]]
    client = Client(services=services, endpointslices=slices)
    assert asyncio.run(versions(client, None)) == {
        ("default", "web"): Versions("5", {"web-1": "8"}),
        ("default", "out"): Versions("7"),
    }
    assert [path for path, _ in client.asked] == ["/api/v1/services"] * 2 + [
        "/apis/discovery.k8s.io/v1/endpointslices"
    ] * 2
    assert client.asked[0][1]["labelSelector"] == "!service.kubernetes.io/service-proxy-name"


def test_of_one_service_by_selectors_as_lists_alone_are_allowed():
    client = Client(services=[[service("web", "5")]], endpointslices=[[]])
    assert asyncio.run(versions(client, ("default", "web"))) == {("default", "web"): Versions("5")}
    (_, one), (path, other) = client.asked
    assert one["fieldSelector"] == "metadata.name=web"
    assert path == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    assert other["labelSelector"] == "!service.kubernetes.io/headless,kubernetes.io/service-name=web"


def test_an_answer_that_is_no_list_is_reported():
    client = Client(services=["nonsense"], endpointslices=[[]])
    with pytest.raises(MalformedAnswer, match="cannot be read"):
        asyncio.run(versions(client, None))
