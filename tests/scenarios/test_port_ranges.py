"""Ranges of ports (docs/port-ranges.md) with real packets: pods answer on 3000 and 3001, inside of the ranges."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import ExitStack
from functools import partial

from kubeproxy.model.addresses import host_port
from lab.probes import NoAnswer
from scenarios.test_commands_flows import connected
from scenarios.test_udp_flows import client
from support.live import Front, Live
from support.modes import modes
from support.traffic import DUAL

RANGES = {"kube-proxy-py/port-ranges": "2990-3010/tcp, 3000-3001/udp"}
FAMILIES = ("IPv4", "IPv6")


def ranged(live: Live, name: str, endpoints: str | None, ranges: dict[str, str] | None = None, **spec) -> None:
    """A Service whose ports lead to 3000, and whose ranges contain the pods' ports."""
    live.service(name, endpoints, **spec)
    annotate(live, name, ranges or RANGES)


def annotate(live: Live, name: str, annotations: dict[str, str | None]) -> None:
    live.cluster.patch("services", name, {"metadata": {"annotations": annotations}})


def fronts(live: Live, name: str, kind: str = "cluster", port: int = 3000, families=FAMILIES) -> list[Front]:
    """Return the addresses of a Service in each family, with a port of its ranges."""
    return [Front(live.front(name, kind, family).address, port) for family in families]


async def is_whole(live: Live) -> None:
    status, text = await live.ask("verify")
    assert status == 0, text


@modes("nftables")
async def test_ports_of_a_range_lead_to_the_same_port_of_an_endpoint(live: Live) -> None:
    before = await live.nft("-s", "list", "chains")
    ranged(live, "spread", "a1 b1", **DUAL)
    for front in fronts(live, "spread"):
        await live.expect(front, {"pod": "a1 b1 kept", "outside": "a1 b1 masqueraded", "node": "a1 b1 masqueraded"})
        await live.expect(front._replace(port=3001), {"pod": "a1 b1 kept", "a1": "a1 b1"})
    for family in FAMILIES:
        await live.expect(live.front("spread", family=family), {"pod": "a1 b1 kept"})
        await live.expect(Front(live.front("spread", family=family).address, 3002), {"pod": "refused"}, "udp")
    await is_whole(live)
    live.delete("spread")
    await live.eventually(lambda: _unchanged(live, before))


async def _unchanged(live: Live, before: str) -> str:
    return "" if await live.nft("-s", "list", "chains") == before else "the chains of ranges remain"


@modes("nftables")
async def test_a_client_keeps_its_endpoint_over_the_first_port_and_all_ranges(live: Live) -> None:
    ranged(live, "sticky", "a1 a2 a3 b1 b2", sessionAffinity="ClientIP", **DUAL)
    for family in FAMILIES:
        own = live.front("sticky", family=family)
        await live.programmed(own, "a1 a2 a3 b1 b2")
        await live.eventually(partial(_answered, live, own._replace(port=3001)))
        for place in ("pod", "outside", "a4"):
            ports = (own, own._replace(port=3000), own._replace(port=3001))
            answers = [await live.cluster.probe(place, "tcp", *front) for front in ports * 4]
            answers += [await live.cluster.probe(place, "udp", *own._replace(port=port)) for port in (3000, 3001) * 4]
            assert len({answer.pod for answer in answers}) == 1, answers
    (name,) = {answer.pod for answer in answers}
    left = " ".join(pod for pod in ("a1", "a2", "a3", "b1", "b2") if pod != name)
    live.endpoints("sticky", left)
    await live.programmed(own, left)
    again = {(await live.cluster.probe("a4", "tcp", *front)).pod for front in ports * 4}
    assert len(again) == 1, "it stays with another one"
    assert name not in again
    await is_whole(live)


@modes("nftables")
async def test_policies_and_source_ranges_are_those_of_the_service(live: Live) -> None:
    ranged(
        live,
        "local",
        "a1 b1",
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        internalTrafficPolicy="Local",
        loadBalancerSourceRanges=["192.168.100.0/24", "2001:db8:64::/48"],
        externalIPs=["198.51.100.78", "2001:db8:1::78"],
        **DUAL,
    )
    await live.until(lambda: live.has_addresses("local"), "addresses of the load balancer")
    for front in fronts(live, "local"):
        await live.expect(front, {"pod": "a1 kept"})
    for front in fronts(live, "local", "external"):
        await live.expect(front, {"outside": "a1 kept", "pod": "a1 b1 kept"})
    closed = fronts(live, "local", "loadbalancer")
    for front in closed:
        await live.expect(front, {"pod": "timeout"}, "tcp")
    live.cluster.patch("services", "local", {"spec": {"loadBalancerSourceRanges": ["0.0.0.0/0", "::/0"]}})
    for front in closed:
        await live.expect(front, {"outside": "a1 kept"}, "tcp")
    live.endpoints("local", "b1")
    for front in fronts(live, "local", "external"):
        await live.expect(front, {"outside": "timeout", "pod": "b1 kept"}, "tcp")
    live.endpoints("local", "")
    for front in (*fronts(live, "local", "external"), *fronts(live, "local")):
        await live.expect(front, {"pod": "refused"}, "tcp")
    live.endpoints("local", "a1/draining")
    for front in fronts(live, "local", "external"):
        await live.expect(front, {"outside": "a1 kept"}, "tcp")
    await is_whole(live)


@modes("nftables")
async def test_a_udp_client_of_a_range_leaves_an_endpoint_that_is_gone(live: Live) -> None:
    ranged(live, "flows", "a1", **DUAL)
    for family in FAMILIES:
        front = Front(live.front("flows", family=family).address, 3001)
        live.endpoints("flows", "a1")
        await live.expect(front, {"pod": "a1 kept"}, "udp")
        with client(live, "pod", front) as asking:
            await asking.expect("a1")
            live.endpoints("flows", "b1")
            await asking.expect("b1")
            live.endpoints("flows", "a1 b1")
            await asking.expect("b1")


@modes("nftables")
async def test_a_udp_client_stays_while_its_port_goes_from_range_to_range(live: Live) -> None:
    ranged(live, "moved", "a1 a2 a3 b1", {"kube-proxy-py/port-ranges": "2990-3001/udp"}, **DUAL)
    both = fronts(live, "moved", port=3001)
    for each in both:
        await live.expect(each, {"outside": "a1 a2 a3 b1"}, "udp")
    with ExitStack() as stack:
        clients = [stack.enter_context(client(live, "outside", each)) for each in both * 4]
        was = [await asking.ask() for asking in clients]
        for ports in ("3001-3010/udp", "3001-4000/udp,3000-3000/udp", "2990-3001/udp"):
            annotate(live, "moved", {"kube-proxy-py/port-ranges": ports})
            await asyncio.sleep(1.5)  # there is a second search after half a second
            assert [await asking.ask() for asking in clients] == was
    await is_whole(live)


@modes("nftables")
async def test_connections_to_a_range_are_followed_by_service_and_range(live: Live) -> None:
    ranged(live, "media", "a1 b1", **DUAL)
    for front in fronts(live, "media"):
        await live.expect(front, {"pod": "a1 b1"})
        with connected(live, "pod", front, 3), connected(live, "outside", front._replace(port=3001), 2):
            status, text = await live.ask("flows", "media", "-o", "json")
            _, everything = await live.ask("flows")
        assert status == 0, text
        assert "default/media" in everything
        family = "IPv6" if ":" in front.address else "IPv4"
        found = {one["port"]: one for one in json.loads(text)["ports"] if one["family"] == family}
        assert found["2990-3010/TCP"]["connections"] == 5
        endpoints = {one["address"]: one["connections"] for one in found["2990-3010/TCP"]["endpoints"]}
        assert endpoints.keys() == {live.ips[pod][family] for pod in ("a1", "b1")}
        assert sum(endpoints.values()) == 5
        assert "3000-3001/UDP" in found


@modes("nftables")
async def test_the_older_service_has_a_contested_range_and_the_younger_one_an_event(live: Live) -> None:
    shared = {"externalIPs": ["198.51.100.79"], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"}
    ranged(live, "older", "a1", **shared)
    await asyncio.sleep(1.1)  # the age of a Service is in whole seconds
    ranged(live, "younger", "b1", {"kube-proxy-py/port-ranges": "3001-3005/tcp,4000-4100/udp,x/tcp,80/tcp"}, **shared)
    front = Front("198.51.100.79", 3001)
    await live.expect(front, {"outside": "a1 masqueraded"}, "tcp")
    await live.until(lambda: any("overlaps ports of" in text for text in live.events("younger")), "an event")
    events = " ".join(live.events("younger"))
    assert "'x/tcp' is not FIRST-LAST/PROTOCOL" in events
    assert "contains 80/TCP, a port of spec.ports" in events
    assert "metadata.annotations[kube-proxy-py/port-ranges]" in events
    await live.expect(Front(live.front("younger", family="IPv4").address, 3001), {"pod": "b1 kept"}, "tcp")
    annotate(live, "older", {"kube-proxy-py/port-ranges": None})
    await live.expect(front, {"outside": "b1 masqueraded"}, "tcp")
    await is_whole(live)


@modes("nftables")
async def test_two_services_with_separate_ranges_at_an_address_are_right_for_each_command(bare: Live) -> None:
    """Also after a restart, after the older one takes a part of the younger one's, and after it is deleted."""
    addresses = ("198.51.100.80", "2001:db8:1::80")
    shared = {"externalIPs": list(addresses), **DUAL}
    await bare.start()
    ranged(bare, "one", "a1", {"kube-proxy-py/port-ranges": "2990-3000/tcp,3000/udp"}, **shared)
    await asyncio.sleep(1.1)  # the age of a Service is in whole seconds
    port = [{"name": "tcp", "port": 81, "targetPort": 3000, "protocol": "TCP"}]
    bare.service("two", "b1", ports=port, **shared)
    annotate(bare, "two", {"kube-proxy-py/port-ranges": "3001-3010/tcp,3001/udp"})

    async def served(wanted: dict[str, str], services: tuple[str, ...] = ("one", "two")) -> None:
        for address in addresses:
            for where, pod in wanted.items():
                number, protocol = where.split("/")
                await bare.expect(Front(address, int(number)), {"outside": pod}, protocol)
                client_ip = bare.ips["outside"]["IPv6" if ":" in address else "IPv4"]
                status, text = await bare.ask("why", client_ip, f"{host_port(address, number)}/{protocol}")
                assert status == 0, text
        for words in ([], *([name] for name in services)):
            status, text = await bare.ask("verify", *words)
            assert status == 0, text

    separate = {"3000/tcp": "a1", "3000/udp": "a1", "3001/tcp": "b1", "3001/udp": "b1"}
    await served(separate)
    before = without_time(await bare.nft("-a", "list", "ruleset"))
    await bare.proxy.kill()
    await bare.start()
    await served(separate)
    assert without_time(await bare.nft("-a", "list", "ruleset")) == before, "nothing is written again"
    annotate(bare, "one", {"kube-proxy-py/port-ranges": "2990-3005/tcp,3000/udp"})
    await bare.until(lambda: any("TCP 3001-3010 overlaps ports of" in text for text in bare.events("two")), "an event")
    await served(separate | {"3001/tcp": "a1"})
    bare.delete("one")
    await served({"3001/tcp": "b1", "3001/udp": "b1"}, ("two",))
    await bare.nft(
        "delete", "element", "ip", "kube-proxy", "external-ranges", f"{{ {addresses[0]} . tcp . 3001-3010 }}"
    )
    await served({"3001/tcp": "b1"}, ("two",))


def without_time(listed: str) -> str:
    """Return rules without the time that is left for elements."""
    return re.sub(r" expires \w+", "", listed)


@modes("nftables")
async def test_a_restart_adopts_ranges_and_a_repair_brings_them_back(bare: Live) -> None:
    await bare.start()
    ranged(bare, "web", "a1 b1", sessionAffinity="ClientIP", **DUAL)
    (front, _) = both = fronts(bare, "web")
    for each in both:
        await bare.eventually(partial(_answered, bare, each))
    met = (await bare.cluster.probe("pod", "tcp", *front)).pod
    before = await bare.nft("-a", "list", "chains")
    elements = await bare.nft("list", "map", "ip", "kube-proxy", "cluster-ranges")
    assert f"{front.address} . tcp . 2990-3010" in elements
    await bare.proxy.kill()
    await bare.start()
    assert await bare.nft("-a", "list", "chains") == before
    assert await bare.nft("list", "map", "ip", "kube-proxy", "cluster-ranges") == elements
    assert not bare.logged("Replacing the table|Writing the rules")
    assert (await bare.cluster.probe("pod", "tcp", *front._replace(port=3001))).pod == met
    status, text = await bare.ask("plan", "--from-kernel")
    assert (status, text.count("proved for all packets")) == (0, 2), text
    status, text = await bare.ask("why", bare.ips["pod"]["IPv4"], f"{front.address}:3001/tcp")
    assert f"session affinity keeps this client at {bare.ips[met]['IPv4']}:3001" in text, text
    for words in (f"why {bare.ips['pod']['IPv4']} {front.address}:3001/tcp", "services web"):
        status, text = await bare.ask(*words.split())
        assert status == 0, text
        assert "2990-3010" in text
    element = f"{{ {front.address} . tcp . 2990-3010 }}"
    await bare.nft("delete", "element", "ip", "kube-proxy", "cluster-ranges", element)
    await bare.eventually(lambda: _has_ranges(bare))
    await is_whole(bare)
    await bare.proxy.kill()
    await bare.start(args=["--port-ranges=0"])
    assert "ranges {" not in (await bare.nft("list", "table", "ip", "kube-proxy")).replace("source-ranges {", "")
    await bare.until(lambda: any("serves no ranges of ports" in text for text in bare.events("web")), "an event")


async def _answered(live: Live, front: Front) -> str:
    answer = await live.cluster.probe("a3", "udp", *front)
    return f"{front}: {answer}" if isinstance(answer, NoAnswer) else ""


async def _has_ranges(live: Live) -> str:
    try:
        text = await live.nft("list", "map", "ip", "kube-proxy", "cluster-ranges")
    except AssertionError as error:
        return str(error)
    return "" if "2990-3010" in text else text
