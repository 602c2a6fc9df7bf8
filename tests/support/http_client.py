"""Runs the API client against a scripted server."""

import asyncio

from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from support.scripted import Server


def cluster_at(url, credentials=None, **trust):
    return Cluster(parse_server(url, "test"), Trust(**trust), credentials or Credentials())


def run(script, use, *, credentials=None, **trust):
    """Run `use(client, server)` against `script`; close both, and return the result of `use`."""

    async def main():
        async with Server(script, tls=bool(trust)) as server:
            client = HttpClient(cluster_at(server.url, credentials, **trust))
            try:
                return await use(client, server)
            finally:
                await client.close()

    return asyncio.run(main())
