"""The sources of objects: an API server, or a folder of manifests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kubeproxy.api.source import Reach, ResourceStatus, Route, why_stale
from kubeproxy.config.gates import gate_enabled
from kubeproxy.config.options import Options
from kubeproxy.engine.pacing import TokenBucket
from kubeproxy.features import PROXY_NAME
from kubeproxy.model.events import Sink
from kubeproxy.report.events import Post
from kubeproxy.report.metrics import ProxyMetrics

if TYPE_CHECKING:
    from kubeproxy.api.http import Finished

log = logging.getLogger("kubeproxy.sources")

NODE_TIMEOUT = 30.0  # seconds, as in the Go kube-proxy, which afterwards uses loopback as the Node's address
NODE_CIDR_TIMEOUT = 300.0  # seconds, as in the Go kube-proxy

Patch = Callable[[str, bytes], Awaitable[int]]
"""A function that sends a JSON patch to a path, and returns the HTTP status. Raises SourceError or OSError."""


class ManifestSources:
    """A folder of YAML and JSON files, with the same methods and attributes as ApiSources."""

    knows_nodes = False
    """Whether the source contains all Nodes, which means that a missing Node was deleted."""

    post: Post | None = None
    """A function that sends Events, or None without an API server."""

    patch: Patch | None = None
    """A function that patches an object, or None without an API server."""

    plugin = ""
    """The credential plugin; '' if there is none."""

    node_timeout = 0.0
    """Seconds to wait for the Node before programming without it."""

    def __init__(self, folder: str, node_name: str, sink: Sink) -> None:
        from kubeproxy.api.manifests import ManifestSource  # noqa: PLC0415 - needs a YAML parser

        self._folder = Path(folder)
        self._source = ManifestSource(folder, sink, node_name)
        self.run = self._source.run  # delivers events until cancelled
        self.route = Route()  # the addresses and ports at which the API server is reached

    def files(self) -> Sequence[str]:
        """Return the files and folders that are read again while the program runs."""
        return [str(path) for path in (self._folder, *sorted(self._folder.glob("*")))]

    def stale(self) -> str | None:
        """Return the reason why the objects may be outdated, or None if they are current."""
        return None

    def reach(self) -> Reach | None:
        """Return the state of the connection to the API server, or None without an API server."""
        return None

    async def nodes(self) -> Mapping[bytes, str]:
        """Return the names of all Nodes by packed address. Raises KubeProxyError."""
        return self._source.nodes()

    async def close(self) -> None:
        """Close the connections."""


def open_sources(options: Options, node_name: str, sink: Sink, metrics: ProxyMetrics) -> Sources:
    """Return the source that the options select. Raises ConfigError."""
    if options.manifests:
        return ManifestSources(options.manifests, node_name, sink)
    return _ApiSources(options, node_name, sink, metrics)


class _ApiSources:
    """The API server of the kubeconfig, of --master, or of the pod's service account."""

    knows_nodes = True

    def __init__(self, options: Options, node_name: str, sink: Sink, metrics: ProxyMetrics) -> None:
        from kubeproxy.api.http import HttpClient  # noqa: PLC0415 - the manifests mode needs no client
        from kubeproxy.api.kubeconfig import load_cluster  # noqa: PLC0415
        from kubeproxy.api.recovery import WatchListSupport  # noqa: PLC0415
        from kubeproxy.api.watch import ApiSource  # noqa: PLC0415

        client = options.config.client_connection
        cluster = load_cluster(client.kubeconfig, options.master)
        if cluster.proxy is not None:
            log.info("Using a proxy for the API server proxy=%s server=%s", cluster.proxy, cluster.server.url)
        self._cluster = cluster
        self.plugin = cluster.credentials.program
        self.node_timeout = NODE_CIDR_TIMEOUT if options.config.local_mode == "NodeCIDR" else NODE_TIMEOUT
        self._client = HttpClient(cluster, on_request=partial(_finished, metrics))
        self.route = self._client.places
        # The limit applies only to requests that write: Events, because their number is unbounded, and a patch of the
        # Node.
        self._take_turn = rate_limit(client.qps, client.burst)
        self._metrics = metrics
        support = WatchListSupport()
        if not gate_enabled(options.config.feature_gates, "WatchListClient"):
            support.refused("the feature gate WatchListClient is off")
        proxy_name = PROXY_NAME.among(options.features)
        self._source = ApiSource(self._client, node_name, sink, proxy_name=proxy_name, support=support)
        for resource, status in self._source.statuses.items():
            metrics.own.staleness.labels(resource).follow(partial(_staleness, status))
        cluster.on_certificates(metrics.own.show_certificates)
        self.run = self._source.run

    def files(self) -> Sequence[str]:
        return self._cluster.files

    def stale(self) -> str | None:
        return why_stale(self._source.statuses.values(), self._client.contact.trouble, time.monotonic())

    def reach(self) -> Reach | None:
        now = time.monotonic()
        return Reach(
            server=self._cluster.server.url,
            trouble=self._client.contact.trouble,
            watched=tuple(status.standing(now) for status in self._source.statuses.values()),
            certificates=self._cluster.certificates,
        )

    async def nodes(self) -> Mapping[bytes, str]:
        from kubeproxy.api.lists import node_names  # noqa: PLC0415 - loaded for the first question

        # If the API server cannot be reached, there are no names, so that the caller does not wait for a timeout.
        return {} if self._client.contact.trouble else await node_names(self._client)

    async def close(self) -> None:
        await self._client.close()

    async def post(self, method: str, path: str, body: bytes) -> int:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return await self._send(method, path, body, kind)

    async def patch(self, path: str, body: bytes) -> int:
        return await self._send("PATCH", path, body, "application/json-patch+json")

    async def _send(self, method: str, path: str, body: bytes, kind: str) -> int:
        from kubeproxy.api.status import StatusError  # noqa: PLC0415

        wait = self._take_turn()
        self._metrics.rest.rate_limiter_duration.labels(method, self._cluster.server.authority).observe(wait)
        await asyncio.sleep(wait)
        try:
            return (await self._client.request(method, path, body=body, content_type=kind)).status
        except StatusError as error:
            return error.code


Sources = ManifestSources | _ApiSources


def rate_limit(qps: float, burst: int, clock: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """Return a function that counts a request and returns the seconds until it may be sent, by clientConnection.qps
    and burst. As in client-go, 0 means the default (5 and 10), and a negative qps means no limit."""
    return TokenBucket(qps or 5.0, burst or 10, clock).reserve if qps >= 0 else lambda: 0.0


def _finished(metrics: ProxyMetrics, request: Finished) -> None:
    rest, series = metrics.rest, (request.method, request.host)
    rest.requests.labels(request.code, *series).inc()
    rest.duration.labels(*series).observe(request.seconds)
    rest.request_size.labels(*series).observe(request.sent)
    if request.received is not None:
        rest.response_size.labels(*series).observe(request.received)


def _staleness(status: ResourceStatus) -> float:
    return status.staleness(time.monotonic())
