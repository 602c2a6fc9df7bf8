"""Broken clusters, examined by an operator with a laptop and docs/seeing.md: one command names the cause."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lab import objects
from lab.netns import run_in
from support.answers import valid
from support.live import Live, slice_of
from support.modes import MODES
from support.three_nodes import NODES, ThreeNodes, ip
from support.tracked_flows import LEAKING, fill, flush, limit

OUTSIDE = "192.168.100.50"


def first(text: str) -> str:
    """Return the first line of an answer of `why`, after the line with the queried node."""
    return text.splitlines()[1]


async def test_both_ends_of_a_healthy_connection(nodes: ThreeNodes) -> None:
    nodes.live.service("healthy", "b1")
    said = ": kube-proxy forwards it, and node-b delivers it\n"
    text = await nodes.until(0, said, "why", "pod/a1", "svc/healthy:tcp")
    assert f"ok node-b delivers to {ip(nodes, 'b1')}:3000 (100.0% of the connections)\n" in text
    _, text = await nodes.ask("why", "pod/a1", "svc/healthy:tcp", "--no-probe")
    assert (first(text).endswith(", and nothing on node-b stops it"), "deliver" in text) == (True, False), text
    text = await nodes.until(0, "node-b delivers it", "why", "node/node-a", "svc/healthy:80/udp", "-o", "json")
    (delivery,) = valid("cluster", text)["deliveries"]
    assert (delivery["severity"], delivery["node"]["node"]) == ("fine", "node-b")
    assert delivery["endpoint"]["client"] == ip(nodes, "node")
    valid("why", json.dumps(delivery["node"]["answer"]))


async def test_a_service_of_two_families(nodes: ThreeNodes) -> None:
    """An answer by name is about one family, and has the command for the other family."""
    nodes.live.service("dual", "b1", ipFamilyPolicy="RequireDualStack")
    place = f"[{nodes.live.front('dual', family='IPv6').address}]:80/tcp"
    await nodes.run("node-b", "ip", "-6", "rule", "add", "to", nodes.live.ips["b1"]["IPv6"], "pref", "100", "prohibit")
    try:
        for client in ("pod/a1", "node/node-a"):
            text = await nodes.until(0, "node-b delivers it", "why", client, "svc/dual:tcp")
            for command, said in (("why", text), ("trace", (await nodes.ask("trace", client, "svc/dual:tcp"))[1])):
                again = f"Next: the same over IPv6: kubectl kubeproxy {command} {client} '{place}'\n"
                assert again in said, said
            status, text = await nodes.ask("why", client, place)
            assert (status, "ip rule 100 (prohibit)" in first(text), "over" in text) == (1, True, False), text
    finally:
        await nodes.run("node-b", "ip", "-6", "rule", "del", "pref", "100")


async def test_a_firewall_of_the_clients_node(nodes: ThreeNodes) -> None:
    nodes.live.service("near", "b1")
    await nodes.drop("node-a", "forward", f"ip daddr {ip(nodes, 'b1')} tcp dport 3000")
    try:
        text = await nodes.until(1, "on node-a, it does not get through", "why", "pod/a1", "svc/near:tcp")
    finally:
        await nodes.admit("node-a")
    assert "table inet firewall, chain guard: drops what goes to" in first(text)
    assert "ok node-b delivers to" in text


@pytest.mark.parametrize("client", ["pod/a1", "node/node-a"])
async def test_a_firewall_of_the_endpoints_node(nodes: ThreeNodes, client: str) -> None:
    name = f"far-{client[:3]}"
    nodes.live.service(name, "a2 b1 b2 b3")
    await nodes.drop("node-b", "forward", f"ip daddr {{ {ip(nodes, 'b2')}, {ip(nodes, 'b3')} }} tcp dport 3000")
    lost = (
        f": node-b does not deliver to {ip(nodes, 'b2')}:3000, {ip(nodes, 'b3')}:3000 (50.0% of the connections): "
        "table inet firewall, chain "
    )
    try:
        text = await nodes.until(1, lost, "why", client, f"svc/{name}:tcp")
    finally:
        await nodes.admit("node-b")
    assert f"ok node-b delivers to {ip(nodes, 'b1')}:3000 (25.0% of the connections)" in text
    assert f"{lost}guard: drops what goes to " in first(text)
    assert "Fix: on node-b: let table inet firewall guard accept it" in text


async def test_endpoints_on_whose_port_nothing_listens(nodes: ThreeNodes) -> None:
    nodes.live.service("deaf")
    nodes.live.endpoints("deaf", "a1 b1 b2", [{"name": "tcp", "port": 4444, "protocol": "TCP"}])
    text = await nodes.until(1, "refuse", "why", "pod/a1", "svc/deaf:tcp")
    assert all(f"{ip(nodes, place)}:4444" in first(text) for place in ("a1", "b1", "b2")), text
    assert ": no endpoint gets it: " in first(text), text
    fixes = [line for line in text.splitlines() if line.startswith("Fix: ")]
    assert all(line.startswith("Fix: nothing listens on ") for line in fixes), text
    assert all(any(f"{ip(nodes, place)}:4444" in line for line in fixes) for place in ("a1", "b1", "b2")), text
    assert "and perhaps of the client" not in text


async def test_affinity_binds_the_client_to_an_endpoint_that_refuses(nodes: ThreeNodes) -> None:
    nodes.live.service("bound", "a2", sessionAffinity="ClientIP")
    await nodes.live.expect(nodes.live.front("bound"), {"a1": "a2"}, "tcp")
    closing = "table inet p { chain i { type filter hook input priority 0; tcp dport 3000 reject with tcp reset; }; }"
    nodes.live.endpoints("bound", "a2 b1")
    await nodes.until(0, "policy Cluster: 2 endpoints", "why", "pod/b2", "svc/bound:tcp")
    await nodes.live.cluster.exec("a2", ["nft", closing])
    try:
        status, text = await nodes.ask("why", "pod/a1", "svc/bound:tcp")
        other = await nodes.ask("why", "pod/b2", "svc/bound:tcp")
    finally:
        await nodes.live.cluster.exec("a2", ["nft", "delete table inet p"])
    end = f"{ip(nodes, 'a2')}:3000"
    assert status == 1, text
    assert f"it does not get through: TCP from node-a to {end}: refused (x)" in first(text), text
    assert f"ok session affinity keeps this client at {end} (read now)" in text
    assert f"Fix: nothing listens on {end}: " in text
    assert f"{end} (50.0% of the connections) refuses connections, also of node-a, its node (x)" in first(other[1])
    assert other[0] == 1


async def test_a_firewall_of_the_endpoints_node_that_drops_only_the_clients_node(nodes: ThreeNodes) -> None:
    nodes.live.service("selecting", "b1")
    front, end = nodes.live.front("selecting"), f"{ip(nodes, 'b1')}:3000"
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/selecting:tcp")
    await nodes.drop("node-b", "forward", f"ip saddr {ip(nodes, 'node')} tcp dport 3000")
    try:
        await nodes.live.expect(front, {"a1": "b1"}, "tcp")
        status, text = await nodes.ask("why", "pod/a1", "svc/selecting:tcp")
    finally:
        await nodes.admit("node-b")
    assert (status, "see the network" in text, "Fix: " in text) == (0, False, False), text
    assert first(text).endswith(": kube-proxy forwards it, and node-b delivers it"), text
    assert f"  -  TCP from this node to {end}: no answer within 1 s: node-b drops packets of node-a itself " in text, (
        text
    )


async def test_a_dead_proxy(nodes: ThreeNodes) -> None:
    nodes.live.service("served", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/served:tcp")
    await nodes.proxies["node-b"].kill()
    try:
        _, doctor = await nodes.ask("doctor")
        _, services = await nodes.ask("services")
        status, why = await nodes.ask("why", "pod/a1", "svc/served:tcp")
    finally:
        await nodes.start("node-b")
    assert "x  1 of 3 nodes: rules without a proxy that answers: " in doctor
    assert "?  1 of 3 nodes: no kube-proxy answers at " in doctor
    assert "?  no answer of node-b: no kube-proxy answers at " in services
    assert status == 2
    assert "kube-proxy forwards it; node-b, which has " in first(why)
    assert "gave no answer (?)" in first(why)


async def test_a_proxy_that_hangs(nodes: ThreeNodes) -> None:
    nodes.live.service("hung", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/hung:tcp")
    pid = nodes.proxies["node-a"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        nodes.live.endpoints("hung", "b2")
        status, text = await nodes.ask("why", "pod/a1", "svc/hung:tcp")
        passed, traced = await nodes.ask("trace", "pod/a1", "svc/hung:tcp")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (status, "node-a: the proxy at " in text) == (2, True), text
    halted = f"did not answer within 0.5 s: a signal (SIGSTOP) or a debugger has stopped the proxy: `kill -CONT {pid}`"
    assert f"{halted}; until it runs again, " in text
    assert (passed, f"{halted}. Only the rules in the kernel are shown" in traced) == (0, True), traced
    assert "the proxy of node-a hangs: on node-a, nothing here dropped it, and " in first(traced), traced
    assert "sent from its network namespace" in traced, traced
    front = nodes.live.front("hung").address
    assert f": translates {front}:80 to {ip(nodes, 'b1')}:3000 at the hook prerouting" in text, text


async def test_a_node_that_lacks_an_endpoint(nodes: ThreeNodes) -> None:
    nodes.live.service("lacking", "a1")
    await nodes.until(0, "3 of 3 nodes answered", "services", "svc/lacking")
    await nodes.drop("node-c", "input", f"tcp sport {objects.API_PORT}")
    try:
        nodes.live.endpoints("lacking", "a1 b2")
        lacks = f"1 of 3 nodes lacks endpoint {ip(nodes, 'b2')}:3000 (tcp TCP IPv4): node-c"
        await nodes.until(1, lacks, "services", "svc/lacking")
    finally:
        await nodes.admit("node-c")


async def test_a_drained_and_a_weighted_endpoint(nodes: ThreeNodes) -> None:
    nodes.live.service("weighed", "a1 a2 b1")
    weights = {"kube-proxy-py/weights": "node-a=50,node-b=0"}
    nodes.cluster.patch("services", "weighed", {"metadata": {"annotations": weights}})
    said = f"-  all 3 nodes: tcp TCP IPv4: drained {ip(nodes, 'b1')}:3000\n"
    text = await nodes.until(0, said, "services", "svc/weighed")
    assert f"ok endpoint {ip(nodes, 'b1')}:3000 (tcp TCP IPv4)\n" in text


async def test_a_clients_node_without_the_api_server(nodes: ThreeNodes) -> None:
    nodes.live.service("moved", "b1")
    await nodes.until(0, "3 of 3 nodes answered", "services", "svc/moved")
    await nodes.drop("node-c", "input", f"tcp sport {objects.API_PORT}")
    try:
        nodes.live.endpoints("moved", "a1")
        gone = f"the API server does not have {ip(nodes, 'b1')}:3000 (100.0% of the connections) as an endpoint"
        text = await nodes.until(1, gone, "why", "node/node-c", "svc/moved:tcp")
    finally:
        await nodes.admit("node-c")
    assert f": the proxy of node-c has outdated objects: {gone} (x); kube-proxy forwards it" in first(text)


async def test_a_firewall_of_the_clients_node_before_the_node_port_of_another_node(nodes: ThreeNodes) -> None:
    made = nodes.live.service("ported", "b1", type="NodePort")
    address = f"{NODES['node-b'].ip}:{made['spec']['ports'][0]['nodePort']}"
    await nodes.until(0, "kube-proxy forwards it", "why", "pod/a1", address)
    await nodes.drop("node-a", "forward", f"ip daddr {NODES['node-b'].ip}")
    try:
        status, text = await nodes.ask("why", "pod/a1", address)
        traced = await nodes.ask("trace", "pod/a1", address)
    finally:
        await nodes.admit("node-a")
    assert (status, traced[0]) == (1, 1), text + traced[1]
    assert "asked on node-a" in text
    assert f"node-a stops it: table inet firewall, chain guard: drops what goes to {address}" in first(text), text
    assert "node-a drops it: the request was dropped by rule" in traced[1], traced[1]


async def test_a_host_port_is_a_matter_of_the_program_that_translates_it(nodes: ThreeNodes) -> None:
    end, port = f"{ip(nodes, 'a1')}:3000", 8088
    rule = f"-p tcp -m addrtype --dst-type LOCAL -m tcp --dport {port} -j DNAT --to-destination {end}"
    for chain in ("PREROUTING", "OUTPUT"):  # like the rules of the CNI plugin portmap
        await nodes.run("node-a", "iptables-nft", "-t", "nat", "-A", chain, *rule.split())
    try:
        (answer,) = await nodes.live.cluster.probes("outside", "tcp", ip(nodes, "node"), port, 1, 1.0)
        assert answer.pod == "a1", answer
        for client, chain in (("192.168.100.1", "PREROUTING"), ("pod/a2", "PREROUTING"), ("node/node-a", "OUTPUT")):
            status, text = await nodes.ask("why", client, f"{ip(nodes, 'node')}:{port}")
            said = f"another program takes it first: iptables-nft -t nat, chain {chain}: translates "
            assert (status, said in first(text), f"to {end} " in first(text)) == (2, True, True), text
            assert "\n  x  " not in text, text
    finally:
        await nodes.run("node-a", "iptables-nft", "-t", "nat", "-F")
    status, text = await nodes.ask("why", "192.168.100.1", f"{ip(nodes, 'node')}:{port}")
    assert (status, "kube-proxy does not handle it" in first(text)) == (1, True), text


async def test_an_endpoint_without_a_node_name_is_checked_on_its_node(nodes: ThreeNodes) -> None:
    nodes.live.service("unnamed")
    ends = [{"addresses": [ip(nodes, "b1")], "conditions": {"ready": True}}]
    nodes.live.cluster.store.put("endpointslices", slice_of("unnamed", "IPv4", ends))
    await nodes.until(0, ": kube-proxy forwards it, and node-b delivers it\n", "why", "pod/a1", "svc/unnamed:tcp")
    await nodes.drop("node-b", "forward", f"ip daddr {ip(nodes, 'b1')} tcp dport 3000")
    try:
        status, text = await nodes.ask("why", "pod/a1", "svc/unnamed:tcp")
        traced = await nodes.ask("trace", "pod/a1", "svc/unnamed:tcp", "--seconds", "4")
    finally:
        await nodes.admit("node-b")
    assert (status, f"node-b does not deliver to {ip(nodes, 'b1')}:3000" in first(text)) == (1, True), text
    assert (traced[0], "node-b drops it: the request was dropped by rule" in traced[1]) == (1, True), traced[1]


async def test_a_wrong_neighbour_entry(nodes: ThreeNodes) -> None:
    nodes.live.service("neighbours", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/neighbours:tcp")
    entry = "neigh", "replace", NODES["node-b"].ip, "dev", "eth0", "lladdr", "02:00:00:00:00:99", "nud"
    await nodes.run("node-a", "ip", *entry, "permanent")
    try:
        status, text = await nodes.ask("why", "pod/a1", "svc/neighbours:tcp")
    finally:
        await nodes.run("node-a", "ip", "neigh", "del", NODES["node-b"].ip, "dev", "eth0")
    assert (status, "node-b delivers it: see the network between the nodes" in first(text)) == (2, True), text
    assert "the next hop's entry in `ip neighbour`, on node-a and, for the way back, on the endpoint's" in text, text


async def test_a_port_of_another_node_is_checked_there(nodes: ThreeNodes) -> None:
    for client in ("pod/a1", "node/node-a"):
        text = await nodes.until(0, "is this proxy's own port", "why", client, "node/node-b:10256")
        assert "asked on node-b" in text


async def test_a_chain_of_a_device(nodes: ThreeNodes) -> None:
    nodes.live.service("device", "b1")
    chain = "add table netdev cloud; add chain netdev cloud guard { type filter hook ingress device eth0 priority 0; }"
    await nodes.run("node-b", "nft", f"{chain}; add rule netdev cloud guard tcp dport 3000 drop")
    seen = "node-b, table netdev cloud, chain guard may drop packets, and is not evaluated"
    try:
        text = await nodes.until(2, seen, "why", "pod/a1", "svc/device:tcp")
    finally:
        await nodes.run("node-b", "nft", "delete table netdev cloud")
    assert "node-b delivers it: see the network between the nodes; on node-b, table netdev cloud" in first(text)


@pytest.mark.parametrize("at", ["node-a", "node-b"])
async def test_a_silent_next_hop(nodes: ThreeNodes, at: str) -> None:
    """Drops requests on the client's node, or answers on the endpoint's node."""
    nodes.live.service(f"next-{at}", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", f"svc/next-{at}:tcp")
    pods, hop = f"{ip(nodes, 'b1' if at == 'node-a' else 'a1')}/32", "192.168.100.77"
    await nodes.run(at, "ip", "route", "add", pods, "via", hop)
    await nodes.run(at, "bash", "-c", f"echo > /dev/udp/{pods[:-3]}/9")  # a packet like those of clients' connections
    try:
        status, text = await nodes.ask("why", "pod/a1", f"svc/next-{at}:tcp")
    finally:
        await nodes.run(at, "ip", "route", "del", pods, "via", hop)
    assert status in {1, 2}, text
    assert "and perhaps of the client" not in text or status == 2, text  # a certain cause leaves no doubts of probes
    # An entry with the state FAILED may be old, so its cause is not in the first line.
    assert f"is silent: nothing answers ARP for {hop}" in (first(text) if status == 1 else text), text
    assert f"see `ip route get {pods[:-3]}`" in text


@asynccontextmanager
async def by_default_route(nodes: ThreeNodes, at: str, pods: str, hop: str, gateway: str) -> AsyncIterator[None]:
    """Delete a node's route to a pod network, and give the node another default gateway."""
    await nodes.run(at, "ip", "route", "del", pods, "via", hop)
    await nodes.run(at, "ip", "route", "replace", "default", "via", gateway)
    try:
        yield
    finally:
        await nodes.run(at, "ip", "route", "replace", "default", "via", "192.168.100.1")
        await nodes.run(at, "ip", "route", "add", pods, "via", hop)


async def test_a_missing_route_to_the_pods_of_another_node(nodes: ThreeNodes) -> None:
    """The default route hides it: the kernel sends the packets to a gateway that does not know the pods."""
    nodes.live.service("unrouted", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/unrouted:tcp")
    gateway = NODES["node-c"].ip
    async with by_default_route(nodes, "node-a", "10.244.1.0/24", ip(nodes, "neighbour"), gateway):
        await nodes.drop("node-c", "forward", f"ip daddr {ip(nodes, 'b1')}")
        try:
            status, text = await nodes.ask("why", "pod/a1", "svc/unrouted:tcp")
        finally:
            await nodes.admit("node-c")
    note = f"packets to {ip(nodes, 'b1')}:3000 on node-b leave by the default route, to {gateway}"
    assert status != 0, text
    assert f"node-b delivers it: see the network between the nodes: {note} (-)" in first(text)
    assert f"  -  {note}: normal where that gateway routes" in text
    _, text = await nodes.ask("why", "pod/a1", "svc/unrouted:tcp")
    assert "leave by the default route" not in text


async def test_a_missing_route_to_the_pods_of_the_clients_node(nodes: ThreeNodes) -> None:
    nodes.live.service("unreturned", "b1 a1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/unreturned:tcp")
    gateway = NODES["node-c"].ip
    pod = f"{ip(nodes, 'a1')} (default/a1) on node-a"
    note = f"  -  packets to {pod} leave by the default route, to {gateway}: normal where"
    async with by_default_route(nodes, "node-b", "10.244.0.0/24", ip(nodes, "node"), gateway):
        status, text = await nodes.ask("why", "pod/a1", "svc/unreturned:tcp")
        assert (status, note in text) == (0, False), text  # the gateway routes the answers, as in some clouds
        await nodes.drop("node-c", "forward", f"ip daddr {ip(nodes, 'a1')}")
        try:
            _, text = await nodes.ask("why", "pod/a1", "svc/unreturned:tcp")
        finally:
            await nodes.admit("node-c")
    assert note in text, text


@pytest.mark.parametrize("hop", ["none", "silent", "another"])
async def test_a_route_to_the_pods_of_the_clients_node_by_another_interface(nodes: ThreeNodes, hop: str) -> None:
    """A strict reverse path filter then drops the requests on the endpoint's node."""
    nodes.live.service(f"filtered-{hop}", "b1")
    front = nodes.live.front(f"filtered-{hop}")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", f"svc/filtered-{hop}:tcp")
    lines = ["link add up2 type veth peer name up3", "link set up3 up", "link set up2 up"]
    lines += ["addr add 172.30.0.1/24 dev up2"] if hop != "none" else []
    lines += ["neigh add 172.30.0.2 dev up2 lladdr 02:00:00:00:00:99 nud permanent"] if hop == "another" else []
    way = "dev up2" if hop == "none" else "via 172.30.0.2"
    for line in (*lines, f"route replace 10.244.0.0/24 {way}"):
        await nodes.run("node-b", "ip", *line.split())
    await nodes.run("node-b", "sysctl", "-qw", "net.ipv4.conf.eth0.rp_filter=1")
    try:
        found = await nodes.live.cluster.probes("a1", "tcp", *front, 1, 1.0)
        assert [str(one) for one in found] == ["timeout"]
        status, text = await nodes.ask("why", "pod/a1", f"svc/filtered-{hop}:tcp")
        _, traced = await nodes.ask("trace", "pod/a1", f"svc/filtered-{hop}:tcp", "--seconds", "3")
    finally:
        await nodes.run("node-b", "sysctl", "-qw", "net.ipv4.conf.eth0.rp_filter=0")
        await nodes.run("node-b", "ip", "link", "del", "up2")
        await nodes.run("node-b", "ip", "route", "replace", "10.244.0.0/24", "via", ip(nodes, "node"))
    silent = (
        f"node-b does not deliver to {ip(nodes, 'b1')}:3000 (100.0% of the connections): the next hop of packets to "
    )
    known = f"the kernel drops packets of {ip(nodes, 'a1')} (default/a1) that arrive on eth0 (?)"
    if hop != "none":  # an interface without an address may be that of a pod
        assert f"went no further than prerouting: {known[:-4]}: its own route to" in traced.splitlines()[1], traced
    assert (status, (known if hop == "another" else silent) in first(text)) == (1 + (hop == "another"), True), text
    assert f"Fix: on node-b: see `ip route get {ip(nodes, 'a1')}`" in text


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_a_bridge_port_without_hairpin_mode(nodes: ThreeNodes, family: str) -> None:
    name = f"itself-{family.lower()}"
    nodes.live.service(name, "a1", ipFamilies=[family])
    front = nodes.live.front(name, family=family)
    place = f"[{front.address}]" if ":" in front.address else front.address
    await nodes.until(0, "kube-proxy forwards it", "why", "pod/a1", f"{place}:80")
    # The link's other end, eth0 in the pod, names the number of the port.
    number = (await nodes.live.run("cat", "/sys/class/net/eth0/iflink", place="a1")).strip()
    text = await nodes.live.run("ip", "-o", "link")
    (port,) = re.findall(rf"^{number}: (\w+)@", text, re.MULTILINE)
    await nodes.run("node-a", "ip", "link", "set", port, "type", "bridge_slave", "hairpin", "off")
    try:
        found = await nodes.live.cluster.probes("a1", "tcp", *front, 1, 1.0)
        assert [str(one) for one in found] == ["timeout"]
        status, text = await nodes.ask("why", "pod/a1", f"{place}:80")
        _, traced = await nodes.ask("trace", "pod/a1", f"{place}:80")
        other = await nodes.ask("why", "pod/a2", f"{place}:80")
    finally:
        await nodes.run("node-a", "ip", "link", "set", port, "type", "bridge_slave", "hairpin", "on")
    said = f"it does not get through: hairpin mode is off for {port} of the bridge cbr0 (x)\n"
    assert (status, said in text) == (1, True), text
    assert f"went no further than prerouting: hairpin mode is off for {port} of the bridge cbr0" in traced, traced
    assert "rp_filter" not in traced
    assert (other[0], "hairpin" in other[1]) == (0, False), other[1]


async def test_the_wrong_mode(nodes: ThreeNodes) -> None:
    await nodes.proxies["node-c"].stop()
    await nodes.run("node-c", "iptables-nft", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    await nodes.start("node-c", MODES["iptables-nft"].config)
    try:
        _, text = await nodes.ask("doctor")
    finally:
        await nodes.proxies["node-c"].stop()
        await nodes.run("node-c", "iptables-nft", "-t", "mangle", "-X", "KUBE-IPTABLES-HINT")
        await nodes.start("node-c")
    assert "3 of 3 nodes answered, 2 in nftables mode, 1 in iptables mode" in text
    assert "-  1 in iptables mode: node-c\n" in text


async def test_a_named_target_port_that_no_pod_has(nodes: ThreeNodes) -> None:
    nodes.live.service("named")
    nodes.live.endpoints("named", "a1 b1", ports=[])
    text = await nodes.until(1, ": refused, ", "why", "pod/a1", "svc/named:tcp")
    assert (
        "-  not to 10.244.0.10 (default/a1): the slice has no port tcp (TCP); it has none (ports in EndpointSlice "
        "named-ipv4)" in text
    )
    assert "Fix: without spec.selector (a slice made by hand), give a port of the slice the name 'tcp'" in text
    assert "(`kubectl -n default edit endpointslice named-ipv4`); with spec.selector, targetPort of default/n" in text
    assert "`kubectl -n default get service named -o jsonpath='{.spec.ports[*].targetPort}'`" in text


async def test_no_ready_endpoint(nodes: ThreeNodes) -> None:
    nodes.live.service("unready", "a1/unready b1/unready")
    text = await nodes.until(1, ": refused, ", "why", "pod/a1", "svc/unready:tcp")
    assert f"not to {ip(nodes, 'b1')}:3000: not ready (conditions.ready in EndpointSlice unready-ipv4)" in text
    assert "Fix: 2 endpoints are not ready: look at the readiness probes of the pods" in text


async def test_policy_local_without_a_local_endpoint(nodes: ThreeNodes) -> None:
    nodes.live.service("local", "a1", type="NodePort", externalTrafficPolicy="Local", internalTrafficPolicy="Local")
    port = nodes.live.front("local", "nodeport").port
    await nodes.until(1, "the client sees a timeout", "why", "node/node-a", f"node/node-b:{port}")
    for words, field in (((OUTSIDE, f"node/node-b:{port}"), "external"), (("pod/b1", "svc/local:tcp"), "internal")):
        text = await nodes.until(1, ": dropped, the client sees a timeout", "why", *words)
        assert "asked on node-b" in text
        local = "policy Local, and none of the Service's endpoints is on this node"
        assert f"x  {local} (spec.{field}TrafficPolicy)" in text
        assert (
            "Fix: run an endpoint on node-b (for example by a DaemonSet), connect to the NodePort of a node" in text
        ) is (field == "external")
    _, text = await nodes.ask("services", "svc/local")
    for front in (nodes.live.front("local"), nodes.live.front("local", "nodeport")):
        kind = "cluster" if front.port == 80 else "nodeport"
        assert re.search(
            rf"-  2 of 3 nodes: {kind} \S+:{front.port} \(tcp TCP IPv4\): dropped from .*, as policy", text
        ), text


async def test_source_ranges_that_exclude_the_client(nodes: ThreeNodes) -> None:
    nodes.live.service("ranges", "a1", type="LoadBalancer", loadBalancerSourceRanges=["10.1.0.0/16"])
    service = nodes.cluster.get
    await nodes.live.until(lambda: service("services", "ranges")["status"]["loadBalancer"].get("ingress"), "an address")
    front = nodes.live.front("ranges", "loadbalancer").address
    text = await nodes.until(1, "all 3 nodes: ", "why", OUTSIDE, f"{front}:80")
    assert f"{OUTSIDE} -> {front}:80/tcp: dropped, the client sees a timeout" in text
    assert f"{OUTSIDE} is not among the source ranges (10.1.0.0/16) (spec.loadBalancerSourceRanges)" in text
    assert f"Fix: add {OUTSIDE}/32 to spec.loadBalancerSourceRanges" in text


async def test_stale_rules_of_another_proxy(nodes: ThreeNodes) -> None:
    nodes.live.service("stale", "a1")
    await nodes.until(0, "3 of 3 nodes answered", "services", "svc/stale")
    address = nodes.live.front("stale").address
    chain = "KUBE-SVC-AAAAAAAAAAAAAAAA"
    for rule in (
        f"-N {chain}",
        f"-A {chain} -p tcp -j DNAT --to-destination {ip(nodes, 'a2')}:3000",
        "-N KUBE-SERVICES",
        "-I PREROUTING -j KUBE-SERVICES",
        f"-A KUBE-SERVICES -d {address}/32 -p tcp -m tcp --dport 80 -j {chain}",
    ):
        await nodes.run("node-b", "iptables-nft", "-t", "nat", *rule.split())
    try:
        await nodes.until(1, "x  1 of 3 nodes: left by another kube-proxy: 2 chains KUBE-... of iptables-nft", "doctor")
        text = await nodes.until(1, "asked on node-b", "why", "pod/b1", "svc/stale:tcp")
    finally:
        await nodes.run("node-b", "iptables-nft", "-t", "nat", "-F")
        await nodes.run("node-b", "iptables-nft", "-t", "nat", "-X")
    there = f", to {ip(nodes, 'a2')}:3000"
    taken = ": on node-b, kube-proxy forwards it, unless another kube-proxy's rules take it first"
    assert f"{taken}{there} (" in first(text), text
    assert f"left by another kube-proxy: 2 chains KUBE-... of iptables-nft, with rules for {address}:80{there}" in text


@pytest.mark.slow("a table of connections that is full")
async def test_a_full_connection_table(nodes: ThreeNodes) -> None:
    namespace = nodes.proxies["node-b"].namespace
    nodes.live.service("full", "b1")
    await nodes.until(0, "node-b delivers it", "why", "pod/a1", "svc/full:tcp")
    run_in(namespace, flush)  # entries of earlier connections would leave room when they expire
    most = run_in(namespace, limit)
    assert run_in(namespace, lambda: fill(most + 10)) >= most
    try:
        _, doctor = await nodes.ask("doctor")
        status, why = await nodes.ask("why", "pod/a1", "svc/full:tcp")
    finally:
        run_in(namespace, flush)
    assert "x  1 of 3 nodes: connection tracking is 100% full: " in doctor
    assert f"{LEAKING} has " in doctor
    assert status == 1
    assert ": node-b does not deliver to " in first(why)
    assert "connection tracking is 100% full" in first(why)


@pytest.mark.slow("a table of connections that is full")
async def test_a_full_connection_table_at_the_start(bare: Live) -> None:
    """The proxy does not reach the API server, and the answer names the cause first."""
    bare.service("full", "b1")
    await bare.start()  # the kernel tracks connections only in a namespace with rules that need this
    await bare.proxy.stop()
    namespace = bare.cluster.namespace_of("node")
    run_in(namespace, flush)  # entries of earlier connections would leave room when they expire
    most = run_in(namespace, limit)
    assert run_in(namespace, lambda: fill(most + 10)) >= most

    async def check() -> str:
        for words in ("why node full:80", "services", "services full"):
            status, text = await bare.ask(*words.split())
            if status != 2 or "the API server cannot be reached" not in text.partition("\n")[0]:
                return f"{words}: {status} {text}"
            assert text.startswith("Error: connection tracking is 100% full: "), text
            assert f"Fix: `kube-proxy conntrack` shows its Services and clients; {LEAKING} has " in text
        return ""

    try:
        await bare.start(ready_within=None)
        await bare.eventually(check)
    finally:
        run_in(namespace, flush)


@pytest.mark.slow("answers after three seconds each")
async def test_a_slow_api_server(nodes: ThreeNodes) -> None:
    nodes.cluster.server.faults.delay = 3.0
    try:
        status, text = await nodes.ask("doctor")
    finally:
        nodes.cluster.server.faults.delay = 0.0
    assert status == 1
    assert re.search(r"  x  .* nodes?: the API server is slow: it answered after \d+\.\d s\n", text), text
    assert "Fix: look at the health, the load and the log of the API server and of etcd" in text
