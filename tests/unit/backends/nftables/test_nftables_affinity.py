"""Session affinity: the sets of clients, and clients who stay where they are."""

from kubeproxy.model.compile import compile_service
from kubeproxy.model.objects import ClientIPConfig, EndpointPort, SessionAffinityConfig
from support.cluster_objects import HERE, endpoint, parsed, service
from support.nftables_ground import resync, sync
from support.nftables_plans import EVERYTHING, WORLD, sticky


def test_affinity_has_a_set_of_clients_for_each_slot(ground):
    backend = ground.start()
    plans = {("default", "a"): sticky("a", 1, 3), ("default", "b"): sticky("b", 2, 2, seconds=10800)}
    resync(backend, {})
    sync(backend, *plans.items())
    assert ground.client_sets() == {"affinity-0", "affinity-1", "affinity-2"}
    rules = ground.chains()
    assert "goto pick-3-30s" in rules["cluster-3-30s"]
    assert len(rules["pick-3-30s"]) == 4
    assert len(rules["pick-2-10800s"]) == 3
    ground.is_clean(backend, plans)
    assert resync(ground.start(), plans) == 0


def test_clients_stay_with_their_endpoint_when_it_moves_to_another_slot(ground):
    backend = ground.start()
    resync(backend, {})
    name = ("default", "a")
    sync(backend, (name, sticky("a", 1, 3, seconds=3000)))
    ground.disturb(
        "add element ip kube-proxy affinity-2 { 172.16.0.1 . 10.96.0.1 . tcp . 80 timeout 3000s expires 2000s }",
        "add element ip kube-proxy affinity-2 { 172.16.0.2 . 10.96.0.9 . tcp . 80 timeout 3000s expires 2000s }",
    )
    kept = [endpoint(f"10.244.0.{n}", HERE) for n in (2, 3)]
    config = SessionAffinityConfig(ClientIPConfig(3000))
    subject = service("a", session_affinity="ClientIP", session_affinity_config=config)
    plans = compile_service(subject, [parsed(*kept, ports=[EndpointPort(port=8080)])], WORLD).plans
    sync(backend, (name, plans))
    assert "10.96.0.1 . tcp . 80 . 0 : 10.244.0.3 . 8080" in ground.elements("endpoints")
    (client,) = ground.packed("affinity-0")
    assert client.key.startswith(bytes([172, 16, 0, 1]))
    assert 1_900_000 < client.expires <= 2_000_000
    assert ground.difference(backend) is None
    ground.is_clean(backend, {name: plans})


def test_affinity_of_every_kind_of_frontend_loads(ground):
    plans = {("default", "a"): sticky("a", 1, 2, **{k: v for k, v in EVERYTHING.items() if k != "session_affinity"})}
    backend = ground.start()
    resync(backend, {})
    sync(backend, *plans.items())
    assert ground.client_sets() == {
        f"{prefix}affinity-{slot}" for prefix in ("", "local-", "nodeport-", "nodeport-local-") for slot in (0, 1)
    }
    ground.is_clean(backend, plans)
