"""New connections by Service, port and endpoint, counted over a short time. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from kubeproxy.ask.flows.owners import Owners
from kubeproxy.kernel.conntrack.tracked import Tracked
from kubeproxy.model.addresses import destination_text

MOST_SERVICES: Final = 200
"""Maximum number of Services in an answer, the busiest ones."""
MOST_ENDPOINTS: Final = 100
"""Maximum number of endpoints of a Service in an answer, the busiest ones."""


class Beginnings:
    """Counts new connections; without `endpoints`, where connections end at the proxy, only by Service."""

    def __init__(self, owners: Owners, *, endpoints: bool) -> None:
        self._owners = owners
        self._endpoints = endpoints
        self._counts: dict[str, Counter[tuple[str, bytes]]] = {}

    def add(self, entry: Tracked, weight: int) -> None:
        """Count a sampled connection, `weight` times."""
        owner = self._owners.of(entry.target)
        if owner is not None:
            service, port = owner
            counts = self._counts.get(service)
            if counts is None:
                counts = self._counts[service] = Counter()
            counts[port, entry.server] += weight

    def take(self, seconds: float) -> dict[str, Any]:
        """Return, by Service, new connections a second and their shares by port and endpoint, and reset the counts."""
        counts, self._counts = self._counts, {}
        totals = Counter({service: sum(by_endpoint.values()) for service, by_endpoint in counts.items()})
        return {
            service: {
                "new": round(total / seconds, 2),
                "endpoints": self._shares(counts[service], total),
            }
            for service, total in totals.most_common(MOST_SERVICES)
        }

    def _shares(self, counts: Counter[tuple[str, bytes]], total: int) -> dict[str, dict[str, float]]:
        shares: dict[str, dict[str, float]] = {}
        for (port, endpoint), count in counts.most_common(MOST_ENDPOINTS) if self._endpoints else ():
            shares.setdefault(port, {})[destination_text(endpoint)] = round(count / total, 4)
        return shares
