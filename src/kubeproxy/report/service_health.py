"""The health check ports of Services (healthCheckNodePort), by which load balancers find nodes with endpoints.

Answers as in pkg/proxy/healthcheck/service_health.go of Kubernetes 1.36.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.server.http import JSON, Response
from kubeproxy.server.server import RETRY_SECONDS, HttpServer, bind_exactly

_log = logging.getLogger("kubeproxy.report")


# With the indentation of the Go kube-proxy: load balancers may search the text.
_BODY: Final = b"""{
\t"service": {
\t\t"namespace": %b,
\t\t"name": %b
\t},
\t"localEndpoints": %d,
\t"serviceProxyHealthy": %b
}"""


class LocalEndpoints(NamedTuple):
    """The content of a health check: the Service, and the number of its endpoints on this node."""

    namespace: str
    name: str
    endpoints: int


class HealthCheckAddress(NamedTuple):
    """The place of a health check: a port, on the addresses on which NodePorts of a family answer."""

    family: Family
    port: int


Failed = Callable[[str, str, int, str], None]
"""Called once when a port cannot be opened: namespace, name, port, reason (event FailedToStartServiceHealthcheck)."""

_EVERY_ADDRESS: Final = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 - kube-proxy's default


class ServiceHealth:
    """All health check ports of this node, by family. On the event loop's thread; call `stop` at the end.

    A port that is taken is tried again every `retry` seconds; the other ports are served.
    """

    def __init__(self, healthy: Callable[[], bool], failed: Failed, retry: float = RETRY_SECONDS) -> None:
        self._healthy = healthy
        self._failed = failed
        self._retry = retry
        self._wanted: Mapping[HealthCheckAddress, LocalEndpoints] = {}
        self._addresses: Mapping[Family, tuple[str, ...]] = {}
        self._servers: dict[HealthCheckAddress, list[HttpServer]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._reported: set[HealthCheckAddress] = set()

    def listen_on(self, addresses: Mapping[Family, Sequence[str] | None]) -> None:
        """Serve on these addresses of the node, None for all of a family; open ports move to them.

        A family without an address, and every family before the first call, is not served.
        """
        before = self._addresses
        self._addresses = {
            family: (_EVERY_ADDRESS[family],) if chosen is None else tuple(chosen)
            for family, chosen in addresses.items()
        }
        for place in list(self._servers):
            if before.get(place.family) != self._addresses.get(place.family):
                self._close(place)
        self.sync(self._wanted)

    def sync(self, wanted: Mapping[HealthCheckAddress, LocalEndpoints]) -> None:
        """Open, close and update ports so that exactly these are served."""
        self._wanted = dict(wanted)
        served = {place for place in wanted if self._addresses.get(place.family)}
        for place in self._servers.keys() - served:
            self._close(place)
        for place in sorted(served - self._servers.keys()):
            self._open(place)

    async def stop(self) -> None:
        """Close all ports and wait until their connections are closed."""
        for place in list(self._servers):
            self._close(place)
        await asyncio.gather(*self._closing)

    def _open(self, place: HealthCheckAddress) -> None:
        service, (family, port) = self._wanted[place], place
        name = f"{service.namespace}/{service.name}"
        _log.info("Opening health check port=%d family=%s service=%s", port, family.label, name)
        group = self._servers[place] = []
        for address in self._addresses[family]:
            # Every path and method, as in the Go kube-proxy: HAProxy sends OPTIONS *.
            server = HttpServer(f"health checks of {name}", lambda _: self._answer(place), bind_exactly)
            group.append(server)
            server.start_retrying([(address, port)], lambda error: self._report(place, error), self._retry)

    def _close(self, place: HealthCheckAddress) -> None:
        _log.info("Closing health check port=%d family=%s", place.port, place.family.label)
        for server in self._servers.pop(place):
            server.close()  # frees the address at once, for another Service or another program
            task = asyncio.get_running_loop().create_task(server.stop())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._reported.discard(place)

    def _report(self, place: HealthCheckAddress, error: ApplyError) -> None:
        service = self._wanted.get(place)
        if service is not None and place not in self._reported:
            self._reported.add(place)
            _log.warning("%s; trying again every %g s", error, self._retry)
            self._failed(service.namespace, service.name, place.port, str(error))

    def _answer(self, place: HealthCheckAddress) -> Response:
        service = self._wanted[place]
        healthy = self._healthy()
        headers = (*JSON, ("X-Load-Balancing-Endpoint-Weight", str(service.endpoints)))
        body = _BODY % (
            msgspec.json.encode(service.namespace),
            msgspec.json.encode(service.name),
            service.endpoints,
            b"true" if healthy else b"false",
        )
        return Response(200 if service.endpoints and healthy else 503, headers, body)
