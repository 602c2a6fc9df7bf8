"""A thousand UDP clients that keep their ports while endpoints come and go: none is lost, in any mode.

Upstream's end-to-end tests "should be able to preserve UDP traffic when server pod cycles" (ClusterIP, NodePort,
hostNetwork client, initially unready endpoint) have one client each; what goes wrong takes a packet in the very moment
between two changes of the kernel.
"""

from __future__ import annotations

import pytest
from test_modes import choose

from support.crowd import Crowd
from support.live import Live

CLIENTS = 400
"""Of each place: some 1,600 questions a second from each."""
ROUNDS = 6
MODES = {
    "nftables": {"mode": "nftables"},
    "iptables-nft": {"mode": "iptables", "iptables": {"minSyncPeriod": "1ms"}},
    "iptables-legacy": {"mode": "iptables", "iptables": {"minSyncPeriod": "1ms"}},
    "userspace": {"mode": "userspace", "udpIdleTimeout": "10s", "iptables": {"minSyncPeriod": "1ms"}},
}


async def started(live: Live, mode: str) -> None:
    if mode.startswith("iptables-"):
        await choose(live, mode.removeprefix("iptables-"))
    await live.start(MODES[mode])


@pytest.mark.parametrize("mode", MODES)
async def test_no_client_is_lost_when_the_only_endpoint_cycles(bare: Live, mode: str) -> None:
    bare.service("web", "a1", type="NodePort")
    bare.service("local", "a1", type="NodePort", externalTrafficPolicy="Local", internalTrafficPolicy="Local")
    await started(bare, mode)
    cluster, nodeport = bare.front("web", port=1), bare.front("web", "nodeport", port=1)
    ways = [
        ("node", cluster),
        ("pod", cluster),
        ("outside", nodeport),
        ("outside", bare.front("local", "nodeport", port=1)),
    ]
    with Crowd(bare, ways, CLIENTS) as crowd:
        await crowd.all_notice("a1")
        for turn in range(ROUNDS):
            bare.endpoints("web", "")
            bare.endpoints("local", "b1" if turn % 2 else "")
            await crowd.nobody_is_answered()
            bare.endpoints("web", "a1")
            bare.endpoints("local", "a1")
            await crowd.all_notice("a1")
