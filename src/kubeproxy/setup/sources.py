"""Where the objects come from: an API server, or a folder of manifests. Both have one interface, Sources."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kubeproxy.api.source import Reach, ResourceStatus, watched, why_stale
from kubeproxy.config.gates import gate_enabled
from kubeproxy.config.options import Options
from kubeproxy.engine.pacing import TokenBucket
from kubeproxy.model.events import Sink
from kubeproxy.model.plan import ServiceName
from kubeproxy.report.events import Post
from kubeproxy.report.metrics import ProxyMetrics

if TYPE_CHECKING:
    from kubeproxy.api.http import Finished

log = logging.getLogger("kubeproxy.sources")

NODE_PATIENCE = 30.0  # kube-proxy polls its Node that long before it falls back to loopback
NODE_CIDR_PATIENCE = 300.0  # and that long for the pod networks of NodeCIDR mode

Patch = Callable[[str, bytes], Awaitable[int]]
"""Sends a JSON patch to a path; returns the HTTP status. Raises SourceError or OSError when that cannot be done."""


class Sources(Protocol):
    """A source of objects, as program/app.py uses it."""

    knows_nodes: bool
    """Whether a missing Node means that there is none."""

    post: Post | None
    """How events are sent, None when there is nobody to send them to."""

    patch: Patch | None
    """How an object is changed in place, None where there is nobody to ask."""

    plugin: str
    """The program that is run for credentials, '' for none."""

    def files(self) -> Sequence[str]:
        """Return the files and folders that are read again while it runs."""

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs until cancelled, by name."""

    def stale(self) -> str | None:
        """Return why the state may be old, None when it is not."""

    def reach(self) -> Reach | None:
        """Return how the API server is reached, None when objects come from elsewhere."""

    def servers(self) -> frozenset[tuple[str, int]]:
        """Return the addresses and ports by which the API server is reached."""

    def follow_servers(self, changed: Callable[[], None]) -> None:
        """Call `changed` from now on before a connection to a new address of the API server is tried."""

    def node_patience(self, needs_pod_cidrs: bool) -> float:
        """Return the seconds to wait for the Node before programming without it."""

    async def zones(self, service: ServiceName) -> Mapping[bytes, str]:
        """Return the zones of a Service's endpoints by packed address, for people who ask. Raises KubeProxyError."""

    async def nodes(self) -> Mapping[bytes, str]:
        """Return the names of all Nodes by packed address, for people who ask. Raises KubeProxyError."""

    async def close(self) -> None:
        """Let go of connections."""


def open_sources(options: Options, node_name: str, sink: Sink, metrics: ProxyMetrics) -> Sources:
    """Return the source that the options name. Raises ConfigError."""
    if options.manifests:
        return ManifestSources(options.manifests, node_name, sink)
    return ApiSources(options, node_name, sink, metrics)


class ApiSources:
    """The API server of the kubeconfig, of --master, or of the pod's service account."""

    knows_nodes = True

    def __init__(self, options: Options, node_name: str, sink: Sink, metrics: ProxyMetrics) -> None:
        from kubeproxy.api.client import ApiClient  # noqa: PLC0415 - the manifests mode needs no client
        from kubeproxy.api.kubeconfig import load_cluster  # noqa: PLC0415
        from kubeproxy.api.recovery import WatchListSupport  # noqa: PLC0415
        from kubeproxy.api.watch import ApiSource  # noqa: PLC0415

        cluster = load_cluster(options.config.client_connection.kubeconfig, options.master)
        if cluster.proxy is not None:
            log.info("Using a proxy for the API server proxy=%s server=%s", cluster.proxy, cluster.url)
        self._cluster = cluster
        self.plugin = cluster.credentials.program
        self._client = ApiClient(cluster, on_request=partial(_finished, metrics))
        client = options.config.client_connection
        self._limit = RateLimit(client.qps, client.burst)
        self._waited = partial(_waited, metrics, cluster.server.authority)
        support = WatchListSupport()
        if not gate_enabled(options.config.feature_gates, "WatchListClient"):
            support.refused("the feature gate WatchListClient is off")
        self._source = ApiSource(self._client, node_name, sink, support=support)
        for resource, status in self._source.statuses.items():
            metrics.own.follow_staleness(resource, partial(_staleness, status))
        cluster.on_certificates(metrics.own.show_certificates)
        self.post: Post | None = self._post
        self.patch: Patch | None = self._patch

    def files(self) -> Sequence[str]:
        """See Sources."""
        return self._cluster.files

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """See Sources."""
        return {"watch": self._source.run()}

    def stale(self) -> str | None:
        """See Sources."""
        return why_stale(self._source.statuses.values(), self._client.contact.trouble, time.monotonic())

    def reach(self) -> Reach | None:
        """See Sources."""
        now = time.monotonic()
        return Reach(
            server=self._cluster.url,
            trouble=self._client.contact.trouble,
            watched=tuple(watched(status, now) for status in self._source.statuses.values()),
            certificates=self._cluster.certificates,
        )

    def servers(self) -> frozenset[tuple[str, int]]:
        """See Sources."""
        return self._client.http.places.places

    def follow_servers(self, changed: Callable[[], None]) -> None:
        """See Sources."""
        self._client.http.places.changed = changed

    def node_patience(self, needs_pod_cidrs: bool) -> float:
        """See Sources."""
        return NODE_CIDR_PATIENCE if needs_pod_cidrs else NODE_PATIENCE

    async def zones(self, service: ServiceName) -> Mapping[bytes, str]:
        """See Sources. Nobody waits for a server that is known to be out of reach."""
        from kubeproxy.api.places import zones_of  # noqa: PLC0415 - a proxy that nobody asks does without

        return {} if self._client.contact.trouble else await zones_of(self._client, service)

    async def nodes(self) -> Mapping[bytes, str]:
        """See Sources. As with zones."""
        from kubeproxy.api.places import node_names  # noqa: PLC0415

        return {} if self._client.contact.trouble else await node_names(self._client)

    async def close(self) -> None:
        """See Sources."""
        await self._client.close()

    async def _post(self, method: str, path: str, body: bytes) -> int:
        return await self._send(
            method, path, body, "application/merge-patch+json" if method == "PATCH" else "application/json"
        )

    async def _patch(self, path: str, body: bytes) -> int:
        return await self._send("PATCH", path, body, "application/json-patch+json")

    async def _send(self, method: str, path: str, body: bytes, kind: str) -> int:
        from kubeproxy.api.status import StatusError  # noqa: PLC0415

        self._waited(method, await self._limit.turn())
        try:
            return (await self._client.http.request(method, path, body=body, content_type=kind)).status
        except StatusError as error:
            return error.status.code


class RateLimit:
    """clientConnection.qps and burst: so many requests a second, and so many at once; a negative qps is no limit.

    It holds for what grows with what happens, which are events. Lists and watches are a few requests that nothing may
    delay. As in client-go 0 stands for the default (5 and 10).
    """

    def __init__(self, qps: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = TokenBucket(qps or 5.0, burst or 10, clock) if qps >= 0 else None

    async def turn(self) -> float:
        """Return when a request may be sent, with the seconds that it had to wait."""
        if self._bucket is None:
            return 0.0
        wait = self._bucket.reserve()
        if wait:
            await asyncio.sleep(wait)
        return wait


def _finished(metrics: ProxyMetrics, request: Finished) -> None:
    rest, series = metrics.rest, (request.method, request.host)
    rest.requests.labels(request.code, *series).inc()
    rest.duration.labels(*series).observe(request.seconds)
    rest.request_size.labels(*series).observe(request.sent)
    if request.received is not None:
        rest.response_size.labels(*series).observe(request.received)


def _waited(metrics: ProxyMetrics, host: str, method: str, seconds: float) -> None:
    metrics.rest.rate_limiter_duration.labels(method, host).observe(seconds)


def _staleness(status: ResourceStatus) -> float:
    return status.staleness(time.monotonic())


class ManifestSources:
    """A folder of YAML and JSON files."""

    knows_nodes = False
    post: Post | None = None
    patch: Patch | None = None
    plugin = ""

    def __init__(self, folder: str, node_name: str, sink: Sink) -> None:
        from kubeproxy.api.manifests import ManifestSource  # noqa: PLC0415 - needs a YAML parser

        self._folder = Path(folder)
        self._source = ManifestSource(folder, sink, node_name)

    def files(self) -> Sequence[str]:
        """See Sources."""
        return [str(path) for path in (self._folder, *sorted(self._folder.glob("*")))]

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """See Sources."""
        return {"manifests": self._source.run()}

    def stale(self) -> str | None:
        """See Sources."""
        return None

    def reach(self) -> Reach | None:
        """See Sources."""
        return None

    def servers(self) -> frozenset[tuple[str, int]]:
        """See Sources."""
        return frozenset()

    def follow_servers(self, changed: Callable[[], None]) -> None:
        """See Sources."""

    def node_patience(self, needs_pod_cidrs: bool) -> float:  # noqa: ARG002 - nobody will bring a Node later
        """See Sources."""
        return 0.0

    async def zones(self, service: ServiceName) -> Mapping[bytes, str]:
        """See Sources."""
        return await asyncio.to_thread(self._source.zones, service)

    async def nodes(self) -> Mapping[bytes, str]:
        """See Sources. Of a folder only this Node is read."""
        return {}

    async def close(self) -> None:
        """See Sources."""
