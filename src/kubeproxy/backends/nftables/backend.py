"""nftables mode, one family: keeps the committed state in memory, and converts changed plans to transactions. The
backend reads the kernel at the start, after a failure and after another program changed the table. All calls block for
a short time; the engine yields between batches."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from kubeproxy.backends.ahead import Ahead
from kubeproxy.backends.mode import Abilities, Depth, ForeignChange
from kubeproxy.backends.nftables import affinity, audit, found
from kubeproxy.backends.nftables.counting import Counting
from kubeproxy.backends.nftables.failing import SuspectReader
from kubeproxy.backends.nftables.forwarding import Devices
from kubeproxy.backends.nftables.gone import GONE, GoneEndpoints
from kubeproxy.backends.nftables.layout import LOOKUPS, OF_RANGES, SHARED, TABLE, ChainName, SetId
from kubeproxy.backends.nftables.localhost import LocalhostRelay
from kubeproxy.backends.nftables.packing import Packers, Transaction, Users, changed, former, groups
from kubeproxy.backends.nftables.port_ranges import needed_sets
from kubeproxy.backends.nftables.render import Numbers, Parts, Placed, place_all, translate
from kubeproxy.backends.nftables.ruleset import COMMENT, Ruleset
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import NamedPlans, Plans
from kubeproxy.backends.table_view import altered, inspected
from kubeproxy.errors import ChangedByOthersError
from kubeproxy.features import RESETS
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import messages
from kubeproxy.kernel.nftables.nfnetlink import TableHeader
from kubeproxy.model.gone import Departed
from kubeproxy.model.plan import FamilyGlobals, Globals, Loopback, ServiceName

log = logging.getLogger("kubeproxy.nftables")

BATCH = 20_000
"""Maximum number of elements in a transaction. The kernel holds its commit lock for about 0.05 s for this number."""

ELEMENT = 160
"""Upper bound of the mean size of a transaction's elements, in bytes."""

PRUNE_FROM = 500
"""Unused chains are removed if the number of chains exceeds this number, and exceeds twice the number of chains in use
at the last removal."""


class NftablesBackend:
    """Programs one family: `sync` is incremental, `resync` compares everything with the kernel."""

    def __init__(
        self,
        table: KernelTable,
        world: Globals,
        counting: Counting | None = None,
        devices: Devices | None = None,
        clients: affinity.ClientGauges | None = None,
        relay: LocalhostRelay | None = None,
    ) -> None:
        self.family = family = table.family
        self._suspects = SuspectReader(family)
        self.abilities = Abilities(
            programmed=lambda: len(self._placed),
            depart=self.depart,
            disturbed=lambda: self._differs or table.disturbed(),
            suspects=self._suspects.read,
        )
        self._table = table
        self._most = table.room // ELEMENT  # elements that fit into a transaction
        self._counting = counting
        self._devices = devices
        self._clients = clients
        self._relay = relay
        self._gone = GoneEndpoints(family) if RESETS.value(world) else None
        self._in_use: Callable[[bytes], bool] = lambda _: False
        self._is_whole = False  # whether `_placed` describes the whole table
        self._is_unsure = False  # whether announcements of changes may have been lost during the last resync
        self._differs = False  # whether the last inspection found a difference that is not repaired yet
        self._ruleset = Ruleset(family, world)
        self._ours = world.of(family) or FamilyGlobals()
        self._placed: dict[ServiceName, tuple[Placed, ...]] = {}
        self._users: Users = {set_id: Counter() for set_id in SHARED}
        self._numbers = Numbers()
        self._mark = affinity.NumberMark(table.family)
        self._chains: set[ChainName] = set()
        self._prune_at = PRUNE_FROM
        self._node: audit.NodeSets = {}
        self._packers = Packers(family)
        self._header: TableHeader | None = None  # of the committed table

    def close(self) -> None:
        """Close the sockets, which ends relayed connections. The rules are not removed."""
        self._table.close()
        self._suspects.close()
        if self._devices is not None:
            self._devices.close()
        if self._relay is not None:
            self._relay.close()

    def set_world(self, world: Globals) -> bool:
        """Set the globals; return whether a resync is needed because sets or rules change."""
        self._ours = world.of(self.family) or FamilyGlobals()
        ruleset = Ruleset(self.family, world, self._ruleset.extra)
        changed = ruleset.texts() != self._ruleset.texts()
        self._ruleset = ruleset
        return changed

    def depart(self, departed: Departed, in_use: Callable[[bytes], bool]) -> bool:
        """See backends.mode.Abilities."""
        self._in_use = in_use
        return self._gone is not None and self._gone.note(departed, time.monotonic())

    # -- incremental ----------------------------------------------------------------------------------------------

    def sync(self, changes: Collection[NamedPlans]) -> Iterator[int]:
        """Program changed Services; yield the number of elements after each transaction. Raises ApplyError; the kernel
        then contains the transactions yielded before, and perhaps a part of the next transaction's changes."""
        yield from self._synced(changes)
        if self._relay is not None and self._ours.loopback is Loopback.RELAYED:
            self._relay.update(changes)

    def _synced(self, changes: Collection[NamedPlans]) -> Iterator[int]:
        self._spare_taken()
        had = bool(self._ruleset.extra) and any(self._has_ranges(name) for name, _ in changes)
        if extra := needed_sets(plans for _, plans in changes):
            self._reshape(extra)
        batch = self._batch()
        with Ahead(self._commit) as ahead:
            for group in groups(changes, self._placed):
                for name, plans in group:
                    before = self._placed.get(name, ())
                    after = place_all(plans, before, self._numbers, committed=True)
                    batch.transaction.next_service()
                    if before:
                        delta = changed(before, after)
                        alone = len(group) == 1
                        batch.transaction.change(delta, former(delta, alone=alone) if after or not alone else {})
                    for count, item in enumerate(() if before else after, 1):
                        translate(item, batch.transaction)
                        # The ports of a Service may be committed in separate transactions. A single transaction with a
                        # million elements would take long, because the kernel's hash tables do not grow within a
                        # transaction.
                        if len(group) == 1 and count < len(after) and self._is_full(batch.transaction):
                            batch.services[name] = after[:count]
                            asked = batch.transaction.asked
                            yield from ahead.commit(batch)
                            batch = _Batch(Transaction(self._packers, self._users, asked), {})
                    batch.services[name] = after
                if self._is_full(batch.transaction):
                    yield from ahead.commit(batch)
                    batch = self._batch()
            yield from ahead.settled()
        yield self._commit(batch) + self._sync_globals()
        if had and not any(map(self._has_ranges, self._placed)):
            self._reshape(())
        self._reset_gone()

    def _has_ranges(self, name: ServiceName) -> bool:
        return any(item.plan.port_ranges for item in self._placed.get(name, ()))

    def _reshape(self, extra: tuple[SetId, ...]) -> None:
        """Add the sets, chains and rules of ranges of ports if the first range is about to be written; remove them
        after the removal of the last range."""
        if extra == self._ruleset.extra:
            return
        with audit.attributed(self._ruleset.name):
            if not self._repaired(self._table.generation(), extra):
                raise ChangedByOthersError(altered(self._ruleset.name))

    def _is_full(self, transaction: Transaction) -> bool:
        return transaction.elements >= min(BATCH, self._most)

    def _spare_taken(self) -> None:
        if self._gone is not None:
            self._gone.spare(self._transact)

    def _reset_gone(self) -> None:
        if self._gone is not None:
            self._gone.reset(time.monotonic(), self._transact)

    def _batch(self) -> _Batch:
        return _Batch(Transaction(self._packers, self._users), {})

    def _commit(self, batch: _Batch) -> int:
        if batch.transaction.elements:
            wanted = batch.transaction.chains()
            missing = self._ruleset.needed(wanted, self._chains)
            number, marks = self._mark.advance(self._numbers.last_endpoint)
            with audit.attributed(self._ruleset.name):
                if missing:
                    self._create(wanted, missing)
                self._transact([*marks, *batch.transaction.messages()])
                if batch.transaction.later:  # very rare
                    for _ in self._remove(batch.transaction.later):
                        pass
            self._mark.number = number
        for name, placed in batch.services.items():
            if placed:
                self._placed[name] = placed
            else:
                self._placed.pop(name, None)
        return batch.transaction.elements

    def _sync_globals(self) -> int:
        elements = 0
        for name, wanted in audit.desired_node_sets(self._ours).items():
            if (present := self._node[name]) != wanted:
                self._transact(audit.refilled(self.family, {name: wanted}))
                self._node[name] = wanted
                elements += len(present ^ wanted)
        return elements

    def _create(self, wanted: set[ChainName], missing: set[ChainName]) -> None:
        """Create missing chains and remove unused chains. The caller adds elements in another transaction, because a
        packet in flight at the commit would find the new chains empty. Nothing is read, because a dump restarts
        whenever another program commits."""
        made = self._ruleset.messages(missing)
        unused = self._unused(wanted, missing)
        try:
            removals = messages.chain_removals(self.family, TABLE, map(str, sorted(unused)))
            self._table.commit([*made, *removals])
        except NetlinkError as error:
            if not unused:
                raise
            # Another program's rule jumps to one of the chains, or the kernel is older than 6.4.
            log.debug("Unused chains of session affinity cannot be removed error=%r", str(error))
            unused, self._prune_at = set(), 2 * len(self._chains | missing)
            self._table.commit(made)
        self._chains = (self._chains | missing) - unused

    def _unused(self, wanted: set[ChainName], missing: set[ChainName]) -> set[ChainName]:
        if not self._is_whole or len(self._chains | missing) <= self._prune_at:
            return set()
        present = Transaction(self._packers, {})  # is not committed
        for item in chain.from_iterable(self._placed.values()):
            if item.plan.affinity or item.plan.balance:
                translate(item, present)
        used = self._ruleset.needed(wanted | present.chains())
        self._prune_at = max(PRUNE_FROM, 2 * len(used))
        return self._chains - used

    # -- the whole table ------------------------------------------------------------------------------------------

    def resync(self, wanted: Plans) -> Iterator[int]:
        """Make the table contain exactly these Services: adopt our own table, or replace another program's table.
        Yields the number of elements after each transaction. Raises ApplyError. Before the comparison, discard recorded
        changes of other programs; later changes of other programs are differences."""
        self._table.reset_changes()
        with audit.attributed(self._ruleset.name), self._table.not_listening():
            yield from self._compared(wanted)
        self._is_unsure = not self._table.changes().complete
        if self._relay is not None:
            self._relay.replace(wanted if self._ours.loopback is Loopback.RELAYED else {})

    def _compared(self, wanted: Plans) -> Iterator[int]:
        since = self._table.generation()
        self._header = header = self._table.header()
        self._users = {set_id: Counter() for set_id in SHARED}
        self._is_whole = False
        self._numbers.compare(item for placed in self._placed.values() for item in placed)
        self._placed = {}
        if header is None:
            self._lost()
            self._load(since)
            yield from self._synced(wanted.items())
        elif not header.dormant and header.comment.startswith(COMMENT) and self._repaired(since):
            self._transact(audit.catch_all_removals(self._table))
            elements = found.FoundElements(self._table, self._ruleset.layout.sets)
            if self._gone is not None:
                self._gone.found(self._table.elements(GONE), self._in_use, time.monotonic())
                self._spare_taken()
            del elements.left[SetId.NODEPORT_IPS]
            self._node = audit.node_sets(self._table)
            yield self._sync_globals()
            yield from self._adopt(wanted, elements)
        else:
            self._lost()
            yield self._replace(wanted, since)
        self._reset_gone()
        if self._devices is not None:
            self._devices.forget()
        self._numbers.compared()
        self._is_whole, self._differs = True, False

    def _repaired(self, since: int, extra: tuple[SetId, ...] | None = None) -> bool:
        """Repair chains and rules; return False if the table must be replaced instead. `extra` are the sets of ranges
        of ports that the table should have; by default, the table keeps its present sets. A table with chains of the Go
        kube-proxy is replaced, because a comparison of all its chains would take seconds."""
        if any("/" in name for name in self._table.chains()):
            return False
        contents = self._table.contents()
        has = () if contents.sets.keys().isdisjoint(OF_RANGES) else OF_RANGES
        self._ruleset = self._ruleset.having(has if extra is None else extra)
        self._chains = audit.affinity_chains(audit.wanted(self._ruleset, contents).chains)
        changes = audit.repairs(self._ruleset, contents, self._table)
        if not changes:
            return changes is not None
        log.info("Writing the rules that differ table=%r messages=%d", self._ruleset.name, len(changes))
        try:
            # Rules and sets change in one transaction, because a new rule may look up an address in a set that was
            # empty before. Unwanted addresses are removed after this transaction, because the former rules may still
            # process packets in flight.
            wanted = audit.desired_node_sets(self._ours)
            if SetId.NODEPORT_IPS in contents.sets:
                wanted[SetId.NODEPORT_IPS] |= audit.node_sets(self._table)[SetId.NODEPORT_IPS]
            self._transact([*changes, *audit.refilled(self.family, wanted)])
        except NetlinkError as error:
            if error.code not in audit.CONTRADICTIONS:
                raise  # the engine retries: a new table would lose the clients of session affinity
            log.debug("Rules that differ cannot be written one by one error=%r", str(error))
            return False
        self._confirm(since + 1)
        return True

    def _is_altered(self) -> bool:
        """Return whether the table, its chains, its rules or the declarations of its sets differ from the committed
        state. Missing sets and further sets do not count."""
        wanted = self._ruleset.definition(self._chains).contents
        # The names are compared first: the rules of the Go kube-proxy's chains would take seconds to read.
        if self._table.header() != self._header or set(self._table.chains()) != wanted.chains.keys():
            return True
        found = self._table.contents()
        return found.chains != wanted.chains or any(
            found.sets.get(name, form) != form for name, form in wanted.sets.items()
        )

    def _confirm(self, generation: int) -> None:
        """Record the table's header after our own transaction. Raises ChangedByOthersError if another program changed
        our rules at the same time."""
        self._header = self._table.header()
        if self._table.generation() != generation and self._is_altered():
            raise ChangedByOthersError(altered(self._ruleset.name))

    def _lost(self) -> None:
        """Record that the set of deleted endpoints is empty, because a new table is about to replace the old table."""
        if self._gone is not None:
            self._gone.found((), self._in_use, time.monotonic())

    def _load(self, since: int) -> None:
        self._chains = set()
        self._mark.number = 0
        self._transact(self._ruleset.creation(elements=self._node_messages()))
        self._confirm(since + 1)

    def _node_messages(self) -> list[bytes]:
        self._node = audit.desired_node_sets(self._ours)
        return [m for name, elements in self._node.items() for m in audit.filling(self.family, name, elements)]

    def _adopt(self, wanted: Plans, elements: found.FoundElements) -> Iterator[int]:
        batch = self._batch()
        self._numbers.read([self._mark.read(self._table), *elements.numbers()])
        if extra := needed_sets(wanted.values()):
            self._reshape(extra)
            for set_id in extra:
                elements.left.setdefault(set_id, {})
        for name, plans in elements.ahead(wanted.items()):
            before = tuple([found.recall(plan, elements.left, self._numbers) for plan in plans])
            placed = batch.services[name] = place_all(plans, before, self._numbers)
            desired = Parts(placed)
            for shared in SHARED:
                # Count the Service as a user of the shared elements in the kernel. For elements that the kernel lacks,
                # the transaction counts the user.
                self._users[shared].update(desired.elements.get(shared, {}).keys() & elements.left[shared].keys())
            delta = elements.take(desired)
            if any(delta):
                batch.transaction.next_service()
                batch.transaction.change(delta)
                if self._is_full(batch.transaction):
                    yield self._commit(batch)
                    batch = self._batch()
        yield self._commit(batch)
        elements.rest(self._placed.values())
        yield from self._remove(elements.left)
        self._reshape(extra)

    def _remove(self, unneeded: Mapping[str, Collection[bytes]]) -> Iterator[int]:
        """Remove elements, except shared elements in use: one transaction or more for each group of LOOKUPS, in order.
        A packet may find a former frontend until the frontend is removed, so the frontend's endpoints are removed
        later. Groups need separate transactions, because a commit can happen between two lookups of a packet."""
        for sets in LOOKUPS:
            transaction = Transaction(self._packers, {})
            for set_id in sets:
                users = self._users.get(set_id, ())
                for key in unneeded.get(set_id, ()):
                    if key not in users:
                        transaction.remove(set_id, key)
                    if self._is_full(transaction):
                        self._transact(transaction.messages())
                        yield transaction.elements
                        transaction = Transaction(self._packers, {})
            self._transact(transaction.messages())
            yield transaction.elements

    def _replace(self, wanted: Plans, since: int) -> int:
        self._ruleset = self._ruleset.having(needed_sets(wanted.values()))
        total = Transaction(self._packers, self._users)
        for name, plans in wanted.items():
            self._placed[name] = placed = place_all(plans, (), self._numbers)
            total.next_service()
            for item in placed:
                translate(item, total)
        self._chains = self._ruleset.needed(total.chains())
        log.info("Replacing the table found in the kernel table=%r elements=%d", self._ruleset.name, total.elements)
        self._mark.number = 0
        number, marks = self._mark.advance(self._numbers.last_endpoint)
        place, elements = (self.family, TABLE), [*self._node_messages(), *marks, *total.messages()]
        removal = [messages.table_message(*place, COMMENT), messages.table_removal(*place)]
        ranges = audit.spelled_out(self._ruleset, self._placed.values())
        self._transact([*removal, *self._ruleset.creation(self._chains, elements, ranges)])
        if ranges:
            self._transact(audit.ordinary(self._ruleset))
        self._mark.number = number
        self._confirm(since + 1 + bool(ranges))
        return total.elements

    # -- changes by other programs -----------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """Read the next counters, add new interfaces to the flowtable, update client metrics, retry busy ports."""
        if self._counting is not None and self._is_whole:
            self._counting.step(self._placed)
        if self._devices is not None and self._is_whole:
            self._devices.upkeep(self._transact)
        if self._clients is not None:
            self._clients.look(self._table, bool(self._mark.number))
        if self._relay is not None:
            self._relay.upkeep()

    def inspect(self, depth: Depth) -> ForeignChange | None:
        """See backends.mode.Backend. The inspection is one short request, unless another program changed the table. If
        an announcement of the kernel may have been lost, the table is compared with the given depth."""
        changes = self._table.changes()
        if changes.nothing or changes.nothing_yet:
            return None
        announced = changes.elements or changes.rules
        depth = Depth.THOROUGH if announced or self._is_unsure else depth
        if depth is Depth.THOROUGH:
            self._is_unsure = False
            self._differs = True  # until the comparison
            self._table.reset_changes()
        seen = inspected(self._ruleset.name, depth, self._is_altered(), self._changed_elements)
        self._differs = seen is not None
        if seen is None:
            return None
        self._table.mark_incomplete()  # until a resync repairs the table, or a second inspection finds no difference
        return ForeignChange(f"{seen.what}: {', '.join(sorted(changes.by))}") if announced else seen

    def _changed_elements(self) -> str:
        if missing := self._ruleset.layout.sets.keys() - self._table.sets():
            return min(missing)
        if catch_alls := audit.catch_alls(self._table):
            return catch_alls[0]
        node = audit.node_sets(self._table)
        if differing := [name for name in node if node[name] != self._node.get(name)]:
            return differing[0]
        elements = found.FoundElements(self._table, self._ruleset.layout.sets)
        del elements.left[SetId.NODEPORT_IPS]
        return elements.first_difference(self._placed, self._users)

    def _transact(self, parts: list[bytes]) -> None:
        if parts:
            self._table.commit(parts)


class _Batch(NamedTuple):
    transaction: Transaction
    services: dict[ServiceName, tuple[Placed, ...]]
