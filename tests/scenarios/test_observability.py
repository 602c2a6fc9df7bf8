"""Data for operators: metrics with the Go kube-proxy's names, health and readiness as JSON, configuration and mode."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path

import pytest

from kubeproxy.release import build
from lab.netns import open_socket_in, run_in_async
from lab.proxyprocess import HEALTH_PORT, METRICS_PORT
from support.live import Live
from support.promtool import expect_firing, lint

FAMILIES = ("IPv4", "IPv6")
HISTOGRAMS = {
    "kubeproxy_sync_proxy_rules_duration_seconds",
    "kubeproxy_sync_full_proxy_rules_duration_seconds",
    "kubeproxy_sync_partial_proxy_rules_duration_seconds",
    "kubeproxy_network_programming_duration_seconds",
    "kubeproxy_conntrack_reconciler_sync_duration_seconds",
    "rest_client_request_duration_seconds",
    "rest_client_request_size_bytes",
    "rest_client_response_size_bytes",
}
GAUGES = {
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
    "kubeproxy_sync_proxy_rules_endpoint_changes_pending",
    "kubeproxy_sync_proxy_rules_service_changes_pending",
    "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
    "kubernetes_build_info",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
}
COUNTERS = {
    "kubeproxy_sync_proxy_rules_endpoint_changes_total",
    "kubeproxy_sync_proxy_rules_service_changes_total",
    "kubeproxy_conntrack_reconciler_deleted_entries_total",
    "kubeproxy_proxy_healthz_total",
    "kubeproxy_proxy_livez_total",
    "rest_client_requests_total",
    "process_cpu_seconds_total",
}


async def test_metrics_have_their_names_and_types(live: Live) -> None:
    live.service("measured", selector={"role": "endpoint"}, externalTrafficPolicy="Local", type="NodePort")
    await live.expect(live.front("measured"), {"pod": "a1 a2 a3 a4 b1 b2 b3"})
    for path in ("/healthz", "/livez"):
        await live.page(path)

    async def all_there() -> str:
        _, text = await live.page("/metrics", METRICS_PORT)
        for line in text.splitlines():
            assert line.startswith("#") or re.fullmatch(r'\w+(\{(\w+="([^"\\\n]|\\.)*",?)*\})? \S+', line), line
        kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
        wanted = (HISTOGRAMS, "histogram"), (GAUGES, "gauge"), (COUNTERS, "counter")
        wrong = [f"{name} is {kinds.get(name)}" for names, kind in wanted for name in names if kinds.get(name) != kind]
        return "; ".join(wrong)

    await live.eventually(all_there)


MOVED = [
    "kubeproxy_sync_proxy_rules_endpoint_changes_total",
    "kubeproxy_sync_proxy_rules_service_changes_total",
    *(
        f'kubeproxy_sync_proxy_rules_{name}{{ip_family="{family}"}}'
        for family in FAMILIES
        for name in ("duration_seconds_count", "last_timestamp_seconds", "last_queued_timestamp_seconds")
    ),
    *(f'kubeproxy_sync_partial_proxy_rules_duration_seconds_count{{ip_family="{family}"}}' for family in FAMILIES),
    *(f'kubeproxy_network_programming_duration_seconds_count{{ip_family="{family}"}}' for family in FAMILIES),
]


async def test_a_change_moves_the_counters(live: Live) -> None:
    before = {series: await live.metric(series) for series in MOVED}
    live.service("moving", "", ipFamilyPolicy="RequireDualStack", selector={"role": "endpoint"})
    pods = "a1 a2 a3 a4 b1 b2 b3"
    await live.expect(live.front("moving"), {"pod": pods})
    for series in MOVED:

        async def moved(series: str = series) -> str:
            return "" if await live.metric(series) > before[series] else f"{series} stays {before[series]}"

        await live.eventually(moved)
    assert await live.metric("kubeproxy_sync_proxy_rules_service_changes_pending") == 0
    assert await live.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending") == 0


async def test_services_without_local_endpoints_are_counted(live: Live) -> None:
    def series(policy: str) -> str:
        name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
        return f'{name}{{ip_family="IPv4",traffic_policy="{policy}"}}'

    both = {"externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local", "type": "NodePort"}
    live.service("nothing-local", "b1", ports=[{"name": "tcp", "port": 80, "targetPort": 3000}], **both)

    def count(wanted: int) -> Callable[[], Awaitable[str]]:
        async def check() -> str:
            found = [await live.metric(series(policy)) for policy in ("internal", "external")]
            return "" if found == [wanted, wanted] else str(found)

        return check

    await live.eventually(count(1))
    live.endpoints("nothing-local", "a1 b1")
    await live.eventually(count(0))
    live.endpoints("nothing-local", "b1")
    await live.eventually(count(1))
    live.delete("nothing-local")
    await live.eventually(count(0))


@pytest.mark.parametrize("path", ["/healthz", "/livez"])
async def test_health(live: Live, path: str) -> None:
    series = f'kubeproxy_proxy_{path[1:]}_total{{code="200"}}'
    before = await live.metric(series)
    status, body = await live.page(path)
    said = json.loads(body)
    assert (status, said["healthy"]) == (200, True)
    assert ("nodeEligible" in said) == (path == "/healthz")
    assert set(said["status"]) == set(FAMILIES)
    assert all(entry["healthy"] for entry in said["status"].values())
    for text in (said["lastUpdated"], said["currentTime"], said["status"]["IPv6"]["lastUpdated"]):
        assert datetime.fromisoformat(text).year > 2020
    assert await live.metric(series) == before + 1


async def test_a_node_that_goes_is_not_eligible_but_alive(live: Live) -> None:
    record = live.cluster.store.get("nodes", ("", "node-a"))
    assert record is not None
    tainted = record.decode()
    tainted["spec"]["taints"] = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]
    live.cluster.store.put("nodes", tainted)

    def says(status: int) -> Callable[[], Awaitable[str]]:
        async def check() -> str:
            found, body = await live.page("/healthz")
            right = found == status and json.loads(body)["nodeEligible"] is (status == 200)
            return "" if right else f"{found} {body}"

        return check

    await live.eventually(says(503))
    assert (await live.page("/livez"))[0] == 200
    status, body = await live.page("/readyz")
    assert status == 200, body
    live.cluster.store.put("nodes", record.decode())
    await live.eventually(says(200))


async def test_readiness(live: Live) -> None:
    status, body = await live.page("/readyz")
    assert (status, json.loads(body)) == (200, {"ready": True, "reasons": {}})


@pytest.mark.parametrize(("port", "path", "status"), [(HEALTH_PORT, "/livez", 200), (METRICS_PORT, "/healthz", 405)])
async def test_load_balancers_may_ask_for_health_by_any_method(live: Live, port: int, path: str, status: int) -> None:
    def ask() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=15)
        with contextlib.closing(connection):
            connection.request("OPTIONS", path)
            return connection.getresponse().status

    assert await run_in_async(live.proxy.namespace, ask) == status


async def test_configuration_mode_and_flags(live: Live) -> None:
    status, body = await live.page("/configz", METRICS_PORT)
    config = json.loads(body)["kubeproxy.config.k8s.io"]
    assert status == 200
    assert (config["mode"], config["hostnameOverride"]) == ("nftables", "node-a")
    assert config["nftables"]["masqueradeBit"] == 14
    assert await live.page("/proxyMode", METRICS_PORT) == (200, "nftables")
    assert await live.page("/healthz", METRICS_PORT) == (200, "ok")
    built = build()
    expected = [
        ("/statusz", "Mode: nftables"),
        ("/statusz", f"Binary version: {built.name}"),
        ("/statusz", f"Commit: {built.commit} {built.tree}"),
        ("/metrics", f'git_commit="{built.commit}",git_tree_state="{built.tree}"'),
        ("/flagz", "config="),
    ]
    for path, word in expected:
        status, body = await live.page(path, METRICS_PORT)
        assert status == 200
        assert word in body
    assert (await live.page("/nothing", METRICS_PORT))[0] == 404


async def test_feature_gates_turn_pages_and_streamed_lists_off(bare: Live) -> None:
    gates = {"ComponentFlagz": False, "ComponentStatusz": False, "WatchListClient": False, "NFTablesProxyMode": True}
    proxy = await bare.start({"featureGates": gates})
    for path in ("/flagz", "/statusz"):
        assert (await bare.page(path, METRICS_PORT))[0] == 404
    log = proxy.tail()
    assert f"Starting version={build().name} mode=nftables " in log
    assert "Using paged lists instead of streamed lists: the feature gate WatchListClient is off" in log
    assert "Setting GA feature gate NFTablesProxyMode=true. It will be removed in a future release." in log
    _, metrics = await bare.page("/metrics", METRICS_PORT)
    assert '\nkubernetes_feature_enabled{name="ComponentFlagz",stage="BETA"} 0\n' in metrics


async def test_metrics_stay_on_the_node(live: Live) -> None:
    address = live.ips["node"]["IPv4"]
    assert await live.cluster.probe("outside", "tcp", address, METRICS_PORT) == "refused"


async def test_a_start_is_recorded_as_an_event(live: Live) -> None:
    await live.until(lambda: any(e.startswith("Starting") for e in live.events("node-a")), "the event Starting")


async def test_ports_that_are_taken_are_tried_again(bare: Live) -> None:
    other = open_socket_in(bare.cluster.namespace_of("node"), lambda: socket.create_server(("0.0.0.0", HEALTH_PORT)))
    with other:
        bare.service("web", "a1")
        await bare.start(ready_within=None)
        await bare.expect(bare.front("web"), {"pod": "a1"})
        reason = "FailedToStartProxierHealthcheck"
        await bare.until(lambda: any(e.startswith(reason) for e in bare.events("node-a")), f"the event {reason}")

    async def serves() -> str:
        try:
            return "" if (await bare.page("/healthz"))[0] == 200 else "not healthy"
        except OSError as error:
            return str(error)

    await bare.eventually(serves)


@pytest.mark.slow("two proxies one after the other")
async def test_bind_address_hard_fail_ends_it(bare: Live) -> None:
    await bare.start()
    second = await bare.start({"bindAddressHardFail": True}, ready_within=None)
    await bare.until(lambda: second.returncode is not None, "the end")
    assert second.returncode == 1
    assert "Traceback" not in second.tail()


# promtool would prefer other names, but all of these are upstream's: dashboards and alerts use them.
NO_COUNTERS = 'non-counter metrics should not have "_total" suffix'
UPSTREAMS_NAMES = {
    "nftables": {f"kubeproxy_sync_proxy_rules_no_local_endpoints_total {NO_COUNTERS}"},
    "iptables": {
        f"kubeproxy_sync_proxy_rules_no_local_endpoints_total {NO_COUNTERS}",
        f"kubeproxy_sync_proxy_rules_iptables_total {NO_COUNTERS}",
    },
}


@pytest.mark.quick("nftables")
@pytest.mark.parametrize("named", UPSTREAMS_NAMES)
async def test_prometheus_has_nothing_against_our_metrics(bare: Live, named: str) -> None:
    await bare.start({"mode": named})
    bare.service("linted", selector={"role": "endpoint"}, externalTrafficPolicy="Local", type="NodePort")
    await bare.expect(bare.front("linted"), {"pod": "a1 a2 a3 a4 b1 b2 b3"})
    for path in ("/healthz", "/livez"):
        await bare.page(path)
    _, text = await bare.page("/metrics", METRICS_PORT)
    assert "kubeproxy_network_programming_duration_seconds" in text
    assert lint(text) == UPSTREAMS_NAMES[named]


async def test_no_alert_fires_on_a_proxy_that_is_well_nor_on_one_that_waits_for_its_api_server(
    bare: Live, tmp_path: Path
) -> None:
    """A proxy without any answer of the server has not been waiting since the machine's start."""
    await bare.cluster.server.refuse()
    await bare.start(ready_within=None)
    await bare.until(lambda: bare.logged("Waiting for the API server"), "a start")

    async def served() -> str:
        status, _ = await bare.page("/metrics", METRICS_PORT)
        return "" if status == 200 else str(status)

    await bare.eventually(served)
    _, text = await bare.page("/metrics", METRICS_PORT)
    ages = [float(age) for age in re.findall(r"^kubeproxy_source_staleness_seconds\{.*\} (\S+)$", text, re.M)]
    assert len(ages) == 4
    assert max(ages) < 60
    errors = re.findall(r"^kubeproxy_sync_errors_total\{ip_family=\"(.*)\"\} 0$", text, re.M)
    assert errors == ["IPv4", "IPv6"]
    expect_firing(text, ["KubeProxyNotReady"], time.time(), tmp_path)
    await bare.cluster.server.listen()
    await bare.eventually(bare.unready)
    _, text = await bare.page("/metrics", METRICS_PORT)
    expect_firing(text, [], time.time(), tmp_path)
