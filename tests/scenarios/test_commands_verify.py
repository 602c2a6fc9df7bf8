"""`kube-proxy verify` beside a running proxy: what others changed is named by Service, and what is right is not."""

from __future__ import annotations

import json

from support.live import Live
from support.modes import modes

pytestmark = modes("nftables")

PROXY = {"nftables": {"syncPeriod": "1h"}}  # elements that others change stay as they are


async def test_nothing_differs(live: Live) -> None:
    live.service("fine", "a1 b1", type="LoadBalancer", loadBalancerSourceRanges=["10.1.0.0/16"])
    live.service("first", "a1", sessionAffinity="ClientIP")
    await live.programmed(live.front("first"), "a1")
    live.service("sticky", "a1 b1", type="NodePort", externalTrafficPolicy="Local", sessionAffinity="ClientIP")
    await live.programmed(live.front("sticky"), "a1 b1")
    live.delete("first")
    live.service("local", "b1", type="NodePort", externalTrafficPolicy="Local")
    live.service("empty", "a1/unready", type="NodePort")
    await live.expect(live.front("empty"), {"pod": "refused"})
    status, text = await live.ask("verify")
    assert (status, "Services are in the kernel as planned" in text) == (0, True), text
    for name in ("fine", "sticky", "local", "empty"):
        status, text = await live.ask("verify", name)
        assert (status, "ok 1 Services" in text) == (0, True), text


async def test_clients_that_another_program_gave_away(live: Live) -> None:
    names = ("sticky-one", "sticky-two")
    for name in names:
        live.service(name, "a1 b1", sessionAffinity="ClientIP")
        await live.programmed(live.front(name), "a1 b1")
    one, two = (f"{live.front(name).address} . tcp . 80" for name in names)
    pools = ("ip", "kube-proxy", "affinity-pools")
    listed = await live.nft("get", "element", *pools, f"{{ {one} }}")
    number = listed.rpartition(" : ")[2].split()[0]
    await live.nft("delete", "element", *pools, f"{{ {two} }}")
    await live.nft("add", "element", *pools, f"{{ {two} : {number} }}")
    status, text = await live.ask("verify")
    assert status == 1, text
    assert f"default/sticky-two: different: {live.front('sticky-two').address}:80/tcp" in text
    assert f"its clients are remembered under the number {number}" in text
    for name in names:
        live.delete(name)


async def test_an_endpoint_that_another_program_removed(live: Live) -> None:
    live.service("robbed", "a1 b1")
    front = live.front("robbed")
    await live.programmed(front, "a1 b1")
    listed = await live.nft("-j", "list", "map", "ip", "kube-proxy", "endpoints")
    (entries,) = [part["map"]["elem"] for part in json.loads(listed)["nftables"] if "map" in part]
    keys = [key["concat"] for key, value in entries if value["concat"][0] == live.ips["a1"]["IPv4"]]
    key = " . ".join(str(word) for word in next(k for k in keys if k[:3] == [front.address, "tcp", 80]))
    await live.nft("delete", "element", "ip", "kube-proxy", "endpoints", f"{{ {key} }}")
    for words in (("verify", "robbed"), ("verify",)):
        status, text = await live.ask(*words)
        assert status == 1, text
        assert f"default/robbed: missing: endpoint {live.ips['a1']['IPv4']}:3000 of {front.address}:80/tcp" in text
        assert "1 differences in" in text
        assert "Fix: the proxy repairs them" in text
    live.delete("robbed")
