"""The few requests that are no watch: this Node, the server's version. And whether the server answers.

Thin: one method a request, errors are those of http.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import quote

import msgspec

from kubeproxy.api.cluster import Cluster
from kubeproxy.api.decode import decode_object
from kubeproxy.api.http import HttpClient, OnRequest
from kubeproxy.api.status import MalformedAnswer
from kubeproxy.api.trouble import Trouble
from kubeproxy.model.objects import Node

log = logging.getLogger("kubeproxy.api")

_MERGE_PATCH = "application/merge-patch+json"


class Contact:
    """Whether the API server can be reached; the log hears of changes, and not of each try."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._answers = asyncio.Event()
        self._trouble = Trouble(lambda text: log.warning("Waiting for the API server at %s", text))

    @property
    def trouble(self) -> str:
        """Why the server cannot be reached, '' when it can."""
        return self._trouble.text

    def failed(self, reason: str) -> None:
        """A connection failed or died for `reason`."""
        self._trouble.met(reason)
        self._answers.clear()

    def answered(self) -> None:
        """The server answered, whatever it said."""
        if self._trouble.over():
            log.info("The API server at %s answers", self._url)
            self._answers.set()

    async def pause(self, delay: float) -> None:
        """Wait `delay` seconds after a failure, or less when meanwhile someone else got an answer."""
        try:
            async with asyncio.timeout(delay):
                await self._answers.wait()
        except TimeoutError:
            return


class ApiClient:
    """Typed requests to the API server of `cluster`; shares its connections with the watches."""

    def __init__(self, cluster: Cluster, *, on_request: OnRequest | None = None) -> None:
        self.http = HttpClient(cluster, on_request=on_request)
        self.contact = Contact(cluster.url)

    async def request_json(self, method: str, path: str, body: object = None) -> Any:
        """Send `body` (anything msgspec encodes, None for nothing) as JSON and return the decoded answer.

        A PATCH is a merge patch. Raises SourceError.
        """
        content = b"" if body is None else msgspec.json.encode(body)
        content_type = _MERGE_PATCH if method == "PATCH" else "application/json"
        response = await self.http.request(method, path, body=content, content_type=content_type)
        try:
            return msgspec.json.decode(response.body) if response.body else None
        except (ValueError, RecursionError) as error:
            raise MalformedAnswer(f"the answer to {method} {path} is no JSON: {error}") from error

    async def get_node(self, name: str) -> Node:
        """Return the Node `name`. Raises NotFound when there is none, MalformedAnswer when it cannot be read."""
        response = await self.http.request("GET", f"/api/v1/nodes/{quote(name, safe='')}")
        node, rejected = decode_object("nodes", bytes(response.body))
        if not isinstance(node, Node):
            raise MalformedAnswer(f"node {name}: {rejected[0].field}: {rejected[0].reason}")
        return node

    async def version(self) -> str:
        """Return the server's gitVersion, such as 'v1.36.2'."""
        answer = await self.request_json("GET", "/version")
        found = answer.get("gitVersion") if isinstance(answer, dict) else None
        return found if isinstance(found, str) else ""

    async def close(self) -> None:
        """Close all connections."""
        await self.http.close()
