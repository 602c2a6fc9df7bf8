"""Counters of connections: each real connection is counted once, at the endpoint that got it, and nothing else is."""

import re
import socket
from collections import Counter
from contextlib import ExitStack, closing

import pytest

from kubeproxy.backends.nftables.counting import ConnectionMetrics, Counting
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.features import CONNECTION_COUNTERS
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.objects import Annotations, ServicePort
from kubeproxy.registry import MetricRegistry
from support.cluster_objects import world
from support.nftables_counters import connections
from support.nftables_ground import KernelGround, ip, resync
from support.nftables_plans import placed, plans_of, sticky

ENDPOINTS = {Family.IPV4: "10.244.0.{}", Family.IPV6: "fd00:244::00{}"}
SERVICES = {Family.IPV4: "10.96.0.{}", Family.IPV6: "fd00:96::00{}"}
KINDS = {"TCP": socket.SOCK_STREAM, "UDP": socket.SOCK_DGRAM}


def counted_world(family):
    return CONNECTION_COUNTERS.on(world(families=[family]), True)


def opened(stack, family, kind, address, port):
    made = stack.enter_context(socket.socket(family, kind))
    made.bind((address, port))
    if kind == socket.SOCK_STREAM:
        made.listen(64)
    return made


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("protocol", KINDS)
@pytest.mark.parametrize("make", [plans_of, sticky])
def test_each_connection_is_counted_once_where_it_went(family, protocol, make):
    kind, ports = KINDS[protocol], [ServicePort(port=80, protocol=protocol)]
    globals_ = counted_world(family)
    plans = {("default", "a"): make("a", 1, 3, ports=ports, globals_=globals_)}
    plans["default", "b"] = make("b", 2, 3, ports=ports, globals_=globals_)
    with KernelGround.fresh() as ground, ExitStack() as stack:
        ip("link", "set", "lo", "up")
        ip(f"-{'4' if family is Family.IPV4 else '6'}", "route", "add", "default", "dev", "lo")
        servers = {}
        for number in (1, 2, 3):
            address = ENDPOINTS[family].format(number)
            ip("addr", "add", address, "dev", "lo", *(["nodad"] if family is Family.IPV6 else []))
            servers[address] = opened(stack, family, kind, address, 8080)
        backend = ground.start(globals_)
        resync(backend, plans)
        got = Counter()
        for _ in range(20):
            client = stack.enter_context(socket.socket(family, kind))
            client.settimeout(5)
            client.connect((SERVICES[family].format(1), 80))
            client.send(b"x")
            client.send(b"y")
        for address, server in servers.items():
            got[address] = taken(stack, server, kind)
        assert sum(got.values()) == 20
        with closing(KernelTable.open(family)) as table:
            found = connections(table.counters, [plan for each in plans.values() for plan in each])
        assert {(key.name, destination): total.connections for (key, destination), total in found.items()} == {
            ("a", pack(address) + (8080).to_bytes(2, "big")): count for address, count in got.items() if count
        }
        assert all(total.bytes >= 20 * total.connections for total in found.values())
        ground.is_clean(backend, plans)  # the elements are the same with and without counters


def taken(stack, server, kind):
    """Return the number of clients of a server."""
    server.setblocking(False)
    seen = set()
    while True:
        try:
            if kind == socket.SOCK_STREAM:
                seen.add(stack.enter_context(server.accept()[0]))
            else:
                seen.add(server.recvfrom(10)[1])
        except BlockingIOError:
            return len(seen)


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("make", [plans_of, sticky])
@pytest.mark.parametrize("local", ["", "Local"])
def test_connections_to_a_range_of_ports_are_counted_once_and_apart(family, make, local):
    globals_, asked = counted_world(family), Annotations(port_ranges="8000-8100/tcp")
    front = {Family.IPV4: "203.0.113.1", Family.IPV6: "2001:db8:e::1"}[family]
    spec = {"external_ips": [front], "external_traffic_policy": local or None}
    plans = {("default", "a"): make("a", 1, 1, globals_=globals_, annotations=asked, **spec)}
    with KernelGround.fresh() as ground, ExitStack() as stack:
        ip("link", "set", "lo", "up")
        ip(f"-{'4' if family is Family.IPV4 else '6'}", "route", "add", "default", "dev", "lo")
        address = ENDPOINTS[family].format(1)
        ip("addr", "add", address, "dev", "lo", *(["nodad"] if family is Family.IPV6 else []))
        servers = [opened(stack, family, socket.SOCK_STREAM, address, port) for port in (8080, 8081)]
        backend, registry = ground.start(globals_), MetricRegistry()
        resync(backend, plans)
        for _ in range(5):
            for to in ((SERVICES[family].format(1), 80), (SERVICES[family].format(1), 8080), (front, 8081)):
                stack.enter_context(socket.socket(family)).connect(to)
        assert [taken(stack, server, socket.SOCK_STREAM) for server in servers] == [10, 5]
        with closing(KernelTable.open(family)) as table:
            counting = Counting(family, table.counters, ConnectionMetrics(registry))
            for _ in range(20):
                counting.step({name: placed(found) for name, found in plans.items()})
        found = re.findall(r'_total\{.*port="(\w*)".*service="(a?)"\} (\d+)', registry.render().decode())
        assert found == [("", "", "0"), ("", "a", "5"), ("ranges", "a", "10")]
        ground.is_clean(backend, plans)
        again = ground.start(globals_)
        assert not resync(again, plans)


def test_a_table_that_does_not_count_is_replaced_by_one_that_does_and_back():
    family = Family.IPV4
    plain = world(families=[family])
    plans = {("default", "a"): plans_of("a", 1)}
    with KernelGround.fresh() as ground:
        headers = []
        for globals_ in (plain, counted_world(family), counted_world(family), plain):
            backend = ground.start(globals_)
            resync(backend, plans)
            ground.is_clean(backend, plans)
            headers.append(ground.header())
            with closing(KernelTable.open(family)) as table:
                assert connections(table.counters, plans["default", "a"]) == {}
        assert headers[1] == headers[2]
        assert len(set(headers)) == 3
