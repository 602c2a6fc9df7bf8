"""A thousand UDP clients with constant ports while endpoints change: none is lost, in any mode.

Upstream's end-to-end tests "should be able to preserve UDP traffic when server pod cycles" (ClusterIP, NodePort,
hostNetwork client, initially unready endpoint) have one client each; a fault needs a packet exactly between two changes
of the kernel.
"""

from __future__ import annotations

import pytest

from support.crowd import Crowd
from support.live import Live
from support.modes import GUEST, MODES, modes

CLIENTS = 40 if GUEST else 400
"""Clients of each place: about 1,600 requests per second from each place."""
ROUNDS = 6


@pytest.mark.slow("many changes under traffic")
@modes(*MODES)
async def test_no_client_is_lost_when_the_only_endpoint_cycles(bare: Live) -> None:
    bare.service("web", "a1", type="NodePort")
    bare.service("local", "a1", type="NodePort", externalTrafficPolicy="Local", internalTrafficPolicy="Local")
    await bare.start()
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


@pytest.mark.slow("clients without end in two modes")
@pytest.mark.parametrize("names", [("nftables", "iptables-legacy"), ("iptables-nft", "userspace")], ids="-".join)
async def test_no_client_is_lost_when_the_mode_changes(bare: Live, names: tuple[str, str]) -> None:
    pair = [MODES[name] for name in names]
    bare.service("web", "a1", type="NodePort")
    bare.service("idle", "")
    for mode in pair:
        await bare.choose_variant(mode.variant)
    await bare.start(pair[0].config)
    fronts = [bare.front("web", port=1), bare.front("web", "nodeport", port=1), bare.front("idle", port=1)]
    ways = [("node", fronts[0]), ("outside", fronts[1]), ("pod", fronts[2])]
    with Crowd(bare, ways, CLIENTS) as crowd:
        pods = ["a1", "b1", "a2", "b2"]
        for turn, pod in enumerate(pods):
            await bare.proxy.stop()
            bare.endpoints("web", pod)
            bare.endpoints("idle", pod if turn % 2 else "")
            await bare.start(pair[(turn + 1) % 2].config)
            await crowd.all_notice(pod, among=fronts[: 3 if turn % 2 else 2])


@modes("nftables", "iptables-nft", "iptables-legacy")
async def test_no_client_is_lost_when_another_program_flushes_the_rules(bare: Live) -> None:
    bare.service("web", "a1", type="NodePort")
    await bare.start()
    command = ["nft", "delete", "table", "ip", "kube-proxy"]
    if bare.mode.variant:
        command = [f"iptables-{bare.mode.variant}", "-t", "nat", "-F"]
    ways = [("node", bare.front("web", port=1)), ("outside", bare.front("web", "nodeport", port=1))]
    with Crowd(bare, ways, CLIENTS) as crowd:
        await crowd.all_notice("a1")
        for pod in ("b1", "a1"):
            await bare.run(*command)
            bare.endpoints("web", pod)
            await crowd.all_notice(pod)
