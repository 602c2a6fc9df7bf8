"""`kube-proxy verify` with a running proxy: it reports other programs' changes by Service, and nothing else.

The proxy repairs such changes, often within a second: so the tests make each change again and again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.ipvs import (
    Ipvs,
    RealServer,
    ServerChange,
    Verb,
    VirtualServer,
    server_key,
)
from kubeproxy.model.addresses import pack
from lab.netns import run_in_async
from lab.proxyprocess import proxy_command
from support.live import TIMEOUT, Front, Live
from support.modes import modes
from support.owned import owned_table

ALL = ("nftables", "iptables-nft", "iptables-legacy", "userspace", "ipvs")
every_mode = modes(*ALL)

PROXY = {"nftables": {"syncPeriod": "1h"}}  # elements that other programs change remain changed


async def differs(
    live: Live, harm: Callable[[], Awaitable[object]], *said: str, words: tuple[str, ...] = ("verify",)
) -> str:
    """Repeat a change, and run the command until its output contains all of these texts; return the output."""
    ended = asyncio.Event()

    async def go_on() -> None:
        while not ended.is_set():
            await harm()
            await asyncio.sleep(0.02)

    harming = asyncio.create_task(go_on())
    until = time.monotonic() + 2 * TIMEOUT
    try:
        while True:
            status, text = await live.ask(*words)
            if status == 1 and all(part in text for part in said):
                return text
            assert time.monotonic() < until, f"{said} expected, got exit code {status}:\n{text}"
    finally:
        ended.set()
        await harming


async def equal(live: Live, *words: str) -> str:
    """Run the command until it reports no difference; return its output."""
    until = time.monotonic() + 2 * TIMEOUT
    while True:
        status, text = await live.ask("verify", *words)
        if status == 0:
            return text
        assert time.monotonic() < until, text


async def remove_endpoint(live: Live, front: Front, pod: str) -> None:
    """As another program, remove a pod from the TCP endpoints of a front, if present."""
    ip = live.ips[pod]["IPv4"]
    if live.mode.name == "nftables":
        await remove_element(live, "endpoints", [front.address, "tcp", front.port], ip)
    elif live.mode.name == "userspace":
        where = ["ip", "kube-proxy-userspace", "outside-services", f"{{ {front.address} . tcp . {front.port} }}"]
        await live.cluster.exec("node", ["nft", "delete", "element", *where])
    elif live.mode.name == "ipvs":
        real = RealServer(pack(ip) + (3000).to_bytes(2, "big"))
        await operate(live, ServerChange(Verb.DELETE_SERVER, VirtualServer(_key(front)), real))
    else:
        command = f"iptables-{live.mode.variant}"
        rules = (await live.run(command, "-w", "-t", "nat", "-S")).splitlines()
        for rule in (rule for rule in rules if "-A KUBE-SVC-" in rule and f"-> {ip}:3000" in rule and ":tcp" in rule):
            words = [word.strip('"') for word in rule.replace(" -> ", "_->_").split()]
            words = [word.replace("_->_", " -> ") for word in words]
            await live.cluster.exec("node", [command, "-w", "-t", "nat", "-D", *words[1:]])


def _key(front: Front) -> bytes:
    return server_key(pack(front.address), 6, front.port)


async def operate(live: Live, operation: ServerChange) -> None:
    """As another program, change a virtual server, if it exists."""

    def apply() -> None:
        with Ipvs.open() as kernel, suppress(ApplyError):
            kernel.apply([operation])

    await run_in_async(live.proxy.namespace, apply)


STRAYS = {
    "nftables": ("ip", "kube-proxy", "cluster-ips", "{ 10.96.99.99 }"),
    "userspace": ("ip", "kube-proxy-userspace", "outside-services-dropped", "{ 10.96.99.99 . tcp . 80 }"),
}
"""Elements without a Service."""


async def add_something(live: Live) -> None:
    """As another program, add elements without a Service to the proxy's sets, if missing."""
    if live.mode.name in STRAYS:
        await live.cluster.exec("node", ["nft", "add", "element", *STRAYS[live.mode.name]])
    elif live.mode.name == "ipvs":
        await operate(live, ServerChange(Verb.ADD_SERVICE, VirtualServer(_key(Front("198.51.100.9", 80)))))
    else:
        rule = ["KUBE-NODEPORTS", "-p", "tcp", "-m", "tcp", "--dport", "1", "-j", "ACCEPT"]
        command = [f"iptables-{live.mode.variant}", "-w", "-t", "nat"]
        if (await live.cluster.exec("node", [*command, "-C", *rule]))[0]:
            await live.cluster.exec("node", [*command, "-A", *rule])


async def flush_chain(live: Live) -> str:
    """As another program, flush a chain that all Services share; return its name."""
    if live.mode.name in {"nftables", "userspace"}:
        table = "kube-proxy" if live.mode.name == "nftables" else "kube-proxy-userspace"
        await live.cluster.exec("node", ["nft", "flush", "chain", "ip", table, "nat-prerouting"])
        return "nat-prerouting"
    await live.cluster.exec("node", [f"iptables-{live.mode.variant}", "-w", "-t", "nat", "-F", "KUBE-POSTROUTING"])
    return "KUBE-POSTROUTING"


async def remove_element(live: Live, name: str, key: list, ip: str) -> None:
    listed = await live.nft("-j", "list", "map", "ip", "kube-proxy", name)
    (entries,) = [part["map"].get("elem", ()) for part in json.loads(listed)["nftables"] if "map" in part]
    for found, value in ((k["concat"], v["concat"]) for k, v in entries):
        if found[: len(key)] == key and value[0] == ip:
            text = " . ".join(map(str, found))
            await live.nft("delete", "element", "ip", "kube-proxy", name, f"{{ {text} }}")


@every_mode
async def test_nothing_differs(live: Live) -> None:
    live.service("fine", "a1 b1", type="LoadBalancer", loadBalancerSourceRanges=["10.1.0.0/16", "10.2.3.4/32"])
    live.service("first", "a1", sessionAffinity="ClientIP")
    await live.programmed(live.front("first"), "a1")
    live.service("sticky", "a1 b1", type="NodePort", externalTrafficPolicy="Local", sessionAffinity="ClientIP")
    await live.programmed(live.front("sticky"), "a1 b1")
    live.delete("first")
    live.service("local", "b1", type="NodePort", externalTrafficPolicy="Local")
    live.service("external", "a1", externalIPs=["198.51.100.7"])
    live.service("empty", "a1/unready", type="NodePort")
    await live.expect(live.front("empty"), {"pod": "refused"})
    text = await equal(live)
    assert "Services in the kernel as planned" in text
    for name in ("fine", "sticky", "local", "external", "empty"):
        assert "ok 1 Service in" in await equal(live, name)
    status, text = await live.ask("verify", "-o", "json", "--api")
    report = json.loads(text)
    assert (status, report["findings"], report["behind"], report["troubles"]) == (0, [], [], [])


@pytest.mark.slow("several questions")
@modes("nftables")
async def test_clients_that_another_program_gave_away(live: Live) -> None:
    names = ("sticky-one", "sticky-two")
    for name in names:
        live.service(name, "a1 b1", sessionAffinity="ClientIP")
        await live.programmed(live.front(name), "a1 b1")
    one, two = (f"{live.front(name).address} . tcp . 80" for name in names)
    pools = ("ip", "kube-proxy", "session-pools")
    listed = await live.nft("get", "element", *pools, f"{{ {one} }}")
    number = listed.rpartition(" : ")[2].split()[0]

    async def give_away() -> None:
        # Immediately, because between two transactions the proxy may restore it.
        await live.nft(
            *("delete", "element", *pools, f"{{ {two} }}", ";"), *("add", "element", *pools, f"{{ {two} : {number} }}")
        )

    different = f"default/sticky-two: different: {live.front('sticky-two').address}:80/tcp"
    await differs(live, give_away, different, f"session affinity uses the pool number {number}")
    for name in names:
        live.delete(name)


@every_mode
async def test_an_endpoint_that_another_program_removed(live: Live) -> None:
    live.service("robbed", "a1 b1")
    front = live.front("robbed")
    await live.programmed(front, "a1 b1")
    for words in (("verify", "robbed"), ("verify",)):
        text = await differs(
            live,
            lambda: remove_endpoint(live, front, "a1"),
            "default/robbed: missing: ",
            "Fix: the proxy repairs differences",
            words=words,
        )
        if live.mode.name != "userspace":
            assert f"endpoint {live.ips['a1']['IPv4']}:3000" in text
        else:
            assert f"{front.address}:80/tcp" in text
    where = ("why", live.ips["outside"]["IPv4"], f"{front.address}:80", "--no-probe")
    at_proxy = live.mode.name == "userspace"  # the only element for clients from outside is deleted
    heading = "it does not get through: the kernel's rules do not lead" if at_proxy else "but not all is well: "
    text = await differs(live, lambda: remove_endpoint(live, front, "a1"), heading, "(read now)", words=where)
    if live.mode.name != "userspace":
        assert "x  the kernel has 1 of 2 endpoints (read now)" in text
    assert "Fix: the proxy repairs differences" in text
    live.delete("robbed")
    await equal(live)  # in iptables mode other Services lose this endpoint as well


@pytest.mark.slow("several questions")
@every_mode
async def test_why_looks_at_the_kernel(live: Live) -> None:
    live.service("asked", "a1 b1", type="LoadBalancer", loadBalancerSourceRanges=["10.1.0.0/16"])
    live.service("unserved", "a1/unready")
    await live.expect(live.front("asked"), {"pod": "a1 b1"})
    await live.expect(live.front("unserved"), {"pod": "refused"})
    status, text = await live.ask("why", "node", "default/asked:80")
    there = "lead to the proxy's listener as planned" if live.mode.name == "userspace" else "2 of 2 endpoints"
    assert (status, there in text) == (0, True), text
    status, text = await live.ask("why", live.ips["pod"]["IPv4"], "default/unserved:80")
    assert (status, "ok refused is what the kernel has (read now)" in text) == (1, True), text
    balancer = live.front("asked", "loadbalancer")
    status, text = await live.ask("why", live.ips["outside"]["IPv4"], f"{balancer.address}:80")
    assert (status, "ok dropped is what the kernel has (read now)" in text) == (1, True), text


@every_mode
async def test_elements_without_a_service(live: Live) -> None:
    await differs(live, lambda: add_something(live), "no Service's: too many: ")
    if live.mode.name in STRAYS:  # the proxy notices this within a sync period, for which a test does not wait
        await live.cluster.exec("node", ["nft", "delete", "element", *STRAYS[live.mode.name]])
    await equal(live)


@modes(*(name for name in ALL if name != "ipvs"))  # the guest's only CPU is too slow to flush it often enough
async def test_a_chain_that_another_program_flushed(live: Live) -> None:
    chain = await flush_chain(live)
    await differs(live, lambda: flush_chain(live), "no Service's: ", chain)
    await equal(live)


@pytest.mark.slow("changes without end")
@every_mode
async def test_changes_that_go_on_are_no_differences(live: Live) -> None:
    names = [f"busy-{number}" for number in range(20)]
    for name in names:
        live.service(name, "a1 b1")
    await live.expect(live.front(names[-1]), {"pod": "a1 b1"})
    ended, changes = asyncio.Event(), 0

    async def change() -> None:
        nonlocal changes
        while not ended.is_set():
            live.endpoints(names[changes % len(names)], ("a1 b1", "a1 b1 a2", "b1")[changes % 3])
            changes += 1
            await asyncio.sleep(TIMEOUT / 3000)  # an emulated kernel needs longer for each change

    changing = asyncio.create_task(change())
    try:
        for words in (("verify",), ("verify",), ("verify", names[0])):
            _, text = await live.ask(*words)
            assert "differences in" not in text, text
    finally:
        ended.set()
        await changing
    assert changes > 20
    await equal(live)


@pytest.mark.slow("a cluster of its own")
async def test_a_table_of_another_owner_and_the_changes_that_wait(bare: Live) -> None:
    bare.service("web", "a1 b1")
    await bare.start()
    await bare.programmed(bare.front("web"), "a1 b1")
    with owned_table(bare.proxy.namespace):

        async def refused() -> str:
            status, text = await bare.ask("verify")
            told = status == 1 and "no Service's: different: the table is another program's" in text
            fix = "Fix: the proxy cannot repair them while the kernel refuses its changes" in text
            return "" if told and fix and "the kernel refuses the IPv4 changes" in text else text

        await bare.eventually(refused)
        bare.service("late", "a1")

        async def queued() -> str:
            _, text = await bare.ask("verify", "late")
            way = "on their way into the kernel: default/late" in text
            return "" if way and "in the kernel as planned" not in text and "no Service " not in text else text

        await bare.eventually(queued)

    await bare.eventually(partial(repaired, bare))


@every_mode
async def test_an_unknown_service(live: Live) -> None:
    status, text = await live.ask("verify", "nobody")
    assert (status, "no Service default/nobody that is watched: there is none" in text) == (2, True), text


async def repaired(bare: Live) -> str:
    status, text = await bare.ask("verify")
    return text if status else ""


@modes("nftables", "iptables-nft", "userspace")
async def test_answers_from_objects_are_compared_with_the_rules_of_a_proxy_that_hangs(bare: Live) -> None:
    bare.service("web", "a1 a2")
    await bare.start()
    await bare.expect(bare.front("web"), {"pod": "a1 a2"})
    asked = ("--kubeconfig", str(bare.cluster.node_kubeconfig), "--hostname-override", "node-a")
    asked = (*asked, "--config", str(bare.proxy.config))
    why = ("why", "node", "default/web:80", "--no-probe", *asked)
    status, text = await bare.ask(*why)
    assert (status, "kube-proxy forwards it" in text, "and was not asked" in text) == (0, True, True), text
    os.kill(bare.proxy.pid, signal.SIGSTOP)
    try:
        hangs = f"a kube-proxy runs here (pid {bare.proxy.pid}), and hangs: "
        bare.endpoints("web", "a3")
        status, text = await bare.ask(*why)
        assert (status, hangs in text, f"`kill -CONT {bare.proxy.pid}`" in text) == (1, True, True), text
        if bare.mode.name != "userspace":
            old = " or ".join(f"{bare.ips[one]['IPv4']}:3000" for one in ("a1", "a2"))
            now = f"translates {bare.front('web').address}:80 to {old} at the hook output"
            first = f"kube-proxy forwards it, but not all is well: while the proxy hangs, .*: {now} \\(x\\)$"
            assert re.search(first, text.splitlines()[0]), text
            assert (text.count(hangs), "Fix: if a signal stopped the proxy, send SIGCONT; " in text) == (1, True), text
            status, text = await bare.ask("services", "web", *asked)
            assert (status, hangs in text, "its rules still serve 0 of 1 endpoint" in text) == (1, True, True), text
        if bare.mode.name == "iptables-nft":
            other = [*why[:-2], "--proxy-mode", "nftables"]
            status, text = await bare.ask(*other)
            assert (status, "no rules of nftables mode to compare" in text) == (2, True), text
        for command, code in (("doctor", 1), ("services", 2)):
            status, text = await bare.ask(command)
            assert (status, f"`kill -CONT {bare.proxy.pid}`" in text) == (code, True), text
    finally:
        os.kill(bare.proxy.pid, signal.SIGCONT)
    await bare.expect(bare.front("web"), {"pod": "a3"})
    status, text = await bare.ask(*why)
    assert (status, "kube-proxy forwards it" in text) == (0, True), text


@modes("nftables", "iptables-nft", "userspace")
async def test_the_rules_of_a_stopped_proxy_are_compared_with_the_objects(bare: Live) -> None:
    bare.service("web", "a1 a2")
    await bare.start()
    await bare.expect(bare.front("web"), {"pod": "a1 a2"})
    asked = ("services", "web", "--kubeconfig", str(bare.cluster.node_kubeconfig), "--hostname-override", "node-a")
    asked = (*asked, "--config", str(bare.proxy.config))
    status, text = await bare.ask(*asked)
    assert (status, "a kube-proxy runs here (pid " in text.splitlines()[0]) == (0, True), text
    if bare.mode.name == "nftables":
        os.kill(bare.proxy.pid, signal.SIGSTOP)
        hangs = f"  x  a kube-proxy runs here (pid {bare.proxy.pid}), and hangs: "
        status, text = await bare.ask("verify", *asked[1:])
        assert (status, hangs in text, "1 Service in the kernel as planned" in text) == (2, True, True), text
        await bare.nft("flush", "map", "ip", "kube-proxy", "cluster-services")
        status, text = await bare.ask("verify", *asked[1:])
        os.kill(bare.proxy.pid, signal.SIGCONT)
        fix = "Fix: if a signal stopped the proxy, send SIGCONT; "
        assert (status, fix in text, "start kube-proxy" in text) == (1, True, False), text
        await bare.expect(bare.front("web"), {"pod": "a1 a2"})
        await bare.eventually(partial(repaired, bare))
    await bare.proxy.stop()
    begin = "no kube-proxy runs here: the rules of the stopped proxy"
    if bare.mode.name == "userspace":
        status, text = await bare.ask(*asked)
        assert (status, text.splitlines()[0]) == (
            1,
            f"  x  {begin} lead to its listeners, which are closed, so nothing serves default/web",
        )
        return
    status, text = await bare.ask(*asked)
    served = f"  ?  {begin} still serve 2 of 2 endpoints of default/web (read now): "
    assert (status, text.startswith(served), "Fix: start kube-proxy on this node" in text) == (2, True, True), text
    status, text = await bare.ask("services", *asked[2:])
    count = f"  ?  {begin} still serve 3 of 3 endpoints of 2 Services (read now): "  # with default/kubernetes
    assert (status, text.startswith(count)) == (2, True), text
    if bare.mode.name != "nftables":
        status, text = await bare.ask("services", *asked[2:-2], "--proxy-mode", "nftables")
        assert (status, f"no rules of nftables mode, but of {bare.mode.config['mode']} mode" in text) == (2, True), text
        assert "Fix: give the --config of the stopped proxy" in text
        status, text = await bare.ask("verify", *asked[2:-2], "--proxy-mode", "nftables")
        uncompared = f"but of {bare.mode.config['mode']} mode; nothing was compared. Fix: give the --config"
        assert (status, uncompared in text) == (2, True), text
    bare.endpoints("web", "a1 a3")
    bare.service("late", "a1")
    status, text = await bare.ask(*asked)
    served = f"  x  {begin} still serve 1 of 2 endpoints of default/web (read now): they differ from "
    assert (status, text.startswith(served)) == (1, True), text
    status, text = await bare.ask("services", "late", *asked[2:])
    assert (status, " still serve 0 of 1 endpoint of default/late" in text.splitlines()[0]) == (1, True), text
    if bare.mode.name == "nftables":
        await bare.nft("flush", "chain", "ip", "kube-proxy", "nat-prerouting")
    else:
        await bare.run("iptables-nft", "-t", "nat", "-F", "PREROUTING")
    status, text = await bare.ask(*asked)
    lacking = f"  x  {begin} lack a part that all Services need, so default/web may not answer: "
    assert (status, text.startswith(lacking)) == (1, True), text
    await bare.run(proxy_command(), "--cleanup")
    status, text = await bare.ask(*asked)
    gone = "mode; no kube-proxy serves default/web on this node\nFix: start kube-proxy on this node\n"
    assert (status, text.startswith("  x  no kube-proxy runs here, and "), gone in text) == (1, True, True), text
