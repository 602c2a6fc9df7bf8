"""A packet to a changing Service finds an endpoint between any two transactions, and also if a commit happens between
two of the packet's lookups. The kernel evaluates a packet's rules by one generation, but each lookup by the generation
of its moment: such a packet passes the old rules, with old elements until the commit and new elements in all later
lookups.
"""

import itertools
from dataclasses import replace

import pytest

from kubeproxy.backends.nftables import backend as backend_module
from kubeproxy.backends.nftables.layout import LOOKUPS, SetId
from kubeproxy.model.objects import Annotations, ServicePort
from support.cluster_objects import HERE, NODE_IPS, address, world
from support.fake_nftables.packets import Packet, ways
from support.nftables_ground import FakeGround, resync, sync
from support.nftables_plans import V4, plans_of

NAME = ("default", "a")
PORTS = [ServicePort(port=80, node_port=30080)]
STICKY = {"session_affinity": "ClientIP"}
LOCAL = {"external_traffic_policy": "Local"}
SOURCES_OF = {"load_balancer_source_ranges": ["172.16.0.0/30", "10.244.0.0/16", "192.0.2.0/24"]}
PORTS_OF = {"annotations": Annotations(port_ranges="10000-20000/udp,9000-9001/tcp")}
SPECS = {
    "plain": {},
    "local": LOCAL,
    "sticky": STICKY,
    "sticky and local": {**STICKY, **LOCAL},
    "maglev": {"annotations": Annotations(algorithm="maglev-251")},
    "internal local": {"internal_traffic_policy": "Local", "external_traffic_policy": "Local"},
    "ranges": SOURCES_OF,
    "ports": PORTS_OF,
    "other ports": {"annotations": Annotations(port_ranges="5000-10000/tcp,19000-30000/udp")},
    "sticky ports": {**STICKY, **PORTS_OF},
    "local ports": {**LOCAL, **SOURCES_OF, **PORTS_OF},
    "internal local ports": {"internal_traffic_policy": "Local", **STICKY, **PORTS_OF},
}


def plans(spec, endpoints):
    more = {"external_ips": ["203.0.113.1"], "ingress": ["198.51.100.1"]}
    return plans_of("a", 1, endpoints, ports=PORTS, local=HERE, **more, **SPECS[spec])


SOURCES = (("pod", "10.244.0.3"), ("outside", "172.16.0.1"))

_EARLY = (
    *(SetId.FIREWALL_IPS, SetId.FIREWALL_LISTS, SetId.FIREWALL_RANGES, SetId.FIREWALL_ALLOW),
    *(SetId.CLUSTER_SERVICES, SetId.EXTERNAL_SERVICES, SetId.POLICY_LOCAL_SERVICES, SetId.AFFINITY_SERVICES),
    *(SetId.NODEPORT_IPS, SetId.EXTERNAL_NODEPORTS, SetId.POLICY_LOCAL_NODEPORTS, SetId.AFFINITY_NODEPORTS),
    *(SetId.CLUSTER_RANGES, SetId.EXTERNAL_RANGES, SetId.POLICY_LOCAL_RANGES),
)
ORDER = (*_EARLY, *(name for names in (*LOOKUPS[1:], LOOKUPS[0]) for name in names if name not in _EARLY))
"""The sets in the order of a packet's lookups."""


def packets(service):
    node = address(NODE_IPS[V4])
    for plan in service:
        for frontend in plan.frontends:
            for origin, source in SOURCES:
                place = frontend.address or node, frontend.protocol, frontend.port, not frontend.address
                yield Packet(origin, address(source), *place)
        for span in plan.port_ranges:
            for (origin, source), port in itertools.product(SOURCES, (span.port, 10000, 19500, span.last)):
                yield Packet(origin, address(source), span.address, span.protocol, port)


def served(ground, service):
    """Return the packets that reach an endpoint on every possible path."""
    found = {packet: ways(ground.kernel, packet) for packet in packets(service)}
    return {packet for packet, its in found.items() if all(way.end == "pass" and way.endpoint for way in its)}


class Between:
    """Return the served packets after each transaction, and those of the packets between two lookups at its commit."""

    def __init__(self, ground, service):
        self.ground, self.service = ground, service
        self.after, self.under_way = [], []
        ground.before_commit, ground.after_commit = self.keep, self.look

    def keep(self):
        table = self.ground.kernel.table(V4)
        self.chains = {name: replace(chain, rules=list(chain.rules)) for name, chain in table.chains.items()}
        self.elements = {name: dict(each.elements) for name, each in table.sets.items()}

    def look(self):
        table = self.ground.kernel.table(V4)
        self.after.append(served(self.ground, self.service))
        new = table.chains, {name: each.elements for name, each in table.sets.items()}
        table.chains = {name: self.chains.get(name, replace(chain, rules=[])) for name, chain in new[0].items()}
        for name in filter(new[1].__contains__, ORDER):  # a table without ranges of ports lacks their sets
            before = self.elements.get(name, {})
            if new[1][name] != before:
                self.under_way.append(served(self.ground, self.service))
            table.sets[name].elements = before
        table.chains = new[0]
        for name, elements in new[1].items():
            table.sets[name].elements = elements

    def check(self, was):
        """Stop recording; check that all packets in `was` that are served now were served all the time."""
        self.ground.before_commit = self.ground.after_commit = lambda: None
        always = was & served(self.ground, self.service)
        assert always
        assert [always - each for each in self.after if not always <= each] == []
        assert [always - each for each in self.under_way if not always <= each] == []


@pytest.mark.quick
@pytest.mark.parametrize(("earlier", "later"), list(itertools.permutations(SPECS, 2)))
def test_a_packet_that_is_served_before_and_after_is_served_during_a_start(monkeypatch, earlier, later):
    """Make transactions as short as a small send buffer requires."""
    monkeypatch.setattr(backend_module, "BATCH", 50 if "maglev" in earlier else 4)
    with FakeGround.fresh() as ground:
        before, after = plans(earlier, 3), plans(later, 2)
        resync(ground.start(), {NAME: before})
        was, between = served(ground, before), Between(ground, after)
        backend = ground.start()
        resync(backend, {NAME: after})
        assert len(between.after) > 1
        between.check(was)
        ground.is_clean(backend, {NAME: after})


@pytest.mark.quick
@pytest.mark.parametrize(("earlier", "later"), list(itertools.product(SPECS, SPECS)))
def test_a_packet_that_is_served_before_and_after_a_change_is_served_during_its_commits(earlier, later):
    with FakeGround.fresh() as ground:
        before, after = plans(earlier, 3), plans(later, 2)
        backend = ground.start()
        resync(backend, {NAME: before})
        was, between = served(ground, before), Between(ground, after)
        sync(backend, (NAME, after))
        between.check(was)
        ground.is_clean(backend, {NAME: after})


HANDOVERS = {
    "all of a range": ("10000-20000/udp", None, None, "10000-20000/udp"),
    "a part": ("10000-20000/udp", None, "10000-14999/udp", "15000-25000/udp"),
    "exchange": ("10000-20000/udp", "20001-30000/udp", "20001-30000/udp", "10000-20000/udp"),
    "a port": ("80-80/udp,10000-20000/udp", None, "80-80/udp", "10000-20000/udp"),
}


@pytest.mark.parametrize("handover", HANDOVERS)
@pytest.mark.parametrize("spec", [{}, STICKY, LOCAL])
def test_ports_that_go_to_another_service_are_served_during_its_commits(handover, spec):
    names = ("a", "b")
    texts = HANDOVERS[handover]
    before, after = (
        {
            ("default", name): plans_of(
                name,
                number,
                external_ips=["203.0.113.1"],
                ports=[ServicePort(port=number)],
                annotations=Annotations(port_ranges=text),
                **spec,
            )
            for number, (name, text) in enumerate(zip(names, asked, strict=True), 1)
        }
        for asked in (texts[:2], texts[2:])
    )
    with FakeGround.fresh() as ground:
        backend = ground.start()
        resync(backend, before)
        both = [plan for plans in after.values() for plan in plans]
        was, between = served(ground, both), Between(ground, both)
        sync(backend, *after.items())
        between.check(was)
        ground.is_clean(backend, after)


@pytest.mark.parametrize(("earlier", "later"), list(itertools.permutations(["primary", "all"])))
def test_nodeports_are_served_while_the_rules_about_their_addresses_change(earlier, later):
    with FakeGround.fresh() as ground:
        service = plans("plain", 3)
        resync(ground.start(world(families=[V4], nodeports=earlier)), {NAME: service})
        was, between = served(ground, service), Between(ground, service)
        backend = ground.start(world(families=[V4], nodeports=later))
        resync(backend, {NAME: service})
        between.check(was)
        ground.is_clean(backend, {NAME: service})
