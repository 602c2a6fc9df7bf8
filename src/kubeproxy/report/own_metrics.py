"""The metrics that the Go kube-proxy has not: what an operator alerts on. The alerts are deploy/alerts.

Names, labels and help only; who counts is elsewhere. Nothing here costs a scrape more than a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from kubeproxy.report.registry import MetricRegistry, Single

NETFILTER: Final = Path("/proc/sys/net/netfilter")

_CONNTRACK: Final = (
    (
        "kubeproxy_conntrack_entries",
        "nf_conntrack_count",
        "Connections that the kernel tracks in this network namespace",
    ),
    ("kubeproxy_conntrack_entries_limit", "nf_conntrack_max", "Connections that the kernel tracks at most"),
)


class OwnMetrics:
    """Those of one proxy, in its registry. Gauges of Services and endpoints have the label ip_family."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.ready = registry.gauge(
            "kubeproxy_ready", "Whether /readyz says that the proxy does its work: 1 or 0 (not in the Go kube-proxy)"
        ).labels()
        self.repairs = registry.counter(
            "kubeproxy_repairs_total",
            "Cumulative repairs of what another program changed in our rules (not in the Go kube-proxy)",
        ).labels()
        self.config_invalid = registry.gauge(
            "kubeproxy_config_invalid",
            "Whether the configuration file as it is now cannot be used: 1 or 0 (not in the Go kube-proxy)",
        ).labels()
        self.services = registry.gauge(
            "kubeproxy_services", "Services that have an address in a family (not in the Go kube-proxy)", "ip_family"
        )
        self.endpoints = registry.gauge(
            "kubeproxy_endpoints",
            "Endpoints that new connections are sent to, of all Service ports (not in the Go kube-proxy)",
            "ip_family",
        )
        self.without_endpoints = registry.gauge(
            "kubeproxy_services_without_endpoints",
            "Services with a port that no endpoint anywhere takes connections for (not in the Go kube-proxy)",
            "ip_family",
        )
        self._staleness = registry.gauge(
            "kubeproxy_source_staleness_seconds",
            "Seconds since the source of a resource was last heard from (not in the Go kube-proxy)",
            "resource",
        )
        self._certificates = registry.gauge(
            "kubeproxy_certificate_expiration_timestamp_seconds",
            "When a certificate that is used for the API server expires: the client's own, or the last of the"
            " authorities (not in the Go kube-proxy)",
            "certificate",
        )
        registry.collect(lambda: conntrack(NETFILTER))

    def follow_staleness(self, resource_name: str, seconds: Callable[[], float]) -> None:
        """Ask this at each scrape how old the state of a resource may be."""
        self._staleness.labels(resource_name).follow(seconds)

    def show_certificates(self, expiries: Mapping[str, float]) -> None:
        """Show when the certificates expire that are used from now on, in seconds since the epoch, by what they are."""
        self._certificates.clear()
        for name, expiry in expiries.items():
            self._certificates.labels(name).set(expiry)


def conntrack(folder: Path) -> Iterable[Single]:
    """Yield how full connection tracking is, nothing where the kernel does not say."""
    for name, file, text in _CONNTRACK:
        try:
            value = float((folder / file).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        yield name, "gauge", f"{text} (not in the Go kube-proxy)", value
