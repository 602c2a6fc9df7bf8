"""Another mode, or another proxy, takes over under traffic: no connection breaks and none is refused.

The traffic is that of test_restart: new TCP connections and UDP requests from outside, a pod and the node, and
long-lived connections.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from kubeproxy.backends.iptables.skeleton import chain_hashes
from lab.proxyprocess import proxy_command
from lab.topology import NODE_A
from support.foreign import load_iptables
from support.live import Live
from support.modes import MODES
from support.traffic import DUAL, Traffic, kept, streams

IPTABLES = MODES["iptables-nft"].config


async def chains(live: Live, variant: str) -> set[str]:
    """Return a kube-proxy's chains of both families."""
    text = "".join([await live.run(f"{name}-{variant}-save") for name in ("iptables", "ip6tables")])
    found = {line[1:].split()[0] for line in text.splitlines() if line.startswith(":KUBE-")}
    return found - {"KUBE-IPTABLES-HINT", "KUBE-FIREWALL"}


@pytest.mark.quick("legacy")
@pytest.mark.parametrize("variant", ["nft", "legacy"])
async def test_nftables_to_iptables_and_back(bare: Live, variant: str) -> None:
    await bare.choose_variant(variant)
    bare.service("web", "a1 a2 b1", type="NodePort", **DUAL)
    await bare.start()
    await bare.expect(bare.front("web", "nodeport"), {"outside": "a1 a2 b1"})
    async with Traffic(bare, *streams(bare)) as traffic:
        await bare.proxy.stop()
        await bare.start(IPTABLES)
        await bare.eventually(lambda: nftables_gone(bare))
        await traffic.flow()
        await bare.proxy.stop()
        await bare.start()
        await bare.eventually(lambda: iptables_gone(bare, variant))
        await traffic.flow()
    assert traffic.failures == []
    assert kept(traffic)


@pytest.mark.slow("three modes one after the other")
@pytest.mark.parametrize("others", ["iptables-nft", "userspace"])
async def test_affinity_holds_in_each_mode_that_takes_over(bare: Live, others: str) -> None:
    """A client may get another endpoint once: a mode cannot read the affinity entries of the previous mode."""
    bare.service("sticky", "a1 a2 b1", sessionAffinity="ClientIP", **DUAL)
    front = bare.front("sticky")
    await bare.start()
    for config in (MODES[others].config, {}, MODES[others].config):
        for place in ("outside", "pod"):
            met = {getattr(a, "pod", a) for a in await bare.cluster.probes(place, "tcp", *front, 6, 3.0)}
            assert len(met) == 1, met
            assert met <= {"a1", "a2", "b1"}
        await bare.proxy.stop()
        await bare.start(config)


async def nftables_gone(live: Live) -> str:
    return "kube-proxy's table is there" if "table ip kube-proxy" in await live.nft("list", "tables") else ""


async def iptables_gone(live: Live, variant: str) -> str:
    return " ".join(await chains(live, variant))


@pytest.mark.quick("iptables")
@pytest.mark.parametrize("by", ["iptables", "nftables"])
async def test_the_go_proxys_rules_are_taken_over(bare: Live, by: str) -> None:
    bare.service("web", type="NodePort", **DUAL)
    bare.endpoints("web", "a1 a2 b1")
    await load_iptables(bare, "web", "nft")
    # Leftovers of a proxy with the other variant of iptables serve deleted endpoints, and are removed as well.
    await bare.run("iptables-legacy", "-t", "nat", "-N", "KUBE-SVC-AAAAAAAAAAAAAAAA")
    await bare.expect(bare.front("web", "nodeport"), {"outside": "a1"})
    async with Traffic(bare, *streams(bare)) as traffic:
        await bare.start({**IPTABLES, "mode": by})
        await bare.expect(bare.front("web"), {"pod": "a1 a2 b1 kept", "outside": "a1 a2 b1 masqueraded"})
        await traffic.flow()
    assert traffic.failures == []
    assert kept(traffic)
    await bare.eventually(lambda: iptables_gone(bare, "legacy"))
    left = await chains(bare, "nft")
    assert "KUBE-SVC-STALESTALESTALES" not in left
    assert by == "iptables" or not left


@pytest.mark.quick("legacy")
@pytest.mark.parametrize("variant", ["nft", "legacy"])
async def test_a_flush_is_repaired_and_reported(bare: Live, variant: str) -> None:
    await bare.choose_variant(variant)
    bare.service("web", "a1 b1", **DUAL)
    await bare.start(IPTABLES)
    await bare.expect(bare.front("web"), {"pod": "a1 b1", "outside": "a1 b1"})
    for name in (f"iptables-{variant}", f"ip6tables-{variant}"):
        await bare.run(name, "-t", "nat", "-F")
    for family in ("IPv4", "IPv6"):
        await bare.expect(bare.front("web", "cluster", family), {"pod": "a1 b1", "outside": "a1 b1"})
    await bare.until(lambda: any("RulesChangedByOthers" in e for e in bare.events("node-a")), "an event")


async def test_a_lock_that_stays_anothers_turns_health_bad(bare: Live, tmp_path: Path) -> None:
    await bare.choose_variant("legacy")
    lock = tmp_path / "xtables.lock"
    bare.service("web", "a1")
    timing = {"minSyncPeriod": "1ms", "syncPeriod": "1s"}
    await bare.start(
        {"mode": "iptables", "iptables": timing}, command=["env", f"XTABLES_LOCKFILE={lock}", proxy_command()]
    )
    await bare.expect(bare.front("web"), {"pod": "a1"})
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        bare.endpoints("web", "b1")
        await bare.eventually(lambda: livez(bare, 503))
        await bare.until(lambda: bare.logged("has held the iptables lock"), "a line that names the wait")
        series = 'kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total{ip_family="IPv4"}'
        assert await bare.metric(series) > 0
    await bare.expect(bare.front("web"), {"pod": "b1"})
    await bare.eventually(lambda: livez(bare, 200))


async def livez(live: Live, wanted: int) -> str:
    status, body = await live.page("/livez")
    return "" if status == wanted else f"/livez says {status}, {body}"


@pytest.mark.quick("nft")
@pytest.mark.parametrize("variant", ["nft", "legacy"])
async def test_changes_inside_a_services_chains_are_repaired_and_reported(bare: Live, variant: str) -> None:
    await bare.choose_variant(variant)
    bare.service("web", "a1", **DUAL)
    await bare.start(IPTABLES)
    service = f"KUBE-SVC-{chain_hashes(['default/web:tcptcp'])[0]}"
    for family, name in (("IPv4", "iptables"), ("IPv6", "ip6tables")):
        front, pod = bare.front("web", "cluster", family), bare.ips["a1"][family]
        await bare.expect(front, {"pod": "a1"})
        there, elsewhere = (f"[{pod}]:3000", f"[{pod}]:9") if family == "IPv6" else (f"{pod}:3000", f"{pod}:9")
        endpoint = f"KUBE-SEP-{chain_hashes(['default/web:tcptcp' + there])[0]}"
        harm = {
            "IPv4": [
                ["-R", endpoint, "2", "-p", "tcp", "-j", "DNAT", "--to-destination", elsewhere],
                ["-F", service],
            ],
            "IPv6": [["-D", endpoint, "2"], ["-I", service, "-p", "tcp", "-j", "RETURN"]],
        }
        for command in harm[family]:
            await bare.run(f"{name}-{variant}", "-w", "-t", "nat", *command)
            said = rf"Repairing: chain {command[1]} of Service default/web \({family}\) was changed by another program"
            await bare.until(lambda said=said: bare.logged(said), f"the repair of {command}")
            await bare.expect(front, {"pod": "a1"})
    await bare.until(lambda: any("RulesChangedByOthers" in e for e in bare.events("node-a")), "an event")


async def test_loopback_is_opened_for_a_nodeport_only(bare: Live) -> None:
    where = "net.ipv4.conf.all.route_localnet"
    await bare.run("sysctl", "-qw", f"{where}=0")
    bare.service("web", "a1")
    await bare.start(IPTABLES)
    await bare.expect(bare.front("web"), {"pod": "a1"})
    assert await bare.run("sysctl", "-n", where) == "0\n"
    bare.service("open", "a1 b1", type="NodePort")
    port = bare.front("open", "nodeport").port
    await bare.expect(type(bare.front("open"))("127.0.0.1", port), {"node": "a1 b1"})
    assert await bare.run("sysctl", "-n", where) == "1\n"


@pytest.mark.quick("ip6tables")
@pytest.mark.parametrize(
    ("lacking", "served", "other", "address"),
    [("ip6tables", "IPv4", "IPv6", NODE_A.ip), ("iptables", "IPv6", "IPv4", NODE_A.ip6)],
)
async def test_a_kernel_without_the_nat_table_of_one_family_is_served_with_the_other(
    bare: Live, lacking: str, served: str, other: str, address: str
) -> None:
    """Like minikube's kernel (kubernetes issue 133694): the Go kube-proxy logs it and continues with one family."""
    tools = bare.cluster.folder / "tools"
    tools.mkdir()
    for variant in ("nft", "legacy"):
        tool = tools / f"{lacking}-{variant}"
        tool.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exec /usr/sbin/{lacking}-{variant} "$@"\n'
            f"echo '{lacking}: can not initialize {lacking} table `nat`: Table does not exist' >&2\nexit 3\n"
        )
        tool.chmod(0o755)
    record = bare.cluster.store.get("nodes", ("", "node-a"))
    assert record is not None
    node = record.decode()
    node["status"]["addresses"] = [{"type": "InternalIP", "address": address}]
    bare.cluster.store.put("nodes", node)
    bare.service("web", "a1 a2 b1", **DUAL)
    await bare.start(IPTABLES, command=["env", f"PATH={tools}:{os.environ['PATH']}", proxy_command()])
    await bare.expect(bare.front("web", family=served), {"pod": "a1 a2 b1"})
    assert "KUBE-SERVICES" not in await bare.run(f"{lacking}-nft-save")
    (line,) = bare.logged(f"Services are served by {served} alone")
    assert "Table does not exist" in line
    status, body = await bare.page("/healthz")
    assert (status, other in body) == (200, False)


async def test_an_unspecified_ipv6_bind_address_starts_where_ipv6_is_off(bare: Live) -> None:
    await bare.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
    bare.service("web", "a1")
    await bare.start({"bindAddress": "::"})
    await bare.expect(bare.front("web"), {"pod": "a1"})
    assert (await bare.page("/healthz"))[0] == 200
