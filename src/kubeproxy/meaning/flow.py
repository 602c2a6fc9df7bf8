"""Sets of packets on their path through rules, and their outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.meaning import rules
from kubeproxy.meaning.rules import Addresses, CompiledRules, Op


class PacketOutcome(NamedTuple):
    """The outcome of a packet. The kind is 'passed', 'translated', 'refused', 'dropped' or 'unknown'.

    A translated packet has a new destination; port -1 means that the port is unchanged. The `text` of an unknown
    outcome is the unsupported expression. `masquerade` means that the packet gets a new source. `remembered` means that
    session affinity gives the client's next connection the same outcome."""

    kind: str
    address: int = 0
    port: int = -1
    masquerade: bool = False
    remembered: bool = False
    text: str = ""


Client = tuple[str, int | None, bytes]
"""An element that a rule stores for a packet's client: the set's name, PacketSet.hidden, and the element's data."""


class Leaf(NamedTuple):
    """A set of packets, an outcome, and the share of their connections with this outcome. `stored` are elements that
    rules store for the client."""

    services: int
    sources: Addresses
    inputs: int
    outputs: int
    share: float
    outcome: PacketOutcome
    stored: tuple[Client, ...] = ()


class PacketSet(Struct, eq=False):
    """A flow, which is a set of packets on their path. `services` is the set of protocols and destination ports before
    translation; `current` is the set after translation, or None before. `hidden` is the number that a rule has written
    into the source address; a later test of this address has an unknown result. `known` are elements that an earlier
    connection has stored for the client; `stored` are elements that this connection stores."""

    services: int
    sources: Addresses
    inputs: int
    outputs: int
    destination: int
    share: float = 1.0
    current: int | None = None
    mark: int = 0
    translated: bool = False
    masquerade: bool = False
    new_source: Any = b""
    refused: str = ""
    known: tuple[Client, ...] = ()
    stored: tuple[Client, ...] = ()
    hidden: int | None = None
    found: Any = b""
    unknown: str = ""
    untracked: bool = False
    zoned: bool = False

    def copy(self) -> PacketSet:
        """Return a flow with the same values."""
        return replace(self)

    def within(self, services: int) -> PacketSet:
        """Return the part of the flow with these protocols and ports, which must be a subset of the flow's."""
        return replace(self, services=services) if self.current is None else replace(self, current=services)


Ended = list[tuple[PacketSet, int]]
"""Flows that reached ACCEPT or DROP, each with this verdict."""


class Interfaces:
    """Maps names of interfaces to bits: one bit for each name and pattern in the rules, for no interface (NONE), for lo
    (LOOPBACK), and for all other names (OTHER)."""

    NONE: Final = 1
    LOOPBACK: Final = 2
    OTHER: Final = 4

    def __init__(self, rulesets: Iterable[CompiledRules], others: Iterable[str] = ()) -> None:
        patterns = {name for each in rulesets for op in each.operations() if op[0] == Op.INTERFACE for name in op[1]}
        names = sorted({pattern.replace("*", "0") for pattern in patterns}.union(others) - {"lo", ""})
        self.names = {self.NONE: "", self.LOOPBACK: "lo", self.OTHER: "other"}
        self.names |= {8 << number: name for number, name in enumerate(names)}
        self.every = sum(self.names) & ~self.NONE & ~self.LOOPBACK
        self._bits = {pattern: self._matching(pattern) for pattern in patterns}

    def _matching(self, pattern: str) -> int:
        if pattern.endswith("*"):
            return sum(bit for bit, name in self.names.items() if name.startswith(pattern[:-1]))
        return sum(bit for bit, name in self.names.items() if name == pattern)

    def of(self, patterns: tuple[str, ...]) -> int:
        """Return the bits of the names that match at least one of these patterns."""
        found = 0
        for pattern in patterns:
            found |= self._bits[pattern]
        return found

    def named(self, name: str) -> int:
        """Return the bit of a name; OTHER for a name that occurs in no rule."""
        return next((bit for bit, known in self.names.items() if known == name), self.OTHER)

    def example(self, bits: int) -> str:
        """Return the name of one interface in a set."""
        return self.names[bits & -bits] if bits else ""


# -- functions that split a flow: each returns the matching part, and appends the rest to `missed` ---------------------


def by_bits(
    field: Literal["services", "current", "inputs", "outputs"], wanted: int, flow: PacketSet, missed: list[PacketSet]
) -> PacketSet | None:
    """Split a flow by a field that is a set of bits."""
    mine: int = getattr(flow, field)
    return _split(flow, field, mine, mine & wanted, mine & ~wanted, missed)


def by_source(wanted: Addresses, flow: PacketSet, missed: list[PacketSet]) -> PacketSet | None:
    """Split a flow by the source address."""
    if flow.hidden is not None:
        flow.unknown = "a source address that a rule has written"
        return flow
    inside = rules.meet(flow.sources, wanted)
    outside = rules.minus(flow.sources, wanted) if inside and inside != flow.sources else ()
    return _split(flow, "sources", flow.sources, inside, outside, missed)


def _split(
    flow: PacketSet, field: str, mine: Part, inside: Part, outside: Part, missed: list[PacketSet]
) -> PacketSet | None:
    if inside == mine:
        return flow
    if not inside:
        missed.append(flow)
        return None
    missed.append(replace(flow, **{field: outside}))
    return replace(flow, **{field: inside})


Part = TypeVar("Part", int, Addresses)


def by_chance(flow: PacketSet, chance: float, missed: list[PacketSet]) -> PacketSet | None:
    """Split a flow at random; the returned part has this share of the packets."""
    if chance >= 1:
        return flow
    missed.append(replace(flow, share=flow.share * (1 - chance)))
    return replace(flow, share=flow.share * chance) if chance > 0 else None
