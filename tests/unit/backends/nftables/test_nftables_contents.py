"""The contents of the table after the first sync, for every kind of plan, and the table's structure."""

import pytest
from hypothesis import given
from msgspec.structs import replace

from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.model.objects import ServicePort
from kubeproxy.model.plan import Detector
from support.cluster_objects import world
from support.effort import examples
from support.nftables_ground import resync, sync
from support.nftables_plans import EVERYTHING, V4, V6, cluster, plans_of, sticky
from support.random_plans import histories

# -- into an empty kernel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [V4, V6])
def test_the_first_sync_makes_the_table(ground, family):
    globals_ = world(families=[family])
    backend = ground.start(globals_)
    plans = cluster(
        "a", "b", globals_=globals_, ports=[ServicePort(port=80, node_port=0), ServicePort(port=81, name="x")]
    )
    resync(backend, plans)
    found = ground.contents(family)
    assert len(found["endpoints"]) == 2 * 2 * 3
    assert len(found["cluster-services"]) == 2 * 2
    assert ground.verdicts(family) == 0
    assert len(found["cluster-ips"]) == 2
    assert len(found["hairpin-endpoints"]) == 3
    assert len(found["nodeport-ips"]) == 1
    ground.is_clean(backend, plans)


def test_an_empty_cluster_is_a_table_too(ground):
    backend = ground.start()
    resync(backend, {})
    assert {"nat-prerouting", "nat-output", "nat-postrouting", "filter-forward"} <= set(ground.chains())
    ground.is_clean(backend, {})


def test_elements_in_the_kernel_match_the_plan(ground):
    ports = [ServicePort(port=80, node_port=30080)]
    backend = ground.start()
    resync(backend, cluster("a", endpoints=2, ports=ports))
    assert ground.elements("cluster-services") == {"10.96.0.1 . tcp . 80 : 2"}
    assert ground.elements("endpoints") == {
        "10.96.0.1 . tcp . 80 . 0 : 10.244.0.1 . 8080",
        "10.96.0.1 . tcp . 80 . 1 : 10.244.0.2 . 8080",
    }
    assert ground.elements("external-nodeports") == {"tcp . 30080 : 2"}
    assert ground.elements("nodeport-endpoints") == {
        "tcp . 30080 . 0 : 10.244.0.1 . 8080",
        "tcp . 30080 . 1 : 10.244.0.2 . 8080",
    }
    assert ground.elements("hairpin-endpoints") == {"10.244.0.1 . 10.244.0.1", "10.244.0.2 . 10.244.0.2"}
    assert {name for name, found in ground.contents().items() if found} == {
        *("cluster-services", "endpoints", "cluster-ips", "hairpin-endpoints"),
        *("external-nodeports", "nodeport-endpoints", "nodeport-ips", "transports"),
    }


def test_verdicts_are_for_affinity_alone(ground):
    more = {"ports": [ServicePort(port=80, node_port=30080)], "external_ips": ["203.0.113.1"]}
    backend = ground.start()
    resync(backend, {("default", "a"): plans_of("a", 1, 2, external_traffic_policy="Local", **more)})
    assert ground.verdicts() == 0
    sync(backend, (("default", "a"), sticky("a", 1, 2, external_traffic_policy="Local", **more)))
    assert ground.elements("session-chains") == {
        "10.96.0.1 . tcp . 80 : goto cluster-30s",
        "203.0.113.1 . tcp . 80 : goto policy-local-30s",
    }
    assert ground.elements("local-session-chains") == {"203.0.113.1 . tcp . 80 : goto local-pick-30s"}
    assert ground.elements("nodeport-session-chains") == {"tcp . 30080 : goto nodeport-policy-local-30s"}
    assert ground.elements("local-nodeport-session-chains") == {"tcp . 30080 : goto nodeport-local-pick-30s"}
    assert ground.elements("session-pools") == {"10.96.0.1 . tcp . 80 : 0.0.0.2", "203.0.113.1 . tcp . 80 : 0.0.0.2"}
    assert ground.elements("nodeport-session-pools") == {"tcp . 30080 : 0.0.0.2"}
    assert ground.elements("local-session-pools") == {"203.0.113.1 . tcp . 80 : 0.0.0.3"}
    assert ground.elements("local-nodeport-session-pools") == {"tcp . 30080 : 0.0.0.3"}
    treated = ("cluster-services", "policy-local-services", "policy-local-nodeports", "local-services")
    assert not any(ground.count(name) for name in treated)
    sync(backend, (("default", "a"), plans_of("a", 1, 2, external_traffic_policy="Local", **more)))
    assert ground.verdicts() == 0
    assert all(ground.count(name) for name in treated)


DETECTORS = {
    "none": Detector(),
    "network": Detector("network", "10.244.0.0/16"),
    "bridge": Detector("bridge", "cni0"),
    "prefix": Detector("prefix", "veth"),
}


@pytest.mark.parametrize("masquerade_all", [False, True])
@pytest.mark.parametrize("detector", DETECTORS)
def test_every_kind_of_table_loads_and_is_known_again(ground, detector, masquerade_all):
    globals_ = world(detector=DETECTORS[detector], masquerade_all=masquerade_all, families=[V4])
    globals_ = replace(globals_, ipv4=replace(globals_.ipv4, nodeport_ips=None)) if masquerade_all else globals_
    plans = cluster("a", globals_=globals_, external_traffic_policy="Local", external_ips=["203.0.113.1"])
    backend = ground.start(globals_)
    resync(backend, plans)
    ground.is_clean(backend, plans)
    assert resync(ground.start(globals_), plans) == 0


# -- the structure of the table ------------------------------------------------------------------------------------


def test_chains_and_rules_do_not_grow_with_services(ground):
    more = {**EVERYTHING, "session_affinity": None}

    def many(number):
        return {
            ("default", f"s{n}"): plans_of(
                f"s{n}",
                n,
                3,
                **{
                    **more,
                    "ports": [ServicePort(port=80, node_port=30000 + n)],
                    "external_ips": [],
                    "ingress": [f"198.51.{100 + (n >> 8)}.{n & 255}"],
                },
            )
            for n in range(1, number + 1)
        }

    backend = ground.start()
    resync(backend, many(10))
    before = ground.chains()
    handles = ground.rule_handles()
    sync(backend, *list(many(500).items())[10:])
    assert (
        ground.count("cluster-services"),
        ground.count("policy-local-services"),
        ground.count("policy-local-nodeports"),
    ) == (500,) * 3
    assert ground.verdicts() == 0
    assert ground.chains() == before
    assert ground.rule_handles() == handles


@examples(10)
@given(histories(max_size=1))
def test_a_table_that_is_replaced_gets_the_elements_that_one_grows_to(new_ground, history):
    globals_, (plans,) = history
    (family,) = globals_.families
    with new_ground() as ground:
        resync(ground.start(globals_), plans)
        grown, chains = ground.contents(family), ground.chains(family)
    with new_ground() as ground:
        ground.disturb(f"add table {Ruleset(family, globals_).name}")
        backend = ground.start(globals_)
        resync(backend, plans)
        assert ground.contents(family) == grown
        assert ground.chains(family) == chains
        assert resync(backend, plans) == 0
