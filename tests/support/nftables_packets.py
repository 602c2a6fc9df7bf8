"""Sends packets to every frontend from everywhere through the fake kernel; compares outcomes with model.answer."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, cast

from msgspec.structs import replace

from kubeproxy.model.addresses import Family, is_loopback, pack
from kubeproxy.model.answer import Outcome, answer
from kubeproxy.model.answer import Packet as AnsweredPacket
from kubeproxy.model.ejection import Ejections
from kubeproxy.model.objects import Node, Service
from kubeproxy.model.plan import (
    Compiled,
    FamilyGlobals,
    Frontend,
    FrontendKind,
    Globals,
    Loopback,
    ServiceName,
    ServicePlan,
)
from support.cluster_objects import NODE_IPS
from support.fake_nftables import FakeKernel, Packet
from support.fake_nftables.packets import INTERFACES, Fate, Forwarded, Origin, fate

if TYPE_CHECKING:
    from kubeproxy.model.endpoints import Slice
    from kubeproxy.model.planner import Planner

UNUSED_PORT = 9
LOOPBACK = {Family.IPV4: b"\x7f\0\0\1", Family.IPV6: bytes(15) + b"\1"}

SOURCES: dict[Family, tuple[tuple[Origin, str], ...]] = {
    Family.IPV4: (
        ("pod", "10.244.0.3"),
        ("pod", "10.244.1.1"),
        ("node", NODE_IPS[Family.IPV4]),
        ("outside", "172.16.0.1"),
        ("outside", "172.16.0.9"),
        ("outside", "203.0.113.7"),
    ),
    Family.IPV6: (
        ("pod", "fd00:244::3"),
        ("pod", "fd00:10:244::3"),
        ("node", NODE_IPS[Family.IPV6]),
        ("outside", "2001:db8:f::1"),
        ("outside", "2001:db8:f::77"),
    ),
}
"""The sources of packets. Not every detector recognises every pod as a pod."""


def check(kernel: FakeKernel, world: Globals, family: Family, plans: Iterable[ServicePlan]) -> None:
    """Send packets to all frontends of all plans, and to other ports of the cluster IPs."""
    plans = list(plans)
    hairpin = {address for plan in plans for address in plan.hairpin}
    node = _packed(NODE_IPS[family])
    guarded = {f.address for p in plans for f in p.frontends if f.kind is FrontendKind.CLUSTER}
    cluster = _Cluster(world, plans)
    for plan in plans:
        if any(endpoint[:-2] in guarded for endpoint in (*plan.cluster, *plan.local)):
            continue  # No endpoint, according to the API: such a packet reaches the guard of other ports.
        for frontend in plan.frontends:
            nodeport = frontend.kind is FrontendKind.NODEPORT
            destination = node if nodeport else frontend.address
            for origin, text in SOURCES[family]:
                source = _packed(text)
                packet = Packet(origin, source, destination, frontend.protocol, frontend.port, destination == node)
                assert fate(kernel, packet) == _wanted(cluster, packet, hairpin), f"{plan.key} {frontend} {packet}"
            if nodeport:
                packet = Packet("node", LOOPBACK[family], LOOPBACK[family], frontend.protocol, frontend.port, True)
                assert fate(kernel, packet) == _wanted(cluster, packet, hairpin), packet
        for span in plan.port_ranges:
            for origin, text in SOURCES[family]:
                for port in (span.port, span.last, span.last + 1):
                    packet = Packet(origin, _packed(text), span.address, span.protocol, port, span.address == node)
                    assert fate(kernel, packet) == _wanted(cluster, packet, hairpin), f"{plan.key} {span} {packet}"
    for address in guarded:
        for origin, text in SOURCES[family]:
            packet = Packet(origin, _packed(text), address, socket.IPPROTO_TCP, UNUSED_PORT)
            assert fate(kernel, packet) == _wanted(cluster, packet, hairpin) == "reject", packet


class _Cluster:
    """The parts of a planner that an answer needs, with the existing plans."""

    def __init__(self, world: Globals, plans: Iterable[ServicePlan]) -> None:
        self.world = world
        self.departures = None
        self.ejections = Ejections("never")
        self.nodes: Mapping[str, Node] = {}
        self.services: Mapping[ServiceName, Service] = {}
        self.slices: Mapping[ServiceName, Mapping[str, Slice]] = {}
        self.compiled: dict[ServiceName, Compiled] = {}
        self._owners: dict[tuple[Family, bytes], ServiceName] = {}
        for plan in plans:
            name = (plan.key.namespace, plan.key.name)
            held = self.compiled.get(name, Compiled())
            self.compiled[name] = replace(held, plans=(*held.plans, plan))
            self._owners |= {(plan.key.family, frontend.key): name for frontend in plan.frontends}

    def owner(self, family: Family, key: bytes) -> ServiceName | None:
        return self._owners.get((family, key))

    def range_owner(self, family: Family, key: bytes) -> ServiceName | None:
        return next(
            (
                name
                for name, compiled in self.compiled.items()
                for plan in compiled.plans
                if any(span.covers(key) for span in plan.port_ranges)
            ),
            None,
        )

    def claimants(self, plan: ServicePlan, frontend: Frontend) -> list[str]:
        return []


def _wanted(cluster: _Cluster, packet: Packet, hairpin: set[bytes]) -> Fate:
    """Return the answer of model.answer for a packet, in the fake kernel's terms."""
    family = Family.IPV4 if len(packet.destination) == 4 else Family.IPV6
    ends = packet.source, packet.destination, packet.protocol, packet.port
    asked = AnsweredPacket(*ends, INTERFACES[packet.origin], packet.source_port)
    made = answer(cast("Planner", cluster), asked, {_packed(NODE_IPS[family]), LOOPBACK[family]})
    ours = cluster.world.of(family) or FamilyGlobals()
    if packet.protocol == socket.IPPROTO_TCP and ours.loopback is Loopback.RELAYED and is_loopback(packet.destination):
        return "pass"  # A packet to the proxy, if it listens there.
    if made.outcome is not Outcome.FORWARDED:
        return _ENDS[made.outcome]
    # Any Service's slice determines the endpoints of this node: an address that is an endpoint of two Services is local
    # for both.
    itself = {c.destination for c in made.choices if c.destination[:-2] == packet.source and packet.source in hairpin}
    masqueraded = tuple(c.destination for c in made.choices if c.masqueraded or c.destination in itself)
    return Forwarded(tuple(choice.destination for choice in made.choices), masqueraded, made.affinity)


_ENDS: dict[Outcome, Literal["reject", "drop", "pass"]] = {
    Outcome.REFUSED: "reject",
    Outcome.DROPPED: "drop",
    Outcome.NOT_OURS: "pass",
}


def _packed(text: str) -> bytes:
    packed = pack(text)
    assert packed is not None
    return packed
