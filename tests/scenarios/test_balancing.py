"""docs/balancing.md with real connections: its examples, and what modes say that share evenly."""

from __future__ import annotations

import json
import re
from collections import Counter

import yaml

from lab.probes import NoAnswer
from support.documents import document
from support.live import METRICS_PORT, Front, Live
from support.modes import modes

PAGE = document("docs/balancing.md").path.read_text(encoding="utf-8")


def example(live: Live, pod: str) -> dict:
    """The slice of the page, with an address that there is."""
    (text,) = re.findall(
        r"^```yaml\n(kind: EndpointSlice|apiVersion: discovery.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
    found = yaml.safe_load(text.replace("10.244.1.7", live.ips[pod]["IPv4"]))
    found["metadata"] |= {"namespace": "default", "uid": "uid-of-canary"}
    return found


def annotated(live: Live, line: str) -> None:
    """Do what a line of the page with `kubectl annotate service web` does."""
    assert f"kubectl annotate service web {line}\n" in PAGE
    name, _, value = line.rsplit(maxsplit=1)[-1].partition("=")
    live.cluster.patch("services", "web", {"metadata": {"annotations": {name: value}}})


async def answers(live: Live, front: Front, count: int) -> Counter:
    """Who answered so many connections."""
    found = await live.cluster.probes("outside", "tcp", *front, count)
    assert not [one for one in found if isinstance(one, NoAnswer)]
    return Counter(one.pod for one in found)


@modes("nftables")
async def test_the_examples_of_the_page(bare: Live) -> None:
    bare.service("web", "a1 b1", type="NodePort", sessionAffinity="None")
    await bare.start()
    front = bare.front("web", "nodeport")
    await bare.programmed(bare.front("web"), "a1 b1")
    bare.cluster.store.put("endpointslices", example(bare, "b2"))
    await bare.programmed(bare.front("web"), "a1 b1 b2")
    got = await answers(bare, front, 300)
    assert 5 <= got["b2"] <= 75, got  # 33 of 300 are expected; beyond it once in 10,000,000 times
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

    await bare.proxy.kill()
    await bare.start()
    assert not bare.logged("Replacing the table")
    status, text = await bare.ask("verify")
    assert status == 0, text

    annotated(bare, "kube-proxy-py/slow-start=30")
    await bare.until(lambda: "slow-start" in json.dumps(bare.cluster.get("services", "web")), "the annotation")
    bare.endpoints("web", "a1 b1 b3")

    async def begins() -> str:
        _, page = await bare.page("/debug/state?namespace=default&name=web", METRICS_PORT)
        ports = json.loads(page)["services"][0]["ports"]
        weights = sorted(next(p for p in ports if p["protocol"] == "TCP").get("weights", {}).values())
        return "" if weights[:1] in ([10], [20]) else f"{weights}: a new endpoint begins with a tenth"

    await bare.eventually(begins)

    bare.cluster.patch("services", "web", {"metadata": {"annotations": {"kube-proxy-py/weights": "node-a=many"}}})
    await bare.programmed(bare.front("web"), "a1 b1 b2 b3")
    await bare.until(lambda: any("'node-a=many' is not NODE=WEIGHT" in e for e in bare.events("web")), "an event")


@modes("iptables-nft")
async def test_a_mode_that_shares_evenly_says_so(bare: Live) -> None:
    bare.service("web", "a1 b1")
    bare.cluster.patch("services", "web", {"metadata": {"annotations": {"kube-proxy-py/weights": "node-a=0"}}})
    await bare.start()
    await bare.programmed(bare.front("web"), "a1 b1")
    await bare.until(lambda: len([e for e in bare.events("web") if "weights are left out" in e]) == 1, "an event")
