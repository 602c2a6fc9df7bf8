"""The metrics of all modes, and the pages of the metrics port (10249). ProxyMetrics has the names, help texts, labels
and buckets of pkg/proxy/metrics and component-base of Kubernetes 1.36; OwnMetrics has the metrics that the Go
kube-proxy lacks. Paths and content types of the pages are as in the metrics server of cmd/kube-proxy v1.36."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import sys
import threading
import time
import zlib
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kubeproxy.registry import CONTENT_TYPE, CounterMetric, GaugeMetric, Histogram, MetricFamily, MetricRegistry, Single
from kubeproxy.release import architecture, build
from kubeproxy.server.http import TEXT, Handler, Headers, Request, Response, read_only
from kubeproxy.server.text import clean, printable

KUBERNETES: Final = ("1", "36")

# The buckets and their rounding are those of component-base's ExponentialBuckets(0.001, 2, 15).
SYNC_BUCKETS: Final = tuple(0.001 * 2**n for n in range(15))
# The buckets are those of LinearBuckets for 0.25-0.5, 1-59, 60-115 in steps of 5, and 120-300 in steps of 30;
# MergeBuckets adds the zero.
PROGRAMMING_BUCKETS: Final = (0.0, 0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
LATENCY_BUCKETS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
SIZE_BUCKETS: Final = (64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)

FAMILY: Final = "ip_family"  # IPv4 or IPv6
NETFILTER: Final = Path("/proc/sys/net/netfilter")


class ProxyMetrics:
    """All metrics of one proxy."""

    def __init__(self) -> None:
        registry = self.registry = MetricRegistry()
        self.refusals: list[MetricFamily[CounterMetric]] = []
        self._sync(registry)
        self._changes(registry)
        self.count_refusals(
            "kubeproxy_sync_errors_total",
            "Cumulative syncs that the kernel refused, in any mode (not in the Go kube-proxy)",
        )
        self.own = OwnMetrics(registry)
        self.rest = RestClientMetrics(registry)
        started = _start_time()
        registry.collect(lambda: _process(started))
        registry.collect(_concurrency)
        build = registry.gauge(
            "kubernetes_build_info",
            "[BETA] A metric with a constant '1' value labeled by major, minor, git version, git commit, git tree"
            " state, build date, Go version, and compiler from which Kubernetes was built, and platform on which it is"
            " running.",
            *build_info(),
        )
        build.labels(*build_info().values()).set(1)
        # component-base has these metrics about metrics. In this proxy no metric is hidden or can be disabled.
        for state in ("disabled", "hidden"):
            registry.counter(f"{state}_metrics_total", f"[BETA] The count of {state} metrics.").labels()
        self._registered = registry.counter(
            "registered_metrics_total",
            "[BETA] The count of registered metrics broken by stability level and deprecation version.",
            *("deprecated_version", "stability_level"),
        )
        self._features = registry.gauge(
            "kubernetes_feature_enabled",
            "[BETA] This metric records the data about the stage and enablement of a k8s feature.",
            *("name", "stage"),
        )

    def render(self) -> bytes:
        """Return all metrics as Prometheus text of the type registry.CONTENT_TYPE."""
        levels = Counts(found[1] for text in self.registry.helps if (found := _STABILITY.match(text)))
        for level, number in levels.items():  # modes register metrics later
            self._registered.labels("", level).set(number)
        return self.registry.render()

    def show_features(self, states: Iterable[tuple[str, str, bool]]) -> None:
        """Set the metrics about feature gates from each gate's name, stage and state."""
        for name, stage, enabled in states:
            self._features.labels(name, stage).set(enabled)

    def count_refusals(self, name: str, text: str) -> None:
        """Create another counter of refused syncs by family, with this name."""
        self.refusals.append(self.registry.counter(name, text, FAMILY))

    def begin(self, families: Iterable[str]) -> None:
        """Create the counters of these families with the value 0, because an alert on a rate misses a counter that
        starts with 1."""
        for family in families:
            self.last_queued.labels(family)
            self.last_sync.labels(family)
            for counter in (*self.refusals, self.own.ejections):
                counter.labels(family)
            self.own.ejected.labels(family)

    def _sync(self, registry: MetricRegistry) -> None:
        def latency(name: str, text: str, buckets: Sequence[float] = SYNC_BUCKETS) -> MetricFamily[Histogram]:
            return registry.histogram(name, f"[ALPHA] {text}", buckets, FAMILY)

        self.sync_duration = latency("kubeproxy_sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds")
        self.sync_full_duration = latency(
            "kubeproxy_sync_full_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for full resyncs"
        )
        self.sync_partial_duration = latency(
            "kubeproxy_sync_partial_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for partial resyncs",
        )
        self.network_programming = latency(
            "kubeproxy_network_programming_duration_seconds",
            "In Cluster Network Programming Latency in seconds",
            PROGRAMMING_BUCKETS,
        )
        self.conntrack_duration = latency(
            "kubeproxy_conntrack_reconciler_sync_duration_seconds", "ReconcileConntrackFlowsLatency latency in seconds"
        )
        self.last_sync = registry.gauge(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
            "[ALPHA] The last time proxy rules were successfully synced",
            FAMILY,
        )
        self.last_queued = registry.gauge(
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
            "[ALPHA] The last time a sync of proxy rules was queued",
            FAMILY,
        )

    def _changes(self, registry: MetricRegistry) -> None:
        self.endpoint_changes_pending = registry.gauge(
            "kubeproxy_sync_proxy_rules_endpoint_changes_pending", "[ALPHA] Pending proxy rules Endpoint changes"
        ).labels()
        self.service_changes_pending = registry.gauge(
            "kubeproxy_sync_proxy_rules_service_changes_pending", "[ALPHA] Pending proxy rules Service changes"
        ).labels()
        self.endpoint_changes = registry.counter(
            "kubeproxy_sync_proxy_rules_endpoint_changes_total", "[ALPHA] Cumulative proxy rules Endpoint changes"
        ).labels()
        self.service_changes = registry.counter(
            "kubeproxy_sync_proxy_rules_service_changes_total", "[ALPHA] Cumulative proxy rules Service changes"
        ).labels()
        self.no_local_endpoints = registry.gauge(
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            "[ALPHA] Number of services with a Local traffic policy and no endpoints",
            "traffic_policy",
            FAMILY,
        )
        self.conntrack_deleted = registry.counter(
            "kubeproxy_conntrack_reconciler_deleted_entries_total",
            "[ALPHA] Cumulative conntrack flows deleted by conntrack reconciler",
            FAMILY,
        )
        self.healthz = registry.counter(
            "kubeproxy_proxy_healthz_total", "[ALPHA] Cumulative proxy healthz HTTP status", "code"
        )
        self.livez = registry.counter(
            "kubeproxy_proxy_livez_total", "[ALPHA] Cumulative proxy livez HTTP status", "code"
        )


_STABILITY: Final = re.compile(r"\[(ALPHA|BETA|STABLE)\] ")
"""Matches the stability level at the beginning of a help text of upstream, such as [ALPHA]."""


class OwnMetrics:
    """The metrics that the Go kube-proxy lacks, for alerts (deploy/alerts)."""

    def __init__(self, registry: MetricRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> MetricFamily[GaugeMetric]:
            return registry.gauge(name, f"{text} (not in the Go kube-proxy)", *labels)

        self.ready = gauge("kubeproxy_ready", "Whether /readyz reports that the proxy is ready: 1 or 0").labels()
        self.repairs = registry.counter(
            "kubeproxy_repairs_total",
            "Cumulative repairs of our rules after changes by other programs (not in the Go kube-proxy)",
        ).labels()
        self.config_invalid = gauge(
            "kubeproxy_config_invalid", "Whether the present configuration file is invalid: 1 or 0"
        ).labels()
        self.services = gauge("kubeproxy_services", "Services with an address in a family", FAMILY)
        self.endpoints = gauge(
            "kubeproxy_endpoints", "Endpoints that get new connections, summed over all Service ports", FAMILY
        )
        self.without_endpoints = gauge(
            "kubeproxy_services_without_endpoints",
            "Services that have a port without endpoints for new connections",
            FAMILY,
        )
        self.ejected = gauge("kubeproxy_ejected_endpoints", "Ejected endpoints of Service ports", FAMILY)
        self.ejections = registry.counter(
            "kubeproxy_endpoint_ejections_total",
            "Cumulative ejections of endpoints of Service ports (not in the Go kube-proxy)",
            FAMILY,
        )
        self.staleness = gauge(
            "kubeproxy_source_staleness_seconds",
            "Seconds since the API server's last bytes about a resource; 0 while its watch is open and not overdue",
            "resource",
        )
        self._certificates = gauge(
            "kubeproxy_certificate_expiration_timestamp_seconds",
            "Expiry of a certificate for the API server: the client's certificate, or the authority that expires last",
            "certificate",
        )
        registry.collect(lambda: conntrack(NETFILTER))

    def show_certificates(self, expiries: Mapping[str, float]) -> None:
        """Set the expiry time of each used certificate (seconds since the epoch)."""
        self._certificates.clear()
        for name, expiry in expiries.items():
            self._certificates.labels(name).set(expiry)


def conntrack(folder: Path) -> Iterable[Single]:
    """Yield the number of tracked connections and its limit; nothing if the kernel does not have the files."""
    for name, file, text in (
        ("kubeproxy_conntrack_entries", "nf_conntrack_count", "Tracked connections of this network namespace"),
        ("kubeproxy_conntrack_entries_limit", "nf_conntrack_max", "Maximum number of tracked connections"),
    ):
        try:
            value = float((folder / file).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        yield name, "gauge", f"{text} (not in the Go kube-proxy)", value


class RestClientMetrics:
    """The rest_client_ metrics of component-base, for the API client."""

    def __init__(self, registry: MetricRegistry) -> None:
        def by_verb(name: str, text: str, buckets: Sequence[float]) -> MetricFamily[Histogram]:
            return registry.histogram(name, f"[ALPHA] {text}", buckets, "verb", "host")

        self.duration = by_verb(
            "rest_client_request_duration_seconds",
            "Request latency in seconds. Broken down by verb, and host.",
            LATENCY_BUCKETS,
        )
        self.request_size = by_verb(
            "rest_client_request_size_bytes", "Request size in bytes. Broken down by verb and host.", SIZE_BUCKETS
        )
        self.response_size = by_verb(
            "rest_client_response_size_bytes", "Response size in bytes. Broken down by verb and host.", SIZE_BUCKETS
        )
        self.rate_limiter_duration = by_verb(
            "rest_client_rate_limiter_duration_seconds",
            "Client side rate limiter latency in seconds. Broken down by verb, and host.",
            LATENCY_BUCKETS,
        )
        self.requests = registry.counter(
            "rest_client_requests_total",
            "[ALPHA] Number of HTTP requests, partitioned by status code, method, and host.",
            *("code", "method", "host"),
        )


def build_info() -> Mapping[str, str]:
    """Return the labels of kubernetes_build_info: the Kubernetes version that this proxy implements, and the
    platform."""
    built = build()
    major, minor = KUBERNETES
    return {
        "major": major,
        "minor": minor,
        "git_version": f"v{major}.{minor}.0+python.{built.name.replace('+', '.')}",
        "git_commit": built.commit,
        "git_tree_state": built.tree,
        "build_date": "",
        "go_version": "",
        "compiler": f"{sys.implementation.name} {'.'.join(map(str, sys.version_info[:3]))}",
        "platform": f"linux/{architecture()}",
    }


def _stat() -> list[str]:
    """Return the fields of /proc/self/stat after the command (proc(5)): index 11 is utime, 19 starttime, 21 rss."""
    return Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _start_time() -> float:
    lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    boot = next(float(line.split()[1]) for line in lines if line.startswith("btime "))
    return boot + int(_stat()[19]) / os.sysconf("SC_CLK_TCK")


def _process(started: float) -> Iterable[Single]:
    stat = _stat()
    cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    descriptors = sum(1 for _ in os.scandir("/proc/self/fd")) - 1
    resident = int(stat[21]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    most = 2**64 - 1 if limit == resource.RLIM_INFINITY else limit
    gauges = (
        ("max_fds", "Maximum number of open file descriptors.", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        ("open_fds", "Number of open file descriptors.", descriptors),
        ("resident_memory_bytes", "Resident memory size in bytes.", resident),
        ("start_time_seconds", "Start time of the process since unix epoch in seconds.", started),
        ("virtual_memory_bytes", "Virtual memory size in bytes.", int(stat[20])),
        ("virtual_memory_max_bytes", "Maximum amount of virtual memory available in bytes.", most),
    )
    yield "process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", cpu
    traffic = _traffic()
    for name, text, key in (
        ("receive", "Number of bytes received by the process over the network.", "InOctets"),
        ("transmit", "Number of bytes sent by the process over the network.", "OutOctets"),
    ):
        if key in traffic:
            yield f"process_network_{name}_bytes_total", "counter", text, traffic[key]
    for name, text, value in gauges:
        yield f"process_{name}", "gauge", text, value


def _traffic(path: Path = Path("/proc/self/net/netstat")) -> Mapping[str, int]:
    """Return the counters of the IP layer in this network namespace (proc(5)), which the Go client also reports."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line.startswith("IpExt:")]
    except OSError:
        return {}
    return {
        name: int(value)
        for names, values in zip(lines[::2], lines[1::2], strict=False)
        for name, value in zip(names[1:], values[1:], strict=False)
    }


def _concurrency() -> Iterable[Single]:
    """Yield the Go client's metrics for goroutines and threads, because dashboards for all components show them."""
    try:
        tasks = len(asyncio.all_tasks())
    except RuntimeError:  # no event loop is running
        tasks = 0
    threads = threading.active_count()
    text = "Number of asyncio tasks and threads, which correspond to goroutines."
    yield "go_goroutines", "gauge", text, tasks + threads
    yield "go_threads", "gauge", "Number of threads.", threads


_METRICS: Final[Headers] = (("Content-Type", CONTENT_TYPE),)
_ZIPPED: Final[Headers] = (*_METRICS, ("Content-Encoding", "gzip"))
SLIS_PAGE: Final = "/metrics/slis"
_PING: Final = "ping"
GZIP: Final = 31  # zlib's value for the gzip format

# The pages of k8s.io/component-base/zpages begin with these lines.
_WARNING: Final = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for"
    " debugging purposes only."
)


def metrics_pages(
    metrics: ProxyMetrics, mode: str, asked_by: Callable[[str], None] = lambda _: None
) -> dict[str, Handler]:
    """Return the pages by path; each local request for /proxyMode calls `asked_by` with its User-Agent."""

    def all_metrics(request: Request) -> Response:
        text = metrics.render()
        if not takes_gzip(request.accept_encoding):
            return Response(200, _METRICS, text)
        return Response(200, _ZIPPED, zlib.compress(text, 1, wbits=GZIP))

    def proxy_mode(request: Request) -> Response:
        asked_by(request.neighbour)
        return Response(200, TEXT, mode.encode())

    return {"/metrics": all_metrics, **health_pages(), "/proxyMode": proxy_mode}


def health_pages() -> Mapping[str, Handler]:
    """Return two pages by path: /healthz of the metrics port, and SLIS_PAGE with the metrics of health checks, which
    DELETE resets. Paths, texts and metrics are as in k8s.io/apiserver's healthz and component-base's slis packages. The
    only check, "ping", always succeeds, because the health port (health.py) shows the proxy's state."""
    registry = MetricRegistry()
    text = "[STABLE] This metric records the result of a single healthcheck."
    result = registry.gauge("kubernetes_healthcheck", text, "name", "type")
    text = "[STABLE] This metric records the results of all healthcheck."
    results = registry.counter("kubernetes_healthchecks_total", text, "name", "type", "status")

    def healthz(request: Request) -> Response:
        excluded = [value for name, value in request.parameters if name == "exclude"]
        if _PING in excluded:
            lines = [f"[+]{_PING} excluded: ok"]
        else:
            lines = [f"[+]{_PING} ok"]
            result.labels(_PING, "healthz").set(1)
            results.labels(_PING, "healthz", "success").inc()
        if unknown := sorted(set(excluded) - {_PING}):
            names = ",".join(f'"{name}"' for name in unknown)
            lines.append(f"warn: some health checks cannot be excluded: no matches for {names}")
        if "verbose" not in dict(request.parameters):
            return Response(200, TEXT, b"ok")
        return Response(200, TEXT, "\n".join([*lines, "healthz check passed", ""]).encode())

    def slis(request: Request) -> Response:
        if request.method == "DELETE":
            result.clear()
            results.clear()
            return Response(200, TEXT, b"metrics reset\n")
        return read_only(lambda _: Response(200, _METRICS, registry.render()))(request)

    return {"/healthz": healthz, f"/healthz/{_PING}": lambda _: Response(200, TEXT, b"ok"), SLIS_PAGE: slis}


def flags_text(flags: Sequence[tuple[str, str]]) -> str:
    """Return the text of /flagz."""
    return "\n".join(
        ["kube-proxy flagz", _WARNING, "", *(f"{name}={printable(clean(value))}" for name, value in flags), ""]
    )


def status_text(facts: Mapping[str, str], started: float, paths: Iterable[str], now: float | None = None) -> str:
    """Return the text of /statusz with the time since `started` (seconds since the epoch), the facts and the other
    pages."""
    minutes, seconds = divmod(int((time.time() if now is None else now) - started), 60)
    lines = [
        "kube-proxy statusz",
        _WARNING,
        "",
        f"Started: {time.strftime('%a %b %e %H:%M:%S UTC %Y', time.gmtime(started))}",
        f"Up: {minutes // 60} hr {minutes % 60:02d} min {seconds:02d} sec",
        *(f"{name}: {printable(clean(value))}" for name, value in facts.items()),
        f"Paths: {' '.join(sorted(paths))}",
        "",
    ]
    return "\n".join(lines)


def takes_gzip(accepted: str) -> bool:
    """Return whether an Accept-Encoding header allows gzip (RFC 9110, 12.5.3)."""
    for entry in accepted.lower().split(","):
        coding, _, parameters = entry.partition(";")
        if coding.strip() == "gzip":
            return parameters.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False
