"""The ipvs backend on a kernel in memory: incremental equals full, restart, draining, upkeep, and drift."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given

from kubeproxy.backends.ipvs.backend import IpvsBackend
from kubeproxy.backends.ipvs.desired import ANSWER_TIME, CHECK, Verb
from kubeproxy.backends.ipvs.layout import IpsetId, scheduler_named
from kubeproxy.backends.mode import Depth
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.kernel.ipvs import server_key
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.objects import EndpointPort, ServicePort
from kubeproxy.model.plan import Detector, FamilyGlobals
from support.cluster_objects import HERE, endpoint, parsed, service, world
from support.compiled import compile_service
from support.effort import examples
from support.fake_kernel import NODE, FakeKernel
from support.random_plans import histories

TCP = socket.IPPROTO_TCP
A, B, C = ("10.244.0.1", "10.244.0.2", "10.244.0.3")
SERVER = server_key(pack("10.96.0.1"), TCP, 80)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def started(globals_, kernel=None, scheduler="rr", clock=None, excluded=()):
    family = globals_.families[0]
    kernel = kernel if kernel is not None else FakeKernel()
    backend = IpvsBackend(family, globals_, kernel, scheduler_named(scheduler), excluded, clock or Clock())
    run(backend.resync({}))
    return backend, kernel


def each_second(backend):
    """The upkeep that the engine requests each second."""
    backend.upkeep()
    return backend.inspect(Depth.QUICK)


def run(steps):
    return sum(steps)


def at(address, port=8080):
    return pack(address) + port.to_bytes(2, "big")


PODS = Detector("network", "10.244.0.0/16")


def v4_world(detector=PODS):
    return world(detector=detector, families=[Family.IPV4])


def plans(addresses, globals_=None, ports=((80, None),), protocol="TCP", where=HERE, **spec):
    ports = [ServicePort(port=p, name=f"p{p}", protocol=protocol, node_port=n) for p, n in ports]
    subject = service("s1", "10.96.0.1", ports=ports, **spec)
    piece = parsed(
        *[endpoint(a, where) for a in addresses],
        ports=[EndpointPort(port=8080, name=p.name, protocol=protocol) for p in ports],
    )
    return compile_service(subject, [piece], globals_ or v4_world()).plans


NAME = ("default", "s1")


@examples(150)
@given(histories(max_size=4))
def test_incremental_equals_full(history):
    globals_, states = history
    backend, kernel = started(globals_)
    before = {}
    for state in states:
        names = before.keys() | state.keys()
        run(backend.sync([(name, state.get(name, ())) for name in sorted(names)]))
        before = state
    fresh, full = started(globals_)
    run(fresh.resync(before))
    assert kernel.picture() == full.picture()
    assert not each_second(backend)
    assert not backend.inspect(Depth.THOROUGH)


@examples(80)
@given(histories(min_size=2, max_size=2))
def test_a_restart_adopts_whatever_is_there_and_writes_only_the_difference(history):
    globals_, (old, new) = history
    first, kernel = started(globals_)
    run(first.resync(old))
    second, _ = started_with(globals_, kernel)
    run(second.resync(new))
    fresh, full = started(globals_)
    run(fresh.resync(new))
    assert kernel.picture() == full.picture()
    third, _ = started_with(globals_, kernel)
    kernel.operations.clear()
    run(third.resync(new))
    assert not kernel.operations


def started_with(globals_, kernel):
    return IpvsBackend(globals_.families[0], globals_, kernel, scheduler_named("rr"), (), Clock()), kernel


def test_one_endpoint_is_one_operation():
    backend, kernel = started(v4_world())
    run(backend.sync([(NAME, plans([A, B]))]))
    kernel.operations.clear()
    run(backend.sync([(NAME, plans([A, B, C]))]))
    assert [(o.command, o.real.key) for o in kernel.operations] == [(Verb.ADD_SERVER, at(C))]


def test_a_removed_server_drains_until_it_is_idle():
    clock = Clock()
    backend, kernel = started(v4_world(), clock=clock)
    run(backend.sync([(NAME, plans([A, B]))]))
    kernel.busy[SERVER, at(A)] = 1
    run(backend.sync([(NAME, plans([B]))]))
    assert kernel.virtual[SERVER][1] == {at(A): 0, at(B): 1}
    assert not backend.inspect(Depth.THOROUGH)
    clock.now += CHECK + 1
    assert not each_second(backend)
    assert at(A) in kernel.virtual[SERVER][1]
    kernel.busy.clear()
    clock.now += CHECK + 1
    assert not each_second(backend)
    assert kernel.virtual[SERVER][1] == {at(B): 1}


def test_a_server_that_is_never_idle_keeps_its_connections_for_ever():
    clock = Clock()
    backend, kernel = started(v4_world(), clock=clock)
    run(backend.sync([(NAME, plans([A, B]))]))
    kernel.busy[SERVER, at(A)] = 1
    run(backend.sync([(NAME, plans([B]))]))
    clock.now += 7 * 24 * 3600
    assert not each_second(backend)
    assert kernel.virtual[SERVER][1] == {at(A): 0, at(B): 1}


def test_a_server_that_comes_back_gets_its_weight_back():
    backend, kernel = started(v4_world())
    run(backend.sync([(NAME, plans([A, B]))]))
    kernel.busy[SERVER, at(A)] = 1
    run(backend.sync([(NAME, plans([B]))]))
    run(backend.sync([(NAME, plans([A, B]))]))
    assert kernel.virtual[SERVER][1] == {at(A): 1, at(B): 1}


def test_draining_goes_on_after_a_restart():
    clock = Clock()
    backend, kernel = started(v4_world(), clock=clock)
    run(backend.sync([(NAME, plans([A, B]))]))
    kernel.busy[SERVER, at(A)] = 1
    run(backend.sync([(NAME, plans([B]))]))
    again, _ = started_with(v4_world(), kernel)
    run(again.resync({NAME: plans([B])}))
    assert kernel.virtual[SERVER][1] == {at(A): 0, at(B): 1}
    run(again.resync({NAME: plans([A, B])}))
    assert kernel.virtual[SERVER][1] == {at(A): 1, at(B): 1}


def test_a_real_server_of_a_scheduler_that_ignores_weight_0_is_removed_at_once():
    backend, kernel = started(v4_world(), scheduler="dh")
    run(backend.sync([(NAME, plans([A, B]))]))
    run(backend.sync([(NAME, plans([B]))]))
    assert kernel.virtual[SERVER][1] == {at(B): 1}


@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
def test_a_removed_udp_or_sctp_server_has_time_to_answer_and_then_goes_with_its_flows(protocol):
    clock = Clock()
    backend, kernel = started(v4_world(), clock=clock)
    run(backend.sync([(NAME, plans([A, B], protocol=protocol))]))
    (key,) = kernel.virtual
    kernel.busy[key, at(A)] = 1
    run(backend.sync([(NAME, plans([B], protocol=protocol))]))
    clock.now += ANSWER_TIME / 2
    assert not each_second(backend)
    assert kernel.virtual[key][1] == {at(A): 0, at(B): 1}
    clock.now += ANSWER_TIME
    assert not each_second(backend)
    assert kernel.virtual[key][1] == {at(B): 1}
    assert not backend.inspect(Depth.THOROUGH)


def test_an_external_ip_precedes_a_nodeport_in_any_order():
    node_port = plans([A], ports=((80, 8000),))
    external = service("s2", "10.96.0.2", ports=[ServicePort(port=8000, name="x")], external_ips=["192.0.2.1"])
    piece = parsed(endpoint(B), ports=[EndpointPort(port=9090, name="x")])
    rival = compile_service(external, [piece], v4_world()).plans
    contested = server_key(NODE, TCP, 8000)
    steps = [((NAME), node_port), (("default", "s2"), rival)]
    for order in (steps, steps[::-1]):
        backend, kernel = started(all_nodeports())
        for step in order:
            run(backend.sync([step]))
        assert serving(kernel, contested) == {at(B, 9090)}
        assert NODE not in kernel.bound
        run(backend.sync([(("default", "s2"), ())]))
        assert serving(kernel, contested) == {at(A)}


def serving(kernel, key):
    return {destination for destination, weight in kernel.virtual[key][1].items() if weight}


def all_nodeports():
    found = v4_world()
    return type(found)(node_name=found.node_name, ipv4=FamilyGlobals(detector=PODS, nodeport_ips=None), ipv6=None)


def test_nodeports_follow_the_addresses_of_the_node():
    backend, kernel = started(all_nodeports())
    run(backend.sync([(NAME, plans([A], ports=((80, 30080),)))]))
    other = bytes((192, 0, 2, 9))
    kernel.own, kernel.news = frozenset({NODE, other}), True
    assert not each_second(backend)
    assert server_key(other, TCP, 30080) in kernel.virtual
    kernel.own, kernel.news = frozenset({other}), True
    assert not each_second(backend)
    assert server_key(NODE, TCP, 30080) not in kernel.virtual


def test_foreign_virtual_servers_go_but_those_of_excluded_networks():
    kernel = FakeKernel()
    mine, kept = server_key(pack("203.0.113.1"), TCP, 80), server_key(pack("198.51.100.1"), TCP, 80)
    kernel.virtual = {mine: [0, {}], kept: [0, {at(A): 1}]}
    backend, _ = started(v4_world(), kernel, excluded=[(pack("198.51.100.0"), pack("198.51.100.255"))])
    assert list(kernel.virtual) == [kept]
    assert not backend.inspect(Depth.THOROUGH)


def spoil_address(kernel):
    kernel.bound.clear()
    kernel.news = True


def spoil_set(kernel):
    kernel.sets[IpsetId.CLUSTER_IP].clear()


def spoil_set_away(kernel):
    del kernel.sets[IpsetId.LOOP_BACK]


def spoil_rules(kernel):
    kernel.tables["nat"] = {}


def spoil_servers(kernel):
    kernel.virtual.clear()


@pytest.mark.parametrize("spoil", [spoil_address, spoil_set, spoil_set_away, spoil_rules, spoil_servers])
def test_removals_by_other_programs_are_noticed_at_once_and_repaired(spoil):
    backend, kernel = started(v4_world())
    wanted = plans([A, B])
    run(backend.sync([(NAME, wanted)]))
    picture = kernel.picture()
    assert not each_second(backend)
    spoil(kernel)
    assert "another program" in each_second(backend).what
    run(backend.resync({NAME: wanted}))
    assert kernel.picture() == picture
    assert not each_second(backend)
    assert not backend.inspect(Depth.THOROUGH)


def spoil_weight(kernel):
    kernel.virtual[SERVER][1][at(A)] = 0


def spoil_server(kernel):
    del kernel.virtual[SERVER][1][at(A)]


def spoil_foreign(kernel):
    kernel.virtual[server_key(pack("203.0.113.1"), TCP, 80)] = [0, {}]


def spoil_entry(kernel):
    kernel.sets[IpsetId.CLUSTER_IP] = {SetEntry(pack("10.96.0.9"), TCP, 80)}


def spoil_rule(kernel):
    kernel.tables["filter"]["KUBE-FORWARD"] = ()


@pytest.mark.parametrize("spoil", [spoil_weight, spoil_server, spoil_foreign, spoil_entry, spoil_rule])
def test_a_thorough_inspection_notices_changes_by_other_programs(spoil):
    backend, kernel = started(v4_world())
    run(backend.resync({NAME: plans([A, B])}))
    assert not backend.inspect(Depth.THOROUGH)
    spoil(kernel)
    assert "another program" in backend.inspect(Depth.THOROUGH).what


def test_the_world_asks_for_a_resync_only_when_rules_or_nodeports_change():
    backend, _ = started(v4_world())
    assert not backend.set_world(v4_world())
    assert backend.set_world(v4_world(Detector("bridge", "cbr0")))
    assert backend.set_world(all_nodeports())
