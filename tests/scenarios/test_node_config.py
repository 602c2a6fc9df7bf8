"""Effects of the node's configuration: the addresses of NodePorts, the detection of pods, masquerading.

Each row is a part of the configuration, and the answers by client and address.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from lab.netns import run_in_async
from lab.probes import http_get
from lab.topology import NODE_A
from support.live import Front, Live
from support.modes import MODES

LOCALHOST = {"IPv4": "127.0.0.1", "IPv6": "::1"}
BRIDGE = {"IPv4": "10.244.0.1", "IPv6": "fd00:244::1"}


@dataclass(frozen=True)
class Row:
    """A configuration; expected answers at the cluster IP; NodePorts by address of the node and place."""

    config: dict[str, Any]
    cluster: dict[str, str] = field(default_factory=dict)
    nodeports: dict[str, dict[str, str]] = field(default_factory=dict)


PODS_ARE_KNOWN = {"pod": "a1 b1 kept", "outside": "a1 b1 masqueraded", "node": "a1 b1 masqueraded"}
HERE, NOT_HERE = {"outside": "a1 b1 masqueraded"}, {"outside": "refused"}
INSIDE, NOT_INSIDE = {"pod": "a1 b1"}, {"pod": "refused"}
NOT_LOCALHOST = {LOCALHOST["IPv4"]: {"node": "refused"}, LOCALHOST["IPv6"]: {"node": "refused"}}
ROWS = {
    "default": Row(
        {},
        PODS_ARE_KNOWN,
        {NODE_A.ip: HERE, NODE_A.ip6: HERE, NODE_A.second_ip: NOT_HERE, BRIDGE["IPv4"]: NOT_INSIDE} | NOT_LOCALHOST,
    ),
    "nodeports-on-all": Row(
        {"nodePortAddresses": ["0.0.0.0/0", "::/0"]},
        {},
        {NODE_A.ip: HERE, NODE_A.ip6: HERE, NODE_A.second_ip: HERE, BRIDGE["IPv4"]: INSIDE, BRIDGE["IPv6"]: INSIDE}
        | NOT_LOCALHOST,
    ),
    "nodeports-in-a-network": Row(
        {"nodePortAddresses": ["172.31.0.0/16", "fd00:244::/64"]},
        {},
        {NODE_A.ip: NOT_HERE, NODE_A.ip6: NOT_HERE, NODE_A.second_ip: HERE, BRIDGE["IPv6"]: INSIDE} | NOT_LOCALHOST,
    ),
    "nodeports-of-one-family": Row(
        {"nodePortAddresses": ["192.168.0.0/16"]},
        {},
        {NODE_A.ip: HERE, NODE_A.second_ip: NOT_HERE, NODE_A.ip6: HERE},
    ),
    "masquerade-all": Row(
        {"nftables": {"masqueradeAll": True}},
        {"pod": "a1 b1 masqueraded", "outside": "a1 b1 masqueraded", "node": "a1 b1 masqueraded"},
    ),
    "node-cidr": Row({"detectLocalMode": "NodeCIDR"}, PODS_ARE_KNOWN | {"b2": "a1 masqueraded"}),
    "bridge": Row(
        {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cbr0"}},
        PODS_ARE_KNOWN | {"b2": "a1 masqueraded"},
    ),
    "prefix": Row(
        {"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "cb"}},
        PODS_ARE_KNOWN | {"b2": "a1 masqueraded"},
    ),
    "no-cluster-cidr": Row(
        {"clusterCIDR": ""}, {"pod": "a1 b1 kept", "a1": "a1 masqueraded", "outside": "a1 kept", "node": "a1 kept"}
    ),
    "masquerade-bit": Row({"nftables": {"masqueradeBit": 27}}, PODS_ARE_KNOWN, {NODE_A.ip: HERE}),
}


@pytest.mark.quick("default", "node-cidr", "nodeports-on-all")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
async def test_configuration(bare: Live, row: Row) -> None:
    await bare.start(row.config)
    bare.service("web", "a1 b1", type="NodePort", ipFamilyPolicy="RequireDualStack")
    # One family's NodePorts, with pods on this node only, where an answer must pass this node twice.
    bare.service("near", "a1", ipFamilyPolicy="RequireDualStack")
    for family in ("IPv4", "IPv6"):
        for place, answer in row.cluster.items():
            near = answer.split()[:-1] == ["a1"]
            await bare.expect(bare.front("near" if near else "web", "cluster", family), {place: answer})
    number = bare.front("web", "nodeport").port
    for address, wanted in row.nodeports.items():
        await bare.expect(Front(address, number), wanted, "tcp")


@pytest.mark.quick("{}")
@pytest.mark.parametrize("config", [{}, {"mode": "iptables", "iptables": {"minSyncPeriod": "1ms"}}], ids=str)
async def test_external_ips_are_not_served_when_their_gate_is_off(bare: Live, config: dict[str, Any]) -> None:
    await bare.start(config | {"featureGates": {"AllowServiceExternalIPs": False}})
    bare.service("web", "a1", type="LoadBalancer", externalIPs=["198.51.100.203"])
    for kind in ("cluster", "nodeport", "loadbalancer"):
        await bare.expect(bare.front("web", kind), {"outside": "a1"})
    await bare.expect(bare.front("web", "external"), {"outside": "timeout", "pod": "timeout"}, "udp")
    assert not bare.events("web")


async def test_an_address_that_comes_later_answers_nodeports(bare: Live) -> None:
    await bare.start({"nodePortAddresses": ["172.31.0.0/16"]})
    bare.service("web", "a1", type="NodePort")
    number = bare.front("web", "nodeport").port
    await bare.expect(Front(NODE_A.second_ip, number), {"outside": "a1"})
    await bare.cluster.exec("outside", ["ip", "route", "add", "172.31.9.9/32", "via", NODE_A.ip])
    await bare.cluster.exec("node", ["ip", "addr", "add", "172.31.9.9/32", "dev", "eth0"])
    await bare.expect(Front("172.31.9.9", number), {"outside": "a1"})
    await bare.cluster.exec("node", ["ip", "addr", "del", "172.31.9.9/32", "dev", "eth0"])
    await bare.eventually(lambda: _lacks(bare, "172.31.9.9"))
    await bare.expect(Front(NODE_A.second_ip, number), {"outside": "a1"})


async def _lacks(live: Live, address: str) -> str:
    text = await live.nft("list", "set", "ip", "kube-proxy", "nodeport-ips")
    return f"{address} is still there" if address in text else ""


async def test_a_changed_node_address_is_followed(bare: Live) -> None:
    await bare.start()
    bare.service("web", "a1", type="NodePort")
    number = bare.front("web", "nodeport").port
    await bare.expect(Front(NODE_A.ip, number), {"outside": "a1"})
    record = bare.cluster.store.get("nodes", ("", "node-a"))
    assert record is not None
    node = record.decode()
    node["status"]["addresses"] = [{"type": "InternalIP", "address": NODE_A.second_ip}]
    bare.cluster.store.put("nodes", node)
    await bare.expect(Front(NODE_A.second_ip, number), {"outside": "a1"})
    await bare.expect(Front(NODE_A.ip, number), {"outside": "refused"})


async def test_a_node_that_is_gone_or_lost_its_addresses_keeps_its_nodeports(bare: Live) -> None:
    await bare.start()
    bare.service("web", "a1", type="NodePort", ipFamilyPolicy="RequireDualStack")
    fronts = [bare.front("web", "nodeport", family) for family in ("IPv4", "IPv6")]
    record = bare.cluster.store.get("nodes", ("", "node-a"))
    assert record is not None
    for gone in (False, True):
        if gone:
            bare.cluster.store.remove("nodes", ("", "node-a"))
        else:
            node = record.decode()
            del node["status"]["addresses"]
            bare.cluster.store.put("nodes", node)
        # A later change of an endpoint shows that the proxy has received the new configuration.
        for pod in ("a2", "a1"):
            bare.endpoints("web", pod)
            for front in fronts:
                await bare.expect(front, {"outside": pod})
        assert (await bare.page("/healthz"))[0] == 200
    moved = record.decode()
    moved["status"]["addresses"] = [{"type": "InternalIP", "address": NODE_A.second_ip}]
    bare.cluster.store.put("nodes", moved)
    await bare.expect(Front(NODE_A.second_ip, fronts[0].port), {"outside": "a1"})
    await bare.expect(fronts[0], {"outside": "refused"})
    await bare.expect(fronts[1], {"outside": "a1"})


async def test_nodeports_answer_on_all_addresses_of_a_family_that_the_node_does_not_list(bare: Live) -> None:
    record = bare.cluster.store.get("nodes", ("", "node-a"))
    assert record is not None
    node = record.decode()
    node["status"]["addresses"] = [{"type": "InternalIP", "address": NODE_A.ip6}]
    bare.cluster.store.put("nodes", node)
    await bare.start()
    bare.service("web", "a1", type="NodePort", ipFamilyPolicy="RequireDualStack")
    number = bare.front("web", "nodeport").port
    for address in (NODE_A.ip, NODE_A.second_ip, NODE_A.ip6):
        await bare.expect(Front(address, number), {"outside": "a1"})
    await bare.expect(Front(LOCALHOST["IPv4"], number), {"node": "refused"}, "tcp")
    await bare.expect(Front(BRIDGE["IPv6"], number), {"pod": "refused"}, "tcp")


@pytest.mark.quick("nftables", "userspace")
@pytest.mark.parametrize("name", ["nftables", "iptables-nft", "userspace"])
async def test_a_node_without_ipv4_serves_ipv6(bare: Live, name: str) -> None:
    record = bare.cluster.store.get("nodes", ("", "node-a"))
    assert record is not None
    node = record.decode()
    node["status"]["addresses"] = [{"type": "InternalIP", "address": NODE_A.ip6}]
    bare.cluster.store.put("nodes", node)
    for device in (await bare.run("ls", "/sys/class/net")).split():
        if device != "lo":
            await bare.run("ip", "-4", "address", "flush", "dev", device)
    bare.service("web", "a1 b1", type="NodePort", ipFamilies=["IPv6"])
    await bare.start({**MODES[name].config, "bindAddress": "::"})
    for kind in ("cluster", "nodeport"):
        await bare.expect(bare.front("web", kind, "IPv6"), {"outside": "a1 b1", "pod": "a1 b1", "node": "a1 b1"})
    bare.endpoints("web", "a2")
    await bare.expect(bare.front("web", "nodeport", "IPv6"), {"outside": "a2"})
    assert not bare.logged("^E")


async def test_health_checks_are_answered_on_loopback_that_is_named(bare: Live) -> None:
    """As in the Go kube-proxy, even in modes in which NodePorts do not answer there."""
    spec = {"externalTrafficPolicy": "Local", "ipFamilyPolicy": "RequireDualStack"}
    made = bare.service("checked", "a1", type="LoadBalancer", **spec)
    port = made["spec"]["healthCheckNodePort"]
    await bare.start({"nodePortAddresses": ["172.31.0.0/16", "127.0.0.0/8", "::/0"]})

    async def answered() -> str:
        asked = {}
        for address in ("127.0.0.1", NODE_A.second_ip, "::1"):
            try:
                ask = partial(http_get, address, port, "/", 5.0)
                asked[address] = (await run_in_async(bare.proxy.namespace, ask))[0]
            except OSError as error:
                asked[address] = str(error)
        return "" if set(asked.values()) == {200} else str(asked)

    await bare.eventually(answered)
