"""Connections through virtual servers, from a client's network namespace through the node's to a pod's."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from kubeproxy.kernel.ipvs import (
    PERSISTENT,
    Ipvs,
    ServerChange,
    Verb,
)
from kubeproxy.kernel.route import add_addresses, ensure_dummy
from support.namespaces import inside, namespace, run
from support.virtual_servers import UDP, real, server

NET = {
    socket.AF_INET: ("192.168.1.{}", "10.244.0.{}", "10.96.0.1"),
    socket.AF_INET6: ("fd01::{}", "fd02::{}", "fd00::1"),
}


@pytest.fixture(scope="module")
def node(modules: None) -> Iterator[tuple[str, str, str]]:
    """Client, node and pods, joined by veth, in both families; the pods have .11 and .12."""
    with namespace() as client, namespace() as middle, namespace() as pods:
        run("ip", "-n", middle, "link", "add", "clients", "type", "veth", "peer", "name", "eth0", "netns", client)
        run("ip", "-n", middle, "link", "add", "pods", "type", "veth", "peer", "name", "eth0", "netns", pods)
        for outer, inner, _ in NET.values():
            size, nodad = ("64", ["nodad"]) if ":" in outer else ("24", [])
            for name, device, ip in (
                (client, "eth0", outer.format(2)),
                (middle, "clients", outer.format(1)),
                (middle, "pods", inner.format(1)),
                (pods, "eth0", inner.format(11)),
                (pods, "eth0", inner.format(12)),
            ):
                run("ip", "-n", name, "address", "add", f"{ip}/{size}", "dev", device, *nodad)
        for name, device in ((client, "eth0"), (middle, "clients"), (middle, "pods"), (pods, "eth0")):
            run("ip", "-n", name, "link", "set", device, "up")
        for outer, inner, _ in NET.values():
            run("ip", "-n", client, "route", "add", "default", "via", outer.format(1))
            run("ip", "-n", pods, "route", "add", "default", "via", inner.format(1))
        run("ip", "netns", "exec", middle, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        yield client, middle, pods


def bound(family: int, kind: int, address: tuple[str, int]) -> socket.socket:
    made = socket.socket(family, kind)
    made.settimeout(30)
    made.bind(address)
    if kind == socket.SOCK_STREAM:
        made.listen(64)
    return made


def virtual(middle: str, ip: str, operations: list[ServerChange]) -> None:
    def make() -> None:
        add_addresses(
            ensure_dummy("kube-ipvs0"), [socket.inet_pton(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip)]
        )
        with Ipvs.open() as ipvs:
            ipvs.apply(operations)

    inside(middle, make)


@pytest.mark.parametrize("family", NET, ids=["IPv4", "IPv6"])
def test_connections_reach_every_real_server_in_turn_until_its_weight_is_0(family, node) -> None:
    client, middle, pods = node
    _, inner, vip = NET[family]
    one, reals = server(vip), [real(inner.format(n)) for n in (11, 12)]
    listeners = [inside(pods, lambda n=n: bound(family, socket.SOCK_STREAM, (inner.format(n), 8080))) for n in (11, 12)]
    virtual(
        middle,
        vip,
        [ServerChange(Verb.ADD_SERVICE, one), *(ServerChange(Verb.ADD_SERVER, one, e) for e in reals)],
    )
    seen: Counter[int] = Counter()

    def connect() -> None:
        with inside(client, lambda: socket.create_connection((vip, 80), timeout=30)) as made:
            name = made.getsockname()[:2]
            for number, listener in enumerate(listeners):
                listener.settimeout(0 if number == 0 else 30)
                try:
                    accepted, peer = listener.accept()
                except BlockingIOError:
                    continue
                with accepted:
                    assert peer[:2] == name  # NAT of the destination only
                    seen[number] += 1
                return

    for _ in range(6):
        connect()
    assert seen == {0: 3, 1: 3}
    with_weights = [reals[0]._replace(weight=0), reals[1]]
    virtual(middle, vip, [ServerChange(Verb.SET_SERVER, one, each) for each in with_weights])
    for _ in range(4):
        connect()
    assert seen == {0: 3, 1: 7}
    for listener in listeners:
        listener.close()


def test_persistence_keeps_a_client_and_connections_are_counted(node) -> None:
    client, middle, pods = node
    _, inner, vip = NET[socket.AF_INET]
    one = server(vip, 53, UDP, flags=PERSISTENT, timeout=300)
    reals = [real(inner.format(n), 5353) for n in (11, 12)]
    pod = inside(pods, lambda: bound(socket.AF_INET, socket.SOCK_DGRAM, ("0.0.0.0", 5353)))
    virtual(
        middle,
        vip,
        [ServerChange(Verb.ADD_SERVICE, one), *(ServerChange(Verb.ADD_SERVER, one, e) for e in reals)],
    )
    for _ in range(8):
        with inside(client, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as made:
            made.sendto(b"?", (vip, 53))
            assert pod.recv(10) == b"?"

    def counts() -> list[int]:
        with Ipvs.open() as ipvs:
            return sorted(each.inactive for each in ipvs.destinations(one.key).values())

    assert inside(middle, counts) == [0, 8]
    pod.close()
