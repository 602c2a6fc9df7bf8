"""`kube-proxy flows` with a running proxy: endpoints, clients, unanswered connections, and beginnings and ends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.netns import run_in
from support.live import Front, Live
from support.modes import modes

pytestmark = modes("nftables", "iptables-nft", "userspace", "ipvs")

GATEWAY = "10.244.0.1"
"""The node's addresses, as its pods see them."""


@contextmanager
def connected(live: Live, place: str, front: Front, count: int) -> Iterator[list[socket.socket]]:
    """Keep connections from a place open."""
    namespace = live.cluster.namespace_of(place)
    opened = [run_in(namespace, lambda: socket.create_connection(front, timeout=5.0)) for _ in range(count)]
    try:
        yield opened
    finally:
        for sock in opened:
            sock.close()


def only(text: str, service: str = "") -> list[dict]:
    """Return the TCP port of each family of a Service that has any connections."""
    return [one for one in json.loads(text)["ports"] if one["port"] == "tcp/TCP" and one["family"] == "IPv4"]


async def test_connections_by_endpoint_and_client(live: Live) -> None:
    live.service("used", "a1 b1")
    front = live.front("used")
    await live.programmed(front, "a1 b1")  # earlier packets of a client are tracked without an endpoint
    await live.expect(front, {"pod": "a1 b1"})
    with connected(live, "pod", front, 12), connected(live, "outside", front, 2):
        status, text = await live.ask("flows", "used", "-o", "json")
    assert status == 0, text
    (port,) = only(text)
    assert port["connections"] == 14
    by_endpoint = {one["address"]: one for one in port["endpoints"]}
    wanted = {f"{live.ips[pod]['IPv4']}:3000" for pod in ("a1", "b1")}
    assert wanted == by_endpoint.keys()
    assert sum(one["connections"] for one in by_endpoint.values()) == 14
    assert abs(sum(one["share"] for one in by_endpoint.values()) - 1) < 1e-6
    first, second = port["clients"][:2]
    assert (first["address"], first["connections"]) == (live.ips["pod"]["IPv4"], 12)
    assert (second["address"], second["connections"]) == (live.ips["outside"]["IPv4"], 2)


async def test_clients_of_short_connections_are_seen_with_shares(live: Live) -> None:
    live.service("short", "a1 b1")
    front = live.front("short")
    await live.programmed(front, "a1 b1")
    await live.expect(front, {"pod": "a1 b1"})
    for _ in range(30):
        with connected(live, "pod", front, 1):
            pass
    status, text = await live.ask("flows", "short")
    assert status == 0, text
    client = next(line for line in text.splitlines() if f"tcp/TCP  {live.ips['pod']['IPv4']} " in line)
    assert int(client.split()[-1]) >= 30
    _, text = await live.ask("flows", "short", "-o", "json")
    (port,) = only(text)
    # In userspace mode the counts include connections of earlier tests to the same pods (docs/seeing.md).
    counts = [one["connections"] + one["closing"] for one in port["endpoints"]]
    assert (len(counts), min(counts) >= 3, sum(counts) >= 30) == (2, True, True), text
    assert [one["share"] for one in port["endpoints"]] == pytest.approx([count / sum(counts) for count in counts])
    _, text = await live.ask("flows")
    assert any("default/short" in line and live.ips["pod"]["IPv4"] in line for line in text.splitlines()), text


async def test_the_client_with_many_connections_is_named(live: Live) -> None:
    live.service("leaked", "a1")
    front = live.front("leaked")
    await live.expect(front, {"pod": "a1"})
    with connected(live, "pod", front, 60):
        _, text = await live.ask("flows")
    (line,) = [line for line in text.splitlines() if "default/leaked" in line]
    total = int(line.split()[1])  # with the UDP flows of `expect`, to the other port of the Service
    assert total >= 60
    assert f"{live.ips['pod']['IPv4']} ({total})" in line
    assert "s of CPU time" in text


async def test_nodeports_are_their_services(live: Live) -> None:
    live.service("ported", "a1", type="NodePort")
    front = live.front("ported", "nodeport")
    await live.expect(front, {"outside": "a1"})
    with connected(live, "outside", front, 3):
        _, text = await live.ask("flows", "default/ported", "-o", "json")
    assert only(text)[0]["connections"] == 3


async def test_an_endpoint_that_does_not_answer_is_seen(live: Live) -> None:
    live.service("silent", "a1 a2")
    front = live.front("silent")
    await live.expect(front, {"pod": "a1 a2"})
    clients = (live.ips["pod"]["IPv4"], GATEWAY)  # in userspace mode the proxy connects
    for address in clients:
        await live.run("ip", "route", "add", "blackhole", f"{address}/32", place="a2")
    try:
        status, text = await asking(live, front, "flows", "silent", "-o", "json", at_once=8)
    finally:
        for address in clients:
            await live.run("ip", "route", "del", "blackhole", f"{address}/32", place="a2")
    assert status == 1, text
    (port,) = only(text)
    unanswered = {one["address"]: one["unanswered"] for one in port["endpoints"]}
    assert unanswered[f"{live.ips['a1']['IPv4']}:3000"] == 0
    assert unanswered[f"{live.ips['a2']['IPv4']}:3000"] > 0


async def asking(live: Live, front: Front, *words: str, at_once: int = 2) -> tuple[int, str]:
    """Run a command while a pod opens connections continuously."""

    async def connect() -> None:
        while not asked.done():
            await live.cluster.probe("pod", "tcp", *front, 3.0, None)
            await asyncio.sleep(0.02)

    asked = asyncio.ensure_future(live.ask(*words))
    await asyncio.gather(asked, *(connect() for _ in range(at_once)))
    return asked.result()


async def test_new_ones_are_counted(live: Live) -> None:
    live.service("busy", "a1")
    front = live.front("busy")
    await live.expect(front, {"pod": "a1"})
    _, text = await asking(live, front, "flows", "busy", "-o", "json")
    (port,) = only(text)
    assert port["newPerSecond"] > 0
    assert sum(one["newPerSecond"] for one in port["endpoints"]) > 0
    assert json.loads(text)["look"]["new"] > 0


async def test_following_names_service_and_pods(live: Live) -> None:
    live.service("followed", "a1")
    front = live.front("followed")
    await live.expect(front, {"pod": "a1"})
    name_pod(live, "followed", "a1")
    status, text = await asking(live, front, "flows", "followed", "-f", "--seconds", "2")
    assert status == 0, text
    lines = [line for line in text.splitlines() if " default/followed:tcp/TCP " in line]
    begins = [line for line in lines if " begin " in line]
    assert begins, text
    assert all(f"{live.ips['pod']['IPv4']}:" in line and f"-> {front.address}:80 =>" in line for line in begins)
    if live.mode.name != "userspace":
        assert all(f"=> default/a1 ({live.ips['a1']['IPv4']}:3000)" in line for line in begins)
    assert "beginnings and ends" in text


def name_pod(live: Live, service: str, pod: str) -> None:
    """Add the names of pods to the endpoints in a Service's slices."""
    for record in live.cluster.store.records("endpointslices", "default"):
        piece = record.decode()
        if piece["metadata"]["labels"].get("kubernetes.io/service-name") == service:
            for endpoint in piece["endpoints"]:
                endpoint["targetRef"] = {"kind": "Pod", "namespace": "default", "name": pod}
            live.cluster.store.put("endpointslices", piece)


async def test_a_kernel_without_announcements_is_reported(live: Live) -> None:
    live.service("hushed", "a1")
    front = live.front("hushed")
    await live.programmed(front, "a1")
    events = "net.netfilter.nf_conntrack_events"
    await live.run("sysctl", "-w", f"{events}=0")
    try:
        status, text = await live.ask("flows", "hushed")
        assert (status, f"new connections are not counted: the kernel announces no connections ({events})" in text) == (
            0,
            True,
        )
        status, text = await live.ask("flows", "hushed", "-f", "--seconds", "1")
        assert (status, f"sysctl -w {events}=2" in text) == (2, True), text
    finally:
        await live.run("sysctl", "-w", f"{events}=2")


async def test_an_unknown_service(live: Live) -> None:
    status, text = await live.ask("flows", "nothing")
    assert (status, text.startswith("Error: no Service default/nothing that is watched: there is none")) == (2, True)
