"""Serves the proxy's health and readiness (/healthz, /livez and /readyz on port 10256) and the health check ports of
Services (healthCheckNodePort); notifies systemd. Bodies and rules are as in
pkg/proxy/healthcheck/{proxy,service}_health.go of Kubernetes 1.36, which has no /readyz."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.registry import CounterMetric, MetricFamily
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.server.http import JSON, Handler, Request, Response
from kubeproxy.server.server import RETRY_SECONDS, HttpServer, bind_exactly
from kubeproxy.server.text import clean, json_bytes, printable, timestamp

NEVER: Final = "0001-01-01T00:00:00Z"  # Go's zero time

ReadyCheck = Callable[[], str | None]
"""A function that returns the reason why the proxy is not ready, or None. The function must be fast and must not
raise."""


class ProxyHealth(Struct):
    """Health of the programming of each address family ('IPv4', 'IPv6').

    A family is unhealthy if its oldest queued change is older than twice the sync period (seconds). Unlike in the Go
    kube-proxy, a family that was never synced becomes unhealthy too. A proxy without a complete list of the objects is
    healthy, because a restart would not help. /healthz also fails until all families have been synced once, and while
    `node_eligible` is false."""

    metrics: ProxyMetrics
    sync_period: float
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    node_eligible: bool = True
    _queued: dict[str, float] = {}
    _updated: dict[str, float] = {}
    _checks: dict[str, ReadyCheck] = {}

    def queued(self, family: str) -> None:
        """Record that a change is queued."""
        self._queued.setdefault(family, self.clock())

    def updated(self, family: str) -> None:
        """Record that all queued changes are programmed."""
        self._queued.pop(family, None)
        self._updated[family] = self.wall_clock()

    def healthy(self) -> bool:
        """Return whether all families are healthy; Services' health checks show this value as `serviceProxyHealthy`."""
        return not any(self._late(family) for family in self._queued)

    def last_updated(self, family: str) -> str | None:
        """Return the last time when all queued changes were programmed, or None before the first time."""
        updated = self._updated.get(family)
        return None if updated is None else timestamp(updated)

    def ready_when(self, name: str, check: ReadyCheck) -> None:
        """Add or replace the readiness check with this name, such as 'api' or 'kernel'."""
        self._checks[name] = check

    def unready(self) -> dict[str, str]:
        """Return the reason of each failed readiness check by the check's name; empty if the proxy is ready."""
        reasons = {"sync": self._synced()} | {name: check() for name, check in self._checks.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def routes(self) -> Mapping[str, Handler]:
        """Return the pages of the health port."""
        return {
            "/healthz": self._healthz,
            "/livez": lambda _: self._respond(self.metrics.livez, ok=self.healthy(), node={}),
            "/readyz": self._readyz,
        }

    def _late(self, family: str) -> bool:
        since = self._queued.get(family)
        return since is not None and self.clock() - since >= 2 * self.sync_period

    def _synced(self) -> str | None:
        waiting = sorted(self._queued.keys() - self._updated.keys())
        if waiting:
            return f"not yet synced for the first time: {', '.join(waiting)}"
        return None if self._updated else "not yet synced for the first time"

    def _healthz(self, _: Request) -> Response:
        eligible = self.node_eligible and self._synced() is None
        node = {"nodeEligible": eligible}
        return self._respond(self.metrics.healthz, ok=self.healthy() and eligible, node=node)

    def _respond(self, answers: MetricFamily[CounterMetric], *, ok: bool, node: Mapping[str, bool]) -> Response:
        now = timestamp(self.wall_clock())
        families = sorted(self._updated.keys() | self._queued.keys())
        status = {
            family: {
                "lastUpdated": timestamp(self._updated[family]) if family in self._updated else NEVER,
                "healthy": not self._late(family),
            }
            for family in families
        }
        newest = timestamp(max(self._updated.values())) if self._updated else NEVER
        body: dict[str, object] = {
            # As in the Go kube-proxy, lastUpdated is the current time while the proxy is healthy.
            "lastUpdated": now if ok else newest,
            "currentTime": now,
            **node,
            "healthy": self.healthy(),
        }
        if status:
            body["status"] = status
        code = 200 if ok else 503
        answers.labels(str(code)).inc()
        return Response(code, JSON, msgspec.json.encode(body))

    def _readyz(self, _: Request) -> Response:
        reasons = self.unready()
        body = json_bytes({"ready": not reasons, "reasons": reasons})
        return Response(503 if reasons else 200, JSON, body)


_log = logging.getLogger("kubeproxy.report")


# The indentation is as in the Go kube-proxy, because load balancers may search for this text.
_BODY: Final = b"""{
\t"service": {
\t\t"namespace": %b,
\t\t"name": %b
\t},
\t"localEndpoints": %d,
\t"serviceProxyHealthy": %b
}"""


class LocalEndpoints(NamedTuple):
    """The answer of a health check: the Service, and the number of its endpoints on this node."""

    namespace: str
    name: str
    endpoints: int


class HealthCheckAddress(NamedTuple):
    """The family and the port of a health check."""

    family: Family
    port: int


Failed = Callable[[str, str, int, str], None]
"""A function that is called once if a port cannot be opened, with namespace, name, port and reason."""

_EVERY_ADDRESS: Final = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 - kube-proxy's default


class ServiceHealth(Struct):
    """Serves the health check ports of this node; retries a port that is in use every `retry` seconds. All calls must
    be on the event loop's thread."""

    healthy: Callable[[], bool]
    failed: Failed
    retry: float = RETRY_SECONDS
    _wanted: Mapping[HealthCheckAddress, LocalEndpoints] = {}
    _addresses: Mapping[Family, tuple[str, ...]] = {}
    _servers: dict[HealthCheckAddress, list[HttpServer]] = {}
    _closing: set[asyncio.Task[None]] = set()
    _reported: set[HealthCheckAddress] = set()

    def listen_on(self, addresses: Mapping[Family, Sequence[str] | None]) -> None:
        """Serve the ports on these addresses of the node, and move open ports to them. None means all addresses of a
        family. No port is served before the first call, or for a family without addresses."""
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
        """Open, close and update ports until exactly the ports in `wanted` are served."""
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
            # As in the Go kube-proxy, every path and method gets an answer, because HAProxy sends OPTIONS *.
            server = HttpServer(f"health checks of {name}", lambda _: self._answer(place), bind_exactly)
            group.append(server)
            server.start_retrying((address, port), lambda error: self._report(place, error), self.retry)

    def _close(self, place: HealthCheckAddress) -> None:
        _log.info("Closing health check port=%d family=%s", place.port, place.family.label)
        for server in self._servers.pop(place):
            server.close()  # frees the address immediately
            task = asyncio.get_running_loop().create_task(server.stop())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._reported.discard(place)

    def _report(self, place: HealthCheckAddress, error: ApplyError) -> None:
        service = self._wanted.get(place)
        if service is not None and place not in self._reported:
            self._reported.add(place)
            _log.warning("%s; trying again every %g s", error, self.retry)
            self.failed(service.namespace, service.name, place.port, str(error))

    def _answer(self, place: HealthCheckAddress) -> Response:
        service = self._wanted[place]
        healthy = self.healthy()
        headers = (*JSON, ("X-Load-Balancing-Endpoint-Weight", str(service.endpoints)))
        body = _BODY % (
            msgspec.json.encode(service.namespace),
            msgspec.json.encode(service.name),
            service.endpoints,
            b"true" if healthy else b"false",
        )
        return Response(200 if service.endpoints and healthy else 503, headers, body)


STATUS_SECONDS: Final = 5.0


class Notifier:
    """Notifies systemd by sd_notify(3), and ignores errors. `address` is the path of a socket, or @ and an abstract
    name; '' sends nothing. systemd kills the service after `watchdog` seconds without WATCHDOG=1; 0 means never."""

    def __init__(self, address: str = "", watchdog: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = watchdog
        self._status = ""
        self._complained = False

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """Read systemd's variables, and remove them from the environment before a child process inherits them."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        ours = pid in {"", str(os.getpid())}
        seconds = int(microseconds) / 1e6 if ours and microseconds.isascii() and microseconds.isdigit() else 0.0
        return cls(address, seconds)

    def ready(self) -> None:
        """Report to systemd that this service has started."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Report to systemd that this service is stopping."""
        self._send("STOPPING=1\nSTATUS=Stopping; the rules stay in the kernel")

    async def run(self, healthy: Callable[[], bool], status: Callable[[], str]) -> None:
        """Send changes of the status, and WATCHDOG=1 at least twice per timeout while `healthy` is true, until
        cancelled. A watchdog datagram shows that the event loop runs."""
        if not self._address:
            return
        pause = min(STATUS_SECONDS, self._watchdog / 2) if self._watchdog else STATUS_SECONDS
        while True:
            lines = ["WATCHDOG=1"] if self._watchdog and healthy() else []
            text = printable(clean(" ".join(status().split())))
            if text != self._status:
                self._status = text
                lines.append(f"STATUS={text}")
            if lines:
                self._send("\n".join(lines))
            await asyncio.sleep(pause)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto(message.encode(errors="replace"), self._address)
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("Cannot notify systemd error=%r", str(error))
