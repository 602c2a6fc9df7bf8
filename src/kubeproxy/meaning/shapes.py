"""Divides packets into units, and computes the shape of each unit. The comparison of two rulesets follows one unit of
each shape.

A unit consists of the packets to one destination address, either with one protocol and port that a rule contains, or
with all protocols and ports that no rule contains. The shape of a unit lists all rules and elements that the unit's
packets can reach. In this list, numbers replace the unit's addresses, ports and chains, in the order of their first
appearance. The shape also lists, for each address or port, the rules' sets that contain the address or port. Units of
one shape therefore have the same outcomes, except for the replaced addresses and ports."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

from kubeproxy.meaning import rules
from kubeproxy.meaning.rules import (
    Addresses,
    CompiledRules,
    Keyed,
    NodePlace,
    Op,
    Operation,
    Property,
    ServiceEntry,
    single,
)

_ADDRESSES: Final = frozenset({Property.SOURCE, Property.DESTINATION, Property.ORIGINAL_DESTINATION})
_SERVICES: Final = frozenset({Op.SERVICE, Op.ORIGINAL_SERVICE})
_LOOKUPS: Final = frozenset({Op.FIND, Op.MISSES})

_PORT: Final = -1

Service = tuple[int, int]
"""A protocol with a port."""


class Unit(NamedTuple):
    """Packets to a destination, either with one protocol and port (`only`), or with all protocols and ports except
    `others`. `services` is the packets' set of protocols and ports, encoded as in meaning/rules.py."""

    destination: int
    services: int
    only: Service | None
    others: tuple[Service, ...]


class _IndexedRule(NamedTuple):
    """A rule with an address or a port in a common chain; `before` is the number of the chain's earlier rules without
    address and port."""

    chain: str
    before: int
    rule: tuple[Operation, ...]


class _Elements(NamedTuple):
    table: Keyed
    pairs: list[ServiceEntry]


class _Layout(NamedTuple):
    """The layout of a table's entries: the table's number; the positions of the key's fields, except an indexed
    destination; the positions of addresses and ports in the data; and the key by which entries are sorted."""

    number: int | None
    fields: tuple[tuple[int, Property], ...]
    operands: list[tuple[Property, slice]]
    order: Callable[[ServiceEntry], bytes]


class _Side:
    """An index of the addresses and ports in a ruleset's elements, and in the rules of its common chains.

    A chain is common if it is a base chain, or if a rule of a common chain jumps to it without a test of one particular
    address or port. Other chains are parts of shapes."""

    def __init__(self, rules: CompiledRules) -> None:
        self.chains = rules.chains
        self.named: dict[int | Service, list[_IndexedRule | _Elements]] = defaultdict(list)
        self.addresses: set[Addresses] = set()
        self.services: dict[int, int] = {}
        self.values: set[Operation] = set()
        self.layouts: dict[int, _Layout] = {}
        self.common: set[str] = set()
        self._todo: list[str] = []
        self.clients: set[str] = set()
        for number, table in enumerate(rules.tables()):
            self.layouts[id(table.entries)] = self._layout(number, table)
            self._elements(table)
        for chain in rules.chains.values():
            for rule in chain.rules:
                self._sets(rule)
        self._todo += [name for name, chain in rules.chains.items() if chain.hook]
        for name in self._todo:
            if name not in self.common:
                self.common.add(name)
                self._chain(name)
                self.clients.update(found for rule in self.chains[name].rules for op in rule if (found := _clients(op)))

    def _layout(self, number: int, table: Keyed) -> _Layout:
        fields = tuple(
            [(at, part.field) for at, part in enumerate(table.parts) if part.field is not Property.DESTINATION]
        )
        named = _is_named(table)
        has_verdicts = bool(table.entries) and not isinstance(table.entries[0].data, bytes)
        return _Layout(number if named else None, fields, [], self._target if has_verdicts else _data)

    def _elements(self, table: Keyed) -> None:
        """Index the elements of a table. An element that is not indexed may match packets of every unit."""
        for entry in table.entries if {Property.SOURCE, Property.ORIGINAL_DESTINATION} & table.at.keys() else ():
            pairs = [entry.ranges[at] for field, at in table.at.items() if field in _ADDRESSES]
            self.addresses |= {(pair,) for pair in pairs if pair[0] != pair[1]}
        if not _is_named(table):
            return
        groups: dict[Any, list[ServiceEntry]] = {**table.by_destination}
        for pair in groups.pop(-1, ()):
            groups.setdefault(table.service(pair[1]), []).append(pair)
        free = table.ranged + groups.pop(None, [])
        for key, group in groups.items():
            self.named[key].append(_Elements(table, group))
        self._free(table, free)

    def _free(self, table: Keyed, pairs: Iterable[ServiceEntry]) -> None:
        for services, entry in pairs:
            self.addresses |= {(entry.ranges[at],) for field, at in table.at.items() if field in _ADDRESSES}
            self.services[id(services)] = services
            if not isinstance(entry.data, bytes) and entry.data[1]:
                self._todo.append(entry.data[1])

    def _chain(self, name: str) -> None:
        """Index a common chain's rules by address or port; queue the target chains of rules that contain neither."""
        chain = self.chains[name]
        for key, numbers in chain.index.items():
            self.named[key] += [_IndexedRule(name, bisect_right(chain.free, at), chain.rules[at]) for at in numbers]
        for op in (op for number in chain.free for op in chain.rules[number]):
            if op[0] is Op.VERDICT and op[2]:
                self._todo.append(op[2])
            elif op[0] in _LOOKUPS and not _is_named(op[1]):
                self._free(op[1], [*op[1].ranged, *op[1].by_destination.get(-1, ())])
            elif op[0] is Op.SOURCE or op[0] is Op.DESTINATION:
                self.addresses.add(op[1])
            elif op[0] in _SERVICES:
                self.services[id(op[1])] = op[1]

    def _sets(self, rule: tuple[Operation, ...]) -> None:
        table = None
        for op in rule:
            kind = op[0]
            if kind in _LOOKUPS:
                table = op[1]
            elif kind is Op.SOURCE or kind is Op.DESTINATION:
                if not single(op[1]):
                    self.addresses.add(op[1])
            elif kind in _SERVICES:
                if id(op[1]) not in self.services and rules.point(op[1]) is None:
                    self.services[id(op[1])] = op[1]
            elif kind is Op.VALUE and op[1] is Property.ORIGINAL_DESTINATION:
                self.values.add(op[2:])
            elif table is not None and kind in {Op.WRITE, Op.TRANSLATE}:
                operands = self.layouts[id(table.entries)].operands
                found = [(field, slice(at[0], sum(at))) for field, at in _written(op) if isinstance(at, tuple)]
                operands += [each for each in found if each not in operands]

    def _target(self, pair: ServiceEntry) -> bytes:
        name: str = pair[1].data[1]  # type: ignore[assignment]
        rules = self.chains[name].rules if name else ()
        ends = [op[1] for rule in rules for op in rule if op[0] is Op.TRANSLATE]
        return ends[0] if ends and isinstance(ends[0], bytes) else name.encode()


def _data(pair: ServiceEntry) -> bytes:
    return pair[1].data  # type: ignore[return-value]


def _is_named(table: Keyed) -> bool:
    return Property.DESTINATION in table.at or (Property.PROTOCOL in table.at and Property.PORT in table.at)


def _clients(op: Operation) -> str:
    if op[0] in _LOOKUPS:
        return "" if op[1].entries else op[1].name
    return op[1] if op[0] is Op.REMEMBER or op[0] is Op.KNOWN else ""


def _written(op: Operation) -> list[tuple[Property, Any]]:
    if op[0] is Op.WRITE:
        return [(op[1], op[2])]
    return [(Property.DESTINATION, op[1]), (Property.PORT, op[2])]


class Shapes:
    """The units of two rulesets, and their shapes."""

    def __init__(self, rulesets: Sequence[CompiledRules], place: NodePlace) -> None:
        self.sides = [_Side(rules) for rules in rulesets]
        self._place = place
        sets = {place.local, rules.LOOPBACK[place.bits]}.union(*(side.addresses for side in self.sides))
        turns: dict[int, int] = defaultdict(int, {0: 0, 1 << place.bits: 0})
        for number, addresses in enumerate(sets):
            for low, high in addresses:
                turns[low] ^= 1 << number
                turns[high + 1] ^= 1 << number
        self._edges, self._inside, inside = sorted(turns), [], 0
        for edge in self._edges:
            inside ^= turns[edge]
            self._inside.append(inside)
        self._values = {value for side in self.sides for value in side.values}
        self._services = sorted({each for side in self.sides for each in side.services.values()})
        self.services = sorted({key for side in self.sides for key in side.named if isinstance(key, tuple)})
        self.named = {key for side in self.sides for key in side.named if isinstance(key, int)}
        self._ports = {port for _, port in self.services}
        self._port_sets: dict[int, object] = {}
        self._numbers: dict[Operation, int] = {}
        self._known: dict[int, int | Service] = {}

    def units(self) -> Iterator[Unit]:
        """Yield units that together contain a packet of each class."""
        free: dict[int, int] = {}
        for inside, (low, end) in zip(self._inside, pairwise(self._edges), strict=False):
            if inside not in free:
                found = next((each for each in range(low, end) if each not in self.named), None)
                if found is not None:
                    free[inside] = found
        for destination in sorted(self.named.union(free.values())):
            services = {each for side in self.sides for each in _services_at(side.named.get(destination, ()))}
            if rules.holds(self._place.local, destination):
                services.update(self.services)
            others = tuple(sorted(services))
            for only in others:
                yield Unit(destination, rules.service(*only), only, ())
            yield Unit(destination, _rest(others), None, others)

    def shape(self, unit: Unit) -> object:
        """Return the shape of a unit. Units with equal shapes have equal outcomes, except for addresses and ports."""
        return _Shaping(self, unit).shape()

    def sets_of(self, address: int) -> object:
        """Return the sets that contain an address."""
        inside = self._inside[bisect_right(self._edges, address) - 1]
        if not self._values:
            return inside
        return inside, *(low <= (address & mask) ^ xor <= high for mask, xor, low, high, _ in self._values)

    def sets_of_port(self, port: int, *, own: bool) -> object:
        """Return the sets that contain a port. `own` means that the port is the unit's only port; any other port that
        rules name is returned itself."""
        found = self._port_sets.get(port)
        if found is None:
            each = range(port, 3 * rules.PORTS, rules.PORTS)
            found = self._port_sets[port] = tuple([services >> at & 1 for services in self._services for at in each])
        return found if own or port not in self._ports else port

    def literal(self, op: Operation) -> int | Service:
        """Return the only protocol and port that an operation tests, else a number that stands for the operation."""
        found = self._known.get(id(op))
        if found is None:
            if op[0] in _SERVICES:
                found = rules.point(op[1])
            if found is None:
                found = self._numbers.setdefault(op, len(self._numbers))
            self._known[id(op)] = found
        return found


@lru_cache(maxsize=1024)
def _rest(services: tuple[Service, ...]) -> int:
    found = rules.EVERY
    for each in services:
        found &= ~rules.service(*each)
    return found


def _services_at(mentions: Iterable[_IndexedRule | _Elements]) -> Iterator[Service]:
    for mention in mentions:
        if isinstance(mention, _Elements):
            found = [mention.table.service(entry) for _, entry in mention.pairs]
        else:
            found = [rules.point(op[1]) for op in mention.rule if op[0] is Op.SERVICE]
        yield from (each for each in found if each is not None and each[0] in rules.BLOCKS)


class _Shaping:
    def __init__(self, shapes: Shapes, unit: Unit) -> None:
        self._shapes = shapes
        self._unit = unit
        self._parts: list[object] = []
        self._addresses: dict[int, int] = {}
        self._ports: dict[int, int] = {}
        self._chains: dict[tuple[int, str], int] = {}
        self._names: dict[tuple[int, str], int] = {}
        self._reached: set[int] = set()
        self._todo: list[int | tuple[int, Any]] = []

    def shape(self) -> object:
        destination, services, only, others = self._unit
        parts = self._parts
        parts.append(self._address(destination))
        parts.append(tuple([(protocol, self._port(port)) for protocol, port in (*others, *([only] if only else []))]))
        for number, side in enumerate(self._shapes.sides):
            self._mentions(number, side.named.get(destination, ()), services)
            if only:
                self._mentions(number, side.named.get(only, ()), services)
        for each in self._todo:
            if isinstance(each, int):
                parts.append(self._addresses[each])
                for number, side in enumerate(self._shapes.sides):
                    self._mentions(number, side.named.get(each, ()), -1)
            elif each[0] == _PORT:
                for number, side in enumerate(self._shapes.sides):
                    self._mentions(number, side.named.get(destination, ()), rules.port_range(each[1], each[1]))
            else:
                own = self._shapes.sides[each[0]].chains[each[1]].rules
                parts += [self._rule(each[0], rule) for rule in own]
                parts.append(len(own))
        return tuple(parts)

    # -- names -------------------------------------------------------------------------------------------------------

    def _address(self, address: int) -> object:
        number = self._addresses.get(address)
        if number is None:
            number = self._addresses[address] = len(self._addresses)
            return number, self._shapes.sets_of(address)
        return number

    def _port(self, port: int) -> object:
        number = self._ports.get(port)
        if number is None:
            number = self._ports[port] = len(self._ports)
            own = self._unit.only is not None and self._unit.only[1] == port
            return number, self._shapes.sets_of_port(port, own=own)
        return number

    def _chain(self, side: int, name: str) -> object:
        if not name or name in self._shapes.sides[side].common:
            return name
        number = self._chains.get((side, name))
        if number is None:
            number = self._chains[side, name] = len(self._chains)
            self._todo.append((side, name))
        return number

    def _clients(self, side: int, op: Operation) -> object:
        """Return the name of a set of clients if a common chain uses the set, else the set's number in the shape."""
        name = _clients(op)
        return (
            name
            if name in self._shapes.sides[side].clients
            else ("", self._names.setdefault((side, name), len(self._names)))
        )

    def _operand(self, field: Property, value: bytes) -> object:
        number = int.from_bytes(value, "big")
        if field is Property.PORT:
            if number not in self._ports:
                self._todo.append((_PORT, number))
            return self._port(number)
        self._reach(number)
        return self._address(number)

    def _reach(self, address: int) -> None:
        if address in self._shapes.named and address not in self._reached:
            self._reached.add(address)
            self._todo.append(address)

    # -- rules -------------------------------------------------------------------------------------------------------

    def _mentions(self, side: int, mentions: Iterable[_IndexedRule | _Elements], services: int) -> None:
        for mention in mentions:
            if isinstance(mention, _Elements):
                self._entries(side, mention.table, mention.pairs, services)
            elif all(op[1] & services for op in mention.rule if op[0] is Op.SERVICE):
                self._parts.append((side, mention.chain, mention.before, self._rule(side, mention.rule)))

    def _rule(self, side: int, rule: tuple[Operation, ...]) -> tuple[object, ...]:
        return tuple([self._operation(side, op) for op in rule])

    def _operation(self, side: int, op: Operation) -> object:
        kind = op[0]
        found: object = None
        if kind is Op.VERDICT:
            found = op[1], self._chain(side, op[2])
        elif kind is Op.SOURCE or kind is Op.DESTINATION:
            found = self._address(op[1][0][0]) if single(op[1]) else None
        elif kind in _SERVICES:
            only = self._shapes.literal(op)
            found = None if isinstance(only, int) else (only[0], self._port(only[1]))
        elif kind is Op.REMEMBER or kind is Op.KNOWN:
            found = self._clients(side, op)
        elif kind in _LOOKUPS:
            table = op[1]
            if not _is_named(table):
                self._entries(side, table, table.by_destination.get(-1, []), -1)
            number = self._shapes.sides[side].layouts[id(table.entries)].number
            named = self._clients(side, op) if number is None and not table.entries else len(table.entries)
            found = table.parts, number, 0 if number is not None else named, *op[2:]
        elif kind is Op.WRITE or kind is Op.TRANSLATE:
            found = tuple([self._operand(*each) if isinstance(each[1], bytes) else each for each in _written(op)])
        return self._shapes.literal(op) if found is None else (kind, found)

    def _entries(self, side: int, table: Keyed, pairs: list[ServiceEntry], services: int) -> None:
        """Add elements without their random numbers, because elements that differ only in the random number are equally
        probable."""
        number, fields, operands, order = self._shapes.sides[side].layouts[id(table.entries)]
        for mask, entry in sorted(pairs, key=order) if len(pairs) > 1 else pairs:
            if mask & services:
                key = [self._key(field, *entry.ranges[at]) for at, field in fields]
                data = entry.data
                if isinstance(data, bytes):
                    found = [self._operand(field, data[where]) for field, where in operands]
                else:
                    found = [data[0], self._chain(side, data[1])]
                self._parts.append((side, number, *key, *found))

    def _key(self, field: Property, low: int, high: int) -> object:
        if low != high:
            return low, high
        if field is Property.PORT:
            return self._port(low)
        if field is Property.RANDOM:
            return None
        return self._address(low) if field in _ADDRESSES else low
