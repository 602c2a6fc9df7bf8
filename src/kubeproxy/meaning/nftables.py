"""Compiles nf_tables rules to operations: executes each rule once with symbolic registers.

An unsupported expression becomes an UNKNOWN operation with the expression's name and position. Sources:
net/netfilter/nft_*.c of Linux 6.18."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, Literal

from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import tables
from kubeproxy.kernel.nftables.tables import HOOKS, INGRESS, TABLE_FAMILIES
from kubeproxy.meaning import rules
from kubeproxy.meaning.nft_tables import Element, Elements, NftTable, Term, UnknownRuleError, extension, interface
from kubeproxy.meaning.rules import (
    ACCEPT,
    DROP,
    TRANSLATED,
    UNKNOWN_TRANSLATION,
    ChainRules,
    CompiledFor,
    HookPlace,
    Keyed,
    KeyPart,
    MapEntry,
    NodePlace,
    Op,
    Operation,
    Property,
)

_NETWORK, _TRANSPORT = 1, 2
_LOCAL: Final = 2  # RTN_LOCAL
_SILENT: Final = frozenset({"log", "last"})
_TAKING: Final = frozenset({"queue", "synproxy", "tproxy"})
"""Expressions that pass a packet to another program."""
_HOST_ORDER: Final = frozenset(
    {Property.MARK, Property.STATE, Property.STATUS, Property.RANDOM, Property.DESTINATION_LOCAL}
)
_META: Final = {
    3: (Property.MARK, 4),
    4: (Property.INPUT, 4),  # the index of the interface
    5: (Property.OUTPUT, 4),
    6: (Property.INPUT, 16),
    7: (Property.OUTPUT, 16),
    16: (Property.PROTOCOL, 1),
}
_ADDRESSES: Final = frozenset({Property.SOURCE, Property.DESTINATION})
_VALUES: Final = _HOST_ORDER - {Property.RANDOM} | {Property.ORIGINAL_DESTINATION, Property.SOURCE_PORT}
"""Properties that rules test as numbers."""

_ECN: Final = (0, 0x40, 0x80, 0xC0)
"""TCP flags (ECE, CWR) of a SYN that requests ECN (RFC 3168, 6.1.1)."""


def compiled(table: NftTable, place: NodePlace, purpose: CompiledFor = CompiledFor.EVERYTHING) -> list[ChainRules]:
    """Return the chains of a table. Names of chains are `family/table/chain`."""
    filled: _Filled = {}
    found = []
    if purpose is not CompiledFor.EVERYTHING:  # packets of this connection may have added elements to sets
        each = [one for chain in table.chains.values() for rule in chain.rules for one in rule]
        filling = {one.set for one in each if isinstance(one, x.Update)}
        sets = {
            name: its._replace(matches_rest=its.matches_rest or name in filling) for name, its in table.sets.items()
        }
        table = table._replace(sets=sets)
    for name, chain in table.chains.items():
        rules = [
            _Rule(table, place, f"{table.name} {name}, rule {number}", filled, purpose).run(rule)
            for number, rule in enumerate(chain.rules, 1)
        ]
        found.append(ChainRules(f"{prefix(table)}{name}", rules, _hook(chain.hook)))
    return found


def prefix(table: NftTable) -> str:
    """Return the prefix of the names of a table's chains."""
    return f"{TABLE_FAMILIES.get(table.family, table.family)}/{table.name}/"


def _hook(hook: tables.Hook | None) -> HookPlace | None:
    if hook is None:
        return None
    name = HOOKS[hook.number] if hook.number < len(HOOKS) else INGRESS
    return HookPlace(name, hook.priority, hook.kind == "nat", hook.drops)


_Filled = dict[tuple[str, tuple[Property, ...]], Keyed]
"""Named sets, by name and by the fields of the key."""


class _Rule:
    def __init__(self, table: NftTable, place: NodePlace, where: str, filled: _Filled, purpose: CompiledFor) -> None:
        self._table = table
        self._purpose = purpose
        self._filled_sets = filled
        self._place = place
        self._where = where
        self._registers: dict[int, tuple[Term, int]] = {}
        self._done: list[Operation] = []

    def run(self, rule: x.Rule) -> tuple[Operation, ...]:
        for one in rule:
            try:
                self._one(one)
            except UnknownRuleError as unknown:
                self._done.append((Op.UNKNOWN, f"{unknown} in {self._where}"))
                self._registers.clear()
                if self._purpose is CompiledFor.EVERYTHING:
                    break
                if isinstance(one, x.Lookup) and one.dreg == x.VERDICT:
                    self._any_verdict(one.set)
                elif isinstance(one, x.Nat | x.Redirect):
                    self._done += UNKNOWN_TRANSLATION
        return tuple(self._done)

    def _one(self, one: x.Expression) -> None:
        match one:
            case x.PacketCount() | x.Offload() | x.TableObject(type=1) | x.Update(op=2):
                pass
            case x.Update() if self._purpose is CompiledFor.EVERYTHING:
                self._done.append((Op.REMEMBER, one.set))
            case x.Opaque(name) if name in _SILENT:
                pass
            case x.Opaque(name) if name in _TAKING:
                self._done += [(Op.UNKNOWN, f"{name} in {self._where}"), (Op.VERDICT, ACCEPT, "")]
            case x.Opaque("notrack"):
                self._done.append((Op.UNTRACK, f"notrack in {self._where}"))
            case x.Opaque("match" | "target" as kind, raw):
                self._done += extension(kind, raw, self._where, self._place.bits)
            case x.Compare():
                self._compare(self._get(one.sreg), one.value, one.value, one.op)
            case x.Range():
                self._compare(self._get(one.sreg), one.first, one.last, 6 + one.op)
            case x.Lookup():
                self._lookup(one)
            case x.Nat() | x.Redirect() | x.Masquerade() | x.Reject():
                self._end(one)
            case x.Immediate(value=x.RuleVerdict(code=code, chain=chain)):
                self._done.append((Op.VERDICT, code, f"{prefix(self._table)}{chain}" if chain else ""))
            case _:
                self._register(one)

    def _register(self, one: x.Expression) -> None:
        match one:
            case x.Immediate(value=bytes(value)):
                self._load(one.dreg, Term(Property.CONSTANT, len(value), len(value), value=value))
            case x.Numgen() | x.Hash():
                self._load(one.dreg, Term(Property.RANDOM, 4, 4, modulus=one.modulus, offset=one.offset))
            case x.Payload(dreg=int(register)):
                self._load(register, self._payload(one))
            case x.Meta(dreg=int(register)):
                self._load(register, self._meta(one))
            case x.Ct(dreg=int(register)):
                self._load(register, self._tracked(one))
            case x.Fib():
                self._load(one.dreg, self._route(one))
            case x.Bitwise():
                self._bitwise(one)
            case x.Payload(sreg=int(register)):
                self._write(one, self._get(register))
            case x.Ct(key=17, sreg=int()) if self._purpose is not CompiledFor.EVERYTHING:  # NFT_CT_ZONE
                self._done.append((Op.ZONE, f"ct zone in {self._where}"))
            case x.Meta(key=3, sreg=int(register)):
                self._mark(self._get(register))
            case _:
                raise UnknownRuleError(f"expression {one.name if isinstance(one, x.Opaque) else one.KIND}")

    @staticmethod
    def _slot(register: int) -> int:
        return (register - 1) * 4 if register <= 4 else register - 8

    def _load(self, register: int, term: Term) -> None:
        slot = self._slot(register)
        for number in range((term.size + 3) // 4):
            self._registers[slot + number] = term, 4 * number

    def _get(self, register: int) -> Term:
        found = self._registers.get(self._slot(register))
        if found is None:
            raise UnknownRuleError(f"register {register}")
        term, offset = found
        if not offset:
            return term
        if term.field is None:
            return term._replace(size=term.size - offset, offset=term.offset + offset)
        raise UnknownRuleError("part of a field")

    def _payload(self, one: x.Payload) -> Term:
        bits = self._place.bits
        width = bits // 8
        source, destination = (12, 16) if bits == 32 else (8, 24)
        if one.base == _NETWORK and one.length <= width:
            if one.offset == source:
                return Term(Property.SOURCE, one.length, width)
            if one.offset == destination:
                return Term(Property.DESTINATION, one.length, width)
            if (one.offset, one.length) == ((9, 1) if bits == 32 else (6, 1)):
                return Term(Property.PROTOCOL, 1, 1)
        if one.base == _TRANSPORT and (one.offset, one.length) == (2, 2):
            return Term(Property.PORT, 2, 2)
        if one.base == _TRANSPORT and (one.offset, one.length) == (0, 2) and self._purpose is CompiledFor.ANSWER:
            return Term(Property.SOURCE_PORT, 2, 2)
        if one.base == _TRANSPORT and (one.offset, one.length) == (13, 1):
            return Term(Property.CONSTANT, 1, 1, value=bytes(self._purpose.tcp_flags | ecn for ecn in _ECN))
        raise UnknownRuleError(f"payload load base {one.base}, offset {one.offset}, length {one.length}")

    def _meta(self, one: x.Meta) -> Term:
        if one.key == 15:
            return Term(Property.CONSTANT, 1, 1, value=bytes([2 if self._place.bits == 32 else 10]))
        if one.key == 1:
            return Term(Property.CONSTANT, 2, 2, value=b"\x08\0" if self._place.bits == 32 else b"\x86\xdd")
        if one.key not in _META:
            raise UnknownRuleError(f"meta key {one.key}")
        field, size = _META[one.key]
        return Term(field, size, size)

    def _tracked(self, one: x.Ct) -> Term:
        width = self._place.bits // 8
        if one.key in {0, 2}:
            return Term(Property.STATE if one.key == 0 else Property.STATUS, 4, 4)
        if one.key == 1:
            return Term(Property.CONSTANT, 1, 1, value=b"\1" if self._purpose is CompiledFor.ANSWER else b"\0")
        if one.key == 3 and self._purpose is CompiledFor.EVERYTHING:
            return Term(Property.CONSTANT, 4, 4, value=bytes(4))
        if one.direction == 0 and one.key in {8, 19, 21} and self._purpose is not CompiledFor.ANSWER:
            return Term(Property.SOURCE, width, width)
        if one.direction == 0 and one.key in {9, 20, 22}:
            return Term(Property.ORIGINAL_DESTINATION, width, width)
        if one.key == 10 or (one.direction == 0 and one.key == 12):
            return Term(Property.PROTOCOL, 1, 1) if one.key == 10 else Term(Property.ORIGINAL_PORT, 2, 2)
        raise UnknownRuleError(f"ct key {one.key}")

    def _route(self, one: x.Fib) -> Term:
        if one.result == 3 and one.flags == 1:
            return Term(Property.SOURCE, 4, 4, modulus=_LOCAL)
        if one.result == 3 and one.flags == 2:
            return Term(Property.DESTINATION_LOCAL, 4, 4)
        raise UnknownRuleError(f"fib result {one.result}, flags {one.flags}")

    def _bitwise(self, one: x.Bitwise) -> None:
        term = self._get(one.sreg)
        if one.op or one.sreg2 is not None or term.field is None or term.modulus:
            raise UnknownRuleError("bitwise")
        order = sys.byteorder if term.field in _HOST_ORDER else "big"
        mask, xor = int.from_bytes(one.mask, order), int.from_bytes(one.xor, order)
        self._load(one.dreg, term._replace(mask=term.mask & mask, xor=(term.xor & mask) ^ xor))

    # -- tests -------------------------------------------------------------------------------------------------------

    def _compare(self, term: Term, first: bytes, last: bytes, op: int) -> None:
        """Append a test. `op` is an index into x.OPERATORS, or 6 for "inside of a range", or 7 for "outside of a
        range"."""
        if term.field in {Property.INPUT, Property.OUTPUT}:
            if op not in {0, 1} or term.mask != -1:
                raise UnknownRuleError("comparison of interface names")
            self._done.append((Op.INTERFACE, (interface(term, first),), op == 1, term.field is Property.OUTPUT))
            return
        order = sys.byteorder if term.field in _HOST_ORDER or term.modulus else "big"
        low, high = int.from_bytes(first, order), int.from_bytes(last, order)
        size = min(term.size, len(first))
        top = (1 << 8 * size) - 1
        low, high = {2: (0, low - 1), 3: (0, low), 4: (low + 1, top), 5: (low, top)}.get(op, (low, high))
        self._inside(term, [(low, high)], size, op in {1, 7})

    def _inside(self, term: Term, ranges: Sequence[tuple[int, int]], size: int, negated: bool) -> bool:
        """Append a test whether the first `size` bytes of a field are in one of these ranges; return False if no
        operation can express the test.
        """
        field = term.field
        if field is Property.SOURCE and term.modulus:  # fib saddr type
            if list(ranges) != [(_LOCAL, _LOCAL)]:
                raise UnknownRuleError("fib saddr type")
            self._done.append((Op.SOURCE, self._place.unless(negated, self._place.local)))
        elif field in _ADDRESSES:
            found = rules.union(self._addresses(term, low, high, size) for low, high in ranges)
            self._done.append((Op(int(field)), self._place.unless(negated, found)))
        elif field in {Property.PROTOCOL, Property.PORT, Property.ORIGINAL_PORT} and term.mask == -1:
            services = 0
            for pair in ranges:
                services |= rules.protocol_range(*pair) if field is Property.PROTOCOL else rules.port_range(*pair)
            kind = Op.ORIGINAL_SERVICE if field is Property.ORIGINAL_PORT else Op.SERVICE
            self._done.append((kind, rules.EVERY & ~services if negated else services))
        elif field is Property.CONSTANT:
            self._constant(term, 8 * (term.size - size), ranges, negated)
        elif field is Property.RANDOM and term.mask == -1:
            first, last = term.offset, term.offset + term.modulus - 1
            inside = sum(max(0, min(high, last) - max(low, first) + 1) for low, high in ranges) / term.modulus
            self._done.append((Op.CHANCE, 1 - inside if negated else inside))
        elif field is Property.STATUS and self._purpose is CompiledFor.ANSWER and term.mask != TRANSLATED:
            raise UnknownRuleError("ct status")
        elif field not in _VALUES:
            raise UnknownRuleError(f"test of {field.name.lower() if field is not None else 'map data'}")
        elif len(ranges) == 1:
            self._done.append((Op.VALUE, field, term.mask, term.xor, *ranges[0], negated))
        else:
            return False
        return True

    def _constant(self, term: Term, shift: int, ranges: Sequence[tuple[int, int]], negated: bool) -> None:
        """Test whether a constant, without its last `shift` bits, is in ranges; if the result is false, append a test
        that is never true.
        """
        parts = (int.from_bytes(term.value[at : at + term.size], "big") for at in range(0, len(term.value), term.size))
        values = {((part & term.mask) ^ term.xor) >> shift for part in parts}
        found = {any(low <= value <= high for low, high in ranges) for value in values}
        if len(found) > 1:
            raise UnknownRuleError("TCP flags of ECN")
        if negated in found:
            self._done.append((Op.SERVICE, 0))

    def _addresses(self, term: Term, low: int, high: int, size: int) -> tuple[int, int]:
        bits = self._place.bits
        shift = bits - 8 * size
        mask = term.mask & ((1 << 8 * size) - 1)
        free = (1 << 8 * size) - 1 & ~mask
        if free:
            if free & (free + 1) or low != high or low & free:
                raise UnknownRuleError("address with a mask that is no prefix")
            low, high = low ^ term.xor, (low ^ term.xor) | free
        elif term.xor:
            raise UnknownRuleError("address with xor")
        return low << shift, (high << shift) | ((1 << shift) - 1)

    # -- sets --------------------------------------------------------------------------------------------------------

    def _lookup(self, one: x.Lookup) -> None:
        form, elements, matches_rest = self._contents(one.set)
        partial = self._purpose is not CompiledFor.EVERYTHING
        if matches_rest or (partial and form.flags & tables.COUNTED):
            raise UnknownRuleError(f"set {one.set}")
        if partial:  # use the set's present elements
            form = form._replace(flags=form.flags & ~tables.DYNAMIC)
        terms = self._key(one.sreg, form)
        inverted = bool(one.flags & 1)
        single = len(terms) == 1 and one.dreg is None and not form.flags & tables.DYNAMIC
        if single and self._member(terms[0], elements, inverted):
            return
        table = self._filled(one.set, form, elements, terms)
        if inverted:
            self._done.append((Op.MISSES, table))
            return
        verdict = one.dreg == x.VERDICT
        self._done.append((Op.FIND, table, verdict))
        if one.dreg is not None and not verdict:
            self._load(one.dreg, Term(None, form.data_length or 64))

    def _any_verdict(self, of: str | x.Inline) -> None:
        """Append a lookup that may result in any verdict of a map, because the map's keys are not supported."""
        _, elements, matches_rest = self._contents(of)
        verdicts = dict.fromkeys(self._data(data) for _, _, data in elements)
        if matches_rest:
            verdicts |= {(ACCEPT, ""): None, (DROP, ""): None}
        entries = [MapEntry(((number, number),), verdict) for number, verdict in enumerate(verdicts)]
        self._done.append((Op.FIND, Keyed("of a rule", (KeyPart(Property.RANDOM, len(entries)),), entries), True))

    def _contents(self, of: str | x.Inline) -> Elements:
        if isinstance(of, x.Inline):
            form = tables.SetForm(0, of.key_type, of.key_length, of.data_type)
            return Elements(form, tuple([(key, key, data) for key, data in of.elements]))
        return self._table.sets[of]

    def _key(self, register: int, form: tables.SetForm) -> list[Term]:
        slot, end = self._slot(register), self._slot(register) + (form.key_length + 3) // 4
        found = []
        while slot < end:
            held = self._registers.get(slot)
            if held is None or held[1] or held[0].field is None:
                raise UnknownRuleError("key of a lookup")
            if held[0].mask != -1 and held[0].field is not Property.CONSTANT:
                raise UnknownRuleError("key of a lookup, masked")
            found.append(held[0])
            slot += (held[0].size + 3) // 4
        return found

    def _member(self, term: Term, elements: tuple[Element, ...], inverted: bool) -> bool:
        """Append the test whether a single field is in a set; return False if no operation can express the test."""
        field = term.field
        if field in {Property.INPUT, Property.OUTPUT}:
            if any(first != last for first, last, _ in elements):
                raise UnknownRuleError("patterns of interface names")
            names = tuple(sorted(interface(term, first) for first, _, _ in elements))
            self._done.append((Op.INTERFACE, names, inverted, field is Property.OUTPUT))
            return True
        return self._inside(term, [each.ranges[0] for each in self._entries(elements, [term])], term.size, inverted)

    def _filled(
        self,
        of: str | x.Inline,
        form: tables.SetForm,
        elements: tuple[Element, ...],
        terms: list[Term],
    ) -> Keyed:
        """Return the elements of a set by key. A set to which packets add elements is empty for a first packet."""
        for term in terms:
            is_local = term.field is Property.SOURCE and term.modulus
            is_mark = term.field is Property.MARK and self._purpose is not CompiledFor.EVERYTHING
            if term.size != term.width or is_local or is_mark or term.field is Property.CONSTANT:
                raise UnknownRuleError("key of a lookup")
        parts = tuple([KeyPart(Property(term.field or 0), term.modulus, term.offset) for term in terms])
        if not isinstance(of, str):
            return Keyed("of a rule", parts, self._entries(elements, terms))
        if form.flags & tables.DYNAMIC:
            return Keyed(of, parts, ())
        key = of, tuple([part.field for part in parts])
        if key not in self._filled_sets:
            self._filled_sets[key] = Keyed(of, parts, self._entries(elements, terms))
        return self._filled_sets[key].keyed_by(parts)

    def _entries(self, elements: tuple[Element, ...], terms: list[Term]) -> Iterator[MapEntry]:
        layout: list[tuple[Literal["little", "big"], slice]] = []
        at = 0
        for term in terms:
            layout.append((sys.byteorder if term.field in _HOST_ORDER else "big", slice(at, at + term.size)))
            at += (term.size + 3) & ~3
        number = int.from_bytes
        for first, last, data in elements:
            lows = [number(first[where], order) for order, where in layout]
            highs = lows if first is last else [number(last[where], order) for order, where in layout]
            yield MapEntry(tuple(zip(lows, highs, strict=True)), self._data(data))

    def _data(self, data: bytes | x.RuleVerdict) -> bytes | tuple[int, str]:
        if isinstance(data, bytes):
            return data
        return data.code, f"{prefix(self._table)}{data.chain}" if data.chain else ""

    # -- verdicts and changes of the packet ----------------------------------------------------------------------------

    def _mark(self, term: Term) -> None:
        if term.field is Property.CONSTANT:
            self._done.append((Op.MARK, 0, int.from_bytes(term.value, sys.byteorder)))
        elif term.field is Property.MARK:
            self._done.append((Op.MARK, term.mask, term.xor))
        else:
            raise UnknownRuleError("mark set from a field")

    def _write(self, one: x.Payload, term: Term) -> None:
        target = self._payload(one)
        if target.field is Property.SOURCE and target.size == target.width and term.field in _ADDRESSES:
            # Rules keep a number in the source address, and restore the address from the connection's original source.
            self._done.append((Op.WRITE, Property.SOURCE, None if term.field is Property.SOURCE else b""))
            return
        if target.size != target.width or target.field not in {Property.DESTINATION, Property.PORT}:
            raise UnknownRuleError("payload write")
        is_address = target.field is Property.DESTINATION
        original = Property.ORIGINAL_DESTINATION if is_address else Property.ORIGINAL_PORT
        value = None if term.field is original else self._operand(term, target.size)
        self._done.append((Op.WRITE, target.field, value))

    def _address(self, register: int | None, own: Property) -> bytes | tuple[int, int] | None:
        """Return the new address of a translation, or None for the packet's `own` address."""
        width, term = self._place.bits // 8, self._get(register) if register is not None else None
        return None if term in {None, Term(own, width, width)} else self._operand(term, width)

    def _source(self, one: x.Nat) -> bytes | tuple[int, ...] | None:
        """Return the new source of snat; None if the packet keeps its own source; () if the new source is unknown."""
        with suppress(UnknownRuleError):
            return () if one.is_range else self._address(one.address, Property.SOURCE)
        return ()

    @staticmethod
    def _operand(term: Term, size: int) -> bytes | tuple[int, int]:
        if term.field is None:
            return term.offset, size
        if term.field is Property.CONSTANT:
            return term.value[:size]
        raise UnknownRuleError("translation by a field")

    def _end(self, one: x.Nat | x.Redirect | x.Masquerade | x.Reject) -> None:
        match one:
            case x.Masquerade():
                self._done += [(Op.MASQUERADE,), (Op.VERDICT, ACCEPT, "")]
            case x.Nat(type=0) if self._purpose is CompiledFor.EVERYTHING:
                raise UnknownRuleError("snat")
            case x.Nat(type=0):
                self._done += [(Op.MASQUERADE, self._source(one)), (Op.VERDICT, ACCEPT, "")]
            case x.Reject():
                self._done += [(Op.REFUSE, one.type == 1), (Op.VERDICT, DROP, "")]
            case _ if one.is_range:
                raise UnknownRuleError("translation to a range")
            case _:
                own = Property.DESTINATION
                address = rules.HERE if isinstance(one, x.Redirect) else self._address(one.address, own)
                port = None if one.port is None else self._operand(self._get(one.port), 2)
                self._done += [(Op.TRANSLATE, address, port), (Op.VERDICT, ACCEPT, "")]
