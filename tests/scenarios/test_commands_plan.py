"""`kube-proxy plan` predicts the effects of another configuration, and the prediction is correct."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from lab.topology import NODE_A
from support.live import Live
from support.modes import modes

pytestmark = modes("nftables", "iptables-nft")
PROXY = {"nodePortAddresses": ["primary"]}


async def outlook(live: Live, *words: str) -> tuple[int, dict]:
    status, text = await live.ask("plan", "-o", "json", *words)
    seen = json.loads(text)
    wrong = seen["shifts"] or seen["remarks"] or seen["lacks"]
    assert status == (1 if wrong else 2 if seen["unknown"] else 0), text
    return status, seen


def changed(live: Live, tmp_path: Path, **fields) -> str:
    file = tmp_path / "new.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(live.proxy.config.read_text()) | fields))
    return str(file)


async def test_the_same_changes_nothing(live: Live, tmp_path: Path) -> None:
    status, text = await live.ask("plan", "--config", changed(live, tmp_path))
    assert (status, text.strip()) == (0, "Nothing differs.")
    status, seen = await outlook(live, "--config", changed(live, tmp_path, configSyncPeriod="1h"))
    assert (status, seen["fields"], seen["shifts"]) == (0, ['configSyncPeriod: "15m0s" -> "1h0m0s"'], [])


async def test_a_smaller_pod_network_with_all_known_pods_changes_nothing_for_these(live: Live) -> None:
    live.service("inside", "a1 b1")
    await live.expect(live.front("inside"), {"pod": "a1 b1"})
    status, seen = await outlook(live, "--cluster-cidr", "10.244.0.0/17")
    assert (status, len(seen["fields"]), seen["shifts"]) == (1, 1, [])
    assert any("10.244.128.0/17 would no longer count as a pod" in text for text in seen["remarks"]), seen["remarks"]
    status, seen = await outlook(live, "--cluster-cidr", "10.244.128.0/17")
    assert (status, bool(seen["shifts"])) == (1, True)
    here, there = live.ips["a1"]["IPv4"], live.ips["b1"]["IPv4"]
    who = [text for one in seen["shifts"] for text in one["who"]]
    assert any(text.startswith("pods on this node by ") and here in text and there not in text for text in who), who
    assert any(text.startswith("pods on other nodes by ") and there in text and here not in text for text in who), who


async def test_addresses_that_begin_and_cease_to_answer(live: Live, tmp_path: Path) -> None:
    live.service("shown", "a1 b1", type="NodePort", externalIPs=["203.0.113.9"])
    await live.expect(live.front("shown"), {"pod": "a1 b1"})
    status, seen = await outlook(live, "--nodeport-addresses", "10.244.0.0/16")
    texts = {
        (where, who): (one["before"], one["after"])
        for one in seen["shifts"]
        for where in one["where"]
        for who in one["who"]
    }
    assert status == 1
    before, after = texts[f"NodePorts on {NODE_A.ip}", "outside"]
    assert before.startswith("served"), texts
    assert not after.startswith("served"), texts
    before, after = texts["NodePorts on 10.244.0.1", "outside"]
    assert not before.startswith("served"), texts
    assert after.startswith("served"), texts
    gates = {"AllowServiceExternalIPs": False}
    status, seen = await outlook(live, "--config", changed(live, tmp_path, featureGates=gates))
    assert status == 1
    (one,) = [one for one in seen["shifts"] if "outside" in one["who"]]
    assert (one["where"], one["before"][:6], one["services"]) == (["IPv4 external IPs"], "served", ["default/shown"])


async def test_another_mode(live: Live) -> None:
    live.service("sticky", "a1 b1", sessionAffinity="ClientIP")
    await live.programmed(live.front("sticky"), "a1 b1")
    before = await live.nft("-s", "list", "ruleset")
    status, seen = await outlook(live, "--proxy-mode", "userspace")
    assert status == 1
    assert any("with this node's address" in one["after"] for one in seen["shifts"])
    assert any("session affinity starts again" in text for text in seen["remarks"])
    assert any(
        line.startswith("leftovers that the proxy removes at its next start, once the new rules are in place")
        for line in seen["node"]
    )
    assert any(line.startswith("the proxy would write ") and " elements" in line for line in seen["node"])
    assert seen["connections"].startswith("established connections continue")
    status, text = await live.ask("plan", "--proxy-mode", "userspace")
    assert (status, "What clients notice:" in text, "  -  mode: " in text) == (1, True, True)
    status, seen = await outlook(live, "--proxy-mode", "ipvs", "--feature-gates", "KubeProxyIPVS=true")
    assert status == 1
    assert "ipvs mode needs the kernel modules" in seen["lacks"]
    assert (await live.nft("-s", "list", "ruleset")) == before


async def test_an_invalid_configuration_has_all_its_mistakes_named(live: Live, tmp_path: Path) -> None:
    off = {"KubeProxyIPVS": False}
    file = changed(
        live, tmp_path, mode="ipvs", bindAddress="nowhere", nodePortAddresses=["10.0.0.0/99"], featureGates=off
    )
    status, text = await live.ask("plan", "--config", file)
    assert status == 2
    for field in ("mode: ipvs needs the feature gate", "bindAddress", "nodePortAddresses[0]"):
        assert field in text, text
    status, text = await live.ask("plan", "--proxy-mode", "ipvs", "--feature-gates", "KubeProxyIPVS=false")
    assert (status, "needs the feature gate" in text) == (2, True)
    status, text = await live.ask("plan", "--config", file, "--cluster-cidr", "10.0.0.0/8")
    assert status == 2


async def test_conntrack_and_another_node(live: Live, tmp_path: Path) -> None:
    conntrack = {"maxPerCore": 0, "min": 0, "udpTimeout": "77s"}
    _, seen = await outlook(live, "--config", changed(live, tmp_path, conntrack=conntrack))
    assert any("net.netfilter.nf_conntrack_udp_timeout: " in line and "-> 77" in line for line in seen["node"])
    _, seen = await outlook(live, "--hostname-override", "node-b")
    assert "Node node-b is another one than node-a" in seen["unknown"][0]
    assert not seen["shifts"], "NodePorts keep the addresses that are assumed"
