"""The pages of the metrics port (10249): which path shows what. What they show is handed in.

Paths and content types as in cmd/kube-proxy's metrics server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kubeproxy.observe.http import JSON, TEXT, Handler, Headers, Response
from kubeproxy.observe.metrics import Metrics
from kubeproxy.observe.registry import CONTENT_TYPE

_METRICS: Final[Headers] = (("Content-Type", CONTENT_TYPE),)


def metrics_pages(
    metrics: Metrics,
    proxy_mode: Callable[[], str],
    configz: Callable[[], bytes] | None = None,
    statusz: Callable[[], str] | None = None,
    flagz: Callable[[], str] | None = None,
) -> Mapping[str, Handler]:
    """Return the routes of the metrics server: text pages but for /configz, whose callable returns JSON."""
    pages: dict[str, Handler] = {
        "/metrics": lambda _: Response(200, _METRICS, metrics.render()),
        "/healthz": lambda _: Response(200, TEXT, b"ok"),
        "/proxyMode": lambda _: Response(200, TEXT, proxy_mode().encode()),
    }
    if configz is not None:
        pages["/configz"] = lambda _: Response(200, JSON, configz())
    if statusz is not None:
        pages["/statusz"] = lambda _: Response(200, TEXT, statusz().encode())
    if flagz is not None:
        pages["/flagz"] = lambda _: Response(200, TEXT, flagz().encode())
    return pages
