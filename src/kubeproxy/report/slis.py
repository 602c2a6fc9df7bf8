"""/healthz of the metrics port and /metrics/slis beside it, which counts how it answered.

Paths, texts and metrics are those of k8s.io/apiserver's healthz and component-base's slis packages in Kubernetes 1.36:
there is one check, "ping", which is well whenever somebody answers. How the proxy is, the health port says (health.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qs

from kubeproxy.report.registry import CONTENT_TYPE, MetricRegistry
from kubeproxy.server.http import TEXT, Handler, Headers, Request, Response, read_only

SLIS_PAGE: Final = "/metrics/slis"
_PING: Final = "ping"
_METRICS: Final[Headers] = (("Content-Type", CONTENT_TYPE),)


def health_pages() -> Mapping[str, Handler]:
    """Return the pages by path; DELETE of SLIS_PAGE forgets what was counted."""
    registry = MetricRegistry()
    result = registry.gauge(
        "kubernetes_healthcheck", "[STABLE] This metric records the result of a single healthcheck.", *("name", "type")
    )
    results = registry.counter(
        "kubernetes_healthchecks_total",
        "[STABLE] This metric records the results of all healthcheck.",
        *("name", "type", "status"),
    )

    def healthz(request: Request) -> Response:
        query = parse_qs(request.query, keep_blank_values=True)
        excluded = query.get("exclude", [])
        if _PING in excluded:
            lines = [f"[+]{_PING} excluded: ok"]
        else:
            lines = [f"[+]{_PING} ok"]
            result.labels(_PING, "healthz").set(1)
            results.labels(_PING, "healthz", "success").inc()
        unknown = sorted(set(excluded) - {_PING})
        if unknown:
            names = ",".join(f'"{name}"' for name in unknown)
            lines.append(f"warn: some health checks cannot be excluded: no matches for {names}")
        if "verbose" not in query:
            return Response(200, TEXT, b"ok")
        return Response(200, TEXT, "\n".join([*lines, "healthz check passed", ""]).encode())

    def slis(request: Request) -> Response:
        if request.method == "DELETE":
            result.clear()
            results.clear()
            return Response(200, TEXT, b"metrics reset\n")
        return read_only(lambda _: Response(200, _METRICS, registry.render()))(request)

    return {"/healthz": healthz, f"/healthz/{_PING}": lambda _: Response(200, TEXT, b"ok"), SLIS_PAGE: slis}
