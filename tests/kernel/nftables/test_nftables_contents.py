"""What the table holds after the first sync, for every kind of plan, and its shape."""

from contextlib import closing

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.layout import VERDICT_MAPS, SetId, parse_chain_name
from kubeproxy.backends.nftables.render import Placed, render
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.nftables.text import element_lines, interval_lines
from kubeproxy.kernel import nfnetlink, nft
from kubeproxy.model.objects import ServicePort
from kubeproxy.model.plan import Detector
from support.cluster_objects import world
from support.nftables_table import (
    EVERYTHING,
    V4,
    V6,
    chains,
    cluster,
    contents,
    count,
    is_clean,
    listing,
    plans_of,
    readable,
    resync,
    sticky,
    sync,
    verdicts,
)
from support.own_network import own_network
from support.random_plans import histories

# -- from nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [V4, V6])
def test_the_first_sync_makes_the_table(start, family):
    globals_ = world(families=[family])
    backend = start(globals_)
    plans = cluster(
        "a", "b", globals_=globals_, ports=[ServicePort(port=80, node_port=0), ServicePort(port=81, name="x")]
    )
    resync(backend, plans)
    found = contents(family)
    assert len(found["endpoints"]) == 2 * 2 * 3
    assert len(found["cluster-services"]) == len(found["endpoints-4"]) == 2 * 2
    assert verdicts(family) == 0
    assert len(found["cluster-ips"]) == 2
    assert len(found["hairpin-endpoints"]) == 3
    assert len(found["nodeport-ips"]) == 1
    is_clean(backend, plans)


def test_an_empty_cluster_is_a_table_too(start):
    backend = start()
    resync(backend, {})
    assert {"nat-prerouting", "nat-output", "nat-postrouting", "filter-forward"} <= set(chains())
    is_clean(backend, {})


def test_elements_are_in_the_kernel_as_the_plan_says(start):
    ports = [ServicePort(port=80, node_port=30080)]
    backend = start()
    resync(backend, cluster("a", endpoints=2, ports=ports))
    assert readable("cluster-services") == readable("endpoints-4") == {"10.96.0.1 . tcp . 80"}
    assert readable("endpoints") == {
        "10.96.0.1 . tcp . 80 . 0 : 10.244.0.1 . 8080",
        "10.96.0.1 . tcp . 80 . 1 : 10.244.0.2 . 8080",
    }
    assert readable("external-nodeports") == readable("nodeport-endpoints-4") == {"tcp . 30080"}
    assert readable("nodeport-endpoints") == {
        "tcp . 30080 . 0 : 10.244.0.1 . 8080",
        "tcp . 30080 . 1 : 10.244.0.2 . 8080",
    }
    assert readable("hairpin-endpoints") == {"10.244.0.1 . 10.244.0.1", "10.244.0.2 . 10.244.0.2"}
    assert {name for name, found in contents().items() if found} == {
        *("cluster-services", "endpoints", "endpoints-4", "cluster-ips", "hairpin-endpoints"),
        *("external-nodeports", "nodeport-endpoints", "nodeport-endpoints-4", "nodeport-ips", "transports"),
    }


def test_verdicts_are_for_affinity_alone(start):
    more = {"ports": [ServicePort(port=80, node_port=30080)], "external_ips": ["203.0.113.1"]}
    backend = start()
    resync(backend, {("default", "a"): plans_of("a", 1, 2, external_traffic_policy="Local", **more)})
    assert verdicts() == 0
    sync(backend, (("default", "a"), sticky("a", 1, 2, external_traffic_policy="Local", **more)))
    assert readable("affinity-services") == {
        "10.96.0.1 . tcp . 80 : goto cluster-2-30s",
        "203.0.113.1 . tcp . 80 : goto policy-local-2-30s",
    }
    assert readable("local-affinity-services") == {"203.0.113.1 . tcp . 80 : goto local-pick-2-30s"}
    assert readable("affinity-nodeports") == {"tcp . 30080 : goto nodeport-policy-local-2-30s"}
    assert readable("local-affinity-nodeports") == {"tcp . 30080 : goto nodeport-local-pick-2-30s"}
    treated = ("cluster-services", "policy-local-services", "policy-local-nodeports", "endpoints-4")
    assert not any(count(name) for name in treated)
    sync(backend, (("default", "a"), plans_of("a", 1, 2, external_traffic_policy="Local", **more)))
    assert verdicts() == 0
    assert all(count(name) for name in treated)


DETECTORS = {
    "none": Detector(),
    "network": Detector("network", "10.244.0.0/16"),
    "bridge": Detector("bridge", "cni0"),
    "prefix": Detector("prefix", "veth"),
}


@pytest.mark.parametrize("masquerade_all", [False, True])
@pytest.mark.parametrize("detector", DETECTORS)
def test_every_kind_of_table_loads_and_is_known_again(start, detector, masquerade_all):
    globals_ = world(detector=DETECTORS[detector], masquerade_all=masquerade_all, families=[V4])
    globals_ = replace(globals_, ipv4=replace(globals_.ipv4, nodeport_ips=None)) if masquerade_all else globals_
    plans = cluster("a", globals_=globals_, external_traffic_policy="Local", external_ips=["203.0.113.1"])
    backend = start(globals_)
    resync(backend, plans)
    is_clean(backend, plans)
    assert resync(start(globals_), plans) == 0


# -- the shape of the table ----------------------------------------------------------------------------------------


def test_chains_and_rules_do_not_grow_with_services(start):
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

    backend = start()
    resync(backend, many(10))
    before = chains()
    handles = nfnetlink.rule_handles(V4, "kube-proxy")
    sync(backend, *list(many(500).items())[10:])
    assert (count("cluster-services"), count("policy-local-services"), count("policy-local-nodeports")) == (500,) * 3
    assert verdicts() == 0
    assert chains() == before
    assert nfnetlink.rule_handles(V4, "kube-proxy") == handles


@pytest.mark.parametrize("family", [V4, V6])
def test_the_listing_loads_again_elsewhere(start, family):
    globals_ = world(families=[family])
    plans = {
        ("default", "a"): plans_of("a", 1, globals_=globals_),
        ("default", "b"): sticky("b", 2, 2, globals_=globals_),
    }
    resync(start(globals_), plans)
    text = listing(family)
    before, rules = contents(family), chains(family)
    with own_network():
        nft.run(text)
        assert (contents(family), chains(family)) == (before, rules)


@settings(max_examples=10, deadline=None)
@given(histories(max_size=1))
def test_elements_as_text_are_the_elements_as_packed(history):
    globals_, (plans,) = history
    (family,) = globals_.families
    with own_network(), closing(NftablesBackend(KernelTable.open(family), globals_)) as backend:
        resync(backend, plans)
        packed = contents(family)
    ruleset = Ruleset(family, globals_)
    total = render(Placed.fresh(p) for found in plans.values() for p in found)
    ours = globals_.of(family)
    total[SetId.NODEPORT_IPS] = dict.fromkeys(ours.nodeport_ips, b"")
    with own_network(), closing(NftablesBackend(KernelTable.open(family), globals_)) as backend:
        names = {parse_chain_name(d.decode()) for set_id in VERDICT_MAPS for d in total.get(set_id, {}).values()}
        nft.run(
            "\n".join(
                [
                    ruleset.skeleton(names),
                    *element_lines(ruleset.layout, ruleset.name, total),
                    *interval_lines(ruleset.name, "service-cidrs", ours.service_cidrs),
                ]
            )
            + "\n"
        )
        assert contents(family) == packed
        assert resync(backend, plans) == 0
