"""Userspace mode in a whole cluster: every kind of address, policies, refusals, restart, repair.

The differences from other modes are inherent: endpoints see the node's address, and relayed connections end with the
proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket

import pytest
from test_udp_flows import NOBODY, client

from lab.netns import run_in_async
from support.live import Front, Live, slice_of

PROXY = {"mode": "userspace", "iptables": {"minSyncPeriod": "1ms"}}
DUAL = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}


async def test_every_address_leads_to_all_endpoints(live: Live) -> None:
    external = ["198.51.100.4", "2001:db8:1::4"]
    live.service("fronts", "a2 b1", type="LoadBalancer", externalIPs=external, **DUAL)
    await live.until(lambda: live.cluster.get("services", "fronts")["status"]["loadBalancer"].get("ingress"), "a VIP")
    everyone = dict.fromkeys(("pod", "node", "outside", "a2"), "a2 b1 masqueraded")
    for family in DUAL["ipFamilies"]:
        for kind in ("cluster", "nodeport", "loadbalancer", "external"):
            await live.expect(live.front("fronts", kind, family), everyone)
    nodeport = live.front("fronts", "nodeport").port
    for loopback in ("127.0.0.1", "::1"):
        await live.expect(Front(loopback, nodeport), {"node": "a2 b1"})


async def test_udp_clients_follow_their_service_to_another_listener(live: Live) -> None:
    """A client that sends from one port continuously, while the Service loses all endpoints and is created again."""
    live.service("udp", "b1")
    with client(live, "outside", live.front("udp", port=1)) as one:
        await one.expect("b1")
        live.endpoints("udp", "")
        await one.expect(*NOBODY)
        live.endpoints("udp", "a1")
        await one.expect("a1")


async def test_clients_stay_with_their_endpoint(live: Live) -> None:
    live.service("sticky", "a1 a2 b1 b2", type="NodePort", sessionAffinity="ClientIP")
    front = live.front("sticky", "nodeport")

    async def sticks() -> str:
        answers = [*await live.cluster.probes("outside", "tcp", *front, 20, 3.0)]
        pods = {getattr(answer, "pod", answer) for answer in answers}
        return "" if len(pods) == 1 and pods < {"a1", "a2", "b1", "b2"} else f"{pods}"

    await live.eventually(sticks)


async def listeners(live: Live) -> dict[str, int]:
    """Return the listeners' ports for the node's own IPv4 connections, by cluster IP, protocol and port."""
    text = await live.nft("list", "map", "ip", "kube-proxy-userspace", "node-services")
    return {f"{m[1]} {m[2]} {m[3]}": int(m[4]) for m in re.finditer(r"(\S+) \. (\w+) \. (\d+) : (\d+)", text)}


async def test_no_client_reaches_a_listener_directly(live: Live) -> None:
    live.service("private", "a1")
    front = live.front("private")
    await live.expect(front, {"outside": "a1", "node": "a1"})
    port = (await listeners(live))[f"{front.address} tcp 80"]
    for place, address in (("outside", live.ips["node"]["IPv4"]), ("pod", "10.244.0.1"), ("node", "127.0.0.1")):
        assert await live.cluster.probe(place, "tcp", address, port) == "refused"


async def test_rules_that_were_removed_come_back(live: Live) -> None:
    live.service("mended", "a1 b1")
    front = live.front("mended")
    await live.expect(front, {"pod": "a1 b1"})
    await live.nft("delete", "table", "ip", "kube-proxy-userspace")
    await live.expect(front, {"pod": "a1 b1", "outside": "a1 b1", "node": "a1 b1"})
    assert any("changed by another program" in event for event in live.events("node-a"))


async def test_endpoints_that_do_not_answer_are_no_fault_while_another_one_does(live: Live) -> None:
    live.service("partial", "a1")
    ends = "10.244.0.99", live.ips["node"]["IPv4"], live.ips["a1"]["IPv4"]  # removed, refusing, answering
    live.cluster.store.put("endpointslices", slice_of("partial", "IPv4", [{"addresses": [one]} for one in ends]))
    front, client = live.front("partial"), live.ips["pod"]["IPv4"]

    async def told() -> str:
        status, text = await live.ask("why", client, "default/partial:80")
        noted = text.count("  -  TCP from this node to ") == text.count(": the proxy connects to another endpoint") == 2
        return "" if status == 0 and noted else f"{status} {text}"

    await live.eventually(told)
    answers = await live.cluster.probes("pod", "tcp", *front, 12, 3.0)
    assert {getattr(answer, "pod", answer) for answer in answers} == {"a1"}


@pytest.mark.quick("kill")
@pytest.mark.parametrize("ending", ["kill", "stop"])
async def test_a_restart_serves_again_and_ends_connections_with_a_reset(bare: Live, ending: str) -> None:
    bare.service("web", "a1 b1", type="NodePort", **DUAL)
    front = bare.front("web", "nodeport")
    await bare.start(PROXY)
    await bare.expect(front, {"outside": "a1 b1 masqueraded", "pod": "a1 b1", "node": "a1 b1"})
    place = bare.cluster.namespace_of("outside")
    lasting = await run_in_async(place, lambda: socket.create_connection(front, 15))
    try:
        before = await listeners(bare)
        if ending == "kill":
            await bare.proxy.kill()
        else:
            assert await bare.proxy.stop() == 0
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(lasting.recv, 1)
        assert await bare.cluster.probe("outside", "tcp", *front) == "refused"
        await bare.start(PROXY)
        for family in DUAL["ipFamilies"]:
            await bare.expect(bare.front("web", "cluster", family), {"outside": "a1 b1 masqueraded", "node": "a1 b1"})
        after = await listeners(bare)
        assert before.keys() == after.keys()
    finally:
        lasting.close()


async def test_a_chain_before_the_listeners_is_named(live: Live) -> None:
    live.service("guarded", "a1 b1", type="NodePort")
    cluster, nodeport = live.front("guarded"), live.front("guarded", "nodeport")
    await live.expect(cluster, {"pod": "a1 b1", "node": "a1 b1"}, "tcp")
    closed = "policy drop; iif lo accept; ct state established accept; tcp dport 22 accept;"
    for rules, wanted in ((closed, "timeout"), (f"{closed} ct status dnat accept;", "a1 b1"),
                          (f"tcp dport {nodeport.port} drop;", "a1 b1")):  # fmt: skip
        await live.nft(f"table ip guard {{ chain c {{ type filter hook input priority 0; {rules} }}; }}")
        try:
            await live.expect(cluster, {"pod": wanted, "node": "a1 b1"}, "tcp")
            await live.expect(nodeport, {"outside": wanted}, "tcp")
            for client, front in (("pod", cluster), ("outside", nodeport), ("node", cluster)):
                source = client if client == "node" else live.ips[client]["IPv4"]
                status, text = await live.ask("why", source, f"{front.address}:{front.port}", "--no-probe")
                lost = wanted == "timeout" and client != "node"
                said = "it does not get through: table ip guard, chain c: drops " in text.splitlines()[0]
                assert (status, said) == (int(lost), lost), text
        finally:
            await live.nft("delete table ip guard")


@pytest.mark.parametrize("rules", ["kept", "deleted"])
async def test_no_client_of_a_deleted_service_reaches_the_new_owner_of_its_port(bare: Live, rules: str) -> None:
    """The range has one port, so the listener of another Service gets the port to which the client's flow leads."""
    config = PROXY | {"portRange": "41000-41000"}
    bare.service("former", "a1", type="NodePort", externalIPs=["198.51.100.9"])
    fronts = [bare.front("former", kind, port=1) for kind in ("cluster", "external", "nodeport")]
    await bare.start(config)
    with contextlib.ExitStack() as stack:
        places = ("pod", "outside", "node")
        flows = [stack.enter_context(client(bare, place, front)) for place in places for front in fronts]
        for flow in flows:
            await flow.expect("a1")
        await bare.proxy.kill()
        if rules == "deleted":
            await bare.nft("delete", "table", "ip", "kube-proxy-userspace")
        bare.delete("former")
        bare.service("new", "b1")
        await bare.start(config)
        await bare.expect(bare.front("new", port=1), {"pod": "b1"}, "udp")
        for flow in flows:
            await flow.expect(*NOBODY)
