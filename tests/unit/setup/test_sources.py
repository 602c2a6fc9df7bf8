"""The rate limit of requests."""

from __future__ import annotations

import asyncio

import pytest

from kubeproxy.config.options import Options
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import SourceError
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.setup import sources
from kubeproxy.setup.sources import rate_limit


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
def test_requests_wait_for_their_turn(qps, burst, waits):
    now, found = 100.0, []
    take_turn = rate_limit(qps, burst, lambda: now)
    for _ in waits:
        found.append(take_turn())
        now += found[-1]
    assert found == pytest.approx(waits)


def test_a_pause_gives_the_burst_back():
    times = iter([0.0, 0.0, 0.0, 1000.0, 1000.0, 1000.0])
    take_turn = rate_limit(1.0, 2, lambda: next(times))
    assert [take_turn() for _ in range(5)] == [0, 0, 0, 0, 1]
