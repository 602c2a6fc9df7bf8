"""Reading and deleting tracked UDP flows of a real kernel, with real packets through real DNAT rules."""

from __future__ import annotations

import ipaddress
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

import msgspec
import pytest

from kubeproxy.kernel.conntrack import tracked as tracked_entries
from kubeproxy.kernel.conntrack import udp_flows
from kubeproxy.kernel.conntrack.tracked import ID, target_of
from kubeproxy.kernel.conntrack.udp_flows import Conntrack, TrackingTable, Translation, UdpFlow
from kubeproxy.kernel.netlink.protocol import NetlinkError, attribute
from support.namespaces import inside, namespace, run


class Family(NamedTuple):
    number: int
    name: str
    vip: str
    node: str
    endpoints: tuple[str, str]
    routes: str


V4 = Family(socket.AF_INET.value, "ip", "10.96.0.10", "192.0.2.1", ("10.244.0.1", "10.244.0.2"), "10.96.0.0/16")
V6 = Family(socket.AF_INET6.value, "ip6", "fd96::10", "2001:db8::1", ("fd44::1", "fd44::2"), "fd96::/64")


def ip(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


T = TypeVar("T")


def tracked(namespace: str, body: Callable[[Conntrack], T]) -> T:
    """Run the body in a namespace, with its connection tracking."""

    def run() -> T:
        with Conntrack() as tracking:
            return body(tracking)

    return inside(namespace, run)


class Node:
    """A namespace with two endpoints that send their address, and a Service with one of them."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.name = name
        self._stack = stack
        for family in (V4, V6):
            flag = "-6" if family is V6 else "-4"
            for address in (*family.endpoints, family.node):
                options = ["nodad"] if family is V6 else []
                run("ip", flag, "-n", name, "addr", "add", address, "dev", "lo", *options)
            run("ip", flag, "-n", name, "route", "add", "local", family.routes, "dev", "lo")
        self.servers = {a: self.socket(f, (a, 5353)) for f in (V4, V6) for a in f.endpoints}

    def socket(self, family: Family, address: tuple[str, int]) -> socket.socket:
        """Create a UDP socket in the namespace."""
        sock = inside(self.name, lambda: socket.socket(family.number, socket.SOCK_DGRAM))
        self._stack.callback(sock.close)
        sock.bind(address)
        sock.settimeout(5)
        return sock

    def serve(self, family: Family, endpoint: str, extra: str = "policy accept") -> None:
        """Translate the Service and its NodePort to this endpoint, for new flows."""
        target = f"[{endpoint}]:5353" if family is V6 else f"{endpoint}:5353"
        node = f"{family.name} daddr {family.node} udp dport 30053"
        run(
            *("ip", "netns", "exec", self.name, "nft", "-f", "-"),
            text=f"""
            table {family.name} t
            delete table {family.name} t
            table {family.name} t {{
                chain zone {{ type filter hook output priority -300; {extra}; }}
                chain out {{
                    type nat hook output priority -100;
                    {family.name} daddr {family.vip} udp dport 53 dnat to {target}
                    {node} dnat to {target}
                }}
            }}""",
        )

    def ask(self, client: socket.socket, address: str, port: int) -> str:
        """Send a packet; return the endpoint that got it."""
        client.sendto(b"?", (address, port))
        for endpoint, server in self.servers.items():
            server.setblocking(False)
            try:
                server.recv(10)
            except BlockingIOError:
                continue
            return endpoint
        return "nobody"

    def flows(self, family: Family, *args: object) -> list[UdpFlow]:
        return tracked(self.name, lambda tracking: list(tracking.udp_flows(family.number, *args)))

    def clean(self, family: Family, services=None, nodeports=None, node_addresses=()) -> int:
        return tracked(
            self.name,
            lambda tracking: tracking.clean(family.number, services or {}, nodeports or {}, node_addresses),
        )


@pytest.fixture
def node() -> Iterator[Node]:
    with namespace() as name, ExitStack() as stack:
        yield Node(name, stack)


def end(address: str, port: int) -> bytes:
    return ip(address) + port.to_bytes(2)


def target(address: str, port: int) -> bytes:
    return target_of(ip(address), socket.IPPROTO_UDP, port)


NODEPORT = (30053).to_bytes(2)


def serving(endpoint: str) -> frozenset[bytes]:
    return frozenset({end(endpoint, 5353)})


@pytest.mark.parametrize("family", [V4, V6], ids=["IPv4", "IPv6"])
def test_after_cleaning_the_next_packet_goes_to_the_new_endpoint(node: Node, family: Family) -> None:
    old, new = family.endpoints
    client = node.socket(family, (family.node, 40000))
    node.serve(family, old)
    assert node.ask(client, family.vip, 53) == old
    assert node.clean(family, {target(family.vip, 53): serving(old)}) == 0
    node.serve(family, new)
    assert node.ask(client, family.vip, 53) == old, "without cleaning, the tracked flow stays"
    assert node.clean(family, {target(family.vip, 53): serving(new)}) == 1
    assert node.ask(client, family.vip, 53) == new
    assert node.clean(family, {target(family.vip, 53): serving(new)}) == 0


@pytest.mark.parametrize("family", [V4, V6], ids=["IPv4", "IPv6"])
def test_flows_are_read_with_both_directions(node: Node, family: Family) -> None:
    node.serve(family, family.endpoints[0])
    node.ask(node.socket(family, (family.node, 40000)), family.vip, 53)
    (flow,) = node.flows(family)
    assert flow.client == end(family.node, 40000)
    assert flow.target == target(family.vip, 53)
    assert flow.server == end(family.endpoints[0], 5353)
    other = V6 if family is V4 else V4
    assert node.flows(other) == []


def test_a_service_without_endpoints_loses_its_flows_and_other_flows_remain(node: Node) -> None:
    node.serve(V4, V4.endpoints[0])
    client = node.socket(V4, (V4.node, 40000))
    for address, port in ((V4.vip, 53), (V4.node, 30053), (V4.endpoints[0], 5353)):
        assert node.ask(client, address, port) == V4.endpoints[0]
    assert len(node.flows(V4)) == 3
    assert node.clean(V4, {target(V4.vip, 53): frozenset()}) == 1
    assert {flow.target for flow in node.flows(V4)} == {target(V4.node, 30053), target(V4.endpoints[0], 5353)}


def test_nodeports_count_on_node_addresses_only(node: Node) -> None:
    node.serve(V4, V4.endpoints[0])
    client = node.socket(V4, (V4.node, 40000))
    node.ask(client, V4.node, 30053)
    assert node.clean(V4, nodeports={NODEPORT: frozenset()}, node_addresses={ip("192.0.2.99")}) == 0
    assert node.clean(V4, nodeports={NODEPORT: serving(V4.endpoints[0])}, node_addresses={ip(V4.node)}) == 0
    assert node.clean(V4, nodeports={NODEPORT: frozenset()}, node_addresses={ip(V4.node)}) == 1


def test_tcp_is_neither_read_nor_touched(node: Node) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(inside(node.name, lambda: socket.create_server((V4.node, 53))))
        client = stack.enter_context(inside(node.name, lambda: socket.create_connection((V4.node, 53), timeout=5)))
        stack.enter_context(server.accept()[0])
        run(
            "ip",
            "netns",
            "exec",
            node.name,
            "nft",
            "add table ip t; add chain ip t c { type nat hook output priority 0; }",
        )
        client.send(b"x")
        assert node.flows(V4) == []
        assert node.clean(V4, {target(V4.node, 53): frozenset()}) == 0


def test_a_flow_of_another_zone_is_deleted_in_its_zone(node: Node) -> None:
    node.serve(V4, V4.endpoints[0], extra=f"ip daddr {V4.vip} ct zone set 7")
    client = node.socket(V4, (V4.node, 40000))
    assert node.ask(client, V4.vip, 53) == V4.endpoints[0]
    assert len(node.flows(V4)) >= 1
    assert node.clean(V4, {target(V4.vip, 53): frozenset()}) == 1
    assert node.flows(V4, {target(V4.vip, 53)}) == []


def identities(flows: list[UdpFlow]) -> list[bytes]:
    """Return the identifying attributes of each entry: the others change from one reading to the next."""
    return [udp_flows._identity(flow.entry) for flow in flows]


def test_a_newer_flow_of_the_same_tuple_is_kept(node: Node) -> None:
    node.serve(V4, V4.endpoints[0])
    client = node.socket(V4, (V4.node, 40000))
    node.ask(client, V4.vip, 53)
    old = node.flows(V4)
    assert tracked(node.name, lambda tracking: tracking.delete(old)) == 1
    assert tracked(node.name, lambda tracking: tracking.delete(old)) == 0, "already gone is no error"
    node.ask(client, V4.vip, 53)
    (new,) = node.flows(V4)
    # The kernel computes an entry's id from its address in memory, which may be that of the old entry: so use another
    # id.
    mark = attribute(ID, b"")[2:4]
    at = new.entry.index(b"\x08\x00" + mark) + 4
    older = msgspec.structs.replace(new, entry=new.entry[:at] + b"\1\2\3\4" + new.entry[at + 4 :])
    assert tracked(node.name, lambda tracking: tracking.delete([older])) == 0
    assert identities(node.flows(V4)) == identities([new])


@pytest.mark.parametrize("family", [V4, V6], ids=["IPv4", "IPv6"])
def test_the_kernel_filters_and_reading_everything_find_the_same(
    node: Node, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.serve(family, family.endpoints[0])
    for port in range(40000, 40020):
        client = node.socket(family, (family.node, port))
        node.ask(client, family.vip, 53)
        node.ask(client, family.node, 30053)
        client.sendto(b"?", (family.vip, 54))
        client.sendto(b"?", (family.endpoints[0], 53))
    keys, ports = {target(family.vip, 53): None}, {NODEPORT: None}
    with monkeypatch.context() as dear:
        dear.setattr(TrackingTable, "everything", lambda _: math.inf)
        filtered = identities(node.flows(family, keys, ports))
    monkeypatch.setattr(TrackingTable, "everything", lambda _: 0.0)
    assert len(filtered) == len(set(filtered)) == 40
    assert sorted(filtered) == sorted(identities(node.flows(family, keys, ports)))
    assert len(node.flows(family)) == 80


def test_a_translation_is_forgotten_and_nothing_else(node: Node) -> None:
    endpoint, other = (ip(address) + (5353).to_bytes(2) for address in V4.endpoints)
    node.serve(V4, V4.endpoints[0])
    for port in range(40000, 40003):
        node.ask(node.socket(V4, (V4.node, port)), V4.vip, 53)
    node.serve(V4, V4.endpoints[1])
    node.ask(node.socket(V4, (V4.node, 40010)), V4.vip, 53)
    node.ask(node.socket(V4, (V4.node, 40011)), V4.node, 30053)
    early = node.socket(V4, (V4.node, 40012))
    early.sendto(b"?", (V4.vip, 54))
    before = {flow.client for flow in node.flows(V4)}
    gone = [Translation(end(V4.vip, 53), endpoint), Translation(end(V4.vip, 54), end(V4.vip, 54))]
    assert tracked(node.name, lambda tracking: tracking.forget(2, gone, 2)) == 4
    assert {flow.client for flow in node.flows(V4)} == before - {end(V4.node, 40000 + i) for i in (0, 1, 2, 12)}
    assert tracked(node.name, lambda tracking: tracking.forget(2, gone, 2)) == 0
    assert tracked(node.name, lambda tracking: tracking.forget(2, [], 0)) == 0
    many = [Translation(end(V4.vip, 53), other[:-2] + port.to_bytes(2)) for port in range(1000)]
    assert tracked(node.name, lambda tracking: tracking.forget(2, many, 1)) is None, "a dump takes less"
    assert tracked(node.name, lambda tracking: tracking.forget(10, [Translation(end(V6.vip, 53), b"")], 1)) is None


def test_a_kernel_that_deletes_whole_tuples_only_is_not_asked_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.serve(V4, V4.endpoints[0])
    node.ask(node.socket(V4, (V4.node, 40000)), V4.vip, 53)
    gone = [Translation(end(V4.vip, 53), end(V4.endpoints[0], 5353))]
    monkeypatch.setattr(tracked_entries, "FILTER", tracked_entries.ZONE)  # of another size: refused as unknown

    def twice(tracking: Conntrack) -> list[int | None]:
        first = tracking.forget(2, gone, 2)
        monkeypatch.undo()
        return [first, tracking.forget(2, gone, 2)]

    assert tracked(node.name, twice) == [None, None]
    assert len(node.flows(V4)) == 1


def test_messages_of_an_unusual_layout_are_read_the_long_way(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.serve(V4, V4.endpoints[0])
    node.ask(node.socket(V4, (V4.node, 40000)), V4.vip, 53)
    (usual,) = node.flows(V4, {target(V4.vip, 53): None})
    monkeypatch.setattr(tracked_entries.LAYOUTS[2], "head", b"\xff")
    (found,) = node.flows(V4, {target(V4.vip, 53): None})
    assert msgspec.structs.replace(found, entry=b"") == msgspec.structs.replace(usual, entry=b"")
    assert identities([found]) == identities([usual])
    assert node.flows(V4, {target(V4.vip, 54): None}) == []
    assert len(node.flows(V4)) == 1


def test_a_refused_deletion_is_an_error(node: Node) -> None:
    broken = UdpFlow(target(V4.vip, 53), b"", b"", b"\x08\x00\x01\x80\x00\x00\x00\x00")
    with pytest.raises(NetlinkError, match="cannot delete 1 of 1 stale UDP flows"):
        tracked(node.name, lambda tracking: tracking.delete([broken]))
