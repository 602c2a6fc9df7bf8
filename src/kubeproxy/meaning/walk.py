"""Follows packets through a ruleset: all sources, protocols, ports and interfaces for one destination together.

A flow is a set of packets (sources x protocols and ports x interfaces) with a weight. A rule that distinguishes packets
of a flow splits the flow. Hooks and their order are those of Linux 6.18 (nf_hook_slow, nf_nat_inet_fn). Each packet is
the first of its connection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from kubeproxy.meaning import rules
from kubeproxy.meaning.flow import (
    Ended,
    Interfaces,
    Leaf,
    PacketOutcome,
    PacketSet,
    by_bits,
    by_chance,
    by_source,
)
from kubeproxy.meaning.rules import (
    ACCEPT,
    CONTINUE,
    DROP,
    GOTO,
    JUMP,
    NEW,
    RETURN,
    TRANSLATED,
    TRANSLATED_STATE,
    ChainRules,
    CompiledRules,
    Keyed,
    MapEntry,
    NodePlace,
    Op,
    Operation,
    Property,
)

_NOT_FIXED: Final = frozenset(
    {Property.SOURCE, Property.PROTOCOL, Property.PORT, Property.INPUT, Property.OUTPUT, Property.RANDOM}
)
_UNKNOWN: Final = frozenset({Op.UNKNOWN, Op.UNTRACK, Op.ZONE})
_DEEPEST: Final = 64
"""The maximum depth of nested jumps; the kernel allows 16."""


class Walk:
    """Follows packets through one ruleset."""

    def __init__(self, ruleset: CompiledRules, place: NodePlace, interfaces: Interfaces) -> None:
        self._ruleset = ruleset
        self._place = place
        self._interfaces = interfaces
        self._remote = rules.minus(place.everywhere, place.local)
        self._destination = 0
        self.leaves_out = False
        """Whether a map has an element that is never picked, because its key is higher than every random number."""

    def outcomes(self, destination: int, services: int, *, here: bool) -> list[Leaf]:
        """Return the outcomes of packets to a destination; the node receives the packets, or, with `here`, sends
        them."""
        self._destination = destination
        way, sources, inputs = self._arriving, self._remote, self._interfaces.every
        if here:
            way, sources, inputs = self._made_here, self._place.local, Interfaces.NONE
        first = PacketSet(services, sources, inputs, self._interfaces.every, destination)
        return [self._again(leaf, first.copy(), way) if leaf.stored else leaf for leaf in way(first.copy())]

    def _again(self, leaf: Leaf, flow: PacketSet, way: Callable[[PacketSet], list[Leaf]]) -> Leaf:
        """Follow the next connection of clients with stored elements; if its outcome is the same, set `remembered`."""
        flow.services, flow.sources, flow.inputs, flow.known = *leaf[:3], leaf.stored
        others = {each.outcome for each in way(flow)} - {leaf.outcome}
        unknown = next((each for each in others if each.kind == "unknown"), None)
        return leaf._replace(outcome=unknown or leaf.outcome._replace(remembered=not others))

    def _arriving(self, flow: PacketSet) -> list[Leaf]:
        leaves: list[Leaf] = []
        for each in self._hook("prerouting", [flow], leaves):
            hooks = ("input",) if self._local(each.destination) else ("forward", "postrouting")
            self._last(hooks, each, leaves)
        return leaves

    def _made_here(self, flow: PacketSet) -> list[Leaf]:
        every, here = self._interfaces.every, self._local(flow.destination)
        flow.outputs = Interfaces.LOOPBACK if here else every
        leaves: list[Leaf] = []
        for each in self._hook("output", [flow], leaves):
            local = self._local(each.destination)
            if local is not here:
                each.outputs = Interfaces.LOOPBACK if local else every
            if not local:
                self._last(("postrouting",), each, leaves)
                continue
            left = self._hook("postrouting", [each], leaves)
            for one in left:
                one.inputs = Interfaces.LOOPBACK
            self._finish(self._hook("input", self._hook("prerouting", left, leaves, looped=True), leaves), leaves)
        # The destination alone causes the path through loopback, so lo is not reported as a property of the packet.
        outputs = {Interfaces.LOOPBACK: every}
        return [one._replace(inputs=Interfaces.NONE, outputs=outputs.get(one.outputs, one.outputs)) for one in leaves]

    def _last(self, hooks: Sequence[str], flow: PacketSet, leaves: list[Leaf]) -> None:
        flows = [flow]
        for hook in hooks:
            flows = self._hook(hook, flows, leaves)
        self._finish(flows, leaves)

    def _local(self, address: int) -> bool:
        return rules.holds(self._place.local, address)

    def _hook(self, hook: str, flows: list[PacketSet], leaves: list[Leaf], *, looped: bool = False) -> list[PacketSet]:
        """Return the flows that pass all chains of a hook; `looped` means that the packets come back from lo, and are
        not translated again."""
        for chain in self._ruleset.at(hook):
            assert chain.hook is not None  # noqa: S101 - base chains have a hook
            if (chain.hook.nat and looped) or (not chain.rules and not chain.hook.drops):
                continue
            passed: list[PacketSet] = []
            source_nat = hook in {"postrouting", "input"}
            for flow in flows:
                if chain.hook.nat and (flow.masquerade if source_nat else flow.translated):
                    passed.append(flow)
                    continue
                ended: Ended = []
                back = self._chain(chain, flow, ended, 0)
                ended += [(each, DROP if chain.hook.drops else ACCEPT) for each in back]
                for each, code in ended:
                    if each.unknown or code == DROP:
                        self._leave(each, leaves)
                    else:
                        passed.append(each)
            flows = passed
        return flows

    def _finish(self, flows: list[PacketSet], leaves: list[Leaf]) -> None:
        destination = self._destination
        for flow in flows:
            if flow.hidden is not None:
                flow.unknown = "a source address that a rule has written"
                self._leave(flow, leaves)
                continue
            if flow.translated or flow.destination != destination or flow.current is not None:
                port = -1 if flow.current is None else rules.first_of(flow.current)[1]
                outcome = PacketOutcome("translated", flow.destination, port, flow.masquerade)
            else:
                outcome = PacketOutcome("passed", 0, -1, flow.masquerade)
            stored = flow.stored if outcome.kind == "translated" else ()
            leaves.append(Leaf(flow.services, flow.sources, flow.inputs, flow.outputs, flow.share, outcome, stored))

    @staticmethod
    def _leave(flow: PacketSet, leaves: list[Leaf]) -> None:
        kind = "unknown" if flow.unknown else "refused" if flow.refused else "dropped"
        outcome = PacketOutcome(kind, text=flow.unknown)
        leaves.append(Leaf(flow.services, flow.sources, flow.inputs, flow.outputs, flow.share, outcome))

    # -- chains ------------------------------------------------------------------------------------------------------

    def _chain(self, chain: ChainRules, flow: PacketSet, ended: Ended, depth: int) -> list[PacketSet]:
        if depth > _DEEPEST:
            flow.unknown = f"a loop of chains at {chain.name}"
            ended.append((flow, DROP))
            return []
        back: list[PacketSet] = []
        pending = [(0, flow)]
        rules = chain.rules
        while pending:
            start, flow = pending.pop()
            numbers = chain.candidates(flow.destination, flow.services if flow.current is None else flow.current)
            for at in range(bisect_left(numbers, start), len(numbers)):
                rule = rules[numbers[at]]
                if self._skips(rule, flow):
                    continue
                missed: list[PacketSet] = []
                matched: list[tuple[PacketSet, int, str]] = []
                self._rule(rule, 0, flow, missed, matched)
                for each, code, target in matched:
                    if code == CONTINUE:
                        missed.append(each)
                    elif code in (JUMP, GOTO):
                        left = self._chain(self._ruleset.chains[target], each, ended, depth + 1)
                        (missed if code == JUMP else back).extend(left)
                    elif code == RETURN:
                        back.append(each)
                    else:
                        ended.append((each, code))
                if len(missed) != 1 or missed[0] is not flow:
                    pending += [(numbers[at] + 1, each) for each in self._distinct(missed)]
                    break
            else:
                back.append(flow)
        return back

    def _skips(self, rule: tuple[Operation, ...], flow: PacketSet) -> bool:
        """Return quickly whether one of a rule's first tests is false for all packets of a flow."""
        for op in rule:
            kind = op[0]
            if kind is Op.VALUE:
                _, field, mask, xor, low, high, negated = op
                if (low <= (self._value(field, flow) & mask) ^ xor <= high) is negated:
                    return True
            elif kind is Op.SERVICE:
                if not op[1] & (flow.services if flow.current is None else flow.current):
                    return True
            elif kind is Op.DESTINATION:
                if not rules.holds(op[1], flow.destination):
                    return True
            elif kind is Op.FIND:
                services = flow.services if flow.current is None else flow.current
                return not (flow.known or op[1].candidates(flow.destination, services))
            else:
                return kind is Op.KNOWN and not self._known(op[1], flow)
        return False

    def _rule(
        self,
        rule: tuple[Operation, ...],
        at: int,
        flow: PacketSet,
        missed: list[PacketSet],
        matched: list[tuple[PacketSet, int, str]],
    ) -> None:
        """Execute a rule from operation `at` on; append flows that fail a test to `missed`, and other flows with their
        verdict to `matched`."""
        changed = False
        for number in range(at, len(rule)):
            op = rule[number]
            kind = op[0]
            if kind is Op.VERDICT:
                matched.append((flow, op[1], op[2]))
                return
            if kind is Op.FIND:
                self._find(rule, number, op[1], flow, missed, matched)
                return
            if kind is Op.MISSES:
                inside: list[tuple[PacketSet, MapEntry]] = []
                rest = self._lookup(op[1], flow, inside)
                missed += [each for each, _ in inside]
                for each in rest:
                    self._rule(rule, number + 1, each, missed, matched)
                return
            if kind <= Op.KNOWN:
                kept = self._test(kind, op, flow, missed)
                if kept is None:
                    return
                flow = kept
                continue
            if kind in _UNKNOWN and self._guesses(kind, flow, missed):
                continue
            if not changed:
                flow, changed = flow.copy(), True
            for more in self._change(kind, op, flow):
                self._rule(rule, number + 1, more, missed, matched)
            if flow.unknown:
                matched.append((flow, DROP, ""))
                return
        matched.append((flow, CONTINUE, ""))

    def _guesses(self, kind: Op, flow: PacketSet, missed: list[PacketSet]) -> bool:  # noqa: ARG002 - for other walks
        """Return whether an unsupported operation counts as a test with an unknown result; if so, append the flow that
        fails the test."""
        return False

    def _distinct(self, flows: list[PacketSet]) -> list[PacketSet]:
        return flows

    def _test(self, kind: Op, op: Operation, flow: PacketSet, missed: list[PacketSet]) -> PacketSet | None:
        if kind is Op.SERVICE or kind is Op.ORIGINAL_SERVICE:
            is_first = kind is Op.ORIGINAL_SERVICE or flow.current is None
            return by_bits("services" if is_first else "current", op[1], flow, missed)
        if kind is Op.SOURCE:
            return by_source(op[1], flow, missed)
        if kind is Op.CHANCE:
            return by_chance(flow, op[1], missed)
        if kind is Op.INTERFACE:
            _, patterns, negated, outgoing = op
            wanted = self._interfaces.of(patterns)
            return by_bits("outputs" if outgoing else "inputs", ~wanted if negated else wanted, flow, missed)
        if kind is Op.DESTINATION:
            holds = rules.holds(op[1], flow.destination)
        elif kind is Op.KNOWN:
            holds = bool(self._known(op[1], flow))
        else:
            _, field, mask, xor, low, high, negated = op
            holds = (low <= (self._value(field, flow) & mask) ^ xor <= high) is not negated
        if holds:
            return flow
        missed.append(flow)
        return None

    @staticmethod
    def _known(name: str, flow: PacketSet) -> list[MapEntry]:
        return [MapEntry((), data) for each, hidden, data in flow.known if (each, hidden) == (name, flow.hidden)]

    def _value(self, field: Property, flow: PacketSet) -> int:
        if field is Property.MARK:
            return flow.mark
        if field is Property.STATE:
            return NEW
        if field is Property.STATES:
            return NEW | TRANSLATED_STATE * flow.translated
        if field is Property.STATUS:
            return TRANSLATED if flow.translated else 0
        if field is Property.ORIGINAL_DESTINATION:
            return self._destination
        return 2 if self._local(flow.destination) else 1  # RTN_LOCAL, RTN_UNICAST

    # -- sets and maps -----------------------------------------------------------------------------------------------

    def _find(
        self,
        rule: tuple[Operation, ...],
        number: int,
        table: Keyed,
        flow: PacketSet,
        missed: list[PacketSet],
        matched: list[tuple[PacketSet, int, str]],
    ) -> None:
        found: list[tuple[PacketSet, MapEntry]] = []
        missed += self._lookup(table, flow, found)
        for each, entry in found:
            if rule[number][2]:
                code, chain = entry.data
                matched.append((each, code, chain))  # type: ignore[arg-type]
            else:
                each.found = entry.data
                self._rule(rule, number + 1, each, missed, matched)

    def _lookup(self, table: Keyed, flow: PacketSet, found: list[tuple[PacketSet, MapEntry]]) -> list[PacketSet]:
        """Append each part of a flow that matches an entry, with the entry, to `found`; return the parts that match no
        entry."""
        mine = flow.services if flow.current is None else flow.current
        candidates = table.candidates(flow.destination, mine)
        if not candidates:
            known = self._known(table.name, flow)
            found += [(flow.copy(), entry) for entry in known[:1]]
            return [] if known else [flow]
        rest = [flow]
        for group in self._groups(table, candidates).values():
            left: list[PacketSet] = []
            for each in rest:
                self._meet(table, group, each, left, found)
            rest = left
            if not rest:
                break
        return rest

    @staticmethod
    def _groups(table: Keyed, candidates: list[tuple[int, MapEntry]]) -> Mapping[Any, list[tuple[int, MapEntry]]]:
        if table.random is None:
            return dict(enumerate([pair] for pair in candidates))
        at = table.random
        groups: dict[Any, list[tuple[int, MapEntry]]] = {}
        for pair in candidates:
            ranges = pair[1].ranges
            groups.setdefault(ranges[:at] + ranges[at + 1 :], []).append(pair)
        return groups

    def _meet(
        self,
        table: Keyed,
        group: list[tuple[int, MapEntry]],
        flow: PacketSet,
        rest: list[PacketSet],
        found: list[tuple[PacketSet, MapEntry]],
    ) -> None:
        services, entry = group[0]
        mine = flow.services if flow.current is None else flow.current
        both = mine & services
        if not both or not self._fits(table, entry, flow):
            rest.append(flow)
            return
        if both != mine:
            rest.append(flow.within(mine & ~both))
            flow = flow.within(both)
        at = table.at
        if Property.SOURCE in at:
            kept = by_source((entry.ranges[at[Property.SOURCE]],), flow, rest)
            if kept is None:
                return
            flow = kept
        if Property.INPUT in at or Property.OUTPUT in at:
            flow.unknown = f"interface as a part of a key of {table.name}"
        if table.random is None:
            found.append((flow.copy(), entry))
            return
        part, left = table.parts[table.random], 1.0
        first, last = part.offset, part.offset + part.modulus - 1
        for _, each in group:
            low, high = each.ranges[table.random]
            share = (min(high, last) - max(low, first) + 1) / part.modulus
            self.leaves_out |= high > last
            if share > 0:
                left -= share
                found.append((replace(flow, share=flow.share * share), each))
        if left > 1e-9:
            rest.append(replace(flow, share=flow.share * left))

    def _fits(self, table: Keyed, entry: MapEntry, flow: PacketSet) -> bool:
        for (field, *_), (low, high) in zip(table.parts, entry.ranges, strict=True):
            if field is Property.DESTINATION:
                if not low <= flow.destination <= high:
                    return False
            elif field not in _NOT_FIXED and not low <= self._value(field, flow) <= high:
                return False
        return True

    # -- changes -----------------------------------------------------------------------------------------------------

    def _change(self, kind: Op, op: Operation, flow: PacketSet) -> list[PacketSet]:
        """Change a flow; return the parts that are split off, such as other protocols if a port is translated."""
        if kind is Op.MARK:
            flow.mark = flow.mark & op[1] ^ op[2]
        elif kind is Op.MASQUERADE:
            new = op[1] if len(op) > 1 else b""
            is_found = bool(new) and isinstance(new, tuple)
            flow.masquerade, flow.new_source = True, flow.found[new[0] : sum(new)] if is_found else new
        elif kind is Op.REFUSE:
            flow.refused = "resets" if op[1] else "rejects"
        elif kind is Op.REMEMBER:
            data = flow.destination.to_bytes(self._place.bits // 8, "big")
            flow.stored += ((op[1], flow.hidden, data),)
        elif kind in _UNKNOWN:
            flow.unknown = op[1]
        elif kind is Op.WRITE:
            return self._write(op[1], op[2], flow)
        else:
            flow.translated = True
            if op[1] is not None:
                flow.destination = self._number(op[1], flow)
            if op[2] is not None:
                return self._set_port(flow, self._number(op[2], flow))
            if op[1] is None:  # the packet's own address and port
                flow.current = flow.services if flow.current is None else flow.current
        return []

    def _write(self, field: Property, value: Any, flow: PacketSet) -> list[PacketSet]:
        """Write a field of the packets; return the packets to which the write does not apply, as separate flows."""
        if field is Property.SOURCE:
            flow.hidden = None if value is None else flow.destination
        elif field is Property.DESTINATION:
            flow.destination = self._destination if value is None else self._number(value, flow)
        elif value is None:
            flow.current = None
        else:
            return self._set_port(flow, self._number(value, flow))
        return []

    @staticmethod
    def _number(operand: bytes | tuple[int, int], flow: PacketSet) -> int:
        if isinstance(operand, bytes):
            return int.from_bytes(operand, "big")
        offset, size = operand
        return int.from_bytes(flow.found[offset : offset + size], "big")

    @staticmethod
    def _set_port(flow: PacketSet, port: int) -> list[PacketSet]:
        """Set the port of a flow. A flow of several protocols keeps only the first protocol; return a flow with the new
        port for each other protocol."""
        mine = flow.services if flow.current is None else flow.current
        only = rules.point(mine)
        if only is not None:
            flow.current = rules.service(only[0], port)
            return []
        parts = [
            (part, 0 if protocol is None else rules.service(protocol, port))
            for protocol in (*rules.BLOCKS, None)
            if (part := mine & (rules.OTHERS if protocol is None else rules.protocol_set(protocol)))
        ]
        flows = [flow, *(flow.copy() for _ in parts[1:])]
        for each, (part, target) in zip(flows, parts, strict=True):
            if each.current is None:
                each.services = part
            each.current = target or part
        return flows[1:]
