"""`kube-proxy conntrack` beside a running proxy: room enough, who fills it, and a table that is full.

The limit is the machine's, but each network namespace has its own entries: the node's are filled over netlink.
"""

from __future__ import annotations

import json
from itertools import islice, product

from kubeproxy.kernel.netlink import NETLINK_NETFILTER, NLM_F_CREATE, Netlink, attribute, nested
from kubeproxy.kernel.tracking_counts import level
from kubeproxy.model.addresses import pack
from lab.netns import run_in
from support.live import Live
from support.modes import modes

pytestmark = modes("nftables", "iptables-nft", "userspace", "ipvs")

LEAKING = "10.244.0.2"
_NEW = 1 << 8


def one_tuple(kind: int, source: bytes, destination: bytes, ports: tuple[int, int]) -> bytes:
    numbers = (attribute(2, ports[0].to_bytes(2, "big")), attribute(3, ports[1].to_bytes(2, "big")))
    addresses = nested(1, attribute(1, source), attribute(2, destination))
    return nested(kind, addresses, nested(2, attribute(1, b"\x11"), *numbers))


def fill(count: int) -> int:
    """Make so many answered UDP flows of one client in the thread's network namespace; return the entries then."""
    client, server = pack(LEAKING) or b"", pack("203.0.113.77") or b""
    rest = attribute(7, (60).to_bytes(4, "big")) + attribute(3, (14).to_bytes(4, "big"))  # timeout; answered, assured
    pairs = islice(product(range(1024, 65000), range(1, 100)), count)
    payloads = (
        b"\2\0\0\0" + one_tuple(1, client, server, (a, b)) + one_tuple(2, server, client, (b, a)) + rest
        for a, b in pairs
    )
    with Netlink.open(NETLINK_NETFILTER) as link:
        while chunk := list(islice(payloads, 50_000)):
            link.requests(_NEW, chunk, "entries", NLM_F_CREATE)
        return level(link).entries


async def test_room_enough(live: Live) -> None:
    live.service("counted", "a1")
    front = live.front("counted")
    await live.expect(front, {"pod": "a1"}, "tcp")
    await live.cluster.probes("pod", "tcp", *front, 5, 3.0, None)
    status, text = await live.ask("conntrack")
    assert status == 0, text
    assert "ok nothing was refused" in text
    status, text = await live.ask("conntrack", "-o", "json")
    services = {one["name"]: one["entries"] for one in json.loads(text)["services"]}
    assert services["default/counted"] >= 5


async def test_a_full_table_is_named_with_the_client_that_fills_it(live: Live) -> None:
    namespace = live.cluster.namespace_of("node")
    limit = run_in(namespace, _limit)
    assert run_in(namespace, lambda: fill(limit + 10)) >= limit
    try:
        await live.cluster.probe("pod", "tcp", "203.0.113.78", 80, 0.3, None)  # has no room
        status, text = await live.ask("conntrack")
    finally:
        run_in(namespace, _flush)
    assert status == 1, text
    assert "it is full" in text
    assert f"Fix: {LEAKING} has " in text
    assert "Fix: most are UDP" in text
    assert "conntrack.maxPerCore" in text


def _limit() -> int:
    with Netlink.open(NETLINK_NETFILTER) as link:
        return level(link).limit


def _flush() -> None:
    with Netlink.open(NETLINK_NETFILTER) as link:
        link.requests(_NEW | 2, [b"\2\0\0\0"], "a flush")
