"""Checks whether the answers of endpoints return through this node, which alone can reverse the translation."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from kubeproxy.ask.checks import packets
from kubeproxy.ask.checks.node import CheckedNode, arrival
from kubeproxy.ask.finding import Diagnosis, Effect, Harm, Severity, end_of
from kubeproxy.ask.question import counted_host
from kubeproxy.ask.why import Explained, Why, unmasqueraded
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.route import local_addresses
from kubeproxy.model.addresses import family_of, pack


def astray(node: CheckedNode, explained: Explained, why: Why) -> frozenset[str]:
    """Return the endpoints on other nodes that answer an outside client directly, because this node does not masquerade
    the client's connection (see why.unmasqueraded). The result is empty for a pod of this node, because the pod's
    interface does not lead to other nodes."""
    packet = explained.packet
    if packet.source is None or not explained.keeps_outside:
        return frozenset()
    family, own = family_of(packet.destination), explained.world.node_name
    addresses = [address for each, part in node.parts if each is family for address in part.node_ips]
    with suppress(KubeProxyError):
        client = arrival(node, packet) or packets.interface_to(packet.source)
        uplinks = {one.interface for one in local_addresses(family) if one.ip in addresses}
        away = [one for one in why.endpoints if not one.masqueraded and one.node != own]
        return frozenset(
            one.address
            for one in away
            if (client in uplinks and one.node) or client == packets.interface_to(end_of(one.address)[0])
        )
    return frozenset()


def unreturned(why: Why, astray: Collection[str], node: CheckedNode) -> Iterator[Diagnosis]:
    """Report endpoints whose answers do not return through this node, which alone could reverse the translation."""
    lost = [one for one in why.endpoints if one.address in astray]
    if lost:
        share = sum(one.share for one in lost)
        family = family_of(end_of(lost[0].address)[0])
        facts, client = node.facts, pack(why.source)
        counted = counted_host(facts.world, facts.node, client) if facts is not None and client is not None else ""
        what, fix = unmasqueraded(node.config.local_mode, family, counted)
        text = (
            f"{share:.1%} of the connections time out, because this node does not replace the client's address: "
            "the endpoint answers the client directly, with an address that the client did not ask"
        )
        harm = Harm(Effect.LOSES, frozenset(end_of(one.address) for one in lost))
        yield Diagnosis(Severity.DEGRADED, "pod network", what, text, fix, harm)
    reason, fix = "the endpoint is the client itself and is not masqueraded, because it has no nodeName", ""
    for is_client in (True, False):
        others = [one for one in why.endpoints if not one.returns and one.address not in astray]
        lost = [one for one in others if one.is_unnamed(why.source) is is_client]
        if lost:
            what = f"{sum(one.share for one in lost):.1%} of the connections time out"
            harm = Harm(Effect.LOSES, frozenset(end_of(one.address) for one in lost))
            yield Diagnosis(Severity.DEGRADED, "masquerade", what, reason, fix, harm)
        reason = (
            "client and endpoint are on other nodes, and policy Local keeps the client's address: the endpoint answers "
            "the client directly, with an address that the client did not ask"
        )
        fix = (
            "let pods use the Service's cluster IP, or the NodePort of their own node; or set "
            "spec.externalTrafficPolicy to Cluster"
        )
