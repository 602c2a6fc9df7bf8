"""Changes in successive syncs: the written elements, and that the result is the same as that of a resync."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.nftables import backend as backend_module
from kubeproxy.errors import ChangedByOthersError
from kubeproxy.kernel.nftables import messages
from kubeproxy.model.objects import ServicePort
from kubeproxy.model.plan import FamilyGlobals, Globals
from support.cluster_objects import HERE, endpoint, parsed, service, world
from support.compiled import compile_service
from support.effort import examples
from support.nftables_disturbances import disturbed
from support.nftables_ground import FakeGround, resync, sync, without_slots
from support.nftables_plans import EVERYTHING, V4, V6, WORLD, cluster, plans_of, sticky
from support.random_plans import histories

# -- incremental ---------------------------------------------------------------------------------------------------


@examples(20)
@given(histories(min_size=2, max_size=4), st.data())
def test_incremental_equals_resync(new_ground, history, data):
    globals_, states = history
    (family,) = globals_.families
    with new_ground() as ground:
        backend = ground.start(globals_)
        resync(backend, states[0])
        for earlier, later in itertools.pairwise(states):
            names = data.draw(st.permutations(sorted(earlier.keys() | later.keys())))
            changes = [(name, later.get(name, ())) for name in names if earlier.get(name) != later.get(name)]
            sync(backend, *changes)
            assert ground.difference(backend) is None
        incremental = ground.contents(family)
        ground.is_clean(backend, states[-1])
    with new_ground() as ground:
        backend = ground.start(globals_)
        resync(backend, states[-1])
        assert without_slots(ground.contents(family)) == without_slots(incremental)


def test_a_sync_without_changes_writes_nothing(ground):
    backend, _ = disturbed(ground)
    before = ground.generation()
    assert sync(backend) == 0
    assert sync(backend, (("default", "nobody"), ())) == 0
    assert ground.generation() == before


def test_one_changed_endpoint_is_one_transaction_of_one_element_replaced(ground):
    backend = ground.start()
    plans = compile_service(service(), [parsed(*[endpoint(f"10.244.1.{n}") for n in range(1, 11)])], WORLD).plans
    resync(backend, {("default", "web"): plans})
    changed = [endpoint(f"10.244.1.{n}") for n in (1, 2, 3, 4, 99, 6, 7, 8, 9, 10)]
    before = ground.generation()
    plans = compile_service(service(), [parsed(*changed)], WORLD).plans
    assert sync(backend, (("default", "web"), plans)) == 2
    assert ground.generation() == before + 1
    assert "10.96.0.1 . tcp . 80 . 4 : 10.244.1.99 . 8080" in ground.elements("endpoints")


def test_a_failed_sync_leaves_the_kernel_as_it_was_and_a_resync_mends_it(ground):
    backend, plans = disturbed(ground)
    ground.disturb("delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }")
    before = ground.contents()
    del plans["default", "a"]
    plans["default", "new"] = plans_of("new", 7)
    with pytest.raises(ChangedByOthersError):
        sync(backend, (("default", "a"), ()), (("default", "new"), plans["default", "new"]))
    assert ground.contents() == before
    resync(backend, plans)
    ground.is_clean(backend, plans)


def test_services_without_affinity_need_no_chains_of_their_own(ground):
    backend = ground.start()
    resync(backend, {})
    before, handles = ground.chains(), ground.rule_handles()
    more = {"ports": [ServicePort(port=80, node_port=30080)], "external_ips": ["203.0.113.1"]}
    for many in (1, 250):
        plans = {("default", "a"): plans_of("a", 1, many, external_traffic_policy="Local", **more)}
        sync(backend, *plans.items())
        assert ground.count("endpoints") == 2 * many
        assert ground.count("local-nodeport-endpoints") == many
    assert ground.chains() == before
    assert ground.rule_handles() == handles
    classes = [
        name for name, found in ground.contents().items() if any(element.endswith(" : 256") for element in found)
    ]
    assert len(classes) == 5  # three of them for the cluster IP and the external IP
    ground.is_clean(backend, plans)
    assert resync(ground.start(), plans) == 0


def test_chains_of_affinity_are_made_on_demand_for_timeouts(ground):
    more = {"ports": [ServicePort(port=80, node_port=30080)], "external_ips": ["203.0.113.1"]}
    plans = {("default", "a"): sticky("a", 1, 2, external_traffic_policy="Local", **more)}
    backend = ground.start()
    resync(backend, {})
    before = set(ground.chains())
    sync(backend, *plans.items())
    kinds = ("external", "policy-local", "pick", "local-pick", "recall", "local-recall")
    frontends = {f"{prefix}{kind}-30s" for prefix in ("", "nodeport-") for kind in kinds}
    assert set(ground.chains()) - before == frontends | {"cluster-30s", "remember-30s"}
    before, handles = ground.chains(), ground.rule_handles()
    for endpoints in (1, 5, 70, 300):
        plans["default", "b"] = sticky("b", 2, endpoints)
        sync(backend, *plans.items())
        assert (ground.chains(), ground.rule_handles()) == (before, handles)
    ground.is_clean(backend, plans)
    assert resync(ground.start(), plans) == 0


def test_chains_made_on_demand_are_those_of_a_table_that_is_replaced(ground, new_ground):
    backend = ground.start()
    plans = cluster("a", endpoints=4, **EVERYTHING)
    resync(backend, {})
    sync(backend, *plans.items())
    made = ground.chains()
    assert any(name.startswith("remember-") for name in made)
    with new_ground() as elsewhere:
        elsewhere.disturb("add table ip kube-proxy")
        resync(elsewhere.start(), plans)
        assert elsewhere.chains() == made


# -- the node's own sets -------------------------------------------------------------------------------------------


def node_world(nodeport_ips=(), cidrs=()):
    ours = FamilyGlobals(detector=WORLD.ipv4.detector, nodeport_ips=nodeport_ips, service_cidrs=cidrs)
    return Globals(HERE, ipv4=ours, ipv6=None)


ONE, TWO = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])
CIDR = (bytes([10, 96, 0, 0]), bytes([10, 96, 255, 255]))
NEXT = (bytes([10, 98, 0, 0]), bytes([10, 98, 0, 3]))


def test_node_addresses_and_service_cidrs_change_by_a_sync(ground):
    backend = ground.start(node_world((ONE,), (CIDR,)))
    resync(backend, {})
    for nodeport_ips, cidrs in [((ONE, TWO), (CIDR,)), ((TWO,), (CIDR, NEXT)), ((), ()), ((ONE,), (NEXT,))]:
        assert backend.set_world(node_world(nodeport_ips, cidrs)) is False
        sync(backend)
        assert ground.count("nodeport-ips") == len(nodeport_ips)
        assert ground.count("service-cidrs") == len(cidrs)
        ground.is_clean(backend, {})
    assert resync(ground.start(node_world((ONE,), (NEXT,))), {}) == 0


@pytest.mark.parametrize(
    "cidrs",
    [
        (),
        (CIDR,),
        (CIDR, NEXT),
        ((bytes(4), bytes([127, 255, 255, 255])),),
        ((bytes([128, 0, 0, 0]), bytes([255] * 4)),),
        ((bytes(4), bytes([255] * 4)),),
    ],
)
def test_a_restart_writes_no_service_cidrs_that_are_there(ground, cidrs):
    plans = cluster("a")
    resync(ground.start(node_world((ONE,), cidrs)), plans)
    before = ground.generation()
    backend = ground.start(node_world((ONE,), cidrs))
    assert resync(backend, plans) == 0
    assert ground.generation() == before  # nothing is written
    ground.is_clean(backend, plans)
    other = ground.start(node_world((ONE,), ((bytes([10, 97, 0, 0]), bytes([10, 97, 255, 255])),)))
    resync(other, plans)
    assert ground.count("service-cidrs") == 1
    ground.is_clean(other, plans)


def test_node_addresses_change_between_inspections(ground):
    resync(ground.start(node_world((ONE,), (CIDR,))), {})
    backend = ground.start(node_world((TWO,), (NEXT,)))
    resync(backend, {})
    assert (ground.elements("nodeport-ips"), ground.count("service-cidrs")) == ({"192.0.2.2"}, 1)
    ground.is_clean(backend, {})


def test_a_rule_for_node_addresses_never_meets_an_empty_set(ground):
    """A restart with other nodePortAddresses: every NodePort would be closed between two transactions."""
    resync(ground.start(node_world(None)), cluster("a"))
    seen = []

    def look():
        if "@nodeport-ips" in str(ground.chains()):
            seen.append(ground.elements("nodeport-ips"))

    ground.after_commit = look
    for addresses in ((ONE,), None, (ONE,)):
        resync(ground.start(node_world(addresses)), cluster("a"))
    assert seen
    assert all(elements == {"192.0.2.1"} for elements in seen)


def test_a_world_with_other_rules_asks_for_a_resync(ground):
    backend = ground.start(node_world((ONE,)))
    resync(backend, cluster("a"))
    changed = world(detector=False, families=[V4])
    assert backend.set_world(changed) is True
    plans = cluster("a", globals_=changed)
    resync(backend, plans)
    assert ground.chains()["cluster"] == ["goto pick"]
    ground.is_clean(backend, plans)


def test_chains_of_timeouts_that_no_service_has_any_more_are_removed(ground, monkeypatch):
    monkeypatch.setattr(backend_module, "PRUNE_FROM", 30)
    backend = ground.start()
    plans = {("default", "stays"): sticky("stays", 2, 2, 20), **cluster("plain")}
    resync(backend, plans)
    most = 0
    for seconds in range(100, 140):  # a Service whose timeout changes at each sync
        plans["default", "a"] = sticky("a", 7, 3, seconds, ports=[ServicePort(port=80, node_port=30080)])
        sync(backend, (("default", "a"), plans["default", "a"]))
        most = max(most, len(backend._chains))
    assert most < 50
    assert {"pick-20s", "pick-139s", "nodeport-pick-139s"} <= set(ground.chains())
    ground.is_clean(backend, plans)
    assert resync(ground.start(), plans) == 0


def test_a_new_timeout_is_two_transactions_and_reads_nothing(ground):
    """A verdict must not refer to a chain of the same transaction, which some packets would find empty."""
    backend, a = ground.start(), ("default", "a")
    resync(backend, {a: sticky("a", 7, 7), **cluster("plain")})
    for seconds in (40, 50, 60, 70):
        if seconds == 70:
            backend._prune_at = 5  # unused chains are removed
        before = ground.generation()
        ground.calls.clear()
        sync(backend, (a, sticky("a", 7, 7, seconds)))
        assert ground.generation() - before == 2
        assert ground.calls == []
    assert "pick-50s" not in ground.chains()
    ground.is_clean(backend, {a: sticky("a", 7, 7, 70), **cluster("plain")})


@pytest.mark.parametrize(
    "more", [{}, {"external_ips": ["203.0.113.1"], "ports": [ServicePort(port=80, node_port=30080)]}]
)
def test_an_endpoint_with_affinity_that_is_replaced_is_a_few_elements(ground, more):
    """The number of written elements does not depend on the numbers of endpoints and frontends of the Service."""
    backend, a = ground.start(), ("default", "a")

    def plans(last):
        members = [endpoint(f"10.244.1.{n}") for n in (*range(1, 60), last)]
        subject = service(session_affinity="ClientIP", **more)
        return compile_service(subject, [parsed(*members)], WORLD).plans

    resync(backend, {a: plans(60)})
    before = ground.generation()
    assert sync(backend, (a, plans(61))) == 4  # slot and number of the endpoint, removed and added
    assert ground.generation() - before == 2  # the old number is removed later
    ground.is_clean(backend, {a: plans(61)})


def test_a_kernel_that_does_not_remove_unused_chains_keeps_them(ground, monkeypatch):
    removals = messages.chain_removals
    monkeypatch.setattr(backend_module, "PRUNE_FROM", 5)
    # The rules of the pool already exist.
    monkeypatch.setattr(messages, "chain_removals", lambda *where: removals(*where)[-1:])
    backend = ground.start()
    plans = {("default", "a"): sticky("a", 1, 4, 10)}
    resync(backend, {("default", "a"): sticky("a", 1, 3, 20)})
    sync(backend, *plans.items())
    assert {"pick-20s", "pick-10s"} <= set(ground.chains())
    ground.is_clean(backend, plans)


def test_a_new_service_with_many_ports_takes_several_transactions(ground, monkeypatch):
    monkeypatch.setattr("kubeproxy.backends.nftables.backend.BATCH", 20)
    ports = [ServicePort(port=port, name=f"p{port}") for port in range(1, 11)]
    backend = ground.start()
    resync(backend, {})
    before = ground.generation()
    plans = {("default", "many"): plans_of("many", 1, 5, ports=ports)}
    sync(backend, *plans.items())
    assert 2 < ground.generation() - before < 10
    ground.is_clean(backend, plans)
    sync(backend, (("default", "many"), ()))
    ground.is_clean(backend, {})


@pytest.mark.parametrize("family", [V4, V6])
def test_transactions_fit_into_a_send_buffer_that_may_not_grow(family):
    """In a user namespace the limit is twice net.core.wmem_max: 416 KiB by default."""
    globals_ = world(families=[family])
    with FakeGround.fresh() as ground:
        ground.kernel.room = 2 * 212_992
        backend = ground.start(globals_)
        plans = {("default", f"s{n}"): plans_of(f"s{n}", n, 10, globals_) for n in range(1, 1500)}
        resync(backend, plans)
        ground.is_clean(backend, plans)
        resync(backend, {})
        ground.is_clean(backend, {})
