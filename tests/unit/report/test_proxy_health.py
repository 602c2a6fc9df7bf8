"""/healthz, /livez and /readyz: pure, with fake clocks."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from kubeproxy.model.objects import Node, NodeSpec, ObjectMeta, Taint
from kubeproxy.model.world import eligible
from kubeproxy.report.health import ProxyHealth
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.server.http import Request

EPOCH = 1795238047.5  # 2026-11-21T05:14:07.5Z


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return EPOCH + self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> ProxyMetrics:
    return ProxyMetrics()


@pytest.fixture
def health(clock: Clock, metrics: ProxyMetrics) -> ProxyHealth:
    return ProxyHealth(metrics, 30, clock.monotonic, clock.wall)


def ask(health: ProxyHealth, path: str) -> tuple[int, dict[str, object]]:
    response = health.routes()[path](Request("GET", path, ""))
    assert dict(response.headers) == {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}
    return response.status, json.loads(response.body)


def test_it_lives_while_starting_and_is_eligible_once_all_families_are_synced(
    health: ProxyHealth, clock: Clock
) -> None:
    clock.now = 10_000  # of an API server that does not answer
    status, body = ask(health, "/healthz")
    assert (status, body["nodeEligible"], body["healthy"]) == (503, False, True)
    assert body["lastUpdated"] == "0001-01-01T00:00:00Z"
    status, body = ask(health, "/livez")
    assert (status, "nodeEligible" in body) == (200, False)
    health.queued("IPv4")
    health.queued("IPv6")
    health.updated("IPv4")
    assert ask(health, "/healthz")[0] == 503
    health.updated("IPv6")
    assert ask(health, "/healthz")[0] == 200


# Steps of (seconds since the start, event, late families after the event); the limit is 2 x 30 s.
@pytest.mark.parametrize(
    "steps",
    [
        [(0, "queued IPv4", ""), (59, "", ""), (60, "", "IPv4"), (61, "updated IPv4", "")],
        [(0, "queued IPv4", ""), (50, "queued IPv4", ""), (60, "", "IPv4")],
        [(0, "updated IPv4", ""), (500, "", ""), (500, "queued IPv4", ""), (559, "", ""), (560, "", "IPv4")],
        [(0, "queued IPv4", ""), (0, "queued IPv6", ""), (30, "updated IPv4", ""), (60, "queued IPv4", "IPv6")],
        [(0, "queued IPv6", ""), (59, "updated IPv6", ""), (59, "queued IPv6", ""), (118, "", "")],
    ],
)
def test_it_is_unhealthy_while_the_oldest_change_waits_too_long(
    health: ProxyHealth, clock: Clock, steps: list[tuple[float, str, str]]
) -> None:
    for moment, action, late in steps:
        clock.now = moment
        if action:
            name, family = action.split()
            getattr(health, name)(family)
        assert health.healthy() == (not late)
        for path in ("/healthz", "/livez"):
            status, body = ask(health, path)
            eligible = path == "/livez" or health.unready() == {}
            assert status == (503 if late or not eligible else 200)
            assert body["healthy"] == (not late)
            assert {f for f, s in body.get("status", {}).items() if not s["healthy"]} == set(late.split())


def test_the_body_tells_when_each_family_was_updated(health: ProxyHealth, clock: Clock) -> None:
    clock.now = 1
    health.updated("IPv6")
    clock.now = 3
    health.queued("IPv4")
    clock.now = 100
    status, body = ask(health, "/livez")
    assert status == 503
    assert body == {
        "lastUpdated": "2026-11-21T05:14:08.500000Z",
        "currentTime": "2026-11-21T05:15:47.500000Z",
        "healthy": False,
        "status": {
            "IPv4": {"lastUpdated": "0001-01-01T00:00:00Z", "healthy": False},
            "IPv6": {"lastUpdated": "2026-11-21T05:14:08.500000Z", "healthy": True},
        },
    }


def test_an_ineligible_node_fails_healthz_only_and_each_answer_is_counted(
    health: ProxyHealth, metrics: ProxyMetrics
) -> None:
    health.updated("IPv4")
    health.node_eligible = False
    status, body = ask(health, "/healthz")
    assert (status, body["nodeEligible"], body["healthy"]) == (503, False, True)
    assert ask(health, "/livez")[0] == 200
    health.node_eligible = True
    assert ask(health, "/healthz")[0] == 200
    text = metrics.render().decode()
    assert 'kubeproxy_proxy_healthz_total{code="503"} 1\n' in text
    assert 'kubeproxy_proxy_healthz_total{code="200"} 1\n' in text
    assert 'kubeproxy_proxy_livez_total{code="200"} 1\n' in text


TAINT = Taint("ToBeDeletedByClusterAutoscaler")


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, False),
        (Node(ObjectMeta("a")), True),
        (Node(ObjectMeta("a"), NodeSpec(taints=[Taint("other")])), True),
        (Node(ObjectMeta("a"), NodeSpec(taints=[Taint("other"), TAINT])), False),
        (Node(ObjectMeta("a", deletion_timestamp="2026-11-21T00:00:00Z")), False),
    ],
)
def test_a_node_is_eligible_unless_it_goes_away(node: Node | None, expected: bool) -> None:
    assert eligible(node) is expected


def test_it_is_ready_once_synced_and_while_every_check_holds(health: ProxyHealth) -> None:
    first = "not yet synced for the first time"
    assert ask(health, "/readyz") == (503, {"ready": False, "reasons": {"sync": first}})
    health.queued("IPv4")
    health.queued("IPv6")
    health.updated("IPv4")
    assert ask(health, "/readyz") == (503, {"ready": False, "reasons": {"sync": f"{first}: IPv6"}})
    health.updated("IPv6")
    assert ask(health, "/readyz") == (200, {"ready": True, "reasons": {}})
    reason: str | None = "services not heard of for 400 s"
    health.ready_when("api", lambda: reason)
    assert ask(health, "/readyz") == (503, {"ready": False, "reasons": {"api": reason}})
    reason = None
    assert health.unready() == {}
