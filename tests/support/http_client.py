"""Runs the API client against a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from support.scripted import Script, Server

T = TypeVar("T")


def cluster_at(url: str, credentials: Credentials | None = None, **trust: Any) -> Cluster:
    return Cluster(parse_server(url, "test"), Trust(**trust), credentials or Credentials())


def run(
    script: Script,
    use: Callable[[HttpClient, Server], Awaitable[T]],
    *,
    credentials: Credentials | None = None,
    **trust: Any,
) -> T:
    """Run `use(client, server)` against `script`; close both, and return the result of `use`."""

    async def main() -> T:
        async with Server(script, tls=bool(trust)) as server:
            client = HttpClient(cluster_at(server.url, credentials, **trust))
            try:
                return await use(client, server)
            finally:
                await client.close()

    return asyncio.run(main())
