"""Health and readiness of the proxy itself, as /healthz, /livez and /readyz on port 10256.

Bodies and rules as in pkg/proxy/healthcheck/proxy_health.go of Kubernetes 1.36; /readyz is ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kubeproxy.model.objects import Node
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.server.http import JSON, Handler, Request, Response
from kubeproxy.server.text import json_bytes, timestamp

TO_BE_DELETED_TAINT: Final = "ToBeDeletedByClusterAutoscaler"
NEVER: Final = "0001-01-01T00:00:00Z"  # Go's zero time

ReadyCheck = Callable[[], str | None]
"""Returns the reason why the proxy is not ready, or None. Quick, and raises nothing."""


def eligible(node: Node | None) -> bool:
    """Return whether load balancers may send traffic to a Node: it exists and is not about to be deleted."""
    if node is None or node.metadata.deletion_timestamp:
        return False
    taints = (node.spec.taints if node.spec else None) or ()
    return all(taint.key != TO_BE_DELETED_TAINT for taint in taints)


class ProxyHealth:
    """Health of the programming of each address family ('IPv4', 'IPv6').

    A family is unhealthy when its oldest queued change is older than twice the sync period (in seconds). Unlike in the
    Go kube-proxy, this applies to a family that was never synced as well. Before everything was listed nothing is
    queued, as a restart would not help. /healthz also fails until all families were synced once, and while
    `node_eligible` is false, which the caller sets. The Go kube-proxy does not listen before the Node is known.
    """

    def __init__(
        self,
        metrics: ProxyMetrics,
        sync_period: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.node_eligible = True
        self._metrics = metrics
        self._limit = 2 * sync_period
        self._clock = clock
        self._wall_clock = wall_clock
        self._queued: dict[str, float] = {}
        self._updated: dict[str, float] = {}
        self._checks: dict[str, ReadyCheck] = {"sync": self._synced}

    def queued(self, family: str) -> None:
        """Record that a change is queued; the oldest one counts."""
        self._queued.setdefault(family, self._clock())

    def updated(self, family: str) -> None:
        """Record that everything queued was programmed."""
        self._queued.pop(family, None)
        self._updated[family] = self._wall_clock()

    def healthy(self) -> bool:
        """Return whether all families are healthy: serviceProxyHealthy of the health checks of Services."""
        return not any(self._late(family) for family in self._queued)

    def last_updated(self, family: str) -> str | None:
        """Return the last time at which everything queued was programmed, None for never."""
        updated = self._updated.get(family)
        return None if updated is None else timestamp(updated)

    def ready_when(self, name: str, check: ReadyCheck) -> None:
        """Add a check for readiness, such as 'api' or 'kernel', or replace the one of that name."""
        self._checks[name] = check

    def unready(self) -> dict[str, str]:
        """Return the reasons why the proxy is not ready, by the name of the check; none when it is."""
        reasons = {name: check() for name, check in self._checks.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def routes(self) -> Mapping[str, Handler]:
        """Return the pages of the health port."""
        return {"/healthz": self._healthz, "/livez": self._livez, "/readyz": self._readyz}

    def _late(self, family: str) -> bool:
        since = self._queued.get(family)
        return since is not None and self._clock() - since >= self._limit

    def _synced(self) -> str | None:
        waiting = sorted(self._queued.keys() - self._updated.keys())
        if waiting:
            return f"not yet synced for the first time: {', '.join(waiting)}"
        return None if self._updated else "not yet synced for the first time"

    def _healthz(self, _: Request) -> Response:
        eligible = self.node_eligible and self._synced() is None
        response = self._respond(ok=self.healthy() and eligible, node={"nodeEligible": eligible})
        self._metrics.healthz.labels(str(response.status)).inc()
        return response

    def _livez(self, _: Request) -> Response:
        response = self._respond(ok=self.healthy(), node={})
        self._metrics.livez.labels(str(response.status)).inc()
        return response

    def _respond(self, *, ok: bool, node: Mapping[str, bool]) -> Response:
        now = timestamp(self._wall_clock())
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
            # The current time for a healthy proxy: in older releases this was the last run of the sync loop.
            "lastUpdated": now if ok else newest,
            "currentTime": now,
            **node,
            "healthy": self.healthy(),
        }
        if status:
            body["status"] = status
        return Response(200 if ok else 503, JSON, msgspec.json.encode(body))

    def _readyz(self, _: Request) -> Response:
        reasons = self.unready()
        body = json_bytes({"ready": not reasons, "reasons": reasons})
        return Response(503 if reasons else 200, JSON, body)
