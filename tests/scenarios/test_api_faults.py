"""An API server that is away, slow, without history or invalid: the last state stays in use, then changes arrive."""

from __future__ import annotations

import asyncio
import json
import re
import time
from datetime import datetime
from typing import Any

import pytest

from lab.objects import API_PORT
from support.live import Front, Live, slice_of
from support.traffic import Stream, Traffic

AT_THE_START: dict[str, dict[str, Any]] = {
    "lists-without-streaming": {"fail_watch_list": True},
    "slow": {"delay": 0.3},
    "slow-lists": {"delay": 0.2, "fail_watch_list": True},
    "internal-errors": {"fail": 2, "fail_code": 500},
    "unavailable": {"fail": 2, "fail_code": 503},
    "too-many-requests": {"fail": 2, "fail_code": 429},
    "unauthorized": {"fail": 2, "fail_code": 401},
    "forbidden": {"fail": 2, "fail_code": 403},
    "resets": {"reset": 6},
    "cut-lines": {"cut_watch": 2},
    "garbage": {"garbage_watch": 2},
    "gone": {"gone": 2},
    "everything": {"reset": 2, "fail": 1, "cut_watch": 1, "garbage_watch": 1, "gone": 1, "delay": 0.01},
    "no-service-cidrs": {"fail": 10**6, "fail_code": 404, "resources": ["servicecidrs"]},
    "service-cidrs-forbidden": {"fail": 10**6, "fail_code": 403, "resources": ["servicecidrs"]},
}
WHILE_IT_RUNS: dict[str, dict[str, Any]] = {
    name: AT_THE_START[name]
    for name in ("slow", "internal-errors", "unauthorized", "resets", "cut-lines", "garbage", "gone", "everything")
}


def streams(live: Live) -> list[Stream]:
    cluster, nodeport = live.front("web"), live.front("web", "nodeport")
    return [Stream("pod", "lasting", cluster), Stream("outside", "tcp", nodeport), Stream("pod", "udp", cluster)]


def set_faults(live: Live, **faults: Any) -> None:
    live.cluster.faults.update({"fail": 0, "delay": 0.0, "fail_watch_list": False, "resources": []} | faults)


async def serving(live: Live) -> None:
    live.service("web", "a1 b1", type="NodePort")
    live.service("moved", "a1")
    live.service("gone", "a1")
    await live.start()
    for name in ("web", "moved", "gone"):
        await live.expect(live.front(name), {"pod": "a1 b1" if name == "web" else "a1"})


async def change(live: Live) -> Front:
    """Create, change and delete one object of each kind; return the address of the deleted one."""
    gone = live.front("gone")
    live.endpoints("moved", "b2")
    live.service("new", "a2")
    live.delete("gone")
    return gone


async def expect_change(live: Live, gone: Front) -> None:
    await live.expect(live.front("moved"), {"pod": "b2"})
    await live.expect(live.front("new"), {"pod": "a2"})
    await live.expect(gone, {"pod": "timeout"}, "tcp")


@pytest.mark.quick("everything", "slow-lists")
@pytest.mark.parametrize("faults", AT_THE_START.values(), ids=AT_THE_START)
async def test_trouble_at_the_start(bare: Live, faults: dict[str, Any]) -> None:
    bare.service("web", "a1 b1")
    set_faults(bare, **faults)
    await bare.start()
    await bare.expect(bare.front("web"), {"pod": "a1 b1", "outside": "a1 b1"})
    bare.endpoints("web", "b2")
    await bare.expect(bare.front("web"), {"pod": "b2"})
    assert not bare.logged("Traceback|internal error")


@pytest.mark.quick("everything")
@pytest.mark.parametrize("faults", WHILE_IT_RUNS.values(), ids=WHILE_IT_RUNS)
async def test_trouble_while_it_runs(bare: Live, faults: dict[str, Any]) -> None:
    await serving(bare)
    async with Traffic(bare, *streams(bare)) as traffic:
        set_faults(bare, **faults)
        bare.cluster.server.drop_connections()
        await expect_change(bare, await change(bare))
        set_faults(bare)
        bare.endpoints("moved", "a3")
        await bare.expect(bare.front("moved"), {"pod": "a3"})
    assert traffic.failures == []
    assert not bare.logged("Traceback|internal error")


async def test_an_api_server_that_is_not_there_yet_is_waited_for(bare: Live) -> None:
    bare.service("web", "a1 b1")
    await bare.cluster.server.refuse()
    await bare.start(ready_within=None)
    await bare.until(lambda: bare.logged("Waiting for the API server"), "a word about the API server")
    await asyncio.sleep(1.0)
    assert len(bare.logged("API server")) == 1
    status, body = await bare.page("/readyz")
    assert (status, json.loads(body)["ready"]) == (503, False)
    assert "not yet synced" in body
    _, ruleset, _ = await bare.cluster.exec("node", ["nft", "list", "ruleset"])
    assert "kube-proxy" not in ruleset
    await bare.cluster.server.listen()
    await bare.expect(bare.front("web"), {"pod": "a1 b1"})
    await bare.eventually(bare.unready)
    assert len(bare.logged("The API server at .* answers")) == 1


@pytest.mark.quick("kept")
@pytest.mark.parametrize("history", ["kept", "forgotten"])
async def test_an_api_server_that_comes_back_with_other_content(bare: Live, history: str) -> None:
    await serving(bare)
    async with Traffic(bare, *streams(bare)) as traffic:
        await bare.cluster.server.refuse()
        gone = await change(bare)
        if history == "forgotten":
            bare.cluster.store.compact()
        await traffic.flow()
        await bare.expect(bare.front("moved"), {"pod": "a1"})
        await bare.expect(gone, {"pod": "a1"})
        assert (await bare.page("/healthz"))[0] == 200
        await bare.eventually(lambda: _is_stale(bare))
        await bare.cluster.server.listen()
        await expect_change(bare, gone)
        await bare.eventually(lambda: _is_fresh(bare))
    assert traffic.failures == []


STALENESS = 'kubeproxy_source_staleness_seconds{resource="services"}'


async def _is_stale(live: Live) -> str:
    return "" if await live.metric(STALENESS) > 0 else "the state counts as fresh"


async def _is_fresh(live: Live) -> str:
    return "" if await live.metric(STALENESS) == 0 else "the state counts as old"


async def test_a_restart_without_an_api_server_keeps_the_rules(bare: Live) -> None:
    await serving(bare)
    async with Traffic(bare, *streams(bare)) as traffic:
        await bare.cluster.server.refuse()
        await bare.proxy.kill()
        gone = await change(bare)
        await bare.start(ready_within=None)
        await bare.until(lambda: bare.logged("Waiting for the API server"), "a start")
        await traffic.flow()
        await bare.expect(gone, {"pod": "a1"})
        await bare.cluster.server.listen()
        await expect_change(bare, gone)
    assert traffic.failures == []


async def test_watches_that_say_nothing_go_on_where_they_were(bare: Live) -> None:
    await serving(bare)
    set_faults(bare, stall_watch=True)
    gone = await change(bare)
    await asyncio.sleep(0.3)
    await bare.expect(bare.front("moved"), {"pod": "a1"})
    set_faults(bare, stall_watch=False)
    await expect_change(bare, gone)


async def test_a_continue_token_that_expires_between_pages(bare: Live) -> None:
    for n in range(1200):
        bare.cluster.store.put("services", _bulk(n))
    bare.service("web", "a1 b1")
    set_faults(bare, fail_watch_list=True, delay=0.15)
    await bare.start(ready_within=None)
    requests = 0
    while not bare.logged("Committed everything"):
        bare.cluster.store.compact()
        requests += 1
        assert requests < 300, bare.proxy.tail()
        await asyncio.sleep(0.05)
    await bare.expect(bare.front("web"), {"pod": "a1 b1"})
    text = await bare.nft("list", "set", "ip", "kube-proxy", "cluster-ips")
    assert text.count("10.96.1") >= 1
    assert sum(f"10.96.{100 + n // 250}.{n % 250 + 1}" in text for n in range(1200)) == 1200


def _bulk(number: int) -> dict[str, Any]:
    address = f"10.96.{100 + number // 250}.{number % 250 + 1}"
    ports = [{"name": "web", "port": 80, "protocol": "TCP", "targetPort": 3000}]
    spec = {"type": "ClusterIP", "clusterIP": address, "clusterIPs": [address], "ports": ports, "ipFamilies": ["IPv4"]}
    metadata = {"name": f"bulk-{number}", "namespace": "default", "uid": f"bulk-{number}"}
    return {"metadata": metadata | {"creationTimestamp": "2024-01-01T00:00:00Z"}, "spec": spec, "status": {}}


async def test_events_that_repeat_change_nothing(bare: Live) -> None:
    await serving(bare)
    syncs = 'kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"}'
    store = bare.cluster.store
    before = await bare.metric(syncs)
    assert before > 0
    for _ in range(20):
        for storage in ("services", "endpointslices", "nodes"):
            for record in list(store.records(storage)):
                store.put(storage, record.decode())
    for n in range(10):
        store.put("endpointslices", slice_of("nobody", "IPv4", []))
        store.remove("endpointslices", ("default", "nobody-ipv4"))
        bare.service(f"brief-{n}")
        bare.delete(f"brief-{n}")
    bare.endpoints("moved", "b2")
    await bare.expect(bare.front("moved"), {"pod": "b2"})
    assert await bare.metric(syncs) - before < 20
    await bare.expect(bare.front("web"), {"pod": "a1 b1"})


async def test_a_node_that_is_missing_is_waited_for_but_not_for_ever(bare: Live) -> None:
    bare.service("web", "a1 b1")
    record = bare.cluster.store.get("nodes", ("", "node-a"))
    assert record is not None
    bare.cluster.store.remove("nodes", ("", "node-a"))
    await bare.start(ready_within=None)
    await bare.until(lambda: bare.logged("Starting version"), "a start")
    await asyncio.sleep(0.5)
    assert not bare.logged("Committed everything")
    bare.cluster.store.put("nodes", record.decode())
    await bare.expect(bare.front("web"), {"pod": "a1 b1"})
    bare.cluster.store.remove("nodes", ("", "node-a"))
    bare.endpoints("web", "b1")
    await bare.expect(bare.front("web"), {"pod": "b1"})
    assert bare.proxy.returncode is None


@pytest.mark.slow("20 seconds of silence")
async def test_an_api_server_that_falls_silent(bare: Live) -> None:
    bare.service("quiet", "b1")
    await bare.start()
    await bare.programmed(bare.front("quiet"), "b1")
    asked = ("why", bare.ips["a1"]["IPv4"], "default/quiet:80", "--no-probe")
    faults = bare.cluster.server.faults
    faults.update({"stall_watch": True})
    try:
        await asyncio.sleep(21.0)
        assert "API server" not in (await bare.ask(*asked))[1] + (await bare.ask("services"))[1]
        faults.update({"delay": 5.0})
        (why, said), (services, table) = await bare.ask(*asked), await bare.ask("services")
    finally:
        faults.update({"stall_watch": False, "delay": 0.0})
    assert (why, services) == (0, 0), said + table
    assert "; the objects may be old: the API server gives no answer at " in said.splitlines()[0], said
    assert table.startswith("  -  the API server gives no answer at "), table
    assert re.search(r"traffic uses the state known \d\d seconds ago", table), table


@pytest.mark.slow("45 seconds without packets of the API server")
async def test_an_outage_begins_with_the_last_packet(bare: Live) -> None:
    bare.service("web", "a1")
    await bare.start()
    await bare.programmed(bare.front("web"), "a1")
    began = time.time()
    hole = f"chain hole {{ type filter hook prerouting priority -300; tcp sport {API_PORT} drop; }}"
    await bare.nft(f"table inet hole {{ {hole}; }}")
    try:
        await asyncio.sleep(45.0)
        _, rows = await bare.ask("changes", "-o", "json")
        _, answer = await bare.ask("doctor", "-o", "json")
    finally:
        await bare.nft("delete table inet hole")
    found = [one for one in json.loads(rows)["changes"] if one["kind"] == "problem"]
    (finding,) = [one for one in json.loads(answer)["findings"] if one["about"] == "api"]
    since = datetime.fromisoformat(finding["since"]).timestamp()
    assert began - 16.0 < since < began + 2.0, (began, found, finding)  # a keepalive probe each 15 s
    assert ", since " in found[0]["what"], found
