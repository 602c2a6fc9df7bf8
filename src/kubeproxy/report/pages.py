"""The pages of the metrics port (10249). Paths and content types as in cmd/kube-proxy's metrics server of v1.36."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs

from kubeproxy.registry import CONTENT_TYPE, MetricRegistry
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.server.http import JSON, TEXT, Handler, Headers, Request, Response, read_only
from kubeproxy.server.text import clean, printable

_METRICS: Final[Headers] = (("Content-Type", CONTENT_TYPE),)
_ZIPPED: Final[Headers] = (*_METRICS, ("Content-Encoding", "gzip"))
SLIS_PAGE: Final = "/metrics/slis"
_PING: Final = "ping"
GZIP: Final = 31  # zlib's name for the gzip format with its largest window

# The first lines of k8s.io/component-base/zpages.
_WARNING: Final = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for"
    " debugging purposes only."
)


def metrics_pages(
    metrics: ProxyMetrics,
    proxy_mode: Callable[[], str],
    configz: Callable[[], bytes] | None = None,
    statusz: Callable[[], str] | None = None,
    flagz: Callable[[], str] | None = None,
    state: Handler | None = None,
    asked_by: Callable[[str], None] | None = None,
) -> dict[str, Handler]:
    """Return the pages by path: text, except /configz, whose callable returns JSON; /debug/state is ours.

    `asked_by` gets the User-Agent header of each program on this node that requests /proxyMode.
    """

    def all_metrics(request: Request) -> Response:
        text = metrics.render()
        if not takes_gzip(request.accept_encoding):
            return Response(200, _METRICS, text)
        return Response(200, _ZIPPED, zlib.compress(text, 1, wbits=GZIP))

    def mode(request: Request) -> Response:
        if asked_by is not None:
            asked_by(request.neighbour)
        return Response(200, TEXT, proxy_mode().encode())

    pages: dict[str, Handler] = {"/metrics": all_metrics, **health_pages(), "/proxyMode": mode}
    if configz is not None:
        pages["/configz"] = lambda _: Response(200, JSON, configz())
    if statusz is not None:
        pages["/statusz"] = lambda _: Response(200, TEXT, statusz().encode())
    if flagz is not None:
        pages["/flagz"] = lambda _: Response(200, TEXT, flagz().encode())
    if state is not None:
        pages["/debug/state"] = state
    return pages


def health_pages() -> Mapping[str, Handler]:
    """Return /healthz of the metrics port and SLIS_PAGE, its metrics, by path; DELETE of SLIS_PAGE resets these.

    Paths, texts and metrics as in k8s.io/apiserver's healthz and component-base's slis packages: the only check,
    "ping", always succeeds. The state of the proxy is on the health port (health.py).
    """
    registry = MetricRegistry()
    text = "[STABLE] This metric records the result of a single healthcheck."
    result = registry.gauge("kubernetes_healthcheck", text, "name", "type")
    text = "[STABLE] This metric records the results of all healthcheck."
    results = registry.counter("kubernetes_healthchecks_total", text, "name", "type", "status")

    def healthz(request: Request) -> Response:
        query = parse_qs(request.query, keep_blank_values=True)
        excluded = query.get("exclude", [])
        if _PING in excluded:
            lines = [f"[+]{_PING} excluded: ok"]
        else:
            lines = [f"[+]{_PING} ok"]
            result.labels(_PING, "healthz").set(1)
            results.labels(_PING, "healthz", "success").inc()
        if unknown := sorted(set(excluded) - {_PING}):
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


def flags_text(flags: Sequence[tuple[str, str]]) -> str:
    """Return the text of /flagz."""
    return "\n".join(
        ["kube-proxy flagz", _WARNING, "", *(f"{name}={printable(clean(value))}" for name, value in flags), ""]
    )


def status_text(facts: Mapping[str, str], started: float, paths: Sequence[str], now: float | None = None) -> str:
    """Return the text of /statusz: the start (seconds since the epoch), the facts, and the other pages."""
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
