"""`kube-proxy trace` with a running proxy: it names the rule that drops a packet, of any program."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from lab.netns import open_socket_in, run_in
from lab.proxyprocess import proxy_command
from support.answers import valid
from support.live import Front, Live, slice_of
from support.modes import modes
from support.owned import owned_table
from support.tracked_flows import fill, flush, limit

pytestmark = modes("nftables", "iptables-nft", "userspace")


@asynccontextmanager
async def firewall(live: Live, chain: str, hook: str, rule: str) -> AsyncIterator[None]:
    """Return a table of another program that has one rule."""
    text = f"add table inet firewall; add chain inet firewall {chain} {{ type filter hook {hook} priority 10; }}"
    await live.nft(f"{text}; add rule inet firewall {chain} {rule}")
    try:
        yield
    finally:
        await live.nft("delete", "table", "inet", "firewall")


async def tracing(live: Live, place: str, front: Front, *more: str, proto: str = "tcp") -> tuple[int, str]:
    """Trace the packets of a place while it sends requests."""
    target = f"{front.address}:{front.port}/{proto}"
    words = ("trace", live.ips[place]["IPv4"], target, "--no-send", "--seconds", "6", *more)
    asked = asyncio.ensure_future(live.ask(*words))
    while not asked.done():
        await live.cluster.probe(place, proto, *front, 0.3, None)
        await asyncio.sleep(0.1)
    return await asked


async def test_a_passing_packet_is_reported_with_the_answering_endpoint(live: Live) -> None:
    live.service("reached", "a1")
    front = live.front("reached")
    await live.expect(front, {"pod": "a1"})
    status, text = await tracing(live, "pod", front, "--packets", "1")
    assert status == 0, text
    if live.mode.name == "userspace":
        assert "nothing here dropped it, and the proxy answered" in text
    else:
        assert f"nothing here dropped it, and {live.ips['a1']['IPv4']}:3000 answered" in text
        assert "an endpoint is picked" in text
    assert "request " in text
    assert "answer " in text
    assert "kube-proxy-trace" not in text
    assert "kube-proxy-trace" not in await live.nft("list", "tables")


async def test_the_node_sends_a_packet_of_its_own(live: Live) -> None:
    live.service("own", "a1 b1")
    front = live.front("own")
    await live.expect(front, {"node": "a1 b1"})
    status, text = await live.ask("trace", "node", "default/own:80")
    assert status == 0, text
    assert "answered" in text
    status, text = await live.ask("trace", "node", "default/own:80", "--packets", "3", "-o", "json")
    assert (status, valid("trace", text)["departed"]) == (0, False), text
    begun = {one["source"] for one in json.loads(text)["journeys"] if one["direction"] == "request"}
    assert len(begun) == 3, "one a second"


async def test_packets_are_sent_from_the_network_namespace_of_a_pod(live: Live) -> None:
    live.service("from-a-pod", "b1")
    front, client = live.front("from-a-pod"), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "b1"})
    words = ("trace", client, "default/from-a-pod:80")
    status, text = await live.ask(*words)
    assert (status, f"-> {front.address}:80/tcp, sent from its network namespace\n" in text) == (0, True), text
    assert f"request {client}:" in text
    for family, protocol in (("IPv4", "udp"), ("IPv6", "tcp")):
        if family not in live.cluster.get("services", "from-a-pod")["spec"]["ipFamilies"]:
            continue
        target = f"{live.front('from-a-pod', family=family).address}:80/{protocol}"
        status, text = await live.ask("trace", live.ips["pod"][family], target, "--packets", "2", "-o", "json")
        found = valid("trace", text)
        assert (found["sent"], {one["direction"] for one in found["journeys"]} >= {"request"}) == (True, True), text
    status, text = await live.ask("trace", client, f"{front.address}:80/sctp", "--seconds", "0.5")
    assert (status, "only TCP and UDP packets are sent. Tracing for 0.5 s: let " in text) == (2, True), text
    hook = "input" if live.mode.name == "userspace" else "forward"
    async with firewall(live, "guard", hook, f"ct original ip daddr {front.address} counter drop"):
        status, text = await live.ask(*words)
    assert (status, "Verdict: the request was dropped by rule" in text) == (1, True), text
    # The pod's own rules see the packet before those of the node.
    await live.run("iptables", "-A", "OUTPUT", "-d", front.address, "-j", "DROP", place="pod")
    try:
        status, text = await live.ask(*words, "--seconds", "1")
    finally:
        await live.run("iptables", "-D", "OUTPUT", "-d", front.address, "-j", "DROP", place="pod")
    assert (status, "a packet was sent, but none of this flow arrived on this node" in text) == (2, True), text


async def test_without_the_right_to_enter_a_namespace_the_pods_own_packets_are_awaited(live: Live) -> None:
    live.service("unentered", "a1")
    front, client = live.front("unentered"), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "a1"})
    denied = ["setpriv", "--bounding-set", "-sys_admin", "--", proxy_command(), "trace", client]
    command = [*denied, f"{front.address}:{front.port}", "--control-socket", str(live.proxy.control)]
    asked = asyncio.ensure_future(live.cluster.exec("node", [*command, "--packets", "1"]))
    while not asked.done():
        await live.cluster.probe("pod", "tcp", *front, 0.3, None)
    status, out, err = await asked
    assert (status, "nothing here dropped it" in out) == (0, True), out + err
    reason = (
        f"cannot send from the network namespace of {client}: it needs CAP_SYS_ADMIN and the node's folder /run/netns"
    )
    assert reason in err
    assert "Fix: with the chart set podTrace, " in err
    assert f"Tracing for 10 s: let {client} connect now\n" in err
    status, out, err = await live.cluster.exec("node", [*command, "--send"])
    assert (status, out, reason in err) == (2, "", True), err


async def test_a_rule_of_another_program_that_drops_is_named(live: Live) -> None:
    live.service("firewalled", "b1")
    front = live.front("firewalled")
    await live.expect(front, {"pod": "b1"})
    # In userspace mode the connection from the pod ends on this node.
    hook = "input" if live.mode.name == "userspace" else "forward"
    async with firewall(live, "guard", hook, f"ct original ip daddr {front.address} counter drop"):
        status, text = await tracing(live, "pod", front, "--packets", "1")
    assert status == 1, text
    (verdict,) = re.findall(r"Verdict: (.*)", text)
    assert verdict.startswith("the request was dropped by rule"), text
    assert "drop" in verdict
    assert "of table inet firewall, chain guard, which is not ours" in verdict


async def test_leftover_chains_are_distinguished_from_the_running_proxys(live: Live) -> None:
    if live.mode.name not in {"nftables", "userspace"}:
        return  # the mode has its own chains there
    live.service("usurped", "a1")
    front = live.front("usurped")
    await live.expect(front, {"node": "a1"})
    stale, gone = "KUBE-SVC-AAAAAAAAAAAAAAAA", f"{live.ips['b1']['IPv4']}:3000"
    jump = ["OUTPUT", "-d", front.address, "-j", stale]
    await live.run("iptables-nft", "-t", "nat", "-N", stale)
    await live.run("iptables-nft", "-t", "nat", "-A", stale, "-p", "tcp", "-j", "DNAT", "--to-destination", gone)
    await live.run("iptables-nft", "-t", "nat", "-I", *jump)
    try:
        _, text = await live.ask("trace", "node", f"{front.address}:80")
    finally:
        await live.run("iptables-nft", "-t", "nat", "-D", *jump)
        await live.run("iptables-nft", "-t", "nat", "-F", stale)
        await live.run("iptables-nft", "-t", "nat", "-X", stale)
    assert "left by another kube-proxy: an endpoint is picked" in text
    assert f"rules that another kube-proxy left in table ip nat chose {gone}, not the running proxy" in text


async def test_an_unreachable_choice_of_leftover_chains_is_no_failure_of_an_endpoint(live: Live) -> None:
    if live.mode.name != "nftables":
        return
    live.service("misled", "a1")
    front, gone = live.front("misled"), "10.244.0.99:3000"
    await live.expect(front, {"pod": "a1"})
    stale = "KUBE-SVC-BBBBBBBBBBBBBBBB"
    jump = ["PREROUTING", "-d", front.address, "-j", stale]
    await live.run("iptables-nft", "-t", "nat", "-N", stale)
    await live.run("iptables-nft", "-t", "nat", "-A", stale, "-p", "tcp", "-j", "DNAT", "--to-destination", gone)
    await live.run("iptables-nft", "-t", "nat", "-I", *jump)
    try:
        sent = await live.ask("trace", live.ips["pod"]["IPv4"], f"{front.address}:80")
        status, text = await tracing(live, "pod", front, "--packets", "100")
    finally:
        await live.run("iptables-nft", "-t", "nat", "-D", *jump)
        await live.run("iptables-nft", "-t", "nat", "-F", stale)
        await live.run("iptables-nft", "-t", "nat", "-X", stale)
    (verdict,) = re.findall(r"Verdict: (.*)", text)
    assert status == 1, text
    assert f"chose {gone}, not the running proxy, and it is no endpoint of default/misled" in verdict, text
    assert f"this node could not reach {gone} (host unreachable)" in verdict, text
    assert (sent[0], "nothing answers ARP for 10.244.0.99 (" in sent[1], "no route" in sent[1]) == (1, True, False)


async def test_a_rule_that_sends_a_service_to_an_address_that_is_no_endpoint_is_named(live: Live) -> None:
    if live.mode.name in {"ipvs", "userspace"}:
        return
    live.service("taken", "a1")
    front, other = live.front("taken"), f"{live.ips['b1']['IPv4']}:3000"
    await live.expect(front, {"pod": "a1"})
    rule = f"ip daddr {front.address} tcp dport {front.port} dnat to {other}"
    chain = "type nat hook prerouting priority -110;"
    try:
        await live.run("nft", f"add table ip fx; add chain ip fx p {{ {chain} }}; add rule ip fx p {rule}")
        status, text = await tracing(live, "pod", front, "--packets", "1")
    finally:
        await live.run("nft", "delete table ip fx")
    (verdict,) = re.findall(r"Verdict: (.*)", text)
    assert (status, f"{other} answered; {other} is no endpoint of default/taken" in verdict) == (1, True), text
    assert f'dnat to {other}" of table ip fx, chain p, which is not ours, chose it' in verdict, text


async def test_a_policy_that_drops_is_named(live: Live) -> None:
    live.service("closed", "a1")
    front = live.front("closed")
    await live.expect(front, {"node": "a1"})
    text = "add table ip closed; add chain ip closed out { type filter hook output priority 20; policy drop; }"
    accept = "add rule ip closed out ip daddr != { " + f"{front.address}, {live.ips['a1']['IPv4']}" + " } accept"
    await live.nft(f"{text}; {accept}; add rule ip closed out oif lo accept")
    try:
        status, text = await live.ask("trace", "node", f"{front.address}:80")
    finally:
        await live.nft("delete", "table", "ip", "closed")
    if live.mode.name == "userspace":
        assert (status, "the proxy answered" in text) == (0, True), text  # over loopback, which the rule accepts
        return
    assert status == 1, text
    assert "dropped by the policy of table ip closed, chain out, which is not ours" in text


async def test_a_dropped_reply_is_distinguished_from_the_request(live: Live) -> None:
    live.service("mute", "b1")
    front = live.front("mute")
    await live.expect(front, {"node": "b1"})
    async with firewall(live, "back", "input", f"ct direction reply ct original ip daddr {front.address} drop"):
        status, text = await live.ask("trace", "node", f"{front.address}:80")
    assert status == 1, text
    assert "the answer was dropped by rule" in text
    assert "chain back, which is not ours" in text


async def test_our_refusals_are_reported_with_a_reason(live: Live) -> None:
    live.service("unserved", "", externalIPs=[live.ips["node"]["IPv4"]])
    live.service("distant", "b1", internalTrafficPolicy="Local")
    front, nobody = live.front("unserved"), "no endpoint anywhere takes new connections"
    await live.expect(front, {"node": "refused"})
    await live.expect(live.front("distant"), {"node": "timeout"}, "tcp")
    for target, verb, cause in (
        (f"{front.address}:80", "refused", nobody),
        (f"{live.ips['node']['IPv4']}:80", "refused", nobody),
        ("default/distant:80", "dropped", "policy Local, and none of the Service's endpoints is on this node"),
    ):
        status, text = await live.ask("trace", "node", target)
        assert status == 1, text
        (verdict,) = re.findall(r"Verdict: (.*)", text)
        assert verdict.startswith(f"the request was {verb} by rule"), verdict
        assert "which is ours: " in verdict
        assert verdict.endswith(f"; no rule of the proxy translates it: {cause}"), verdict


async def test_an_endpoint_that_does_not_answer_is_not_blamed_on_a_rule(live: Live) -> None:
    live.service("deaf", "a2")
    front = live.front("deaf")
    await live.expect(front, {"pod": "a2"})
    await live.run(
        "nft",
        "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; "
        "add rule inet deaf in tcp dport 3000 drop",
        place="a2",
    )
    try:
        status, text = await live.ask("trace", "node", f"{front.address}:80")
    finally:
        await live.run("nft", "delete", "table", "inet", "deaf", place="a2")
    if live.mode.name == "userspace":
        assert (status, "the proxy answered" in text) == (0, True), text
        return
    assert status == 1, text
    assert f"it left by cbr0, and connection tracking saw no answer of {live.ips['a2']['IPv4']}:3000" in text


async def test_an_endpoint_without_an_answer_is_distinguished_from_an_answering_one(live: Live) -> None:
    if live.mode.name == "userspace":
        return  # the proxy answers
    live.service("halved", "a1 a2")
    front = live.front("halved")
    await live.expect(front, {"node": "a1 a2"})
    ends = {name: f"{live.ips[name]['IPv4']}:3000" for name in ("a1", "a2")}
    table = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; "
    await live.run("nft", table + "add rule inet deaf in tcp dport 3000 drop", place="a2")
    try:
        for _ in range(8):  # with a probability of 1 in 2^8 all connections of a trace get the same endpoint
            status, text = await live.ask("trace", "node", f"{front.address}:80", "--packets", "8")
            if f"{ends['a1']} answered" in text and "(no answer)" in text:
                break
    finally:
        await live.run("nft", "delete", "table", "inet", "deaf", place="a2")
    assert status == 1, text
    assert re.search(rf"{ends['a1']} answered; {ends['a2']} did not \(\d connections?\)", text), text


@pytest.mark.slow("a table of connections that is full")
async def test_a_full_connection_table_is_the_cause(live: Live) -> None:
    live.service("crowded", "a1")
    front, namespace = live.front("crowded"), live.cluster.namespace_of("node")
    await live.expect(front, {"node": "a1"})
    run_in(namespace, flush)
    most = run_in(namespace, limit)
    assert run_in(namespace, lambda: fill(most + 10)) >= most
    try:
        answers = [await live.ask("trace", one, f"{front.address}:80") for one in ("node", live.ips["pod"]["IPv4"])]
    finally:
        run_in(namespace, flush)
    for status, text in answers:
        assert status == 1, text
        assert "Verdict: no rule dropped it, but connection tracking is 100% full: " in text, text


@pytest.mark.parametrize(("family", "gone"), [("IPv4", "10.244.0.99"), ("IPv6", "fd00:244::99")])
async def test_an_address_that_nothing_has_is_named(family: str, gone: str, live: Live) -> None:
    if live.mode.name == "userspace":
        return  # the proxy answers
    name = f"ghost-{family.lower()}"
    live.service(name, ipFamilies=[family])
    ends = [{"addresses": [gone], "conditions": {"ready": True}, "nodeName": "node-a"}]
    live.cluster.store.put("endpointslices", slice_of(name, family, ends))
    front = live.front(name, family=family)
    await live.expect(front, {"node": "timeout"}, "tcp")
    place = f"[{front.address}]" if family == "IPv6" else front.address
    silent = f"nothing answers {'ARP' if family == 'IPv4' else 'neighbour discovery'} for {gone} ("
    for target in (f"{place}:80", f"{'[' + gone + ']' if family == 'IPv6' else gone}:3000"):
        status, text = await live.ask("trace", "node", target)
        assert (status, silent in text, "left this node" in text) == (1, True, False), text
    for client in ("node", live.ips["pod"][family]):
        status, text = await live.ask("why", client, f"{place}:80")
        assert (status, f", as {silent}" in text.splitlines()[0]) == (1, True), text
        assert "Fix: nothing on this node's links has the address " in text, text
    if family == "IPv4":
        status, text = await tracing(live, "pod", front, "--packets", "100")
        assert (status, silent in text) == (1, True), text


async def test_an_address_that_nothing_has_among_endpoints_is_named(live: Live) -> None:
    if live.mode.name == "userspace":
        return  # the proxy answers
    live.service("half-gone", "a1")
    await live.expect(live.front("half-gone"), {"node": "a1"})
    ends = [
        {"addresses": [one], "conditions": {"ready": True}, "nodeName": "node-a"}
        for one in ("10.244.0.98", live.ips["a1"]["IPv4"])
    ]
    live.cluster.store.put("endpointslices", slice_of("half-gone", "IPv4", ends))
    for client in ("node", live.ips["pod"]["IPv4"]):
        for _ in range(8):
            status, text = await live.ask("trace", client, "default/half-gone:80", "--packets", "8")
            if "nothing answers ARP for 10.244.0.98 (" in text and " answered; " in text:
                break
        assert (status, f"{live.ips['a1']['IPv4']}:3000 answered; " in text) == (1, True), text
        assert "nothing answers ARP for 10.244.0.98 (" in text, text


async def test_a_refusing_endpoint_is_distinguished_from_an_answering_one(live: Live) -> None:
    live.service("mistyped", "")
    live.endpoints("mistyped", "b1", ports=[{"name": "tcp", "port": 4444, "protocol": "TCP"}])
    front = live.front("mistyped")

    async def refused() -> str:
        status, text = await live.ask("trace", "node", f"{front.address}:80")
        where = (
            "the proxy" if live.mode.name == "userspace" else f"{live.ips['b1']['IPv4']}:4444 refused it with a reset"
        )
        return "" if where in text and status == (0 if live.mode.name == "userspace" else 1) else text

    await live.eventually(refused)


async def test_missing_packets_are_reported(live: Live) -> None:
    status, text = await live.ask("trace", "192.0.2.77", "10.96.77.77:80", "--seconds", "0.5")
    assert (status, "no packet of this flow arrived" in text) == (2, True), text


@pytest.mark.slow("traces that are killed")
async def test_the_table_goes_with_the_command_however_it_ends(live: Live, tmp_path: Path) -> None:
    words = [proxy_command(), "trace", "192.0.2.77", "10.96.77.77:80", "--seconds", "60"]
    number = tmp_path / "pid"
    noted = ["sh", "-c", 'echo $$ >"$0"; exec "$@"', str(number), *words]
    running = asyncio.ensure_future(live.cluster.exec("node", noted))

    async def marks() -> str:
        return "" if "kube-proxy-trace" in await live.nft("list", "tables") else "no table marks packets yet"

    await live.eventually(marks)
    os.kill(int(number.read_text()), signal.SIGKILL)
    await running
    assert "kube-proxy-trace" not in await live.nft("list", "tables")


async def test_udp_and_json(live: Live) -> None:
    live.service("datagrams", "a1")
    front = live.front("datagrams")
    await live.expect(front, {"pod": "a1"})
    status, text = await tracing(live, "pod", front, "--packets", "1", "-o", "json", proto="udp")
    assert status == 0, text
    found = json.loads(text)
    assert found["verdict"]["passed"] is True
    assert {one["direction"] for one in found["journeys"]} == {"request", "answer"}


async def test_why_goes_on_with_a_trace(live: Live) -> None:
    live.service("explained", "a1")
    front = live.front("explained")
    await live.expect(front, {"node": "a1"})
    async with firewall(live, "late", "postrouting", f"ct original ip daddr {front.address} drop"):
        status, text = await live.ask("why", "node", "default/explained:80", "--no-probe", "--trace", "-o", "json")
    assert status == 1, text
    found = json.loads(text)
    assert found["why"]["outcome"] == "forwarded"
    assert "table inet firewall, chain late, which is not ours" in found["trace"]["verdict"]["text"]


async def trace_of_datagrams(live: Live, sock: socket.socket, front: Front) -> tuple[int, str]:
    """Trace a UDP client of the place `pod` that sends from one port."""
    target = f"{front.address}:{front.port}/udp"
    words = ("trace", live.ips["pod"]["IPv4"], target, "--no-send", "--seconds", "6", "--packets", "3")
    asked = asyncio.ensure_future(live.ask(*words))
    while not asked.done():
        with suppress(OSError):  # an ICMP error
            sock.send(b"?")
        await asyncio.sleep(0.5)
    return await asked


async def test_an_answer_before_the_trace_is_not_taken_for_one_during_it(live: Live) -> None:
    live.service("silenced", "a2")
    front = live.front("silenced")
    await live.expect(front, {"pod": "a2"})
    if live.mode.name == "userspace":
        return  # the proxy answers there
    with open_socket_in(
        live.cluster.namespace_of("pod"), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ) as sock:
        sock.settimeout(5.0)
        sock.connect(front)
        for _ in range(2):
            sock.send(b"?")
            sock.recv(2048)
        assert (await trace_of_datagrams(live, sock, front))[0] == 0
        table = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; "
        await live.run("nft", table + "add rule inet deaf in udp dport 3000 drop", place="a2")
        try:
            status, text = await trace_of_datagrams(live, sock, front)
        finally:
            await live.run("nft", "delete", "table", "inet", "deaf", place="a2")
    assert status == 1, text
    where = f"{live.ips['a2']['IPv4']}:3000"
    assert f"no answer of {where} came during the trace; the connection was answered earlier" in text
    assert "no endpoint of" not in text


@pytest.mark.slow("retransmissions")
async def test_an_open_connection_to_a_silent_endpoint_counts_as_unanswered(live: Live) -> None:
    live.service("hushed", "a2")
    front = live.front("hushed")
    await live.expect(front, {"pod": "a2"})
    if live.mode.name == "userspace":
        return
    with open_socket_in(live.cluster.namespace_of("pod"), lambda: socket.create_connection(front, timeout=5.0)) as sock:
        table = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; "
        await live.run("nft", table + "add rule inet deaf in tcp dport 3000 drop", place="a2")
        try:
            asked = asyncio.ensure_future(
                live.ask(
                    "trace", live.ips["pod"]["IPv4"], f"{front.address}:{front.port}", "--no-send", "--seconds", "6"
                )
            )
            while not asked.done():
                sock.send(b"G")
                await asyncio.sleep(0.5)
            status, text = await asked
        finally:
            await live.run("nft", "delete", "table", "inet", "deaf", place="a2")
    assert status == 1, text
    assert f"no answer of {live.ips['a2']['IPv4']}:3000 came during the trace; the connection was answered" in text


async def test_a_new_connection_that_untraced_legacy_rules_redirect_is_not_ascribed_to_an_older_entry(
    live: Live,
) -> None:
    if live.mode.name == "userspace":
        return
    live.service("diverted", "a1")
    front, other = live.front("diverted"), f"{live.ips['b1']['IPv4']}:3000"
    await live.expect(front, {"node": "a1"})
    svc, sep = "KUBE-SVC-AAAAAAAAAAAAAAAA", "KUBE-SEP-AAAAAAAAAAAAAAAA"
    jumps = [f"{hook} -j KUBE-SERVICES" for hook in ("PREROUTING", "OUTPUT")]
    made = [
        *(f"-N {chain}" for chain in (sep, svc, "KUBE-SERVICES")),
        f"-A KUBE-SERVICES -d {front.address}/32 -p tcp --dport 80 -j {svc}",
        f"-A {svc} -j {sep}",
        f"-A {sep} -p tcp -j DNAT --to-destination {other}",
        *(f"-I {jump}" for jump in jumps),
    ]
    chains = ("KUBE-SERVICES", svc, sep)
    unmade = [*(f"-D {jump}" for jump in jumps), *(f"-F {one}" for one in chains), *(f"-X {one}" for one in chains)]

    async def legacy(*commands: str) -> None:
        for words in commands:
            await live.cluster.exec("node", ["iptables-legacy", "-t", "nat", *words.split()])

    async def reported() -> str:
        await legacy(*unmade, *made)  # repeated, because a newly started proxy removes such tables once
        _, text = await live.ask("trace", "node", "default/diverted:80")
        chosen = f"{other} is no endpoint of default/diverted, and rules of this node chose it for this new connection"
        cause = "both variants" if live.mode.name == "iptables-nft" else "left by another kube-proxy: "
        wanted = chosen, f"{chosen}; the kernel does not trace iptables-legacy: {cause}", "restart "
        return "" if all(part in text for part in wanted) and "conntrack -D" not in text else text

    try:
        await live.eventually(reported)
    finally:
        await legacy(*unmade)


@pytest.mark.slow("a trace of several seconds")
async def test_an_established_connection_to_a_removed_endpoint_is_not_to_be_removed(live: Live) -> None:
    if live.mode.name == "userspace":
        return
    live.service("outlived", "a1")
    front, client = live.front("outlived"), live.ips["pod"]["IPv4"]
    end = f"{live.ips['a1']['IPv4']}:3000"
    await live.expect(front, {"pod": "a1"})
    with open_socket_in(live.cluster.namespace_of("pod"), lambda: socket.create_connection(front, timeout=5.0)) as sock:
        live.endpoints("outlived", "b1")
        await live.expect(front, {"pod": "b1"})
        port = sock.getsockname()[1]
        status, text = await live.ask("why", f"{client}:{port}", f"{front.address}:{front.port}")
        note = f"  -  connection tracking keeps the client's port {port} at {end} (read now), which is no endpoint of "
        assert (status, note in text, "conntrack -D" in text) == (0, True, False), text
        assert (f"100.0% to {end}" in text, text.count("% to ")) == (True, 1), text
        words = ("trace", client, f"{front.address}:{front.port}", "--no-send", "--seconds", "4")
        asked = asyncio.ensure_future(live.ask(*words))
        while not asked.done():
            sock.send(b"G")
            await asyncio.sleep(0.3)
        status, text = await asked
    assert (status, f"{end} is no endpoint of default/outlived" in text, "conntrack -D" in text) == (0, True, False), (
        text
    )
    assert "an established connection continues as long as this address answers" in text


async def test_a_flow_to_an_address_that_is_no_endpoint_is_reported_with_its_removal(live: Live) -> None:
    live.service("pinned", "a2")
    front = live.front("pinned")
    await live.expect(front, {"pod": "a2"})
    if live.mode.name == "userspace":
        return
    client, gone = live.ips["pod"]["IPv4"], "10.244.0.99"
    entry = f"-p udp -s {client} --sport 40123 -d {front.address} --dport {front.port}"
    made = f"-r {gone} -q {client} --reply-port-src 3000 --reply-port-dst 40123 -t 300 -u SEEN_REPLY,ASSURED"

    async def reported() -> str:
        """Trace the flow. A search for stale flows after the change above may still delete this flow."""
        await live.cluster.exec("node", ["conntrack", "-D", *entry.split()])
        await live.run("conntrack", "-I", *entry.split(), *made.split())
        with open_socket_in(
            live.cluster.namespace_of("pod"), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        ) as sock:
            sock.bind(("0.0.0.0", 40123))
            sock.connect(front)
            status, text = await trace_of_datagrams(live, sock, front)
        wanted = f"{gone}:3000 is no endpoint of default/pinned", f"conntrack -D {entry}"
        return "" if status == 1 and all(part in text for part in wanted) else text

    await live.eventually(reported)
    await live.run("conntrack", "-D", *entry.split())


async def traced_with(live: Live, name: str, chain: str, rule: str) -> str:
    """Return the verdict on a packet from `pod` to a Service with endpoint b1, with another program's rule."""
    live.service(name, "b1")
    front, client = live.front(name), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "b1"})
    words = rule.format(client=client, front=front.address, end=live.ips["b1"]["IPv4"])
    await live.nft(f"add table ip foreign; add chain ip foreign other {{ {chain} }}; add rule ip foreign other {words}")
    try:
        status, text = await live.ask("trace", client, f"default/{name}:80")
    finally:
        await live.nft("delete", "table", "ip", "foreign")
    assert status == 1, text
    return text.partition("Verdict: ")[2]


async def test_a_rule_that_rewrites_the_source_is_named(live: Live) -> None:
    if live.mode.name == "userspace":
        return  # the proxy answers
    chain, rule = "type nat hook postrouting priority 90;", "ip saddr {client} ip daddr {end} snat to 192.0.2.9"
    verdict = await traced_with(live, "rewritten", chain, rule)
    assert 'snat to 192.0.2.9" of table ip foreign, chain other, which is not ours, gives it the source 192' in verdict


async def test_a_rule_that_takes_requests_out_of_connection_tracking_is_named(live: Live) -> None:
    chain = "type filter hook prerouting priority -300;"
    verdict = await traced_with(live, "untracked", chain, "ip daddr {front} notrack")
    assert verdict.startswith("rule"), verdict
    assert 'notrack" of table ip foreign, chain other, which is not ours, takes the request out of conn' in verdict
    assert "so no rule translates it to an endpoint of default/untracked" in verdict


@pytest.mark.slow("a table that another program owns")
async def test_a_table_that_another_program_owns_is_the_cause_of_untranslated_packets(live: Live) -> None:
    if live.mode.name != "nftables":
        return
    live.service("disowned", "a1")
    front = live.front("disowned")
    await live.expect(front, {"node": "a1"})
    with owned_table(live.proxy.namespace):

        async def reported() -> str:
            status, text = await live.ask("trace", "node", "default/disowned:80")
            cause = "no rule translated it to an endpoint of default/disowned: the kernel refuses changes of IPv4: "
            return "" if (status, cause in text, "chose it" in text) == (1, True, False) else text

        await live.eventually(reported)
    await live.expect(front, {"node": "a1"})
