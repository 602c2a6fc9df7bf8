"""The health check ports of Services (healthCheckNodePort): one small server each, telling load balancers what is here.

Which Services want one, and how many endpoints they have on this node, is decided by the model. Answers as in
pkg/proxy/healthcheck/service_health.go of Kubernetes 1.36.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from kubeproxy.errors import ApplyError
from kubeproxy.observe.http import JSON, RETRY_SECONDS, HttpServer, Response

_log = logging.getLogger("kubeproxy.observe")


# The indentation is kube-proxy's: load balancers may be set to search the text.
_BODY: Final = b"""{
\t"service": {
\t\t"namespace": %b,
\t\t"name": %b
\t},
\t"localEndpoints": %d,
\t"serviceProxyHealthy": %b
}"""


class LocalEndpoints(NamedTuple):
    """What a health check port reports: the Service, and how many endpoints it has on this node."""

    namespace: str
    name: str
    endpoints: int


Failed = Callable[[str, str, int, str], None]
"""Told once when a port cannot be opened: namespace, name, port and why (event FailedToStartServiceHealthcheck)."""


class ServiceHealth:
    """All health check ports of this node. On the event loop's thread; `stop` it at the end.

    A port that is taken is tried again every `retry` seconds, without disturbing the others.
    """

    def __init__(self, healthy: Callable[[], bool], failed: Failed, retry: float = RETRY_SECONDS) -> None:
        self._healthy = healthy
        self._failed = failed
        self._retry = retry
        self._wanted: Mapping[int, LocalEndpoints] = {}
        self._addresses: tuple[str, ...] = ("0.0.0.0",)  # noqa: S104 - kube-proxy's default: every address
        self._servers: dict[int, list[HttpServer]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._reported: set[int] = set()

    def listen_on(self, addresses: Sequence[str] | None) -> None:
        """Serve on these node addresses instead (None or none: on all); open ports move when they differ."""
        chosen = tuple(addresses or ("0.0.0.0",))  # noqa: S104
        if chosen != self._addresses:
            self._addresses = chosen
            for port in list(self._servers):
                self._close(port)
            self.sync(self._wanted)

    def sync(self, wanted: Mapping[int, LocalEndpoints]) -> None:
        """Open, close and update the ports so that exactly these are served."""
        self._wanted = dict(wanted)
        for port in self._servers.keys() - wanted.keys():
            self._close(port)
        for port in sorted(wanted.keys() - self._servers.keys()):
            self._open(port)

    async def stop(self) -> None:
        """Close all ports and wait until their connections are gone."""
        for port in list(self._servers):
            self._close(port)
        await asyncio.gather(*self._closing)

    def _open(self, port: int) -> None:
        service = self._wanted[port]
        _log.info("Opening health check port=%d service=%s/%s", port, service.namespace, service.name)
        group = self._servers[port] = []
        for address in self._addresses:
            # To any path and any method, as kube-proxy: HAProxy asks OPTIONS *.
            server = HttpServer(f"health checks of {service.namespace}/{service.name}", lambda _: self._answer(port))
            group.append(server)
            server.start_retrying([(address, port)], lambda error: self._report(port, error), self._retry)

    def _close(self, port: int) -> None:
        _log.info("Closing health check port=%d", port)
        for server in self._servers.pop(port):
            server.close()  # the address is free when this returns, for another Service or another program
            task = asyncio.get_running_loop().create_task(server.stop())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._reported.discard(port)

    def _report(self, port: int, error: ApplyError) -> None:
        service = self._wanted.get(port)
        if service is not None and port not in self._reported:
            self._reported.add(port)
            _log.warning("%s; trying again every %g s", error, self._retry)
            self._failed(service.namespace, service.name, port, str(error))

    def _answer(self, port: int) -> Response:
        service = self._wanted[port]
        healthy = self._healthy()
        headers = (*JSON, ("X-Load-Balancing-Endpoint-Weight", str(service.endpoints)))
        body = _BODY % (
            msgspec.json.encode(service.namespace),
            msgspec.json.encode(service.name),
            service.endpoints,
            b"true" if healthy else b"false",
        )
        return Response(200 if service.endpoints and healthy else 503, headers, body)
