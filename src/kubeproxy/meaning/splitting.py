"""Tests of rules that split a flow: each returns the part for which it is true, and appends the rest to `missed`."""

from __future__ import annotations

from typing import Literal, TypeVar

from kubeproxy.meaning import regions
from kubeproxy.meaning.flow import PacketSet
from kubeproxy.meaning.regions import Addresses

Part = TypeVar("Part", int, Addresses)


Field = Literal["services", "current", "sources", "inputs", "outputs"]
"""The fields of a PacketSet that are sets, and so can be split."""


def by_service(wanted: int, flow: PacketSet, missed: list[PacketSet], *, original: bool) -> PacketSet | None:
    """Split by protocol and port; `original`: those before the translation."""
    field: Field = "services" if original or flow.current is None else "current"
    mine: int = getattr(flow, field)
    return _split(flow, field, mine, mine & wanted, mine & ~wanted, missed)


def by_source(wanted: Addresses, flow: PacketSet, missed: list[PacketSet]) -> PacketSet | None:
    """Split by the source address."""
    inside = regions.meet(flow.sources, wanted)
    outside = regions.minus(flow.sources, wanted) if inside and inside != flow.sources else ()
    return _split(flow, "sources", flow.sources, inside, outside, missed)


def by_interface(wanted: int, flow: PacketSet, missed: list[PacketSet], *, outgoing: bool) -> PacketSet | None:
    """Split by the interface of departure if `outgoing`, else by that of arrival."""
    field: Field = "outputs" if outgoing else "inputs"
    mine: int = getattr(flow, field)
    return _split(flow, field, mine, mine & wanted, mine & ~wanted, missed)


def _split(
    flow: PacketSet, field: Field, mine: Part, inside: Part, outside: Part, missed: list[PacketSet]
) -> PacketSet | None:
    """Split the set `mine` of a field into the parts that are inside and outside of a test's set."""
    if inside == mine:
        return flow
    if not inside:
        missed.append(flow)
        return None
    rest, kept = flow.copy(), flow.copy()
    setattr(rest, field, outside)
    setattr(kept, field, inside)
    missed.append(rest)
    return kept


def by_chance(flow: PacketSet, chance: float, missed: list[PacketSet]) -> PacketSet | None:
    """Split at random: the kept part has this share of the packets."""
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
