"""The users of Services: the owner of each connection, and the counters."""

from __future__ import annotations

import pytest

from kubeproxy.ask.flows import users
from kubeproxy.ask.flows.users import Census, ServedPorts, uses
from kubeproxy.kernel.conntrack.tracked import ANSWERED, Tracked, target_of
from kubeproxy.model.addresses import PROTOCOLS, Family, pack
from kubeproxy.model.objects import Annotations
from support.nftables_plans import EVERYTHING, V4, plans_of

TCP, UDP = PROTOCOLS["TCP"], PROTOCOLS["UDP"]
NODE = "192.168.0.5"
ESTABLISHED, TIME_WAIT, SYN_SENT = 3, 7, 1


def at(address: str, port: int) -> bytes:
    return (pack(address) or b"") + port.to_bytes(2, "big")


def entry(client: str, target: tuple[str, int, int], server: tuple[str, int], state=ESTABLISHED, status=ANSWERED):
    address, protocol, port = target
    return Tracked(target_of(pack(address) or b"", protocol, port), at(client, 40000), at(*server), status, state, b"")


@pytest.fixture
def ports() -> ServedPorts:
    plans = [*plans_of("web", 1, 2), *plans_of("all", 2, 2, **EVERYTHING)]
    return ServedPorts(plans, {V4: frozenset({pack(NODE) or b""})})


@pytest.mark.parametrize(
    ("target", "service"),
    [
        (("10.96.0.1", TCP, 80), "default/web"),
        (("10.96.0.1", UDP, 80), None),
        (("10.96.0.1", TCP, 81), None),
        (("10.96.0.2", UDP, 53), "default/all"),
        (("203.0.113.1", TCP, 80), "default/all"),
        (("198.51.100.1", TCP, 80), "default/all"),
        ((NODE, TCP, 30080), "default/all"),
        (("192.168.0.6", TCP, 30080), None),
        ((NODE, UDP, 30080), None),
    ],
)
def test_the_service_of_a_connection(ports, target, service):
    address, protocol, port = target
    found = ports.of(target_of(pack(address) or b"", protocol, port))
    assert (found.service if found else None) == service


def test_counted_connections(ports):
    census = Census(ports, None)
    web = ("10.96.0.1", TCP, 80)
    census.add(entry("10.0.0.1", web, ("10.244.0.1", 8080)), silent=False)
    census.add(entry("10.0.0.1", web, ("10.244.0.1", 8080), TIME_WAIT), silent=False)
    census.add(entry("10.0.0.1", web, ("10.244.0.9", 8080)), silent=False)
    census.add(entry("10.0.0.2", web, ("10.244.0.2", 8080), SYN_SENT, 0), silent=True)
    census.add(entry("10.0.0.2", ("10.99.0.1", TCP, 80), ("10.244.0.2", 8080)), silent=False)
    census.began(entry("10.0.0.2", web, ("10.244.0.2", 8080), SYN_SENT, 0), 4)
    used = uses(
        next(port for port in ports.all if port.service == "default/web"), 2.0, {pack("10.244.0.1"): "default/a"}
    )
    assert (used.connections, used.closing, used.unanswered, used.new_per_second) == (3, 1, 1, 2.0)
    rows = {one.address: (one.pod, one.connections, one.closing, one.unanswered, one.serving) for one in used.endpoints}
    assert rows == {
        "10.244.0.1:8080": ("default/a", 1, 1, 0, True),
        "10.244.0.2:8080": ("", 1, 0, 1, True),
        "10.244.0.9:8080": ("", 1, 0, 0, False),
    }
    assert [(one.address, one.connections, one.unanswered) for one in used.clients] == [
        ("10.0.0.1", 2, 0),
        ("10.0.0.2", 1, 1),
    ]


def test_connections_that_are_over_count_for_shares_and_clients(ports):
    census = Census(ports, None)
    web = ("10.96.0.1", TCP, 80)
    for client, endpoint, times in (("10.0.0.1", "10.244.0.1", 3), ("10.0.0.2", "10.244.0.2", 1)):
        for _ in range(times):
            census.add(entry(client, web, (endpoint, 8080), TIME_WAIT), silent=False)
    used = uses(ports.all[0], 1.0, {})
    assert [(one.address, one.share) for one in used.endpoints] == [
        ("10.244.0.1:8080", 0.75),
        ("10.244.0.2:8080", 0.25),
    ]
    assert [(one.address, one.connections, one.closing) for one in used.clients] == [
        ("10.0.0.1", 0, 3),
        ("10.0.0.2", 0, 1),
    ]


def test_endpoints_without_connections_are_named(ports):
    used = uses(ports.all[0], 1.0, {})
    assert [(one.connections, one.share) for one in used.endpoints] == [(0, 0.0), (0, 0.0)]


def test_where_connections_end_at_the_proxy_its_own_count_for_endpoints(ports):
    census = Census(ports, frozenset({pack(NODE) or b""}))
    census.add(entry("10.0.0.1", ("10.96.0.1", TCP, 80), (NODE, 41000)), silent=False)
    census.add(entry(NODE, ("10.244.0.1", TCP, 8080), ("10.244.0.1", 8080), SYN_SENT, 0), silent=True)
    census.add(entry("10.0.0.7", ("10.244.0.1", TCP, 8080), ("10.244.0.1", 8080)), silent=False)
    used = uses(ports.all[0], 1.0, {})
    assert (used.connections, used.unanswered) == (1, 1)
    assert {one.address: one.connections for one in used.endpoints} == {"10.244.0.1:8080": 1, "10.244.0.2:8080": 0}
    assert [one.address for one in used.clients] == ["10.0.0.1"]


def test_connections_to_a_range_of_ports_are_counted_by_range_and_address():
    annotations = Annotations(port_ranges="10000-20000/udp, 443/tcp")
    plans = plans_of("web", 1, 2, external_ips=["203.0.113.1"], annotations=annotations)
    ports = ServedPorts(plans, {V4: frozenset()})
    census = Census(ports, None)
    for address, port in (("10.96.0.1", 10000), ("10.96.0.1", 20000), ("203.0.113.1", 15000)):
        made = entry("10.0.0.1", (address, UDP, port), ("10.244.0.1", port))
        census.add(made, silent=False)
        census.began(made, 2)
    http, media, single = (uses(port, 1.0, {pack("10.244.0.1"): "default/a"}) for port in ports.all)
    assert (http.port, http.connections, single.port, single.connections) == ("TCP", 0, "443/TCP", 0)
    assert (media.service, media.port, media.connections) == ("default/web", "10000-20000/UDP", 3)
    assert media.new_per_second == 6.0
    assert [(one.address, one.pod, one.connections, one.new_per_second, one.serving) for one in media.endpoints] == [
        ("10.244.0.1", "default/a", 3, 6.0, True),
        ("10.244.0.2", "", 0, 0.0, True),
    ]
    assert [(one.address, one.connections) for one in media.clients] == [("10.0.0.1", 3)]


def test_clients_beyond_a_number_are_counted_together(ports, monkeypatch):
    monkeypatch.setattr(users, "MOST_CLIENTS", 2)
    census = Census(ports, None)
    for client in ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.1"):
        census.add(entry(client, ("10.96.0.1", TCP, 80), ("10.244.0.1", 8080)), silent=False)
    used = uses(ports.all[0], 1.0, {})
    assert {one.address: one.connections for one in used.clients} == {"10.0.0.1": 2, "10.0.0.2": 1, "others": 2}
    assert used.family == Family.IPV4.label
