"""Existing tables: the proxy's own table is adopted and repaired, another program's table is replaced."""

import pytest

from kubeproxy.engine.backlog import LatestPlans
from kubeproxy.model.objects import EndpointPort, ServicePort
from support.cluster_objects import HERE, endpoint, parsed, service, world
from support.compiled import compile_service
from support.nftables_disturbances import DISTURBANCES, disturbed
from support.nftables_ground import resync, sync, without_slots
from support.nftables_plans import EVERYTHING, V4, V6, WORLD, cluster, plans_of

# -- adopting ------------------------------------------------------------------------------------------------------


def test_a_restart_changes_nothing(ground):
    plans = {**cluster("a", **EVERYTHING), ("default", "b"): plans_of("b", 2), ("default", "c"): plans_of("c", 3, 0)}
    resync(ground.start(), plans)
    before, handle = ground.contents(), ground.header()
    assert resync(ground.start(), plans) == 0
    assert ground.contents() == before
    assert ground.header() == handle


def test_the_table_is_read_before_the_plans_are_taken(ground):
    """Plans that arrive during the reading are written as well: engine/backlog.py."""
    resync(ground.start(), cluster("a"))
    again = ground.start()
    read = []
    ground.calls.clear()

    def take():
        read.extend(ground.calls)
        return cluster("a")

    assert resync(again, LatestPlans(take)) == 0
    assert {"header", "contents", "pairs"} <= set(read)


def test_a_restart_adopts_slots_as_they_are(ground):
    backend = ground.start()
    resync(backend, cluster("a", endpoints=5))
    shuffled = [endpoint(f"10.244.0.{n}", HERE) for n in (9, 5, 4, 2)]
    plans = compile_service(service("a"), [parsed(*shuffled, ports=[EndpointPort(port=8080)])], WORLD).plans
    sync(backend, (("default", "a"), plans))
    before = ground.contents()
    again = ground.start()
    assert resync(again, {("default", "a"): plans}) == 0
    assert ground.contents() == before
    ground.is_clean(again, {("default", "a"): plans})


@pytest.mark.parametrize("case", DISTURBANCES)
def test_a_restart_repairs_elements_and_touches_nothing_else(ground, case):
    _, plans = disturbed(ground)
    before, handle = ground.contents(), ground.header()
    ground.disturb(*DISTURBANCES[case])
    assert ground.contents() != before
    again = ground.start()
    resync(again, plans)
    lost = any(word in case for word in ("slot", "affinity", "emptied"))  # a lost number is not reused
    comparable = without_slots if lost else dict
    assert comparable(ground.contents()) == comparable(before)
    assert ground.header() == handle
    ground.is_clean(again, plans)


def test_a_restart_applies_changes_that_happened_while_it_was_down(ground):
    resync(ground.start(), cluster("a", "b", "c", external_ips=[]))
    plans = {("default", "b"): plans_of("b", 2, 7), ("default", "d"): plans_of("d", 9, 21)}
    again = ground.start()
    resync(again, plans)
    assert ground.count("cluster-ips") == 2
    assert ground.count("endpoints") == 7 + 21
    assert ground.count("hairpin-endpoints") == 21
    assert ground.elements("cluster-services") == {"10.96.0.2 . tcp . 80 : 7", "10.96.0.9 . tcp . 80 : 24"}
    ground.is_clean(again, plans)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (["172.16.0.0/24"], ["172.16.0.0/16"]),
        (["172.16.0.0/16"], ["172.16.0.0/24"]),
        (["172.16.0.0/24", "172.16.4.0/24"], ["172.16.0.0/20"]),
        (["172.16.0.0/24"], ["10.0.0.0/8"]),
        (["172.16.0.0/24"], []),
        ([], ["172.16.0.0/24"]),
        (["172.16.0.0/24"], ["nonsense"]),
    ],
)
@pytest.mark.parametrize("how", ["restart", "sync"])
def test_source_ranges_change(ground, earlier, later, how):
    def plans(ranges):
        return cluster("a", ingress=["198.51.100.1"], load_balancer_source_ranges=ranges)

    backend = ground.start()
    resync(backend, plans(earlier))
    if how == "restart":
        backend = ground.start()
        resync(backend, plans(later))
    else:
        sync(backend, *plans(later).items())
    assert ground.count("firewalled-services") == bool(later)
    assert ground.count("firewall-allow") == len([r for r in later if r != "nonsense"])
    ground.is_clean(backend, plans(later))


@pytest.mark.parametrize("losing", [0, 1])
def test_a_port_that_lost_its_load_balancer_address_leaves_the_ranges_of_the_others(ground, losing):
    ports = [ServicePort(port=80, name="a"), ServicePort(port=81, name="b")]
    both = plans_of("a", 1, ports=ports, ingress=["198.51.100.1"], load_balancer_source_ranges=["172.16.0.0/24"])
    plans = [plan.without(plan.frontends[1:]) if at == losing else plan for at, plan in enumerate(both)]
    services = {("default", "a"): tuple(plans)}
    backend = ground.start()
    resync(backend, services)
    assert (ground.count("firewalled-services"), ground.count("firewall-allow")) == (1, 1)
    ground.is_clean(backend, services)
    again = ground.start()
    assert resync(again, services) == 0
    ground.is_clean(again, services)


# -- taking over ---------------------------------------------------------------------------------------------------

FOREIGN = {
    "empty": ["add table ip kube-proxy"],
    "the Go kube-proxy's": [
        'add table ip kube-proxy { comment "rules for kube-proxy" ; }',
        "add set ip kube-proxy cluster-ips { type ipv4_addr ; }",
        "add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }",
        "add map ip kube-proxy firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }",
        "add chain ip kube-proxy services",
        "add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority dstnat ; }",
        "add rule ip kube-proxy nat-prerouting jump services",
        "add chain ip kube-proxy service-ABC-default/a/tcp/",
        "add chain ip kube-proxy endpoint-DEF-default/a/tcp/__10.244.0.1/8080",
        "add rule ip kube-proxy endpoint-DEF-default/a/tcp/__10.244.0.1/8080 meta l4proto tcp dnat to 10.244.0.1:8080",
        "add rule ip kube-proxy service-ABC-default/a/tcp/ goto endpoint-DEF-default/a/tcp/__10.244.0.1/8080",
        "add rule ip kube-proxy services ip daddr . meta l4proto . th dport vmap @service-ips",
        "add element ip kube-proxy service-ips { 10.96.0.1 . tcp . 80 : goto service-ABC-default/a/tcp/ }",
        "add element ip kube-proxy cluster-ips { 10.96.0.1, 10.96.0.99 }",
    ],
    "somebody's, with names of ours": [
        "add table ip kube-proxy",
        "add map ip kube-proxy cluster-ips { type ipv4_addr : ipv4_addr ; }",
        "add set ip kube-proxy endpoints { type inet_service ; flags interval ; }",
        "add set ip kube-proxy cluster-services { type inet_service ; }",
        "add chain ip kube-proxy cluster { type filter hook input priority 5 ; policy accept ; }",
        "add chain ip kube-proxy slot-0",
        "add chain ip kube-proxy services",
    ],
}


@pytest.mark.parametrize("whose", FOREIGN)
def test_another_programs_table_is_replaced_in_one_transaction(ground, whose):
    ground.disturb(*FOREIGN[whose])
    plans = {**cluster("a", **EVERYTHING), ("default", "b"): plans_of("b", 2, 19)}
    backend = ground.start()
    before = ground.generation()
    resync(backend, plans)
    assert ground.generation() == before + 2  # the second removes the placeholder rules for source ranges
    assert "10.96.0.99" not in ground.elements("cluster-ips")
    replaced = ground.contents()
    ground.is_clean(backend, plans)
    ground.disturb("delete table ip kube-proxy")
    resync(backend, plans)
    assert ground.contents() == replaced


def test_a_table_of_other_globals_is_replaced_in_one_transaction(ground):
    resync(ground.start(), cluster("a"))
    globals_ = world(masquerade_all=True, families=[V4])
    backend = ground.start(globals_)
    before = ground.generation()
    plans = cluster("a", globals_=globals_)
    resync(backend, plans)
    assert ground.generation() == before + 1
    ground.is_clean(backend, plans)


def test_tables_of_other_names_and_families_are_kept(ground):
    ground.disturb("add table ip mine", "add table ip6 kube-proxy", "add table inet kube-proxy")
    ground.disturb("add chain ip6 kube-proxy c")
    resync(ground.start(), cluster("a"))
    resync(ground.start(), {})
    assert ground.tables() == {"inet kube-proxy", "ip kube-proxy", "ip mine", "ip6 kube-proxy"}
    assert ground.chains(V6).keys() == {"c"}
