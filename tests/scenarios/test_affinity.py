"""ClientIP affinity: clients keep their endpoint through every change of others, and leave it after its deletion."""

from __future__ import annotations

import asyncio

import pytest

from lab.probes import Answer
from prove import launcher
from support.live import Front, Live
from support.modes import modes

CLIENTS = {family: [f"{net}{n}" for n in range(1, 25)] for family, net in (("IPv4", "10.7.7."), ("IPv6", "fd07::"))}
STICKY = {"sessionAffinity": "ClientIP"}


async def add_clients(live: Live) -> None:
    """Add many addresses to the outside, each a separate client."""
    lines = "\n".join(f"addr add {a}/{32 if '.' in a else 128} dev lo" for each in CLIENTS.values() for a in each)
    status, _, error = await live.cluster.exec("outside", ["bash", "-c", f"ip -batch - <<< '{lines}'"])
    assert status == 0, error


@pytest.fixture(scope="module")
def sticky(live: Live, loop) -> Live:
    """The module's cluster with the clients."""
    loop.run(add_clients(live))
    return live


async def choices(live: Live, front: Front, proto: str = "tcp", times: int = 2) -> dict[str, str]:
    """Return the endpoint of each client; all connections of a client must have reached the same endpoint."""
    family = "IPv6" if ":" in front.address else "IPv4"

    async def choice(client: str) -> str:
        answers = await live.cluster.probes("outside", proto, *front, times, 3.0, client)
        assert all(isinstance(answer, Answer) for answer in answers), answers
        (pod,) = {answer.pod for answer in answers}
        return pod

    return dict(zip(CLIENTS[family], await asyncio.gather(*map(choice, CLIENTS[family])), strict=True))


@pytest.mark.quick
@modes("nftables", "iptables-nft", "userspace", "ipvs")
@pytest.mark.parametrize("kind", ["cluster", "nodeport", "external"])
@pytest.mark.parametrize("proto", ["tcp", "udp"])
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_clients_stay_and_spread(sticky: Live, family: str, proto: str, kind: str) -> None:
    name = f"stay-{family}-{proto}-{kind}".lower()
    number = 60 + ["tcp", "udp"].index(proto)
    external = f"198.51.100.{number}" if family == "IPv4" else f"2001:db8:1::{number:x}"
    addresses = [external] if kind == "external" else []
    sticky.service(name, "a1 b1 b2", type="NodePort", ipFamilies=[family], externalIPs=addresses, **STICKY)
    front = sticky.front(name, kind, family)
    await sticky.programmed(sticky.front(name, "cluster", family), "a1 b1 b2")
    first = await choices(sticky, front, proto, times=4)
    assert set(first.values()) == {"a1", "b1", "b2"}
    assert await choices(sticky, front, proto) == first


@modes("nftables", "iptables-nft", "userspace")
@pytest.mark.parametrize("proto", ["tcp", "udp"])
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_a_client_reaches_one_endpoint_through_any_address(sticky: Live, family: str, proto: str) -> None:
    """As upstream: affinity belongs to a service port, not to an address; each Service has separate clients."""
    number = 70 + ["tcp", "udp"].index(proto)
    external = f"198.51.100.{number}" if family == "IPv4" else f"2001:db8:1::{number:x}"
    name = f"whichever-{family}-{proto}".lower()
    kinds = ("cluster", "nodeport", "external", "loadbalancer")
    sticky.service(name, "a1 b1 b2", type="LoadBalancer", ipFamilies=[family], externalIPs=[external], **STICKY)
    sticky.service(f"{name}-other", "a1 b1 b2", ipFamilies=[family], **STICKY)
    await sticky.until(lambda: sticky.cluster.get("services", name)["status"]["loadBalancer"].get("ingress"), "a VIP")
    fronts = [sticky.front(name, kind, family) for kind in kinds]
    other = sticky.front(f"{name}-other", "cluster", family)
    await sticky.programmed(fronts[0], "a1 b1 b2")
    await sticky.programmed(other, "a1 b1 b2")
    first = await choices(sticky, fronts[0], proto)
    assert set(first.values()) == {"a1", "b1", "b2"}
    for front in fronts:
        assert await choices(sticky, front, proto) == first, front
    assert await choices(sticky, other, proto) != first
    for place in ("pod", "node"):
        answers = [answer for front in fronts for answer in await sticky.cluster.probes(place, proto, *front, 3)]
        # In userspace mode the kernel sometimes refuses to send a UDP packet of the node: this is unrelated to
        # affinity.
        assert len({answer.pod for answer in answers if isinstance(answer, Answer)}) == 1, (place, answers)


@modes("nftables", "iptables-nft", "userspace", "ipvs")
async def test_stays_through_changes_of_other_endpoints(sticky: Live) -> None:
    sticky.service("changes", "a1 b1 b2", type="LoadBalancer", externalTrafficPolicy="Local", **STICKY)
    front = sticky.front("changes")
    await sticky.programmed(front, "a1 b1 b2")
    first = await choices(sticky, front)

    for endpoints in ("a1 a2 b1 b2 b3", "a2 a1 b3 b2 b1", "b1 b2 a1"):
        sticky.endpoints("changes", endpoints)
        await sticky.programmed(front, endpoints)
        assert await choices(sticky, front) == first, endpoints

    for gone, endpoints in (("a1", "b1 b2"), ("b1", "b2 a3")):
        before = await choices(sticky, front)
        sticky.endpoints("changes", endpoints)
        await sticky.programmed(front, endpoints)
        after = await choices(sticky, front)
        assert {c: p for c, p in after.items() if before[c] != gone} == {c: p for c, p in before.items() if p != gone}
        assert gone not in after.values()
        assert await choices(sticky, front) == after


@modes("nftables", "iptables-nft", "userspace", "ipvs")
async def test_local_policy_keeps_clients_apart_from_the_cluster_pool(sticky: Live) -> None:
    sticky.service("sticky-local", "a1 a2 b1 b2", type="NodePort", externalTrafficPolicy="Local", **STICKY)
    await sticky.programmed(sticky.front("sticky-local"), "a1 a2 b1 b2")
    front = sticky.front("sticky-local", "nodeport")
    first = await choices(sticky, front)
    assert set(first.values()) == {"a1", "a2"}
    sticky.endpoints("sticky-local", "a1 a2 a3 b1")
    await sticky.programmed(sticky.front("sticky-local"), "a1 a2 a3 b1")
    assert await choices(sticky, front) == first
    pods = {getattr(a, "pod", a) for a in await sticky.cluster.probes("pod", "tcp", *front, 10)}
    assert len(pods) == 1


@pytest.mark.quick("clock-back")
@modes("nftables", "iptables-nft")
@pytest.mark.parametrize("jump", ["clock-back", "clock-ahead"])
async def test_a_clock_that_jumps_forgets_no_client(sticky: Live, jump: str) -> None:
    """The clock jumps by an hour back, or ten years ahead, in the middle of a start."""
    name = f"jump-{jump}"
    sticky.service(name, "a1 b1 b2", **STICKY)
    front = sticky.front(name)
    await sticky.programmed(front, "a1 b1 b2")
    first = await choices(sticky, front)
    await sticky.proxy.stop()
    await sticky.start(command=launcher.command(jump, 5))
    sticky.endpoints(name, "a1 a2 b1 b2")
    await sticky.programmed(front, "a1 a2 b1 b2")
    assert await choices(sticky, front) == first
    await sticky.proxy.stop()
    await sticky.start()
    assert await choices(sticky, front) == first


@modes("nftables", "iptables-nft", "userspace", "ipvs")
async def test_tcp_and_udp_of_one_port_are_two_affinities(sticky: Live) -> None:
    sticky.service("two", "a1 a2 b1 b2", **STICKY)
    front = sticky.front("two")
    await sticky.programmed(front, "a1 a2 b1 b2")
    tcp, udp = await choices(sticky, front, "tcp"), await choices(sticky, front, "udp")
    assert tcp != udp
    assert await choices(sticky, front, "tcp") == tcp


# In ipvs mode affinity lasts as long as the kernel stores the connections.
@modes("nftables", "iptables-nft", "userspace")
async def test_affinity_expires_after_its_timeout(sticky: Live) -> None:
    brief = {"clientIP": {"timeoutSeconds": 1}}
    sticky.service("brief", "a1 a2 b1 b2", sessionAffinityConfig=brief, **STICKY)
    sticky.service("lasting", "a1 a2 b1 b2", **STICKY)
    fronts = [sticky.front("brief"), sticky.front("lasting")]
    for front in fronts:
        await sticky.programmed(front, "a1 a2 b1 b2")
    brief_first, lasting_first = [await choices(sticky, front, times=1) for front in fronts]
    await asyncio.sleep(1.5)
    brief_then, lasting_then = [await choices(sticky, front, times=1) for front in fronts]
    assert brief_then != brief_first
    assert lasting_then == lasting_first


@modes("nftables", "iptables-nft", "userspace", "ipvs")
async def test_affinity_comes_and_goes_with_the_field(sticky: Live) -> None:
    sticky.service("switched", "a1 a2 b1 b2")
    front = sticky.front("switched")
    await sticky.expect(front, {"pod": "a1 a2 b1 b2", "outside": "a1 a2 b1 b2"})
    sticky.cluster.patch("services", "switched", {"spec": STICKY})

    async def sticks() -> str:
        answers = await sticky.cluster.probes("pod", "tcp", *front, 30, 3.0)
        return "" if len({getattr(a, "pod", a) for a in answers}) == 1 else "several endpoints"

    await sticky.eventually(sticks)
    sticky.cluster.patch("services", "switched", {"spec": {"sessionAffinity": "None"}})
    await sticky.expect(front, {"pod": "a1 a2 b1 b2", "outside": "a1 a2 b1 b2"})


ENDPOINTS = "a1 a2 b1 b2"
CHANGES = {"nothing": ENDPOINTS, "another-comes": "a1 a2 a3 b1 b2", "another-goes": "a2 b1 b2"}
"""Changes of endpoints while no proxy runs, and the expected endpoints after its start."""


@modes("nftables", "iptables-nft", "ipvs")
async def test_affinity_survives_a_restart(bare: Live) -> None:
    await add_clients(bare)
    for name in CHANGES:
        bare.service(name, ENDPOINTS, type="NodePort", **STICKY)
    await bare.start()
    fronts = {name: bare.front(name, "nodeport") for name in CHANGES}
    first = {}
    for name, front in fronts.items():
        await bare.programmed(bare.front(name), ENDPOINTS)
        first[name] = await choices(bare, front)
    await bare.proxy.kill()
    for name, now in CHANGES.items():
        bare.endpoints(name, now)
    await bare.start()
    for name, now in CHANGES.items():
        await bare.programmed(bare.front(name), now)
        before, after = first[name], await choices(bare, fronts[name])
        assert {c: pod for c, pod in after.items() if before[c] in now} == {
            c: pod for c, pod in before.items() if pod in now
        }, name


@modes("nftables")
async def test_affinity_survives_a_restart_after_changes_by_another_program(bare: Live) -> None:
    """While no proxy runs, all pools lose their classes, a slot without a pool appears, and a Service is deleted."""
    await add_clients(bare)
    for name in ("kept", "deleted"):
        bare.service(name, ENDPOINTS, **STICKY)
    await bare.start()
    for name in ("kept", "deleted"):
        await bare.programmed(bare.front(name), ENDPOINTS)
    first = await choices(bare, bare.front("kept"))
    await bare.proxy.kill()
    bare.cluster.delete("services", "deleted")
    for command in (
        "flush map ip kube-proxy session-classes",
        "add element ip kube-proxy session-slots { 0.0.9.0 . 0 : 192.0.0.1 }",
    ):
        status, _, error = await bare.cluster.exec("node", ["nft", command])
        assert status == 0, error
    await bare.start()

    async def rest() -> str:
        _, listed, _ = await bare.cluster.exec("node", ["nft", "list map ip kube-proxy session-slots"])
        # The Service has two ports, so two pools.
        return "" if listed.count(" : 192.0.") == 2 * len(ENDPOINTS.split()) else listed

    await bare.eventually(rest)
    assert await choices(bare, bare.front("kept")) == first
