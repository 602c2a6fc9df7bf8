"""Session affinity in the real kernel while one user has more addresses than the map of clients can contain."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import ExitStack

import pytest

from kubeproxy.backends.nftables import affinity
from kubeproxy.backends.nftables.affinity import rooms
from kubeproxy.backends.nftables.layout import CLIENTS
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import EndpointPort, ServicePort
from support.cluster_objects import endpoint, parsed, service, world
from support.compiled import compile_service
from support.nftables_ground import ground_with_ways_out, ip, resync

FLOODED = {Family.IPV4: "10.96.0.1", Family.IPV6: "fd00:96::1"}
OTHER = {Family.IPV4: "10.96.0.2", Family.IPV6: "fd00:96::2"}
PODS = {Family.IPV4: "10.244.0.{}", Family.IPV6: "fd00:244::{:x}"}
NETWORKS = {Family.IPV4: "10.244.128.0/17", Family.IPV6: "fd00:10:244::/64"}
SOURCES = {Family.IPV4: "10.244.{}.{}", Family.IPV6: "fd00:10:244::{:x}:{:x}"}
FREEBIND = {Family.IPV4: (socket.IPPROTO_IP, 15), Family.IPV6: (socket.IPPROTO_IPV6, 78)}  # linux/in.h, linux/in6.h
SHARE, ROOM = 64, 256


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A map of clients whose size a test sets."""
    monkeypatch.setattr(affinity, "AFFINITY_SHARE", SHARE)
    monkeypatch.setattr(affinity, "AFFINITY_CLIENTS", ROOM)


def plans(globals_):
    """Two Services with session affinity and three UDP endpoints each."""
    (family,) = globals_.families
    found = {}
    for name, where in (("flooded", FLOODED), ("other", OTHER)):
        subject = service(
            name, where[family], ports=[ServicePort(port=80, protocol="UDP")], session_affinity="ClientIP"
        )
        members = [endpoint(PODS[family].format(n)) for n in (1, 2, 3)]
        pieces = [parsed(*members, family=family.label, ports=[EndpointPort(port=8080, protocol="UDP")])]
        found["default", name] = compile_service(subject, pieces, globals_).plans
    return found


class Pods:
    """The endpoints, which record their clients."""

    def __init__(self, family, opened):
        self.family = family
        self._sockets = [opened.enter_context(socket.socket(family, socket.SOCK_DGRAM)) for _ in range(3)]
        ip("route", "add", "local", NETWORKS[family], "dev", "lo")
        for n, pod in enumerate(self._sockets, 1):
            ip("addr", "add", PODS[family].format(n), "dev", "lo", *(["nodad"] if family is Family.IPV6 else []))
            pod.bind((PODS[family].format(n), 8080))
            pod.setblocking(False)

    def chosen(self, to, source, port):
        """Send a client's datagram to a Service; return the endpoint that gets it."""
        with socket.socket(self.family, socket.SOCK_DGRAM) as client:
            client.setsockopt(*FREEBIND[self.family], 1)
            client.bind((source, port))
            client.sendto(b"x", (to, 80))  # over loopback: it has arrived when this returns
        (got,) = [number for number, pod in enumerate(self._sockets) if _received(pod)]
        return got


def _received(pod):
    try:
        return pod.recv(10)
    except BlockingIOError:
        return b""


def source(family, number):
    """Return the address of a client."""
    return SOURCES[family].format(128 + (number >> 8), number & 255)


@pytest.mark.parametrize("family", list(Family))
def test_clients_of_one_service_leave_room_for_those_of_another(family):
    globals_ = world(families=[family])
    with ground_with_ways_out(family) as ground, ExitStack() as opened:
        backend, pods, found = ground.start(globals_), Pods(family, opened), plans(globals_)
        resync(backend, found)
        for n in range(4 * ROOM):
            pods.chosen(FLOODED[family], source(family, n), 1024)
        for room in rooms([family]):  # none before Linux 6.16
            assert room.used == len(ground.packed(CLIENTS, family))
        remembered = len(ground.packed(CLIENTS, family)) - 1  # one element is a placeholder without a client
        for n in range(8):
            client = source(family, 5000 + n)
            assert len({pods.chosen(OTHER[family], client, port) for port in range(2000, 2016)}) == 1
        assert 0 < remembered <= SHARE
        ground.is_clean(backend, found)


@pytest.mark.parametrize("family", list(Family))
def test_clients_beyond_the_share_of_a_service_port_stay_and_spread_as_well(family):
    globals_ = world(families=[family])
    with ground_with_ways_out(family) as ground, ExitStack() as opened:
        pods = Pods(family, opened)
        resync(ground.start(globals_), plans(globals_))
        clients = [source(family, n) for n in range(8 * SHARE)]
        first = [pods.chosen(FLOODED[family], client, 1024) for client in clients]
        assert [pods.chosen(FLOODED[family], client, 1025) for client in clients] == first
        assert min(Counter(first).values()) > len(clients) / 10
