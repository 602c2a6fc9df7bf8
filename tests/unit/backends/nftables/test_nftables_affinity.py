"""Session affinity: pools, numbers of endpoints, and the map of clients."""

import pytest

from kubeproxy.backends.nftables import found
from kubeproxy.backends.nftables.affinity import AFFINITY_CLIENTS, ClientGauges
from kubeproxy.backends.nftables.layout import CLIENTS
from kubeproxy.model.objects import ClientIPConfig, EndpointPort, ServicePort, SessionAffinityConfig
from kubeproxy.registry import MetricRegistry, number_text
from support.cluster_objects import HERE, endpoint, parsed, service
from support.compiled import compile_service
from support.nftables_ground import resync, sync, without_slots
from support.nftables_plans import EVERYTHING, V4, WORLD, plans_of, sticky


def plans_for(*numbers, port=8080, **more):
    """Return a Service with affinity and these endpoints."""
    config = SessionAffinityConfig(ClientIPConfig(3000))
    subject = service("a", session_affinity="ClientIP", session_affinity_config=config, **more)
    members = [endpoint(f"10.244.0.{n}", HERE) for n in numbers]
    return compile_service(subject, [parsed(*members, ports=[EndpointPort(port=port)])], WORLD).plans


def mapped(ground, name):
    return dict(element.split(" : ") for element in ground.elements(name))


def test_a_pool_with_affinity_exists_once_for_all_its_frontends(ground):
    backend = ground.start()
    more = {"external_ips": ["203.0.113.1"], "ports": [ServicePort(port=80, node_port=30080)]}
    plans = {("default", "a"): sticky("a", 1, 3, **more), ("default", "b"): sticky("b", 2, 2, seconds=10800)}
    resync(backend, {})
    sync(backend, *plans.items())
    slots, endpoints = mapped(ground, "session-slots"), mapped(ground, "session-endpoints")
    assert slots.keys() == {f"0.0.0.2 . {n}" for n in range(3)} | {f"0.0.0.4 . {n}" for n in range(2)}
    assert {f"{number} . tcp" for number in slots.values()} == endpoints.keys()
    assert len(endpoints) == 5
    assert mapped(ground, "session-classes") == {"0.0.0.2": "3", "0.0.0.4": "2"}
    assert not any(ground.count(name) for name in ("endpoints", "nodeport-endpoints", "cluster-services"))
    ground.is_clean(backend, plans)
    assert resync(ground.start(), plans) == 0


def test_an_endpoint_keeps_its_unique_number_when_it_moves_to_another_slot(ground):
    backend, name = ground.start(), ("default", "a")
    resync(backend, {})
    sync(backend, (name, plans_for(1, 2, 3)))
    before = {data: key for key, data in mapped(ground, "session-endpoints").items()}
    gone = before.pop("10.244.0.1 . 8080")
    sync(backend, (name, plans_for(2, 3)))
    assert {data: key for key, data in mapped(ground, "session-endpoints").items()} == before
    sync(backend, (name, plans_for(1, 2, 3)))
    assert gone not in mapped(ground, "session-endpoints")
    ground.is_clean(backend, {name: plans_for(1, 2, 3)})
    assert resync(ground.start(), {name: plans_for(1, 2, 3)}) == 0


def test_an_endpoint_with_a_lost_number_gets_it_again(ground):
    backend, name = ground.start(), ("default", "a")
    resync(backend, {name: plans_for(1, 2, 3)})
    before = ground.contents()
    ground.disturb("flush map ip kube-proxy session-endpoints", "flush map ip kube-proxy session-slots")
    resync(backend, {name: plans_for(1, 2, 3)})
    assert ground.elements("session-endpoints") == before["session-endpoints"]
    ground.is_clean(backend, {name: plans_for(1, 2, 3)})


def test_no_endpoint_gets_the_number_of_an_endpoint_that_went_before_a_restart(ground):
    """Clients of the first Service still have the number: they would reach the endpoint of another Service."""
    backend, name = ground.start(), ("default", "a")
    resync(backend, {name: plans_for(1, 2)})
    sync(backend, (name, plans_for(1, 2, 3)))
    (gone,) = (key for key, data in mapped(ground, "session-endpoints").items() if data.startswith("10.244.0.3 "))
    sync(backend, (name, plans_for(1, 2)))
    for number in range(4, 7):
        again = ground.start()
        resync(again, {name: plans_for(1, 2)})
        sync(again, (name, plans_for(1, 2, number)))
        assert len(mapped(ground, "session-endpoints")) == 3
        assert gone not in mapped(ground, "session-endpoints")
        ground.is_clean(again, {name: plans_for(1, 2, number)})
        sync(again, (name, plans_for(1, 2)))


@pytest.mark.parametrize("port", [80, 30080])
def test_an_endpoint_that_is_its_own_frontend_is_not_written_over(ground, port):
    """The kernel does not write an address that needs no translation."""
    more = {"ports": [ServicePort(port=80, node_port=30080)], "external_ips": ["10.244.0.2"]}
    plans = {("default", "a"): plans_for(1, 2, port=port, **more)}
    backend = ground.start()
    resync(backend, plans)
    of = {data: key.split(" . ")[0] for key, data in mapped(ground, "session-endpoints").items()}
    own = [f"10.244.0.{n} . {port}" for n in ((2,) if port == 80 else (1, 2))]
    assert ground.elements("session-own") == {f"{of[each]} . {each}" for each in own}
    ground.is_clean(backend, plans)


@pytest.mark.parametrize("counts", [True, False])
def test_metrics_say_how_full_the_map_of_clients_is_if_the_kernel_counts_it(ground, counts, monkeypatch):
    backend, registry = ground.start(), MetricRegistry()
    gauges, table = ClientGauges(registry), ground.table(V4)
    if not counts:
        monkeypatch.setattr(table, "count", lambda name: None)
    gauges.look(table, 0)
    resync(backend, {("default", "a"): sticky("a", 1, 2, seconds=3000)})
    some = ", ".join(f"{client} . 0.0.0.2 timeout 3000s : 192.0.0.1" for client in (5, 6))
    ground.disturb(f"add element ip kube-proxy {CLIENTS} {{ {some} }}")
    gauges.look(table, 1)
    table.close()
    samples = [
        'kubeproxy_session_affinity_clients{ip_family="IPv4"} 2',
        f'kubeproxy_session_affinity_clients_limit{{ip_family="IPv4"}} {number_text(AFFINITY_CLIENTS)}',
    ]
    rendered = [line for line in registry.render().decode().splitlines() if not line.startswith("#")]
    assert rendered == (samples if counts and ground.counts else [])


def test_affinity_of_every_kind_of_frontend_loads(ground):
    plans = {("default", "a"): sticky("a", 1, 2, **{k: v for k, v in EVERYTHING.items() if k != "session_affinity"})}
    backend = ground.start()
    resync(backend, {})
    sync(backend, *plans.items())
    ground.is_clean(backend, plans)


# -- numbers of service ports ------------------------------------------------------------------------------------------


def numbers(ground):
    return mapped(ground, "session-pools")


def test_a_restart_keeps_the_numbers_and_reuses_none(ground):
    plans = {("default", "a"): sticky("a", 1, 2), ("default", "b"): sticky("b", 2, 2)}
    resync(ground.start(), plans)
    before = numbers(ground)
    assert before == {"10.96.0.1 . tcp . 80": "0.0.0.2", "10.96.0.2 . tcp . 80": "0.0.0.4"}
    plans = {("default", "c"): sticky("c", 3, 2), ("default", "b"): plans["default", "b"]}
    again = ground.start()
    resync(again, plans)
    assert numbers(ground) == {"10.96.0.3 . tcp . 80": "0.0.0.6", "10.96.0.2 . tcp . 80": "0.0.0.4"}
    ground.is_clean(again, plans)


def test_affinity_that_was_off_starts_again_without_clients(ground):
    backend, name = ground.start(), ("default", "a")
    resync(backend, {name: sticky("a", 1, 2)})
    sync(backend, (name, plans_of("a", 1, 2)))
    assert not numbers(ground)
    sync(backend, (name, sticky("a", 1, 2)))
    assert numbers(ground) == {"10.96.0.1 . tcp . 80": "0.0.0.4"}


def test_another_timeout_keeps_the_number_and_every_address_has_it(ground):
    backend, name = ground.start(), ("default", "a")
    resync(backend, {name: sticky("a", 1, 2)})
    sync(backend, (name, sticky("a", 1, 3, seconds=60, external_ips=["203.0.113.1"])))
    assert set(numbers(ground).values()) == {"0.0.0.2"}
    assert len(numbers(ground)) == 2
    sync(backend, (name, sticky("a", 1, 3, seconds=60)))
    assert numbers(ground) == {"10.96.0.1 . tcp . 80": "0.0.0.2"}


@pytest.mark.parametrize("number", ["0.0.0.4", "255.255.255.255", "0.0.0.0"])
def test_numbers_that_another_program_wrote_are_put_right(ground, number):
    """A duplicate number would share clients; a number beyond the maximum would leave no free one."""
    plans = {("default", "a"): sticky("a", 1, 2), ("default", "b"): sticky("b", 2, 2)}
    resync(ground.start(), plans)
    ground.disturb(
        "delete element ip kube-proxy session-pools { 10.96.0.1 . tcp . 80 }",
        f"add element ip kube-proxy session-pools {{ 10.96.0.1 . tcp . 80 : {number} }}",
    )
    again = ground.start()
    resync(again, plans)
    found = set(numbers(ground).values())
    assert len(found) == 2
    assert found <= {"0.0.0.2", "0.0.0.4", "0.0.0.6"}
    ground.is_clean(again, plans)


def test_ports_that_split_between_inspections_have_separate_numbers(ground):
    name = ("default", "a")
    one = [ServicePort(port=80, name="one", node_port=30080)]
    two = [ServicePort(port=80, name="one", node_port=30081), ServicePort(port=81, name="two", node_port=30080)]
    resync(ground.start(), {name: sticky("a", 1, 2, ports=one)})
    plans = {name: sticky("a", 1, 2, ports=two)}
    again = ground.start()
    resync(again, plans)
    nodeports = mapped(ground, "nodeport-session-pools")
    assert numbers(ground) == {
        "10.96.0.1 . tcp . 80": nodeports["tcp . 30081"],
        "10.96.0.1 . tcp . 81": nodeports["tcp . 30080"],
    }
    assert len(set(nodeports.values())) == 2
    ground.is_clean(again, plans)


# -- numbers that another program wrote twice, and elements without a frontend ----------------------------------------

WRITTEN_TWICE = {
    "the slot of a pool has the number of another Service's endpoint": [
        "delete element ip kube-proxy session-slots { 0.0.0.2 . 1 }",
        "add element ip kube-proxy session-slots { 0.0.0.2 . 1 : 192.0.0.3 }",
    ],
    "the last slot of a pool has the number of an earlier Service's endpoint": [
        "delete element ip kube-proxy session-slots { 0.0.0.6 . 1 }",
        "add element ip kube-proxy session-slots { 0.0.0.6 . 1 : 192.0.0.1 }",
    ],
    "a frontend has the pool of a later Service": [
        "delete element ip kube-proxy session-pools { 10.96.0.1 . tcp . 80 }",
        "add element ip kube-proxy session-pools { 10.96.0.1 . tcp . 80 : 0.0.0.4 }",
    ],
    "a frontend has the pool of an earlier Service with another protocol": [
        "delete element ip kube-proxy session-pools { 10.96.0.3 . udp . 80 }",
        "add element ip kube-proxy session-pools { 10.96.0.3 . udp . 80 : 0.0.0.2 }",
    ],
    "a pool has no class, and its first slot is missing": [
        "delete element ip kube-proxy session-classes { 0.0.0.4 }",
        "delete element ip kube-proxy session-slots { 0.0.0.4 . 0 }",
    ],
    "the number of an endpoint has the protocol of another Service too": [
        "add element ip kube-proxy session-endpoints { 192.0.0.1 . udp : 10.244.0.9 . 99 }",
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize("together", [1, 256])
@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("case", WRITTEN_TWICE)
def test_elements_that_several_services_lead_to_are_repaired(ground, monkeypatch, case, restarts, together):
    """The number of unread elements stays 0 if the numbers of stray elements and of duplicate elements are equal."""
    monkeypatch.setattr(found, "SERVICES", together)
    udp = [ServicePort(port=80, protocol="UDP")]
    plans = {("default", "a"): sticky("a", 1, 2), ("default", "b"): sticky("b", 2, 2)}
    plans["default", "c"] = sticky("c", 3, 2, ports=udp)
    backend = ground.start()
    resync(backend, plans)
    before = ground.contents()
    for strays in range(4):
        stray = [
            line
            for number in range(strays)
            for line in (
                f"add element ip kube-proxy session-endpoints {{ 192.0.1.{number} . tcp : 10.9.9.9 . 99 }}",
                f"add element ip kube-proxy session-slots {{ 0.0.1.0 . {number} : 192.0.1.{number} }}",
            )
        ]
        ground.disturb(*WRITTEN_TWICE[case], *stray)
        backend = ground.start() if restarts else backend
        resync(backend, plans)
        assert without_slots(ground.contents()) == without_slots(before)
        ground.is_clean(backend, plans)
        ground.disturb("delete table ip kube-proxy")
        backend = ground.start()
        resync(backend, plans)


def test_a_pool_of_a_service_that_was_deleted_while_no_proxy_ran_is_removed(ground):
    plans = {("default", "a"): sticky("a", 1, 2), ("default", "b"): sticky("b", 2, 3)}
    resync(ground.start(), plans)
    del plans["default", "b"]
    again = ground.start()
    resync(again, plans)
    assert {element.split(" . ")[0] for element in ground.elements("session-slots")} == {"0.0.0.2"}
    assert len(ground.elements("session-endpoints")) == 2
    ground.is_clean(again, plans)


def test_a_pool_keeps_its_numbers_if_its_only_frontend_changes(ground):
    """A restart finds the local pool by the number of the other frontends of the Service."""
    name, ports = ("default", "a"), [ServicePort(port=80, node_port=30080)]
    resync(ground.start(), {name: sticky("a", 1, 2, ports=ports, external_traffic_policy="Local")})
    before = ground.elements("session-endpoints")
    plans = {name: sticky("a", 1, 2, internal_traffic_policy="Local")}
    again = ground.start()
    resync(again, plans)
    assert ground.elements("session-endpoints") < before
    ground.is_clean(again, plans)


def test_without_the_mark_no_endpoint_gets_the_number_of_an_endpoint_that_a_restart_removes(ground):
    """Earlier versions wrote no mark into the map of clients."""
    name = ("default", "a")
    resync(ground.start(), {name: plans_for(1, 2, 3)})
    ground.disturb(f"flush map ip kube-proxy {CLIENTS}")
    again = ground.start()
    resync(again, {name: plans_for(1, 2)})
    sync(again, (name, plans_for(1, 2, 4)))
    assert ground.elements("session-endpoints") == {
        f"192.0.0.{number} . tcp : 10.244.0.{number} . 8080" for number in (1, 2, 4)
    }
    ground.is_clean(again, {name: plans_for(1, 2, 4)})
