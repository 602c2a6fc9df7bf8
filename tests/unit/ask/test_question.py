"""How questions are parsed: the packet for a source and a target, and the error if there is none."""

from __future__ import annotations

import pytest

from kubeproxy.ask.question import packet
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.errors import QuestionError
from kubeproxy.model.addresses import unpack
from kubeproxy.model.objects import ServicePort
from support.cluster_objects import service, world
from support.snapshots import planner_of, snapshot

TCP, UDP = 6, 17


@pytest.fixture(scope="module")
def subject() -> Snapshot:
    ports = [ServicePort(port=80, name="http"), ServicePort(port=53, name="dns", protocol="UDP")]
    protocols = [ServicePort(port=53, name="udp", protocol="UDP"), ServicePort(port=54, name="tcp", protocol="UDP")]
    services = [
        service("web", "10.96.0.10", "fd00:96::10", ports=ports),
        service("named", "10.96.0.12", ports=[*protocols, ServicePort(port=55, name="sctp")]),
        service("plain", "10.96.0.11", ports=[ServicePort(port=8080)]),
        service("names", "", type="ExternalName"),
    ]
    return snapshot(planner_of(world(), *services))


@pytest.mark.parametrize(
    ("source", "target", "meant"),
    [
        ("10.244.0.5", "10.96.0.10:80", ("10.244.0.5", "10.96.0.10", TCP, 80)),
        ("node", "10.96.0.10:53/udp", (None, "10.96.0.10", UDP, 53)),
        ("node", "[fd00:96::10]:80/TCP", (None, "fd00:96::10", TCP, 80)),
        ("[fd00::7]", "[fd00:96::10]:80", ("fd00::7", "fd00:96::10", TCP, 80)),
        ("node", "default/web:http", (None, "10.96.0.10", TCP, 80)),
        ("node", "default/web:dns/udp", (None, "10.96.0.10", UDP, 53)),
        ("node", "default/web:dns", (None, "10.96.0.10", UDP, 53)),
        ("node", "named:udp", (None, "10.96.0.12", UDP, 53)),
        ("node", "named:udp/udp", (None, "10.96.0.12", UDP, 53)),
        ("node", "named:tcp", (None, "10.96.0.12", UDP, 54)),
        ("node", "default/named:sctp/tcp", (None, "10.96.0.12", TCP, 55)),
        ("node", "default/web:81", (None, "10.96.0.10", TCP, 81)),
        # In namespace default if none is given, as with kubectl; at the address of the client's family.
        ("node", "web:80", (None, "10.96.0.10", TCP, 80)),
        ("10.0.0.1:40000", "default/web:80", ("10.0.0.1", "10.96.0.10", TCP, 80)),
        ("[fd00::7]:40000", "default/web:80", ("fd00::7", "fd00:96::10", TCP, 80)),
        ("fd00::7", "default/web:80", ("fd00::7", "fd00:96::10", TCP, 80)),
    ],
)
def test_a_question_stands_for_a_packet(subject, source, target, meant):
    made = packet(subject, source, target)
    client = unpack(made.source) if made.source is not None else None
    assert (client, unpack(made.destination), made.protocol, made.port) == meant


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("10.0.0.1", "10.96.0.10", "has no port"),
        ("10.0.0.1", "fd00::1:443", "has no port"),
        ("10.0.0.1", "[fd00::1]:443", "different IP families"),
        ("nobody", "10.96.0.10:80", "'nobody' is no IP address; expected the client's address, or 'node'"),
        ("10.0.0.1:0", "10.96.0.10:80", "from 1 to 65535"),
        ("10.0.0.1", "127.0.0.1:80", "127.0.0.1 is 10.0.0.1's own loopback: its packets do not reach this node"),
        ("node", "10.96.0.10:0", "from 1 to 65535, got '0'"),
        ("node", "10.96.0.10:99999", "from 1 to 65535, got '99999'"),
        ("node", "10.96.0.300:80", "'10.96.0.300' is no IP address and no Service"),
        ("node", "default/a/b:80", "'default/a/b' is no IP address and no Service"),
        ("node", f"{'n' * 64}:80", "is no IP address and no Service"),
        ("node", "Web_1:80", "is no IP address and no Service"),
        ("node", "default/:80", "is no IP address and no Service"),
        ("node", "", "has no port"),
        ("node", "10.96.0.10:80/quic", "'quic' is no protocol of Services; expected tcp, udp or sctp"),
        ("node", "default/web:nosuch", "has no port nosuch; it has http 80/TCP, dns 53/UDP (spec.ports)"),
        ("node", "default/web:dns/tcp", "has no TCP port dns; it has http 80/TCP, dns 53/UDP (spec.ports)"),
        ("node", "default/web", "it has http 80/TCP, dns 53/UDP (spec.ports)"),
        ("node", "none:80", "no Service default/none that is watched: there is none, it is headless"),
        ("node", "none:80", "`kubectl -n default get service none --show-labels` tells which"),
        ("node", "shop/web:80", "tells which; there is default/web"),
        ("node", "plain:", "it has 8080/TCP (spec.ports)"),
        ("fd00::7", "plain:8080", "Service default/plain has no IPv6 cluster IP with a port (spec.clusterIPs)"),
        ("node", "default/names:80", "Service default/names has no address on this node: its type is ExternalName"),
    ],
)
def test_an_invalid_value_is_reported_with_the_valid_ones(subject, source, target, said):
    with pytest.raises(QuestionError) as error:
        packet(subject, source, target)
    assert said in str(error.value)
