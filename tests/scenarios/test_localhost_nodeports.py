"""NodePorts on loopback in nftables mode, if enabled: TCP is relayed, other protocols are refused and counted."""

from __future__ import annotations

import socket

import pytest

from lab.netns import open_socket_in, run_in
from support.live import Front, Live

DUAL = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}
GATE = {"KubeProxyNFTablesLocalhostNodePorts": True}
RELAYED = {"mode": "nftables", "featureGates": GATE, "nodePortAddresses": ["primary", "localhost"]}
LOOPBACK = {"IPv4": "127.0.0.1", "IPv6": "::1"}
REJECTED = 'kubeproxy_nftables_localhost_nodeport_rejected_packets_total{{ip_family="{}",protocol="{}"}}'
LISTENERS = 'kubeproxy_nftables_localhost_nodeport_listeners{{ip_family="{}"}}'


def loopback(live: Live, name: str, family: str, port: int = 0) -> Front:
    return Front(LOOPBACK[family], live.front(name, "nodeport", family, port=port).port)


async def test_tcp_is_relayed_and_the_rest_is_refused_and_counted(bare: Live) -> None:
    bare.service("web", "a1 b1", type="NodePort", **DUAL)
    bare.service("near", "a2 b2", type="NodePort", externalTrafficPolicy="Local", **DUAL)
    bare.service("far", "b3", type="NodePort", externalTrafficPolicy="Local", **DUAL)
    bare.service("sticky", "a1 b1", type="NodePort", sessionAffinity="ClientIP", **DUAL)
    await bare.start(RELAYED)
    for family in LOOPBACK:
        await bare.expect(loopback(bare, "web", family), {"node": "a1 b1"}, "tcp")
        await bare.expect(loopback(bare, "near", family), {"node": "a2"}, "tcp")
        await bare.expect(loopback(bare, "far", family), {"node": "refused"}, "tcp")
        assert await bare.metric(LISTENERS.format(family)) == 3
        for name in ("web", "sticky"):
            before = await bare.metric(REJECTED.format(family, "UDP"))
            assert await bare.cluster.probe("node", "udp", *loopback(bare, name, family, 1), 3.0, None) == "refused"
            assert await bare.metric(REJECTED.format(family, "UDP")) == before + 1
        met = {await answered(bare, loopback(bare, "sticky", family)) for _ in range(6)}
        assert len(met) == 1, f"affinity: {met}"
    await explained(bare)
    await weighed(bare)
    # NodePorts on the node's own addresses are unchanged.
    await bare.expect(bare.front("web", "nodeport"), {"outside": "a1 b1", "node": "a1 b1"})
    bare.endpoints("web", "b1")
    await bare.expect(loopback(bare, "web", "IPv4"), {"node": "b1"}, "tcp")
    bare.delete("web")
    await bare.eventually(lambda: listeners(bare, 2))


async def explained(live: Live) -> None:
    """`why` and `trace` follow a client's connection to the proxy; `why` recognises health check ports on loopback."""
    checked = live.service("checked", "a1", type="LoadBalancer", externalTrafficPolicy="Local", **DUAL)
    await live.expect(live.front("checked", "nodeport"), {"outside": "a1"})
    for family, address in LOOPBACK.items():
        shown = f"[{address}]" if ":" in address else address
        health = f"{shown}:{checked['spec']['healthCheckNodePort']}"
        code, _, _ = await live.cluster.exec(
            "node", ["curl", "-sf", "--retry", "5", "--retry-connrefused", f"http://{health}/"]
        )
        status, text = await live.ask("why", "node", health)
        assert (code, status, "answered by the proxy" in text) == (0, 0, True), text
        front = loopback(live, "web", family)
        place = f"{shown}:{front.port}"
        status, text = await live.ask("why", "node", place)
        assert (status, "kube-proxy forwards it" in text) == (0, True), text
        status, text = await live.ask("trace", "node", place)
        assert (status, f"the proxy answered, listening at {place}" in text) == (0, True), text
        assert "is no endpoint" not in text
        chain = "chain guard { type filter hook input priority 0;"
        await live.nft(f"table inet fw {{ {chain} iif lo tcp dport {front.port} drop; }}; }}")
        try:
            assert await answered(live, front) == "timeout"
            status, text = await live.ask("why", "node", place)
            drops = f"it does not get through: table inet fw, chain guard: drops what goes to {place} at the hook input"
            assert (status, drops in text) == (1, True), text
            _, text = await live.ask("trace", "node", place)
            assert f'rule "iif "lo" tcp dport {front.port} drop"' in text, text
        finally:
            await live.nft("delete table inet fw")
    live.delete("checked")


async def weighed(live: Live) -> None:
    """Weights have an effect: an endpoint with half the weight of the other one gets one of three connections."""
    live.service("weighed", "a3 b3", type="NodePort", **DUAL)
    await live.expect(loopback(live, "weighed", "IPv4"), {"node": "a3 b3"}, "tcp")
    live.cluster.patch("services", "weighed", {"metadata": {"annotations": {"kube-proxy-py/weights": "node-a=50"}}})
    front = loopback(live, "weighed", "IPv4")

    async def weighs() -> str:
        _, text = await live.ask("why", "node", f"{front.address}:{front.port}")
        return "" if "66.7% to" in text else text

    await live.eventually(weighs)
    met = [await answered(live, front) for _ in range(30)]
    assert (met.count("a3"), met.count("b3")) == (10, 20), met
    live.delete("weighed")


async def listeners(live: Live, wanted: int) -> str:
    found = await live.metric(LISTENERS.format("IPv4"))
    return "" if found == wanted else f"{found} listeners"


async def answered(live: Live, front: Front) -> str:
    answer = await live.cluster.probe("node", "tcp", *front, 3.0, None)
    return str(getattr(answer, "pod", answer))


async def test_a_port_of_another_program_is_not_the_proxys(bare: Live) -> None:
    here, port, health = bare.ips["node"]["IPv4"], 30114, 32105
    taken = [Front("127.0.0.1", port), Front(here, health)]
    sockets = [open_socket_in(bare.cluster.namespace_of("node"), socket.socket) for _ in taken]
    for one, place in zip(sockets, taken, strict=True):
        one.bind(place)
        one.listen()
    numbered = [{"name": "tcp", "port": 80, "protocol": "TCP", "targetPort": 3000, "nodePort": port}]
    local = {"externalTrafficPolicy": "Local", "healthCheckNodePort": health}
    bare.service("taken", "b1", type="NodePort", ports=numbered)
    bare.service("checked", "b1", type="LoadBalancer", **local)
    bare.service("free", "a1", type="NodePort")
    await bare.start(RELAYED)
    await bare.expect(bare.front("free", "nodeport"), {"outside": "a1"})
    for front in taken:
        status, text = await bare.ask("why", "node", f"{front.address}:{front.port}")
        said = f": {front.address}:{front.port} is not the proxy's: process "
        assert (status, said in text.splitlines()[0], "Fix: stop the other program" in text) == (1, True, True), text
    for command in (("doctor",), ("verify",), ("verify", "taken"), ("verify", "checked")):
        status, text = await bare.ask(*command)
        named = [line for line in text.splitlines() if "is not the proxy's: process " in line]
        wanted = [("spec.ports[].nodePort", "taken", taken[0]), ("spec.healthCheckNodePort", "checked", taken[1])]
        for field, name, front in wanted:
            line = f"  x  {field} of default/{name}: {front.address}:{front.port} is not the proxy's: process "
            is_asked = command[1:] in {(), (name,)}
            assert any(one.startswith(line) for one in named) == is_asked, text
        assert (status, "Fix: stop the other program" in text) == (1, True), text
    for one in sockets:
        one.close()

    async def served() -> str:
        status, text = await bare.ask("why", "node", f"{here}:{health}")
        return "" if "is not the proxy's" not in text and "answered by the proxy" in text else f"{status} {text}"

    await bare.eventually(served)
    for command in ("doctor", "verify"):
        _, text = await bare.ask(command)
        assert "is not the proxy's" not in text, text


@pytest.mark.quick("addresses0")
@pytest.mark.parametrize("addresses", [["primary"], ["all"]])
async def test_nodeports_on_loopback_are_served_only_if_configured(bare: Live, addresses: list[str]) -> None:
    bare.service("web", "a1", type="NodePort", **DUAL)
    await bare.start(RELAYED | {"nodePortAddresses": addresses})
    await bare.expect(bare.front("web", "nodeport"), {"outside": "a1"})
    for family in LOOPBACK:
        assert await answered(bare, loopback(bare, "web", family)) == "refused"
        assert await bare.metric(REJECTED.format(family, "TCP")) >= 1


@pytest.mark.slow("three proxies one after the other")
async def test_a_restart_with_other_addresses_serves_at_once(bare: Live) -> None:
    """Upstream's bug 142183: clients that were refused before the restart were still refused after it."""
    bare.service("web", "a1", type="NodePort", **DUAL)
    await bare.start(RELAYED | {"nodePortAddresses": ["primary"]})
    assert await answered(bare, loopback(bare, "web", "IPv4")) == "refused"
    await bare.proxy.kill()
    await bare.start(RELAYED)
    for family in LOOPBACK:
        await bare.expect(loopback(bare, "web", family), {"node": "a1"}, "tcp")
    await bare.proxy.stop()
    await bare.start({"mode": "nftables", "nodePortAddresses": ["primary", "localhost"]})
    assert "localhost" not in await bare.nft("list", "table", "ip", "kube-proxy"), "without the gate nothing is there"


async def test_a_port_of_another_program_is_named_and_taken_when_it_is_free(bare: Live) -> None:
    bare.service("web", "a1", type="NodePort", **DUAL)
    front = loopback(bare, "web", "IPv4")
    other = run_in(bare.cluster.namespace_of("node"), lambda: socket.create_server(front))
    with other:
        await bare.start(RELAYED)
        await bare.until(
            lambda: bare.logged("cannot listen on 127.0.0.1 port .* does another program use it"), "a word"
        )
        failures = 'kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total{ip_family="IPv4"}'
        assert await bare.metric(failures) == 1
    await bare.expect(front, {"node": "a1"}, "tcp")


async def test_the_setting_that_closes_nodeports_on_loopback_in_iptables_mode_is_named(bare: Live) -> None:
    bare.service("web", "a1 b1", type="NodePort")
    front, off = loopback(bare, "web", "IPv4"), {"iptables": {"localhostNodePorts": False}}
    place, outside = f"127.0.0.1:{front.port}", {"nodePortAddresses": ["192.168.0.0/16"]}
    await bare.start({"mode": "iptables"})
    await bare.expect(front, {"node": "a1 b1"}, "tcp")
    await bare.run("sysctl", "-qw", "net.ipv4.conf.all.route_localnet=0")
    assert await answered(bare, front) == "timeout"
    for words in ("why --no-probe", "trace"):
        status, text = await bare.ask(*words.split(), "node", place)
        assert (status, "net.ipv4.conf.all.route_localnet is 0, it should be 1" in text) == (1, True), text
        assert "Fix: sysctl -w net.ipv4.conf.all.route_localnet=1" in text, text
    await bare.proxy.stop()
    closed = "but not on this address: iptables.localhostNodePorts is false"
    for config, more in ((off, ""), (off | outside, ", and nodePortAddresses excludes this address")):
        await bare.start({"mode": "iptables"} | config)
        assert await answered(bare, front) == "refused"
        for words in ("why", "trace"):
            status, text = await bare.ask(words, "node", place)
            assert (status, f"{closed}{more}" in text, ", and node" in text) == (1, True, bool(more)), text
        await bare.proxy.stop()
    await bare.start({"mode": "iptables"} | outside)
    status, text = await bare.ask("why", "node", place)
    assert (status, "localhostNodePorts" in text, "they answer on 192.168.100.2" in text) == (1, False, True), text
