"""`kube-proxy conntrack` with a running proxy: enough room, the Services with the most entries, and a full table.

The limit is the machine's, but each network namespace has its own entries: the node's are filled over netlink.
"""

from __future__ import annotations

import json

import pytest

from lab.netns import run_in
from support.live import Live
from support.modes import modes
from support.tracked_flows import LEAKING, fill, flush, limit

pytestmark = modes("nftables", "iptables-nft", "userspace", "ipvs")


async def test_room_enough(live: Live) -> None:
    live.service("counted", "a1")
    front = live.front("counted")
    await live.expect(front, {"pod": "a1"}, "tcp")
    status, text = await live.ask("conntrack")
    assert status == 0, text
    assert "ok nothing was refused" in text
    # Probes end by reset: IPVS removes the entries of such connections after 10 s, and commands are slow in a guest.
    await live.cluster.probes("pod", "tcp", *front, 5, 3.0, None)
    status, text = await live.ask("conntrack", "--seconds", "0.2", "-o", "json")
    services = {one["name"]: one["entries"] for one in json.loads(text)["services"]}
    assert services["default/counted"] >= 5


@pytest.mark.slow("a table of connections that is full")
async def test_a_full_table_is_named_with_the_client_that_fills_it(live: Live) -> None:
    namespace = live.cluster.namespace_of("node")
    run_in(namespace, flush)  # entries of earlier connections would leave room when they expire
    most = run_in(namespace, limit)
    assert run_in(namespace, lambda: fill(most + 10)) >= most
    try:
        await live.cluster.probe("pod", "tcp", "203.0.113.78", 80, 0.3, None)  # has no room
        status, text = await live.ask("conntrack")
    finally:
        run_in(namespace, flush)
    assert status == 1, text
    assert "it is full" in text
    assert f"Fix: {LEAKING} has " in text
    assert "Fix: most entries are UDP" in text
    assert "conntrack.maxPerCore" in text
