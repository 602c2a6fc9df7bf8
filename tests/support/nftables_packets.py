"""Packets to every frontend from everywhere, through the fake kernel: they meet with what the plans say."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.plan import Action, FamilyGlobals, Frontend, FrontendKind, Globals, Loopback, ServicePlan
from support.cluster_objects import NODE_IPS
from support.fake_nftables import FakeKernel, Packet
from support.fake_nftables.packets import INTERFACES, Fate, Forwarded, Origin, fate

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
"""Where packets come from. Not every detector takes every pod for one."""


def check(kernel: FakeKernel, world: Globals, family: Family, plans: Iterable[ServicePlan]) -> None:
    """Send packets to all frontends of all plans, and to other ports of the cluster IPs."""
    plans = list(plans)
    hairpin = {address for plan in plans for address in plan.hairpin}
    node = _packed(NODE_IPS[family])
    ours = world.of(family) or FamilyGlobals()
    guarded = {f.address for p in plans for f in p.frontends if f.kind is FrontendKind.CLUSTER}
    keys = {frontend.key for plan in plans for frontend in plan.frontends}
    for plan in plans:
        if any(endpoint[:-2] in guarded for endpoint in (*plan.cluster, *plan.local)):
            continue  # no endpoint, says the API: on its way there a packet meets the guard of other ports
        for frontend in plan.frontends:
            nodeport = frontend.kind is FrontendKind.NODEPORT
            if nodeport and node + frontend.key in keys:
                continue  # the node's address and this port are somebody's external IP, which comes first
            destination = node if nodeport else frontend.address
            for origin, text in SOURCES[family]:
                source = _packed(text)
                packet = Packet(origin, source, destination, frontend.protocol, frontend.port, destination == node)
                wanted = _wanted(world, plan, frontend, origin, source, hairpin)
                if nodeport and ours.nodeport_ips == ():
                    wanted = "pass"
                assert fate(kernel, packet) == wanted, f"{plan.key} {frontend} {packet}"
            if nodeport:
                packet = Packet("node", LOOPBACK[family], LOOPBACK[family], frontend.protocol, frontend.port, True)
                assert fate(kernel, packet) == _wanted_on_loopback(ours.loopback, frontend.protocol), packet
    for address in guarded:
        for origin, text in SOURCES[family]:
            packet = Packet(origin, _packed(text), address, socket.IPPROTO_TCP, UNUSED_PORT)
            assert fate(kernel, packet) == "reject", packet


def _wanted_on_loopback(loopback: Loopback, protocol: int) -> Fate:
    if loopback is Loopback.NOTHING or (loopback is Loopback.RELAYED and protocol == socket.IPPROTO_TCP):
        return "pass"
    return "reject"


def _wanted(
    world: Globals, plan: ServicePlan, frontend: Frontend, origin: Origin, source: bytes, hairpin: set[bytes]
) -> Fate:
    ranges = plan.sources(frontend)
    if ranges is not None and not any(first <= source <= last for first, last in ranges):
        return "drop"
    ours = world.of(plan.key.family)
    assert ours is not None
    seen_as = "outside" if origin == "pod" and not ours.detector.holds(source, INTERFACES[origin]) else origin
    action: Action = getattr(plan.traffic(frontend), seen_as)
    if action is Action.REJECT:
        return "reject"
    if action is Action.DROP:
        return "drop"
    pool = plan.local if action.picks_local else plan.cluster
    masqueraded = action in {Action.CLUSTER_MASQUERADE, Action.LOCAL_MASQUERADE}
    to_itself = tuple(endpoint for endpoint in pool if endpoint[:-2] == source and source in hairpin)
    return Forwarded(pool, pool if masqueraded else to_itself, plan.affinity)


def _packed(text: str) -> bytes:
    packed = pack(text)
    assert packed is not None
    return packed
