"""ipvs mode beside the proxy: in what virtual servers, sets, addresses and rules differ from plans.

Real servers that drain are as they should be. A NodePort that gave way to an address of another Service is known as
such when everything is compared.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from kubeproxy.backends.examination import Finding, Kind, Plans, front_text
from kubeproxy.backends.ipvs import INTERFACE
from kubeproxy.backends.ipvs.backend import Addresses, node_of
from kubeproxy.backends.ipvs.chains import JUMPS, Rules
from kubeproxy.backends.ipvs.graceful import WEIGHT, ActualServer
from kubeproxy.backends.ipvs.layout import TYPES, Scheduler, SetId
from kubeproxy.backends.ipvs.render import NodeAddresses, Virtual, Wish, render, server_key
from kubeproxy.backends.ipvs.state import State, untouched
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.ipset import BITMAP_PORT, SetEntry
from kubeproxy.kernel.xtables.xtables import chain_of, target_of
from kubeproxy.model.addresses import Family, Range, destination_text, unpack, within
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName

Printer = Callable[[Rules], Sequence[str]]
"""Returns how our rules and the jumps to them are listed. Raises Unsupported, or ApplyError."""

_MEANINGS: Final = {
    SetId.LOOP_BACK: "masqueraded on its way to itself",
    SetId.LOAD_BALANCER_FW: "closed to all but its source ranges",
    SetId.LOAD_BALANCER_SOURCE_IP: "open for a source address",
    SetId.LOAD_BALANCER_SOURCE_CIDR: "open for a source range",
    SetId.HEALTH_CHECK_NODE_PORT: "a health check port",
    SetId.DROP: "dropped, as no endpoint is on this node",
    SetId.DROP_OUTSIDE: "dropped for clients from outside, as no endpoint is on this node",
    SetId.IPVS_IPS: "an address of a Service",
}


class View(Protocol):
    """One family of the kernel, to be read. Everything raises ApplyError."""

    def servers(self) -> Mapping[bytes, ActualServer]:
        """Return all virtual servers with their real servers."""

    def survey(self, keys: Iterable[bytes]) -> tuple[set[bytes], Mapping[bytes, ActualServer]]:
        """Return all virtual servers, and these ones, as far as they are there, with their real servers."""

    def entries(self, set_id: SetId) -> set[SetEntry]:
        """Return a set's entries."""

    def counts(self) -> Mapping[SetId, object]:
        """Return something for each set that is there."""

    def addresses(self) -> Addresses:
        """Return the node's addresses."""

    def rules(self, rules: Rules) -> Sequence[str]:
        """Return the rules that are in our chains, and those that lead to them."""

    def close(self) -> None:
        """Let go of the kernel."""


class IpvsExaminer:
    """See backends.examination.Examiner."""

    remembered = None

    def __init__(
        self,
        family: Family,
        view: View,
        world: Globals,
        scheduler: Scheduler,
        excluded: Sequence[Range],
        printed: Printer,
    ) -> None:
        self.family = family
        self._view = view
        self._ours = world.of(family) or FamilyGlobals()
        self._rules = Rules(family, world)
        self._scheduler = scheduler
        self._excluded = excluded
        self._printed = printed
        self._caveats: list[str] = []

    def close(self) -> None:
        """Let go of the kernel."""
        self._view.close()

    def caveats(self) -> Iterable[str]:
        """Return what could not be compared, and why."""
        return self._caveats

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner."""
        there = self._view.addresses()
        wishes = self._wishes(plans, there)
        keys = [key for wish in wishes.values() for key in wish.servers]
        _, present = self._view.survey(keys)
        sets = self._sets(set(SetId))
        for name, wish in wishes.items():
            for key, virtual in wish.servers.items():
                yield from self._server(name, key, virtual, present.get(key))
            yield from self._addresses(name, wish.addresses - there.bound, Kind.MISSING)
            fronts = {(key[:-3], key[-3], int.from_bytes(key[-2:], "big")) for key in wish.servers}
            for set_id, entries in sets.items():
                wanted = self._entries(wish, set_id)
                yield from self._entry_findings(name, set_id, wanted - entries, Kind.MISSING)
                if TYPES.get(set_id) != BITMAP_PORT and set_id is not SetId.LOOP_BACK:
                    extra = {entry for entry in entries - wanted if entry[:3] in fronts}
                    yield from self._entry_findings(name, set_id, extra, Kind.EXTRA)

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        there = self._view.addresses()
        wishes = self._wishes(wanted, there)
        state = State()
        for name, wish in wishes.items():
            state.change(name, wish, untouched())
        present = self._view.servers()
        for key, virtual in state.servers.items():
            yield from self._server(state.owner(key), key, virtual, present.get(key))
        for key in sorted(present.keys() - state.servers.keys()):
            if not within(key[:-3], self._excluded):
                yield Finding(None, Kind.EXTRA, _front(key), "virtual servers")
        yield from self._shared(state, wishes, there)
        yield from self._written_rules()

    def _shared(self, state: State, wishes: Mapping[ServiceName, Wish], there: Addresses) -> Iterator[Finding]:
        """Compare what several Services may want: addresses, and entries of sets."""
        bound = set(state.addresses)
        for name, wish in wishes.items():
            yield from self._addresses(name, wish.addresses - there.bound, Kind.MISSING)
        yield from self._addresses(None, there.bound - bound, Kind.EXTRA)
        for set_id, entries in self._sets(set(SetId)).items():
            needed = (
                {SetEntry(address) for address in bound} if set_id is SetId.IPVS_IPS else set(state.entries(set_id))
            )
            if missing := needed - entries:
                for name, wish in wishes.items():
                    mine = missing & self._entries(wish, set_id)
                    yield from self._entry_findings(name, set_id, mine, Kind.MISSING)
            for entry in sorted(entries - needed):
                owner = state.owner(server_key(*entry[:3])) if entry.ip and entry.protocol else None
                yield from self._entry_findings(owner, set_id, {entry}, Kind.EXTRA)

    def _wishes(self, plans: Plans, there: Addresses) -> dict[ServiceName, Wish]:
        node: NodeAddresses = node_of(self._ours, there)
        return {
            name: render([plan for plan in its if plan.key.family is self.family], node) for name, its in plans.items()
        }

    def _sets(self, wanted: Collection[SetId]) -> dict[SetId, set[SetEntry]]:
        """Return the entries of sets, none of one that is missing."""
        there = self._view.counts()
        return {set_id: self._view.entries(set_id) if set_id in there else set() for set_id in sorted(wanted)}

    def _entries(self, wish: Wish, set_id: SetId) -> set[SetEntry]:
        if set_id is SetId.IPVS_IPS:
            return {SetEntry(address) for address in wish.addresses}
        return wish.entries.get(set_id, set())

    # -- in words ---------------------------------------------------------------------------------------------------

    def _server(
        self, name: ServiceName | None, key: bytes, wanted: Virtual, present: ActualServer | None
    ) -> Iterator[Finding]:
        front, where = _front(key), "virtual servers"
        if present is None:
            yield Finding(name, Kind.MISSING, front, where, f"{len(wanted.pool)} real servers")
            return
        if not present.same or present.affinity != wanted.affinity:
            values = (f"{self._scheduler.name}, affinity of {wanted.affinity} s", f"affinity of {present.affinity} s")
            other = values[1] if present.same else f"another scheduler or other flags, {values[1]}"
            yield Finding(name, Kind.DIFFERENT, front, where, values[0], other)
        where = f"real servers of {front}"
        for destination in wanted.pool:
            weight, what = present.weights.get(destination), f"endpoint {destination_text(destination)}"
            if weight is None:
                yield Finding(name, Kind.MISSING, what, where)
            elif weight != WEIGHT:
                yield Finding(name, Kind.DIFFERENT, what, where, f"weight {WEIGHT}", f"weight {weight}")
        for destination in sorted(present.weights.keys() - set(wanted.pool)):
            weight = present.weights[destination]
            if weight or not self._may_drain(key):
                what = f"endpoint {destination_text(destination)}"
                yield Finding(name, Kind.EXTRA, what, where, present=f"weight {weight}")

    def _may_drain(self, key: bytes) -> bool:
        return key[-3] == socket.IPPROTO_TCP and self._scheduler.skips_draining

    def _addresses(self, name: ServiceName | None, addresses: Iterable[bytes], kind: Kind) -> Iterator[Finding]:
        for address in sorted(addresses):
            yield Finding(name, kind, f"address {unpack(address)}", f"interface {INTERFACE}")

    def _entry_findings(
        self, name: ServiceName | None, set_id: SetId, entries: Iterable[SetEntry], kind: Kind
    ) -> Iterator[Finding]:
        where, meaning = f"ipset {set_id.named(self.family)}", _MEANINGS.get(set_id, "one of those")
        for entry in sorted(entries):
            values = (meaning, "") if kind is Kind.MISSING else ("", meaning)
            yield Finding(name, kind, _entry_text(set_id, entry), where, *values)

    # -- rules ------------------------------------------------------------------------------------------------------

    def _written_rules(self) -> Iterator[Finding]:
        present = _by_chain(self._view.rules(self._rules), self._rules)
        try:
            wanted = _by_chain(self._printed(self._rules), self._rules)
        except (Unsupported, ApplyError) as error:
            self._caveats.append(f"the {self.family.label} rules of iptables were not compared: {error}")
            return
        for (table, chain), rules in wanted.items():
            there, where = present.get((table, chain), []), f"chain {chain} of table {table} ({self.family.label})"
            if chain not in self._rules.tables[table]:
                for rule in rules:
                    if rule not in there:
                        yield Finding(None, Kind.MISSING, f"the jump to {target_of(rule)}", where)
            elif not there:
                yield Finding(None, Kind.MISSING, f"the rules of chain {chain}", where)
            elif rules != there:
                lacking = [rule for rule in rules if rule not in there] or rules
                surplus = [rule for rule in there if rule not in rules] or there
                what = f"the rules of chain {chain}"
                yield Finding(None, Kind.DIFFERENT, what, where, "; ".join(lacking), "; ".join(surplus))


def _by_chain(lines: Iterable[str], rules: Rules) -> dict[tuple[str, str], list[str]]:
    """Return rules by table and chain; of other chains those that we put there."""
    ours = {(jump.table, jump.chain, jump.target) for jump in JUMPS}
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        table, _, rule = line.partition(" ")
        chain = chain_of(rule)
        if chain in rules.tables[table] or (table, chain, target_of(rule)) in ours:
            found.setdefault((table, chain), []).append(rule)
    return found


def _front(key: bytes) -> str:
    return front_text(key[:-3], key[-3], int.from_bytes(key[-2:], "big"))


def _entry_text(set_id: SetId, entry: SetEntry) -> str:
    if entry.ip and entry.protocol:
        text = front_text(entry.ip, entry.protocol, entry.port)
        source = f" for {unpack(entry.ip2)}" if entry.ip2 and set_id is not SetId.LOOP_BACK else ""
        return f"{text}{source}{f'/{entry.prefixlen}' if entry.prefixlen else ''}"
    return f"address {unpack(entry.ip)}" if entry.ip else f"NodePort {entry.port}"
