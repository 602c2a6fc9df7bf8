"""Compares two rulesets for all packets. If all packets have the same outcome in both rulesets, the result is a proof
with the number of packet classes. Otherwise the result is a list of packets with different outcomes (witnesses),
grouped by cause.

The constants in both rulesets divide destinations into classes. Sources, protocols, ports and interfaces are divided
only if a rule on the path distinguishes them. A packet of each class is followed through both rulesets."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Final, NamedTuple

from kubeproxy.meaning import rules
from kubeproxy.meaning.flow import Interfaces, Leaf, PacketOutcome
from kubeproxy.meaning.rules import Addresses, CompiledRules, NodePlace
from kubeproxy.meaning.shapes import Shapes, Unit
from kubeproxy.meaning.walk import Walk
from kubeproxy.wording import counted

TOLERANCE: Final = 0.02
"""Two shares count as equal if their difference is less than this fraction of the larger share."""
EACH: Final = 1000
"""If a shape has differences, all units of this shape are compared, until this number of differences is found."""
_LEAST: Final = 1e-7
_LIKELY: Final = ("198.51.100.7", "2001:db8:51::7")
"""The source addresses of witnesses if any source is possible; both are reserved for documentation."""

Shares = tuple[tuple[PacketOutcome, float], ...]
"""Outcomes with their shares of connections."""


class FirstPacket(NamedTuple):
    """The first packet of a connection. `interface` is the incoming interface; '' for a connection from the node
    itself."""

    source: str
    destination: str
    protocol: int
    port: int
    interface: str
    output: str

    def __str__(self) -> str:
        name = rules.NAMES.get(self.protocol, f"protocol {self.protocol}")
        host = f"[{self.destination}]" if ":" in self.destination else self.destination
        place = f"in by {self.interface}" if self.interface else "made here"
        return f"{self.source} -> {host}:{self.port} {name}, {place}"


class Witness(NamedTuple):
    """A packet with different outcomes in the two rulesets, and its outcomes in each ruleset."""

    packet: FirstPacket
    first: Shares
    second: Shares

    @property
    def text(self) -> str:
        """The kind of the difference: the kinds of outcomes in both rulesets."""
        return f"{_described(self.first)} / {_described(self.second)}"


class WitnessGroup(NamedTuple):
    """Differences of one kind: the number of classes, and a witness."""

    classes: int
    witness: Witness


class Comparison(NamedTuple):
    """The result of a comparison. After the first EACH differences, `differences` contains only differences of
    one unit of each further shape."""

    classes: int
    causes: tuple[WitnessGroup, ...]
    unknown: tuple[str, ...]
    differences: tuple[Witness, ...]


def compare(first: CompiledRules, second: CompiledRules, place: NodePlace) -> Comparison:
    """Compare two rulesets for all packets. If a unit has no difference, no other unit of its shape is compared."""
    comparing, shapes = _Comparing(first, second, place), Shapes((first, second), place)
    known: dict[object, _Compared] = {}
    classes, causes, differences = 0, dict[str, WitnessGroup](), list[Witness]()
    for unit in shapes.units():
        shape = shapes.shape(unit)
        result = known.get(shape)
        if result is None or (result.causes and len(differences) < EACH):
            result = comparing.compared(unit)
            differences += result.causes
        if not result.leaves_out:
            known[shape] = result
        classes += result.classes
        for witness in result.causes:
            number, earliest = causes.get(witness.text, (0, witness))
            causes[witness.text] = WitnessGroup(number + 1, earliest)
    return Comparison(classes, tuple(causes.values()), tuple(sorted(comparing.unknown)), tuple(differences))


def outcomes(ruleset: CompiledRules, place: NodePlace, packet: FirstPacket) -> Shares:
    """Return the outcomes of one packet, each with its share of connections."""
    interfaces = Interfaces((ruleset,))
    walk = Walk(ruleset, place, interfaces)
    destination, source = (int(ipaddress.ip_address(text)) for text in (packet.destination, packet.source))
    services = rules.service(packet.protocol, packet.port) or rules.protocol_set(packet.protocol)
    leaves = walk.outcomes(destination, services, here=not packet.interface)
    box = Box(
        services, ((source, source),), interfaces.named(packet.interface), interfaces.named(packet.output or "other")
    )
    return _shares(leaves, box)


def alike(one: Shares, other: Shares) -> bool:
    """Return whether the outcomes are the same and their shares equal, within the tolerance."""
    shares, others = dict(one), dict(other)
    return shares.keys() == others.keys() and all(_close(share, others[each]) for each, share in shares.items())


class _Compared(NamedTuple):
    """The number of packet classes in a unit, and the unit's differences. `leaves_out` means that some elements are
    never picked, because no random number has their key; then units of the same shape may have different outcomes."""

    classes: int
    causes: tuple[Witness, ...]
    leaves_out: bool


class _Comparing:
    def __init__(self, first: CompiledRules, second: CompiledRules, place: NodePlace) -> None:
        self._place = place
        self._interfaces = Interfaces((first, second))
        self._walks = Walk(first, place, self._interfaces), Walk(second, place, self._interfaces)
        self.unknown: set[str] = set()

    def compared(self, unit: Unit) -> _Compared:
        classes, causes = 0, list[Witness]()
        for walk in self._walks:
            walk.leaves_out = False
        for here in (False, True):
            if not here and rules.holds(rules.LOOPBACK[self._place.bits], unit.destination):
                continue
            sides = [walk.outcomes(unit.destination, unit.services, here=here) for walk in self._walks]
            unknown = {leaf.outcome.text for side in sides for leaf in side if leaf.outcome.kind == "unknown"}
            self.unknown |= unknown
            classes += len({leaf[:4] for leaf in sides[0]})
            causes += [self._cause(unit.destination, box, sides) for box in (() if unknown else _unequal(*sides))]
        return _Compared(classes, tuple(causes), any(walk.leaves_out for walk in self._walks))

    def _cause(self, destination: int, box: Box, leaves: Sequence[Sequence[Leaf]]) -> Witness:
        family = ipaddress.IPv4Address if self._place.bits == 32 else ipaddress.IPv6Address
        packet = FirstPacket(
            str(family(_example(box.sources, self._place.bits))),
            str(family(destination)),
            *rules.first_of(box.services),
            self._interfaces.example(box.inputs),
            self._interfaces.example(box.outputs),
        )
        return Witness(packet, *(_shares(each, box) for each in leaves))


class Box(NamedTuple):
    """A set of packets to one destination."""

    services: int
    sources: Addresses
    inputs: int
    outputs: int


def _example(sources: Addresses, bits: int) -> int:
    likely = int(ipaddress.ip_address(_LIKELY[bits == 128]))
    return likely if rules.holds(sources, likely) else max(sources[0][0], min(1, sources[0][1]))


def _unequal(first: Sequence[Leaf], second: Sequence[Leaf]) -> list[Box]:
    sides: tuple[dict[PacketOutcome, dict[Box, float]], ...] = ({}, {})
    for side, leaves in zip(sides, (first, second), strict=True):
        for leaf in leaves:
            box = Box(*leaf[:4])
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
    alike = box.services & part.services and box.inputs & part.inputs and box.outputs & part.outputs
    return bool(alike) and rules.holds(box.sources, part.sources[0][0])


def _refined(boxes: Sequence[Box]) -> Iterator[Box]:
    """Divide boxes into smaller boxes, each of which is completely inside or completely outside of each given box."""
    edges = sorted({edge for box in boxes for low, high in box.sources for edge in (low, high + 1)})
    sources: dict[tuple[bool, ...], list[tuple[int, int]]] = defaultdict(list)
    for low, end in pairwise(edges):
        sources[tuple([rules.holds(box.sources, low) for box in boxes])].append((low, end - 1))
    masks = [_atoms(each) for each in zip(*((box.services, box.inputs, box.outputs) for box in boxes), strict=True)]
    for key, parts in sources.items():
        if any(key):
            for services, inputs, outputs in product(*masks):
                yield Box(services, tuple(parts), inputs, outputs)


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
        if _covers(Box(*leaf[:4]), part):
            found[leaf.outcome] += leaf.share
    return tuple(sorted(found.items()))


def _described(shares: Shares) -> str:
    kinds: dict[str, int] = defaultdict(int)
    for outcome, _ in shares:
        words = ", masqueraded" if outcome.masquerade else "", ", remembered" if outcome.remembered else ""
        kinds[outcome.kind + "".join(words)] += 1
    return " and ".join(
        f"{kind} to {counted(number, 'endpoint')}" if kind.startswith("translated") else kind
        for kind, number in sorted(kinds.items())
    )
