"""Compiles rules in a part of nft's language to the expressions that nft 1.0.6 produces.

    match:      KEY [!=] VALUE | PREFIX | @SET | { VALUE, ... }, KEY & MASK OPERATOR VALUE, KEY OPERATOR VALUE
    map:        KEY vmap @MAP | { VALUE : VERDICT, ... }
    statement:  KEY set KEY | KEY map @MAP, dnat, redirect, masquerade, reject, counter name, flow add, update, delete
    verdict:    accept, drop, return, jump CHAIN, goto CHAIN

A KEY is a field of fields.FIELDS, or several fields separated by dots."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec.structs import replace

from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import fields
from kubeproxy.kernel.nftables.fields import FIELDS, INTEGER, MARK, TCP_FLAGS, VERDICTS, Field, packed, padded

_TOKENS: Final = re.compile(r'"[^"]*"|[{},]|[^\s{},]+')
_PORT_OF_MAP: Final = re.compile(r"(\b(?:redirect|dnat) to (?:\[\S*?\]|[^\s\[]*?)):(?=[a-z])")
"""The colon before a map key in `redirect to :KEY` and `dnat to ADDRESS:KEY`, which nft lists without spaces."""
_TIMES: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_NAT: Final = {"ip": 2, "ip6": 10}
_UNREACHABLE: Final = {"ip": 3, "ip6": 4}
"""The codes of "port unreachable" in ICMP and in ICMPv6, which `reject` sends."""
_BITS: Final = frozenset({"new", "established", "related", "dnat", "assured", "syn", "rst"})
"""Operands that are names of bits: an operand matches if its bit is set, with any other bits."""
_SPECIFIED, _MAPPED, _FULLY_RANDOM = 2, 1, 16  # NF_NAT_RANGE_PROTO_SPECIFIED, _MAP_IPS, _PROTO_RANDOM_FULLY


@lru_cache(maxsize=4096)
def rule(text: str, ip: str) -> x.Rule:
    """Return a rule for a table of a family ('ip' or 'ip6'). Raises ValueError for text outside this language."""
    reader = _Reader(text, ip)
    found: list[x.Expression] = []
    while reader.left:
        found += reader.statement()
    return tuple(found)


def register(slot: int) -> int:
    """Return the number of the register at a slot of 4 bytes."""
    return 8 + slot if slot % 4 else 1 + slot // 4


class _Key(NamedTuple):
    """The fields of a key, loaded into consecutive registers; `hashed` are the fields that a hash in the key reads."""

    fields: tuple[Field, ...]
    hashed: tuple[Field, ...] = ()

    @property
    def slots(self) -> int:
        return sum(padded(field.size) // 4 for field in self.fields)

    def load(self, slot: int = 0, spare: int = 0) -> Iterator[x.Expression]:
        """Yield expressions that load the key into registers from `slot` on. The fields of a hash are loaded `spare`
        slots after the key."""
        operands = slot + self.slots + spare
        for field in self.fields:
            if isinstance(field.load, x.Hash):
                at = operands
                for operand in self.hashed:
                    yield replace(operand.load, dreg=register(at))
                    at += padded(operand.size) // 4
                size = 4 * (at - operands)
                yield replace(field.load, dreg=register(slot), sreg=register(operands), length=size)
            else:
                yield replace(field.load, dreg=register(slot))
            slot += padded(field.size) // 4


class _Reader:
    def __init__(self, text: str, ip: str) -> None:
        self.text = text
        self.ip = ip
        self.left: list[str] = _TOKENS.findall(_PORT_OF_MAP.sub(r"\1 : ", text))

    def statement(self) -> Iterator[x.Expression]:
        for words, read in _STATEMENTS:
            if self.take(*words.split()):
                yield from read(self)
                return
        yield from self._about_key()

    def take(self, *words: str) -> bool:
        """Consume these words if the text continues with them; return whether the words were consumed."""
        if tuple(self.left[: len(words)]) != words:
            return False
        del self.left[: len(words)]
        return True

    def word(self) -> str:
        if not self.left:
            raise ValueError(f"incomplete rule: {self.text}")
        return self.left.pop(0)

    def expect(self, word: str) -> None:
        if self.word() != word:
            raise ValueError(f"{word!r} expected in rule: {self.text}")

    def key(self) -> _Key:
        """Consume fields separated by dots; a field may be a hash."""
        fields: list[Field] = []
        hashed: tuple[Field, ...] = ()
        while not fields or self.take("."):
            if self.take("jhash"):
                hashed = self.key().fields
                self.expect("mod")
                modulus = int(self.word())
                self.expect("seed")
                fields.append(Field(x.Hash(0, modulus, seed=int(self.word(), 0)), 4, INTEGER))
            else:
                fields.append(self._field())
        return _Key(tuple(fields), hashed)

    def _field(self) -> Field:
        if self.take("numgen", "random", "mod"):
            modulus = int(self.word())
            return Field(x.Numgen(0, modulus, 1, int(self.word()) if self.take("offset") else 0), 4, INTEGER)
        for length in (4, 3, 2, 1):
            name = " ".join(self.left[:length])
            if name in FIELDS:
                del self.left[:length]
                return FIELDS[name]
        raise ValueError(f"unknown {' '.join(self.left[:3])!r} in rule: {self.text}")

    def _about_key(self) -> Iterator[x.Expression]:
        key = self.key()
        (field, *others) = key.fields
        if field.type == TCP_FLAGS:
            yield from _compared(FIELDS["meta l4proto"], 0, "tcp")
        if self.take("set"):
            yield from self._set(field)
        elif self.take("vmap"):
            yield from key.load()
            yield x.Lookup(self._inline(field, VERDICTS) if self.take("{") else self._name(), 1, x.VERDICT)
        elif self.take("&") or self.take("and"):
            yield from self._masked(field)
        else:
            # `!` before the name of a bit means that the bit is not set.
            signs = (*enumerate(x.OPERATORS), (1, "!"))
            op = next((i for i, word in signs if self.take(word)), 0)
            operand = self.word()
            if operand.startswith("@") or operand == "{":
                yield from key.load()
                inline = self._inline(field) if operand == "{" else operand[1:]
                yield x.Lookup(inline, 1, flags=op)
            elif others:
                raise ValueError(f"a set expected in rule: {self.text}")
            else:
                yield from _compared(field, op, operand)

    def _name(self) -> str:
        return self.word().removeprefix("@")

    def _inline(self, field: Field, data_type: int = 0) -> x.Inline:
        """Consume the elements of an anonymous set, or of an anonymous map to verdicts."""
        found: set[tuple[bytes, bytes | x.RuleVerdict]] = set()
        while not found or self.take(","):
            key = _element_key(field, self.word())
            if data_type:
                self.expect(":")
                found.add((key, x.RuleVerdict(x.VERDICTS[self.word()], self.word())))
            else:
                found.add((key, b""))
        self.expect("}")
        return x.Inline(field.type, field.size, data_type, frozenset(found))

    def _masked(self, field: Field) -> Iterator[x.Expression]:
        mask = packed(field.type, field.size, self.word())
        op = x.OPERATORS.index(self.word())
        value = packed(field.type, field.size, self.word())
        yield from _bits(field, mask, op, value)

    def _set(self, field: Field) -> Iterator[x.Expression]:
        if field.type == MARK:
            yield from self._set_mark(field)
            return
        key = self.key()
        mapped = self.take("map")
        yield from key.load(spare=4 if mapped else 0)
        if mapped:
            yield x.Lookup(self._name(), 1, 1)
        load = field.load
        if not isinstance(load, x.Payload):
            raise ValueError(f"a field that cannot be set, in rule: {self.text}")
        address = load.base == fields.NETWORK
        checksum, at = (1, 10) if address and self.ip == "ip" else (0, 0)
        # The transport protocol's checksum covers addresses.
        yield replace(load, sreg=1, checksum=checksum, checksum_offset=at, checksum_flags=int(address))

    def _set_mark(self, field: Field) -> Iterator[x.Expression]:
        self.expect("meta")
        self.expect("mark")
        how, bits = self.word(), int(self.word(), 0)
        keep = ~bits & 0xFFFFFFFF if how in {"or", "|"} else 0xFFFFFFFF
        yield from _Key((field,)).load()
        yield x.Bitwise(1, 1, 4, keep.to_bytes(4, "little"), bits.to_bytes(4, "little"))
        yield x.Meta(key=3, sreg=1)

    # -- statements -------------------------------------------------------------------------------------------------

    def dnat(self) -> Iterator[x.Expression]:
        """Consume the operand of 'dnat': a map, an address with a map of ports, or an address in the packet."""
        flags = _SPECIFIED | _MAPPED
        family = _NAT[self.ip]
        if self.take(self.ip):
            if self.take("addr"):
                self.expect(".")
                self.expect("port")
            self.expect("to")
            key = self.key()
            self.expect("map")
            yield from key.load(spare=4)
            yield x.Lookup(self._name(), 1, 1)
            port = register(1 if self.ip == "ip" else 4)
            yield x.Nat(1, family, 1, 1, port, port, flags)
            return
        self.expect("to")
        if " ".join(self.left[:2]) in FIELDS:
            yield from self.key().load()
            yield x.Nat(1, family, 1, 1, flags=_MAPPED)
            return
        address, key = self._address_before_port(), self.key()
        self.expect("map")
        yield x.Immediate(1, address)
        yield from key.load(4)
        yield x.Lookup(self._name(), 2, 2)
        yield x.Nat(1, family, 1, 1, 2, 2, flags)

    def _address_before_port(self) -> bytes:
        word = self.word()
        if word.endswith(":"):
            word = word[:-1]
        else:
            self.expect(":")
        return ipaddress.ip_address(word.strip("[]")).packed

    def redirect(self) -> Iterator[x.Expression]:
        key = self.key()
        self.expect("map")
        yield from key.load()
        yield x.Lookup(self._name(), 1, 1)
        yield x.Redirect(1, 1, _SPECIFIED)

    def update(self, op: int = 1) -> Iterator[x.Expression]:
        """Consume the operand of 'update' or 'delete': a client's key, its timeout, and the data in a map."""
        name = self._name()
        self.expect("{")
        key = self.key()
        timeout = milliseconds(self.word()) if self.take("timeout") else 0
        data = self.key() if self.take(":") else None
        self.expect("}")
        if data is None:
            yield from key.load()
            yield x.Update(name, op, 1, timeout=timeout)
            return
        after = padded(key.slots)  # nft loads the data into a whole register
        yield from key.load(spare=after - key.slots)
        yield from data.load(after)
        yield x.Update(name, op, 1, register(after), timeout=timeout)


def _element_key(field: Field, word: str) -> bytes:
    return packed(field.type, field.size, word).ljust(padded(field.size), b"\0")


def milliseconds(text: str) -> int:
    """Return the milliseconds of a time in nft's notation: '1h30m', '5s'."""
    return sum(int(number) * _TIMES[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))


def _bits(field: Field, mask: bytes, op: int, value: bytes) -> Iterator[x.Expression]:
    yield from _Key((field,)).load()
    yield x.Bitwise(1, 1, field.size, mask, bytes(field.size))
    yield x.Compare(1, op, value)


def _compared(field: Field, op: int, operand: str) -> Iterator[x.Expression]:
    if field.type in {fields.IPV4_ADDRESS, fields.IPV6_ADDRESS} and "/" in operand:
        yield from _within(field, op, operand)
        return
    value = packed(field.type, field.size, operand)
    if operand in _BITS:
        yield from _bits(field, value, 1 - op, bytes(field.size))
        return
    yield from _Key((field,)).load()
    if field.size == 8 and op > 1:  # the value is in host byte order, but the kernel compares byte by byte
        yield x.Byteorder(1, 1, 1, 8, 8)
    yield x.Compare(1, op, value)


def _within(field: Field, op: int, operand: str) -> Iterator[x.Expression]:
    """Yield the match of a prefix. If the prefix consists of whole bytes, only these bytes are compared."""
    network = ipaddress.ip_network(operand)
    size, load = network.prefixlen // 8, field.load
    if network.prefixlen % 8 or not size or not isinstance(load, x.Payload):
        yield from _bits(field, network.netmask.packed, op, network.network_address.packed)
        return
    yield replace(load, dreg=1, length=size)
    yield x.Compare(1, op, network.network_address.packed[:size])


def _reset() -> Iterator[x.Expression]:
    """Yield a TCP reset. If the rule has no match of TCP, yield this match first, as nft does."""
    yield from _compared(FIELDS["meta l4proto"], 0, "tcp")
    yield x.Reject(1)


def _verdict(code: int) -> Callable[[_Reader], Iterator[x.Expression]]:
    to = code in {x.JUMP, x.GOTO}
    return lambda reader: iter([x.Immediate(x.VERDICT, x.RuleVerdict(code, reader.word() if to else ""))])


_STATEMENTS: Final[list[tuple[str, Callable[[_Reader], Iterator[x.Expression]]]]] = [
    *((word, _verdict(code)) for word, code in x.VERDICTS.items()),
    ("meta l4proto tcp reject with tcp reset", lambda _: _reset()),
    ("reject with tcp reset", lambda _: _reset()),
    ("reject", lambda reader: iter([x.Reject(0, _UNREACHABLE[reader.ip])])),
    ("masquerade fully-random", lambda _: iter([x.Masquerade(_FULLY_RANDOM)])),
    ("counter name", lambda reader: iter([x.TableObject(1, reader.word().strip('"'))])),
    ("flow add", lambda reader: iter([x.Offload(reader.word().removeprefix("@"))])),
    ("update", _Reader.update),
    ("delete", lambda reader: reader.update(2)),
    ("dnat", _Reader.dnat),
    ("redirect to :", _Reader.redirect),
]
