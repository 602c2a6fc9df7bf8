"""Rules as operations on a packet, the same for nf_tables and iptables.

A rule is a tuple of operations; a test that is false ends it. A ruleset is a set of chains; base chains are attached to
hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple

from kubeproxy.meaning.regions import Addresses, point, port_range, protocol_set, service


class Op(IntEnum):
    """The kind of an operation, which is its first item; the comment names the other items."""

    SOURCE = 0  # addresses
    DESTINATION = 1  # addresses
    SERVICE = 2  # services: protocol and port
    ORIGINAL_SERVICE = 3  # services, before translation
    INTERFACE = 4  # patterns, negated, outgoing
    VALUE = 5  # field, mask, xor, low, high, negated
    CHANCE = 6  # probability
    FIND = 7  # table, for a verdict
    MISSES = 8  # table: true if the key is not in the table
    MARK = 9  # mask, xor
    WRITE = 10  # field (DESTINATION or SERVICE), source: (offset, length) of the found data, bytes, None for original
    TRANSLATE = 11  # address, port: each bytes, (offset, length) of the found data, or None
    MASQUERADE = 12
    REFUSE = 13
    VERDICT = 14  # code, chain
    UNKNOWN = 15  # text
    REMEMBER = 16  # the client, for session affinity


class Property(IntEnum):
    """Properties of a packet that a rule reads as a number, or as part of a key."""

    SOURCE = 0
    DESTINATION = 1
    PROTOCOL = 2
    PORT = 3
    INPUT = 4
    OUTPUT = 5
    MARK = 6
    STATE = 7
    STATUS = 8
    RANDOM = 9
    ORIGINAL_DESTINATION = 10
    ORIGINAL_PORT = 11
    DESTINATION_LOCAL = 12
    CONSTANT = 13
    SOURCE_PORT = 14
    STATES = 15  # of connection tracking as iptables numbers them, with TRANSLATED_STATE


class CompiledFor(Enum):
    """The rules and packets for which a ruleset is compiled.

    With all rules, a value that none of them sets is known to be unset.
    """

    EVERYTHING = "all rules of the node, the first packets of connections"
    REQUEST = "some rules of the node, the first packet of a connection"
    ANSWER = "some rules of the node, a packet that answers"

    @property
    def tcp_flags(self) -> int:
        """The TCP flags, without those of ECN: SYN, in the first answer SYN and ACK."""
        return 0x12 if self is CompiledFor.ANSWER else 0x02


INVALID, ESTABLISHED, NEW = 1, 2, 8
"""States of connection tracking (NF_CT_STATE_BIT); a packet that is not tracked yet has INVALID, too."""
TRANSLATED: Final = 32  # IPS_DST_NAT
TRANSLATED_STATE: Final = 128  # XT_CONNTRACK_STATE_DNAT
DROP, ACCEPT, CONTINUE, JUMP, GOTO, RETURN = 0, 1, -1, -3, -4, -5

Operation = tuple[Any, ...]
Verdict = tuple[int, str]
"""A code and, for JUMP and GOTO, a chain."""


class KeyPart(NamedTuple):
    """One part of a key: the field, and for RANDOM the number of values and the first value."""

    field: Property
    modulus: int = 0
    offset: int = 0


class MapEntry(NamedTuple):
    """An element of a set or map: an inclusive range for each part of the key, and data, b'' in a set."""

    ranges: tuple[tuple[int, int], ...]
    data: bytes | Verdict


class Keyed:
    """Elements of a set or map, indexed by destination, and by destination, protocol and port."""

    def __init__(self, name: str, parts: tuple[KeyPart, ...], entries: Iterable[MapEntry]) -> None:
        self.name = name
        self.parts = parts
        self.entries = list(entries)
        fields = [part.field for part in parts]
        self.at = {field: number for number, field in enumerate(fields)}
        self.random = self.at.get(Property.RANDOM)
        self.by_service: dict[tuple[int, int, int], list[tuple[int, MapEntry]]] = {}
        self.by_destination: dict[int, list[tuple[int, MapEntry]]] = {}
        self.ranged: list[tuple[int, MapEntry]] = []
        self._index()

    def _index(self) -> None:
        destination, protocol, port = (
            self.at.get(f, -1) for f in (Property.DESTINATION, Property.PROTOCOL, Property.PORT)
        )
        fixed = [number for number in (destination, protocol, port) if number >= 0]
        by_service, by_destination = self.by_service, self.by_destination
        for entry in self.entries:
            ranges = entry.ranges
            services = self._services(ranges, protocol, port)
            if any(ranges[number][0] != ranges[number][1] for number in fixed):
                self.ranged.append((services, entry))
                continue
            first = ranges[destination][0] if destination >= 0 else -1
            key = (
                first,
                ranges[protocol][0] if protocol >= 0 else -1,
                ranges[port][0] if port >= 0 else -1,
            )
            pair = (services, entry)
            if key in by_service:
                by_service[key].append(pair)
            else:
                by_service[key] = [pair]
            if first in by_destination:
                by_destination[first].append(pair)
            else:
                by_destination[first] = [pair]

    def keyed_by(self, parts: tuple[KeyPart, ...]) -> Keyed:
        """Return the same elements under another key with the same fields but another range of random numbers."""
        new = copy(self)
        new.parts = parts
        return new

    @staticmethod
    def _services(ranges: tuple[tuple[int, int], ...], protocol: int, port: int) -> int:
        """Return the protocols and ports of a key, -1 (all bits) for a key without both."""
        if protocol < 0:
            return -1 if port < 0 else port_range(*ranges[port])
        low, high = ranges[protocol]
        if low == high and port >= 0 and ranges[port][0] == ranges[port][1]:
            return service(low, ranges[port][0])
        found = 0
        for each in range(low, high + 1):
            found |= protocol_set(each)
        return found & port_range(*ranges[port]) if port >= 0 else found

    def candidates(self, destination: int, services: int) -> list[tuple[int, MapEntry]]:
        """Return the entries that can match a destination and a set of services."""
        at = self.at
        first = destination if Property.DESTINATION in at else -1
        found = self.by_destination.get(first, _NONE)
        if len(found) > _FEW and (only := point(services)) is not None:
            key = first, only[0] if Property.PROTOCOL in at else -1, only[1] if Property.PORT in at else -1
            found = self.by_service.get(key, _NONE)
        return found + self.ranged if self.ranged else found


_FEW: Final = 24
_NONE: Final[list[tuple[int, MapEntry]]] = []


class HookPlace(NamedTuple):
    """The hook of a base chain: nft's name of the hook, the priority, whether the type is nat, and the policy."""

    name: str
    priority: int
    nat: bool
    drops: bool


class ChainRules:
    """A chain: its rules, indexed by the destination that they test, and its place for messages."""

    def __init__(self, name: str, rules: list[tuple[Operation, ...]], hook: HookPlace | None = None) -> None:
        self.name = name
        self.rules = rules
        self.hook = hook
        self._by_destination: dict[int, list[int]] = {}
        self._by_service: dict[int, list[int]] = {}
        self._free: list[int] = []
        self._portless: list[int] = []
        for number, rule in enumerate(rules):
            self._sort(number, rule)

    def _sort(self, number: int, rule: tuple[Operation, ...]) -> None:
        for op in rule:
            if op[0] == Op.DESTINATION and len(op[1]) == 1 and op[1][0][0] == op[1][0][1]:
                self._by_destination.setdefault(op[1][0][0], []).append(number)
                return
            if op[0] not in _TESTS:
                break
        self._free.append(number)
        for op in rule:
            if op[0] == Op.SERVICE and op[1].bit_count() == 1:
                self._by_service.setdefault(op[1], []).append(number)
                return
            if op[0] not in _TESTS:
                break
        self._portless.append(number)

    def candidates(self, destination: int, services: int) -> list[int]:
        """Return the numbers of the rules that can match, in order."""
        own = self._by_destination.get(destination)
        rest = self._free
        if self._by_service and services.bit_count() == 1:
            theirs = self._by_service.get(services)
            rest = sorted(self._portless + theirs) if theirs else self._portless
        return sorted(own + rest) if own else rest


_TESTS: Final = frozenset({Op.SOURCE, Op.DESTINATION, Op.SERVICE, Op.INTERFACE, Op.VALUE})


class CompiledRules:
    """The chains of all tables. A chain's name is unique: table and chain, separated by a slash."""

    def __init__(self, chains: Iterable[ChainRules]) -> None:
        self.chains = {chain.name: chain for chain in chains}
        hooked = [chain for chain in self.chains.values() if chain.hook is not None]
        hooked.sort(key=lambda chain: chain.hook.priority if chain.hook else 0)
        self._at: dict[str, list[ChainRules]] = {}
        for chain in hooked:
            if chain.hook is not None:
                self._at.setdefault(chain.hook.name, []).append(chain)

    def at(self, hook: str) -> list[ChainRules]:
        """Return the base chains of a hook, by priority."""
        return self._at.get(hook, [])

    def tables(self) -> list[Keyed]:
        """Return the sets and maps of all lookups; those with the same elements only once."""
        used = (op[1] for op in self.operations() if op[0] in {Op.FIND, Op.MISSES})
        return list({id(table.entries): table for table in used}.values())

    def operations(self) -> Iterator[Operation]:
        """Yield all operations."""
        for chain in self.chains.values():
            for rule in chain.rules:
                yield from rule


class NodePlace(NamedTuple):
    """The node: the size of addresses in bits, and its own addresses."""

    bits: int
    local: Addresses

    @property
    def everywhere(self) -> Addresses:
        """All addresses."""
        return ((0, (1 << self.bits) - 1),)
