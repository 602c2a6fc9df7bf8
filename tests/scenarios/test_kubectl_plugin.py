"""`kubectl kubeproxy` over three nodes with real proxies, one of which is cut off from the API server."""

from __future__ import annotations

import json

from lab import objects
from support.answers import valid
from support.live import Live
from support.three_nodes import ThreeNodes


async def test_the_node_that_differs_is_named(bare: Live) -> None:
    bare.service("web", "a1 b1")
    nodes = ThreeNodes(bare)
    await nodes.up()

    text = await nodes.until(0, "3 of 3 nodes answered", "services", "svc/web")
    assert "default/web: programmed" in text
    assert text.count(f"endpoint {bare.ips['b1']['IPv4']}:3000") == 2  # by TCP and by UDP
    status, text = await nodes.ask("why", "pod/a1", "svc/web:tcp")
    assert status == 0, text
    assert "asked on node-a, pod kube-system/kube-proxy-py-node-a (0." in text
    assert f"{bare.ips['a1']['IPv4']} (default/a1) -> " in text
    assert "kube-proxy forwards it" in text

    bare.service("near", "b1", internalTrafficPolicy="Local")
    await nodes.until(0, "ok default/near: programmed, 1 endpoint: ", "services")

    _, text = await nodes.ask("doctor")
    assert "3 of 3 nodes answered, 3 in nftables mode" in text

    # No change reaches node-c: it drops packets of the API server.
    await nodes.drop("node-c", "input", f"tcp sport {objects.API_PORT}")
    bare.endpoints("web", "a1 b1 b2")
    lacking = f"1 of 3 nodes lacks endpoint {bare.ips['b2']['IPv4']}:3000 (tcp TCP IPv4): node-c"
    text = await nodes.until(1, lacking, "services", "default/web")
    assert "1 of 3 nodes alone: slice web-ipv4 in version" in text
    status, text = await nodes.ask("services", "default/web", "--node", "node-a", "--node", "node-b")
    assert (status, "2 of 2 nodes answered" in text) == (0, True), text
    status, text = await nodes.ask("verify", "default/web", "-o", "json")
    whole = valid("cluster", text)
    for row in whole["nodes"]:
        valid("verify", json.dumps(row["answer"]))
    assert [row["node"] for row in whole["nodes"] if row["status"]] == ["node-c"]

    await nodes.proxies["node-b"].kill()
    status, text = await nodes.ask("services")
    assert status != 0
    assert "no answer of node-b: no kube-proxy answers at " in text
