"""Compares two rulesets for all packets: a proof with the number of classes, or witnesses, grouped by cause.

Destinations are divided into classes by the constants of both rulesets; sources, services and interfaces only where a
rule on the way distinguishes them. The first packet of each class is followed through both rulesets.
"""

from __future__ import annotations

import ipaddress
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kubeproxy.meaning import regions
from kubeproxy.meaning.flow import Interfaces, Leaf, PacketOutcome
from kubeproxy.meaning.regions import Addresses
from kubeproxy.meaning.rules import CompiledRules, NodePlace, Op, Property
from kubeproxy.meaning.walk import Walk

TOLERANCE: Final = 0.02
"""Shares that differ by less, relative to the larger one, are equal."""
_LEAST: Final = 1e-7
_LIKELY: Final = ("198.51.100.7", "2001:db8:51::7")
"""Sources of witnesses that can have any source: addresses of documentation."""

Shares = tuple[tuple[PacketOutcome, float], ...]
"""Outcomes with their shares of connections."""


class FirstPacket(NamedTuple):
    """The first packet of a connection; `interface` is that of arrival, '' for a connection of the node itself."""

    source: str
    destination: str
    protocol: int
    port: int
    interface: str
    output: str

    def __str__(self) -> str:
        name = regions.NAMES.get(self.protocol, f"protocol {self.protocol}")
        host = f"[{self.destination}]" if ":" in self.destination else self.destination
        place = f"in by {self.interface}" if self.interface else "made here"
        return f"{self.source} -> {host}:{self.port} {name}, {place}"


class Witness(NamedTuple):
    """A packet, and its outcomes in either ruleset."""

    packet: FirstPacket
    first: Shares
    second: Shares


class WitnessGroup(NamedTuple):
    """Differences of one kind: their description, the number of classes, and a witness."""

    text: str
    classes: int
    witness: Witness


class Comparison(NamedTuple):
    """The result: the number of classes of packets, the causes of differences, and the rules not understood."""

    classes: int
    causes: tuple[WitnessGroup, ...]
    unknown: tuple[str, ...]


def compare(first: CompiledRules, second: CompiledRules, place: NodePlace) -> Comparison:
    """Compare two rulesets for all packets."""
    found = _Comparing(place)
    interfaces = Interfaces((first, second))
    walks = Walk(first, place, interfaces), Walk(second, place, interfaces)
    for destination in destinations((first, second), place):
        if not _is_loopback(destination, place.bits):
            found.settle(destination, walks[0].arriving(destination), walks[1].arriving(destination), interfaces)
        found.settle(destination, walks[0].made_here(destination), walks[1].made_here(destination), interfaces)
    return found.result()


def outcomes(ruleset: CompiledRules, place: NodePlace, packet: FirstPacket) -> Shares:
    """Return the outcomes of one packet, with their shares."""
    interfaces = Interfaces((ruleset,))
    walk = Walk(ruleset, place, interfaces)
    destination, source = (int(ipaddress.ip_address(text)) for text in (packet.destination, packet.source))
    leaves = walk.arriving(destination) if packet.interface else walk.made_here(destination)
    services = regions.service(packet.protocol, packet.port) or regions.protocol_set(packet.protocol)
    box = Box(((source, source),), interfaces.named(packet.interface), interfaces.named(packet.output or "other"))
    return _shares([leaf for leaf in leaves if leaf.services & services], box)


def _is_loopback(address: int, bits: int) -> bool:
    """Return whether the kernel accepts packets to an address from its own loopback interface only."""
    return address >> 24 == 127 if bits == 32 else address == 1


def destinations(rulesets: Iterable[CompiledRules], place: NodePlace) -> Iterator[int]:
    """Yield one destination of each class; the constants of the rules divide the classes."""
    points: dict[int, set[tuple[object, ...]]] = defaultdict(set)
    edges = {0, 1 << place.bits}
    sources: dict[int, set[int]] = {}
    for number, (low, high, mark) in enumerate(_constants(rulesets, place, edges, sources)):
        if low == high:
            points[low].add(mark if mark is not None else (number,))
        else:
            edges |= {low, high + 1}
    ordered = sorted(edges)
    chosen = {
        (bisect_right(ordered, each), frozenset(sources.get(each, ())), frozenset(marks)): each
        for each, marks in points.items()
    }
    yield from sorted(chosen.values())
    for low, end in pairwise(ordered):
        free = next((each for each in range(low, end) if each not in points), None)
        if free is not None:
            yield free


def _constants(
    rulesets: Iterable[CompiledRules], place: NodePlace, edges: set[int], sources: dict[int, set[int]]
) -> Iterator[tuple[int, int, tuple[object, ...] | None]]:
    """Yield first and last address of each constant that destinations are compared with.

    The third item is a mark, or None. A mark stands for an element with the same address as source and destination, as
    in the sets of endpoints for hairpin traffic: addresses with the same marks belong to one class. Adds the ends of
    ranges of sources to `edges`, and, to `sources`, the rulesets in which an address is a source.
    """
    yield from ((low, high, None) for low, high in place.local)
    for number, ruleset in enumerate(rulesets):
        for op in ruleset.operations():
            if op[0] is Op.DESTINATION:
                yield from ((low, high, None) for low, high in op[1])
            elif op[0] is Op.SOURCE:
                _add_sources(op[1], number, edges, sources)
        for table in ruleset.tables():
            at, source = table.at.get(Property.DESTINATION), table.at.get(Property.SOURCE)
            for entry in table.entries:
                ranges = entry.ranges
                own = None
                if source is not None and (at is None or ranges[source] != ranges[at]):
                    _add_sources((ranges[source],), number, edges, sources)
                elif source is not None and not entry.data:
                    own = (id(table.entries), *(each for spot, each in enumerate(ranges) if spot not in {at, source}))
                if at is not None:
                    yield *ranges[at], own


def _add_sources(ranges: Addresses, number: int, edges: set[int], sources: dict[int, set[int]]) -> None:
    for low, high in ranges:
        if low == high:
            sources.setdefault(low, set()).add(number)
        else:
            edges |= {low, high + 1}


class _Comparing:
    """Collects the results of comparisons."""

    def __init__(self, place: NodePlace) -> None:
        self._place = place
        self._classes = 0
        self._causes: dict[str, tuple[int, Witness]] = {}
        self._unknown: set[str] = set()

    def result(self) -> Comparison:
        """Return the collected result."""
        causes = tuple(WitnessGroup(text, number, witness) for text, (number, witness) in self._causes.items())
        return Comparison(self._classes, causes, tuple(sorted(self._unknown)))

    def settle(self, destination: int, first: Sequence[Leaf], second: Sequence[Leaf], interfaces: Interfaces) -> None:
        """Compare the outcomes of all packets to one destination."""
        for services, ours, theirs in _by_service(first, second):
            unknown = {leaf.outcome.text for leaf in (*ours, *theirs) if leaf.outcome.kind == "unknown"}
            self._unknown |= unknown
            self._classes += len({leaf[1:4] for leaf in ours})
            for box in _unequal(ours, theirs):
                if unknown:
                    continue
                self._differ(destination, services, box, (ours, theirs), interfaces)

    def _differ(
        self,
        destination: int,
        services: int,
        box: Box,
        leaves: tuple[Sequence[Leaf], Sequence[Leaf]],
        interfaces: Interfaces,
    ) -> None:
        sides = [_shares(each, box) for each in leaves]
        text = f"{_described(sides[0])} / {_described(sides[1])}"
        number, witness = self._causes.get(text, (0, None))
        if witness is None:
            family = ipaddress.IPv4Address if self._place.bits == 32 else ipaddress.IPv6Address
            packet = FirstPacket(
                str(family(_example(box.sources, self._place.bits))),
                str(family(destination)),
                *regions.first_of(services),
                interfaces.example(box.inputs),
                interfaces.example(box.outputs),
            )
            witness = Witness(packet, *sides)
        self._causes[text] = number + 1, witness


class Box(NamedTuple):
    """A set of sources and interfaces."""

    sources: Addresses
    inputs: int
    outputs: int


def _example(sources: Addresses, bits: int) -> int:
    likely = int(ipaddress.ip_address(_LIKELY[bits == 128]))
    return likely if regions.holds(sources, likely) else max(sources[0][0], min(1, sources[0][1]))


def _by_service(first: Sequence[Leaf], second: Sequence[Leaf]) -> Iterator[tuple[int, Sequence[Leaf], Sequence[Leaf]]]:
    """Yield sets of services that neither side divides any further, with the leaves of each side."""
    sides: tuple[dict[int, list[Leaf]], dict[int, list[Leaf]]] = defaultdict(list), defaultdict(list)
    for side, leaves in zip(sides, (first, second), strict=True):
        for leaf in leaves:
            side[leaf.services].append(leaf)
    masks = sides[0].keys() | sides[1].keys()
    singles = [mask for mask in masks if mask.bit_count() == 1]
    wide = [mask for mask in masks if mask.bit_count() != 1]
    rest = regions.EVERY
    for mask in singles:
        rest &= ~mask
    atoms = [rest]
    for mask in wide:
        atoms = [part for atom in atoms for part in (atom & mask, atom & ~mask) if part]
    for atom in (*singles, *atoms):
        holding = [mask for mask in wide if mask & atom]
        if atom in masks and atom not in holding:
            holding.append(atom)
        yield atom, *([leaf for mask in holding for leaf in side.get(mask, ())] for side in sides)  # type: ignore[misc]


def _unequal(first: Sequence[Leaf], second: Sequence[Leaf]) -> list[Box]:
    """Return the boxes in which the shares of an outcome differ."""
    sides: tuple[dict[PacketOutcome, dict[Box, float]], ...] = ({}, {})
    for side, leaves in zip(sides, (first, second), strict=True):
        for leaf in leaves:
            box = Box(*leaf[1:4])
            boxes = side.setdefault(leaf.outcome, {})
            boxes[box] = boxes.get(box, 0.0) + leaf.share
    found: set[Box] = set()
    for outcome in sides[0].keys() | sides[1].keys():
        one, other = sides[0].get(outcome, {}), sides[1].get(outcome, {})
        if one.keys() == other.keys() and all(_close(share, other[box]) for box, share in one.items()):
            continue
        for box in _refined((*one, *other)):
            if not _close(_sum(one, box), _sum(other, box)):
                found.add(box)
    return list(found)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= max(TOLERANCE * max(one, other), _LEAST)


def _sum(boxes: Mapping[Box, float], part: Box) -> float:
    return sum(share for box, share in boxes.items() if _covers(box, part))


def _covers(box: Box, part: Box) -> bool:
    return bool(
        box.inputs & part.inputs and box.outputs & part.outputs and regions.holds(box.sources, part.sources[0][0])
    )


def _refined(boxes: Sequence[Box]) -> Iterator[Box]:
    """Yield boxes that lie either completely inside or completely outside of each given box."""
    edges = sorted({edge for box in boxes for low, high in box.sources for edge in (low, high + 1)})
    sources: dict[tuple[bool, ...], list[tuple[int, int]]] = defaultdict(list)
    for low, end in pairwise(edges):
        sources[tuple([regions.holds(box.sources, low) for box in boxes])].append((low, end - 1))
    inputs = _atoms([box.inputs for box in boxes])
    outputs = _atoms([box.outputs for box in boxes])
    for key, parts in sources.items():
        if any(key):
            for taken in inputs:
                for left in outputs:
                    yield Box(tuple(parts), taken, left)


def _atoms(masks: Sequence[int]) -> list[int]:
    atoms = [0]
    for mask in masks:
        atoms[0] |= mask
    for mask in masks:
        atoms = [part for atom in atoms for part in (atom & mask, atom & ~mask) if part]
    return atoms


def _shares(leaves: Sequence[Leaf], part: Box) -> Shares:
    found: dict[PacketOutcome, float] = defaultdict(float)
    for leaf in leaves:
        if _covers(Box(*leaf[1:4]), part):
            found[leaf.outcome] += leaf.share
    return tuple(sorted(found.items()))


def _described(shares: Shares) -> str:
    """Return the kinds of outcomes as a text: translated to a number of endpoints, refused, dropped, passed."""
    kinds: dict[str, int] = defaultdict(int)
    for outcome, _ in shares:
        words = ", masqueraded" if outcome.masquerade else "", ", remembered" if outcome.remembered else ""
        kinds[outcome.kind + "".join(words)] += 1
    return " and ".join(
        f"{kind} to {number} endpoints" if kind.startswith("translated") else kind
        for kind, number in sorted(kinds.items())
    )
