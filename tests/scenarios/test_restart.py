"""A proxy that is killed, ends, restarts or takes over from another: no traffic fails.

Traffic runs all the time: new TCP connections and UDP requests from outside, a pod and the node, and long-lived
connections. The start applies the changes that happened while no proxy ran.
"""

from __future__ import annotations

import asyncio
import re
import signal

import pytest

from kubeproxy.kernel.nftables import nfnetlink
from lab.netns import run_in_async
from support.foreign import go_start, load_nft
from support.live import Live
from support.modes import modes
from support.traffic import DUAL, Stream, Traffic, kept, streams


async def serving(bare: Live) -> None:
    """Services that all clients reach, through a running proxy."""
    bare.service("web", "a1 a2 b1", type="NodePort", **DUAL)
    bare.service("local", "a1 a2", type="NodePort", externalTrafficPolicy="Local")
    bare.service("sticky", "a1 b1", sessionAffinity="ClientIP")
    await bare.start()
    for name, answer in (("web", "a1 a2 b1"), ("local", "a1 a2 kept")):
        await bare.expect(bare.front(name, "nodeport"), {"outside": bare.mode.seen(answer)})


KERNEL = ("nftables", "iptables-nft", "iptables-legacy", "ipvs")
"""The modes in which no client notices a restart, because the kernel forwards the packets."""


async def rules(live: Live) -> str:
    """Return the rules of the node, without parts that change continuously."""
    if live.mode.name == "ipvs":
        texts = [await live.run(*words) for words in (("cat", "/proc/net/ip_vs"), ("ip", "-o", "address"))]
        return re.sub(r"(Masq +\d+).*", r"\1", "\n".join(texts))
    if live.mode.variant != "legacy":
        return re.sub(r"packets \d+ bytes \d+", "", await live.nft("-s", "list", "ruleset"))
    texts = [await live.run(f"{name}-legacy-save") for name in ("iptables", "ip6tables")]
    return "\n".join(re.sub(r" \[\d+:\d+\]$|^#.*$", "", text, flags=re.M) for text in texts)


@pytest.mark.slow("three proxies one after the other")
@modes(*KERNEL)
async def test_kill_sigterm_and_restarts_under_traffic(bare: Live) -> None:
    await serving(bare)
    local = Stream("outside", "tcp", bare.front("local", "nodeport"))
    async with Traffic(bare, *streams(bare), local) as traffic:
        await bare.proxy.kill()
        await traffic.flow()
        await bare.start()
        await traffic.flow()
        before = await rules(bare)
        assert await bare.proxy.stop() == 0
        assert await rules(bare) == before
        assert not bare.logged("Traceback|Error")
        await traffic.flow()
        await bare.start()
        await traffic.flow()
    assert traffic.failures == []
    assert kept(traffic)
    assert traffic.pods[local] == {"a1", "a2"}
    assert not bare.logged("Replacing the table")


@pytest.mark.slow("300 Services and four proxies")
@modes("nftables", "iptables-nft")
async def test_kill_in_the_middle_of_changes(bare: Live) -> None:
    await serving(bare)
    async with Traffic(bare, *streams(bare, families=("IPv4",))) as traffic:
        for round_ in range(3):
            for n in range(100):
                bare.service(f"burst-{round_}-{n}", "a1 b1")
                if n == 30 + 20 * round_:
                    await asyncio.sleep(0.01 * round_)
                    await bare.proxy.kill()
            await bare.start()
            await bare.programmed(bare.front(f"burst-{round_}-99"), "a1 b1")
    assert traffic.failures == []
    for round_ in range(3):
        for n in (0, 49, 50, 51, 99):
            await bare.expect(bare.front(f"burst-{round_}-{n}"), {"pod": "a1 b1"}, "tcp")


@modes(*KERNEL, "userspace")
async def test_changes_while_it_was_down_are_made_up_for(bare: Live) -> None:
    await serving(bare)
    bare.service("moved", "a1", sessionAffinity="ClientIP")
    bare.service("gone", "a1", type="NodePort", externalIPs=["198.51.100.77"])
    bare.service("grown", "a1")
    gone = [bare.front("gone", kind) for kind in ("cluster", "external")]
    gone_nodeport = bare.front("gone", "nodeport")
    for front in (*gone, gone_nodeport, bare.front("moved"), bare.front("grown")):
        await bare.expect(front, {"pod": "a1"})
    lasting = () if bare.mode.name == "userspace" else streams(bare)  # which relays connections itself
    async with Traffic(bare, *lasting) as traffic:
        await bare.proxy.kill()
        bare.endpoints("moved", "b1")
        bare.delete("gone")
        bare.endpoints("grown", "a1 a2 a3 a4 b1 b2")
        bare.service("new", "a3", type="LoadBalancer", **DUAL)
        bare.endpoints("web", "a1 a2 b1 b2")
        await bare.start()
        await bare.expect(bare.front("moved"), {"outside": "b1"})
        await bare.expect(bare.front("new", "nodeport"), {"outside": "a3"})
        await bare.expect(bare.front("grown"), {"pod": "a1 a2 a3 a4 b1 b2"})
        if bare.mode.name == "nftables":
            await bare.expect(gone[0], {"outside": "timeout", "pod": "timeout"})
        else:  # no Service has this address, so the packet leaves the node
            await bare.expect(gone[0], {"pod": "unreachable"}, "tcp")
        await bare.expect(gone_nodeport, {"outside": "refused"})
        await bare.expect(bare.front("web"), {"pod": "a1 a2 b1 b2"})
        written = await rules(bare)
        assert re.search(rf"{re.escape(bare.front('new').address)}\b", written)
        for front in gone:
            assert not re.search(rf"{re.escape(front.address)}\b", written)
    assert traffic.failures == []
    assert kept(traffic)
    assert not bare.logged("Replacing the table")


async def test_a_restart_changes_nothing_that_is_right(bare: Live) -> None:
    await serving(bare)
    before = [await bare.nft("-s", "list", "table", family, "kube-proxy") for family in ("ip", "ip6")]
    assert await bare.proxy.stop() == 0
    generation = await _generation(bare)
    await bare.start()
    assert sorted(before[0].split()) == sorted((await bare.nft("-s", "list", "table", "ip", "kube-proxy")).split())
    # For each family a scratch table is created and deleted to compare the rules, for any number of elements.
    assert await _generation(bare) - generation <= 10


async def _generation(live: Live) -> int:
    """Return the number of changes of nf_tables on the node."""

    def ask() -> int:
        link = nfnetlink.Transactions.open()
        try:
            return link.generation()
        finally:
            link.close()

    return await run_in_async(live.cluster.namespace_of("node"), ask)


@pytest.mark.quick("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_before_it_is_ready_ends_it(bare: Live, number: signal.Signals) -> None:
    await bare.cluster.server.refuse()
    proxy = await bare.start(ready_within=None)
    await bare.until(lambda: bare.logged("Waiting for the API server"), "a start")
    proxy._signal(number)
    await bare.until(lambda: proxy.returncode is not None, "the end")
    assert proxy.returncode == 0


@pytest.mark.slow("seven proxies one after the other")
@modes("nftables", "iptables-nft")
async def test_quick_restarts(bare: Live) -> None:
    await serving(bare)
    async with Traffic(bare, *streams(bare)) as traffic:
        for pause in (0.0, 0.15, 0.2, 0.25, 0.3):
            await bare.proxy.stop()
            await bare.start(ready_within=None)
            await asyncio.sleep(pause)
        await bare.proxy.kill()
        await bare.start()
        await traffic.flow()
    assert traffic.failures == []
    assert kept(traffic)


@pytest.mark.slow("two proxies at once, under traffic")
@modes("nftables", "iptables-nft")
async def test_another_proxy_takes_over_while_the_first_still_runs(bare: Live) -> None:
    await serving(bare)
    first = bare.proxy
    async with Traffic(bare, *streams(bare)) as traffic:
        await bare.start({"healthzBindAddress": "0.0.0.0:10266", "metricsBindAddress": "127.0.0.1:10259"})
        await traffic.flow()
        await first.stop()
        bare.endpoints("local", "a3")
        await bare.expect(bare.front("local", "nodeport"), {"outside": "a3"})
        await traffic.flow()
    assert traffic.failures == []


MASQUERADE = {"masqueradeAll": True, "minSyncPeriod": "1ms"}
NODEPORTS = {"nftables": ["0.0.0.0/0", "::/0"], "iptables-nft": ["192.168.0.0/16", "fd00::/16"]}


@pytest.mark.quick("nodePortAddresses")
@modes("nftables", "iptables-nft")
@pytest.mark.parametrize("what", ["masqueradeAll", "nodePortAddresses", "clusterCIDR"])
async def test_another_configuration_replaces_the_rules_without_a_gap(bare: Live, what: str) -> None:
    config: dict[str, object] = {
        "masqueradeAll": {"nftables": MASQUERADE, "iptables": MASQUERADE},
        "nodePortAddresses": {"nodePortAddresses": NODEPORTS[bare.mode.name]},
        "clusterCIDR": {"clusterCIDR": ""},
    }[what]
    await serving(bare)
    before = await rules(bare)
    async with Traffic(bare, *streams(bare)) as traffic:
        await bare.proxy.stop()
        await bare.start(config)
        await traffic.flow()
    assert traffic.failures == []
    assert await rules(bare) != before
    assert bool(bare.logged("Writing the rules that differ")) is (bare.mode.name == "nftables")
    assert not bare.logged("Replacing the table")


async def test_take_over_of_another_proxys_table(bare: Live) -> None:
    bare.service("web", type="NodePort", **DUAL)
    bare.endpoints("web", "a1 a2 b1")
    bare.service("idle", "")
    await load_nft(bare, "web")
    await bare.nft('add table ip somebody-else { comment "not ours" ; }')
    for family in ("IPv4", "IPv6"):
        await bare.expect(bare.front("web", "nodeport", family), {"outside": "a1 b1"})
    async with Traffic(bare, *streams(bare)) as traffic:
        await bare.start()
        await bare.expect(bare.front("web"), {"pod": "a1 a2 b1 kept", "outside": "a1 a2 b1 masqueraded"})
        await bare.expect(bare.front("idle"), {"pod": "refused"})
        await traffic.flow()
    assert traffic.failures == []
    assert kept(traffic)
    assert len(bare.logged("Replacing the table")) == 2
    ruleset = await bare.nft("list", "ruleset")
    assert "service-ABCDEFGH" not in ruleset
    assert "table ip somebody-else" in ruleset


@pytest.mark.slow("two proxies, after test_take_over_of_another_proxys_table")
async def test_the_table_is_given_back_and_taken_again(bare: Live) -> None:
    bare.service("web", "a1 b1", type="NodePort", **DUAL)
    bare.service("idle", "")
    await bare.start()
    await bare.expect(bare.front("web"), {"pod": "a1 b1 kept", "outside": "a1 b1 masqueraded"})
    async with Traffic(bare, *streams(bare)) as traffic:
        await bare.proxy.stop()
        await load_nft(bare, "web", go_start())
        await bare.expect(bare.front("web", "nodeport"), {"outside": "a1 b1"})
        await traffic.flow()
        await bare.start()
        await bare.expect(bare.front("idle"), {"pod": "refused"})
        await traffic.flow()
    assert traffic.failures == []
    assert kept(traffic)
    assert "service-ABCDEFGH" not in await bare.nft("list", "ruleset")


async def test_a_changed_configuration_ends_it_and_names_the_difference(bare: Live) -> None:
    await serving(bare)
    text = bare.proxy.config.read_text()
    bare.proxy.config.write_text("mode: [nonsense")
    await bare.until(lambda: bare.logged("is not used"), "a complaint about the file")
    assert bare.proxy.returncode is None
    bare.proxy.config.write_text(text + "configSyncPeriod: 1s\n")
    async with Traffic(bare, *streams(bare, families=("IPv4",))) as traffic:
        await bare.until(lambda: bare.proxy.returncode is not None, "the end")
    assert bare.proxy.returncode == 1
    assert bare.logged("configuration changed.*configSyncPeriod.*15m.*1s")
    assert traffic.failures == []
