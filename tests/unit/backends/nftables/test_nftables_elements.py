"""Elements that are added and removed with endpoints: classes of counts, and elements that Services share."""

import itertools

import pytest

from kubeproxy.backends.nftables import backend as backend_module
from kubeproxy.model.objects import ServicePort
from support.cluster_objects import THERE, world
from support.nftables_ground import resync, sync
from support.nftables_plans import V4, V6, plans_of


def class_of_count(endpoints):
    return endpoints if endpoints <= 8 else 16 if endpoints <= 16 else 20


@pytest.mark.parametrize("family", [V4, V6])
def test_a_count_that_changes_is_one_transaction_of_few_elements(ground, family):
    globals_ = world(families=[family])
    name = ("default", "a")
    backend = ground.start(globals_)
    # The hairpin elements belong to the endpoints of this node: there are none.
    more = {"globals_": globals_, "local": THERE}
    resync(backend, {name: plans_of("a", 1, 1, **more)})
    rules = ground.chains(family)
    for earlier, later in itertools.pairwise((1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1, 4, 16, 17, 18, 17, 16, 5, 1, 17, 4)):
        before = ground.generation()
        moves = 2 * (class_of_count(earlier) != class_of_count(later))
        assert sync(backend, (name, plans_of("a", 1, later, **more))) == abs(later - earlier) + moves
        assert ground.generation() == before + 1
        found = ground.contents(family)
        (element,) = found["cluster-services"]
        assert element.endswith(f" . 80 : {class_of_count(later)}")
        assert len(found["endpoints"]) == later
        assert ground.verdicts(family) == 0
    assert ground.chains(family) == rules
    ground.is_clean(backend, {name: plans_of("a", 1, 4, **more)})


def test_a_service_without_endpoints_has_no_class(ground):
    web = ("default", "a")
    backend = ground.start()
    resync(backend, {web: plans_of("a", 1, 5)})
    for endpoints in (0, 5, 0):
        sync(backend, (web, plans_of("a", 1, endpoints)))
        assert ground.elements("cluster-services") == ({"10.96.0.1 . tcp . 80 : 5"} if endpoints else set())
        assert ground.count("unserved-services") == (not endpoints)
    ground.is_clean(backend, {web: plans_of("a", 1, 0)})


def shared(number, endpoints, **more):
    return plans_of(f"s{number}", number, endpoints, **more)


def test_elements_shared_by_two_ports_remain_until_the_last_port_is_removed(ground):
    two = [ServicePort(port=80, name="a"), ServicePort(port=81, name="b")]
    backend = ground.start()
    resync(backend, {})
    web = ("default", "s1")
    sync(backend, (web, shared(1, 2, ports=two)))
    assert (ground.count("cluster-ips"), ground.count("hairpin-endpoints")) == (1, 2)
    sync(backend, (web, shared(1, 2, ports=two[:1])))
    assert (ground.count("cluster-ips"), ground.count("hairpin-endpoints")) == (1, 2)
    sync(backend, (web, shared(1, 1, ports=two)))
    assert (ground.count("cluster-ips"), ground.count("hairpin-endpoints")) == (1, 1)
    sync(backend, (web, ()))
    assert (ground.count("cluster-ips"), ground.count("hairpin-endpoints")) == (0, 0)
    ground.is_clean(backend, {})


@pytest.mark.parametrize("how", ["resync", "sync", "restart", "take-over"])
def test_elements_shared_by_services_remain_until_the_last_service_is_removed(ground, how):
    two = [ServicePort(port=80, name="a"), ServicePort(port=81, name="b")]
    plans = {("default", f"s{n}"): shared(n, 3, ports=two) for n in range(1, 6)}
    if how == "take-over":
        ground.disturb("add table ip kube-proxy")
    if how == "restart":
        resync(ground.start(), plans)
    backend = ground.start()
    resync(backend, {} if how == "sync" else plans)
    if how == "sync":
        sync(backend, *plans.items())
    names = sorted(plans)
    for left, name in zip(range(4, -1, -1), names, strict=True):
        sync(backend, (name, ()))
        assert ground.count("cluster-ips") == left
        assert ground.count("hairpin-endpoints") == (3 if left else 0)
        del plans[name]
    ground.is_clean(backend, {})


def test_a_shared_element_goes_from_one_service_to_another_in_one_sync(ground):
    backend = ground.start()
    one, two = ("default", "s1"), ("default", "s2")
    resync(backend, {one: shared(1, 3)})
    for changes in ([(one, ()), (two, shared(2, 3))], [(one, shared(1, 3)), (two, ())]):
        sync(backend, *changes)
        assert (ground.count("cluster-ips"), ground.count("hairpin-endpoints")) == (1, 3)
        assert ground.difference(backend) is None


@pytest.mark.parametrize("endpoints", [0, 3])
def test_a_key_outlives_the_service_that_had_it_however_large_the_sync(ground, monkeypatch, endpoints):
    monkeypatch.setattr(backend_module, "BATCH", 1)
    backend = ground.start()
    old, new = ("default", "old"), ("default", "new")
    resync(backend, {old: plans_of("old", 1, endpoints)})
    before = ground.contents()
    sync(backend, (new, plans_of("new", 1, endpoints)), (old, ()))
    assert ground.contents() == before
    assert ground.difference(backend) is None


def test_a_key_goes_from_one_service_to_another_in_one_sync(ground):
    backend = ground.start()
    one, two = ("default", "s1"), ("default", "s2")
    with_ip = {"external_ips": ["203.0.113.1"]}
    resync(backend, {one: shared(1, 2, **with_ip), two: shared(2, 5)})
    for order in ([one, two], [two, one]):
        state = {one: shared(1, 2), two: shared(2, 5, **with_ip)}
        sync(backend, *[(name, state[name]) for name in order])
        assert ground.elements("external-services") == {"203.0.113.1 . tcp . 80 : 5"}
        sync(backend, (two, shared(2, 5)), (one, shared(1, 2, **with_ip)))
        assert ground.elements("external-services") == {"203.0.113.1 . tcp . 80 : 2"}
        assert ground.difference(backend) is None


def test_a_full_sync_reports_the_number_of_written_services(ground, monkeypatch):
    monkeypatch.setattr(backend_module, "BATCH", 1)
    wanted = {("default", f"s{number}"): plans_of(f"s{number}", number, 2) for number in range(1, 6)}
    backend = ground.start()
    seen = [backend.abilities.programmed() for _ in backend.resync(wanted)]
    assert (seen, seen[0] < 5, seen[-1]) == (sorted(seen), True, 5)
    again = ground.start()  # over existing elements
    assert again.abilities.programmed() == 0
    assert [again.abilities.programmed() for _ in again.resync(wanted)][-1] == 5
