"""Represents rules as operations on a packet, in the same form for nf_tables and iptables.

A rule is a tuple of operations; a false test ends the rule. A ruleset is a set of chains; base chains are attached to
hooks. Sets of packet properties are values:

- a set of addresses is a sorted tuple of disjoint, inclusive intervals of integers
- a set of protocols and ports is an integer of four blocks of bits: bit `port` of block 0 stands for a port of TCP, of
  block 1 for UDP, of block 2 for SCTP; bit `protocol` of block 3 stands for any other protocol
- a set of interfaces is an integer with one bit for each interface
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple


class Op(IntEnum):
    """The kind of an operation, which is the operation's first item. The comments name the other items."""

    __hash__ = int.__hash__  # Enum's own hash is a function in Python, which is slower

    SOURCE = 0  # addresses
    DESTINATION = 1  # addresses
    SERVICE = 2  # services: a set of protocols and ports
    ORIGINAL_SERVICE = 3  # services, before translation
    INTERFACE = 4  # patterns, negated, outgoing
    VALUE = 5  # field, mask, xor, low, high, negated
    CHANCE = 6  # probability
    KNOWN = 7  # the name of a list of clients: whether the list contains the client
    FIND = 8  # table; whether the found data is a verdict
    MISSES = 9  # table: whether the table lacks the key
    MARK = 10  # mask, xor
    # Field (SOURCE, DESTINATION or PORT), and new value: bytes, or (offset, length) of bytes in the data of the element
    # that FIND found, or None for the value before any rule.
    WRITE = 11
    TRANSLATE = 12  # new address (or HERE) and new port: bytes or (offset, length), as for WRITE; None if unchanged
    MASQUERADE = 13  # the new source of snat, in the form of TRANSLATE's address; () if it is unknown
    REFUSE = 14  # whether the refusal is a TCP reset
    VERDICT = 15  # code, chain
    UNKNOWN = 16  # text
    REMEMBER = 17  # the set or list to which session affinity adds the client
    UNTRACK = 18  # text. No rule translates an untracked packet
    ZONE = 19  # text. Connections of a zone are tracked separately from other zones


class Property(IntEnum):
    """Properties of a packet that a rule reads as a number, or as part of a key."""

    __hash__ = int.__hash__

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
    STATES = 15  # conntrack states as iptables numbers them, and TRANSLATED_STATE


class CompiledFor(Enum):
    """The purpose of compiling, which determines the rules to compile and the packets to evaluate.

    If all rules of the node are compiled, a value that no rule sets is known to be unset."""

    EVERYTHING = "all rules of the node, and the first packets of connections"
    REQUEST = "some rules of the node, and the first packet of a connection"
    ANSWER = "some rules of the node, and a reply packet"

    @property
    def tcp_flags(self) -> int:
        """The TCP flags of the packet, except those of ECN: SYN for a first packet, SYN and ACK for a reply."""
        return 0x12 if self is CompiledFor.ANSWER else 0x02


HERE: Final = b""
"""Stands for the address of this node to which a redirect translates; as a number it is 0."""
TRANSLATING: Final = frozenset({"DNAT", "REDIRECT", "NETMAP"})
"""iptables targets that translate the destination of a connection."""
INVALID, ESTABLISHED, NEW = 1, 2, 8
"""Conntrack states (NF_CT_STATE_BIT); an untracked packet counts as INVALID."""
TRANSLATED: Final = 32  # IPS_DST_NAT
TRANSLATED_STATE: Final = 128  # XT_CONNTRACK_STATE_DNAT
DROP, ACCEPT, CONTINUE, JUMP, GOTO, RETURN = 0, 1, -1, -3, -4, -5
UNKNOWN_TRANSLATION: Final = ((Op.TRANSLATE, None, None), (Op.VERDICT, ACCEPT, ""))
"""The end of a rule that translates to an unknown destination, after an UNKNOWN operation."""

Operation = tuple[Any, ...]
Verdict = tuple[int, str]
"""A code and, for JUMP and GOTO, a chain."""


class KeyPart(NamedTuple):
    """A part of a key: the field; for RANDOM also the number of values and the first value."""

    field: Property
    modulus: int = 0
    offset: int = 0


class MapEntry(NamedTuple):
    """An element of a set or map: an inclusive range for each part of the key, and the data (b'' in a set)."""

    ranges: tuple[tuple[int, int], ...]
    data: bytes | Verdict


class Keyed:
    """The elements of a set or map, indexed by destination; if many elements share a destination, also by protocol and
    port."""

    def __init__(self, name: str, parts: tuple[KeyPart, ...], entries: Iterable[MapEntry]) -> None:
        self.name = name
        self.parts = parts
        self.entries = list(entries)
        self.at = {part.field: number for number, part in enumerate(parts)}
        self.random = self.at.get(Property.RANDOM)
        self.by_destination: dict[int, list[ServiceEntry]] = {}
        self.ranged: list[ServiceEntry] = []
        self._by_service: dict[int, dict[tuple[int, int], list[ServiceEntry]]] = {}
        destination, protocol, port = (
            self.at.get(field) for field in (Property.DESTINATION, Property.PROTOCOL, Property.PORT)
        )
        for entry in self.entries:
            ranges = entry.ranges
            services = _services(None if protocol is None else ranges[protocol], None if port is None else ranges[port])
            low, high = (-1, -1) if destination is None else ranges[destination]
            if low == high:
                self.by_destination.setdefault(low, []).append((services, entry))
            else:
                self.ranged.append((services, entry))

    def keyed_by(self, parts: tuple[KeyPart, ...]) -> Keyed:
        """Return these elements with the key `parts`, which differs from the present key only in the range of a random
        number."""
        new = copy(self)
        new.parts = parts
        return new

    def service(self, entry: MapEntry) -> tuple[int, int] | None:
        """Return the only protocol and port in an element's key; None if the key lacks either, or has a range."""
        protocol, port = self.at.get(Property.PROTOCOL), self.at.get(Property.PORT)
        if protocol is None or port is None:
            return None
        (first, last), (low, high) = entry.ranges[protocol], entry.ranges[port]
        return (first, low) if first == last and low == high else None

    def candidates(self, destination: int, services: int) -> list[ServiceEntry]:
        """Return the entries that may match a destination and a set of protocols and ports."""
        first = destination if Property.DESTINATION in self.at else -1
        found = self.by_destination.get(first, _NONE)
        if len(found) > _FEW and (only := point(services)) is not None:
            if first not in self._by_service:
                self._by_service[first] = {}
                for pair in found:
                    self._by_service[first].setdefault(self.service(pair[1]) or _ANY, []).append(pair)
            by_service = self._by_service[first]
            found = by_service.get(only, _NONE) + by_service.get(_ANY, _NONE)
        return found + self.ranged if self.ranged else found


@lru_cache(maxsize=65536)
def _services(protocol: tuple[int, int] | None, port: tuple[int, int] | None) -> int:
    found = -1 if protocol is None else protocol_range(*protocol)
    return found if port is None else found & port_range(*port)


ServiceEntry = tuple[int, MapEntry]
"""An entry, with the protocols and ports of its key."""
_FEW: Final = 24
_NONE: Final[list[ServiceEntry]] = []
_ANY: Final = (-1, -1)


class HookPlace(NamedTuple):
    """The hook of a base chain: its name in nft, priority, whether the type is nat, and whether the policy is drop."""

    name: str
    priority: int
    nat: bool
    drops: bool


class ChainRules:
    """A chain with an index of its rules: by single destination or, if no rule tests one, by protocol and port."""

    def __init__(self, name: str, rules: list[tuple[Operation, ...]], hook: HookPlace | None = None) -> None:
        self.name = name
        self.rules = rules
        self.hook = hook
        self.indexed_by = Op.DESTINATION
        self.index, self.free = self._sorted(_address)
        if not self.index:
            self.indexed_by = Op.SERVICE
            self.index, self.free = self._sorted(_service)

    def _sorted(self, key: Callable[[Operation], Any]) -> tuple[dict[Any, list[int]], list[int]]:
        index: dict[Any, list[int]] = {}
        free = []
        for number, rule in enumerate(self.rules):
            found = None
            for op in rule:
                if op[0] not in _TESTS or (found := key(op)) is not None:
                    break
            if found is None:
                free.append(number)
            else:
                index.setdefault(found, []).append(number)
        return index, free

    def candidates(self, destination: int, services: int) -> Sequence[int]:
        """Return the numbers of the rules that may match, in order."""
        if self.indexed_by is Op.DESTINATION:
            own = self.index.get(destination)
        elif not self.index or (only := point(services)) is None:
            return range(len(self.rules))
        else:
            own = self.index.get(only)
        return sorted(own + self.free) if own else self.free


LOOPBACK: Final[dict[int, Addresses]] = {32: ((127 << 24, (128 << 24) - 1),), 128: ((1, 1),)}
"""Destinations to which the kernel accepts packets only from the loopback interface. The keys are the lengths of an
address in bits: 32 for IPv4, 128 for IPv6."""


def single(addresses: Addresses) -> bool:
    """Return whether a set has exactly one address."""
    return len(addresses) == 1 and addresses[0][0] == addresses[0][1]


def _address(op: Operation) -> int | None:
    return op[1][0][0] if op[0] is Op.DESTINATION and single(op[1]) else None


def _service(op: Operation) -> tuple[int, int] | None:
    return point(op[1]) if op[0] is Op.SERVICE else None


_TESTS: Final = frozenset({Op.SOURCE, Op.DESTINATION, Op.SERVICE, Op.INTERFACE, Op.VALUE})


class CompiledRules:
    """The chains of all tables, by unique names such as `iptables/nat/PREROUTING`."""

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
        """Return the sets and maps of all lookups, without duplicates."""
        used = (op[1] for op in self.operations() if op[0] in {Op.FIND, Op.MISSES})
        return list({id(table.entries): table for table in used}.values())

    def operations(self) -> Iterator[Operation]:
        """Yield all operations."""
        for chain in self.chains.values():
            for rule in chain.rules:
                yield from rule


class NodePlace(NamedTuple):
    """The node, in one family: the number of bits of an address, and the node's own addresses."""

    bits: int
    local: Addresses

    @property
    def everywhere(self) -> Addresses:
        """All addresses."""
        return ((0, (1 << self.bits) - 1),)

    def unless(self, negated: bool, addresses: Addresses) -> Addresses:
        """Return these addresses, or all other addresses if the test is `negated`."""
        return minus(self.everywhere, addresses) if negated else addresses


Addresses = tuple[tuple[int, int], ...]
"""Sorted, disjoint, inclusive intervals."""

TCP, UDP, SCTP = 6, 17, 132
BLOCKS: Final = {TCP: 0, UDP: 1, SCTP: 2}
NAMES: Final = {TCP: "tcp", UDP: "udp", SCTP: "sctp"}
PORTS: Final = 1 << 16
_BLOCK: Final = (1 << PORTS) - 1
OTHERS: Final = ((1 << 256) - 1 & ~sum(1 << each for each in BLOCKS)) << 3 * PORTS
EVERY: Final = (1 << 3 * PORTS) - 1 | OTHERS
"""All protocols and ports."""


def meet(first: Addresses, second: Addresses) -> Addresses:
    """Return the intersection of two address sets."""
    return tuple([(max(a, c), min(b, d)) for a, b in first for c, d in second if a <= d and b >= c])


def minus(first: Addresses, second: Addresses) -> Addresses:
    """Return the addresses that are in the first set but not in the second."""
    for low, high in second:
        left = []
        for a, b in first:
            if b < low or a > high:
                left.append((a, b))
                continue
            if a < low:
                left.append((a, low - 1))
            if b > high:
                left.append((high + 1, b))
        first = tuple(left)
    return first


def union(parts: Iterable[tuple[int, int]]) -> Addresses:
    """Return the address set of intervals that may overlap or touch."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def holds(addresses: Addresses, value: int) -> bool:
    """Return whether an address is in a set."""
    at = bisect_right(addresses, (value, 1 << 128))
    return at > 0 and addresses[at - 1][1] >= value


@lru_cache(maxsize=65536)
def service(protocol: int, port: int) -> int:
    """Return the set of one protocol and port."""
    return 1 << (BLOCKS[protocol] * PORTS + port) if protocol in BLOCKS else 0


@lru_cache(maxsize=256)
def protocol_set(protocol: int) -> int:
    """Return the set of all ports of a protocol."""
    return _BLOCK << BLOCKS[protocol] * PORTS if protocol in BLOCKS else 1 << (3 * PORTS + protocol)


@lru_cache(maxsize=256)
def protocol_range(low: int, high: int) -> int:
    """Return the set of all ports of the protocols in a range."""
    found = 0
    for each in range(low, high + 1):
        found |= protocol_set(each)
    return found


@lru_cache(maxsize=4096)
def port_range(low: int, high: int) -> int:
    """Return the set of a range of ports, of all protocols that have ports."""
    block = ((1 << (high - low + 1)) - 1) << low
    return block | block << PORTS | block << 2 * PORTS


@lru_cache(maxsize=65536)
def point(services: int) -> tuple[int, int] | None:
    """Return the protocol and port (0 without ports) of a set's only element, or None for any other set."""
    if services.bit_count() != 1:
        return None
    return first_of(services)


def first_of(services: int) -> tuple[int, int]:
    """Return the protocol and port of a set's first element."""
    bit = (services & -services).bit_length() - 1
    block, port = divmod(bit, PORTS)
    return ((TCP, UDP, SCTP)[block], port) if block < 3 else (bit - 3 * PORTS, 0)
