"""Shares of connections in the real kernel: 20,000 connections, counted by endpoint and compared with the weights."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import closing

import pytest

from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.features import BALANCING, CONNECTION_COUNTERS
from kubeproxy.kernel.conntrack.tracked import target_of
from kubeproxy.kernel.conntrack.udp_flows import Conntrack
from kubeproxy.model import maglev
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from kubeproxy.model.objects import Annotations, ClientIPConfig, EndpointPort, ServicePort, SessionAffinityConfig
from kubeproxy.model.plan import Policy
from kubeproxy.model.planner import Planner
from support.cluster_objects import HERE, THERE, address, endpoint, endpoint_slice, parsed, service, world
from support.compiled import compile_service
from support.nftables_counters import connections
from support.nftables_ground import KernelGround, ground_with_ways_out, ip, resync, sync

WEB = ("default", "web")
CONNECTIONS = 20_000
CHANCE = {1: 15.1, 2: 18.4, 4: 23.5, 9: 33.7, 19: 50.8}
"""Limits of chi-square, by degrees of freedom; a correct distribution exceeds them once in 10,000 times."""
SERVICE = {Family.IPV4: "10.96.0.1", Family.IPV6: "fd00:96::1"}
PODS = {Family.IPV4: "10.244.0.{}", Family.IPV6: "fd00:244::{:x}"}


def plans(globals_, *slices, affinity=0, **annotations):
    """Return a UDP Service with slices of a weight (None for none) and endpoints; numbers below 10 are on this node."""
    (family,) = globals_.families
    config = SessionAffinityConfig(ClientIPConfig(affinity)) if affinity else None
    subject = service(
        "web",
        SERVICE[family],
        ports=[ServicePort(port=80, protocol="UDP")],
        annotations=Annotations(**annotations),
        session_affinity="ClientIP" if affinity else None,
        session_affinity_config=config,
    )
    made = []
    for weight, numbers in slices:
        members = [endpoint(PODS[family].format(n), HERE if n < 10 else THERE) for n in numbers]
        ports = [EndpointPort(port=8080, protocol="UDP")]
        made.append(parsed(*members, family=family.label, ports=ports, weight=weight))
    return {WEB: compile_service(subject, made, globals_).plans}


def connect(family, count=CONNECTIONS, first=1024, source=""):
    """Begin UDP connections, each from a different port: the kernel selects an endpoint for the first packet."""
    for port in range(first, first + count):
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.bind((source, port))
            client.sendto(b"x", (SERVICE[family], 80))


def counted(found):
    """Return connections by endpoint, as counted by the kernel since its elements were written."""
    (plan,) = found[WEB]
    with closing(KernelTable.open(plan.key.family)) as table:
        return Counter(
            {destination: total.connections for (_, destination), total in connections(table.counters, [plan]).items()}
        )


def fits(found, got):
    """Check by chi-square that connections are distributed according to the weights."""
    (plan,) = found[WEB]
    weights = plan.weights(Policy.CLUSTER) or (1,) * len(plan.cluster)
    assert set(got) <= set(plan.cluster)
    total, whole = sum(got.values()), sum(weights)
    expected = {d: weight * total / whole for d, weight in zip(plan.cluster, weights, strict=True)}
    chi_square = sum((got[d] - wished) ** 2 / wished for d, wished in expected.items())
    assert chi_square < CHANCE[len(expected) - 1], (chi_square, got, expected)


@pytest.mark.parametrize("family", list(Family))
def test_connections_are_shared_as_weights_say(family):
    globals_ = CONNECTION_COUNTERS.on(world(families=[family]), True)
    with ground_with_ways_out(family) as ground:
        backend = ground.start(globals_)
        canary = plans(globals_, (None, range(10, 18)), ("25", range(18, 20)))
        resync(backend, canary)
        connect(family)
        got = counted(canary)
        assert sum(got.values()) == CONNECTIONS
        fits(canary, got)
        ground.is_clean(backend, canary)


def test_a_drained_endpoint_gets_no_connection_and_keeps_those_that_it_has():
    globals_ = CONNECTION_COUNTERS.on(world(families=[Family.IPV4]), True)
    even = plans(globals_, (None, [1, 10]))
    drained = plans(globals_, (None, [1, 10]), weights=f"{HERE}=0")
    with ground_with_ways_out(Family.IPV4) as ground:
        backend = ground.start(globals_)
        resync(backend, even)
        connect(Family.IPV4, 200)
        before = tracked()
        sync(backend, (WEB, drained[WEB]))
        connect(Family.IPV4, 200, first=5000)
        assert counted(drained).keys() == {drained[WEB][0].cluster[0]}
        connect(Family.IPV4, 200)  # existing connections continue
        after = tracked()
        assert {port: after[port] for port in before} == before
        assert {after[port] for port in after.keys() - before.keys()} == {address("10.244.0.10")}
        assert {address("10.244.0.1"), address("10.244.0.10")} == set(before.values())
        ground.is_clean(backend, drained)


def tracked():
    """Return the endpoint of each connection, by its client's port."""
    with Conntrack() as conntrack:
        flows = conntrack.udp_flows(Family.IPV4, [target_of(address(SERVICE[Family.IPV4]), socket.IPPROTO_UDP, 80)])
        return {int.from_bytes(flow.client[-2:]): flow.server[:-2] for flow in flows}


@pytest.mark.quick("maglev-251-0-2", "maglev-251-10800-10")
@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("affinity", [0, 10800])
@pytest.mark.parametrize("algorithm", ["maglev-251", "maglev", "maglev-4093"])
def test_maglev_picks_the_endpoint_of_the_clients_hash(family, affinity, algorithm):
    globals_ = CONNECTION_COUNTERS.on(world(families=[family]), True)
    found = plans(globals_, (None, range(1, 8)), ("30", range(10, 12)), affinity=affinity, algorithm=algorithm)
    (plan,) = found[WEB]
    weights, hashing = plan.weights(Policy.CLUSTER), plan.balance.hashing
    table = maglev.fill(plan.cluster, weights, hashing.size)
    with ground_with_ways_out(family) as ground:
        backend = ground.start(globals_)
        resync(backend, found)
        others = [f"192.0.2.{n}" if family is Family.IPV4 else f"2001:db8::{n}" for n in range(10, 40)]
        for text in others:
            ip("addr", "add", text, "dev", "lo", *(["nodad"] if family is Family.IPV6 else []))
        wanted = Counter()
        for text in others:
            connect(family, 20, source=text)
            slots = [maglev.slot_of(hashing, address(text), port) for port in range(1024, 1044)]
            wanted.update(table[slot] for slot in slots)
        assert counted(found) == wanted
        ground.is_clean(backend, found)
        again = ground.start(globals_)
        assert resync(again, found) == 0
        assert sync(again, (WEB, plans(globals_, (None, range(1, 8)))[WEB]))
        assert ground.difference(again) is None


def test_maglev_shares_as_weights_say():
    globals_ = CONNECTION_COUNTERS.on(world(families=[Family.IPV4]), True)
    found = plans(globals_, (None, range(10, 18)), ("25", range(18, 20)), algorithm="maglev-4093")
    with ground_with_ways_out(Family.IPV4) as ground:
        resync(ground.start(globals_), found)
        connect(Family.IPV4)
        (plan,) = found[WEB]
        got, weights = counted(found), plan.weights(Policy.CLUSTER)
        # Successive ports of one client are no random sample, so chi-square does not apply.
        for destination, weight in zip(plan.cluster, weights, strict=True):
            assert got[destination] == pytest.approx(CONNECTIONS * weight / sum(weights), rel=0.15)


@pytest.mark.slow("tables of megabytes")
def test_tables_of_many_services_stay_within_the_nodes_budget():
    """Forty Services with sixteen ports had 2.6 million elements."""
    globals_ = BALANCING.on(world(families=[Family.IPV4]), 1 << 16)
    ports = [ServicePort(port=number, name=f"p{number}") for number in range(1, 5)]
    planner, objects = Planner(globals_), []
    for n in range(1, 41):
        name, annotations = {"name": f"web-{n}", "namespace": f"n{n % 8}"}, Annotations(algorithm="maglev")
        objects.append(
            service(name["name"], f"10.96.0.{n}", ports=ports, namespace=name["namespace"], annotations=annotations)
        )
        served = [EndpointPort(name=port.name, port=8080) for port in ports]
        objects.append(
            endpoint_slice(endpoint("10.244.0.1"), endpoint("10.244.0.2"), ports=served, of=name["name"], **name)
        )
    planner.apply([Replaced("services", objects[::2]), Replaced("endpointslices", objects[1::2])])
    planner.take()
    found = {name: compiled.plans for name, compiled in planner.compiled.items()}
    with KernelGround.fresh() as ground:
        backend = ground.start(globals_)
        resync(backend, found)
        tables = sum(1 for plans in found.values() if plans[0].balance is not None)
        assert tables == 16  # four tables of 1021 slots each
        assert ground.count("endpoints") == tables * 4 * 1021 + (40 - tables) * 4 * 2
        ground.is_clean(backend, found)


def test_a_changed_weight_costs_the_slots_that_change_and_a_restart_nothing():
    globals_ = world(families=[Family.IPV4])
    before = plans(globals_, (None, range(1, 10)), ("50", range(10, 12)))
    after = plans(globals_, (None, range(1, 10)), ("50", [10]), ("100", [11]))
    with KernelGround.fresh() as ground:
        backend = ground.start(globals_)
        resync(backend, before)
        assert ground.count("endpoints") == 20
        assert sync(backend, (WEB, after[WEB])) <= 3  # one slot more, in another class
        assert ground.count("endpoints") == 21
        again = ground.start(globals_)
        assert resync(again, after) == 0
        ground.is_clean(again, after)
