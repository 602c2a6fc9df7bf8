"""`kube-proxy why` predicts the outcome of real packets under rules of conntrack, routing, and other programs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lab.proxyprocess import proxy_command
from lab.topology import NODE_A
from support.live import Front, Live, slice_of
from support.modes import modes

pytestmark = modes("nftables", "iptables-nft", "iptables-legacy")

FAILED = "timeout unreachable refused"


@asynccontextmanager
async def changed(live: Live, *commands: tuple[str, str]) -> AsyncIterator[None]:
    """Run commands on the node, each with the command that reverses it."""
    done = []
    try:
        for made, undone in commands:
            await live.run(*made.split())
            done.append(undone)
        yield
    finally:
        for undone in reversed(done):
            await live.run(*undone.split())


def table(family: str, chain: str, rule: str) -> tuple[str, str]:
    """Return the commands that add and delete a table `other` with a base chain `c` and one rule."""
    hook, priority = chain.split()
    text = f"table {family} other {{ chain c {{ type filter hook {hook} priority {priority}; {rule}; }}; }}"
    return "nft " + text, f"nft delete table {family} other"


def rule(family: str, text: str) -> tuple[str, str]:
    return f"ip {family} rule add pref 77 {text}", f"ip {family} rule del pref 77"


def forwarding(name: str) -> tuple[str, str]:
    return f"sysctl -qw net.ipv4.conf.{name}.forwarding=0", f"sysctl -qw net.ipv4.conf.{name}.forwarding=1"


async def fails(live: Live, client: str, front: Front, wrong: bool) -> None:
    async def check() -> str:
        answers = await live.cluster.probes(client, "tcp", *front, 1, 0.4)
        return "" if all((str(answer) in FAILED) is wrong for answer in answers) else f"{client}: {answers}"

    await live.eventually(check)


async def answer(live: Live, client: str, front: Front, status: int, *said: str) -> None:
    async def check() -> str:
        family = "IPv6" if ":" in front.address else "IPv4"
        source = client if client == "node" else live.ips[client][family]
        place = f"[{front.address}]" if ":" in front.address else front.address
        code, text = await live.ask("why", source, f"{place}:{front.port}", "--no-probe")
        return "" if code == status and all(one in text for one in said) else f"{client}: {code} {text}"

    await live.eventually(check)


@pytest.mark.slow("packets that each kind of rule stops")
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_untracked_packets_are_not_translated(family: str, live: Live) -> None:
    name = f"unseen-{family.lower()}"
    live.service(name, "b1", ipFamilies=[family])
    front, end = live.front(name, family=family), live.ips["b1"][family]
    ip = "ip6" if family == "IPv6" else "ip"
    await live.expect(front, {"pod": "b1", "node": "b1"})
    for hook, selector, stopped, said in (
        ("prerouting", f"daddr {front.address}", "pod", "80/tcp: not translated, no endpoint gets it (x)"),
        ("output", f"daddr {front.address}", "node", "80/tcp: not translated, no endpoint gets it (x)"),
        ("prerouting", f"saddr {end}", "pod node", "x  table {ip} other, chain c: takes the answers of "),
    ):
        async with changed(live, table(ip, f"{hook} -300", f"{ip} {selector} notrack")):
            # The lab's router sends IPv6 packets to cluster IPs back to the node, which then translates them.
            for client in ("pod", "node") if (ip, hook) != ("ip6", "output") else ("pod",):
                wrong = client in stopped
                await fails(live, client, front, wrong)
                await answer(live, client, front, int(wrong), *([said.format(ip=ip)] if wrong else []))
        await fails(live, "pod", front, False)


@pytest.mark.slow("packets that each kind of rule stops")
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_a_connection_stopped_by_routing_is_reported(family: str, live: Live) -> None:
    name = f"routed-{family.lower()}"
    live.service(name, "b1", ipFamilies=[family])
    front, pod, end = live.front(name, family=family), live.ips["pod"][family], live.ips["b1"][family]
    version = "-6" if family == "IPv6" else "-4"
    await live.expect(front, {"pod": "b1", "node": "b1"})
    route = f"ip {version} route add prohibit {end} table 300", f"ip {version} route del prohibit {end} table 300"
    for commands, stopped, said in (
        ([rule(version, f"from {pod} blackhole")], "pod", "ip rule 77 (blackhole)"),
        ([rule(version, f"to {end} prohibit")], "pod node", "ip rule 77 (prohibit)"),
        ([rule(version, f"iif cbr0 to {end} unreachable")], "pod", "ip rule 77 (unreachable)"),
        ([rule(version, f"from {end} to {pod} blackhole")], "pod", f"packets of {end} to {pod}: ip rule 77"),
        ([route, rule(version, f"from {pod} lookup 300")], "pod", f"prohibit {end}"),
        ([rule(version, "fwmark 0x4000/0x4000 prohibit")], "node", "ip rule 77 (prohibit)"),
        ([rule(version, "fwmark 0x9 prohibit")], "", ""),
    ):
        async with changed(live, *commands):
            for client in ("pod", "node"):
                wrong = client in stopped
                await fails(live, client, front, wrong)
                await answer(live, client, front, int(wrong), *(["x  ", said] if wrong else []))
        await fails(live, "pod", front, False)


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_the_fix_of_a_route_that_refuses_packets_to_services_works(family: str, live: Live) -> None:
    name = f"refused-{family.lower()}"
    live.service(name, "b1", ipFamilies=[family])
    front = live.front(name, family=family)
    await live.expect(front, {"pod": "b1", "node": "b1"}, "tcp")
    network, bits = ("10.96.0.0/16", 32) if family == "IPv4" else ("fd00:10:96::/112", 128)
    for refused in (f"blackhole {network}", f"unreachable {front.address}/{bits}"):
        async with changed(live, (f"ip route add {refused}", f"ip route del {refused}")):
            await fails(live, "node", front, True)
            await fails(live, "pod", front, False)
            await answer(live, "pod", front, 0)
            await answer(live, "node", front, 1, f"it does not get through: this node has no route to {front.address}")
            place = f"[{front.address}]" if family == "IPv6" else front.address
            _, text = await live.ask("why", "node", f"{place}:80", "--no-probe")
            fix = text.partition("for this address alone, `")[2].partition("`")[0].replace("INTERFACE", "eth0")
            await live.run(*fix.split())
            await fails(live, "node", front, False)
            await answer(live, "node", front, 0)
            await live.run(*fix.replace("replace", "del").split())
            await live.run(*f"ip route replace {refused}".split())


async def test_a_rule_of_routing_for_a_mark_is_noted(live: Live) -> None:
    live.service("marked", "b1 b2")
    front, pod = live.front("marked"), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "b1 b2"})
    async with changed(live, rule("-4", f"from {pod} blackhole")):
        await fails(live, "pod", front, True)
        both = ", ".join(sorted(live.ips[name]["IPv4"] for name in ("b1", "b2")))
        gone = f"it does not get through: the kernel does not route packets of {pod} to {both}: ip rule 77 (blackhole)"
        await answer(live, "pod", front, 1, gone)
    async with changed(live, rule("-4", "fwmark 0x7 blackhole")):
        await answer(live, "pod", front, 0, "-  the kernel would not route packets", "mark 0x7: ip rule 77 (blackhole)")
        async with changed(live, table("ip", "prerouting -150", f"ip saddr {pod} meta mark set 0x7")):
            await fails(live, "pod", front, True)
            given = "it does not get through: table ip other, chain c: gives packets to "
            await answer(live, "pod", front, 1, given, "the mark 0x7, with which the kernel does not route them")
        async with changed(live, table("ip", "prerouting -150", f"ip saddr {pod} meta mark set ct mark")):
            await answer(live, "pod", front, 0, "-  the kernel would not route packets")
        chain = f"chain c {{ type route hook output priority -150; ip daddr {front.address} meta mark set 0x7; }}"
        async with changed(live, (f"nft table ip other {{ {chain}; }}", "nft delete table ip other")):
            await fails(live, "node", front, True)
            given = f"?  table ip other, chain c: may give packets to {front.address} the mark 0x7"
            await answer(live, "node", front, 2, given, "unless another program's mark changes its route (?)")


async def test_a_source_that_another_program_gives_is_named(live: Live) -> None:
    live.service("sourced", "b1")
    front, end = live.front("sourced"), live.ips["b1"]["IPv4"]
    await live.expect(front, {"pod": "b1"})
    for source, wrong in (("192.168.100.77", True), (NODE_A.ip, False)):
        chain = f"chain c {{ type nat hook postrouting priority 90; ip daddr {end} snat to {source}; }}"
        async with changed(live, (f"nft table ip other {{ {chain}; }}", "nft delete table ip other")):
            await fails(live, "pod", front, wrong)
            said = f"{'?' if wrong else '-'}  table ip other, chain c: gives packets to {end}:3000 the source {source}"
            await answer(live, "pod", front, 2 if wrong else 0, said)


async def test_a_translation_to_the_packets_own_source_changes_no_source(live: Live) -> None:
    live.service("unchanged", "b1", type="NodePort")
    front, nodeport, pod = live.front("unchanged"), live.front("unchanged", "nodeport"), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "b1"}, "tcp")
    for text in ("snat to ip saddr", f"ip saddr {pod} snat to {pod}", f"snat to ip saddr map {{ {pod} : {pod} }}"):
        chain = f"chain c {{ type nat hook postrouting priority 90; {text}; }}"
        async with changed(live, (f"nft table ip other {{ {chain}; }}", "nft delete table ip other")):
            await live.expect(front, {"pod": "b1"}, "tcp")
            await answer(live, "pod", front, 0, "/tcp: kube-proxy forwards it\n")
            if text.endswith("saddr"):  # the kernel translates a source once, so the proxy does not masquerade it
                await fails(live, "outside", nodeport, True)
                said = "before the proxy's chain, which masquerades them: they are not masqueraded"
                await answer(live, "outside", nodeport, 2, "?  table ip other, chain c: accepts packets to ", said)
    await live.expect(nodeport, {"outside": "b1 masqueraded"}, "tcp")


async def test_a_program_that_clears_the_mark_of_masquerading_is_named(live: Live) -> None:
    live.service("unmasked", "b1", type="NodePort")
    front, end = live.front("unmasked", "nodeport"), live.ips["b1"]["IPv4"]
    await live.expect(front, {"outside": "b1 masqueraded"})
    asked = ("why", live.ips["outside"]["IPv4"], f"{front.address}:{front.port}")
    for value, wrong in (("0x1", True), ("meta mark or 0x1", False)):
        async with changed(live, table("ip", "forward -150", f"ip daddr {end} meta mark set {value}")):
            await fails(live, "outside", front, wrong)
            status, text = await live.ask(*asked)
            said = f"?  table ip other, chain c: clears the proxy's mark 0x4000 in packets to {end}:3000 at the hook fo"
            assert (status, said in text) == ((2, True) if wrong else (0, False)), text


async def test_a_program_that_sets_the_mark_of_masquerading_is_named(live: Live) -> None:
    live.service("masked", "b1")
    front, pod = live.front("masked"), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "b1"}, "tcp")
    for chain in ("prerouting -150", "forward 0"):
        async with changed(live, table("ip", chain, f"ip saddr {pod} meta mark set meta mark or 0x4000")):
            await live.expect(front, {"pod": "b1 masqueraded"}, "tcp")
            said = "-  table ip other, chain c: sets the proxy's mark 0x4000 in packets to "
            await answer(live, "pod", front, 0, said, f"at the hook {chain.split()[0]}: the proxy masquerades them: ")
            _, text = await live.ask("why", pod, f"{front.address}:{front.port}", "--no-probe", "-o", "json")
            assert [one["client"] for one in json.loads(text)["why"]["endpoints"]] == [""]


async def test_a_rule_that_exempts_packets_from_masquerading_is_named(live: Live) -> None:
    live.service("exempt", "b1", type="NodePort")
    front, end = live.front("exempt", "nodeport"), live.ips["b1"]["IPv4"]
    outside = live.ips["outside"]["IPv4"]
    await live.expect(front, {"outside": "b1 masqueraded"})
    mode, _, variant = live.mode.name.partition("-")
    command = f"iptables-{variant or 'nft'} -w -t nat"
    rule = f"POSTROUTING -s {outside} -j ACCEPT"
    wrong = mode == "iptables"  # the proxy's own table of nf_tables masquerades after any other chain
    for where, is_first in (("-I", True), ("-A", False)):
        async with changed(live, (f"{command} {where} {rule}", f"{command} -D {rule}")):
            await fails(live, "outside", front, wrong and is_first)
            status, text = await live.ask("why", outside, f"{front.address}:{front.port}")
            said = f"chain POSTROUTING: accepts packets to {end}:3000 before the proxy's chain, which masquerades them"
            assert (status, said in text) == ((2, True) if wrong and is_first else (0, False)), text


async def test_a_probe_to_which_another_program_gives_a_source_does_not_judge_the_clients_packets(live: Live) -> None:
    live.service("probed", "b1", type="NodePort")
    front, end = live.front("probed", "nodeport"), live.ips["b1"]["IPv4"]
    await live.expect(front, {"outside": "b1 masqueraded"})
    chain = f"type nat hook postrouting priority 90; ip saddr {NODE_A.ip} ip daddr {end} snat to 192.168.100.77"
    async with changed(live, (f"nft table ip other {{ chain c {{ {chain}; }}; }}", "nft delete table ip other")):
        await fails(live, "outside", front, False)
        asked = ("why", live.ips["outside"]["IPv4"], f"{front.address}:{front.port}")
        status, text = await live.ask(*asked)
        reason = "table ip other, chain c gives packets of this node's own another source"
        assert (status, f"no answer within 1 s: {reason}; other checks" in text) == (0, True), text


async def test_a_rule_for_one_user_that_stops_the_probe_does_not_judge_the_endpoint(live: Live) -> None:
    live.service("owned", "b1")
    front, pod = live.front("owned"), live.ips["pod"]["IPv4"]
    await live.expect(front, {"pod": "b1"})
    command = "iptables-legacy" if live.mode.variant == "legacy" else "iptables-nft"
    rest = "OUTPUT -p tcp --dport 3000 -m owner --uid-owner 0 -j REJECT"
    for commands, where in (
        (table("ip", "output 0", "tcp dport 3000 meta skuid 0 reject with tcp reset"), "table ip other, chain c"),
        ((f"{command} -I {rest}", f"{command} -D {rest}"), "chain OUTPUT"),
    ):
        async with changed(live, commands):
            await fails(live, "node", front, True)
            await fails(live, "pod", front, False)
            for client in (pod, "node"):
                status, text = await live.ask("why", client, f"{front.address}:80")
                said = f"{where} may stop this node's own packets, or only those of its user 0\n"
                assert (status, said in text, "3000: refused: " in text) == (2, True, True), text


async def test_a_chain_of_the_same_priority_may_come_first(live: Live) -> None:
    live.service("same", "b1")
    front = live.front("same")
    await live.expect(front, {"pod": "b1"})
    async with changed(live, table("ip", "prerouting -100", f"ip daddr {front.address} drop")):
        await fails(live, "pod", front, True)
        await answer(live, "pod", front, 2, "unless rules of table ip", "chain c: may drop what")
    await fails(live, "pod", front, False)


async def test_a_chain_sees_the_interface_of_the_first_route_of_the_nodes_own_packets(live: Live) -> None:
    live.service("own", "b1")
    front, end = live.front("own"), live.ips["b1"]["IPv4"]
    await live.expect(front, {"node": "b1"})
    route = tuple(f"ip route {done} {front.address}/32 dev cbr0" for done in ("add", "del"))
    for name, wrong in (("cbr0", True), ("eth0", False)):
        async with changed(live, route, table("ip", "output 0", f"oifname {name} ip daddr {end} drop")):
            await fails(live, "node", front, wrong)
            await answer(live, "node", front, int(wrong), *(["x  table ip other, chain c: drops"] if wrong else []))


async def test_a_chain_that_accepts_translated_packets_is_no_fault(live: Live) -> None:
    live.service("translated", "b1")
    front = live.front("translated")
    text = (
        "table ip other { chain c { type filter hook postrouting priority 0; policy drop; ct status dnat accept; }; }"
    )
    await live.expect(front, {"node": "b1", "pod": "b1"}, "tcp")  # the chain also stops the proxy's watches
    async with changed(live, (f"nft {text}", "nft delete table ip other")):
        await live.expect(front, {"node": "b1", "pod": "b1"}, "tcp")
        status, said = await live.ask("why", "node", f"{front.address}:80")
        assert (status, "-  TCP from this node to" in said, "; other checks cover the connection" in said) == (
            0,
            True,
            True,
        ), said


async def test_packets_that_the_reverse_path_filter_drops_are_reported(live: Live) -> None:
    live.service("filtered", "b1", type="NodePort")
    front, client = live.front("filtered", "nodeport"), live.ips["outside"]["IPv4"]
    await live.expect(front, {"outside": "b1"})
    strict = "sysctl -qw net.ipv4.conf.eth0.rp_filter=1", "sysctl -qw net.ipv4.conf.eth0.rp_filter=0"
    uplink = "ip link add up2 type veth peer name up3", "ip link del up2"
    rest = [(f"ip {what}", "true") for what in ("addr add 172.30.0.1/24 dev up2", "link set up2 up", "link set up3 up")]
    await answer(live, "outside", front, 0)
    async with changed(live, uplink, *rest, (f"ip route add {client}/32 dev up2", "true"), strict):
        await fails(live, "outside", front, True)
        said = f"x  the kernel drops packets of {client} that arrive on eth0"
        fix = "correct that route, or add a route by eth0; net.ipv4.conf.eth0.rp_filter=2 (loose) is enough only if"
        await answer(live, "outside", front, 1, said, fix)
        code, text = await live.ask("why", client, f"{front.address}:{front.port}", "--no-probe", "--interface", "eth0")
        assert (code, said in text, f"it does not get through: {said[3:]}" in text) == (1, True, True), text
        code, text = await live.ask("doctor")
        said = f"answers to {client}/32, which is on the network of eth0, leave by up2"
        assert (code, said in text, "Fix: have these answers leave by eth0" in text) == (1, True, True), text
        async with changed(live, (strict[0].replace("=1", "=2"), strict[0])):
            await fails(live, "outside", front, True)
            await answer(live, "outside", front, 1, f"packets to {client} is silent", "correct the route")
        async with changed(live, (f"ip route del {client}/32", f"ip route add {client}/32 dev up2")):
            await fails(live, "outside", front, False)
    await answer(live, "outside", front, 0)


async def test_a_client_with_an_unknown_interface_of_arrival(live: Live) -> None:
    live.service("doubtful", "b1", type="NodePort")
    front, client = live.front("doubtful", "nodeport"), "198.18.7.9"
    await live.expect(front, {"outside": "b1"})
    strict = "sysctl -qw net.ipv4.conf.eth0.rp_filter=1", "sysctl -qw net.ipv4.conf.eth0.rp_filter=0"
    uplink = "ip link add up2 type veth peer name up3", "ip link del up2"
    rest = [(f"ip {what}", "true") for what in ("addr add 172.30.0.1/24 dev up2", "link set up2 up", "link set up3 up")]
    asked = "why", client, f"{front.address}:{front.port}", "--no-probe"
    await live.run("ip", "addr", "add", f"{client}/32", "dev", "lo", place="outside")
    try:
        async with changed(live, uplink, *rest, ("ip route add 198.18.0.0/16 dev up2", "true")):
            code, text = await live.ask(*asked)
            assert (code, "(?)" in text) == (0, False), text  # the filter is off
            async with changed(live, strict):
                found = await live.cluster.probes("outside", "tcp", *front, 1, 0.4, client)
                assert [str(one) for one in found] == ["timeout"]
                code, text = await live.ask(*asked)
                said = "kube-proxy forwards it, unless its packets arrive by another interface (?)"
                assert (code, said in text, "answers from 192.168.100.2 on eth0 leave by up2" in text) == (
                    2,
                    True,
                    True,
                ), text
                code, text = await live.ask(*asked, "--interface", "eth0")
                assert (code, "it does not get through: the kernel drops packets" in text) == (1, True), text
                for source in ("pod", "outside"):
                    await answer(live, source, front, 0)
    finally:
        await live.run("ip", "addr", "del", f"{client}/32", "dev", "lo", place="outside")


async def test_a_pod_without_a_node_name_in_its_slice_does_not_reach_itself(live: Live) -> None:
    # Endpoint a4 belongs to this test only.
    masqueraded = live.mode.name != "nftables"  # as for all pods that connect to themselves in iptables mode
    live.service("itself")
    ends = [{"addresses": [live.ips["a4"]["IPv4"]], "conditions": {"ready": True}}]
    live.cluster.store.put("endpointslices", slice_of("itself", "IPv4", ends))
    front, lost = live.front("itself"), "it does not get through: 100.0% of the connections time out (x)"
    await live.expect(front, {"pod": "a4"})
    await fails(live, "a4", front, not masqueraded)
    said = [] if masqueraded else [lost, "Fix: set endpoints[].nodeName: node-a for "]
    await answer(live, "a4", front, int(not masqueraded), *said)
    live.service("named", "a4")  # the kernel has one element for each address of this node
    await fails(live, "a4", front, False)
    await answer(live, "a4", front, 0)


async def test_the_policy_of_forward_stops_only_packets_without_masquerade(live: Live) -> None:
    if live.mode.name == "nftables":
        return  # nftables mode has no chain that accepts these packets
    live.service("open", "a1", type="NodePort")
    nodeport = live.front("open", "nodeport")
    await live.expect(nodeport, {"outside": "a1", "pod": "a1"})
    command = f"iptables-{live.mode.variant}"
    async with changed(live, (f"{command} -P FORWARD DROP", f"{command} -P FORWARD ACCEPT")):
        await fails(live, "pod", live.front("open"), True)
        await fails(live, "outside", nodeport, False)
        await answer(live, "pod", live.front("open"), 1, "it does not get through: ", "x  ", "chain FORWARD: drops")
        await answer(live, "outside", nodeport, 0)
        code, text = await live.ask("doctor")
        said = "chain FORWARD: drops all new connections that are not masqueraded at the hook forward"
        assert (code, said in text) == (1, True), text


async def begins(live: Live, client: str, front: Front, wanted: str, *more: str) -> None:
    """Wait until the first line of the answer begins with this decision."""
    family = "IPv6" if ":" in front.address else "IPv4"
    source = client if client == "node" else live.ips[client][family]
    place = f"[{front.address}]" if ":" in front.address else front.address

    async def check() -> str:
        _, text = await live.ask("why", source, f"{place}:{front.port}", "--no-probe", *more)
        return "" if text.splitlines()[0].partition("/tcp: ")[2].startswith(wanted) else f"{wanted}, but {text}"

    await live.eventually(check)


@pytest.mark.slow("packets that each kind of cause stops")
async def test_a_cause_that_stops_the_whole_connection_is_in_the_first_line(live: Live) -> None:
    live.service("whole", "a1 b1", type="NodePort")
    live.service("far", "b1")
    front, nodeport, far, ends = (
        live.front("whole"),
        live.front("whole", "nodeport"),
        live.front("far"),
        "10.244.0.0/16",
    )
    await live.expect(front, {"pod": "a1 b1"})
    await live.expect(far, {"pod": "b1"})
    await live.expect(nodeport, {"outside": "a1 b1"})
    stopped = "it does not get through: "
    legacy = live.mode.name == "iptables-legacy"
    raw = f"iptables-{'legacy' if legacy else 'nft'} -t raw"
    for client, place, commands, said in (
        ("pod", front, [table("ip", "prerouting -300", f"ip daddr {front.address} drop")], "table ip other, chain c"),
        ("pod", front, [(f"{raw} -A PREROUTING -d {front.address} -j DROP",
                         f"{raw} -D PREROUTING -d {front.address} -j DROP")], ""),
        ("pod", front, [table("ip", "forward 0", f"ip daddr {ends} tcp dport 3000 drop")], "table ip other, chain c"),
        ("pod", front, [table("ip", "forward 0", f"ip saddr {ends} tcp sport 3000 drop")], "table ip other, chain c"),
        ("outside", nodeport, [forwarding("eth0")], "net.ipv4.conf.eth0.forwarding is 0"),
        ("pod", far, [forwarding("cbr0")], "net.ipv4.conf.cbr0.forwarding is 0"),
    ):  # fmt: skip
        async with changed(live, *commands):
            await fails(live, client, place, True)
            await begins(live, client, place, stopped + said)
        await begins(live, client, place, "kube-proxy forwards it")
        await fails(live, client, place, False)


@pytest.mark.slow("connections that time out")
async def test_a_cause_that_stops_some_endpoints_has_its_share_in_the_first_line(live: Live) -> None:
    live.service("partly", "a1 b1")
    live.service("partly6", "a1 b1", ipFamilies=["IPv6"])
    front, front6 = live.front("partly"), live.front("partly6", family="IPv6")
    await live.expect(front, {"pod": "a1 b1"})
    await live.expect(front6, {"pod": "a1 b1"})

    async def meets(place: Front, count: int, seconds: float, *wanted: str) -> None:
        answers = await live.cluster.probes("pod", "tcp", *place, count, seconds)
        assert {str(getattr(each, "pod", each)) for each in answers} == set(wanted), answers

    share = "kube-proxy forwards it, but 50.0% of the connections do not get through: "
    async with changed(live, forwarding("eth0")):  # the node of the other endpoint answers, and no answer is forwarded
        await begins(live, "pod", front, share)
        await meets(front, 16, 0.8, "a1", "timeout")
    key = "net.ipv6.conf.{}"
    off = f"sysctl -qw {key}={{}}".format("all.forwarding", 0), f"sysctl -qw {key}={{}}".format("all.forwarding", 1)
    delayed = "kube-proxy forwards it, but not all is well: net.ipv6.conf."
    async with changed(live, off):  # bridged packets need no forwarding; a retransmission selects again
        await begins(live, "pod", front6, delayed)
        answers = await live.cluster.probes("pod", "tcp", *front6, 4, 16.0)  # five SYNs: one of 32 probes times out
        assert sum(not hasattr(each, "pod") for each in answers) <= 1, answers
        force = tuple(f"sysctl -qw {key.format('cbr0.force_forwarding')}={n}" for n in (1, 0))
        async with changed(live, force):
            await begins(live, "pod", front6, share)
            await meets(front6, 16, 0.8, "a1", "timeout")  # before TCP retransmits
        force = tuple(f"sysctl -qw {key.format('eth0.force_forwarding')}={n}" for n in (1, 0))
        async with changed(live, force):
            await begins(live, "pod", front6, delayed)


@pytest.mark.slow("packets that each kind of rule rejects")
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_a_reset_does_not_reach_a_client_on_a_bridge(family: str, live: Live) -> None:
    name, ip = f"reset-{family.lower()}", "ip6" if family == "IPv6" else "ip"
    live.service(name, "b1", ipFamilies=[family], type="NodePort")
    front, nodeport = (live.front(name, kind, family=family) for kind in ("cluster", "nodeport"))
    end = f"{ip} daddr {live.ips['b1'][family]} tcp dport 3000"
    await live.expect(front, {"pod": "b1"}, "tcp")
    refused, unseen = (
        "the client is refused",
        "a reset does not reach clients on the bridge cbr0: the client sees a timeout",
    )
    for client, place, chain, rejects, outcome, said in (
        ("pod", front, "forward 0", f"{end} reject with tcp reset", "timeout", unseen),
        ("pod", front, "forward 0", f"{end} reject", "refused", refused),
        ("outside", nodeport, "forward 0", f"{end} reject with tcp reset", "refused", refused),
        ("node", front, "output 0", f"{end} reject with tcp reset", "refused", refused),
        ("pod", front, "prerouting -150", f"{ip} daddr {front.address} reject with tcp reset", "refused", refused),
    ):  # fmt: skip
        async with changed(live, table(ip, chain, rejects)):
            found = await live.cluster.probes(client, "tcp", *place, 1, 2.5)
            assert [str(one) for one in found] == [outcome], (client, chain, rejects)
            await answer(live, client, place, 1, "it does not get through: table ", said)
    if live.mode.variant:
        command = f"{ip}tables-{live.mode.variant}"
        rest = f"FORWARD -p tcp -d {live.ips['b1'][family]} --dport 3000 -j REJECT --reject-with tcp-reset"
        async with changed(live, (f"{command} -I {rest}", f"{command} -D {rest}")):
            assert [str(one) for one in await live.cluster.probes("pod", "tcp", *front, 1, 2.5)] == ["timeout"]
            await answer(live, "pod", front, 1, "it does not get through: ", unseen)


@pytest.mark.slow("a cluster of its own")
async def test_without_a_proxy_the_rules_that_remain_decide(bare: Live) -> None:
    bare.service("kept", "a1 b1")
    front, where = bare.front("kept"), f"{bare.front('kept').address}:80"
    await bare.start()
    await bare.expect(front, {"pod": "a1 b1"}, "tcp")
    await bare.proxy.kill()
    flags = f"--kubeconfig {bare.cluster.node_kubeconfig} --hostname-override node-a"
    a1, a2, b1 = (f"{bare.ips[name]['IPv4']}:3000" for name in ("a1", "a2", "b1"))

    async def asked(code: int, first: str, *said: str) -> None:
        words = ("why", bare.ips["pod"]["IPv4"], where, "--no-probe", *flags.split())
        status, text = await bare.ask(*words)
        heading, _, rest = text.partition("\n")
        assert (status, first in heading, [one for one in said if one not in rest]) == (code, True, []), text

    now = f": translates {where} to {a1} or {b1} at the hook prerouting"
    verify = f"Fix: compare them with the objects (`kube-proxy verify {flags}`), and start"
    await asked(2, f"{now} (?)", "  -  until a kube-proxy runs, ", f"{now}: the objects have these endpoints", verify)
    bare.endpoints("kept", "a1 a2")
    await bare.expect(front, {"pod": "a1 b1"}, "tcp")
    said = f"{now}: in the objects, {where} has no endpoint {b1}"
    await asked(2, f"{now} (?)", "  ?  until a kube-proxy runs, ", said)
    bare.endpoints("kept", "")
    await bare.expect(front, {"pod": "a1 b1"}, "tcp")
    await asked(2, "takes new connections (x); until a kube-proxy runs, ", f"no endpoint {a1} or {b1}")
    bare.endpoints("kept", "a1 b1")
    await bare.run(proxy_command(), "--cleanup")
    await asked(2, f"; until a kube-proxy runs, no rule in the kernel translates {where} (?)")
    bent = f"ip daddr {front.address} tcp dport 80 dnat to {a2}"
    text = f"table ip other {{ chain c {{ type nat hook prerouting priority -110; {bent}; }}; }}"
    async with changed(bare, (f"nft {text}", "nft delete table ip other")):
        await bare.expect(front, {"pod": "a2"}, "tcp")
        taken = f"another program takes it first: table ip other, chain c: translates {where} to {a2}"
        await asked(1, taken, f"Fix: leave {where} out of the rules of table ip other c")


async def test_the_sysctl_that_keeps_packets_on_loopback_is_the_cause(live: Live) -> None:
    if live.mode.name == "nftables":
        return  # the mode does not serve NodePorts on loopback by rules
    live.service("looped", "a1 b1", type="NodePort")
    front = Front("127.0.0.1", live.front("looped", "nodeport").port)
    await live.expect(front, {"node": "a1 b1"}, "tcp")
    await answer(live, "node", front, 0, "/tcp: kube-proxy forwards it\n")
    name = "net.ipv4.conf.all.route_localnet"
    async with changed(live, (f"sysctl -qw {name}=0", f"sysctl -qw {name}=1")):
        await fails(live, "node", front, True)
        await answer(live, "node", front, 1, f"it does not get through: {name} is 0, it should be 1 (x)\n")
        _, text = await live.ask("why", "node", f"127.0.0.1:{front.port}", "--no-probe")
        assert "reverse path" not in text, text
    await fails(live, "node", front, False)


async def test_a_pod_reaches_its_own_address_without_the_node(live: Live) -> None:
    live.service("own-address", "a1")
    own = Front(live.ips["a1"]["IPv4"], 3000)
    await live.expect(live.front("own-address"), {"pod": "a1"})
    closed = "table ip other { chain c { type filter hook forward priority 0; policy drop; }; }"
    async with changed(live, (f"nft {closed}", "nft delete table ip other")):
        await live.expect(own, {"a1": "a1"})
        status, text = await live.ask("why", own.address, f"{own.address}:3000")
        assert (status, ": the endpoint is the client itself: no packet leaves its network namespace" in text) == (
            0,
            True,
        )


async def test_packets_that_a_bridge_delivers_pass_no_chain_of_ip(live: Live) -> None:
    live.service("bridged", "a1")
    near = Front(live.ips["a1"]["IPv4"], 3000)
    await live.expect(live.front("bridged"), {"pod": "a1"})
    calls = tuple(f"sysctl -qw net.bridge.bridge-nf-call-iptables={value}" for value in (0, 1))
    closed = "table ip other { chain c { type filter hook forward priority 0; policy drop; }; }"
    async with changed(live, (f"nft {closed}", "nft delete table ip other")):
        await fails(live, "pod", near, True)
        await answer(live, "pod", near, 1, "it does not get through: table ip other, chain c: drops")
        async with changed(live, calls):
            await fails(live, "pod", near, False)
            await answer(live, "pod", near, 0, "this node forwards it, untranslated\n")
    pod = live.ips["pod"]["IPv4"]
    for way in (f"{near.address}/32 dev eth0", f"unreachable {near.address}/32", f"blackhole {pod}/32"):
        async with changed(live, (f"ip route add {way}", f"ip route del {way}")):  # the kernel does not route them
            await fails(live, "pod", near, False)
            status, text = await live.ask("why", pod, f"{near.address}:3000")
            assert (status, "this node forwards it, untranslated\n" in text) == (0, True), text
            told = ", but cbr0 delivers packets of pods; other checks cover the connection\n"
            assert (told in text) is (near.address in way), text


@pytest.mark.slow("packets that each kind of rule stops")
async def test_one_direction_in_a_zone_of_connection_tracking_is_reported(live: Live) -> None:
    live.service("zoned", "b1")
    front, end = live.front("zoned"), live.ips["b1"]["IPv4"]
    await live.expect(front, {"pod": "b1", "node": "b1"})
    to, back, raw = f"ip daddr {front.address} ct zone set 7", f"ip saddr {end} ct zone set 7", "-t raw -A PREROUTING"
    every = "ct zone set 7; }; chain d { type filter hook output priority -300; ct zone set 7"
    cleared = "iptables-{} -t raw -F PREROUTING"
    where = "x  {}: puts {} into a zone of connection tracking at the hook {}, and not the packets of the other"
    asks = f"what goes to {front.address}:80"
    for rules, stopped, said in (
        (table("ip", "prerouting -300", to), "pod", where.format("table ip other, chain c", asks, "prerouting")),
        (table("ip", "output -300", to), "node", where.format("table ip other, chain c", asks, "output")),
        (table("ip", "prerouting -300", back), "pod node", f"puts the answers of {end}:3000 into a zone"),
        (table("ip", "prerouting -300", every), "", ""),
        (table("ip", "prerouting -150", to), "", ""),
        *(
            (
                (f"iptables-{one} {raw} -d {front.address} -j CT --zone 7", cleared.format(one)),
                "pod",
                where.format(name, asks, "prerouting"),
            )
            for one, name in (
                ("nft", "table ip raw, chain PREROUTING"),
                ("legacy", "iptables-legacy -t raw, chain PREROUTING"),
            )
        ),
    ):
        async with changed(live, rules):
            for client in ("pod", "node"):
                wrong = client in stopped
                await fails(live, client, front, wrong)
                await answer(live, client, front, int(wrong), *([said] if wrong else []))
        await fails(live, "pod", front, False)


async def test_a_zone_of_the_uplinks_packets_is_reported_for_endpoints_on_this_node(live: Live) -> None:
    live.service("uplink", "a1 b1", type="NodePort")
    front, near, outside = live.front("uplink", "nodeport"), live.ips["a1"]["IPv4"], live.ips["outside"]["IPv4"]
    await live.expect(front, {"outside": "a1 b1 masqueraded"}, "tcp")
    async with changed(live, table("ip", "prerouting -300", "iifname eth0 ct zone set 7")):
        status, text = await live.ask("why", outside, f"{front.address}:{front.port}")
        said = f"x  table ip other, chain c: puts what goes to {near}:3000 into a zone of connection tracking"
        assert (status, said in text, "but 50.0% of the connections do not get through" in text) == (1, True, True), (
            text
        )
        answers = await live.cluster.probes("outside", "tcp", *front, 12, 0.4)
        assert {"timeout"} < {str(one) if str(one) in FAILED else "" for one in answers}, answers


async def test_an_endpoint_that_packets_do_not_reach_by_the_routes_of_this_node(live: Live) -> None:
    live.service("strayed", "b1")
    live.service("ghost")
    ghost = {"addresses": ["10.244.0.77"], "conditions": {"ready": True}, "nodeName": "node-a"}
    live.cluster.store.put("endpointslices", slice_of("ghost", "IPv4", [ghost]))
    front, end, lost = live.front("strayed"), live.ips["b1"]["IPv4"], live.front("ghost")
    await live.expect(front, {"pod": "b1", "node": "b1"})

    async def told(client: str, place: Front, *said: str) -> None:
        async def check() -> str:
            status, text = await live.ask("why", client, f"{place.address}:80")
            return "" if status == 1 and all(one in text for one in said) else f"{status} {text}"

        await live.eventually(check)

    for commands, said in (
        ((f"ip addr add {end}/32 dev lo", f"ip addr del {end}/32 dev lo"), "delete the address on lo, or correct"),
        ((f"ip route add {end}/32 dev cbr0", f"ip route del {end}/32 dev cbr0"), f"see `ip route get {end}`: does it"),
    ):
        async with changed(live, commands):
            for client in ("pod", "node"):
                await fails(live, client, front, True)
                source = client if client == "node" else live.ips[client]["IPv4"]
                await told(source, front, "it does not get through: ", f"Fix: the endpoint is on node-b: {said}")
    pod = live.ips["pod"]["IPv4"]
    async with changed(live, (f"ip route add {pod}/32 dev eth0", f"ip route del {pod}/32 dev eth0")):
        await fails(live, "pod", front, True)
        lost_answers = f"answers to {pod} leave by eth0, although it is in the network of cbr0"
        await told(pod, front, f"it does not get through: {lost_answers}")
    await fails(live, "pod", front, False)
    for client in (pod, "node"):
        await told(client, lost, "x  TCP from this node to 10.244.0.77:3000: ", "as nothing answers ARP for 10.244.0.7")


async def test_a_route_past_the_network_of_a_client_or_endpoint_is_named(live: Live) -> None:
    live.service("near", "a1", kind="LoadBalancer")
    front, end, outside = live.front("near"), live.ips["a1"]["IPv4"], live.ips["outside"]["IPv4"]
    await live.expect(front, {"pod": "a1", "outside": "a1"})
    link = ("ip link add past type veth peer name past2", "ip link del past")
    for place, network, client in ((outside, "eth0", "outside"), (end, "cbr0", "pod")):
        way = (f"ip route add {place}/32 dev past", f"ip route del {place}/32 dev past")
        async with changed(live, link, ("ip link set past up", "true"), ("ip link set past2 up", "true"), way):
            await fails(live, client, front, True)
            silent = f"the next hop of packets to {place} is silent: nothing answers ARP for {place} ("
            text = f" in `ip neighbour`) on past, although it is in the network of {network}"
            await answer(live, client, front, 1, silent, text)
        await fails(live, client, front, False)
