"""Evaluates filter rules of other programs: the general effect of each chain, and whether a chain certainly drops a
given packet.

Each base chain is evaluated alone, with the packet in its state at the chain's hook. For an unsupported test, and for a
test of a value that other rules may set (a mark), the evaluation follows both branches. Of a mark, only the bit
with which the proxy requests masquerading is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import cache, cached_property
from typing import Final, NamedTuple

from msgspec import Struct

from kubeproxy.kernel.chains import IP_FAMILIES
from kubeproxy.meaning import rules
from kubeproxy.meaning.flow import Ended, Interfaces, PacketSet
from kubeproxy.meaning.rules import (
    ACCEPT,
    DROP,
    ESTABLISHED,
    GOTO,
    INVALID,
    JUMP,
    NEW,
    TRANSLATED_STATE,
    ChainRules,
    CompiledFor,
    CompiledRules,
    HookPlace,
    NodePlace,
    Op,
    Operation,
    Property,
)
from kubeproxy.meaning.walk import Walk
from kubeproxy.model.addresses import Family, family_of

_TRACKED: Final = -200  # NF_IP_PRI_CONNTRACK
_KUBERNETES: Final = re.compile("KUBE-(?!ROUTER-|POD-FW-|NWPLCY-)")
"""Matches chains of kube-proxy and the kubelet, but not of kube-router, which filters connections of pods."""


class Filter(NamedTuple):
    """The effect of a base chain on packets that begin a connection.

    `accepts` means that a rule accepts or may accept new connections. `drops` is the number of rules that drop or
    reject. `closes` means that packets without a matching rule are dropped or rejected. `where` names the table, such
    as `table inet filter` or `iptables-legacy -t filter`. `untracks` means that a rule exempts packets from connection
    tracking. `marked` means that a chain of kube-proxy accepts new connections that kube-proxy masquerades. `zones`
    means that a rule assigns packets to a conntrack zone."""

    where: str
    family: str
    chain: str
    hook: str
    closes: bool
    accepts: bool
    drops: int
    untracks: bool = False
    marked: bool = False
    zones: bool = False


ZONES: Final = "puts into a zone"
"""The verdict of a Drop if packets are tracked in a zone that differs from the zone of the opposite direction."""


class PassingPacket(NamedTuple):
    """A packet at a hook, when it passes the chains with priorities between `after` and `before`.

    Addresses are packed; `source` None means any address of this node. `port` is the destination port of a request, or
    the source port of a reply. `original` is the destination of the connection's first packet before translation.
    `interfaces` are the incoming and the outgoing interface: None if unknown, '' if there is none. `tracked` means that
    rules translate the packet here or later, and that connection tracking must see the packet. `marks` are the bits
    of the first packet's mark that are known here, and their values; in later packets and replies these bits are 0."""

    hook: str
    after: float
    before: float
    source: bytes | None
    destination: bytes
    protocol: int
    port: int
    original: tuple[bytes, int]
    interfaces: tuple[str | None, str | None]
    translated: bool = False
    purpose: CompiledFor = CompiledFor.REQUEST
    tracked: bool = False
    marks: tuple[int, int] = (0, 0)


class Drop(NamedTuple):
    """A chain that certainly drops a packet, or exempts a packet from connection tracking (`untracks`).

    `unordered` means that the proxy's chain has the same priority, and that this chain stops the packet only in one of
    the two possible orders. `verdict` is "drops", "rejects", "resets" (rejects with a TCP reset) or "drops by its
    policy", or several such as "drops or rejects" if the matching rule is unknown."""

    where: str
    chain: str
    packet: PassingPacket
    unordered: bool = False
    untracks: bool = False
    verdict: str = "drops"


class SourceTranslation(NamedTuple):
    """A chain of type nat that translates the source of a packet to one of `sources`, which are packed addresses.
    `sure` means that the chain does so in every case. In `sources`, None is an unknown address. MASQUERADED is an
    address of this node: the address of the outgoing interface, or the unchanged source of this node's own packet. If
    `sources` is empty, a rule accepts the packet before the proxy's chain."""

    where: str
    chain: str
    packet: PassingPacket
    sources: frozenset[bytes | None]
    sure: bool


MASQUERADED: Final = b""
"""Stands for the address that masquerading takes from the outgoing interface."""


class Marking(NamedTuple):
    """A chain that may give a packet one of these marks before the kernel routes the packet; `sure` means that the
    chain does so in every case."""

    where: str
    chain: str
    packet: PassingPacket
    marks: frozenset[int]
    sure: bool


class ForeignTranslation(NamedTuple):
    """A chain of type nat that translates a connection's destination to one of `ends`, which are packed addresses (all
    bytes 0 for an address of this node) and ports. `sure` means that the chain always translates, and only to known
    destinations. `unordered` means that the proxy's chain has the same priority and may run before this chain."""

    where: str
    chain: str
    packet: PassingPacket
    ends: tuple[tuple[bytes, int], ...]
    sure: bool
    unordered: bool


class Firewall(Struct, eq=False, dict=True):
    """The rules of a table of another program; `where` names the table, as in Filter. `whole` means that all rules were
    read. `shared` means that the running proxy's rules are in the same chains."""

    where: str
    family: str
    compiled: Callable[[NodePlace, CompiledFor], list[ChainRules]]
    place: Callable[[Family], NodePlace]
    whole: bool
    shared: bool = False

    @cached_property
    def _rules_of(self) -> Callable[[Family, CompiledFor], tuple[CompiledRules, NodePlace]]:
        @cache  # compile once for each family and purpose
        def rules_of(family: Family, purpose: CompiledFor) -> tuple[CompiledRules, NodePlace]:
            place = self.place(family)
            return CompiledRules(self.compiled(place, purpose)), place

        return rules_of

    def filters(self) -> Iterator[Filter]:
        """Yield the effect of each base chain on new connections."""
        rules, _ = self._rules_of(IP_FAMILIES.get(self.family, Family.IPV4), CompiledFor.REQUEST)
        for name, chain in rules.chains.items():
            if chain.hook is not None and not chain.hook.nat:
                found = Filter(self.where, self.family, _short(name), chain.hook.name, False, not self.whole, 0)
                yield _with_chain(found, chain, rules)

    def drops(self, packets: Collection[PassingPacket], *, silently: bool = False) -> Iterator[Drop]:
        """Yield the chains that certainly stop one of these packets; with `silently`, only chains that never reject the
        packet."""
        for packet, name, hook, back, ended in self._passed(packets):
            left = [*back, *(one for one, _ in ended)]
            unordered = hook.priority in {packet.after, packet.before}
            sure = all(code == DROP and not each.unknown for each, code in ended) and (hook.drops or not back)
            refusals = {each.refused or "drops" for each, _ in ended} | ({"drops"} if back else set())
            if sure and not (silently and refusals != {"drops"}):
                verdict = " or ".join(sorted(refusals)) if ended else "drops by its policy"
                yield Drop(self.where, name, packet, unordered, verdict=verdict)
            elif packet.tracked and (all(one.untracked for one in left) or all(one.zoned for one in left)):
                unordered = unordered or hook.priority == _TRACKED
                verdict = "drops" if all(one.untracked for one in left) else ZONES
                yield Drop(self.where, name, packet, unordered, untracks=True, verdict=verdict)

    def harmless(self, packets: Collection[PassingPacket]) -> frozenset[str]:
        """Return the chains that some of these packets pass, and that certainly accept and track each packet of these
        connections that reaches the chain."""
        met: set[str] = set()
        unsure: set[str] = set()
        for state in (NEW, ESTABLISHED):
            for packet, name, hook, back, ended in self._passed(packets, state):
                if packet.after < hook.priority < packet.before:
                    left = [(one, code == DROP or bool(one.unknown)) for one, code in ended]
                    left += [(one, hook.drops) for one in back]
                    harms = any(stops or one.untracked or one.zoned for one, stops in left)
                    (unsure if harms else met).add(name)
        return frozenset(met - unsure)

    def translations(self, packet: PassingPacket) -> Iterator[ForeignTranslation]:
        """Yield the chains of type nat that may translate a packet's destination. After a chain that always
        translates, no chain is yielded, because the kernel runs no further chain."""
        for _, name, hook, back, ended in self._passed([packet], nat=True):
            moved, width = [each for each, _ in ended if each.translated], len(packet.destination)
            sure = not back and len(moved) == len(ended)
            unordered = hook.priority == packet.before and not self.shared
            ports = [rules.first_of(each.current or each.services)[1] for each in moved]
            ends = {each.destination.to_bytes(width, "big"): port for each, port in zip(moved, ports, strict=True)}
            if moved:
                yield ForeignTranslation(self.where, name, packet, tuple(sorted(ends.items())), sure, unordered)
            if moved and sure and not unordered:
                return

    def sources(self, packets: Collection[PassingPacket]) -> Iterator[SourceTranslation]:
        """Yield the chains that may translate the source of some of these packets. If the table also contains
        the running proxy's rules (`shared`), chains that may accept a packet before these rules are yielded, too:
        the proxy then does not translate the packet."""
        for packet, name, hook, back, ended in self._passed(packets, nat=True):
            moved = [each for each, _ in ended if each.masquerade]
            if moved or (self.shared and ended):
                new = [packet.source or MASQUERADED if one.new_source is None else one.new_source for one in moved]
                found = frozenset(one if isinstance(one, bytes) else None for one in new)
                sure = not back and len(moved) in {0, len(ended)}
                sure = sure and (self.shared or hook.priority != packet.before)
                yield SourceTranslation(self.where, name, packet, found, sure)

    def marking(self, packets: Collection[PassingPacket]) -> Iterator[Marking]:
        """Yield the chains that may change the mark of some of these packets."""
        for packet, name, _, back, ended in self._passed(packets):
            marks = {one.mark for one in (*back, *(each for each, code in ended if code != DROP))}
            changed = frozenset(marks - {packet.marks[1]})
            if changed:
                yield Marking(self.where, name, packet, changed, changed == marks)

    def _passed(self, packets: Collection[PassingPacket], state: int = 0, *, nat: bool = False) -> Iterator[_Passed]:
        """Yield the chains that packets of the table's family pass, as _ChainWalk.passed does; nothing if the table was
        not read completely."""
        walks: dict[tuple[Family, CompiledFor], _ChainWalk] = {}
        names = frozenset(name for packet in packets for name in packet.interfaces if name)
        for packet in packets if self.whole else ():
            family = family_of(packet.destination)
            if IP_FAMILIES.get(self.family, family) is not family:
                continue
            walk = walks.get((family, packet.purpose))
            if walk is None:
                rules, place = self._rules_of(family, packet.purpose)
                walk = walks[family, packet.purpose] = _ChainWalk(rules, place, names)
            yield from walk.passed(packet, state, nat=nat)


def _short(name: str) -> str:
    return name.split("/", 2)[2]


# -- one packet --------------------------------------------------------------------------------------------------------


class _Passed(NamedTuple):
    """A packet, a base chain, and the flows of the packet in two groups: flows that reach the end of the chain, and
    flows that end before."""

    packet: PassingPacket
    name: str
    hook: HookPlace
    back: list[PacketSet]
    ended: Ended


class _ChainWalk(Walk):
    """Follows single packets through chains, along both branches of a test with an unknown result."""

    def __init__(self, rules: CompiledRules, place: NodePlace, names: Collection[str]) -> None:
        super().__init__(rules, place, Interfaces((rules,), names))
        self._state, self._source_port, self._tracks, self._known_marks = NEW, 0, False, 0

    def passed(self, packet: PassingPacket, state: int = 0, *, nat: bool = False) -> Iterator[_Passed]:
        """Yield the base chains of type nat, or of all other types, that a packet passes or may pass. `state` is the
        conntrack state; by default, a request is new, and an answer belongs to an established connection."""
        state = state or (ESTABLISHED if packet.purpose is CompiledFor.ANSWER and not nat else NEW)
        for chain in self._ruleset.at(packet.hook):
            hook = chain.hook
            if hook is not None and hook.nat is nat and packet.after <= hook.priority <= packet.before:
                ended: Ended = []
                self._tracks = hook.priority > _TRACKED
                self._state = state if self._tracks else INVALID
                self._source_port, flow = packet.port, self._flow(packet)
                self._known_marks, flow.mark = packet.marks if state == NEW else (packet.marks[0], 0)
                yield _Passed(packet, _short(chain.name), hook, self._chain(chain, flow, ended, 0), ended)

    def _flow(self, packet: PassingPacket) -> PacketSet:
        address, port = packet.original
        self._destination = int.from_bytes(address, "big")
        every = rules.protocol_set(packet.protocol)
        is_request = packet.purpose is CompiledFor.REQUEST
        source = int.from_bytes(packet.source, "big") if packet.source is not None else None
        came_in, leaves = packet.interfaces
        flow = PacketSet(
            rules.service(packet.protocol, port) or every,
            self._place.local if source is None else ((source, source),),
            self._bits(came_in),
            self._bits(leaves),
            int.from_bytes(packet.destination, "big"),
        )
        flow.translated = packet.translated
        if not is_request:
            flow.current = every  # the client's port is unknown
        elif packet.translated:
            flow.current = rules.service(packet.protocol, packet.port) or every
        return flow

    def _bits(self, name: str | None) -> int:
        if name is None:
            return self._interfaces.every | Interfaces.NONE | Interfaces.LOOPBACK
        return self._interfaces.named(name)

    def _value(self, field: Property, flow: PacketSet) -> int:
        if field is Property.STATE:
            return self._state
        if field is Property.STATES:
            return self._state | TRANSLATED_STATE * flow.translated
        if field is Property.SOURCE_PORT:
            return self._source_port
        return super()._value(field, flow)

    def _skips(self, rule: tuple[Operation, ...], flow: PacketSet) -> bool:
        unknown = next((number for number, op in enumerate(rule) if self._is_unknown(op)), len(rule))
        return super()._skips(rule[:unknown], flow)

    def _test(self, kind: Op, op: Operation, flow: PacketSet, missed: list[PacketSet]) -> PacketSet | None:
        if not self._is_unknown(op):
            return super()._test(kind, op, flow, missed)
        missed.append(flow.copy())
        return flow

    def _is_unknown(self, op: Operation) -> bool:
        return op[:2] == (Op.VALUE, Property.MARK) and bool(op[2] & ~self._known_marks)

    def _guesses(self, kind: Op, flow: PacketSet, missed: list[PacketSet]) -> bool:
        if kind is Op.UNTRACK:  # a packet that is already tracked remains tracked
            flow.untracked = flow.untracked or not self._tracks
        elif kind is Op.ZONE:
            flow.zoned = flow.zoned or not self._tracks
        else:
            missed.append(flow.copy())
        return True

    def _distinct(self, flows: list[PacketSet]) -> list[PacketSet]:
        seen = {}
        for one in flows:
            ends = one.services, one.current, one.destination, one.sources, one.inputs, one.outputs
            seen[*ends, one.untracked, one.zoned, one.mark & self._known_marks] = one
        return list(seen.values())


# -- in general --------------------------------------------------------------------------------------------------------


def _with_chain(found: Filter, chain: ChainRules, rules: CompiledRules) -> Filter:
    reached, seen = [chain], {chain.name}
    early = chain.hook is not None and chain.hook.priority <= _TRACKED
    while reached:
        for rule in reached.pop().rules:
            verdicts = _verdicts_for_new_connections(rule)
            new = all(_may_be_new(op) for op in rule)
            found = found._replace(
                accepts=found.accepts or (new and any(code == ACCEPT for code, _ in verdicts)),
                drops=found.drops + any(code == DROP for code, _ in verdicts),
                untracks=found.untracks or (early and any(op[0] is Op.UNTRACK for op in rule)),
                zones=found.zones or (early and any(op[0] is Op.ZONE for op in rule)),
            )
            for code, target in verdicts:
                if code not in {JUMP, GOTO} or target in seen:
                    continue
                if _KUBERNETES.match(_short(target)):
                    found = found._replace(marked=found.marked or _short(target) == "KUBE-FORWARD")
                else:
                    seen.add(target)
                    reached.append(rules.chains[target])
    closes = any(rule and rule[-1][:2] == (Op.VERDICT, DROP) and rule[0][0] in _ENDS for rule in chain.rules)
    return found._replace(closes=closes or bool(chain.hook and chain.hook.drops))


_ENDS: Final = frozenset({Op.VERDICT, Op.REFUSE})


def _verdicts_for_new_connections(rule: tuple[Operation, ...]) -> list[tuple[int, str]]:
    if not rule:
        return []
    kind = rule[-1][0]
    if kind is Op.VERDICT:
        return [rule[-1][1:]]
    if kind is Op.FIND and rule[-1][2]:
        table = rule[-1][1]
        at = table.at.get(Property.STATE)
        return [each.data for each in table.entries if at is None or each.ranges[at][0] <= NEW <= each.ranges[at][1]]
    return []


def _may_be_new(op: Operation) -> bool:
    if op[0] is Op.VALUE and op[1] in {Property.STATE, Property.STATES}:
        _, _, mask, xor, low, high, negated = op
        states = (NEW, NEW | TRANSLATED_STATE) if op[1] is Property.STATES else (NEW,)
        return any((low <= (state & mask) ^ xor <= high) is not negated for state in states)
    if op[0] is Op.FIND and (at := op[1].at.get(Property.STATE)) is not None:
        return any(each.ranges[at][0] <= NEW <= each.ranges[at][1] for each in op[1].entries)
    return op[:2] != (Op.SERVICE, 0)
