"""The recognition of stale flows in connection tracking. Pure."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.kernel.conntrack.tracked import target_of
from kubeproxy.kernel.conntrack.udp_flows import Conntrack, UdpFlow, stale_flows


def ip(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


def endpoint(address: str, port: int) -> bytes:
    return ip(address) + port.to_bytes(2)


def target(address: str, port: int) -> bytes:
    return target_of(ip(address), socket.IPPROTO_UDP, port)


def flow(destination: str, port: int, reply: str, reply_port: int, source: str = "10.244.0.9") -> UdpFlow:
    return UdpFlow(target(destination, port), endpoint(source, 40000), endpoint(reply, reply_port), b"")


SERVICES = {
    target("10.96.0.10", 53): frozenset({endpoint("10.244.1.2", 5353), endpoint("10.244.1.3", 5353)}),
    target("10.96.0.11", 53): frozenset[bytes](),
    target("192.0.2.2", 31000): frozenset({endpoint("10.244.1.9", 1)}),
    target("fd00::10", 53): frozenset({endpoint("fd01::2", 5353)}),
}
NODEPORTS = {port.to_bytes(2): frozenset({endpoint("10.244.1.2", 5353)}) for port in (30053, 31000)}
NODE = {ip("192.0.2.2"), ip("127.0.0.1")}


@pytest.mark.parametrize(
    ("entry", "stale"),
    [
        pytest.param(flow("10.96.0.10", 53, "10.244.1.2", 5353), False, id="serving endpoint"),
        pytest.param(flow("10.96.0.10", 53, "10.244.1.4", 5353), True, id="endpoint is gone"),
        pytest.param(flow("10.96.0.10", 53, "10.244.1.2", 5354), True, id="the endpoint's old port"),
        pytest.param(flow("10.96.0.10", 53, "10.96.0.10", 53), True, id="never translated"),
        pytest.param(flow("10.96.0.10", 54, "10.244.1.4", 5353), False, id="another port of the address"),
        pytest.param(flow("10.96.0.11", 53, "10.244.1.2", 5353), True, id="no endpoints left (issue 139628)"),
        pytest.param(flow("8.8.8.8", 53, "8.8.8.8", 53), False, id="not a Service"),
        pytest.param(flow("192.0.2.2", 30053, "10.244.1.2", 5353), False, id="NodePort, serving"),
        pytest.param(flow("192.0.2.2", 30053, "10.244.1.4", 5353), True, id="NodePort, gone"),
        pytest.param(flow("127.0.0.1", 30053, "10.244.1.4", 5353), True, id="NodePort on loopback"),
        pytest.param(flow("203.0.113.1", 30053, "203.0.113.1", 30053), False, id="a NodePort's number elsewhere"),
        pytest.param(flow("192.0.2.2", 31000, "10.244.1.9", 1), False, id="external IP of the node wins over NodePort"),
        pytest.param(flow("10.96.0.99", 53, "192.0.2.2", 41000), True, id="a former listener"),
        pytest.param(flow("192.0.2.2", 41000, "192.0.2.2", 41000), False, id="the listener's own port"),
        pytest.param(flow("fd00::10", 53, "fd01::3", 5353, "fd01::9"), True, id="IPv6"),
        pytest.param(flow("fd00::10", 53, "fd01::2", 5353, "fd01::9"), False, id="IPv6, serving"),
    ],
)
def test_a_flow_is_stale_when_its_replies_come_from_no_serving_endpoint(entry: UdpFlow, stale: bool) -> None:
    former = endpoint("192.0.2.2", 41000)
    assert stale_flows([entry], SERVICES, NODEPORTS, NODE, former.__eq__) == ([entry] if stale else [])


ADDRESSES = st.sampled_from([ip(f"10.0.0.{n}") for n in range(4)])
PORTS = st.integers(1, 4).map(lambda port: port.to_bytes(2))
TARGETS = st.builds(lambda a, p: a + b"\x11" + p, ADDRESSES, PORTS)
ENDS = st.builds(bytes.__add__, ADDRESSES, PORTS)
FLOWS = st.lists(
    st.builds(UdpFlow, TARGETS, ENDS, ENDS, st.just(b"")),
    max_size=20,
)
ENDPOINTS = st.frozensets(ENDS, max_size=4)


@given(
    FLOWS,
    st.dictionaries(TARGETS, ENDPOINTS),
    st.dictionaries(PORTS, ENDPOINTS),
    st.frozensets(ADDRESSES),
)
def test_services_checked_one_by_one_and_all_at_once_give_the_same_flows(flows, services, nodeports, node) -> None:
    at_once = stale_flows(flows, services, nodeports, node)
    one_by_one = [f for key, value in services.items() for f in stale_flows(flows, {key: value}, {}, node)]
    by_port = [f for port, value in nodeports.items() for f in stale_flows(flows, {}, {port: value}, node)]
    own = [f for f in by_port if f.target not in services]
    assert sorted(map(id, at_once)) == sorted(map(id, one_by_one + own))


def test_an_endpoint_that_begins_to_serve_during_the_reading_keeps_its_flows(monkeypatch) -> None:
    services = {target("10.96.0.10", 53): frozenset[bytes]()}
    old, fresh = flow("10.96.0.10", 53, "10.244.1.2", 5353), flow("10.96.0.10", 53, "10.244.1.3", 5353)

    def read(*_):
        yield from (old, fresh)
        services[target("10.96.0.10", 53)] = frozenset({endpoint("10.244.1.3", 5353)})

    tracking = Conntrack()
    deleted: list[UdpFlow] = []
    monkeypatch.setattr(tracking, "udp_flows", read)
    monkeypatch.setattr(tracking, "delete", deleted.extend)
    tracking.clean(2, services, {}, NODE)
    assert deleted == [old]


@pytest.mark.parametrize(("certain", "gone"), [(True, 1), (False, 0)])
def test_nothing_is_deleted_if_the_serving_endpoints_become_uncertain(monkeypatch, certain, gone) -> None:
    tracking = Conntrack()
    deleted: list[UdpFlow] = []
    monkeypatch.setattr(tracking, "udp_flows", lambda *_: iter([flow("10.96.0.10", 53, "10.244.1.2", 5353)]))
    monkeypatch.setattr(tracking, "delete", lambda flows: deleted.extend(flows) or len(deleted))
    count = tracking.clean(2, {target("10.96.0.10", 53): frozenset()}, {}, NODE, lambda: certain)
    assert len(deleted) == gone
    assert count == (1 if certain else None)
