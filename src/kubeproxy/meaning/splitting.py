"""Tests of rules that split a flow: each returns the part for which it holds, and appends the rest to `missed`."""

from __future__ import annotations

from kubeproxy.meaning import regions
from kubeproxy.meaning.flow import PacketSet
from kubeproxy.meaning.regions import Addresses


def by_service(wanted: int, flow: PacketSet, missed: list[PacketSet], *, original: bool) -> PacketSet | None:
    """Split by protocol and port, those before the translation if `original`."""
    mine = flow.services if original or flow.current is None else flow.current
    both = mine & wanted
    if both == mine:
        return flow
    if not both:
        missed.append(flow)
        return None
    rest, kept = flow.copy(), flow.copy()
    if original:
        rest.services, kept.services = mine & ~wanted, both
    else:
        rest.current, kept.current = mine & ~wanted, both
    missed.append(rest)
    return kept


def by_source(wanted: Addresses, flow: PacketSet, missed: list[PacketSet]) -> PacketSet | None:
    """Split by the source address."""
    inside = regions.meet(flow.sources, wanted)
    if inside == flow.sources:
        return flow
    if not inside:
        missed.append(flow)
        return None
    rest, kept = flow.copy(), flow.copy()
    rest.sources, kept.sources = regions.minus(flow.sources, wanted), inside
    missed.append(rest)
    return kept


def by_chance(flow: PacketSet, chance: float, missed: list[PacketSet]) -> PacketSet | None:
    """Split by chance: the kept part has this share of the packets."""
    if chance >= 1:
        return flow
    rest = flow.copy()
    rest.share *= 1 - chance
    missed.append(rest)
    if chance <= 0:
        return None
    kept = flow.copy()
    kept.share *= chance
    return kept
