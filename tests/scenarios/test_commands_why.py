"""`kube-proxy why` and `services` with a running proxy: they name each cause, with the field and the fix."""

from __future__ import annotations

import json
import re
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from kubeproxy.commands.completion import names
from lab.netns import open_socket_in
from lab.probes import Answer, NoAnswer
from support.live import Front, Live
from support.modes import modes

pytestmark = modes("nftables", "iptables-nft", "iptables-legacy", "userspace")
LISTING = {"nftables", "iptables-nft", "iptables-legacy"}
"""The modes in which the kernel lists the clients of session affinity."""


async def test_allowed_clients_are_reported_with_their_endpoints(live: Live) -> None:
    live.service("open", "a1 b1")
    await live.expect(live.front("open"), {"pod": "a1 b1"})
    address, port = live.front("open")
    status, text = await live.ask("why", live.ips["pod"]["IPv4"], f"{address}:{port}")
    assert status == 0, text
    assert f"{address}:80/tcp: kube-proxy forwards it" in text
    assert f"that the packets pass: kube-proxy trace {live.ips['pod']['IPv4']} {address}:80/tcp\n" in text
    assert "is the cluster IP of default/open, port tcp (spec.clusterIPs)" in text
    assert f"50.0% to {live.ips['a1']['IPv4']}:3000 on node-a" in text
    assert "ok TCP from this node:" in text
    assert (await live.ask("why", "node", "default/open:tcp"))[0] == 0


async def test_a_client_that_is_another_node_is_asked_there(live: Live) -> None:
    live.service("wide", "a1 b1", type="NodePort")
    front, neighbour = live.front("wide"), live.ips["neighbour"]["IPv4"]
    await live.expect(front, {"pod": "a1 b1"})
    status, text = await live.ask("why", neighbour, f"{front.address}:80")
    assert (status, f"x  {neighbour} is node-b's own address (status.addresses of Node node-b)" in text) == (2, True)
    assert f"Fix: ask on node-b: `kube-proxy why {neighbour} {front.address}:80/tcp`" in text
    assert (await live.ask("why", neighbour, "{}:{}".format(*live.front("wide", "nodeport"))))[0] == 0
    status, text = await live.ask("why", neighbour, f"{neighbour}:{live.front('wide', 'nodeport').port}")
    assert (status, "ask on node-b" in text) == (2, True), text
    port = live.front("wide", "nodeport").port
    for client, there in (("node", live.ips["node"]["IPv4"]), (live.ips["pod"]["IPv4"], live.ips["pod"]["IPv4"])):
        status, text = await live.ask("why", client, f"{neighbour}:{port}")
        assert (status, ": decided on node-b, where the destination is; here" in text) == (2, True), text
        assert f"Fix: ask on node-b: `kube-proxy why {there} {neighbour}:{port}/tcp`" in text
    config = yaml.safe_load(live.proxy.config.read_text())["clientConnection"]["kubeconfig"]
    alone = ("--kubeconfig", config, "--hostname-override", "node-a")
    status, text = await live.ask("why", neighbour, f"{front.address}:80", *alone)
    assert (status, f"x  {neighbour} is node-b's own address" in text) == (2, True), text


async def test_endpoints_that_answer_a_pod_of_another_node_directly_are_reported(live: Live) -> None:
    live.service("past", "a1 b1", type="NodePort", externalTrafficPolicy="Local")
    front, client = live.front("past", "nodeport"), live.ips["b1"]["IPv4"]
    await live.programmed(live.front("past"), "a1 b1")
    met = {answer if answer is NoAnswer.TIMEOUT else answer.pod for answer in await probes(live, front)}
    status, text = await live.ask("why", client, f"{front.address}:{front.port}", "--no-probe")
    # A pod's connection to itself is masqueraded in iptables mode, and the proxy itself connects in userspace mode.
    lost = live.mode.name == "nftables"
    assert met == {"a1", NoAnswer.TIMEOUT if lost else "b1"}
    assert (status, "  x  50.0% of the connections time out: " in text) == (lost, lost), text
    past = " on node-b in zone zone-b, not masqueraded: its answer does not return through this node"
    assert (f"  x  50.0% to {client}:3000{past}" in text) is lost, text


async def probes(live: Live, front: Front) -> Sequence[Answer | NoAnswer]:
    return await live.cluster.probes("b1", "tcp", *front, 16)


@pytest.mark.slow("a dozen questions")
async def test_other_causes_that_stop_a_connection_are_reported(live: Live) -> None:
    live.service("stopped", "a1 b1")
    front = live.front("stopped")
    await live.expect(front, {"pod": "a1 b1"})
    asked = ("why", live.ips["pod"]["IPv4"], f"{front.address}:80")

    async def stopped(said: str, fix: str = "Fix: ", modes: str = "nftables iptables-nft iptables-legacy") -> str:
        """Return the mistakes in the answer; in modes other than these the cause does not stop the connection."""
        status, text = await live.ask(*asked)
        stops = live.mode.name in modes.split()
        return "" if (status, said in text, stops and fix in text) == (stops, stops, stops) else f"{status} {text}"

    await live.run("sysctl", "-w", "net.ipv4.ip_forward=0")
    try:
        await live.eventually(lambda: stopped("x  net.ipv4.ip_forward is 0: ", "Fix: sysctl -w net.ipv4.ip_forward=1"))
        assert (await live.ask("why", "node", "default/stopped:80"))[0] == 0  # the node's own packets are not forwarded
    finally:
        await live.run("sysctl", "-w", "net.ipv4.ip_forward=1")
    way = await live.run("ip", "-o", "route", "get", live.ips["b1"]["IPv4"])
    key = f"net.ipv4.conf.{way.split(' dev ')[1].split()[0]}.forwarding"
    await live.run("sysctl", "-w", f"{key}=0")
    try:
        await live.eventually(lambda: stopped(f"x  {key} is 0: ", f"Fix: sysctl -w {key}=1"))
        assert (await live.ask("why", "node", "default/stopped:80"))[0] == 0
    finally:
        await live.run("sysctl", "-w", f"{key}=1")
    await live.nft("add table inet strict")
    await live.nft("add chain inet strict forward { type filter hook forward priority 10; policy drop; }")
    try:
        await live.eventually(lambda: stopped("x  table inet strict, chain forward: drops all new connections"))
    finally:
        await live.nft("delete table inet strict")
    await live.nft("add table inet guard")
    await live.nft("add chain inet guard guard { type filter hook forward priority 0; }")
    await live.nft("add chain inet guard mine { type filter hook output priority 0; }")
    try:
        await live.nft(f"add rule inet guard guard ip daddr {live.ips['b1']['IPv4']} drop")
        drops = f"drops what goes to {live.ips['b1']['IPv4']}:3000 at the hook"
        await live.eventually(lambda: stopped(f"x  table inet guard, chain guard: {drops} forward"))
        assert (await live.ask("why", "node", "default/stopped:80"))[0] == 0
        _, text = await live.ask(*asked)
        assert "may drop packets too" not in text
        await live.nft(f"add rule inet guard mine ip daddr {live.ips['b1']['IPv4']} drop")
        status, text = await live.ask("why", "node", "default/stopped:80")
        lost = live.mode.name != "userspace"  # in this mode the proxy connects to the other endpoint
        assert (status, f"chain mine: {drops} output" in text) == (lost, True), text
        await live.nft("flush chain inet guard mine")
        await live.nft("flush chain inet guard guard")
        await live.nft(
            f"add rule inet guard guard tcp dport {{ 22, 3000 }} ip daddr {{ {live.ips['b1']['IPv4']} }} drop"
        )
        await live.eventually(lambda: stopped(f"x  table inet guard, chain guard: {drops} forward"))
        await live.nft("flush chain inet guard guard")
        await live.nft(f"add rule inet guard guard ip saddr {live.ips['b1']['IPv4']} tcp sport 3000 drop")
        drops = f"drops the answers of {live.ips['b1']['IPv4']}:3000 at the hook"
        await live.eventually(lambda: stopped(f"x  table inet guard, chain guard: {drops} forward"))
        await live.nft("flush chain inet guard guard")
        by = way.split(" dev ")[1].split()[0]
        await live.nft(f'add rule inet guard guard iifname != "{by}" ip daddr {live.ips["b1"]["IPv4"]} accept')
        await live.nft(f'add rule inet guard guard iifname "{by}" ct state established drop')
        await live.eventually(lambda: stopped(f"x  table inet guard, chain guard: {drops} forward"))
    finally:
        await live.nft("delete table inet guard")
    await live.nft("add table inet early")
    await live.nft("add chain inet early come { type filter hook prerouting priority -150; }")
    await live.nft("add chain inet early leave { type filter hook output priority -150; }")
    try:
        drops = f"drops what goes to {front.address}:80 at the hook"
        await live.nft(f"add rule inet early come ip daddr {front.address} tcp dport 80 drop")
        everywhere = "nftables iptables-nft iptables-legacy userspace"
        await live.eventually(lambda: stopped(f"x  table inet early, chain come: {drops} prerouting", modes=everywhere))
        assert (await live.ask("why", "node", "default/stopped:80"))[0] == 0
        await live.nft(f"add rule inet early leave ip daddr {front.address} tcp dport 80 drop")
        status, text = await live.ask("why", "node", "default/stopped:80")
        assert (status, f"chain leave: {drops} output" in text) == (1, True), text
    finally:
        await live.nft("delete table inet early")

    async def fine() -> str:
        status, text = await live.ask(*asked)
        return "" if status == 0 else text

    await live.eventually(fine)


async def test_a_rule_for_this_node_alone_is_no_fault_of_the_endpoint(live: Live) -> None:
    live.service("selective", "b1")
    front, end, node = live.front("selective"), live.ips["b1"]["IPv4"], live.ips["node"]["IPv4"]
    await live.expect(front, {"pod": "b1"})
    asked = ("why", live.ips["pod"]["IPv4"], "default/selective:80")
    at_proxy = live.mode.name == "userspace"
    chain = "table inet mine, chain mine rejects packets of this node's own at the hook output"
    await live.nft("add table inet mine")
    await live.nft("add chain inet mine mine { type filter hook output priority 0; }")
    try:
        await live.nft(f"add rule inet mine mine ip daddr {end} tcp dport 3000 reject with tcp reset")
        status, text = await live.ask(*asked)
        assert (status, chain in text, "targetPort" in text) == (at_proxy, True, False), text
        assert ("; other checks cover the connection" in text) is not at_proxy
        status, text = await live.ask("why", "node", "default/selective:80")
        assert (status, chain in text, "targetPort" in text) == (1, True, False), text
        if not at_proxy:
            await live.expect(front, {"pod": "b1"})
    finally:
        await live.nft("delete table inet mine")
    status, text = await live.ask(*asked)
    assert status == 0, text
    policy = (
        f"table inet p {{ chain i {{ type filter hook input priority 0; ip saddr {node} reject with tcp reset; }}; }}"
    )
    code, _, failure = await live.cluster.exec("b1", ["nft", policy])
    assert code == 0, failure
    try:
        status, text = await live.ask(*asked)
        assert (status, f"{end}:3000: refused: nothing listens, or a NetworkPolicy" in text) == (
            1 if at_proxy else 2,
            not at_proxy,
        ), text
        if not at_proxy:
            await live.expect(front, {"pod": "b1"})
        status, text = await live.ask("why", "node", "default/selective:80")
        assert (status, "Or a NetworkPolicy or a firewall rejects this node" in text) == (1, True), text
    finally:
        await live.cluster.exec("b1", ["nft", "delete table inet p"])


async def test_only_chains_that_may_drop_this_connection_are_noted(live: Live) -> None:
    live.service("free", "b1")
    await live.expect(live.front("free"), {"pod": "b1"})
    forward, early = "type filter hook forward priority 0;", "type filter hook prerouting priority -300;"
    for there, noted in (("198.51.100.9", live.mode.name == "userspace"), ("0.0.0.0/0 meta mark 7", True)):
        chains = f"chain f {{ {forward} ip daddr {there} drop; }}; chain p {{ {early} ip daddr {there} notrack; }}"
        await live.nft(f"table inet other {{ {chains}; }}")
        try:
            status, text = await live.ask("why", live.ips["pod"]["IPv4"], "default/free:80")
        finally:
            await live.nft("delete table inet other")
        said = [each in text for each in ("table inet other may drop", "table inet other, chain p: takes packets out")]
        # The proxy itself connects in userspace mode, so packets of its own connections are not forwarded.
        assert (status, said) == (0, [noted and live.mode.name != "userspace", noted]), text
    if live.mode.name == "userspace":
        return
    front = live.front("free")
    rule = f"ip daddr {front.address} tcp dport {front.port} drop"
    for client, chain in (("node", early), (live.ips["pod"]["IPv4"], "type filter hook input priority 0;")):
        await live.nft(f"table inet other {{ chain o {{ {chain} {rule}; }}; }}")
        try:
            await live.expect(front, {"node" if client == "node" else "pod": "b1"})
            status, text = await live.ask("why", client, "default/free:80")
        finally:
            await live.nft("delete table inet other")
        assert (status, "table inet other" in text) == (0, False), text


async def test_a_chain_of_the_hook_input_drops_connections_to_this_node(live: Live) -> None:
    if live.mode.name == "userspace":
        return  # the chains of userspace mode reject elsewhere
    made = live.service("checked", "a1", type="LoadBalancer", externalTrafficPolicy="Local")
    live.service("refusing", "", type="NodePort")
    node, client = live.ips["node"]["IPv4"], live.ips["outside"]["IPv4"]
    health, port = made["spec"]["healthCheckNodePort"], live.front("refusing", "nodeport").port
    await live.expect(live.front("refusing", "nodeport"), {"outside": "refused"})
    url = f"http://{node}:{health}/"

    async def answers() -> bool:
        code, _, _ = await live.cluster.exec("outside", ["curl", "-s", "-m", "1", "-o", "/dev/null", url])
        return code == 0

    async def unanswered() -> str:
        return "" if await answers() else f"no answer of {url}"

    async def why(number: int) -> tuple[int, str]:
        return await live.ask("why", client, f"{node}:{number}")

    await live.eventually(unanswered)
    status, text = await why(health)
    assert status == 0, text
    status, text = await why(port)
    assert (status, "unless a firewall" in text) == (1, False), text
    rule = f"meta l4proto {{ tcp, udp }} th dport {{ {health}, {port} }} drop"
    for priority in (-5, 5):
        chain = f"chain i {{ type filter hook input priority {priority}; {rule}; }}"
        await live.nft(f"table inet g {{ {chain}; }}")
        try:
            assert not await answers()
            drops = f"x  table inet g, chain i: drops what goes to {node}:{{}} at the hook input"
            status, text = await why(health)
            assert (status, drops.format(health) in text, "it does not get through: table inet g" in text) == (
                1,
                True,
                True,
            ), text
            first = priority < 0
            await live.expect(live.front("refusing", "nodeport"), {"outside": "timeout" if first else "refused"})
            status, text = await why(port)
            assert (status, drops.format(port) in text) == (1, first), text
            assert ("unless a firewall of this node drops it first (x)" in text) is first
        finally:
            await live.nft("delete table inet g")


async def test_a_refused_connection_that_this_node_does_not_forward_is_dropped(live: Live) -> None:
    if live.mode.name == "userspace":
        return  # the chains of userspace mode reject elsewhere
    live.service("vacant", "")
    front, pod = live.front("vacant"), live.ips["pod"]["IPv4"]

    async def why() -> str:
        status, text = await live.ask("why", pod, f"{front.address}:80")
        assert status == 1, text
        return text

    await live.expect(front, {"pod": "refused"})
    assert "unless a firewall" not in await why()
    for priority in (-5, 5):
        rule = f"chain f {{ type filter hook forward priority {priority}; ip daddr {front.address} drop; }}"
        await live.nft(f"table inet g {{ {rule}; }}")
        try:
            await live.expect(front, {"pod": "timeout" if priority < 0 else "refused"})
            assert ("unless a firewall of this node drops it first (x)" in await why()) is (priority < 0)
        finally:
            await live.nft("delete table inet g")
    await live.run("sysctl", "-w", "net.ipv4.ip_forward=0")
    try:
        await live.expect(front, {"pod": "timeout", "node": "refused"})
        assert ": dropped, the client sees a timeout: net.ipv4.ip_forward is 0 (x)\n" in await why()
        status, text = await live.ask("why", "node", f"{front.address}:80")
        assert (status, "ip_forward" in text) == (1, False), text
    finally:
        await live.run("sysctl", "-w", "net.ipv4.ip_forward=1")


@pytest.mark.slow("packets that each kind of rule drops")
async def test_causes_that_stop_real_packets_are_named(live: Live) -> None:
    if live.mode.name == "userspace":
        return  # connections end at the proxy
    live.service("met", "b1", type="LoadBalancer")
    front, pod, end = live.front("met"), live.ips["pod"]["IPv4"], live.ips["b1"]["IPv4"]
    command = f"iptables-{live.mode.variant or 'nft'}"
    where = "iptables-legacy -t filter" if command == "iptables-legacy" else "table ip filter"

    async def answer(client: str, place: Front, *said: str) -> None:
        async def check() -> str:
            status, text = await live.ask("why", client, f"{place.address}:80", "--no-probe")
            return "" if status == bool(said) and all(one in text for one in said) else f"{status} {text}"

        await live.eventually(check)

    await live.expect(front, {"pod": "b1"})
    await answer(pod, front)
    for rule, named in (
        (f"-d {end}", f"drops what goes to {end}:3000"),
        (f"-s {end}", f"drops the answers of {end}:3000"),
        (f"-d {end} -i eth+", ""),
        ("-d 10.0.0.0/8 ! -o lo -m conntrack --ctstate NEW", f"drops what goes to {end}:3000"),
    ):
        await live.cluster.exec("node", [command, "-I", "FORWARD", *rule.split(), "-j", "DROP"])
        try:
            await live.expect(front, {"pod": "timeout"} if named else {"pod": "b1"})
            await answer(pod, front, *([f"x  {where}, chain FORWARD: {named}"] if named else []))
        finally:
            await live.cluster.exec("node", [command, "-D", "FORWARD", *rule.split(), "-j", "DROP"])
    await live.run("sysctl", "-w", "net.ipv4.ip_forward=0")
    try:
        await live.expect(front, {"pod": "timeout"})
        await answer(pod, front, "x  net.ipv4.ip_forward is 0: ")
    finally:
        await live.run("sysctl", "-w", "net.ipv4.ip_forward=1")
    await live.expect(front, {"pod": "b1"})
    await answer(pod, front)
    live.service("kept", "b1", type="LoadBalancer", loadBalancerSourceRanges=["198.18.0.0/15"])
    await live.until(lambda: live.cluster.get("services", "kept")["status"]["loadBalancer"].get("ingress"), "a VIP")
    balancer = live.front("kept", "loadbalancer")
    await live.expect(balancer, {"outside": "timeout", "pod": "timeout"})
    outside = live.ips["outside"]["IPv4"]
    await answer(outside, balancer, "is not among the source ranges (198.18.0.0/15)", f"Fix: add {outside}/32 to")
    await answer(pod, balancer, "is not among the source ranges (198.18.0.0/15)", "Fix: have pods use the Service's")
    live.endpoints("met", "")
    await live.expect(front, {"pod": "refused"})
    await answer(pod, front, "refused", "no EndpointSlice of default/met has an IPv4 endpoint")


@pytest.mark.slow("several questions")
async def test_leftovers_for_an_address_are_reported(live: Live) -> None:
    if live.mode.name not in {"nftables", "userspace"}:
        return  # the mode has its own chains there
    live.service("usurped", "a1")
    front = live.front("usurped")
    await live.expect(front, {"pod": "a1"})
    stale, unknown, free = "KUBE-SVC-AAAAAAAAAAAAAAAA", "10.96.200.200", "10.96.200.201"
    jump = "PREROUTING -j KUBE-SERVICES"
    for rule in (
        f"-N {stale}",
        f"-A {stale} -p tcp -j DNAT --to-destination {live.ips['a2']['IPv4']}:3000",
        "-N KUBE-SERVICES",
        f"-I {jump}",
        f"-A KUBE-SERVICES -d {unknown}/32 -p tcp -m tcp --dport 80 -j {stale}",
    ):
        await live.run("iptables-nft", "-t", "nat", *rule.split())
    left = "x  left by another kube-proxy: 2 chains KUBE-... of iptables-nft, with rules for "

    async def asked(target: str, *, caught: bool, passes: bool) -> str:
        status, text = await live.ask("why", live.ips["pod"]["IPv4"], target)
        heading = "another kube-proxy's rules take it first" in text or "another program takes it first" in text
        said = (f"{left}{target}" in text, heading, "Fix: make sure that no other kube-proxy runs" in text)
        return "" if (status, said) == (0 if passes and not caught else 1, (caught,) * 3) else text

    try:
        await live.eventually(lambda: asked(f"{unknown}:80", caught=True, passes=False))
        assert not await asked(f"{unknown}:81", caught=False, passes=False)
        assert not await asked(f"{free}:80", caught=False, passes=False)
        await live.eventually(lambda: asked(f"{front.address}:80", caught=False, passes=True))
        catches = f"KUBE-SERVICES -d {front.address}/32 -p tcp -m tcp --dport 80 -j {stale}"
        await live.run("iptables-nft", "-t", "nat", "-A", *catches.split())
        await live.expect(front, {"pod": "a2"}, "tcp")
        await live.eventually(lambda: asked(f"{front.address}:80", caught=True, passes=True))
        # Packets of the node do not pass PREROUTING.
        status, text = await live.ask("why", "node", f"{front.address}:80")
        assert (status, left in text) == (0, False), text
        await live.run("iptables-nft", "-t", "nat", "-D", *jump.split())  # packets pass no rules any more
        await live.expect(front, {"pod": "a1"}, "tcp")
        await live.eventually(lambda: asked(f"{front.address}:80", caught=False, passes=True))
    finally:
        for rule in ("-F KUBE-SERVICES", f"-F {stale}", f"-D {jump}", "-X KUBE-SERVICES", f"-X {stale}"):
            await live.cluster.exec("node", ["iptables-nft", "-t", "nat", *rule.split()])


async def test_an_address_that_only_the_other_iptables_variant_has_is_reported(live: Live) -> None:
    if live.mode.variant != "nft":
        return
    stale, unknown, jump = "KUBE-SVC-AAAAAAAAAAAAAAAA", "10.96.200.200", "OUTPUT -j KUBE-SERVICES"
    rule = f"KUBE-SERVICES -d {unknown}/32 -p tcp -m tcp --dport 80 -j {stale}"

    async def each(*commands: str) -> None:
        for words in commands:
            await live.cluster.exec("node", ["iptables-legacy", "-t", "nat", *words.split()])

    async def check() -> str:
        # Repeated, because a newly started proxy removes such tables once.
        made = (f"-N {stale}", "-N KUBE-SERVICES", "-F KUBE-SERVICES", f"-F {stale}", f"-A {rule}")
        await each(*made, f"-A {stale} -p tcp -j DNAT --to-destination 10.244.0.9:3000", f"-D {jump}", f"-I {jump}")
        status, text = await live.ask("why", "node", f"{unknown}:80")
        named = "x  both variants of iptables have a kube-proxy's IPv4 chains" in text
        begin = ", unless another kube-proxy's rules take it first, to 10.244.0.9:3000 (x)"
        first = text.splitlines()[0].count(begin) == 1
        return "" if (status, named, first) == (1, True, True) else text

    try:
        await live.eventually(check)
        for client, port in (("node", 81), (live.ips["pod"]["IPv4"], 80)):
            assert "both variants" not in (await live.ask("why", client, f"{unknown}:{port}"))[1]
    finally:
        await each(f"-D {jump}", "-F KUBE-SERVICES", "-X KUBE-SERVICES", f"-F {stale}", f"-X {stale}")


@pytest.mark.slow("several questions")
async def test_a_missing_route_of_the_node_to_the_service_is_reported(live: Live) -> None:
    live.service("routed", "a1")
    front = live.front("routed")
    await live.expect(front, {"node": "a1"})
    await live.run("ip", "route", "add", "unreachable", f"{front.address}/32")
    try:
        await live.expect(front, {"node": "unreachable"}, "tcp")
        status, text = await live.ask("why", "node", f"{front.address}:80")
        wanted = f"x  this node has no route to {front.address}, unreachable {front.address}/32 in table 254"
        assert (status, wanted in text) == (1, True), text
        assert (await live.ask("why", live.ips["pod"]["IPv4"], f"{front.address}:80"))[0] == 0
    finally:
        await live.run("ip", "route", "del", "unreachable", f"{front.address}/32")


async def test_a_leftover_table_for_an_address_is_reported(live: Live) -> None:
    if live.mode.name != "iptables-nft":
        return  # the mode has its own table there
    await live.nft("add table ip kube-proxy")
    await live.nft("add chain ip kube-proxy services")
    await live.nft(
        "add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict; "
        "elements = { 10.96.200.200 . tcp . 80 : goto services } }"
    )
    try:
        status, text = await live.ask("why", "node", "10.96.200.200:80")
        left = "x  left by another kube-proxy: nf_tables table ip kube-proxy, with rules for 10.96.200.200:80: "
        assert (status, left in text) == (1, True), text
        status, text = await live.ask("why", "node", "10.96.200.201:80")
        assert (status, "left by" in text) == (1, False), text
    finally:
        await live.nft("delete table ip kube-proxy")


@pytest.mark.slow("a cluster of its own, two proxies one after the other")
async def test_the_rules_that_nftables_mode_left_are_no_other_programs(bare: Live, tmp_path: Path) -> None:
    if bare.mode.name in {"nftables", "userspace"}:
        return  # the mode has its own table there, or the rule comes too late
    bare.service("moved", "b1", ipFamilies=["IPv4"])
    front, file = bare.front("moved"), tmp_path / "rules"
    await bare.start({"mode": "nftables"})
    await bare.expect(front, {"node": "b1"}, "tcp")
    file.write_text(await bare.nft("list", "table", "ip", "kube-proxy"))
    await bare.proxy.stop()
    await bare.start()
    bare.endpoints("moved", "a1")
    await bare.programmed(front, "a1")
    await bare.nft("-f", str(file))
    status, text = await bare.ask("why", "node", f"{front.address}:80")
    left = "left by another kube-proxy in nftables mode: table ip kube-proxy, chain nat-output: may translate"
    removal = "make sure that no other kube-proxy runs, then restart this one: it removes the other's rules"
    assert (status, left in text, f"Fix: {removal}" in text, text.count("Fix: ")) == (1, True, True, 1), text
    assert "another kube-proxy's rules take it first" in text.partition("\n")[0]
    _, text = await bare.ask("doctor")
    assert (f"Fix: {removal}" in text, "table ip kube-proxy may drop packets too" in text) == (True, False), text


@pytest.mark.slow("several questions")
@pytest.mark.parametrize("table", ["mine", "kube-proxy"])
async def test_a_rule_of_another_table_that_takes_a_connection_first_is_reported(table: str, live: Live) -> None:
    if (table, live.mode.name) == ("kube-proxy", "nftables"):
        return  # the mode has its own table there
    live.service(f"bent-{table}", "a1")
    front, pod = live.front(f"bent-{table}"), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "a1", "node": "a1"})
    end, to = f"ip daddr {front.address} tcp dport 80", f"{live.ips['a2']['IPv4']}:3000"
    left = "left by another kube-proxy in nftables mode: " * (table == "kube-proxy")
    where = f"{left}table ip {table}, chain c"

    async def reported(client: str, lines: Sequence[str], status: int) -> None:
        found, text = await live.ask("why", client, f"{front.address}:80")
        assert (found, [line for line in lines if line not in text]) == (status, []), text
        assert lines or where not in text, text

    for hook, client, other in (("prerouting", "pod", "node"), ("output", "node", "pod")):
        first = f"{where}: translates {front.address}:80 to {to} at the hook {hook}"
        maybe = f"  -  {where}: may translate {front.address}:80{{}} at the hook {hook}"
        program = "kube-proxy" if left else "program"
        taken = [f"another {program} takes it first: {first} (x)\n", f"  x  {first}"]
        for kind, priority, rule, met, lines, status in (
            ("nat", -110, f"{end} dnat to {to}", "a2", taken, 1),
            (
                "nat",
                -110,
                f"dnat ip to ip daddr map {{ {front.address} : {to[:-5]} }}",
                "refused",
                [f"{where}: translates {front.address}:80 to {to[:-5]}:80"],
                1,
            ),
            (
                "nat",
                -110,
                f"{end} redirect to :9",
                "refused",
                ["translates", f"{front.address}:80 to this node, port 9"],
                1,
            ),
            ("nat", -110, f"{end} meta mark 7 dnat to {to}", "a1", [maybe.format(f" to {to}")], 0),
            ("nat", -110, f"{end} dnat to meta mark map {{ 7 : {to[:-5]} }}", "a1", [maybe.format("")], 0),
            ("filter", -150, f"{end} drop", "timeout", [f"it does not get through: {where}: drops"], 1),
            ("nat", -90, f"{end} dnat to {to}", "a1", (), 0),
            ("nat", -110, f"fib daddr type local tcp dport 80 dnat to {to}", "a1", (), 0),
            ("nat", -110, f"iif lo {end} dnat to {to}", "a1", (), 0),
        ):
            await live.nft(
                f"table ip {table} {{ chain c {{ type {kind} hook {hook} priority {priority}; {rule}; }}; }}"
            )
            try:
                await live.expect(front, {client: met, other: "a1"}, "tcp")
                await reported(pod if client == "pod" else "node", lines, status)
                await reported(pod if other == "pod" else "node", (), 0)
            finally:
                await live.nft(f"delete table ip {table}")


async def test_each_policy_keeps_a_client_at_an_endpoint_of_its_own(live: Live) -> None:
    if live.mode.name not in LISTING:
        return  # the kernel does not list clients
    live.service("twice", "a1 b1", type="NodePort", externalTrafficPolicy="Local", sessionAffinity="ClientIP")
    cluster, nodeport = live.front("twice"), live.front("twice", "nodeport")
    await live.expect(nodeport, {"outside": "a1"}, "tcp")
    client = live.ips["outside"]["IPv4"]

    async def said(front: Front, words: str) -> None:
        _, text = await live.ask("why", client, f"{front.address}:{front.port}", "--no-probe")
        assert f"session affinity keeps this client at {words} (read now)" in text, text

    kept = f"{live.ips['a1']['IPv4']}:3000"
    await said(cluster, "no endpoint yet" if live.mode.name == "nftables" else kept)  # iptables mode has one list
    await said(nodeport, kept)


@pytest.mark.quick("pod")
@pytest.mark.parametrize("client", ["pod", "node"])
async def test_a_client_with_affinity_is_shown_its_endpoint(client: str, live: Live) -> None:
    live.service(f"kept-by-{client}", "a1 a2 b1", sessionAffinity="ClientIP")
    front = live.front(f"kept-by-{client}")
    await live.programmed(front, "a1 a2 b1")
    asked = ("why", live.ips["pod"]["IPv4"] if client == "pod" else "node", f"{front.address}:80")
    status, text = await live.ask(*asked)
    assert (status, text.count("  -  33.3% to ")) == (0, 3), text
    (answer,) = await live.cluster.probes(client, "tcp", *front, 1)
    assert isinstance(answer, Answer)
    place = f"{live.ips[answer.pod]['IPv4']}:3000"
    status, text = await live.ask(*asked)
    assert status == 0, text
    if live.mode.name in LISTING:
        assert [line.split(" on ")[0] for line in text.splitlines() if "% to" in line] == [f"  -  100.0% to {place}"]
        assert f"ok session affinity keeps this client at {place} (read now)" in text
        assert text.count(":3000") == 3  # in the probe, too
    else:
        assert "a client that session affinity binds to an endpoint gets only this endpoint" in text


async def test_a_flow_of_the_clients_port_keeps_its_endpoint(live: Live) -> None:
    if live.mode.name == "userspace":
        return  # flows end at the proxy
    live.service("flowing", "a1 b1")
    front, client = live.front("flowing"), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "a1 b1"})
    by_ip = {live.ips[name]["IPv4"]: name for name in ("a1", "b1")}
    with open_socket_in(
        live.cluster.namespace_of("pod"), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ) as sock:
        sock.bind(("0.0.0.0", 40777))
        sock.connect(front)
        sock.send(b"?")
        asked = "why", f"{client}:40777", f"{front.address}:{front.port}/udp", "--no-probe"
        status, text = await live.ask(*asked)
        (end,) = re.findall(r"ok connection tracking keeps the client's port 40777 at (\S+):3000 \(read now\)", text)
        assert (status, end in by_ip, f"100.0% to {end}:3000" in text) == (0, True, True), text
        entries = await live.run("conntrack", "-L", "-p", "udp", "--sport", "40777")
        assert f"src={end} dst={client} sport=3000 dport=40777" in entries
        status, text = await live.ask("why", f"{client}:40778", *asked[2:])
        assert (status, "connection tracking keeps" in text, "50.0% to" in text) == (0, False, True), text
    entry = f"-p udp -s {client} --sport 40779 -d {front.address} --dport {front.port}"
    made = f"-r 10.244.0.99 -q {client} --reply-port-src 3000 --reply-port-dst 40779 -t 300 -u SEEN_REPLY,ASSURED"

    async def reported() -> str:
        """Ask about the flow. A search for stale flows after the change above may still delete this flow."""
        await live.cluster.exec("node", ["conntrack", "-D", *entry.split()])
        await live.run("conntrack", "-I", *entry.split(), *made.split())
        status, text = await live.ask("why", f"{client}:40779", *asked[2:])
        wanted = "at 10.244.0.99:3000 (read now), which is no endpoint of default/flowing", f"`conntrack -D {entry}`"
        alone = text.count("% to ") == text.count("100.0% to 10.244.0.99:3000") == 1
        return "" if status == 1 and alone and all(part in text for part in wanted) else text

    await live.eventually(reported)
    await live.cluster.exec("node", ["conntrack", "-D", *entry.split()])
    assert (await live.ask("why", f"{client}:40779", *asked[2:]))[0] == 0


async def test_clients_on_another_node_are_referred_to_it(live: Live) -> None:
    live.service("remote", "a1 b1", internalTrafficPolicy="Local")
    front = live.front("remote")
    await live.expect(front, {"pod": "a1"})
    client = live.ips["b1"]["IPv4"]
    status, text = await live.ask("why", client, f"{front.address}:80")
    assert status == 2, text
    assert f"{client} -> {front.address}:80/tcp: decided on node-b, where the client is; here it would be: " in text
    assert f"x  {client} is on node-b (nodeName in EndpointSlice default/" in text
    assert f"Fix: ask on node-b: `kube-proxy why {client} {front.address}:80/tcp`" in text
    assert (await live.ask("why", live.ips["a1"]["IPv4"], f"{front.address}:80"))[0] == 0


async def test_clients_outside_the_source_ranges_get_the_range_to_add(live: Live) -> None:
    live.service("guarded", "a1", type="LoadBalancer", loadBalancerSourceRanges=["10.1.0.0/16"])
    await live.until(lambda: live.cluster.get("services", "guarded")["status"]["loadBalancer"].get("ingress"), "a VIP")
    address, port = live.front("guarded", "loadbalancer")
    await live.expect(live.front("guarded", "loadbalancer"), {"outside": "timeout"})
    status, text = await live.ask("why", live.ips["outside"]["IPv4"], f"{address}:{port}")
    assert status == 1
    assert "dropped, the client sees a timeout" in text
    assert "(spec.loadBalancerSourceRanges)" in text
    assert f"Fix: add {live.ips['outside']['IPv4']}/32 to spec.loadBalancerSourceRanges" in text


async def test_a_service_without_ready_endpoints_names_them(live: Live) -> None:
    live.service("down", "a1/unready b1/failed")
    await live.expect(live.front("down"), {"pod": "refused"})
    status, text = await live.ask("why", live.ips["pod"]["IPv4"], "default/down:80")
    assert status == 1
    assert f"not to {live.ips['a1']['IPv4']}:3000: not ready (conditions.ready in EndpointSlice" in text
    assert f"not to {live.ips['b1']['IPv4']}:3000: terminating and no longer serving" in text
    assert "Fix: 1 endpoint is not ready" in text
    live.endpoints("down", "a1/unready b1/draining")
    await live.expect(live.front("down"), {"pod": "b1"})
    status, text = await live.ask("why", live.ips["pod"]["IPv4"], "default/down:80")
    assert (status, "ready endpoints" in text) == (0, False), text
    assert f"100.0% to {live.ips['b1']['IPv4']}:3000 on node-b in zone zone-b, terminating and serving: used as" in text


async def test_a_wrong_target_port_is_noticed(live: Live) -> None:
    live.service("mistyped", "")
    live.endpoints("mistyped", "a1", ports=[{"name": "tcp", "port": 4444, "protocol": "TCP"}])

    async def noticed() -> str:
        status, text = await live.ask("why", "node", "default/mistyped:tcp")
        return "" if status == 1 and "4444: refused" in text else text

    await live.eventually(noticed)
    _, text = await live.ask("why", "node", "default/mistyped:tcp")
    assert f"TCP from this node to {live.ips['a1']['IPv4']}:4444: refused" in text
    assert "is targetPort right" in text


async def test_an_unknown_port_and_an_unknown_address(live: Live) -> None:
    live.service("known", "a1")
    await live.expect(live.front("known"), {"pod": "a1"})
    address = live.front("known").address
    status, text = await live.ask("why", live.ips["pod"]["IPv4"], f"{address}:81")
    assert status == 1
    assert "no such port; default/known has 80/TCP, 80/UDP there" in text
    status, text = await live.ask("why", live.ips["pod"]["IPv4"], "198.51.100.77:80")
    assert (status, "no Service has this address" in text) == (1, True)


@pytest.mark.quick("words0")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("why", "nobody", "10.96.0.1:443"), "'nobody' is no IP address"),
        (("why", "10.0.0.1", "10.96.0.1"), "has no port"),
        (("why", "10.0.0.1", "fd00::1:443"), "has no port"),
        (("why", "10.0.0.1", "[fd00::1]:443"), "different IP families"),
        (("why", "node", "default/none:80"), "no Service default/none that is watched"),
        (("why", "node", "10.96.0.1:99999"), "from 1 to 65535"),
    ],
)
async def test_an_invalid_value_is_reported_with_the_valid_ones(live: Live, words: tuple[str, ...], said: str) -> None:
    status, text = await live.ask(*words)
    assert (status, said in text) == (2, True), text


async def test_services_lists_all_or_one(live: Live) -> None:
    live.service("listed", "a1 b1")
    await live.expect(live.front("listed"), {"pod": "a1 b1"})
    status, text = await live.ask("services")
    assert status == 0
    assert any(line.split()[:3] == ["default/listed", "programmed", "2"] for line in text.splitlines()), text
    status, text = await live.ask("services", "listed", "-o", "json")
    assert status == 0
    made = json.loads(text)
    assert (made["state"], len(made["ports"][0]["endpoints"])) == ("programmed", 2)
    status, text = await live.ask("services", "default/listed")
    assert status == 0
    assert f"endpoints    {live.ips['a1']['IPv4']}:3000" in text
    # Shell completion, also without a proxy.
    socket = str(live.proxy.control)
    assert names("default/lis", socket) == ["default/listed"]
    assert names("default/listed:", socket) == ["default/listed:80", "default/listed:80/udp"]
    assert (names("default/listed:8", socket + ".gone"), names("nothing", socket)) == ([], [])
    status, text = await live.ask("services", "nothing")
    assert (status, "Error: no Service default/nothing" in text) == (2, True)


@pytest.mark.slow("a cluster of its own")
async def test_a_proxy_without_a_list_reports_it_for_all_services(bare: Live) -> None:
    bare.service("before")
    await bare.start()
    assert (await bare.ask("services", "before"))[0] == 0
    await bare.proxy.stop()
    await bare.cluster.server.refuse()
    await bare.start(ready_within=None)

    async def check() -> str:
        for words in ("why node before:80", "services", "flows before", "plan --cluster-cidr 10.0.0.0/8", "verify"):
            status, text = await bare.ask(*words.split())
            if status != 2 or "never had a list" not in text or "API server cannot be reached at" not in text:
                return f"{words}: {status} {text}"
        return ""

    await bare.eventually(check)
    _, text = await bare.ask("trace", "node", "{}:{}".format(*bare.front("before")))
    assert "no Service has this address" not in text, text


async def test_only_root_may_ask(live: Live) -> None:
    mode = live.proxy.control.stat().st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)


async def test_endpoints_that_answer_a_client_outside_directly_for_want_of_a_pod_network_are_reported(
    bare: Live,
) -> None:
    await bare.start({"clusterCIDR": "10.244.0.0/16"})
    for family, kept in (("IPv4", False), ("IPv6", bare.mode.name != "userspace")):
        for number, ends in enumerate(("a1", "b1")):
            name = f"kept{number}-{family.lower()}"
            bare.service(name, ends, ipFamilies=[family], type="NodePort")
            front, ported = bare.front(name, family=family), bare.front(name, "nodeport", family)
            await bare.programmed(front, ends)
            for client in ("outside", "pod", "a2", "node"):
                lost = kept and (client, ends) == ("outside", "b1")
                answers = await bare.cluster.probes(client, "tcp", *front, 1)
                assert [str(answer) == "timeout" for answer in answers] == [lost], (client, ends, answers)
                source = client if client == "node" else bare.ips[client][family]
                status, text = await bare.ask("why", source, f"default/{name}:tcp")
                assert (status, "clusterCIDR has no IPv6 network" in text.partition("\n")[0]) == (lost, lost), text
                assert ("Fix: add the IPv6 network of all nodes' pods to clusterCIDR" in text) is lost, text
            answers = await bare.cluster.probes("outside", "tcp", *ported, 1)
            assert [answer.pod for answer in answers] == [ends]
            place = f"[{ported.address}]" if family == "IPv6" else ported.address
            status, text = await bare.ask("why", bare.ips["outside"][family], f"{place}:{ported.port}")
            assert status == 0, text
    status, text = await bare.ask("plan", "--cluster-cidr", "10.244.0.0/16,fd00:244::/32")
    lost = "IPv6 cluster IPs, for outside: served, except that answers of endpoints on other nodes bypass this node"
    assert (status, lost in text) == ((0, False) if bare.mode.name == "userspace" else (1, True)), text
