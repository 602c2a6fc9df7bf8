"""Services that changed while the proxy was down: between any two transactions of a start, packets find endpoints."""

import itertools

import pytest

from kubeproxy.backends.nftables import backend as backend_module
from kubeproxy.model.objects import Annotations, ServicePort
from support.cluster_objects import HERE, NODE_IPS, address
from support.fake_nftables.packets import Packet, ways
from support.nftables_ground import FakeGround, resync
from support.nftables_packets import SOURCES
from support.nftables_plans import V4, plans_of

NAME = ("default", "a")
PORTS = [ServicePort(port=80, node_port=30080)]
STICKY = {"session_affinity": "ClientIP"}
LOCAL = {"external_traffic_policy": "Local"}
SPECS = {
    "plain": {},
    "local": LOCAL,
    "sticky": STICKY,
    "sticky and local": {**STICKY, **LOCAL},
    "maglev": {"annotations": Annotations(algorithm="maglev-251")},
    "internal local": {"internal_traffic_policy": "Local", "external_traffic_policy": "Local"},
    "ranges": {"load_balancer_source_ranges": ["172.16.0.0/30", "10.244.0.0/16", "192.0.2.0/24"]},
}


def plans(spec, endpoints):
    more = {"external_ips": ["203.0.113.1"], "ingress": ["198.51.100.1"]}
    return plans_of("a", 1, endpoints, ports=PORTS, local=HERE, **more, **SPECS[spec])


def packets(service):
    node = address(NODE_IPS[V4])
    for plan in service:
        for frontend in plan.frontends:
            for origin, source in SOURCES[V4]:
                place = frontend.address or node, frontend.protocol, frontend.port, not frontend.address
                yield Packet(origin, address(source), *place)


def served(ground, service):
    """The packets that come to an endpoint, whichever way they take."""
    found = {packet: ways(ground.kernel, packet) for packet in packets(service)}
    return {packet for packet, its in found.items() if all(way.end == "pass" and way.endpoint for way in its)}


@pytest.mark.parametrize(("earlier", "later"), list(itertools.permutations(SPECS, 2)))
def test_a_packet_that_is_served_before_and_after_is_served_in_between(monkeypatch, earlier, later):
    """Each transaction has one element, as few as a small send buffer may leave of more than 20,000."""
    monkeypatch.setattr(backend_module, "BATCH", 1)
    with FakeGround.fresh() as ground:
        before, after = plans(earlier, 3), plans(later, 2)
        resync(ground.start(), {NAME: before})
        was, between = served(ground, before), []
        ground.after_commit = lambda: between.append(served(ground, after))
        backend = ground.start()
        resync(backend, {NAME: after})
        always = was & served(ground, after)
        assert len(between) > 3
        assert always
        assert [always - each for each in between] == [set()] * len(between)
        ground.after_commit = lambda: None
        ground.is_clean(backend, {NAME: after})
