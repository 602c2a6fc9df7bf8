"""One day of an operator: install the wheel, run it with the objects of deploy/, change settings, remove it.

The API server has TLS, a rotating token, and the RBAC rules of deploy/: no request is denied, and no rule is unused. No
connection fails during the day.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.apiserver.server import ServerConfig
from lab.cluster import ClusterConfig, LabCluster
from lab.netns import run_in_async
from support.installation import USER, Container, install, kernel_rules, rules
from support.live import Live, leftovers
from support.traffic import Stream, Traffic

SWITCHES = ("iptables", "nftables")
"""The later modes of the day, which starts with nftables."""

NOT_USED: set[str] = set()
"""Rules of deploy/ that this day does not use, with the reason: none."""


@pytest.fixture
def live(loop) -> Iterator[Live]:
    made = Live(LabCluster(ClusterConfig(tls=True, server=ServerConfig(rbac=rules()))))
    loop.run(made.cluster.__aenter__())
    try:
        loop.run(made.add_pods())
        yield made
    finally:
        loop.run(made.cluster.__aexit__(None, None, None))
    assert leftovers(made) == []


@pytest.mark.slow("all that a node meets in a day, each of which has a scenario of its own")
@pytest.mark.long(30)
async def test_a_day(live: Live, tmp_path: Path) -> None:
    command = await asyncio.to_thread(install, tmp_path)
    untouched = await run_in_async(live.cluster.namespace_of("node"), kernel_rules)
    live.service("web", "a1 b1", type="NodePort")
    front, nodeport = live.front("web"), live.front("web", "nodeport")
    async with Container(live, command) as container:
        await container.ready()
        await live.expect(front, {"pod": "a1 b1 kept", "outside": "a1 b1 masqueraded"})
        streams = [Stream("pod", "tcp", front), Stream("outside", "tcp", nodeport), Stream("pod", "lasting", front)]
        async with Traffic(live, *streams) as traffic:
            await the_token_rotates(live, container)
            await the_configuration_is_rolled(live, container)
            await a_bad_configuration_changes_nothing(live, container)
            await an_event_that_repeats_is_a_series(live)
            await it_is_restarted(live, container)
            for mode in SWITCHES:
                await the_mode_is_switched(live, container, mode)
            await it_runs_as_another_user(live, container)
            await traffic.flow()
        assert traffic.failures == []
        assert await container.stop() == 0
    await live.expect(front, {"pod": "a1 b2", "outside": "a1 b2"})
    await it_is_removed(live, container, untouched)
    rbac = live.cluster.config.server.rbac
    assert rbac is not None
    assert rbac.denied == []
    assert {str(grant) for grant in rbac.granted(USER) - rbac.used} == NOT_USED


async def the_token_rotates(live: Live, container: Container) -> None:
    pid = container.proxy.pid
    container.account.rotate(grace=0)
    live.cluster.server.end_watches()
    await live.until(lambda: live.cluster.server.tokens.refused, "the old token refused")
    live.endpoints("web", "a1 b2")
    await live.expect(live.front("web"), {"pod": "a1 b2"}, "tcp")
    assert (container.proxy.pid, container.exits) == (pid, [])


async def the_configuration_is_rolled(live: Live, container: Container) -> None:
    container.configure({"nftables": {"masqueradeAll": True}})
    await container.restarted(1)
    assert "nftables.masqueradeAll: false -> true" in live.proxies[-2].log.read_text()
    await live.expect(live.front("web"), {"pod": "a1 b2 masqueraded"}, "tcp")


async def a_bad_configuration_changes_nothing(live: Live, container: Container) -> None:
    container.configure({"mode": "ebpf", "oomScoreAdj": 5000})
    await live.until(lambda: live.logged("is not used"), "a complaint about the file")
    said = container.proxy.log.read_text()
    assert "mode: " in said
    assert "oomScoreAdj: " in said
    await container.ready()
    await live.expect(live.front("web"), {"pod": "a1 b2 masqueraded"}, "tcp")
    container.configure({})
    await container.restarted(1)
    await live.expect(live.front("web"), {"pod": "a1 b2 kept"}, "tcp")


async def an_event_that_repeats_is_a_series(live: Live) -> None:
    def series() -> list[int]:
        found = [record.decode() for record in live.cluster.store.records("events")]
        return [e["series"]["count"] for e in found if e["reason"] == "RulesChangedByOthers" and e.get("series")]

    def repairs() -> int:  # a client that changes an object before the end of the change is not named
        return len(live.logged("Committed everything family=IPv4"))

    for _ in range(2):
        before = repairs()
        await live.nft("add", "rule", "ip", "kube-proxy", "masquerading", "counter")
        await live.until(lambda before=before: repairs() > before, "a repair")
    await live.until(lambda: series() == [2], "the second event written as a series")


async def it_is_restarted(live: Live, container: Container) -> None:
    """By SIGTERM from outside, while the API server has no streaming lists, like servers before 1.32."""
    live.cluster.faults.fail_watch_list = True
    await container.proxy.stop(15.0)
    await container.restarted(0)
    await live.expect(live.front("web"), {"pod": "a1 b2"}, "tcp")


async def the_mode_is_switched(live: Live, container: Container, mode: str) -> None:
    container.configure({"mode": mode})
    await container.restarted(1)
    assert (await live.page("/proxyMode", 10249)) == (200, mode)
    await live.expect(live.front("web"), {"pod": "a1 b2 kept", "outside": "a1 b2 masqueraded"}, "tcp")
    others = {"nftables": "KUBE-SVC-", "iptables": "table ip kube-proxy"}

    async def gone() -> str:
        there = await run_in_async(live.cluster.namespace_of("node"), kernel_rules)
        return f"{others[mode]} is still there" if any(others[mode] in rule for rule in there) else ""

    await live.eventually(gone)


async def it_runs_as_another_user(live: Live, container: Container) -> None:
    container.apply("nftables-nonroot")
    await container.proxy.stop(15.0)
    await container.restarted(0)
    assert await asyncio.to_thread(owner, container.proxy.pid) == 65532
    live.endpoints("web", "a2")
    await live.expect(live.front("web"), {"pod": "a2"}, "tcp")
    live.endpoints("web", "a1 b2")
    await live.expect(live.front("web"), {"pod": "a1 b2"}, "tcp")


def owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


async def it_is_removed(live: Live, container: Container, untouched: list[str]) -> None:
    container.apply("kubeadm")
    status, out, err = await live.cluster.exec("node", container.argv("--cleanup"))
    assert status == 0, out + err
    assert await run_in_async(live.cluster.namespace_of("node"), kernel_rules) == untouched
    assert not live.logged("Traceback")
