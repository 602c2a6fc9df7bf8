"""`kube-proxy doctor`: a healthy node has no finding; each deliberate fault is named with its fix."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from lab.proxyprocess import proxy_command
from lab.topology import NODE_A
from support.live import Live
from support.modes import MODES, modes

EVERY = modes(*MODES)
NFTABLES = modes("nftables")


async def findings(live: Live, *words: str) -> tuple[int, dict[str, dict[str, str]], list[str]]:
    """Return the exit code, the findings, the worst severity by subject, and the failed checks."""
    status, text = await live.ask("doctor", "-o", "json", *words)
    said = json.loads(text)
    return status, {one["about"]: one for one in reversed(said["findings"])}, said["unknown"]


async def named(live: Live, about: str, what: str, fix: str) -> None:
    """Wait until a finding appears, and check that it is counted."""

    async def check() -> str:
        status, found, _ = await findings(live)
        one = found.get(about, {"what": "", "fix": ""})
        return "" if status == 1 and what in one["what"] and fix in one["fix"] else f"{status} {found}"

    await live.eventually(check)


async def healthy(live: Live) -> None:
    async def check() -> str:
        status, found, unknown = await findings(live)
        return f"{status} {found} {unknown}" if status or found or unknown else ""

    await live.eventually(check)


@asynccontextmanager
async def sysctl(live: Live, name: str, value: str) -> AsyncIterator[None]:
    before = (await live.run("sysctl", "-n", name)).strip()
    await live.run("sysctl", "-w", f"{name}={value}")
    try:
        yield
    finally:
        await live.run("sysctl", "-w", f"{name}={before}")


@EVERY
async def test_a_healthy_node_has_no_finding(live: Live) -> None:
    live.service("fine", "a1 b1", type="NodePort")
    await live.expect(live.front("fine"), {"pod": live.mode.seen("a1 b1")})
    await healthy(live)
    status, text = await live.ask("doctor")
    assert (status, text.splitlines()[0].startswith("node-a: nothing is wrong (kube-proxy ")) == (0, True), text


@pytest.mark.slow("a cluster of another mode")
@modes(*sorted(MODES.keys() - {"userspace"}))  # in this mode connections end at the proxy, and none is forwarded
async def test_forwarding_that_was_switched_off_is_named(live: Live) -> None:
    async with sysctl(live, "net.ipv4.ip_forward", "0"):
        await named(live, "sysctl", "net.ipv4.ip_forward is 0", "sysctl -w net.ipv4.ip_forward=1")
    async with sysctl(live, "net.ipv6.conf.all.forwarding", "0"):
        await named(live, "sysctl", "net.ipv6.conf.all.forwarding is 0", "=1")
    (line,) = [x for x in (await live.run("ip", "-o", "-4", "addr")).splitlines() if f" {NODE_A.ip}/" in x]
    uplink = f"net.ipv4.conf.{line.split()[1]}.forwarding"
    async with sysctl(live, uplink, "0"):
        await named(live, "sysctl", f"{uplink} is 0", f"sysctl -w {uplink}=1")
    await healthy(live)


@NFTABLES
async def test_a_strict_filter_hurts_where_answers_leave_elsewhere(live: Live) -> None:
    (line,) = [x for x in (await live.run("ip", "-o", "-4", "addr")).splitlines() if f" {NODE_A.ip}/" in x]
    uplink = line.split()[1]
    async with sysctl(live, f"net.ipv4.conf.{uplink}.rp_filter", "1"):
        await healthy(live)  # answers return the same way
        await live.run("ip", "link", "add", "other0", "type", "bridge")
        await live.run("ip", "link", "set", "other0", "up")
        await live.run("ip", "route", "add", "198.51.100.0/24", "dev", "other0")
        try:
            await named(live, "sysctl", f"answers from {NODE_A.ip} on {uplink} leave by other0", "rp_filter=2")
        finally:
            await live.run("ip", "link", "del", "other0")
    await healthy(live)


@NFTABLES
async def test_a_firewall_that_accepts_nothing_differs_from_one_that_might_accept(live: Live) -> None:
    await live.nft("add table inet strict")
    await live.nft("add chain inet strict forward { type filter hook forward priority 10; policy drop; }")
    await live.nft("add rule inet strict forward ct state established,related accept")
    try:
        await named(live, "firewall", "table inet strict, chain forward: drops all new", "ct status dnat accept")
        await live.nft("add rule inet strict forward ct status dnat accept")
        status, found, _ = await findings(live)
        assert (status, found["firewall"]["severity"]) == (0, "note")
    finally:
        await live.nft("delete table inet strict")
    await healthy(live)


@NFTABLES
async def test_rules_of_another_mode_are_named(live: Live) -> None:
    chains = (("iptables-nft", "KUBE-SERVICES"), ("iptables-legacy", "KUBE-SVC-AAAAAAAAAAAAAAAA"))

    async def each(action: str) -> None:
        for command, chain in chains:
            await live.cluster.exec("node", [command, "-t", "nat", action, chain])

    async def check() -> str:
        await each("-N")  # repeated, because a newly started proxy removes such tables once
        status, text = await live.ask("doctor")
        wanted = (
            "left by another kube-proxy: 1 chain KUBE-... of iptables-legacy, 1 chain KUBE-... of iptables-nft\n",
            "both variants of iptables have a kube-proxy's IPv4 chains: 1 in legacy and 1 in nft",
        )
        return "" if status == 1 and all(sentence in text for sentence in wanted) else text

    try:
        await live.eventually(check)
    finally:
        await each("-X")
        await live.nft("delete", "table", "ip", "nat")
    await healthy(live)


@pytest.mark.slow("a cluster of another mode")
@modes("iptables-nft", "iptables-legacy", "userspace")
async def test_rules_of_each_other_mode_are_named(live: Live) -> None:
    chain = "KUBE-SVC-AAAAAAAAAAAAAAAA"
    tables = [name for name in ("kube-proxy", "kube-proxy-userspace") if not name.endswith(live.mode.name)]
    others = [f"iptables-{one}" for one in ("nft", "legacy") if one != live.mode.variant]

    async def check() -> str:
        for command in others:  # repeated, because a newly started proxy removes such tables once
            await live.cluster.exec("node", [command, "-t", "nat", "-N", chain])
        for name in tables:
            await live.nft(f"add table ip {name}; add chain ip {name} services")
        status, text = await live.ask("doctor")
        wanted = [f"nf_tables table ip {name}" for name in tables]
        if live.mode.variant:
            wanted.append("both variants of iptables have a kube-proxy's IPv4 chains: ")
        else:
            wanted += [f"1 chain KUBE-... of {command}" for command in others]
        is_one = text.count("left by another kube-proxy: ") == 1 or bool(live.mode.variant)
        return "" if status == 1 and is_one and all(sentence in text for sentence in wanted) else text

    try:
        await live.eventually(check)
    finally:
        for command in others:
            await live.cluster.exec("node", [command, "-t", "nat", "-X", chain])
        for name in tables:
            await live.nft(f"add table ip {name}; delete table ip {name}")
    await healthy(live)


@NFTABLES
async def test_an_interface_of_pods_that_is_down_is_named(live: Live) -> None:
    await live.run("ip", "link", "add", "spare0", "type", "bridge")
    await live.run("ip", "addr", "add", "10.244.0.200/29", "dev", "spare0")
    try:
        what = "spare0, which has the address 10.244.0.200 of the pod network, is down"
        await named(live, "interfaces", what, "ip link set spare0 up")
        live.service("reached", "a1")
        front = live.front("reached")
        await live.expect(front, {"pod": "a1"})
        status, text = await live.ask("why", "10.244.0.201", f"{front.address}:80", "--no-probe")
        assert (status, f"x  {what}" in text) == (1, True), text
        assert "spare0" not in (await live.ask("why", live.ips["pod"]["IPv4"], f"{front.address}:80"))[1]
        await live.run("ip", "link", "set", "spare0", "up")
        await healthy(live)  # a bridge without pods has no carrier
        status, text = await live.ask(
            "plan", "--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "spare1"
        )
        named_there = "x  pods of this node count as outside: there is no interface spare1" in text
        assert (status, named_there) == (1, True), text
    finally:
        await live.run("ip", "link", "del", "spare0")
    await healthy(live)


@NFTABLES
async def test_a_filter_of_a_device_is_noted(live: Live) -> None:
    await live.nft(
        "table inet guard { chain early { type filter hook ingress device eth0 priority 0; tcp dport 9 drop; }; }"
    )
    try:
        _, text = await live.ask("doctor")
        assert "table inet guard may drop packets too: early at ingress" in text, text
    finally:
        await live.nft("delete table inet guard")
    await healthy(live)


@pytest.mark.slow("a cluster of its own")
@NFTABLES
async def test_a_table_that_another_program_owns(bare: Live) -> None:
    await bare.start()
    await healthy(bare)
    command = ["ip", "netns", "exec", bare.proxy.namespace, "nft", "-i"]
    pipe = asyncio.subprocess.PIPE
    owner = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
    assert owner.stdin is not None
    try:
        owner.stdin.write(b"delete table ip kube-proxy; add table ip kube-proxy { flags owner; }\n")
        await named(bare, "kernel", "the kernel refuses changes of IPv4", "correct the cause that the message names")
    finally:
        owner.stdin.close()
        await owner.wait()
    await healthy(bare)


@NFTABLES
async def test_looking_writes_nothing(live: Live) -> None:
    async def state() -> list[object]:
        tables = [f"/proc/self/net/{name}_tables_names" for name in ("ip", "ip6")]
        read = [await live.cluster.exec("node", ["cat", name]) for name in ("/proc/modules", *tables)]
        return [await live.nft("-s", "list", "ruleset"), *read]

    before = await state()
    await healthy(live)
    assert await state() == before


@NFTABLES
async def test_a_configuration_file_that_became_invalid_is_named(live: Live) -> None:
    file = live.proxy.config
    before = file.read_text()
    file.write_text(before + "\nnodePortAddresses: [10.0.0.0/99]\nbindAddress: nowhere\n")
    try:
        await named(live, "configuration", "nodePortAddresses[0]", str(file))
        _, found, _ = await findings(live)
        assert "bindAddress" in found["configuration"]["what"]
    finally:
        file.write_text(before)
    await healthy(live)


@NFTABLES
async def test_a_second_proxy_is_named_with_its_mode(live: Live) -> None:
    first = live.proxy
    ports = {"healthzBindAddress": "0.0.0.0:20256", "metricsBindAddress": "127.0.0.1:20249"}
    await live.start({**ports, "mode": "userspace"}, command=["env", proxy_command()], ready_within=None)
    second = live.proxies.pop()
    try:
        await named(live, "proxies", f"(pid {second.pid}) in userspace mode", "stop one kube-proxy")
    finally:
        await second.stop()
    for table in ("ip kube-proxy-userspace", "ip6 kube-proxy-userspace"):
        # The proxy may have been stopped before it created the table.
        await live.nft(f"add table {table}; delete table {table}")
    assert live.proxy is first
    await healthy(live)


@pytest.mark.slow("a cluster of its own")
@NFTABLES
async def test_a_node_of_another_name(bare: Live) -> None:
    bare.service("web", "a1", type="NodePort")
    await bare.start({"hostnameOverride": "node-b"})
    await named(bare, "node", "Node node-b has the addresses", "hostnameOverride")
    front = bare.front("web", "nodeport")  # in nftables mode NodePorts answer on the Node's addresses
    answers = await bare.cluster.probes("outside", "tcp", *front, 1, 0.4)
    status, text = await bare.ask("why", bare.ips["outside"]["IPv4"], f"{front.address}:{front.port}")
    assert (status, [str(one) for one in answers]) == (1, ["refused"]), text
    assert "(x), but the proxy may have another node's name: Node node-b has the addresses" in text
    assert ("Fix: set hostnameOverride" in text, "plan --nodeport-addresses" in text) == (True, False), text
    await bare.proxy.stop()
    await bare.start({"hostnameOverride": "nobody"}, ready_within=None)
    await named(bare, "node", "there is no Node nobody", "hostnameOverride")


@pytest.mark.slow("a cluster of its own")
@NFTABLES
async def test_an_api_server_that_is_gone_and_no_proxy_at_all(bare: Live) -> None:
    await bare.start()
    await healthy(bare)
    await bare.cluster.server.refuse()
    await named(bare, "api", "the API server cannot be reached at", "reachable from this node")
    await bare.proxy.stop()
    status, found, unknown = await findings(bare)
    assert "leftovers" in found  # its rules remain
    assert (status, "no kube-proxy answers" in unknown[0]) == (1, True)


@NFTABLES
async def test_a_node_that_was_deleted_is_named(bare: Live) -> None:
    bare.service("web", "a1")
    await bare.start()
    bare.cluster.store.remove("nodes", ("", "node-a"))
    await named(bare, "node", "Node node-a was deleted", "restart its kubelet")
    _, text = await bare.ask("why", "node", "default/web:80")
    assert "  -  Node node-a was deleted: the proxy uses the last state of the Node" in text, text


@NFTABLES
async def test_without_a_proxy_nothing_is_promised(bare: Live, tmp_path: Path) -> None:
    status, out, err = await bare.cluster.exec("node", ["true"])
    assert status == 0, out + err
    await bare.start()
    config = bare.proxy.config
    kubeconfig = yaml.safe_load(config.read_text())["clientConnection"]["kubeconfig"]
    copied = shutil.copy(kubeconfig, tmp_path)  # another kubeconfig is no difference from the running configuration
    for given, file in (
        (("--config", str(config)), kubeconfig),
        (("--config", str(config)), copied),
        (("--hostname-override", "node-a"), kubeconfig),
    ):
        status, found, unknown = await findings(bare, *given, "--kubeconfig", file)
        runs = (
            f"a kube-proxy runs here (pid {bare.proxy.pid}), and was not asked: leave out --manifests and --kubeconfig"
        )
        assert (status, found, unknown) == (2, {}, [runs])
    _, text = await bare.ask("doctor", "--kubeconfig", kubeconfig, "--hostname-override", "node-b")
    assert text.startswith("Error: this machine is not Node node-b: "), text
    assert "`kubectl kubeproxy doctor --node node-b`" in text
    await bare.proxy.stop()
    # The last list is not needed by any plan, but the proxy waits for it.
    bare.cluster.faults.update({"delay": 0.3, "resources": ["servicecidrs"]})
    status, found, unknown = await findings(bare, "--config", str(config), "--kubeconfig", kubeconfig)
    assert (status, set(found), unknown) == (1, {"leftovers"}, ["no kube-proxy runs here"])
    for family in ("ip", "ip6"):
        await bare.nft(f"delete table {family} kube-proxy")
    status, text = await bare.ask("doctor")
    assert (status, text.startswith("Error: this machine is no node: no kubelet runs here, ")) == (2, True), text
    status, found, unknown = await findings(bare, "--config", str(config))
    assert (status, set(found)) == (1, {"kernel"}), found
    assert "the kernel has no rules of a kube-proxy" in found["kernel"]["what"]
    assert "no kube-proxy answers" in unknown[0]
