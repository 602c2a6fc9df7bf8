from __future__ import annotations

from prove.asking import KINDS
from prove.replacement import Pod, clients, objects

SERVICE = {
    "spec": {
        "clusterIPs": ["10.96.0.7", "fd00:10:96::7"],
        "ports": [{"name": "tcp", "nodePort": 30001}, {"name": "udp", "nodePort": 30002}],
    }
}
PODS = [Pod("whoami-1", "whoami", "n1", "/a"), Pod("client-1", "client", "n2", "/b")]


def test_clients_of_each_kind_ask_from_each_place_over_both_families():
    found = list(clients(SERVICE, PODS))
    assert {(each.place, each.kind, ":" in each.front.address) for each in found} == {
        (place, kind, ipv6) for place in ("pod", "node", "outside") for kind in KINDS for ipv6 in (True, False)
    }
    assert {each.namespace for each in found if each.place == "pod"} == {"/b"}
    assert {each.front.port for each in found if each.place == "outside" and each.protocol == "udp"} == {30002}
    assert all(each.pods == {"whoami-1"} for each in found)


def test_the_servers_are_behind_a_dual_stack_service():
    service, servers, client = objects("pause:1")["items"]
    assert service["spec"]["ipFamilyPolicy"] == "RequireDualStack"
    assert service["spec"]["selector"] == servers["spec"]["template"]["metadata"]["labels"]
    assert client["spec"]["replicas"] == 1
