"""Session affinity: the sets of clients, and clients who stay where they are."""

import pytest

from kubeproxy.backends.nftables.affinity import ClientGauges
from kubeproxy.backends.nftables.ruleset import AFFINITY_CLIENTS
from kubeproxy.model.objects import ClientIPConfig, EndpointPort, ServicePort, SessionAffinityConfig
from kubeproxy.registry import MetricRegistry, number_text
from support.cluster_objects import HERE, endpoint, parsed, service
from support.compiled import compile_service
from support.nftables_ground import resync, sync
from support.nftables_plans import EVERYTHING, V4, WORLD, plans_of, sticky


def test_affinity_has_a_set_of_clients_for_each_slot(ground):
    backend = ground.start()
    plans = {("default", "a"): sticky("a", 1, 3), ("default", "b"): sticky("b", 2, 2, seconds=10800)}
    resync(backend, {})
    sync(backend, *plans.items())
    assert ground.client_sets() == {"clients-0", "clients-1", "clients-2"}
    rules = ground.chains()
    assert "goto pick-3-30s" in rules["cluster-3-30s"]
    assert len(rules["pick-3-30s"]) == 5
    assert len(rules["pick-2-10800s"]) == 4
    ground.is_clean(backend, plans)
    assert resync(ground.start(), plans) == 0


def test_clients_stay_with_their_endpoint_when_it_moves_to_another_slot(ground):
    backend = ground.start()
    resync(backend, {})
    name = ("default", "a")
    sync(backend, (name, sticky("a", 1, 3, seconds=3000)))
    ground.disturb(
        "add element ip kube-proxy clients-2 { 4711 . 0.0.0.2 timeout 3000s expires 2000s }",
        "add element ip kube-proxy clients-2 { 4712 . 0.0.0.4 timeout 3000s expires 2000s }",
    )
    kept = [endpoint(f"10.244.0.{n}", HERE) for n in (2, 3)]
    config = SessionAffinityConfig(ClientIPConfig(3000))
    subject = service("a", session_affinity="ClientIP", session_affinity_config=config)
    plans = compile_service(subject, [parsed(*kept, ports=[EndpointPort(port=8080)])], WORLD).plans
    sync(backend, (name, plans))
    assert "10.96.0.1 . tcp . 80 . 0 : 10.244.0.3 . 8080" in ground.elements("endpoints")
    (client,) = ground.packed("clients-0")
    assert client.key.startswith((4711).to_bytes(4, "little"))
    assert 1_900_000 < client.expires <= 2_000_000
    assert ground.difference(backend) is None
    ground.is_clean(backend, {name: plans})


def test_metrics_say_how_full_the_fullest_set_of_clients_is(ground):
    backend, registry = ground.start(), MetricRegistry()
    gauges, table = ClientGauges(registry), ground.table(V4)
    gauges.look(table)
    resync(backend, {("default", "a"): sticky("a", 1, 2, seconds=3000)})
    if table.count("clients-0") is None:
        pytest.skip("a kernel before Linux 6.16")
    ground.disturb("add element ip kube-proxy clients-0 { 5 . 0.0.0.2 timeout 3000s, 6 . 0.0.0.2 timeout 3000s }")
    gauges.look(table)
    table.close()
    assert registry.render().decode().splitlines()[2::3] == [
        'kubeproxy_session_affinity_clients{ip_family="IPv4"} 2',
        f'kubeproxy_session_affinity_clients_limit{{ip_family="IPv4"}} {number_text(AFFINITY_CLIENTS)}',
    ]


def test_affinity_of_every_kind_of_frontend_loads(ground):
    plans = {("default", "a"): sticky("a", 1, 2, **{k: v for k, v in EVERYTHING.items() if k != "session_affinity"})}
    backend = ground.start()
    resync(backend, {})
    sync(backend, *plans.items())
    assert ground.client_sets() == {"clients-0", "clients-1"}
    ground.is_clean(backend, plans)


# -- the numbers that stand for service ports ----------------------------------------------------------------------


def numbers(ground, name="session-pools"):
    return dict(element.split(" : ") for element in ground.elements(name))


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


def test_affinity_that_was_off_meanwhile_begins_anew(ground):
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
    """The same number twice would share clients; one beyond all would leave none to give."""
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
    nodeports = numbers(ground, "nodeport-session-pools")
    assert numbers(ground) == {
        "10.96.0.1 . tcp . 80": nodeports["tcp . 30081"],
        "10.96.0.1 . tcp . 81": nodeports["tcp . 30080"],
    }
    assert len(set(nodeports.values())) == 2
    ground.is_clean(again, plans)
