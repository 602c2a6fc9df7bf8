"""The metrics port's pages."""

from __future__ import annotations

from kubeproxy.observe.http import Request, routes
from kubeproxy.observe.metrics import Metrics
from kubeproxy.observe.pages import metrics_pages


def test_each_path_shows_what_was_handed_in() -> None:
    pages = metrics_pages(
        Metrics(), lambda: "nftables", lambda: b'{"kubeproxy.config.k8s.io":{}}', lambda: "status", lambda: "v=2\n"
    )
    answers = {path: routes(pages)(Request("GET", path, "")) for path in (*pages, "/debug/pprof")}
    assert {path: (r.status, dict(r.headers)["Content-Type"]) for path, r in answers.items()} == {
        "/metrics": (200, "text/plain; version=0.0.4; charset=utf-8"),
        "/healthz": (200, "text/plain; charset=utf-8"),
        "/proxyMode": (200, "text/plain; charset=utf-8"),
        "/configz": (200, "application/json"),
        "/statusz": (200, "text/plain; charset=utf-8"),
        "/flagz": (200, "text/plain; charset=utf-8"),
        "/debug/pprof": (404, "text/plain; charset=utf-8"),
    }
    bodies = {path: response.body for path, response in answers.items()}
    assert bodies.pop("/metrics").startswith(b"# HELP kubeproxy_")
    assert bodies == {
        "/healthz": b"ok",
        "/proxyMode": b"nftables",
        "/configz": b'{"kubeproxy.config.k8s.io":{}}',
        "/statusz": b"status",
        "/flagz": b"v=2\n",
        "/debug/pprof": b"404 page not found\n",
    }


def test_pages_that_nobody_fills_are_not_there() -> None:
    assert set(metrics_pages(Metrics(), lambda: "ipvs")) == {"/metrics", "/healthz", "/proxyMode"}
