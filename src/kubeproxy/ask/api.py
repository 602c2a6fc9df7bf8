"""Asks the API server with the credentials of the proxy, for commands whose answer is better with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kubeproxy.api.client import ApiClient
from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.ask.facts import Facts
from kubeproxy.errors import KubeProxyError

T = TypeVar("T")


class NotInTimeError(KubeProxyError):
    """The API server did not answer in time; the message says so."""


def ask(facts: Facts, question: Callable[[ApiClient], Awaitable[T]], patience: float) -> T:
    """Return what the API server answers within so many seconds. Raises NotInTimeError, KubeProxyError or OSError."""
    kubeconfig = facts.configuration().client_connection.kubeconfig

    async def answer() -> T:
        client = ApiClient(load_cluster(kubeconfig, facts.master))
        try:
            async with asyncio.timeout(patience):
                return await question(client)
        finally:
            await client.close()

    try:
        return asyncio.run(answer())
    except TimeoutError:
        raise NotInTimeError(f"the API server did not answer within {patience:.0f} s") from None
