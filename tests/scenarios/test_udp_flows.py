"""A UDP client with a constant source port: it never keeps a former endpoint, or a refusal that is no longer valid.

Kubernetes issues 139628 (Service scaled to 0), 141371 (Service deleted), 122740 (restart).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from lab.netns import open_socket_in
from support.live import Front, Live
from support.modes import GUEST, modes
from support.traffic import Stream, Traffic

WHERE = ("nftables", "iptables-nft", "userspace", "ipvs")
TIMEOUT = 1.0 if GUEST else 0.15
"""Seconds after which a request counts as unanswered."""
NOBODY = {"timeout", "refused", "unreachable"}


class Client:
    """A socket of a place that sends from the same port again and again."""

    def __init__(self, live: Live, place: str, front: Front) -> None:
        family = socket.AF_INET6 if ":" in front.address else socket.AF_INET
        namespace = live.cluster.namespace_of(place)
        self._sock = open_socket_in(namespace, lambda: socket.socket(family, socket.SOCK_DGRAM))
        self._sock.settimeout(TIMEOUT)
        self._sock.connect(front)
        self._live = live

    def close(self) -> None:
        self._sock.close()

    async def ask(self) -> str:
        """Send a request; return the pod that answers, or 'refused' or 'timeout'."""
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> str:
        try:
            # Both a dropped outgoing packet and a reject fail here; the wait for the answer distinguishes them.
            with contextlib.suppress(PermissionError):
                self._sock.send(b"?")
            return str(json.loads(self._sock.recv(2048))["pod"])
        except TimeoutError:
            return "timeout"
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "unreachable"  # a routing loop outside, as for an unused address

    async def expect(self, *wanted: str) -> str:
        """Send requests until one of these answers arrives, and is then repeated; return it."""
        found: list[str] = []

        async def check() -> str:
            found.append(await self.ask())
            return "" if found[-1] in wanted else f"{wanted} expected, got {found[-10:]}"

        await self._live.eventually(check)
        for _ in range(3):
            again = await self.ask()
            # One endpoint continues to answer; the failure without endpoints may change while the rules are removed.
            assert again == found[-1] or {again, found[-1]} <= NOBODY & set(wanted), f"{again} after {found[-10:]}"
        return found[-1]


@contextlib.contextmanager
def client(live: Live, place: str, front: Front) -> Iterator[Client]:
    made = Client(live, place, front)
    try:
        yield made
    finally:
        made.close()


WAYS = [
    (place, kind, family)
    for family in ("IPv4", "IPv6")
    for place, kind in (("pod", "cluster"), ("outside", "nodeport"), ("outside", "external"), ("node", "cluster"))
]
EXTERNAL = {"IPv4": "198.51.100.{}", "IPv6": "2001:db8:1::{}"}


class Way:
    """A kind of address of a separate Service, and the changes that are possible with that Service."""

    def __init__(self, live: Live, name: str, way: tuple[str, str, str], number: int) -> None:
        self.live = live
        self.place, self.kind, self.family = way
        self.name = f"{name}-{'-'.join(way)}".lower()
        self._external = EXTERNAL[self.family].format(number)

    def service(self, endpoints: str, **spec: Any) -> Front:
        """Create the Service; return the address for clients."""
        external = [self._external] if self.kind == "external" else []
        fields = {"type": "NodePort", "ipFamilies": [self.family], "externalIPs": external} | spec
        self.live.service(self.name, endpoints, **fields)
        return self.live.front(self.name, self.kind, self.family, port=1)

    def endpoints(self, text: str) -> None:
        self.live.endpoints(self.name, text)

    async def programmed(self, pods: str) -> None:
        await self.live.programmed(self.live.front(self.name, family=self.family), pods)

    def delete(self) -> None:
        self.live.delete(self.name)

    def client(self, front: Front) -> contextlib.AbstractContextManager[Client]:
        return client(self.live, self.place, front)

    @property
    def nobody(self) -> set[str]:
        """Outcomes for a client of a deleted Service: they depend on the network,"""
        if self.live.mode.name == "userspace":  # or on the proxy, whose listener may end before the flow does
            return NOBODY
        return {"refused" if self.kind == "nodeport" else "timeout", "unreachable", "timeout"}


async def every_way(live: Live, name: str, first: int, check: Callable[[Way], Awaitable[None]]) -> None:
    """Check all kinds of address in parallel, each with a separate Service; external IPs begin with number `first`."""
    async with asyncio.TaskGroup() as group:
        for number, way in enumerate(WAYS, first):
            group.create_task(check(Way(live, name, way, number)))


@modes(*WHERE)
async def test_a_flow_leaves_an_endpoint_that_goes(live: Live) -> None:
    async def check(way: Way) -> None:
        with way.client(way.service("a1 b1")) as flow:
            first = await flow.expect("a1", "b1")
            other = "b1" if first == "a1" else "a1"
            way.endpoints(f"{first}/draining {other}")
            await way.programmed(other)
            # The endpoint still serves existing flows; a virtual server has no such state (docs/ipvs.md).
            stays = other if live.mode.name == "ipvs" else first
            assert await flow.expect(stays) == stays
            way.endpoints(other)
            await flow.expect(other)

    await every_way(live, "leaves", 150, check)


@modes(*WHERE)
async def test_a_flow_is_refused_when_no_endpoint_is_left(live: Live) -> None:
    async def check(way: Way) -> None:
        with way.client(way.service("a1")) as flow:
            await flow.expect("a1")
            way.endpoints("")
            await flow.expect("refused")
            way.endpoints("b1")
            await flow.expect("b1")

    await every_way(live, "zero", 160, check)


@modes(*WHERE)
async def test_a_flow_ends_with_its_service(live: Live) -> None:
    async def check(way: Way) -> None:
        with way.client(way.service("a1")) as flow:
            await flow.expect("a1")
            way.delete()
            await flow.expect(*way.nobody)

    await every_way(live, "deleted", 170, check)


@modes(*WHERE)
async def test_a_flow_that_began_before_its_service(live: Live) -> None:
    async def check(way: Way) -> None:
        front = way.service("a2")
        spec = live.cluster.get("services", way.name)["spec"]
        way.delete()
        with way.client(front) as flow:
            await flow.expect(*way.nobody)
            way.service("a1", clusterIP=spec["clusterIP"], ports=spec["ports"])
            await flow.expect("a1")

    await every_way(live, "early", 180, check)


@modes(*WHERE)
async def test_a_flow_moves_when_the_proxy_was_down_meanwhile(bare: Live) -> None:
    bare.service("web", "a1", type="NodePort")
    bare.service("scaled", "a1")
    await bare.start()
    fronts = [bare.front("web", port=1), bare.front("web", "nodeport", port=1)]
    fronts.append(bare.front("scaled", port=1))
    with contextlib.ExitStack() as stack:
        flows = [stack.enter_context(client(bare, "outside", front)) for front in fronts]
        for flow in flows:
            await flow.expect("a1")
        await bare.proxy.kill()
        bare.endpoints("web", "b1")
        bare.endpoints("scaled", "")
        await bare.start()
        for flow, wanted in zip(flows, ("b1", "b1", "refused"), strict=True):
            await flow.expect(wanted)


@modes(*WHERE)
async def test_other_flows_and_tcp_stay(live: Live) -> None:
    live.service("stay", "a1 b1")
    live.service("neighbour", "a1 b1")
    front = live.front("stay", port=1)
    await live.programmed(live.front("neighbour"), "a1 b1")
    neighbour = Stream("pod", "lasting", live.front("neighbour"))
    lasting = Stream("outside", "lasting", live.front("stay"))
    with client(live, "outside", live.front("neighbour", port=1)) as calm, client(live, "outside", front) as flow:
        calm_pod = await calm.expect("a1", "b1")
        async with Traffic(live, neighbour, lasting) as traffic:
            for endpoints in ("a1", "b1", "a2 b1", "a2"):
                live.endpoints("stay", endpoints)
                await flow.expect(*endpoints.split())
                assert await calm.ask() == calm_pod
            await traffic.flow()
    assert traffic.failures == []
    assert all(len(pods) == 1 for pods in traffic.pods.values())


@modes(*WHERE)
async def test_removed_flows_are_counted(live: Live) -> None:
    series = 'kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"}'
    live.service("counted", "a1")
    before = await live.metric(series)
    with client(live, "pod", live.front("counted", port=1)) as flow:
        await flow.expect("a1")

        async def left() -> str:
            # Flows that begin during the removal count as failures, so one removal may not be enough.
            live.endpoints("counted", "")
            await flow.expect(*NOBODY)
            live.endpoints("counted", "a1")
            await flow.expect("a1")
            return await _above(live, series, before)

        await live.eventually(left)


async def _above(live: Live, series: str, before: float) -> str:
    return "" if await live.metric(series) > before else "nothing was counted"


@modes("nftables", "iptables-nft", "userspace")
async def test_an_address_that_another_service_has_at_once_gets_no_client_of_the_first(live: Live) -> None:
    """A deleted pod and a new one with its address within 100 ms: the flow to the old one is removed all the same."""
    live.service("before", "a1")
    live.service("after", "b1")
    await live.programmed(live.front("before"), "a1")
    await live.programmed(live.front("after"), "b1")
    client = Client(live, "pod", live.front("before"))
    other = Client(live, "pod", live.front("after"))
    with contextlib.closing(client), contextlib.closing(other):
        await client.expect("a1")
        for _ in range(3):
            live.endpoints("before", "b2")
            live.endpoints("after", "a1")
            await client.expect("b2")
            await other.expect("a1")
            live.endpoints("after", "b1")
            live.endpoints("before", "a1")
            await client.expect("a1")
            await other.expect("b1")
