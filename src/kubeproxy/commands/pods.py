"""Looks up the names of pods with the credentials of the proxy: an answer is better with them, and does without."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from kubeproxy.api.client import ApiClient
from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.api.pods import pod_names
from kubeproxy.control.wire import Facts
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.plan import ServiceName

PATIENCE = 5.0
"""Seconds to wait for the API server."""


class _Connection(msgspec.Struct):
    kubeconfig: str = ""


class _Config(msgspec.Struct, rename="camel"):
    client_connection: _Connection = msgspec.field(default_factory=_Connection)


def names(facts: Facts, service: ServiceName | None) -> tuple[Mapping[bytes, str], str]:
    """Return names of pods by packed address, of a Service's or of all, and why there are none, '' if there are."""
    if facts.manifests:
        return {}, "the objects come from files"
    config = msgspec.convert(facts.config, _Config)
    try:
        return asyncio.run(_read(config.client_connection.kubeconfig, facts.master, service)), ""
    except (KubeProxyError, OSError) as error:
        return {}, str(error)
    except TimeoutError:
        return {}, f"the API server did not answer within {PATIENCE:.0f} s"


async def _read(kubeconfig: str, master: str, service: ServiceName | None) -> Mapping[bytes, str]:
    client = ApiClient(load_cluster(kubeconfig, master))
    try:
        async with asyncio.timeout(PATIENCE):
            return await pod_names(client, service)
    finally:
        await client.close()
