"""The rate limit of requests."""

from __future__ import annotations

import asyncio

import pytest

from kubeproxy.config.options import Options
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import SourceError
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.setup import sources
from kubeproxy.setup.sources import RateLimit


def test_no_answer_waits_for_nodes_from_an_unreachable_server():
    async def main():
        options = Options(config=KubeProxyConfiguration(), master="http://127.0.0.1:1")
        source = sources.open_sources(options, "node-a", lambda events: None, ProxyMetrics())
        try:
            with pytest.raises(SourceError):
                await source.nodes()
            source._client.contact.failed("refused")
            return await source.nodes()
        finally:
            await source.close()

    assert asyncio.run(main()) == {}


@pytest.mark.parametrize(
    ("qps", "burst", "waits"),
    [
        (10.0, 3, [0, 0, 0, 0.1, 0.1, 0.1]),
        (0.0, 0, [0] * 10 + [0.2, 0.2]),
        (-1.0, 1, [0] * 50),
    ],
)
def test_requests_wait_for_their_turn(qps, burst, waits, monkeypatch):
    now = 100.0

    async def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(sources.asyncio, "sleep", sleep)

    async def play():
        limit = RateLimit(qps, burst, lambda: now)
        return [await limit.turn() for _ in waits]

    assert asyncio.run(play()) == pytest.approx(waits)


def test_a_pause_gives_the_burst_back(monkeypatch):
    times = iter([0.0, 0.0, 0.0, 1000.0, 1000.0, 1000.0])
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(sources.asyncio, "sleep", sleep)

    async def play():
        limit = RateLimit(1.0, 2, lambda: next(times))
        return [await limit.turn() for _ in range(5)]

    assert asyncio.run(play()) == [0, 0, 0, 0, 1]
    assert slept == [1]
