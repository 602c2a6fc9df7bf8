"""docs/balancing.md with real connections: its examples, and the warnings of modes that always share evenly."""

from __future__ import annotations

import functools
import json
import re
import socket
from collections import Counter

import pytest
import yaml

from lab.netns import run_in_async
from lab.probes import NoAnswer
from lab.topology import NODE_A, NODE_B, OUTSIDE_IP
from support.documents import document
from support.live import METRICS_PORT, TIMEOUT, Front, Live
from support.modes import modes

PAGE = document("docs/balancing.md").path.read_text(encoding="utf-8")


def example(live: Live, pod: str) -> dict:
    """Return the slice of the page, with an existing address."""
    (text,) = re.findall(
        r"^```yaml\n(kind: EndpointSlice|apiVersion: discovery.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
    found = yaml.safe_load(text.replace("10.244.1.7", live.ips[pod]["IPv4"]))
    found["metadata"] |= {"namespace": "default", "uid": "uid-of-canary"}
    return found


def annotated(live: Live, line: str) -> None:
    """Execute a line of the page with `kubectl annotate service web`."""
    assert f"kubectl annotate service web {line}\n" in PAGE
    name, _, value = line.rsplit(maxsplit=1)[-1].partition("=")
    live.cluster.patch("services", "web", {"metadata": {"annotations": {name: value}}})


async def answers(live: Live, front: Front, count: int) -> Counter:
    """Return the pods that answered this number of connections."""
    found = await live.cluster.probes("outside", "tcp", *front, count)
    assert not [one for one in found if isinstance(one, NoAnswer)]
    return Counter(one.pod for one in found)


@pytest.mark.slow("each example of a page")
@modes("nftables")
async def test_the_examples_of_the_page(bare: Live) -> None:
    bare.service("web", "a1 b1", type="NodePort", sessionAffinity="None")
    await bare.start()
    front = bare.front("web", "nodeport")
    await bare.programmed(bare.front("web"), "a1 b1")
    bare.cluster.store.put("endpointslices", example(bare, "b2"))
    await bare.programmed(bare.front("web"), "a1 b1 b2")
    got = await answers(bare, front, 300)
    assert 5 <= got["b2"] <= 75, got  # 33 of 300 are expected; this limit is exceeded once in 10,000,000 times
    status, text = await bare.ask("services", "web")
    assert status == 0
    assert "(100)" in text
    assert "(25)" in text
    status, text = await bare.ask("why", "192.0.2.99", f"{front.address}:{front.port}")
    assert status == 0, text
    assert "11.1% to" in text

    annotated(bare, "--overwrite kube-proxy-py/weights=node-a=0")
    await bare.programmed(bare.front("web"), "b1 b2")
    assert "a1" not in await answers(bare, front, 60)
    _, text = await bare.ask("why", "192.0.2.99", f"{front.address}:{front.port}")
    assert "the weight of node-a is 0" in text

    annotated(bare, "--overwrite kube-proxy-py/weights=zone:zone-b=0")
    await bare.programmed(bare.front("web"), "a1 b2")
    assert "b1" not in await answers(bare, front, 60)
    _, text = await bare.ask("why", "192.0.2.99", f"{front.address}:{front.port}")
    assert "the weight of zone zone-b is 0" in text
    assert f"to {bare.ips['a1']['IPv4']}:3000 on node-a in zone zone-a" in text
    status, text = await bare.ask("services", "web")
    assert f"zone zone-b: {bare.ips['b1']['IPv4']}" in text

    await bare.proxy.kill()
    await bare.start()
    assert "b1:3000" not in await bare.destinations(bare.front("web")), "zones are known before anything is written"
    assert not bare.logged("Replacing the table")
    status, text = await bare.ask("verify")
    assert status == 0, text

    annotated(bare, "kube-proxy-py/slow-start=30")
    version = bare.cluster.get("services", "web")["metadata"]["resourceVersion"]

    async def heard() -> str:
        _, page = await bare.page("/debug/state?namespace=default&name=web", METRICS_PORT)
        service = json.loads(page)["services"][0]
        return "" if (service["resourceVersion"], service["state"]) == (version, "programmed") else page

    await bare.eventually(heard)
    bare.endpoints("web", "a1 b1 a3")

    async def begins() -> str:
        _, page = await bare.page("/debug/state?namespace=default&name=web", METRICS_PORT)
        ports = json.loads(page)["services"][0].get("ports", ())  # the table is unchanged during the check
        weights = sorted(next((p for p in ports if p["protocol"] == "TCP"), {}).get("weights", {}).values())
        return "" if weights[:1] in ([10], [20]) else f"{weights}: a new endpoint begins with a tenth"

    await bare.eventually(begins)

    annotated(bare, "kube-proxy-py/algorithm=maglev")
    status, text = await bare.ask("why", "192.0.2.99:40000", f"{front.address}:{front.port}")
    assert status == 0, text
    bare.cluster.patch("services", "web", {"metadata": {"annotations": {"kube-proxy-py/weights": "node-a=many"}}})
    await bare.programmed(bare.front("web"), "a1 a3 b1 b2")
    await bare.until(lambda: any("'node-a=many' is not NODE=WEIGHT" in e for e in bare.events("web")), "an event")


@modes("iptables-nft")
async def test_a_mode_with_equal_shares_reports_it(bare: Live) -> None:
    bare.service("web", "a1 b1")
    bare.cluster.patch("services", "web", {"metadata": {"annotations": {"kube-proxy-py/weights": "node-a=0"}}})
    await bare.start()
    await bare.programmed(bare.front("web"), "a1 b1")
    await bare.until(
        lambda: len([e for e in bare.events("web") if "requests for shares are ignored" in e]) == 1, "an event"
    )


@modes("nftables")
async def test_a_service_above_the_limit_of_the_node_has_equal_shares_and_an_event(bare: Live) -> None:
    for name in ("web", "young"):  # both have the same age in seconds, so the name decides
        bare.service(name, "a1 b1", sessionAffinity="None")
        bare.cluster.patch("services", name, {"metadata": {"annotations": {"kube-proxy-py/algorithm": "maglev"}}})
    await bare.start(args=[f"--balancing-entries={4 * 2 * 1021}"])  # a quarter is for one namespace: two ports
    for name in ("web", "young"):
        await bare.programmed(bare.front(name), "a1 b1")
    await bare.until(lambda: any("--balancing-entries" in e for e in bare.events("young")), "an event")
    assert not any("--balancing-entries" in e for e in bare.events("web"))
    _, text = await bare.ask("why", OUTSIDE_IP, "default/web:80")
    assert "1021 slots" in text
    _, text = await bare.ask("why", OUTSIDE_IP, "default/young:80")
    assert "1021 slots" not in text
    bare.cluster.delete("services", "web")

    async def check() -> str:
        _, text = await bare.ask("why", OUTSIDE_IP, "default/young:80")
        return "" if "1021 slots" in text else text

    await bare.eventually(check)


@pytest.mark.slow("two proxies and thousands of connections")
@modes("nftables")
async def test_clients_keep_their_endpoint_when_a_router_sends_them_by_another_node(bare: Live) -> None:
    bare.service("web", "a1 a2 a3 b1 b2")
    bare.service("still", "b1 a1 b2 a2 a3", sessionAffinity="ClientIP")
    for name in ("web", "still"):
        annotations = {"service.cilium.io/lb-algorithm": "maglev"}
        bare.cluster.patch("services", name, {"metadata": {"annotations": annotations}})
    config = bare.mode.config
    for node in (NODE_B, NODE_A):  # only the last one is queried
        bare.proxies.append(await bare.cluster.start_proxy(config, node=node, ready_within=TIMEOUT))
    web, still = bare.front("web"), bare.front("still")
    outside = bare.cluster.namespace_of("outside")
    met: dict[object, set[str]] = {}
    for turn in range(6):
        hop = (NODE_A, NODE_B)[turn % 2].ip
        await bare.run("ip", "route", "replace", "10.96.0.0/16", "via", hop, place="outside")
        talked = await run_in_async(outside, functools.partial(talk, web.address, web.port, range(20000, 20120)))
        for port, pod in talked.items():
            met.setdefault(port, set()).add(pod)
        for answer in await bare.cluster.probes("outside", "tcp", *still, 40):
            assert not isinstance(answer, NoAnswer), answer
            met.setdefault("still", set()).add(answer.pod)
    assert {len(pods) for pods in met.values()} == {1}, "a client met two endpoints"
    assert len(set.union(*met.values())) == 5, "all endpoints have clients"
    for port in (20000, 20001):
        status, text = await bare.ask("why", f"{OUTSIDE_IP}:{port}", f"{web.address}:{web.port}/udp")
        assert status == 0, text
        (pod,) = met[port]
        assert f"100.0% to {bare.ips[pod]['IPv4']}:3000" in text


def talk(address: str, port: int, sources: range) -> dict[int, str]:
    """Return the pods that answer a datagram from each of these ports; none may be lost."""
    found = {}
    for source in sources:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(5)
            client.bind(("", source))
            client.connect((address, port))
            client.send(b"?")
            found[source] = json.loads(client.recv(2048))["pod"]
    return found
