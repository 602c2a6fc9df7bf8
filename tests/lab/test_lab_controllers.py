"""The controllers: their plans as tables, and their work on a store in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.apiserver.resources import by_plural
from lab.apiserver.rest import Rest
from lab.apiserver.store import Store
from lab.controllers.endpointslice import EndpointSliceController
from lab.controllers.loadbalancer import LoadBalancers, first_free
from lab.controllers.namespaces import NamespaceController
from lab.controllers.replication import ReplicationManager, surplus
from lab.controllers.scheduling import Scheduler, choose_node
from lab.controllers.slices import MAX_ENDPOINTS, plan_writes, wanted_endpoints
from lab.objects import node, service, whoami_rc
from lab.topology import NODES

Json = dict[str, Any]
ZONES = {"node-a": "zone-a", "node-b": "zone-b"}


def make_pod(number: int, ready: bool = True, node: str = "node-a", **spec: Any) -> Json:
    ports = [{"name": "web", "containerPort": 8000 + number % 2, "protocol": "TCP"}]
    return {
        "metadata": {"name": f"p{number}", "namespace": "default", "uid": f"u{number}", "labels": {"app": "web"}},
        "spec": {"nodeName": node, "containers": [{"name": "c", "ports": ports}]} | spec,
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "podIPs": [{"ip": f"10.244.{number // 250}.{number % 250 + 1}"}, {"ip": f"fd00:244::{number + 1:x}"}],
        },
    }


def make_service(port: Any = 3000, families: tuple[str, ...] = ("IPv4",), **spec: Any) -> Json:
    ports = [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": port}]
    return {
        "metadata": {"name": "web", "namespace": "default", "uid": "s", "labels": {"team": "x"}},
        "spec": {"ports": ports, "ipFamilies": list(families), "clusterIP": "10.96.0.9"} | spec,
    }


# endpoint slices


def apply(service: Json, existing: list[Json], pods: list[Json]) -> tuple[list[Json], int]:
    """Return the slices after the planned writes, and the number of writes."""
    writes = plan_writes(service, existing, wanted_endpoints(service, pods, ZONES))
    gone = {s["metadata"]["name"] for s in writes.delete}
    changed = {s["metadata"]["name"]: s for s in writes.update}
    kept = [changed.get(s["metadata"]["name"], s) for s in existing if s["metadata"]["name"] not in gone]
    taken = {s["metadata"]["name"] for s in existing}
    fresh = (f"web-{i}" for i in range(1000) if f"web-{i}" not in taken)
    new = [s | {"metadata": s["metadata"] | {"name": next(fresh)}} for s in writes.create]
    return kept + new, len(writes.create) + len(writes.update) + len(writes.delete)


def addresses(slices: list[Json]) -> list[str]:
    return sorted(e["addresses"][0] for s in slices for e in s["endpoints"])


def test_slices_hold_at_most_a_hundred() -> None:
    slices, _ = apply(make_service(), [], [make_pod(i) for i in range(250)])
    assert sorted(len(s["endpoints"]) for s in slices) == [50, 100, 100]
    assert slices[0]["metadata"]["labels"] == {
        "team": "x",
        "kubernetes.io/service-name": "web",
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
    }


def test_one_pod_more_or_less_is_one_write() -> None:
    pods = [make_pod(i) for i in range(250)]
    slices, _ = apply(make_service(), [], pods)
    slices, writes = apply(make_service(), slices, pods[1:])
    assert writes == 1
    slices, writes = apply(make_service(), slices, [*pods[1:], make_pod(400)])
    assert writes == 1
    assert apply(make_service(), slices, [*pods[1:], make_pod(400)])[1] == 0


def test_families_and_named_ports_have_slices_of_their_own() -> None:
    slices, _ = apply(make_service("web", ("IPv4", "IPv6")), [], [make_pod(i) for i in range(4)])
    assert sorted((s["addressType"], s["ports"][0]["port"]) for s in slices) == [
        ("IPv4", 8000),
        ("IPv4", 8001),
        ("IPv6", 8000),
        ("IPv6", 8001),
    ]


def test_service_without_pods_keeps_one_empty_slice() -> None:
    slices, _ = apply(make_service(), [], [])
    assert [(s["endpoints"], s["ports"][0]["port"]) for s in slices] == [([], 3000)]
    slices, writes = apply(make_service(), slices, [make_pod(1)])
    assert (len(slices), writes, addresses(slices)) == (1, 1, ["10.244.0.2"])


def test_headless_label() -> None:
    slices, _ = apply(make_service(clusterIP="None"), [], [make_pod(1)])
    assert slices[0]["metadata"]["labels"]["service.kubernetes.io/headless"] == ""


@pytest.mark.parametrize(
    ("ready", "deleted", "publish", "conditions"),
    [
        (True, False, False, (True, True, False)),
        (False, False, False, (False, False, False)),
        (True, True, False, (False, True, True)),
        (False, True, False, (False, False, True)),
        (False, False, True, (True, False, False)),
        (True, True, True, (True, True, True)),
    ],
)
def test_conditions(ready: bool, deleted: bool, publish: bool, conditions: tuple[bool, ...]) -> None:
    pod = make_pod(1, ready)
    if deleted:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    slices, _ = apply(make_service(publishNotReadyAddresses=publish), [], [pod])
    (endpoint,) = slices[0]["endpoints"]
    assert tuple(endpoint["conditions"][n] for n in ("ready", "serving", "terminating")) == conditions
    assert (endpoint["nodeName"], endpoint["zone"], endpoint["targetRef"]["name"]) == ("node-a", "zone-a", "p1")


@pytest.mark.parametrize(
    ("distribution", "hints"),
    [
        (None, None),
        ("PreferClose", {"forZones": [{"name": "zone-b"}]}),
        ("PreferSameZone", {"forZones": [{"name": "zone-b"}]}),
        ("PreferSameNode", {"forZones": [{"name": "zone-b"}], "forNodes": [{"name": "node-b"}]}),
    ],
)
def test_hints(distribution: str | None, hints: Json | None) -> None:
    slices, _ = apply(make_service(trafficDistribution=distribution), [], [make_pod(1, node="node-b")])
    assert slices[0]["endpoints"][0].get("hints") == hints
    unready, _ = apply(make_service(trafficDistribution=distribution), [], [make_pod(1, ready=False)])
    assert "hints" not in unready[0]["endpoints"][0]


def test_finished_pods_and_pods_without_addresses_are_left_out() -> None:
    done, new = make_pod(1), make_pod(2)
    done["status"]["phase"] = "Succeeded"
    new["status"] = {"phase": "Pending"}
    slices, _ = apply(make_service(), [], [done, new])
    assert addresses(slices) == []


@given(st.lists(st.sets(st.integers(0, 300), max_size=150), min_size=1, max_size=4))
def test_any_history_ends_at_the_wanted_endpoints(steps: list[set[int]]) -> None:
    slices: list[Json] = []
    for numbers in steps:
        pods = [make_pod(n) for n in sorted(numbers)]
        slices, _ = apply(make_service("web", ("IPv4", "IPv6")), slices, pods)
        wanted = sorted(ip["ip"] for p in pods for ip in p["status"]["podIPs"])
        assert addresses(slices) == wanted
        assert all(len(s["endpoints"]) <= MAX_ENDPOINTS for s in slices)
        assert apply(make_service("web", ("IPv4", "IPv6")), slices, pods)[1] == 0


# scheduling, scaling


def nodes() -> list[Json]:
    return [node(n) for n in NODES]


def test_pods_spread() -> None:
    placed: list[Json] = []
    for i in range(5):
        pod = make_pod(i)
        pod["spec"]["nodeName"] = choose_node(pod, nodes(), placed)
        placed.append(pod)
    assert [p["spec"]["nodeName"] for p in placed] == ["node-a", "node-b", "node-a", "node-b", "node-a"]


def test_node_selector_and_unready_nodes() -> None:
    pod = make_pod(1, nodeSelector={"kubernetes.io/hostname": "node-b"})
    assert choose_node(pod, nodes(), []) == "node-b"
    assert choose_node(make_pod(1, nodeSelector={"gpu": "yes"}), nodes(), []) is None
    unready = nodes()
    unready[0]["status"]["conditions"][0]["status"] = "False"
    unready[1]["spec"]["unschedulable"] = True
    assert choose_node(make_pod(1), unready, []) is None


def test_surplus_gives_up_unready_pods_then_the_fuller_node() -> None:
    pods = [make_pod(0), make_pod(1), make_pod(2, ready=False, node="node-b"), make_pod(3, node="node-b"), make_pod(4)]
    for i, pod in enumerate(pods):
        pod["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": str(i)}
    assert [p["metadata"]["name"] for p in surplus(pods, 3)] == ["p2", "p4", "p1"]


def test_first_free_address() -> None:
    assert first_free("203.0.113.0/24", ["203.0.113.1", "203.0.113.3"]) == "203.0.113.2"
    assert first_free("2001:db8:2::/64", []) == "2001:db8:2::1"
    assert first_free("192.0.2.0/30", ["192.0.2.1", "192.0.2.2"]) is None


# all controllers together


def run(test: Callable[[Rest], Any]) -> None:
    async def main() -> None:
        rest = Rest(Store(), ("10.96.0.0/16", "fd00:10:96::/112"))
        rest.create_system_objects()
        for entry in nodes():
            rest.store.put("nodes", entry)
        ranges = {"IPv4": "203.0.113.0/24", "IPv6": "2001:db8:2::/64"}
        controllers = [
            Scheduler(rest),
            ReplicationManager(rest),
            EndpointSliceController(rest),
            LoadBalancers(rest, ranges),
            NamespaceController(rest),
        ]
        for controller in controllers:
            controller.start()
        await test(rest)
        for controller in controllers:
            controller.stop()

    asyncio.run(main())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def get(rest: Rest, plural: str, name: str) -> Json:
    return rest.get(by_plural(plural), ("default", name)).decode()


def set_ready(rest: Rest, name: str, ip: str) -> None:
    status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
    status["conditions"] = [{"type": "Ready", "status": "True"}]
    rest.update(by_plural("pods"), {"metadata": {}, "status": status}, ("default", name), "status")


def test_replication_scales_and_collects() -> None:
    async def test(rest: Rest) -> None:
        rcs = by_plural("replicationcontrollers")
        rest.create(rcs, whoami_rc("web", 3), "default")
        await settle()
        pods = rest.store.records("pods")
        assert sorted(r.fields["spec.nodeName"] for r in pods) == ["node-a", "node-a", "node-b"]
        for i, record in enumerate(pods):
            set_ready(rest, record.key[1], f"10.244.0.{i + 10}")
        await settle()
        assert get(rest, "replicationcontrollers", "web")["status"]["readyReplicas"] == 3
        rest.set_scale(rcs, {"spec": {"replicas": 1}}, ("default", "web"))
        await settle()
        living = [r for r in rest.store.records("pods") if "deletionTimestamp" not in r.decode()["metadata"]]
        assert len(living) == 1
        rest.delete(by_plural("pods"), living[0].key, {"gracePeriodSeconds": 0})
        await settle()
        assert get(rest, "replicationcontrollers", "web")["status"]["replicas"] == 1
        rest.delete(rcs, ("default", "web"))
        await settle()
        assert ["deletionTimestamp" in r.decode()["metadata"] for r in rest.store.records("pods")] == [True] * 3

    run(test)


def test_orphaned_pods_stay() -> None:
    async def test(rest: Rest) -> None:
        rcs = by_plural("replicationcontrollers")
        rest.create(rcs, whoami_rc("web", 2), "default")
        await settle()
        rest.delete(rcs, ("default", "web"), {"propagationPolicy": "Orphan"})
        await settle()
        pods = [r.decode()["metadata"] for r in rest.store.records("pods")]
        assert len(pods) == 2
        assert not any(p.get("deletionTimestamp") or p["ownerReferences"] for p in pods)

    run(test)


def test_slices_follow_service_and_pods() -> None:
    async def test(rest: Rest) -> None:
        def slices() -> list[Json]:
            records = rest.store.records("endpointslices")
            return [r.decode() for r in records if r.labels.get("kubernetes.io/service-name") == "web"]

        rest.create(by_plural("replicationcontrollers"), whoami_rc("web", 2), "default")
        made = service("web", {"app": "web"}, [{"port": 80, "targetPort": 3000}], type="LoadBalancer")
        rest.create(by_plural("services"), made, "default")
        await settle()
        for i, record in enumerate(rest.store.records("pods")):
            set_ready(rest, record.key[1], f"10.244.0.{i + 10}")
        await settle()
        assert addresses(slices()) == ["10.244.0.10", "10.244.0.11"]
        assert get(rest, "services", "web")["status"]["loadBalancer"]["ingress"] == [
            {"ip": "203.0.113.1", "ipMode": "VIP"}
        ]
        first = slices()[0]["metadata"]["name"]
        rest.delete(by_plural("endpointslices"), ("default", first))
        await settle()
        assert addresses(slices()) == ["10.244.0.10", "10.244.0.11"]
        rest.patch(
            by_plural("services"),
            {"spec": {"selector": {"app": "none"}}},
            "application/merge-patch+json",
            ("default", "web"),
        )
        await settle()
        assert addresses([s | {"endpoints": s["endpoints"] or []} for s in slices()]) == []
        rest.delete(by_plural("services"), ("default", "web"))
        await settle()
        assert slices() == []

    run(test)


def test_namespace_ends_after_its_contents() -> None:
    async def test(rest: Rest) -> None:
        namespaces = by_plural("namespaces")
        rest.create(namespaces, {"metadata": {"name": "extra"}})
        rest.create(by_plural("services"), {"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}}, "extra")
        rest.create(by_plural("replicationcontrollers"), whoami_rc("web", 1), "extra")
        await settle()
        rest.delete(namespaces, ("", "extra"))
        await settle()
        (pod,) = rest.store.records("pods", "extra")
        assert rest.store.get("namespaces", ("", "extra")) is not None
        rest.delete(by_plural("pods"), pod.key, {"gracePeriodSeconds": 0})
        await settle()
        assert rest.store.get("namespaces", ("", "extra")) is None
        assert rest.store.records("services", "extra") == []

    run(test)
