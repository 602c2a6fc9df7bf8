"""ipvs mode, one family: keeps what the kernel holds, and turns changed plans into changes of it.

What is wanted is in memory (state.py); the kernel is read at the start, after a failure and when it is looked over for
what other programs did. None of ipvs, ipset and the interface knows transactions, so the order keeps connections
right in between: a Service's set entries, its virtual servers, its addresses; and the other way round when it goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from kubeproxy.backends.ipvs.chains import Rules
from kubeproxy.backends.ipvs.graceful import WEIGHT, ActualServer, Draining, Operation, deletions
from kubeproxy.backends.ipvs.layout import Scheduler, SetId
from kubeproxy.backends.ipvs.render import NO_WISH, NodeAddresses, Virtual, render
from kubeproxy.backends.ipvs.state import State, Touched, untouched
from kubeproxy.backends.mode import Abilities, Depth, ForeignChange
from kubeproxy.backends.rules import Jump
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.model.addresses import Family, Range, within
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName, ServicePlan

log = logging.getLogger("kubeproxy.ipvs")

BATCH: Final = 2000
"""Changes between two looks at the event loop: some 50 ms."""

EXAMINED: Final = 500
"""Virtual servers whose real servers are compared in one thorough look; the next look goes on with the next ones."""

TABLES_AT_ONCE: Final = (("filter", "nat"), ())
TABLES_IN_TURN: Final = (("filter",), ("nat",))
"""Tables whose rules are written before and after the virtual servers."""

Entries = Mapping[SetId, Iterable[SetEntry]]


class SetCount(NamedTuple):
    """How many entries a set has, and how many rules match it."""

    entries: int
    references: int


class Addresses(NamedTuple):
    """The node's addresses without loopback: of kube-ipvs0, and of all other interfaces."""

    bound: frozenset[bytes]
    own: frozenset[bytes]


class Kernel(Protocol):
    """One family of the kernel, in this mode's words. Everything raises ApplyError."""

    def prepare(self) -> None:
        """Make the interface and the sets where they are missing."""

    def servers(self) -> Mapping[bytes, ActualServer]:
        """Return all virtual servers with their real servers."""

    def survey(self, keys: Iterable[bytes]) -> tuple[set[bytes], Mapping[bytes, ActualServer]]:
        """Return all virtual servers, and these ones, as far as they are there, with their real servers."""

    def connections(self, keys: Iterable[bytes]) -> Mapping[bytes, Mapping[bytes, int]]:
        """Return the number of connections of the real servers of virtual servers."""

    def operate(self, operations: Sequence[Operation]) -> None:
        """Change virtual servers, in this order."""

    def entries(self, set_id: SetId) -> set[SetEntry]:
        """Return a set's entries."""

    def counts(self) -> Mapping[SetId, SetCount]:
        """Return the counts of the sets that are there."""

    def add_entries(self, entries: Entries) -> None:
        """Add entries to sets; those that are there already are fine."""

    def remove_entries(self, entries: Entries) -> None:
        """Remove entries from sets; those that are gone already are fine."""

    def addresses(self) -> Addresses:
        """Return the node's addresses."""

    def addresses_changed(self) -> bool:
        """Return whether any address came or went since the last call; cheap."""

    def bind(self, addresses: Iterable[bytes]) -> None:
        """Add addresses to kube-ipvs0."""

    def unbind(self, addresses: Iterable[bytes]) -> None:
        """Remove addresses from kube-ipvs0."""

    def missing_jumps(self) -> Sequence[Jump]:
        """Return the jumps to our chains that are not there."""

    def write_rules(self, rules: Rules, tables: Sequence[str], missing: Sequence[Jump]) -> None:
        """Make tables hold our chains, and the jumps that are missing."""

    def rules(self, rules: Rules) -> Sequence[str]:
        """Return the rules that are in our chains, and those that lead to them."""

    def close(self) -> None:
        """Let go of the sockets."""


class IpvsBackend:
    """Programs one family. `sync` is incremental, `resync` compares everything with what the kernel really has."""

    abilities = Abilities()

    def __init__(
        self,
        family: Family,
        world: Globals,
        kernel: Kernel,
        scheduler: Scheduler,
        excluded: Sequence[Range] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.family = family
        self._world = world
        self._rules = Rules(family, world)
        self._kernel = kernel
        self._excluded = excluded
        self._clock = clock
        self._draining = Draining(scheduler)
        self._state = State()
        self._plans: dict[ServiceName, tuple[ServicePlan, ...]] = {}
        self._node = NodeAddresses()
        self._there = Addresses(frozenset(), frozenset())
        self._misbound = False  # whether kube-ipvs0 had other addresses than ours when they were last read
        self._written: Sequence[str] = ()
        self._examined = 0

    def close(self) -> None:
        """Let go of the kernel; everything stays as it is."""
        self._kernel.close()

    def set_world(self, world: Globals) -> bool:
        """Take changed globals in; return whether rules or addresses are others now, so that a resync is due."""
        rules = Rules(self.family, world)
        before, after = self._ours(self._world), self._ours(world)
        moved = (before.nodeport_ips, before.node_ips) != (after.nodeport_ips, after.node_ips)
        changed = moved or rules.tables != self._rules.tables
        self._world, self._rules = world, rules
        return changed

    # -- incremental ------------------------------------------------------------------------------------------------

    def sync(self, changes: Iterable[tuple[ServiceName, tuple[ServicePlan, ...]]]) -> Iterator[int]:
        """Program changed Services; yield the number of changes after each batch. Raises ApplyError."""
        touched = untouched()
        for name, plans in changes:
            self._want(name, plans, touched)
            if touched.size >= BATCH:
                yield self._apply(touched)
                touched = untouched()
        yield self._apply(touched)

    def _want(self, name: ServiceName, plans: tuple[ServicePlan, ...], touched: Touched) -> None:
        if plans:
            self._plans[name] = plans
        else:
            self._plans.pop(name, None)
        self._state.change(name, render(plans, self._node) if plans else NO_WISH, touched)

    def _apply(self, touched: Touched) -> int:
        """Bring what was touched into the kernel; return the number of changes."""
        state, now = self._state, self._clock()
        added, removed = _entry_changes(state, touched)
        operations = [
            operation
            for key, before in touched.servers.items()
            for operation in self._draining.change(key, before, state.servers.get(key), now)
        ]
        come = [a for a, before in touched.addresses.items() if not before and state.has_address(a)]
        gone = [a for a, before in touched.addresses.items() if before and not state.has_address(a)]
        if come:
            added[SetId.IPVS_IPS] = _as_entries(come)
        if gone:
            removed[SetId.IPVS_IPS] = _as_entries(gone)
        if added:
            self._kernel.add_entries(added)
        if operations:
            self._kernel.operate(operations)
        if come:
            self._kernel.bind(come)
        if gone:
            self._kernel.unbind(gone)
        if removed:
            self._kernel.remove_entries(removed)
        entries = sum(map(len, added.values())) + sum(map(len, removed.values()))
        return entries + len(operations) + len(come) + len(gone)

    # -- everything -------------------------------------------------------------------------------------------------

    def resync(self, wanted: Mapping[ServiceName, tuple[ServicePlan, ...]]) -> Iterator[int]:
        """Make the kernel hold exactly this, whatever is there; yield the number of changes after each batch.

        What is right stays untouched, and what is wrong goes last. Raises ApplyError.
        """
        kernel = self._kernel
        kernel.prepare()
        kernel.addresses_changed()
        self._there = there = kernel.addresses()
        self._misbound = False
        self._node = self._node_of(there)
        self._state, self._plans = State(), {}
        noted = untouched()
        for name, plans in wanted.items():
            self._want(name, plans, noted)
        state = self._state
        missing, strays = self._compare_entries()
        kernel.add_entries(missing)
        yield sum(map(len, missing.values()))
        # The rules that refuse come before what could be reached without them; but where something leads to nat chains
        # of our names, those may be iptables mode's, which refuse and serve until ours come last.
        jumps = kernel.missing_jumps()
        first, last = TABLES_AT_ONCE if any(jump.table == "nat" for jump in jumps) else TABLES_IN_TURN
        kernel.write_rules(self._rules, first, jumps)
        found = kernel.servers()
        yield from self._adopt(found)
        come = [address for address in state.addresses if address not in there.bound]
        kernel.bind(come)
        yield len(come)
        kernel.write_rules(self._rules, last, jumps)
        gone = [address for address in there.bound if not state.has_address(address)]
        kernel.unbind(gone)
        foreign = [key for key in found if key not in state.servers and not self._is_excluded(key)]
        kernel.operate(deletions(foreign))
        kernel.remove_entries(strays)
        self._written = kernel.rules(self._rules)
        yield len(gone) + len(foreign) + sum(map(len, strays.values()))

    def _adopt(self, found: Mapping[bytes, ActualServer]) -> Iterator[int]:
        self._draining.retain(found)
        operations: list[Operation] = []
        for key, virtual in self._state.servers.items():
            now, actual = self._clock(), found.get(key)
            if actual is None:
                operations += self._draining.change(key, None, virtual, now)
            else:
                operations += self._draining.adopt(key, actual, virtual, now)
            if len(operations) >= BATCH:
                self._kernel.operate(operations)
                yield len(operations)
                operations = []
        self._kernel.operate(operations)
        yield len(operations)

    def _compare_entries(self) -> tuple[dict[SetId, list[SetEntry]], dict[SetId, list[SetEntry]]]:
        """Return the entries that sets lack, and those that they have too many."""
        missing: dict[SetId, list[SetEntry]] = {}
        strays: dict[SetId, list[SetEntry]] = {}
        for set_id in SetId:
            actual, wanted = self._kernel.entries(set_id), self._wanted_entries(set_id)
            if lacking := wanted - actual:
                missing[set_id] = sorted(lacking)
            if surplus := actual - wanted:
                strays[set_id] = sorted(surplus)
        return missing, strays

    def _wanted_entries(self, set_id: SetId) -> set[SetEntry]:
        if set_id is SetId.IPVS_IPS:
            return set(_as_entries(self._state.addresses))
        return set(self._state.entries(set_id))

    def _is_excluded(self, key: bytes) -> bool:
        return within(key[:-3], self._excluded)

    def _node_of(self, there: Addresses) -> NodeAddresses:
        return node_of(self._ours(self._world), there)

    def _ours(self, world: Globals) -> FamilyGlobals:
        return world.of(self.family) or FamilyGlobals()

    # -- upkeep, and what other programs do -------------------------------------------------------------------------

    def upkeep(self) -> None:
        """Remove the real servers that are drained; have NodePorts follow the node's addresses."""
        self._read_addresses()
        self._follow(self._node_of(self._there))
        now = self._clock()
        if self._draining.due(now):
            counts = self._kernel.connections(self._draining.keys())
            self._kernel.operate(list(self._draining.finished(counts, now)))

    def inspect(self, depth: Depth) -> ForeignChange | None:
        """See backends.mode.Backend. Nothing tells of changes to virtual servers and sets: counts are read each time.

        A thorough look reads all but real servers, and some of those.
        """
        self._read_addresses()
        if what := self._changed_addresses() or self._changed_counts() or self._missing_sample():
            return ForeignChange(f"{what} by another program")
        if depth is Depth.THOROUGH and (what := self._changed_contents()):
            return ForeignChange(f"{what} by another program", certain=False)
        return None

    def _read_addresses(self) -> None:
        if self._kernel.addresses_changed():
            self._there = self._kernel.addresses()
            self._misbound = self._there.bound != frozenset(self._state.addresses)

    def _changed_addresses(self) -> str:
        return "addresses of kube-ipvs0 were changed" if self._misbound else ""

    def _follow(self, node: NodeAddresses) -> None:
        """Render everything anew for other addresses of the node."""
        if node == self._node:
            return
        log.info("The addresses of the node changed family=%s count=%d", self.family.label, len(node.own))
        self._node = node
        noted = untouched()
        for name, plans in self._plans.items():
            self._state.change(name, render(plans, node), noted)
        self._apply(noted)

    def _changed_counts(self) -> str:
        counts = self._kernel.counts()
        for set_id in SetId:
            found = counts.get(set_id)
            wanted = self._state.count(set_id)
            name = set_id.named(self.family)
            if found is None or found.entries != wanted:
                return f"ipset {name} was changed"
            if found.references < self._rules.references(set_id):
                return f"iptables rules with ipset {name} were removed"
        return ""

    def _missing_sample(self) -> str:
        """Look for a single virtual server: when that is missing, most probably all are."""
        sample = next((key for key, virtual in self._state.servers.items() if virtual.pool), None)
        if sample is not None and not self._kernel.connections([sample]).get(sample):
            return "virtual servers were removed"
        return ""

    def _changed_contents(self) -> str:
        wanted = self._state.servers
        keys = list(islice(wanted, self._examined, self._examined + EXAMINED))
        self._examined = self._examined + EXAMINED if len(keys) == EXAMINED else 0
        present, found = self._kernel.survey(keys)
        if any(not self._is_excluded(key) for key in present ^ wanted.keys()):
            return "virtual servers were changed"
        if any(key not in found or self._differs(key, wanted[key], found[key]) for key in keys):
            return "real servers were changed"
        for set_id in SetId:
            if self._kernel.entries(set_id) != self._wanted_entries(set_id):
                return f"ipset {set_id.named(self.family)} was changed"
        if self._kernel.rules(self._rules) != self._written:
            return "iptables rules were changed"
        return ""

    def _differs(self, key: bytes, wanted: Virtual, found: ActualServer) -> bool:
        weights = dict.fromkeys(wanted.pool, WEIGHT) | dict.fromkeys(self._draining.of(key), 0)
        return not found.same or found.affinity != wanted.affinity or dict(found.weights) != weights


def node_of(ours: FamilyGlobals, there: Addresses) -> NodeAddresses:
    """Return what of a node's addresses Services depend on."""
    if ours.nodeport_ips is None:
        nodeports = tuple(sorted(there.own))
    else:
        # A Service's address on kube-ipvs0 is a local one, but none of the node's.
        nodeports = tuple(address for address in ours.nodeport_ips if address not in there.bound)
    return NodeAddresses(there.own, nodeports, ours.node_ips)


def _as_entries(addresses: Iterable[bytes]) -> list[SetEntry]:
    return [SetEntry(address) for address in addresses]


def _entry_changes(state: State, touched: Touched) -> tuple[dict[SetId, list[SetEntry]], dict[SetId, list[SetEntry]]]:
    """Return the entries to add and to remove, set by set."""
    added: dict[SetId, list[SetEntry]] = {}
    removed: dict[SetId, list[SetEntry]] = {}
    for set_id, noted in touched.entries.items():
        for entry, before in noted.items():
            after = state.has_entry(set_id, entry)
            if after != before:
                (added if after else removed).setdefault(set_id, []).append(entry)
    return added, removed
