"""Derives findings on the checked connection from probes of its endpoints. A probe consists of this node's own packets,
so the cause of a failed probe may concern only such packets."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import Final

from kubeproxy.ask.checks import checkup, packets
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.finding import Diagnosis, End, Probe, end_of
from kubeproxy.ask.kernel import present
from kubeproxy.ask.kernel.present import OwnCause
from kubeproxy.ask.why import Explained, Why
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.route import local_addresses, source_for
from kubeproxy.meaning.firewall import MASQUERADED, Firewall, PassingPacket
from kubeproxy.model.addresses import Family, family_of, place_text, unpack
from kubeproxy.model.answer import Packet
from kubeproxy.setup import host


def away(why: Why, explained: Explained) -> dict[str, str]:
    """Return the endpoints that are on other nodes, with the node."""
    return {one.address: one.node for one in why.endpoints if one.node not in {"", explained.world.node_name}}


def findings(
    node: CheckedNode,
    explained: Explained,
    why: Why,
    probes: Sequence[Probe],
    *,
    at_proxy: bool,
    lost: Collection[End] = (),
) -> Iterator[Diagnosis]:
    """Return the findings on probes for a connection. `at_proxy`: the connection ends at the proxy; `lost`: the
    endpoints that the connection certainly does not reach. A NetworkPolicy never refuses packets of the endpoint's own
    node, so an endpoint on this node that refuses a probe refuses the client, too."""
    failed = {end_of(one.address): one.address for one in probes if one.failed}
    if not failed:
        return present.findings(probes, present.ProbedFor())
    packet, local = explained.packet, host.packed_local_addresses(tuple(Family))
    is_node = at_proxy or packet.source is None or any(packet.source in each for each in local.values())
    closed = {one.address for one in probes if one.refused}
    shown = {one.address for one in why.endpoints if one.node == explained.world.node_name} & closed
    own = () if is_node else [one.address for one in why.endpoints if not one.masqueraded and one.address not in shown]
    stopped: dict[str, OwnCause] = {}
    with suppress(KubeProxyError, OSError):  # if a proxy runs, other checks report unreadable rules
        sent = [Packet(source_for(address), address, packet.protocol, port) for address, port in failed]
        passing = [each for one in sent for each in packets.own_packets(one, local[family_of(one.destination)])]
        stopped = {failed[end]: cause for end, cause in _stopped(passing, node.others)}
        if node.bridge:
            stopped |= _unbridged(failed, node.bridge)
    # Packets of probes are not translated. If a proxy runs, other checks cover the connection's translated packets.
    untranslated = at_proxy or node.mode.flows_end is FlowsEnd.PROXY or (is_node and not node.running)
    routed = node.running and (why.direct or node.mode.flows_end is FlowsEnd.ENDPOINTS)
    elsewhere = away(why, explained)
    interfaces = {}
    if elsewhere:
        with suppress(KubeProxyError):
            interfaces = {one.ip: one.interface for one in local_addresses(family_of(packet.destination))}
    here = {one: name for one in elsewhere if (name := interfaces.get(end_of(one)[0]))}
    return present.findings(probes, present.ProbedFor(untranslated, own, stopped, routed, elsewhere, here, lost))


def _unbridged(failed: dict[End, str], bridge: str) -> Iterator[tuple[str, OwnCause]]:
    """Yield the endpoints that this node's own packets do not reach over `bridge`, which the connection uses."""
    for (address, _), text in failed.items():
        out = packets.interface_to(address)
        if out != bridge:
            way = f"leave by {out}" if out else "have no route"
            shown = f"see `ip route get {unpack(address)}`"
            yield text, OwnCause(f"this node's packets to it {way} ({shown}), but {bridge} delivers packets of pods")


def _stopped(passing: Collection[PassingPacket], others: Sequence[Firewall]) -> Iterator[tuple[End, OwnCause]]:
    """Yield the endpoints for which a chain of another program drops this node's own packets, may drop them, or changes
    their source. If an endpoint occurs several times, its last cause applies."""
    for firewall in others:
        may = [one for one in firewall.filters() if one.hook in _OF_USERS and (one.drops or one.closes)]
        for end in dict.fromkeys(one.original for one in passing) if may else ():
            harmless = firewall.harmless([one for one in passing if one.original == end])
            for each in (one for one in may if one.chain not in harmless):
                chain = f"{each.where}, chain {each.chain}"
                reason = f"{chain} may stop this node's own packets, or only those of its user {os.geteuid()}"
                shown = f"`kube-proxy trace node {place_text(*end)}` shows whether a rule of {chain} stops them"
                yield end, OwnCause(reason, shown, sure=False)
    leaving = [one._replace(before=inf) for one in passing if one.hook == "postrouting"]
    for moved in (each for firewall in others for each in firewall.sources(leaving)):
        if moved.sources - {MASQUERADED, moved.packet.source or MASQUERADED}:
            reason = f"{moved.where}, chain {moved.chain} gives packets of this node's own another source"
            fix = f"leave packets to endpoints out of {moved.where} {moved.chain}"
            yield moved.packet.original, OwnCause(reason, fix)
    for drop in reversed(checkup.surely_dropped(others, passing)):
        verdict = drop.verdict.replace("resets", "rejects")
        reason = f"{drop.where}, chain {drop.chain} {verdict} packets of this node's own at the hook {drop.packet.hook}"
        yield drop.packet.original, OwnCause(reason, f"let {drop.where} {drop.chain} accept them")


_OF_USERS: Final = frozenset({"output", "postrouting"})
"""The hooks at which a rule can test the user of a program."""
