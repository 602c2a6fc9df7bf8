"""Evaluates a packet: through the hooks in their order, and through chains like the kernel.

All random outcomes are followed. A packet is the first one of its connection, because nat chains see no other.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from kubeproxy.model.addresses import Family
from support.fake_nftables.expressions import BREAK, GO_ON, Remembered, State, Verdict, steps
from support.fake_nftables.kernel import FakeKernel
from support.fake_nftables.objects import Chain, Element, Set, Table

Origin = Literal["pod", "node", "outside"]

INTERFACES = {"pod": "cni0", "node": "", "outside": "eth0"}


class Packet(NamedTuple):
    """The first packet of a connection, addresses packed. `to_node`: the destination is an address of this node."""

    origin: Origin
    source: bytes
    destination: bytes
    protocol: int
    port: int
    to_node: bool = False
    source_port: int = 40000


class Forwarded(NamedTuple):
    """The result: all endpoints (address and port) that may get the packet, those that see a translated source, and
    affinity.

    `affinity` is the duration of session affinity in seconds; 0 if the client's next connection may reach another
    endpoint.
    """

    endpoints: tuple[bytes, ...]
    masqueraded: tuple[bytes, ...]
    affinity: int


Fate = Forwarded | Literal["reject", "drop", "pass"]


class Way(NamedTuple):
    """One possible path of a packet: the chain in which it ends, and the packet's final state."""

    end: Literal["reject", "drop", "pass"]
    state: State

    @property
    def endpoint(self) -> bytes:
        """Return the endpoint that gets the packet, or b'' if its destination is unchanged."""
        state = self.state
        return state.destination + state.port.to_bytes(2, "big") if state.translated else b""


def fate(kernel: FakeKernel, packet: Packet) -> Fate:
    """Return the result for a packet, with any random choice. Fails if the kind of result depends on the choice."""
    every = ways(kernel, packet)
    forwarded = {way for way in every if way.end == "pass" and way.endpoint}
    if not forwarded:
        (end,) = {way.end for way in every}
        return end
    assert forwarded == set(every), f"{packet} is sometimes forwarded: {every}"
    endpoints = {way.endpoint: way.state.masqueraded for way in every}
    # An endpoint with a larger share has several slots, and each slot has separate clients.
    apart = {way._replace(state=way.state._replace(remembered=())) for way in every}
    assert len(endpoints) == len(apart), f"{packet} may come to an endpoint in two ways: {every}"
    (affinity,) = {max([0, *(client.timeout for client in way.state.remembered)]) // 1000 for way in every}
    masqueraded = tuple(sorted(endpoint for endpoint, hidden in endpoints.items() if hidden))
    return Forwarded(tuple(sorted(endpoints)), masqueraded, affinity)


def send(kernel: FakeKernel, packet: Packet, chance: random.Random) -> Way:
    """Follow one random path of a packet, and store its client if a rule does so."""
    way = chance.choice(sorted(ways(kernel, packet)))
    for client in way.state.remembered:
        for table in _tables(kernel, packet):
            if client.set in table.sets:
                _remember(table.sets[client.set], client, kernel.now)
    return way


def _remember(target: Set, client: Remembered, now: int) -> None:
    """Add or delete a client of session affinity. An update does not replace the data of an element."""
    known = target.find(client.key, now)
    if not client.timeout:
        target.elements.pop(client.key, None)
        return
    data = client.data if known is None else known.value
    target.elements[client.key] = Element(data, timeout=client.timeout, until=now + client.timeout)


def ways(kernel: FakeKernel, packet: Packet) -> Collection[Way]:
    """Return all possible paths of a packet."""
    state = State(
        INTERFACES[packet.origin],
        packet.origin == "node",
        packet.source,
        packet.destination,
        packet.to_node,
        packet.protocol,
        packet.port,
        packet.destination,
        packet.port,
        packet.source,
        packet.source_port,
    )
    tables = _tables(kernel, packet)
    found = set(_hooks(kernel, tables, "output" if state.from_node else "prerouting", state))
    for way in found:
        kept = (way.state.destination, way.state.port) == (packet.destination, packet.port)
        assert way.endpoint or kept, f"a packet to nowhere: {way}"
        assert way.state.source == packet.source, f"a packet from nowhere: {way}"
    return found


def _tables(kernel: FakeKernel, packet: Packet) -> list[Table]:
    family = "ip" if len(packet.source) == Family.IPV4.address_size else "ip6"
    return [table for (word, _), table in kernel.tables.items() if word == family and not table.dormant]


def _hooks(kernel: FakeKernel, tables: list[Table], hook: str, state: State) -> Iterator[Way]:
    """Evaluate a hook and the hooks after it."""
    chains = [(chain, table) for table in tables for chain in table.chains.values() if f"hook {hook} " in chain.hook]
    chains.sort(key=lambda place: _priority(place[0]))
    for end, after in _base_chains(kernel, chains, state):
        following = _following(hook, after)
        if end == "pass" and following:
            yield from _hooks(kernel, tables, following, after)
        else:
            yield Way(end, after)


def _following(hook: str, state: State) -> str:
    """Return the next hook, '' for none. A packet from the node to itself passes output, then input on loopback.

    The second prerouting of such a packet is not modelled, because output has already done everything that the proxy's
    chains do there.
    """
    if hook == "prerouting":
        return "input" if state.to_node else "forward"
    if hook == "postrouting":
        return "input" if state.from_node and state.to_node else ""
    return "" if hook == "input" else "postrouting"


def _base_chains(kernel: FakeKernel, chains: list[tuple[Chain, Table]], state: State) -> Iterator[Way]:
    if not chains:
        yield Way("pass", state)
        return
    (chain, table), *others = chains
    for after, verdict in _chain(kernel, table, chain, state):
        if verdict.kind in {"drop", "reject"}:
            yield Way("drop" if verdict.kind == "drop" else "reject", after)
        else:
            yield from _base_chains(kernel, others, after)


def _priority(chain: Chain) -> int:
    words = chain.hook.replace(";", " ").split()
    return int(words[words.index("priority") + 1])


def _chain(kernel: FakeKernel, table: Table, chain: Chain, state: State) -> dict[tuple[State, Verdict], None]:
    """Return the paths through a chain: each with a verdict, or GO_ON at the end of the chain."""
    ends: dict[tuple[State, Verdict], None] = {}
    begun: dict[State, None] = {state: None}
    for rule in chain.rules:
        going_on: dict[State, None] = {}
        for before in begun:
            for after, verdict in _rule(kernel, table, rule.text, before):
                if verdict in {GO_ON, BREAK}:
                    going_on[after] = None
                elif verdict.kind == "return":
                    ends[after, GO_ON] = None
                else:
                    ends[after, verdict] = None
        begun = going_on
    return ends | dict.fromkeys((after, GO_ON) for after in begun)


def _rule(kernel: FakeKernel, table: Table, text: str, state: State) -> Iterator[tuple[State, Verdict]]:
    """Yield the paths through a rule, and through the chains that it jumps to.

    After a goto, the end of the target chain also ends the chain of the rule.
    """
    for after, verdict in _steps(kernel, table, text, state):
        if verdict.kind not in {"jump", "goto"}:
            yield after, verdict
            continue
        for end, result in _chain(kernel, table, table.chain(verdict.target), after):
            back = Verdict("return") if verdict.kind == "goto" else GO_ON
            yield end, back if result == GO_ON else result


def _steps(kernel: FakeKernel, table: Table, text: str, state: State) -> Iterator[tuple[State, Verdict]]:
    going_on = [state]
    for step in steps(text):
        begun, going_on = going_on, []
        for before in begun:
            for after, verdict in step(table, kernel.now, before):
                if verdict == GO_ON:
                    going_on.append(after)
                else:
                    yield after, verdict
    for after in going_on:
        yield after, GO_ON
