"""`kubectl kubeproxy trace` between nodes with real proxies: it names the node that drops real packets."""

from __future__ import annotations

import json

import pytest

from support.answers import valid
from support.three_nodes import ThreeNodes, ip


async def test_a_trace_of_a_delivered_packet(nodes: ThreeNodes) -> None:
    nodes.live.service("followed", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/followed:tcp")
    said = f": on node-a, nothing here dropped it, and {ip(nodes, 'b1')}:3000 answered\n"
    await nodes.until(0, said, "trace", "node/node-a", "svc/followed:tcp")
    status, text = await nodes.ask("trace", ip(nodes, "pod"), "svc/followed:tcp")
    assert (status, said in text) == (0, True), text


async def test_a_trace_to_a_firewall_of_the_clients_node(nodes: ThreeNodes) -> None:
    nodes.live.service("near-traced", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/near-traced:tcp")
    await nodes.drop("node-a", "forward", f"ip daddr {ip(nodes, 'b1')} tcp dport 3000")
    try:
        status, text = await nodes.ask("trace", ip(nodes, "pod"), "svc/near-traced:tcp")
    finally:
        await nodes.admit("node-a")
    rule = f'the request was dropped by rule "ip daddr {ip(nodes, "b1")} tcp dport 3000 drop" of table inet firewall'
    assert status == 1, text
    assert f": node-a drops it: {rule}" in text
    assert "node-b" not in text


@pytest.mark.parametrize("hook", ["forward", "prerouting"])
@pytest.mark.parametrize("client", ["pod", "node"])
async def test_a_trace_to_a_firewall_of_the_endpoints_node(nodes: ThreeNodes, client: str, hook: str) -> None:
    name = f"far-traced-{client}-{hook}"
    nodes.live.service(name, "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", f"svc/{name}:tcp")
    # The other hook drops the endpoint's answers.
    end = "daddr {} tcp dport" if hook == "forward" else "saddr {} tcp sport"
    rule = f"ip {end.format(ip(nodes, 'b1'))} 3000"
    await nodes.drop("node-b", hook, rule)
    words = ("trace", ip(nodes, "pod") if client == "pod" else "node/node-a", f"svc/{name}:tcp", "--seconds", "4")
    try:
        status, text = await nodes.ask(*words)
    finally:
        await nodes.admit("node-b")
    which = "request" if hook == "forward" else "answer"
    assert status == 1, text
    assert f': node-b drops it: the {which} was dropped by rule "{rule} drop" of table inet firewall, chain' in text
    if client == "pod":
        assert "tcp, sent from its network namespace:\n" in text
        assert "connect now" not in text


async def test_a_trace_to_a_firewall_that_resets_on_the_endpoints_node(nodes: ThreeNodes) -> None:
    nodes.live.service("far-reset", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/far-reset:tcp")
    rule = f"ip daddr {ip(nodes, 'b1')} tcp dport 3000 reject with tcp reset"
    await nodes.run("node-b", "nft", "add table inet firewall")
    chain = "add chain inet firewall guard { type filter hook forward priority -5; }"
    await nodes.run("node-b", "nft", chain)
    await nodes.run("node-b", "nft", f"add rule inet firewall guard {rule}")
    try:
        status, text = await nodes.ask("trace", ip(nodes, "pod"), "svc/far-reset:tcp", "--seconds", "4")
    finally:
        await nodes.admit("node-b")
    said = f': node-b refuses it: the request was refused by rule "{rule}" of table inet firewall, chain guard'
    assert (status, said in text) == (1, True), text


@pytest.mark.slow("a trace to its end")
async def test_a_trace_to_a_pod_that_drops(nodes: ThreeNodes) -> None:
    nodes.live.service("deaf", "b2")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/deaf:tcp")
    table = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; "
    await nodes.live.run("nft", table + "add rule inet deaf in tcp dport 3000 drop", place="b2")
    try:
        status, text = await nodes.ask("trace", "pod/a1", "svc/deaf:tcp", "--seconds", "4")
    finally:
        await nodes.live.run("nft", "delete table inet deaf", place="b2")
    said = f": node-b forwards it to {ip(nodes, 'b2')}:3000, and nothing comes back: see the endpoint's pod ("
    assert (status, said in text) == (1, True), text


@pytest.mark.parametrize("node", ["node-a", "node-b"])
async def test_a_trace_of_answers_that_a_node_does_not_route(nodes: ThreeNodes, node: str) -> None:
    name = f"unreturned-{node}"
    nodes.live.service(name, "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", f"svc/{name}:tcp")
    rule = ("from", ip(nodes, "b1"), "to", ip(nodes, "a1"), "pref", "100", "blackhole")
    await nodes.run(node, "ip", "rule", "add", *rule)
    try:
        status, text = await nodes.ask("trace", "pod/a1", f"svc/{name}:tcp", "--seconds", "4")
    finally:
        await nodes.run(node, "ip", "rule", "del", *rule)
    said = (
        f": on {node}, no rule dropped it, but the answers of {ip(nodes, 'b1')}:3000 went no further than prerouting: "
    )
    assert (status, said in text) == (1, True), text


async def test_a_trace_to_a_rule_of_iptables_legacy_which_the_kernel_does_not_trace(nodes: ThreeNodes) -> None:
    nodes.live.service("legacy", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/legacy:tcp")
    rule = ("FORWARD", "-d", ip(nodes, "b1"), "-p", "tcp", "--dport", "3000", "-j", "DROP")
    await nodes.run("node-b", "iptables-legacy", "-A", *rule)
    try:
        status, text = await nodes.ask("trace", "pod/a1", "svc/legacy:tcp", "--seconds", "4")
    finally:
        await nodes.run("node-b", "iptables-legacy", "-D", *rule)
    said = "on node-b, no rule that the kernel traces dropped it, but it went no further than prerouting: "
    chain = f"iptables-legacy -t filter, chain FORWARD: drops what goes to {ip(nodes, 'b1')}:3000 at the hook forward"
    assert (status, said + chain in text) == (1, True), text
    assert "`iptables-legacy -t filter -S FORWARD` lists its rules\n" in text


async def test_a_trace_of_requests_in_a_zone_of_connection_tracking(nodes: ThreeNodes) -> None:
    nodes.live.service("zoned", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/zoned:tcp")
    rule = ("PREROUTING", "-s", ip(nodes, "a1"), "-j", "CT", "--zone", "7")
    await nodes.run("node-a", "iptables-nft", "-t", "raw", "-A", *rule)
    try:
        status, text = await nodes.ask("trace", "pod/a1", "svc/zoned:tcp", "--seconds", "4")
    finally:
        await nodes.run("node-a", "iptables-nft", "-t", "raw", "-D", *rule)
    said = f'rule "ip saddr {ip(nodes, "a1")} counter ct zone set 7" of table ip raw, chain PREROUTING, which is'
    assert (status, "3000 answers, but on node-a, " in text, said in text.splitlines()[1]) == (1, True, True), text


@pytest.mark.slow("another protocol")
async def test_a_trace_of_datagrams(nodes: ThreeNodes) -> None:
    nodes.live.service("datagrams", "b1")
    words = ("trace", "node/node-a", "svc/datagrams:80/udp", "--seconds", "4")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/datagrams:80/udp")
    await nodes.drop("node-b", "forward", "udp dport 3000")
    try:
        status, text = await nodes.ask(*words)
    finally:
        await nodes.admit("node-b")
    assert status == 1, text
    assert ': node-b drops it: the request was dropped by rule "udp dport 3000 drop" of table inet firewall' in text
    assert f"node-b, {ip(nodes, 'node')} (node node-a) -> {ip(nodes, 'b1')}:3000/udp:\n" in text


async def test_a_trace_to_a_node_port_of_another_node(nodes: ThreeNodes) -> None:
    nodes.live.service("ported", "b1", type="NodePort")
    there = f"node/node-b:{nodes.live.front('ported', 'nodeport').port}"
    for client in ("pod/a1", "node/node-a"):
        await nodes.until(0, "kube-proxy forwards it", "why", client, there)
        status, text = await nodes.ask("trace", client, there)
        assert (status, ": on node-a, nothing here dropped it, and " in text) == (0, True), text
    nodes.live.service("local-ported", "a1", type="NodePort", externalTrafficPolicy="Local")
    there = f"node/node-b:{nodes.live.front('local-ported', 'nodeport').port}"
    local = "policy Local, and none of the Service's endpoints is on node-b"
    await nodes.until(1, f"{local} (x)", "why", "node/node-a", there)
    status, text = await nodes.ask("trace", "node/node-a", there, "--seconds", "4")
    assert (status, f"{local}: node-b drops it: the request was dropped by rule" in text) == (1, True), text
    status, text = await nodes.ask("trace", "pod/a2", there, "--seconds", "4")
    astray = f"node-b forwards it to {ip(nodes, 'a1')}:3000, whose answer does not return through node-b"
    assert (status, astray in text) == (1, True), text


@pytest.mark.slow("two traces beside another configuration")
async def test_a_trace_of_masqueraded_packets_of_both_families(nodes: ThreeNodes) -> None:
    nodes.live.service("masked", "b1", ipFamilyPolicy="RequireDualStack")
    await nodes.proxies["node-a"].stop()
    await nodes.start("node-a", {"nftables": {"masqueradeAll": True}})
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/masked:tcp")
    await nodes.drop("node-b", "forward", "tcp dport 3000")
    try:
        for family in ("IPv4", "IPv6"):
            front = nodes.live.front("masked", family=family)
            where = f"[{front.address}]" if family == "IPv6" else front.address
            words = ("trace", nodes.live.ips["pod"][family], f"{where}:{front.port}", "--seconds", "4", "-o", "json")
            status, text = await nodes.ask(*words)
            whole = valid("cluster", text[text.index("{") : text.rindex("}") + 1])  # hints on standard error may follow
            assert (status, "node-b drops it: the request was dropped" in whole["heading"]) == (1, True), text
            near, far = (valid("trace", json.dumps(one["answer"])) for one in whole["nodes"])
            assert near["served"][-1]["client"] == nodes.live.ips["node"][family]
            assert far["journeys"][0]["source"].startswith(
                f"[{nodes.live.ips['node'][family]}]:" if family == "IPv6" else nodes.live.ips["node"][family]
            )
    finally:
        await nodes.admit("node-b")
        await nodes.proxies["node-a"].stop()
        await nodes.start("node-a")


@pytest.mark.slow("two traces to their end")
async def test_a_trace_of_packets_that_the_network_loses(nodes: ThreeNodes) -> None:
    nodes.live.service("astray", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/astray:tcp")
    # Before all rules that a trace shows.
    await nodes.run("node-b", "nft", "add table inet firewall")
    chain = "add chain inet firewall guard { type filter hook prerouting priority -400; }"
    await nodes.run("node-b", "nft", chain)
    await nodes.run("node-b", "nft", f"add rule inet firewall guard ip daddr {ip(nodes, 'b1')} drop")
    words = ("trace", "node/node-a", "svc/astray:tcp", "--seconds", "8")
    try:
        status, text = await nodes.ask(*words)
        assert status == 1, text
        assert ": it leaves node-a for " in text
        assert ", but no rule of node-b meets it: see the network between them\n" in text
        # The lab's kubelet removes a deleted running pod, but not a pending one.
        pod = nodes.cluster.get("pods", "kube-proxy-py-node-b", namespace="kube-system")
        nodes.cluster.store.put("pods", pod | {"status": pod["status"] | {"phase": "Pending"}})
        try:
            status, text = await nodes.ask(*words)
        finally:
            nodes.cluster.store.put("pods", pod)
    finally:
        await nodes.admit("node-b")
    assert status == 2, text
    assert "; node-b, which has " in text
    assert "gave no answer: pod kube-system/kube-proxy-py-node-b is Pending\n" in text, text
