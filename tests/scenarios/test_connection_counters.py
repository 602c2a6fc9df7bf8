"""--connection-counters: metrics show the number of each Service's connections, also after a restart of the proxy."""

from __future__ import annotations

import re

import pytest

from support.live import METRICS_PORT, Live
from support.modes import modes
from support.promtool import lint

COUNTED = ["--connection-counters"]
SERIES = re.compile(r"^kubeproxy_service_new_connections_total\{(.*)\} (\d+)$", re.MULTILINE)


async def connections(live: Live) -> dict[str, int]:
    """Return the metric's values by its labels."""
    _, text = await live.page("/metrics", METRICS_PORT)
    return {labels: int(value) for labels, value in SERIES.findall(text)}


@modes("nftables")
async def test_connections_are_counted_by_service_port_and_family(bare: Live) -> None:
    bare.service("web", "a1 b1", type="NodePort", ipFamilyPolicy="RequireDualStack")
    bare.service("quiet", "a1")
    await bare.start(args=COUNTED)
    for family, count in (("IPv4", 7), ("IPv6", 4)):
        front = bare.front("web", "cluster", family)
        await bare.programmed(front, "a1 b1")
        await bare.cluster.probes("outside", "tcp", *front, count)
    await bare.cluster.probes("outside", "tcp", *bare.front("web", "nodeport"), 3)
    assert "quiet" not in str(await connections(bare))
    await bare.proxy.kill()
    await bare.start(args=COUNTED)
    web = 'ip_family="{}",namespace="default",port="tcp",protocol="TCP",service="web"'

    async def counted() -> str:
        found = await connections(bare)
        # The wait for the endpoints has tested them too.
        right = found.get(web.format("IPv4"), 0) >= 10 and found.get(web.format("IPv6"), 0) >= 4
        return "" if right and "quiet" not in str(found) else str(found)

    await bare.eventually(counted)
    assert not bare.logged("Replacing the table")
    _, text = await bare.page("/metrics", METRICS_PORT)
    assert not [line for line in lint(text) if "new_connections" in line]
    status, text = await bare.ask("verify")
    assert status == 0, text


@pytest.mark.slow("a cluster of its own")
@modes("nftables")
async def test_without_the_flag_nothing_is_counted(bare: Live) -> None:
    bare.service("web", "a1")
    await bare.start()
    await bare.programmed(bare.front("web"), "a1")
    _, text = await bare.page("/metrics", METRICS_PORT)
    assert "new_connections" not in text
    assert "counter" not in await bare.nft("list", "map", "ip", "kube-proxy", "endpoints")
    await bare.proxy.kill()
    await bare.start(args=COUNTED)
    assert "counter" in await bare.nft("list", "map", "ip", "kube-proxy", "endpoints")
    await bare.programmed(bare.front("web"), "a1")
