from __future__ import annotations

from e2e.loadbalancer import LoadBalancer, Pool, route


class FakeApi:
    def __init__(self, *services: dict) -> None:
        self.services = list(services)

    def get(self, _path: str) -> dict:
        return {"items": self.services}

    def patch(self, path: str, patch: dict) -> None:
        name = path.split("/")[-2]
        next(each for each in self.services if each["metadata"]["name"] == name)["status"] = patch["status"]


def service(name: str, **spec) -> dict:
    return {"metadata": {"namespace": "ns", "name": name}, "spec": {"type": "LoadBalancer"} | spec, "status": {}}


def test_an_address_is_kept_and_given_again_last():
    pool = Pool("203.0.113.0/29")
    first = pool.give("ns/a")
    assert pool.give("ns/a") == first == "203.0.113.1"
    assert pool.take_back(["ns/a"]) == []
    assert pool.take_back([]) == [first]
    assert [pool.give(f"ns/{n}") for n in range(6)][-1] == first


def test_a_service_gets_an_address_and_a_route_to_the_nodes_that_are_healthy():
    api = FakeApi(service("all"), service("local", healthCheckNodePort=30000))
    ran: list[list[str]] = []
    healthy = {"192.168.78.12"}
    balancer = LoadBalancer(api, ran.append, lambda node, _port: node in healthy)
    balancer.turn()
    assert [each["status"]["loadBalancer"]["ingress"][0]["ip"] for each in api.services] == [
        "203.0.113.1",
        "203.0.113.2",
    ]
    assert ran == [route("203.0.113.1", ["192.168.78.11", "192.168.78.12"]), route("203.0.113.2", ["192.168.78.12"])]
    healthy.clear()
    balancer.turn()
    assert ran[2:] == [["route", "replace", "unreachable", "203.0.113.2/32"]]


def test_another_type_ends_address_and_route():
    api = FakeApi(service("a"))
    ran: list[list[str]] = []
    balancer = LoadBalancer(api, ran.append, lambda *_: True)
    balancer.turn()
    api.services[0]["spec"]["type"] = "ClusterIP"
    balancer.turn()
    assert api.services[0]["status"] == {"loadBalancer": {"ingress": None}}
    assert ran[1:] == [["route", "del", "203.0.113.1/32"]]
    balancer.turn()
    assert len(ran) == 2
