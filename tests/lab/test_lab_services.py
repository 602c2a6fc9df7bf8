"""Services through the verbs: defaults, rules, allocation, and the permitted changes of updates."""

from __future__ import annotations

from typing import Any

import pytest

from lab.apiserver.resources import by_plural
from lab.apiserver.rest import Rest
from lab.apiserver.status import ApiError
from lab.apiserver.store import Store

Json = dict[str, Any]
SERVICES = by_plural("services")
DUAL = ("10.96.0.0/16", "fd00:10:96::/112")


def make(cidrs: tuple[str, ...] = DUAL) -> Rest:
    rest = Rest(Store(), cidrs)
    rest.create_system_objects()
    return rest


def create(rest: Rest, name: str = "web", ports: list[Json] | None = None, **spec: Any) -> Json:
    body = {"metadata": {"name": name}, "spec": {"ports": ports or [{"port": 80}]} | spec}
    return rest.create(SERVICES, body, "default").decode()


def change(rest: Rest, name: str = "web", **spec: Any) -> Json:
    return rest.patch(SERVICES, {"spec": spec}, "application/merge-patch+json", ("default", name)).decode()


def refused(code: int = 422) -> Any:
    return pytest.raises(ApiError, check=lambda e: e.code == code)


# allocation


def test_addresses_come_from_the_upper_part_in_order() -> None:
    rest = make()
    assert [create(rest, f"s{i}")["spec"]["clusterIP"] for i in range(3)] == ["10.96.1.0", "10.96.1.1", "10.96.1.2"]


def test_deleted_address_and_port_are_free_again() -> None:
    rest = make()
    service = create(rest, type="NodePort")
    ip, port = service["spec"]["clusterIP"], service["spec"]["ports"][0]["nodePort"]
    rest.delete(SERVICES, ("default", "web"))
    again = create(rest, ports=[{"port": 80, "nodePort": port}], type="NodePort", clusterIP=ip)
    assert again["spec"]["clusterIP"] == ip


def test_small_range_runs_out_and_recovers() -> None:
    rest = make(("10.96.0.0/29",))
    for i in range(5):
        create(rest, f"s{i}")
    with refused(500):
        create(rest, "more")
    rest.delete(SERVICES, ("default", "s3"))
    assert create(rest, "more")["spec"]["clusterIP"]


def test_ports_of_one_number_share_a_node_port() -> None:
    dns = [{"name": "udp", "port": 53, "protocol": "UDP"}, {"name": "tcp", "port": 53}, {"name": "m", "port": 9153}]
    ports = create(make(), ports=dns, type="NodePort")["spec"]["ports"]
    assert ports[0]["nodePort"] == ports[1]["nodePort"] != ports[2]["nodePort"]


def test_same_node_port_for_another_protocol_is_free() -> None:
    rest = make()
    create(rest, "a", ports=[{"port": 80, "nodePort": 31000}], type="NodePort")
    create(rest, "b", ports=[{"port": 80, "nodePort": 31000, "protocol": "UDP"}], type="NodePort")
    with refused():
        create(rest, "c", ports=[{"port": 81, "nodePort": 31000}], type="NodePort")


def test_health_check_port_is_taken_and_given_back() -> None:
    rest = make()
    spec = create(rest, type="LoadBalancer", externalTrafficPolicy="Local")["spec"]
    port = spec["healthCheckNodePort"]
    with refused():
        create(rest, "b", ports=[{"port": 80, "nodePort": port}], type="NodePort")
    assert "healthCheckNodePort" not in change(rest, externalTrafficPolicy="Cluster")["spec"]
    create(rest, "b", ports=[{"port": 80, "nodePort": port}], type="NodePort")


def test_load_balancer_may_waive_node_ports() -> None:
    spec = create(make(), type="LoadBalancer", allocateLoadBalancerNodePorts=False)["spec"]
    assert "nodePort" not in spec["ports"][0]


def test_failed_create_takes_nothing() -> None:
    rest = make()
    for _ in range(3):
        with refused():
            create(rest, ports=[{"port": 80, "nodePort": 1}], type="NodePort")
    assert create(rest)["spec"]["clusterIP"].startswith("10.96.1.")


# dual-stack


@pytest.mark.parametrize(
    ("given", "families", "policy"),
    [
        ({}, ["IPv4"], "SingleStack"),
        ({"ipFamilyPolicy": "SingleStack"}, ["IPv4"], "SingleStack"),
        ({"ipFamilies": ["IPv6"]}, ["IPv6"], "SingleStack"),
        ({"ipFamilyPolicy": "PreferDualStack"}, ["IPv4", "IPv6"], "PreferDualStack"),
        ({"ipFamilyPolicy": "RequireDualStack"}, ["IPv4", "IPv6"], "RequireDualStack"),
        ({"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6"]}, ["IPv6", "IPv4"], "PreferDualStack"),
        ({"ipFamilies": ["IPv6", "IPv4"]}, ["IPv6", "IPv4"], "RequireDualStack"),
        ({"clusterIP": "fd00:10:96::5"}, ["IPv6"], "SingleStack"),
        (
            {"clusterIP": "10.96.0.5", "clusterIPs": ["10.96.0.5", "fd00:10:96::5"]},
            ["IPv4", "IPv6"],
            "RequireDualStack",
        ),
        ({"clusterIP": "None"}, ["IPv4", "IPv6"], "RequireDualStack"),
        ({"clusterIP": "None", "selector": {"a": "b"}}, ["IPv4"], "SingleStack"),
    ],
)
def test_families(given: Json, families: list[str], policy: str) -> None:
    spec = create(make(), **given)["spec"]
    assert (spec["ipFamilies"], spec["ipFamilyPolicy"]) == (families, policy)
    if given.get("clusterIP") != "None":
        assert [":" in ip for ip in spec["clusterIPs"]] == [f == "IPv6" for f in families]


def test_single_stack_cluster() -> None:
    rest = make(("10.96.0.0/16",))
    assert create(rest, "a", ipFamilyPolicy="PreferDualStack")["spec"]["ipFamilies"] == ["IPv4"]
    for given in ({"ipFamilyPolicy": "RequireDualStack"}, {"ipFamilies": ["IPv6"]}):
        with refused():
            create(rest, "b", **given)


def test_policy_changes_add_and_drop_the_second_address() -> None:
    rest = make()
    first = create(rest)["spec"]["clusterIP"]
    both = change(rest, ipFamilyPolicy="PreferDualStack")["spec"]["clusterIPs"]
    assert (both[0], len(both)) == (first, 2)
    assert change(rest, ipFamilyPolicy="SingleStack")["spec"]["clusterIPs"] == [first]
    other = create(rest, "other", clusterIP=both[1])
    assert other["spec"]["clusterIPs"] == [both[1]]


# updates


def test_type_changes_allocate_and_release() -> None:
    rest = make()
    ip = create(rest)["spec"]["clusterIP"]
    port = change(rest, type="NodePort")["spec"]["ports"][0]["nodePort"]
    balanced = change(rest, type="LoadBalancer")["spec"]
    assert balanced["ports"][0]["nodePort"] == port
    assert balanced["allocateLoadBalancerNodePorts"] is True
    plain = change(rest, type="ClusterIP")["spec"]
    assert plain["clusterIP"] == ip
    assert "nodePort" not in plain["ports"][0]
    assert "allocateLoadBalancerNodePorts" not in plain
    assert "externalTrafficPolicy" not in plain
    create(rest, "b", ports=[{"port": 80, "nodePort": port}], type="NodePort")


def test_external_name_gives_the_address_up_and_gets_one_again() -> None:
    rest = make()
    create(rest)
    named = change(rest, type="ExternalName", externalName="example.com")["spec"]
    assert not {"clusterIP", "clusterIPs", "ipFamilies", "internalTrafficPolicy"} & named.keys()
    assert change(rest, type="ClusterIP", externalName=None)["spec"]["clusterIP"]


def test_leaving_load_balancer_clears_the_status() -> None:
    rest = make()
    create(rest, type="LoadBalancer")
    ingress = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}
    rest.update(SERVICES, {"metadata": {}, "status": ingress}, ("default", "web"), "status")
    assert change(rest, type="ClusterIP")["status"] == {"loadBalancer": {}}


def test_put_without_allocated_values_keeps_them() -> None:
    rest = make()
    before = create(rest, type="NodePort")["spec"]
    ports = [{"port": 80, "name": "a"}, {"port": 81, "name": "b"}]
    body = {"metadata": {"name": "web"}, "spec": {"type": "NodePort", "ports": ports}}
    after = rest.update(SERVICES, body, ("default", "web")).decode()["spec"]
    assert after["clusterIPs"] == before["clusterIPs"]
    assert after["ports"][0]["nodePort"] == before["ports"][0]["nodePort"]
    assert after["ports"][1]["nodePort"] not in {None, before["ports"][0]["nodePort"]}


def test_update_that_changes_nothing_writes_nothing() -> None:
    rest = make()
    before = create(rest)["metadata"]["resourceVersion"]
    assert change(rest)["metadata"]["resourceVersion"] == before
    assert change(rest, sessionAffinity="None")["metadata"]["resourceVersion"] == before


def test_write_to_the_status_leaves_the_spec() -> None:
    rest = make()
    create(rest)
    body = {"metadata": {}, "spec": {"type": "NodePort"}, "status": {"loadBalancer": {}}}
    assert rest.update(SERVICES, body, ("default", "web"), "status").decode()["spec"]["type"] == "ClusterIP"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"clusterIP": "10.96.0.300"}, "spec.clusterIPs[0]"),
        ({"clusterIPs": ["10.96.0.7"]}, "spec.clusterIPs"),
        ({"type": "Other"}, "spec.type"),
        ({"sessionAffinity": "Cookie"}, "spec.sessionAffinity"),
        (
            {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 90000}}},
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
        ),
        ({"externalIPs": ["127.0.0.1"]}, "spec.externalIPs[0]"),
        ({"externalIPs": ["nowhere"]}, "spec.externalIPs[0]"),
        ({"externalTrafficPolicy": "Local"}, "spec.externalTrafficPolicy"),
        ({"type": "NodePort", "externalTrafficPolicy": "Near"}, "spec.externalTrafficPolicy"),
        ({"internalTrafficPolicy": "Near"}, "spec.internalTrafficPolicy"),
        ({"ipFamilyPolicy": "Both"}, "spec.ipFamilyPolicy"),
        ({"ipFamilies": ["IPv5"]}, "spec.ipFamilies[0]"),
        ({"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4", "IPv6"]}, "spec.ipFamilyPolicy"),
        ({"loadBalancerSourceRanges": ["10.0.0.0/8"]}, "spec.loadBalancerSourceRanges"),
        ({"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/99"]}, "spec.loadBalancerSourceRanges[0]"),
        ({"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.1"]}, "spec.loadBalancerSourceRanges[0]"),
        ({"type": "ExternalName"}, "spec.externalName"),
        ({"type": "ExternalName", "externalName": "a.b", "clusterIP": "10.96.0.8"}, "spec.clusterIPs"),
        ({"type": "NodePort", "clusterIP": "None"}, "spec.clusterIPs[0]"),
        ({"healthCheckNodePort": 31000}, "spec.healthCheckNodePort"),
        ({"ports": []}, "spec.ports"),
        ({"ports": [{"port": 80, "nodePort": 30080}]}, "spec.ports[0].nodePort"),
        ({"ports": [{"port": 0}]}, "spec.ports[0].port"),
        ({"ports": [{"port": 80, "protocol": "ICMP"}]}, "spec.ports[0].protocol"),
        ({"ports": [{"port": 80, "targetPort": "Bad_Name"}]}, "spec.ports[0].targetPort"),
        ({"ports": [{"port": 80, "name": "a"}, {"port": 81, "name": "a"}]}, "spec.ports[1].name"),
        ({"ports": [{"port": 80, "name": "a"}, {"port": 80, "name": "b"}]}, "spec.ports[1]"),
        ({"trafficDistribution": "Somewhere"}, "spec.trafficDistribution"),
    ],
)
def test_invalid(spec: Json, field: str) -> None:
    rest = make()
    with pytest.raises(ApiError) as e:
        rest.create(SERVICES, {"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}]} | spec}, "default")
    assert e.value.code == 422
    assert field in {c["field"] for c in e.value.body["details"]["causes"]}


@pytest.mark.parametrize("name", ["", "Upper", "1st", "a" * 64, "-a", "a.b"])
def test_invalid_names(name: str) -> None:
    with refused():
        create(make(), name)


def test_namespace_must_exist() -> None:
    body = {"metadata": {"name": "a"}, "spec": {"ports": [{"port": 1}]}}
    with refused(404):
        make().create(SERVICES, body, "nowhere")


def test_addresses_of_a_later_range_can_be_requested() -> None:
    rest = make()
    with pytest.raises(ApiError):
        create(rest, clusterIP="10.98.0.7")
    rest.create(by_plural("servicecidrs"), {"metadata": {"name": "more"}, "spec": {"cidrs": ["10.98.0.0/24"]}})
    assert create(rest, clusterIP="10.98.0.7")["spec"]["clusterIPs"] == ["10.98.0.7"]
    assert create(rest, "unasked")["spec"]["clusterIP"].startswith("10.96.")
