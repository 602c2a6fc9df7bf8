"""Alerts in a real Prometheus with real proxies: each test causes the alert's problem; the alert fires, and ends with
it.

Each kind of problem has a separate node, all at once, so the test takes as long as the slowest alert.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import objects
from lab.certificates import make_client
from lab.cluster import ClusterConfig, LabCluster
from lab.netns import run_in_async
from lab.probes import ask_many
from lab.proxyprocess import METRICS_PORT, Proxy
from lab.topology import OUTSIDE_IP, NodeNet
from support.dashboard import filled, metrics_of, questions
from support.live import slice_of
from support.owned import owned_table
from support.prometheus import Prometheus, hastened
from support.promtool import RULES
from support.tracked_flows import fill, flush, limit

Json = dict[str, Any]
TIMEOUT = 90.0

NODES: dict[str, Json] = {
    "well": {},
    "owned": {},
    "cut-off": {"mode": "iptables"},
    "papers": {"mode": "userspace"},
    "late": {"nftables": {"minSyncPeriod": "4s"}},
    "disturbed": {},
    "killed": {},
}
"""The nodes by name, with the fields of their proxies' configurations."""
NOT_OF_EACH = {
    "kubeproxy_sync_proxy_rules_iptables_total",  # iptables mode
    "kubeproxy_service_new_connections_total",  # --connection-counters
    "kubeproxy_conntrack_reconciler_deleted_entries_total",  # after a first deletion
}


def net(number: int, name: str) -> NodeNet:
    pods = f"10.244.{number}.0/24", f"fd00:244:{number}::/64"
    return NodeNet(name, "zone-a", f"192.168.100.{number}", f"fd00:100::{number:x}", f"172.31.0.{number}", *pods)


class Fleet:
    """A cluster with these nodes, a proxy on each, and a Prometheus on their LAN that has no targets yet."""

    def __init__(self, cluster: LabCluster) -> None:
        self.cluster = cluster
        self.prometheus = Prometheus(cluster.topology.outside, cluster.folder / "prometheus")
        self.nodes = {name: net(number, name) for number, name in enumerate(NODES, 20)}
        self.proxies: dict[str, Proxy] = {}

    def namespace(self, name: str) -> str:
        return self.cluster.topology.node(self.nodes[name])

    async def start(self, name: str) -> None:
        config = {"metricsBindAddress": f"0.0.0.0:{METRICS_PORT}"} | NODES[name]
        if name == "papers":
            config |= {"clientConnection": {"kubeconfig": str(self.papers(3))}}
        args = ["--connection-counters"] if name in {"well", "killed"} else []
        self.proxies[name] = await self.cluster.start_proxy(config, args, node=self.nodes[name], ready_within=TIMEOUT)

    async def begin(self, name: str) -> None:
        await asyncio.to_thread(self.cluster.topology.add_node, self.nodes[name])
        self.cluster.store.put("nodes", objects.node(self.nodes[name]))
        await self.start(name)

    def papers(self, days: int) -> Path:
        """Return a kubeconfig with a new client certificate."""
        folder = self.cluster.folder / "pki"
        certificate, key = folder / "papers.crt", folder / "papers.key"
        make_client(folder, certificate, key, "system:kube-proxy", days)
        config = yaml.safe_load(self.cluster.neighbour_kubeconfig.read_text())
        config["users"][0]["user"] = {"client-certificate": str(certificate), "client-key": str(key)}
        made = self.cluster.folder / "papers.kubeconfig"
        made.write_text(yaml.safe_dump(config))
        return made

    def service(self, name: str, protocol: str = "TCP") -> None:
        """A Service whose endpoint is the API server's port, which every node can reach."""
        ports = [{"name": "port", "port": 80, "protocol": protocol, "targetPort": objects.API_PORT}]
        body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"ports": ports}}
        self.cluster.create(body)
        self.change(name, [OUTSIDE_IP], protocol)

    def change(self, name: str, addresses: list[str], protocol: str = "TCP") -> None:
        """Write its endpoints as the controller does after a pod's change at this moment."""
        ports = [{"name": "port", "port": objects.API_PORT, "protocol": protocol}]
        written = slice_of(name, "IPv4", [{"addresses": [address]} for address in addresses], ports)
        now = datetime.now(UTC).isoformat()
        written["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": now}
        self.cluster.store.put("endpointslices", written)

    async def keep_changing(self) -> None:
        """Make the usual changes of a cluster until cancelled."""
        for turn in range(10_000):
            self.change("busy", [OUTSIDE_IP, "10.244.250.1", "10.244.250.2"][: 1 + turn % 3])
            await asyncio.sleep(0.3)

    async def connect(self, name: str, service: str, protocol: str = "tcp", times: int = 1) -> None:
        """Open connections to a Service on a node, whether or not they succeed."""
        address = self.cluster.get("services", service)["spec"]["clusterIP"]
        await run_in_async(self.namespace(name), lambda: ask_many(protocol, address, 80, times, 0.3))

    async def wait(self, holds: Callable[[set[tuple[str, str]]], Any], what: str) -> None:
        """Wait until a condition about the firing alerts is true."""
        end = time.monotonic() + TIMEOUT
        while not holds(firing := await self.prometheus.firing()):
            logs = {name: proxy.tail(3) for name, proxy in self.proxies.items() if name in what}
            assert time.monotonic() < end, f"{what}; firing: {firing}; {logs}; {self.prometheus.said()}"
            await asyncio.sleep(0.25)


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    async with LabCluster(ClusterConfig(tls=True, certificate_days=365)) as cluster:
        made = Fleet(cluster)
        await made.prometheus.start(hastened(RULES.read_text()))
        try:
            yield made
        finally:
            await made.prometheus.stop()


# The problems: each exists during its context, and is repaired at the end.


@asynccontextmanager
async def a_table_of_another_program(made: Fleet) -> AsyncIterator[None]:
    with owned_table(made.namespace("owned")):
        yield


@asynccontextmanager
async def a_firewall_before_the_api_server(made: Fleet) -> AsyncIterator[None]:
    hook = "type filter hook output priority 0;"
    await nft(made, "cut-off", f"table inet firewall {{ chain out {{ {hook} tcp dport {objects.API_PORT} drop; }}; }}")
    yield
    await nft(made, "cut-off", "delete table inet firewall")


@asynccontextmanager
async def a_certificate_for_three_days(made: Fleet) -> AsyncIterator[None]:
    yield  # since its start
    made.papers(365)
    made.cluster.server.drop_connections()


@asynccontextmanager
async def a_configuration_with_a_mistake(made: Fleet) -> AsyncIterator[None]:
    file = made.proxies["papers"].config
    good = file.read_text()
    file.write_text(good + "\nmode: ebpf\n")
    yield
    file.write_text(good)


@asynccontextmanager
async def syncs_that_wait(made: Fleet) -> AsyncIterator[None]:
    changes = asyncio.create_task(made.keep_changing())
    yield  # late has a minSyncPeriod
    changes.cancel()
    with suppress(asyncio.CancelledError):
        await changes


@asynccontextmanager
async def somebody_who_deletes_the_table(made: Fleet) -> AsyncIterator[None]:
    async def delete() -> None:
        while True:
            await nft(made, "disturbed", "delete table ip kube-proxy")
            await asyncio.sleep(0.7)

    task = asyncio.create_task(delete())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def connections_without_end(made: Fleet) -> AsyncIterator[None]:
    namespace = made.namespace("disturbed")
    await run_in_async(namespace, lambda: fill(limit() * 85 // 100))
    yield
    await run_in_async(namespace, flush)


@asynccontextmanager
async def a_proxy_that_ended(made: Fleet) -> AsyncIterator[None]:
    await made.connect("killed", "quiet", times=5)
    await made.proxies["killed"].kill()
    yield
    await made.start("killed")


async def nft(made: Fleet, name: str, commands: str) -> None:
    def run() -> None:
        subprocess.run(["nft", "-f", "-"], input=commands, text=True, check=False, capture_output=True)

    await run_in_async(made.namespace(name), run)


TROUBLES: list[tuple[Callable[[Fleet], AbstractAsyncContextManager[None]], str, set[str]]] = [
    (a_table_of_another_program, "owned", {"KubeProxyNotReady", "KubeProxyChangesWait", "KubeProxyKernelRefuses"}),
    (a_firewall_before_the_api_server, "cut-off", {"KubeProxyCutOff"}),
    (a_certificate_for_three_days, "papers", {"KubeProxyCertificateExpires"}),
    (a_configuration_with_a_mistake, "papers", {"KubeProxyConfigInvalid"}),
    (syncs_that_wait, "late", {"KubeProxySlow"}),
    (somebody_who_deletes_the_table, "disturbed", {"KubeProxyRulesChangedByOthers"}),
    (connections_without_end, "disturbed", {"KubeProxyConntrackNearlyFull"}),
    (a_proxy_that_ended, "killed", {"KubeProxyNotAnswering"}),
]


async def seen(made: Fleet, trouble: Callable[[Fleet], AbstractAsyncContextManager[None]], name: str, alerts: set[str]):
    """Cause a problem; its alerts fire on that node, and end after it."""
    wanted = {(alert, name) for alert in alerts}
    async with trouble(made):
        await made.wait(wanted.issubset, f"{name}: {alerts} should fire")
    await made.wait(wanted.isdisjoint, f"{name}: {alerts} should have ended")


async def every_panel_has_data(made: Fleet) -> None:
    """The dashboard's queries return data for each panel after a minute."""
    wanted = {filled(question.expression): question.panel for question in questions()}
    end = time.monotonic() + TIMEOUT
    made.service("names", "UDP")
    for turn in itertools.takewhile(lambda _: wanted, itertools.count()):
        await made.connect("well", "names", "udp")  # a flow that becomes stale in a moment, unless it came too early
        made.change("names", [f"192.0.2.{1 + turn % 2}"], "UDP")
        for expression in list(wanted):
            found = [float(series["value"][1]) for series in await made.prometheus.query(expression)]
            if found and not all(map(math.isnan, found)):
                del wanted[expression]
        assert not wanted or time.monotonic() < end, wanted


async def every_proxy_has_what_is_asked(made: Fleet) -> None:
    """In any of these modes; series of one mode are named."""
    asked = {name for question in questions() for name in metrics_of(question.expression)} - NOT_OF_EACH
    for name in asked:
        found = await made.prometheus.query(f'count by (instance) ({{__name__=~"{name}(_bucket)?"}})')
        assert {series["metric"]["instance"] for series in found} == set(NODES), name


@pytest.mark.slow("alerts wait for minutes of the rules' own time")
@pytest.mark.long(37)
@pytest.mark.timeout(300)
async def test_each_alert_fires_on_its_trouble_and_ends_with_it() -> None:
    async with fleet() as made:
        for service in ("busy", "quiet"):
            made.service(service)
        absent = made.wait({("KubeProxyAbsent", "")}.issubset, "no proxy is known yet")
        await asyncio.gather(absent, *(made.begin(name) for name in NODES))
        made.prometheus.watch({name: f"{node.ip}:{METRICS_PORT}" for name, node in made.nodes.items()})
        await asyncio.gather(*(seen(made, *trouble) for trouble in TROUBLES))
        shown = {"KubeProxyAbsent"}.union(*(alerts for _, _, alerts in TROUBLES))
        assert shown == {rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}
        await every_panel_has_data(made)
        await every_proxy_has_what_is_asked(made)
        # A busy machine makes even a healthy proxy slow.
        healthy = 'alertstate="firing", instance="well", alertname!="KubeProxySlow"'
        assert await made.prometheus.query(f"count_over_time(ALERTS{{{healthy}}}[5m])") == []
