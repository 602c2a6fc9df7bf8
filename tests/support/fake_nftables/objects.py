"""Tables, chains, rules, sets and elements of the simulated nf_tables, and the lookup of elements.

Keys and values are packed as in the kernel's registers: each field fills whole words of four bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables.fields import VERDICTS
from kubeproxy.kernel.nftables.tables import CONCATENATION, COUNTED, DYNAMIC, INTERVAL, MAP, TIMEOUT, SetForm
from kubeproxy.model.addresses import pack, unpack

PROTOCOLS = {"icmp": 1, "tcp": 6, "udp": 17, "sctp": 132}
_PROTOCOL_NAMES = {number: name for name, number in PROTOCOLS.items()}
TYPES = {7: "ipv4_addr", 8: "ipv6_addr", 12: "inet_proto", 13: "inet_service", 4: "integer"}
"""The kernel's numbers of hooks, with their names."""
_NUMBERS = {name: number for number, name in TYPES.items()}
_SIZES = {"ipv4_addr": 4, "ipv6_addr": 16, "inet_proto": 1, "inet_service": 2, "integer": 4}


class RefusedError(Exception):
    """The kernel refuses a step; `code` is its errno."""

    def __init__(self, code: int, what: str) -> None:
        self.code = code
        super().__init__(what)

    def as_netlink(self) -> NetlinkError:
        return NetlinkError(self.code, "the kernel refused an nf_tables transaction", str(self))


class UnsupportedError(Exception):
    """Valid input for a kernel that this fake does not implement: a message, a command of nft, or a word of a rule."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the fake kernel does not implement {what}")


@dataclass(frozen=True)
class Type:
    """The type of a key or a value: the types of its fields, by nft's names."""

    fields: tuple[str, ...]

    @cached_property
    def size(self) -> int:
        return sum(_padded(_SIZES[name]) for name in self.fields)

    @property
    def number(self) -> int:
        """Return the number of a type: six bits for each field."""
        return sum(_NUMBERS[name] << 6 * at for at, name in enumerate(reversed(self.fields)))

    @property
    def value_size(self) -> int:
        """Return the bytes of a map's value: a single field has its own size."""
        return _SIZES[self.fields[0]] if len(self.fields) == 1 else self.size

    def pack(self, words: list[str]) -> bytes:
        """Pack one word for each field."""
        return b"".join(_pack(name, word) for name, word in zip(self.fields, words, strict=True))

    def as_value(self, words: list[str]) -> bytes:
        """Pack a map's value: a single field has its own size."""
        return self.pack(words)[: self.value_size]

    def words(self, value: bytes) -> list[str]:
        """Return the fields of a packed key or value, one word each."""
        words, at = [], 0
        for name in self.fields:
            size = _SIZES[name]
            words.append(_word(name, value[at : at + size]))
            at += _padded(size)
        return words


def _padded(size: int) -> int:
    return size + (-size & 3)


def _pack(name: str, word: str) -> bytes:
    if name in {"ipv4_addr", "ipv6_addr"}:
        address = pack(word)
        assert address is not None, f"{word!r} is no address"
        assert len(address) == _SIZES[name], f"{word!r} is no {name}"
        return address
    if name == "inet_proto":
        return bytes([PROTOCOLS[word], 0, 0, 0])
    if name == "inet_service":
        return int(word).to_bytes(2, "big") + b"\0\0"
    return int(word).to_bytes(4, "little")  # in the form that numgen returns


def _word(name: str, value: bytes) -> str:
    if name in {"ipv4_addr", "ipv6_addr"}:
        return unpack(value)
    if name == "inet_proto":
        return _PROTOCOL_NAMES[value[0]]
    return str(int.from_bytes(value, "big" if name == "inet_service" else "little"))


@dataclass
class Element:
    """An element of a set: its value (a chain's name in verdict maps); times are in milliseconds.

    `until` is the time of expiry, None for never; a `timeout` of 0 is the default of the set.
    """

    value: bytes = b""
    timeout: int = 0
    until: int | None = None


@dataclass
class Set:
    """A set or map. Its elements are stored by key; the key of a range is its first key and its last one."""

    name: str
    key: Type
    value: Type | None = None  # for a map to values
    verdicts: bool = False
    interval: bool = False
    dynamic: bool = False
    auto_merge: bool = False
    counted: bool = False  # for each element
    timeout: int | None = None  # milliseconds; None if elements do not expire
    size: int | None = None
    elements: dict[bytes, Element] = field(default_factory=dict)

    @property
    def form(self) -> SetForm:
        """Return the set's properties as the kernel reports them."""
        value = self.value or Type(())
        flags = {INTERVAL: self.interval, MAP: self.keyword == "map", TIMEOUT: self.timeout is not None}
        flags |= {DYNAMIC: self.dynamic, COUNTED: self.counted}
        ranges = self.interval and len(self.key.fields) > 1
        return SetForm(
            sum(flag for flag, is_set in flags.items() if is_set) | (CONCATENATION if ranges else 0),
            self.key.number,
            self.key.value_size,
            VERDICTS if self.verdicts else value.number,
            value.value_size if value.fields else 0,
            self.size or 0,
            self.timeout or 0,
            tuple(_SIZES[name] for name in self.key.fields) if ranges else (),
        )

    @property
    def keyword(self) -> str:
        return "map" if self.verdicts or self.value is not None else "set"

    def alive(self, now: int) -> Iterator[tuple[bytes, Element]]:
        """Yield the elements that have not expired."""
        return ((k, e) for k, e in self.elements.items() if e.until is None or e.until > now)

    def get(self, stored: bytes | None, now: int) -> Element | None:
        """Return the element of a key or range; None if there is none, or it has expired."""
        element = self.elements.get(stored) if stored is not None else None
        return element if element is None or element.until is None or element.until > now else None

    def find(self, key: bytes, now: int) -> Element | None:
        """Return the element that matches a packet's key."""
        return self.get(self.around(key) if self.interval else key, now)

    def around(self, key: bytes) -> bytes | None:
        """Return the range that contains a key; of several the oldest."""
        return next((stored for stored in self.elements if self.covers(stored, key)), None)

    def covers(self, stored: bytes, key: bytes) -> bool:
        """Return whether a range contains a key: in a concatenation each field must match."""
        half = len(stored) // 2
        first, last = stored[:half], stored[half:]
        if not first <= key <= last:
            return False
        at = 0
        for name in self.key.fields:
            end = at + _padded(_SIZES[name])
            if not first[at:end] <= key[at:end] <= last[at:end]:
                return False
            at = end
        return True

    def same(self, other: Set) -> bool:
        """Return whether another set has the same type."""
        mine, theirs = vars(self) | {"elements": 0, "size": 0}, vars(other) | {"elements": 0, "size": 0}
        return mine == theirs


@dataclass
class Rule:
    """A rule in nft's words."""

    handle: int
    text: str


@dataclass
class Chain:
    """A chain; a base chain has a hook, in nft's words."""

    name: str
    handle: int
    hook: str = ""
    rules: list[Rule] = field(default_factory=list)


@dataclass
class Table:
    """A table; `family` is nft's name of the family."""

    FAMILIES: ClassVar = {1: "inet", 2: "ip", 10: "ip6"}

    family: str
    name: str
    handle: int
    comment: str = ""
    dormant: bool = False
    chains: dict[str, Chain] = field(default_factory=dict)
    sets: dict[str, Set] = field(default_factory=dict)
    counters: list[str] = field(default_factory=list)

    def chain(self, name: str) -> Chain:
        """Return a chain."""
        if name not in self.chains:
            raise RefusedError(errno.ENOENT, f"no chain {name} in table {self.family} {self.name}")
        return self.chains[name]

    def set(self, name: str) -> Set:
        """Return a set or map."""
        if name not in self.sets:
            raise RefusedError(errno.ENOENT, f"no set {name} in table {self.family} {self.name}")
        return self.sets[name]
