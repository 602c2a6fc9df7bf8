"""The pages of the metrics port."""

from __future__ import annotations

import gzip

import pytest

from kubeproxy.report.metrics import ProxyMetrics, flags_text, metrics_pages, status_text
from kubeproxy.server.http import Request, routes


def test_each_path_answers() -> None:
    pages = metrics_pages(ProxyMetrics(), "nftables")
    answers = {path: routes(pages)(Request("GET", path, "")) for path in (*pages, "/debug/pprof")}
    assert {path: (r.status, dict(r.headers)["Content-Type"]) for path, r in answers.items()} == {
        "/metrics": (200, "text/plain; version=0.0.4; charset=utf-8"),
        "/metrics/slis": (200, "text/plain; version=0.0.4; charset=utf-8"),
        "/healthz": (200, "text/plain; charset=utf-8"),
        "/healthz/ping": (200, "text/plain; charset=utf-8"),
        "/proxyMode": (200, "text/plain; charset=utf-8"),
        "/debug/pprof": (404, "text/plain; charset=utf-8"),
    }
    bodies = {path: response.body for path, response in answers.items()}
    assert bodies.pop("/metrics").startswith(b"# HELP disabled_metrics_total ")
    assert bodies.pop("/metrics/slis").startswith(b"# HELP kubernetes_healthcheck ")
    assert bodies == {
        "/healthz": b"ok",
        "/healthz/ping": b"ok",
        "/proxyMode": b"nftables",
        "/debug/pprof": b"404 page not found\n",
    }


@pytest.mark.parametrize(
    ("accepted", "zipped"),
    [("gzip", True), ("deflate, gzip;q=1.0, *;q=0.5", True), ("gzip; q=0", False), ("", False), ("br", False)],
)
def test_metrics_are_compressed_for_clients_that_accept_it(accepted: str, zipped: bool) -> None:
    response = metrics_pages(ProxyMetrics(), "ipvs")["/metrics"](
        Request("GET", "/metrics", "", accept_encoding=accepted)
    )
    assert isinstance(response.body, bytes)
    assert (dict(response.headers).get("Content-Encoding") == "gzip") == zipped
    assert (gzip.decompress(response.body) if zipped else response.body).startswith(b"# HELP disabled_metrics_total ")


def test_status_and_flags_begin_as_those_of_other_components() -> None:
    lines = status_text({"Mode": "ipvs"}, 1795238047.0, ["/b", "/a"], now=1795238047.0 + 3 * 3600 + 65.9).splitlines()
    assert lines[0] == "kube-proxy statusz"
    assert lines[1].startswith("Warning: This endpoint is not meant to be machine parseable")
    assert lines[3:] == [
        "Started: Sat Nov 21 05:14:07 UTC 2026",
        "Up: 3 hr 01 min 05 sec",
        "Mode: ipvs",
        "Paths: /a /b",
    ]
    lines = flags_text((("a", "b"), ("v", "2"))).splitlines()
    assert (lines[0], lines[3:]) == ("kube-proxy flagz", ["a=b", "v=2"])


def test_flags_and_facts_are_a_line_each_and_show_no_secret() -> None:
    text = flags_text([("master", "https://u:hunter2@h\n"), ("v", "2")])
    assert "master=https://<redacted>@h\\n\nv=2\n" in text
    assert "Ready: a\\nb\n" in status_text({"Ready": "a\nb"}, 0.0, [], now=1.0)
