"""Names of pods are requested with the credentials of the proxy; without names there is a reason."""

from __future__ import annotations

import asyncio

import pytest

from kubeproxy.ask import cluster
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import SourceError


class Facts:
    configuration = KubeProxyConfiguration
    master = ""
    manifests = ""


class Client:
    closed = 0

    async def close(self) -> None:
        Client.closed += 1


@pytest.fixture
def names(monkeypatch):
    """Request names from an API server that gives this answer."""
    monkeypatch.setattr(cluster, "load_cluster", lambda *_: None)
    monkeypatch.setattr(cluster, "HttpClient", lambda _: Client())
    monkeypatch.setattr(cluster, "PODS_TIMEOUT", 0.01)

    def ask(answer):
        async def pod_names(_, service):
            return await answer()

        monkeypatch.setattr(cluster, "pod_names", pod_names)
        return cluster.pods(Facts, None)

    return ask


async def known():
    return {b"\x0a\0\0\1": "default/web-1"}


async def silent():
    await asyncio.sleep(10)


async def refused():
    raise SourceError("403 Forbidden")


def test_names_or_why_there_are_none(names):
    before = Client.closed
    assert names(known) == ({b"\x0a\0\0\1": "default/web-1"}, "")
    assert names(silent) == ({}, "the API server did not answer within 0 s")
    assert names(refused) == ({}, "the API server could not be asked: 403 Forbidden")
    assert Client.closed == before + 3
