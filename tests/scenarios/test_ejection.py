"""Ejection: an endpoint that does not answer this node gets no new connections until it answers again."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from kubeproxy.model.addresses import host_port
from lab.netns import run_in_async
from lab.probes import Answer
from support.live import METRICS_PORT, Front, Live
from support.modes import modes
from support.traffic import DUAL

FLAG = "--eject-failing-endpoints"
VANISHED = ("tcp dport 3000 drop", "udp dport 3000 drop")
REFUSED = ("tcp dport 3000 reject with tcp reset", "udp dport 3000 reject")
RULES = "add table inet fail; add chain inet fail input { type filter hook input priority 0 ; };"
SILENCE = 3.0
"""Seconds after which an endpoint counts as not ejected: three clients' SYNs, and an attempt of the proxy."""


async def fail(live: Live, pod: str, *rules: str) -> None:
    """Make a pod drop or refuse packets, by rules in its namespace."""
    text = RULES + ";".join(f"add rule inet fail input {rule}" for rule in rules)
    await live.run("nft", text, place=pod)


async def heal(live: Live, pod: str) -> None:
    """Remove the rules of `fail`."""
    await live.run("nft", "delete table inet fail", place=pod)


def serve(live: Live, name: str, pods: str, **spec: Any) -> None:
    """Create a Service that requests ejection."""
    live.service(name, pods, **spec)
    live.cluster.patch("services", name, {"metadata": {"annotations": {"kube-proxy-py/eject": "on"}}})


async def knock(live: Live, front: Front, count: int, place: str = "pod") -> tuple[set[str], float]:
    """Open this number of connections at once; return the answering pods or failures, and the longest delay."""
    probes = [live.cluster.probe(place, "tcp", *front, 10.0) for _ in range(count)]
    answers = await asyncio.gather(*probes)
    names = {answer.pod if isinstance(answer, Answer) else str(answer) for answer in answers}
    return names, max([answer.seconds for answer in answers if isinstance(answer, Answer)], default=0.0)


async def ejected(live: Live, front: Front, left: str) -> None:
    """Connect until only these endpoints answer."""
    wanted = {f"{pod}:3000" for pod in left.split()}

    async def check() -> str:
        await asyncio.gather(*(live.cluster.probe("pod", "tcp", *front, 2.0) for _ in range(12)))
        there = await live.destinations(front)
        return "" if there == wanted else f"{wanted} expected, found {there}"

    await live.eventually(check)


def said(live: Live, name: str, reason: str) -> list[str]:
    """Return the notes of a Service's events with a reason."""
    return [text for text in live.events(name) if text.startswith(reason)]


@modes("nftables")
async def test_an_endpoint_that_fails_is_ejected_and_returns(bare: Live) -> None:
    serve(bare, "web", "a1 a2 b1", **DUAL)
    await bare.start()
    status, text = await bare.ask("plan", "--from-kernel")
    assert (status, text.count("proved for all packets")) == (0, 2), text
    for family in ("IPv4", "IPv6"):
        await vanishes(bare, family)
    await refuses(bare)
    await affinity(bare)
    await half(bare)
    await restart(bare)
    await endpoint_leaves(bare)


async def vanishes(live: Live, family: str) -> None:
    """No connection fails: a client repeats its SYN, and the repetition reaches another endpoint."""
    front, where = live.front("web", "cluster", family), live.ips["b1"][family]
    await live.programmed(front, "a1 a2 b1")
    await fail(live, "b1", *VANISHED)
    names, seconds = await knock(live, front, 20)
    assert names == {"a1", "a2"}
    assert 0.9 < seconds < 8, "a SYN is repeated after 1, 2 or 3 s, or after 1, 3 or 7 s"
    await live.programmed(front, "a1 a2")
    names, seconds = await knock(live, front, 20)
    assert (names, seconds < 0.9) == ({"a1", "a2"}, True)
    await answers(live, front, where)
    await heal(live, "b1")
    await live.programmed(front, "a1 a2 b1")
    await live.until(lambda: any(where in text for text in said(live, "web", "EndpointReturned")), "an event")


async def answers(live: Live, front: Front, where: str) -> None:
    """Commands, events and metrics name the endpoint, and `verify` finds nothing wrong."""
    status, text = await live.ask("verify")
    assert status == 0, text
    family = "IPv4" if "." in where else "IPv6"
    _, text = await live.ask("why", live.ips["pod"][family], host_port(*front))
    assert "ejected on this node: no answer within 0.3 s, since 20" in text, text
    assert "(metadata.annotations[kube-proxy-py/eject])" in text, "the annotation is the Service's, not the slice's"
    _, text = await live.ask("services", "default/web")
    assert f"{where}" in text.partition("ejected")[2], text
    _, text = await live.ask("services")
    assert ", 1 ejected" in text, text
    _, text = await live.ask("changes")
    assert "endpoints ejected +1" in text, text
    assert await live.metric(f'kubeproxy_ejected_endpoints{{ip_family="{family}"}}') == 1
    assert await live.metric(f'kubeproxy_endpoint_ejections_total{{ip_family="{family}"}}') == 1
    await live.until(lambda: any(where in text for text in said(live, "web", "EndpointEjected")), "an event")


async def refuses(live: Live) -> None:
    """A refused client gets the refusal; clients of the next second, also UDP clients, reach another endpoint."""
    front = live.front("web")
    await fail(live, "a2", *REFUSED)
    began = time.monotonic()
    while "a2:3000" in await live.destinations(front):
        await live.cluster.probe("pod", "tcp", *front, 0.5)
    assert time.monotonic() - began < 3
    names, _ = await knock(live, front, 20)
    assert names == {"a1", "b1"}
    udp = live.front("web", port=1)
    while "a2:3000" in await live.destinations(udp, "udp"):
        await live.cluster.probe("pod", "udp", *udp, 0.2)
    await heal(live, "a2")
    await live.programmed(front, "a1 a2 b1")


async def affinity(live: Live) -> None:
    """A client that session affinity sends to an ejected endpoint moves to another one."""
    serve(live, "sticky", "a1 b1", sessionAffinity="ClientIP")
    front = live.front("sticky")
    await live.programmed(front, "a1 b1")
    (first,), _ = await knock(live, front, 4)
    await fail(live, first, *VANISHED)
    (second,), _ = await knock(live, front, 4)
    assert second != first
    await heal(live, first)


async def half(live: Live) -> None:
    """If more than half of the endpoints fail, none is ejected, and an event reports this."""
    serve(live, "most", "a3 a4 b2")
    front = live.front("most")
    await live.programmed(front, "a3 a4 b2")
    await fail(live, "a3", *VANISHED)
    await ejected(live, front, "a4 b2")
    await fail(live, "a4", *VANISHED)
    names, _ = await knock(live, front, 12)
    assert "b2" in names
    await live.programmed(front, "a3 a4 b2")
    await live.until(lambda: any("2 of 3 endpoints" in text for text in live.events("most")), "an event")
    await heal(live, "a3")
    await live.programmed(front, "a3 b2")
    await heal(live, "a4")
    await live.programmed(front, "a3 a4 b2")


async def restart(live: Live) -> None:
    """A restart forgets ejections, and adopts the table without replacing it."""
    front = live.front("most")
    await fail(live, "b2", *VANISHED)
    await ejected(live, front, "a3 a4")
    await live.proxy.kill()
    await live.start()
    assert not live.logged("Replacing the table")
    await live.programmed(front, "a3 a4 b2")
    await ejected(live, front, "a3 a4")


async def endpoint_leaves(live: Live) -> None:
    """The API takes precedence over ejection; without annotations a restart removes the rules."""
    live.endpoints("most", "a3 a4")

    async def gone() -> str:
        count = await live.metric('kubeproxy_ejected_endpoints{ip_family="IPv4"}')
        return f"{count} endpoints are ejected" if count else ""

    await live.eventually(gone)
    assert not [text for text in said(live, "most", "EndpointReturned") if live.ips["b2"]["IPv4"] in text]
    for name in ("web", "sticky", "most"):
        live.delete(name)
    await live.proxy.kill()
    await live.start()
    assert "failing" not in await live.nft("list", "table", "ip", "kube-proxy")


@modes("nftables")
async def test_healthy_endpoints_stay(bare: Live) -> None:
    """Clients that a policy drops, a flood, and a slow endpoint eject none. The flag applies to all Services."""
    bare.service("web", "a1 b1")
    bare.service("out", "a1 b1")
    bare.cluster.patch("services", "out", {"metadata": {"annotations": {"kube-proxy-py/eject": "off"}}})
    await bare.start(args=[FLAG])
    front = bare.front("web")
    await bare.programmed(front, "a1 b1")
    await flood(bare, front)
    await slow(bare, front)
    await fail(bare, "b1", f"ip saddr {bare.ips['pod']['IPv4']} tcp dport 3000 drop")
    ends = time.monotonic() + SILENCE
    while time.monotonic() < ends:
        await asyncio.gather(*(bare.cluster.probe("pod", "tcp", *front, 2.0) for _ in range(6)))
        assert await bare.destinations(front) == {"a1:3000", "b1:3000"}
    assert f"{bare.ips['b1']['IPv4']} . tcp . 3000" in await bare.nft(
        "list", "set", "ip", "kube-proxy", "failing-endpoints"
    )
    await heal(bare, "b1")
    await fail(bare, "b1", *VANISHED)
    await knock(bare, bare.front("out"), 1)
    await asyncio.sleep(SILENCE)
    out = await bare.destinations(bare.front("out"))
    assert out == {"a1:3000", "b1:3000"}


async def flood(live: Live, front: Front) -> None:
    """A client whose SYNs are answered, but that never takes the answers, repeats all of them."""
    await fail(live, "pod", f"tcp sport {front.port} drop")
    await run_in_async(live.cluster.namespace_of("pod"), lambda: half_open(front, 300, 2.5))
    assert await live.destinations(front) == {"a1:3000", "b1:3000"}
    assert "10.244" not in await live.nft("list", "set", "ip", "kube-proxy", "failing-endpoints")
    await heal(live, "pod")


def half_open(front: Front, count: int, seconds: float) -> None:
    """Begin connections, and wait while their SYNs are repeated."""
    with ExitStack() as stack:
        for _ in range(count):
            made = stack.enter_context(socket.socket())
            made.setblocking(False)
            made.connect_ex(front)
        time.sleep(seconds)


async def slow(live: Live, front: Front) -> None:
    """A server that accepts no connection itself: its kernel completes the handshake."""
    listen = partial(socket.create_server, ("", 3100))
    with await run_in_async(live.cluster.namespace_of("b1"), listen):
        chain = "add table ip slow; add chain ip slow nat { type nat hook prerouting priority -100 ; };"
        await live.run("nft", f"{chain} add rule ip slow nat tcp dport 3000 redirect to :3100", place="b1")
        ends = time.monotonic() + SILENCE
        while time.monotonic() < ends:
            await asyncio.gather(*(live.cluster.probe("pod", "tcp", *front, 0.5) for _ in range(6)))
            assert await live.destinations(front) == {"a1:3000", "b1:3000"}
        await live.run("nft", "delete table ip slow", place="b1")


@pytest.mark.slow("another mode's cluster")
@modes("iptables-nft")
async def test_another_mode_reports_that_it_ignores_the_request(bare: Live) -> None:
    serve(bare, "web", "a1 b1")
    await bare.start(args=[FLAG])
    await bare.until(lambda: any("ejects no endpoints" in text for text in bare.events("web")), "an event")
    _, text = await bare.page("/metrics", METRICS_PORT)
    assert 'kubeproxy_ejected_endpoints{ip_family="IPv4"} 0' in text
    assert bare.logged(f"{FLAG} has no effect in mode iptables")
