"""Packets on a real kernel: every endpoint gets its share, and no connection is lost, whatever the number of endpoints.

The bounds are so wide that a correct distribution never exceeds them in practice;
tests/unit/backends/nftables/test_picking.py computes the exact shares.
"""

import math
import select
import socket
import subprocess
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import EndpointPort, ServicePort
from support.cluster_objects import HERE, address, endpoint, parsed, service, world
from support.compiled import compile_service

V4, V6 = Family.IPV4, Family.IPV6
CLUSTER_IP = {V4: "10.96.0.1", V6: "fd00:96::1"}
SERVICES = {V4: "10.96.0.0/16", V6: "fd00:96::/64"}
PODS = {V4: "10.244.0.{}", V6: "fd00:244::{:x}"}
NODE = {V4: "192.0.2.1", V6: "2001:db8::1"}
CLIENT = {V4: "192.0.2.9", V6: "2001:db8::9"}
PORT, NODE_PORT, POD_PORT = 53, 30053, 8053

NAME = ("default", "web")


@pytest.fixture
def node(netns):
    """A network with loopback up, and the addresses of a node and its client."""
    ip("link", "set", "lo", "up")
    for family in Family:
        own(family, NODE[family], CLIENT[family])
        ip("route", "add", SERVICES[family], "dev", "lo")


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10).stdout


def own(family, *texts):
    """Give loopback these addresses, and wait until packets reach them.

    The kernel adds the local route of an IPv6 address later, in a work queue, even without duplicate address detection:
    until then packets to it fail with 'no route'.
    """
    for text in texts:
        ip("address", "replace", text, "dev", "lo", *(("nodad",) if family is V6 else ()))
    deadline = time.monotonic() + 10
    while missing := set(texts) - local_routes(family):
        assert time.monotonic() < deadline, f"no local route to {missing}"
        time.sleep(0.01)


def local_routes(family):
    option = "-4" if family is V4 else "-6"
    lines = ip(option, "route", "show", "table", "local", "type", "local").splitlines()
    return {line.removeprefix("local ").split()[0] for line in lines}


def plans_of(family, globals_, count):
    subject = service(
        "web",
        CLUSTER_IP[family],
        ports=[ServicePort(port=PORT, protocol="UDP", node_port=NODE_PORT)],
    )
    pods = [endpoint(PODS[family].format(n), HERE) for n in range(1, count + 1)]
    piece = parsed(*pods, family=family.label, ports=[EndpointPort(port=POD_PORT, protocol="UDP")])
    return compile_service(subject, [piece], globals_).plans


class Pods:
    """A socket for each endpoint, which counts received packets."""

    def __init__(self, family, count, stack):
        self.kind = socket.AF_INET if family is V4 else socket.AF_INET6
        self.counts = Counter(dict.fromkeys(range(1, count + 1), 0))
        self.sockets = {}
        self.poll = stack.enter_context(select.epoll())
        self.client = CLIENT[family]
        texts = {n: PODS[family].format(n) for n in range(1, count + 1)}
        own(family, *texts.values())
        for n, text in texts.items():
            pod = stack.enter_context(socket.socket(self.kind, socket.SOCK_DGRAM))
            pod.setblocking(False)
            pod.bind((text, POD_PORT))
            self.sockets[pod.fileno()] = (n, pod)
            self.poll.register(pod, select.EPOLLIN)

    def send(self, target, first, number):
        """Send this number of packets, each from a different port: each is a separate connection."""
        for port in range(first, first + number):
            with socket.socket(self.kind, socket.SOCK_DGRAM) as client:
                client.bind((self.client, port))
                client.sendto(b"?", target)
            if port % 50 == 0:
                self.drain()
        self.drain()

    def drain(self):
        """Read the received packets; on loopback all sent packets have arrived."""
        while ready := self.poll.poll(0):
            for fd, _ in ready:
                n, pod = self.sockets[fd]
                pod.recv(16)
                self.counts[n] += 1


def assert_even(counts):
    """Return Pearson's chi-squared, and a bound that a correct distribution exceeds at most once in 10**8 runs."""
    expected = counts.total() / len(counts)
    freedom = len(counts) - 1
    distance = sum((seen - expected) ** 2 / expected for seen in counts.values())
    assert distance < freedom + 8 * math.sqrt(2 * freedom) + 20, dict(counts)


def world_of(family):
    globals_ = world(detector=False, families=[family])
    ours = replace(globals_.of(family), nodeport_ips=(address(NODE[family]),))
    return replace(globals_, **{"ipv4" if family is V4 else "ipv6": ours})


@pytest.mark.quick
@pytest.mark.parametrize("frontend", ["cluster IP", "NodePort"])
@pytest.mark.parametrize(("family", "count"), [(V4, 1), (V4, 2), (V4, 3), (V4, 5), (V4, 9), (V4, 17), (V6, 5)])
def test_every_endpoint_gets_its_share(node, family, count, frontend):
    globals_ = world_of(family)
    target = (CLUSTER_IP[family], PORT) if frontend == "cluster IP" else (NODE[family], NODE_PORT)
    with ExitStack() as stack:
        backend = NftablesBackend(KernelTable.open(family), globals_)
        stack.callback(backend.close)
        sum(backend.resync({NAME: plans_of(family, globals_, count)}))
        pods = Pods(family, count, stack)
        pods.send(target, 10_000, 2_000)
        assert pods.counts.total() == 2_000
        assert_even(pods.counts)


def test_shares_stay_even_while_the_number_of_endpoints_crosses_classes(node):
    """The same Service with more and fewer endpoints: slots are freed, filled again and moved."""
    globals_ = world_of(V4)
    with ExitStack() as stack:
        backend = NftablesBackend(KernelTable.open(V4), globals_)
        stack.callback(backend.close)
        sum(backend.resync({}))
        for step, count in enumerate((4, 5, 17, 16, 5, 4, 2, 1, 5)):
            sum(backend.sync([(NAME, plans_of(V4, globals_, count))]))
            with ExitStack() as open_sockets:
                pods = Pods(V4, count, open_sockets)
                pods.send((CLUSTER_IP[V4], PORT), 10_000 + step * 1_000, 1_000)
                assert pods.counts.total() == 1_000
                assert_even(pods.counts)
    # A packet to a removed endpoint would be lost, and a packet to a slot without endpoint refused.
