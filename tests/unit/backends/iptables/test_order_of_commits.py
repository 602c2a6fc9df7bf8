"""Tables are committed one after the other: between two commits each packet is either translated or refused.

A client that is served or refused before and after a sync must be so after each of its commits: conntrack would store
an untranslated packet, and its client would get no answers any more.
"""

from __future__ import annotations

import ipaddress
import shlex
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given

from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, unpack
from kubeproxy.model.plan import FrontendKind
from support.effort import examples
from support.fake_tables import FakeTables, backend
from support.random_plans import ADDRESSES, cycling

REFUSING = ("KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL")


class Packet(NamedTuple):
    """The first packet of an outside client, before any translation."""

    source: str
    destination: str
    protocol: str
    port: int


def packets(plans, family: Family) -> set[Packet]:
    """Yield a packet to every frontend, from a client in most source ranges and from a client outside of them."""
    where = ADDRESSES[family]
    return {
        Packet(
            source,
            where.node if frontend.kind is FrontendKind.NODEPORT else unpack(frontend.address),
            PROTOCOL_NAMES[frontend.protocol].lower(),
            frontend.port,
        )
        for parts in plans.values()
        for plan in parts
        for frontend in plan.frontends
        for source in (where.outside.format(1), where.outside.format(77))
    }


def fate(tables: FakeTables, table: str, chain: str, packet: Packet) -> str:
    """Return the action of a chain on a packet: 'dnat', 'refused' or ''."""
    for rule in tables.chains.get((table, chain), ()):
        target, matches = matched(words_of(rule)[2:], packet)
        if not matches or target in {"KUBE-MARK-MASQ", ""}:
            continue
        if target in {"DNAT", "REJECT", "DROP"}:
            return "dnat" if target == "DNAT" else "refused"
        if decided := fate(tables, table, target, packet):
            return decided
    return ""


words_of = lru_cache(maxsize=1 << 14)(shlex.split)  # This comparison takes longer than all the rest.


@lru_cache(maxsize=1 << 14)
def within(address: str, network: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network)


def matched(words: list[str], packet: Packet) -> tuple[str, bool]:
    """Return a rule's target, and whether the rule matches a packet (every random choice matches)."""
    target, wanted, matches = "", True, True
    values = iter(words)
    for word in values:
        holds = True
        if word == "!":
            wanted = False
            continue
        if word in {"-s", "-d"}:
            address = packet.source if word == "-s" else packet.destination
            holds = within(address, next(values))
        elif word in {"-p", "--dport"}:
            holds = next(values) == (packet.protocol if word == "-p" else str(packet.port))
        elif word == "-j":
            target = next(values)
        elif word in {"-i", "--rcheck"} or (word == "--src-type" and next(values) == "LOCAL"):
            holds = False
        matches = matches and holds is wanted
        wanted = True
    return target, matches


def covered(tables: FakeTables, among: set[Packet]) -> set[Packet]:
    """Return the packets that are translated or refused."""
    return {
        packet
        for packet in among
        if fate(tables, "nat", "KUBE-SERVICES", packet)
        or any(fate(tables, "filter", chain, packet) for chain in REFUSING)
    }


@pytest.mark.parametrize("uses_nft", [True, False], ids=["nft", "legacy"])
@pytest.mark.parametrize("full", [True, False], ids=["everything", "changes"])
@given(history=cycling())
@examples(40)
def test_no_packet_slips_through_between_two_commits(history, full, uses_nft):
    globals_, states = history
    family = globals_.families[0]
    made = backend(globals_, family, uses_nft=uses_nft)
    list(made.resync(states[0]))
    asked = {packet for state in states for packet in packets(state, family)}
    for before, after in pairwise(states):
        covers = [covered(made.tables, asked)]
        made.tables.committed = lambda covers=covers: covers.append(covered(made.tables, asked))
        if full:
            list(made.resync(after))
        else:
            list(made.sync(list((after | {name: () for name in before if name not in after}).items())))
        made.tables.committed = None
        throughout = covers[0] & covered(made.tables, asked)
        for moment in covers:
            assert throughout <= moment
