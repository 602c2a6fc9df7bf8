"""The language of rules, as far as the proxy's rules use it: parses text into steps, and applies steps to a packet.

A step yields every possible result, because numgen is random: the state of the packet, and GO_ON, BREAK (the rule does
not match) or a verdict. A rule in another form is parsed only when a packet reaches it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from kubeproxy.kernel.nftables.compiling import milliseconds
from kubeproxy.model.maglev import jhash
from support.cluster_objects import NODE_IPS
from support.fake_nftables.objects import PROTOCOLS, Element, Set, Table, UnsupportedError

_OF_THE_NODE = frozenset(ipaddress.ip_address(text).packed for text in NODE_IPS.values())
"""An endpoint may be on the node itself: packets to it pass no hook that translates sources."""


class Remembered(NamedTuple):
    """A client that a rule adds to a map, or deletes from it (`timeout` 0); `timeout` is in milliseconds."""

    set: str
    key: bytes
    timeout: int
    data: bytes


class State(NamedTuple):
    """The state of a packet. `from_node`: its source is an address of this node; `translated`: NAT changed its
    destination.

    `original` and `original_port` are the connection's destination before translation, `original_source` its source.
    """

    interface: str
    from_node: bool
    source: bytes
    destination: bytes
    to_node: bool
    protocol: int
    port: int
    original: bytes
    original_port: int
    original_source: bytes
    source_port: int = 0
    mark: int = 0
    translated: bool = False
    masqueraded: bool = False
    remembered: tuple[Remembered, ...] = ()


class Verdict(NamedTuple):
    """The end of a rule: accept, drop, reject, return, or jump or goto with a target."""

    kind: str
    target: str = ""


GO_ON = Verdict("go on")
BREAK = Verdict("break")
ACCEPT = Verdict("accept")

Ways = Iterator[tuple[State, Verdict]]
Step = Callable[[Table, int, State], Ways]
"""A step's function: takes the table, the time in milliseconds and the packet."""

_TOKENS = re.compile(r'"[^"]*"|[{},]|!=|==|[^\s{},]+')
_FEW = 256
"""Up to this number of slots the code looks up each slot; for more slots it searches the map."""


@cache
def steps(text: str) -> tuple[Step, ...]:
    """Return the steps of a rule. Raises UnsupportedError."""
    reader = _Reader(text)
    found = []
    while reader.left:
        found.append(reader.step())
    return tuple(found)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.left: list[str] = _TOKENS.findall(text)

    def step(self) -> Step:
        """Parse one match or statement."""
        for words, read in _READERS:
            if self._take(*words):
                return read(self)
        return self._match()

    def _take(self, *words: str) -> bool:
        if tuple(self.left[: len(words)]) != words:
            return False
        del self.left[: len(words)]
        return True

    def word(self) -> str:
        """Parse one word."""
        if not self.left:
            raise UnsupportedError(f"the end of the rule {self.text!r}")
        return self.left.pop(0)

    def original(self) -> bool:
        """Parse the original destination of the connection, if it comes next."""
        return self._take("ct", "original", "ip", "daddr") or self._take("ct", "original", "ip6", "daddr")

    def original_port(self) -> bool:
        """Parse the original destination port of the connection, if it comes next."""
        return self._take("ct", "original", "proto-dst")

    def until(self, end: str) -> list[str]:
        """Return the words before a given word."""
        at = self.left.index(end)
        words = self.left[:at]
        del self.left[: at + 1]
        return words

    def key(self) -> _Key:
        """Parse a concatenation."""
        parts = [self._part()]
        while self._take("."):
            parts.append(self._part())
        return _Key(tuple(parts))

    def _part(self) -> _Part:
        for words in _FIELDS:
            if self._take(*words.split()):
                return words
        if self._take("numgen", "random", "mod"):
            return _Numgen(int(self.word()), int(self.word()) if self._take("offset") else 0)
        if self._take("jhash"):
            return self._hash()
        raise UnsupportedError(f"{' '.join(self.left[:3])!r} in the rule {self.text!r}")

    def _hash(self) -> _Hash:
        fields = [self._part()]
        while self._take("."):
            fields.append(self._part())
        assert self._take("mod")
        modulus = int(self.word())
        assert self._take("seed")
        return _Hash(tuple(str(field) for field in fields), modulus, int(self.word(), 0))

    def _match(self) -> Step:
        key = self.key()
        if self._take("vmap"):
            return self._vmap(key)
        negated = self._take("!=")
        operand = self.word()
        if operand == "{":
            return _one_of(key, [word for word in self.until("}") if word != ","])
        if operand.startswith("@"):
            return _lookup(key, operand[1:], negated)
        return _compare(key, operand, negated)

    def _vmap(self, key: _Key) -> Step:
        if not self._take("{"):
            return _verdict_map(key, self.word().removeprefix("@"))
        entries = " ".join(self.until("}")).split(" , ")
        verdicts = {}
        for entry in entries:
            value, _, verdict = entry.partition(" : ")
            packed = int(value).to_bytes(4, "little") if key.numgen else int(value).to_bytes(2, "big") + b"\0\0"
            verdicts[packed] = Verdict(*verdict.split())
        return _verdicts(key, verdicts)


# -- keys ----------------------------------------------------------------------------------------------------------


class _Numgen(NamedTuple):
    modulus: int
    offset: int


class _Hash(NamedTuple):
    fields: tuple[str, ...]
    modulus: int
    seed: int

    def slot(self, state: State) -> bytes:
        number = jhash(b"".join(_FIELDS[field](state) for field in self.fields), self.seed) * self.modulus >> 32
        return number.to_bytes(4, "little")


_Part = str | _Numgen | _Hash

_FIELDS: dict[str, Callable[[State], bytes]] = {
    "ip saddr": lambda state: state.source,
    "ip daddr": lambda state: state.destination,
    "ip6 saddr": lambda state: state.source,
    "ip6 daddr": lambda state: state.destination,
    "meta l4proto": lambda state: bytes([state.protocol, 0, 0, 0]),
    "th dport": lambda state: state.port.to_bytes(2, "big") + b"\0\0",
    "th sport": lambda state: state.source_port.to_bytes(2, "big") + b"\0\0",
    "ct original ip saddr": lambda state: state.original_source,
    "ct original ip6 saddr": lambda state: state.original_source,
    "ct original ip daddr": lambda state: state.original,
    "ct original ip6 daddr": lambda state: state.original,
    "iifname": lambda state: state.interface.encode(),
}


class _Key(NamedTuple):
    """A concatenation; only its last part may be a numgen."""

    parts: tuple[_Part, ...]

    def fixed(self, state: State) -> bytes:
        """Return the parts of the key that are not random."""
        fixed = (part for part in self.parts if not isinstance(part, _Numgen))
        return b"".join(_FIELDS[part](state) if isinstance(part, str) else part.slot(state) for part in fixed)

    @property
    def numgen(self) -> _Numgen | None:
        last = self.parts[-1]
        return last if isinstance(last, _Numgen) else None

    def elements(self, target: Set, now: int, state: State) -> tuple[list[Element], bool]:
        """Return the elements that a lookup may find, and whether it may find none."""
        fixed, numgen = self.fixed(state), self.numgen
        if numgen is None:
            element = target.find(fixed, now)
            return ([element] if element is not None else []), element is None
        numbers: list[int] | range = range(numgen.offset, numgen.offset + numgen.modulus)
        if numgen.modulus > _FEW:
            size = len(fixed)
            taken = (int.from_bytes(key[size:], "little") for key in target.elements if key[:size] == fixed)
            numbers = [number for number in taken if number in numbers]
        there = [target.find(fixed + number.to_bytes(4, "little"), now) for number in numbers]
        elements = [element for element in there if element is not None]
        return elements, len(elements) < numgen.modulus


# -- effects of steps -------------------------------------------------------------------------------------------------


def _when(holds: bool, state: State) -> Ways:
    yield state, GO_ON if holds else BREAK


def _lookup(key: _Key, name: str, negated: bool) -> Step:
    return lambda table, now, state: _when((table.set(name).find(key.fixed(state), now) is None) is negated, state)


def _compare(key: _Key, operand: str, negated: bool) -> Step:
    def run(table: Table, now: int, state: State) -> Ways:
        value = key.fixed(state)
        if operand.startswith('"'):
            name = operand.strip('"').encode()
            holds = value.startswith(name[:-1]) if name.endswith(b"*") else value == name
        elif operand in PROTOCOLS:
            holds = value[0] == PROTOCOLS[operand]
        else:
            holds = ipaddress.ip_address(value) in ipaddress.ip_network(operand)
        return _when(holds is not negated, state)

    return run


def _one_of(key: _Key, protocols: list[str]) -> Step:
    return lambda table, now, state: _when(key.fixed(state)[0] in {PROTOCOLS[name] for name in protocols}, state)


def _verdict_map(key: _Key, name: str) -> Step:
    def run(table: Table, now: int, state: State) -> Ways:
        elements, perhaps_none = key.elements(table.set(name), now, state)
        for element in elements:
            yield state, Verdict("goto", element.value.decode())
        if perhaps_none:
            yield state, BREAK

    return run


def _verdicts(key: _Key, verdicts: dict[bytes, Verdict]) -> Step:
    def run(table: Table, now: int, state: State) -> Ways:
        if key.numgen is None:
            yield state, verdicts.get(key.fixed(state), BREAK)
            return
        for number in range(key.numgen.offset, key.numgen.offset + key.numgen.modulus):
            yield state, verdicts.get(number.to_bytes(4, "little"), BREAK)

    return run


def _end(kind: str) -> Callable[[_Reader], Step]:
    return lambda reader: lambda table, now, state: iter([(state, Verdict(kind))])


def _to(kind: str) -> Callable[[_Reader], Step]:
    def read(reader: _Reader) -> Step:
        verdict = Verdict(kind, reader.word())
        return lambda table, now, state: iter([(state, verdict)])

    return read


def _count(reader: _Reader) -> Step:
    reader.word()
    return lambda table, now, state: _when(True, state)


def _mark_is(reader: _Reader) -> Step:
    bits, _, value = int(reader.word(), 0), reader.word(), int(reader.word(), 0)
    return lambda table, now, state: _when(state.mark & bits == value, state)


def _set_mark(change: Callable[[int, int], int]) -> Callable[[_Reader], Step]:
    def read(reader: _Reader) -> Step:
        bits = int(reader.word(), 0)
        return lambda table, now, state: iter([(state._replace(mark=change(state.mark, bits)), GO_ON)])

    return read


def _dnat(reader: _Reader) -> Step:
    key = reader.key()
    assert reader.word() == "map"
    name = reader.word().removeprefix("@")

    def run(table: Table, now: int, state: State) -> Ways:
        elements, perhaps_none = key.elements(table.set(name), now, state)
        for element in elements:
            size = len(state.destination)
            address, port = element.value[:size], int.from_bytes(element.value[size : size + 2], "big")
            to_node = address in _OF_THE_NODE
            yield state._replace(destination=address, to_node=to_node, port=port, translated=True), ACCEPT
        if perhaps_none:
            yield state, BREAK

    return run


def _dnat_to_itself(reader: _Reader) -> Step:
    """Translate the destination (NAT) to the address in the packet's registers."""
    reader.key()

    def run(_table: Table, _now: int, state: State) -> Ways:
        yield state._replace(to_node=state.destination in _OF_THE_NODE, translated=True), ACCEPT

    return run


def _resource(reader: _Reader) -> Step:
    """Write another source into the packet: an address of the packet, or of the connection."""
    key = reader.key()
    return lambda table, now, state: iter([(state._replace(source=key.fixed(state)), GO_ON)])


def _readdress(reader: _Reader) -> Step:
    """Write another destination into the packet, without NAT."""
    if reader.original():
        return lambda table, now, state: iter([(state._replace(destination=state.original), GO_ON)])
    return _written(reader, lambda state, value: state._replace(destination=value))


def _carry(reader: _Reader) -> Step:
    """Write another port into the packet, without NAT."""
    if reader.original_port():
        return lambda table, now, state: iter([(state._replace(port=state.original_port), GO_ON)])
    return _written(reader, lambda state, value: state._replace(port=int.from_bytes(value, "big")))


def _written(reader: _Reader, write: Callable[[State, bytes], State]) -> Step:
    """Write the value of a map into the packet; without an element the rule ends."""
    key = reader.key()
    assert reader.word() == "map"
    name = reader.word().removeprefix("@")

    def run(table: Table, now: int, state: State) -> Ways:
        elements, perhaps_none = key.elements(table.set(name), now, state)
        for element in elements:
            yield write(state, element.value), GO_ON
        if perhaps_none:
            yield state, BREAK

    return run


def _masquerade(reader: _Reader) -> Step:
    assert reader.word() == "fully-random"
    return lambda table, now, state: iter([(state._replace(masqueraded=True), ACCEPT)])


def _remember(reader: _Reader) -> Step:
    name = reader.word().removeprefix("@")
    assert reader.word() == "{"
    key = reader.key()
    words = reader.until(":")
    timeout = milliseconds(words[1]) if words else 0
    data = reader.key()
    assert reader.word() == "}"

    def run(table: Table, now: int, state: State) -> Ways:
        target, client = table.set(name), key.fixed(state)
        full = target.size is not None and len(list(target.alive(now))) >= target.size
        if full and target.get(client, now) is None:
            yield state, BREAK
        else:
            made = Remembered(name, client, timeout, data.fixed(state))
            yield state._replace(remembered=(*state.remembered, made)), GO_ON

    return run


_READERS: list[tuple[tuple[str, ...], Callable[[_Reader], Step]]] = [
    (("goto",), _to("goto")),
    (("jump",), _to("jump")),
    (("return",), _end("return")),
    (("accept",), _end("accept")),
    (("drop",), _end("drop")),
    (("reject", "with", "tcp", "reset"), _end("reject")),
    (("reject",), _end("reject")),
    (("masquerade",), _masquerade),
    (("ct", "state", "new"), lambda reader: lambda table, now, state: _when(True, state)),
    (
        ("ct", "status", "!", "dnat"),
        lambda reader: lambda table, now, state: _when(not state.translated, state),
    ),
    (("ct", "status", "dnat"), lambda reader: lambda table, now, state: _when(state.translated, state)),
    (("fib", "saddr", "type", "local"), lambda reader: lambda table, now, state: _when(state.from_node, state)),
    (("fib", "daddr", "type", "local"), lambda reader: lambda table, now, state: _when(state.to_node, state)),
    (("meta", "mark", "set", "meta", "mark", "|"), _set_mark(lambda mark, bits: mark | bits)),
    (("meta", "mark", "set", "meta", "mark", "^"), _set_mark(lambda mark, bits: mark ^ bits)),
    (("meta", "mark", "&"), _mark_is),
    (("dnat", "to"), _dnat_to_itself),
    (("dnat", "ip", "to"), _dnat),
    (("dnat", "ip6", "to"), _dnat),
    (("ip", "saddr", "set"), _resource),
    (("ip6", "saddr", "set"), _resource),
    (("ip", "daddr", "set"), _readdress),
    (("ip6", "daddr", "set"), _readdress),
    (("th", "dport", "set"), _carry),
    (("update",), _remember),
    (("delete",), _remember),
    (("counter", "name"), _count),
]
