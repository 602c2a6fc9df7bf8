"""/healthz of the metrics port, and /metrics/slis."""

from __future__ import annotations

import pytest

from kubeproxy.report.metrics import SLIS_PAGE, health_pages
from kubeproxy.server.http import Request, Response, routes

TEXT = "text/plain; charset=utf-8"
COUNTED = (
    "# HELP kubernetes_healthcheck [STABLE] This metric records the result of a single healthcheck.\n"
    "# TYPE kubernetes_healthcheck gauge\n"
    'kubernetes_healthcheck{name="ping",type="healthz"} 1\n'
    "# HELP kubernetes_healthchecks_total [STABLE] This metric records the results of all healthcheck.\n"
    "# TYPE kubernetes_healthchecks_total counter\n"
    'kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} %d\n'
)


class Port:
    """Return the pages as served."""

    def __init__(self) -> None:
        self._handler = routes(health_pages(), frozenset((SLIS_PAGE,)))

    def ask(self, path: str, query: str = "", method: str = "GET") -> Response:
        return self._handler(Request(method, path, query))


@pytest.mark.parametrize(
    ("path", "query", "body"),
    [
        ("/healthz", "", "ok"),
        ("/healthz/ping", "", "ok"),
        ("/healthz", "verbose", "[+]ping ok\nhealthz check passed\n"),
        ("/healthz", "verbose=1&exclude=ping", "[+]ping excluded: ok\nhealthz check passed\n"),
        (
            "/healthz",
            "exclude=b&exclude=a&verbose",
            '[+]ping ok\nwarn: some health checks cannot be excluded: no matches for "a","b"\nhealthz check passed\n',
        ),
    ],
)
def test_healthz_answers_as_that_of_other_components(path: str, query: str, body: str) -> None:
    response = Port().ask(path, query)
    assert (response.status, dict(response.headers)["Content-Type"], response.body) == (200, TEXT, body.encode())


def test_slis_count_answers_of_healthz_and_can_be_reset() -> None:
    port = Port()
    assert (port.ask(SLIS_PAGE).status, port.ask(SLIS_PAGE).body) == (200, b"")
    port.ask("/healthz", "exclude=ping")
    port.ask("/healthz/ping")
    assert port.ask(SLIS_PAGE).body == b""
    for count in (1, 2):
        port.ask("/healthz")
        response = port.ask(SLIS_PAGE)
        assert dict(response.headers) == {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        assert response.body == (COUNTED % count).encode()
    assert port.ask(SLIS_PAGE, method="DELETE") == Response(200, port.ask("/healthz/ping").headers, b"metrics reset\n")
    assert port.ask(SLIS_PAGE).body == b""
    assert port.ask(SLIS_PAGE, method="POST").status == 405
