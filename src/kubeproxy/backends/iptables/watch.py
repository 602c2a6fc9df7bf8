"""Detects changes by other programs: with a cheap check every second, and with a rare audit, which reads all rules.
nf_tables counts its transactions, and legacy tables have a size and a lock. The watch compares these values with the
values after the last change by this program. If the values differ, the watch reads the chains, and an audit reads the
rules of the chains. The Go kube-proxy checks only its canary chain in the mangle table."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from typing import Final, Self

from kubeproxy.backends.iptables import found, skeleton
from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.found import MOST, MOST_PLACES, Chains, FoundTable, Suspect, as_printed
from kubeproxy.backends.iptables.restores import declarations, deletion
from kubeproxy.backends.mode import ForeignChange
from kubeproxy.backends.rules import Jump
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.changes import ChainChange, ChangeMonitor, ForeignChanges, Interest, monitor
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.xtables import xtables, xtables_lock
from kubeproxy.kernel.xtables.nft_compat import has_jump
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible, RestoreError, chain_of
from kubeproxy.kernel.xtables.xtables_lock import LockWatch, TableInfo, lock_watch
from kubeproxy.model.addresses import Family

REST: Final = 20.0
"""Pause after an audit, as a multiple of the audit's duration, because an audit reads all rules."""
FAINT_REST: Final = 200.0
"""Pause after another program took the lock without changing the table's size, as a multiple of an audit's duration.
Most programs that take the lock only list rules."""


def _with_jumps(table: str) -> set[str]:
    """Return the chains that are not ours but contain our rules: built-in chains, and chains of the kubelet."""
    return {jump.chain for jump in skeleton.JUMPS if jump.table == table} | {skeleton.KUBELET_FIREWALL}


class NftWatch:
    """Detects changes by other programs in one family's tables of iptables-nft, over netlink. The kernel does not
    report changes in chains of other programs to this process. After `inspect`, `rest` is the pause before an audit
    (REST or FAINT_REST), and `places` are the changed chains, or None if they are unknown."""

    rest = REST

    def __init__(self, commands: Commands, transactions: nfnetlink.Transactions, others: ChangeMonitor) -> None:
        self._commands = commands
        self._family = commands.family
        self._transactions = transactions
        self._others = others
        self.places: frozenset[skeleton.Place] | None = None

    @classmethod
    def open(cls, commands: Commands) -> Self:
        """Return a watch for the network namespace of the caller. Raises ApplyError."""
        return cls(commands, nfnetlink.Transactions.open(), monitor(Interest(b"KUBE-", concerns=_concerns)))

    def close(self) -> None:
        """Close the sockets."""
        self._transactions.close()
        self._others.close()

    def present(self, table: str) -> FoundTable:
        """Return the chains of a table that iptables cannot list, and the rules of its built-in chains. Raises
        ApplyError."""
        with TableReader(self._family, table, Netlink.open()) as reader:
            chains = reader.chains()
        kept: dict[str, list[str]] = {}
        for name in sorted(_with_jumps(table) & chains):
            try:
                kept[name] = [f"{rule}\n" for rule in self._commands.rules(table, name) or ()]
            except Incompatible:
                there = (jump for jump in skeleton.JUMPS if jump[:2] == (table, name) and self._has(jump))
                kept[name] = [f"-A {jump.rule}\n" for jump in there]
        return FoundTable(self._family, chains, {}, kept)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record the present state for later comparisons. The body of the `with` statement reads all tables."""
        self._others.reset(self._family, self._transactions.generation)
        yield

    @contextmanager
    def own_change(self, commits: int) -> Iterator[None]:
        """Ignore `commits` transactions of this process in the body of the `with` statement."""
        with self._others.paused(self._transactions.generation):
            yield
            self._others.count_own(commits)  # each table is a transaction

    def touched(self) -> bool:
        """Return whether another program may have changed our rules."""
        return _places(self._others.changes(self._family, self._transactions.generation)) != frozenset()

    def inspect(self) -> ForeignChange | None:
        """Return a change by another program that can be found without reading all rules, or None. Afterwards `touched`
        returns False until the next change; after another result than None, the caller resyncs. Raises ApplyError."""
        # Changes that arrive during the checks below remain for the next inspection.
        places = _places(self._others.take(self._family, self._transactions.generation))
        for table in skeleton.CANARY_TABLES if places is None else ():
            if not nfnetlink.has_chain(self._family, table, skeleton.CANARY):
                return flushed(table, self._family)
        for jump in skeleton.JUMPS:
            if (places is None or jump[:2] in places) and not self._has(jump):
                return removed(jump, self._family)
        self.places = places
        return None

    def _has(self, jump: Jump) -> bool:
        return has_jump(self._family, jump.table, jump.chain, jump.target)


def _places(changes: ForeignChanges) -> frozenset[skeleton.Place] | None:
    """Return the changed chains, or None if they are unknown or too many to be read one by one."""
    known = changes.complete and len(changes.chains) <= MOST_PLACES and all(chain for _, chain in changes.chains)
    return changes.chains if known else None


def _concerns(change: ChainChange) -> bool:
    """Return whether a change may affect our rules: a change in one of our chains, a deletion in a built-in chain
    with one of our jumps, or the deletion of a table."""
    if change.table not in skeleton.CANARY_TABLES:
        return False
    if change.deleted and not change.chain.startswith("KUBE-"):
        return not change.chain or any(jump[:2] == (change.table, change.chain) for jump in skeleton.JUMPS)
    return change.chain.startswith(skeleton.SERVICE_PREFIXES) or change.chain in skeleton.OWN_CHAINS


class LegacyWatch:
    """Watches the tables of iptables-legacy by their size and by their lock, which do not show the changed chain. While
    this process changes rules, it holds the lock, so that no other program changes the sizes at the same time. Commands
    before 1.8.6 cannot run while this process holds the lock; then a change that another program makes at the same time
    is not detected."""

    places: frozenset[skeleton.Place] | None = None

    def __init__(self, commands: Commands, info: TableInfo, lock: LockWatch) -> None:
        self._commands = commands
        self._info = info
        self._lock = lock
        self._known: list[tuple[int, ...]] | None = None
        self._taken = self._lock.taken()
        self.rest = REST

    @classmethod
    def open(cls, commands: Commands) -> Self:
        """Return a watch for the network namespace of the caller."""
        return cls(commands, TableInfo.open(commands.family), lock_watch())

    def close(self) -> None:
        """See NftWatch."""
        self._info.close()

    def present(self, table: str) -> FoundTable:
        """See NftWatch."""
        found = self._commands.table(table)
        chains, rules = (found.chains, found.rules) if found is not None else ((), ())
        kept = {name: [f"{rule}\n" for rule in rules if chain_of(rule) == name] for name in _with_jumps(table)}
        return FoundTable(self._commands.family, frozenset(chains), {}, kept)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See NftWatch."""
        self._taken = self._lock.taken()
        before = self._look()
        yield
        self._known = before  # after a change during the read, a later check finds another size

    @contextmanager
    def own_change(self, commits: int) -> Iterator[None]:  # noqa: ARG002 - this watch compares sizes instead
        """See NftWatch."""
        alone = self._commands.obeys_lock
        with xtables_lock.lock().held(xtables.LOCK_TIMEOUT) if alone else nullcontext():
            before = self._lock.taken()
            fresh = self._known is None or self._look() == self._known
            yield
            if not alone:
                self._lock.forget()
            elif self._lock.taken() != before:
                xtables_lock.lock().wanted()
            if fresh:
                self._known = self._look()

    def touched(self) -> bool:
        """See NftWatch."""
        return self._lock.taken() != self._taken or self._look() != self._known

    def inspect(self) -> ForeignChange | None:
        """See NftWatch. Return None: sizes and the lock show only that an audit is due."""
        self._taken = self._lock.taken()
        sizes = self._look()
        self.rest = REST if sizes != self._known else FAINT_REST
        self._known = sizes
        return None

    def _look(self) -> list[tuple[int, ...]] | None:
        try:
            return [self._info.info(table) for table in skeleton.CANARY_TABLES]
        except ApplyError:
            return None


Watch = NftWatch | LegacyWatch


def watch(commands: Commands) -> Watch:
    """Return the watch for the variant of these commands."""
    return NftWatch.open(commands) if commands.uses_nft else LegacyWatch.open(commands)


class Audit:
    """Reads the tables of one family and compares them with the rules written last. Calls block."""

    def __init__(self, commands: Commands, restore: Callable[[str], None]) -> None:
        self._commands = commands
        self._family = commands.family
        self._change = restore
        self._rest: float | None = None  # pause before an audit, in durations of the last audit; None: no audit
        self._places: frozenset[skeleton.Place] | None = None
        self._ended = 0.0
        self._took = 0.0

    def suspect(self, rest: float, places: frozenset[skeleton.Place] | None = None) -> None:
        """Request an audit, because another program may have changed these places (None: any place). The audit starts
        after a pause of `rest` times the duration of the last audit."""
        known = frozenset[skeleton.Place]() if self._rest is None else self._places
        self._places = None if known is None or places is None else known | places
        self._rest = rest if self._rest is None else min(self._rest, rest)

    def due(self) -> bool:
        """Return whether an audit is requested and the pause before it is over."""
        return self._rest is not None and time.monotonic() >= self._ended + self._rest * self._took

    def look(self, contents: Contents) -> ForeignChange | None:
        """Return a change by another program. Raises ApplyError. If the result is None, no audit is due before the next
        request."""
        began = time.monotonic()
        try:
            change = self._compare(contents)
        finally:
            self._ended = time.monotonic()
            self._took = self._ended - began
        if change is None:
            self._rest = None
        return change

    def _compare(self, contents: Contents) -> ForeignChange | None:
        tables = {table: self._read(table) for table in skeleton.CANARY_TABLES}
        for table, seen in tables.items():
            if seen.is_asked(skeleton.CANARY) and skeleton.CANARY not in seen.chains:
                return flushed(table, self._family)
        for jump in skeleton.JUMPS:
            if not tables[jump.table].has_jump(jump):
                return removed(jump, self._family)
        nat = tables["nat"]
        has_own = nat.asked is None or any(name.startswith(skeleton.SERVICE_PREFIXES) for name in nat.asked)
        own = found.own_suspects(contents, nat) if has_own else ()
        suspects = chain(found.shared_suspects(contents.common(), tables), own)
        harmed = self._confirmed(list(islice(suspects, MOST)), tables)
        return _changed(harmed, self._family) if harmed else None

    def _read(self, table: str) -> FoundTable:
        try:
            if self._places is None:
                return found.read(self._commands, table)
            names = frozenset(name for place, name in self._places if place == table)
            return found.read_some(self._commands, table, names, self._rules)
        except Incompatible:  # the table has rules that only nft can list; the shared chains are read one by one
            names = frozenset(name for place, name in skeleton.SHARED if place == table)
            return found.read_some(self._commands, table, names, self._rules)

    def _rules(self, table: str, name: str) -> Sequence[str] | None:
        try:
            return self._commands.rules(table, name)
        except Incompatible:  # jumps in built-in chains are not compared here: the watch checks them
            return [f"-A {jump.rule}" for jump in skeleton.JUMPS if jump[:2] == (table, name)] or [f"-A {name} ?"]

    def _confirmed(self, suspects: list[Suspect], tables: Mapping[str, FoundTable]) -> list[Suspect]:
        if any(suspect.place[1] not in tables[suspect.place[0]].chains for suspect in suspects):
            return suspects
        originals = {suspect.place for suspect in suspects}

        def printed(table: str, copies: Mapping[str, str]) -> Chains:
            self._change(f"*{table}\n{declarations(copies)}{''.join(copies.values())}COMMIT\n")
            try:
                names = copies.keys() | {name for place, name in originals if place == table}
                return found.read_some(self._commands, table, names, self._rules).rules
            finally:
                self._change(f"*{table}\n{deletion(copies)}COMMIT\n")

        try:
            return [
                suspect
                for suspect, wanted, seen in as_printed(suspects, printed)
                if not _is_same(suspect.place, wanted, seen.get(suspect.place[1], ()))
            ]
        except RestoreError:  # the rules jump to a chain that does not exist
            return suspects


def _is_same(place: skeleton.Place, wanted: Sequence[str], present: Sequence[str]) -> bool:
    if place in skeleton.SHARED:  # in shared chains the order of Services depends on the order of their changes
        return sorted(wanted) == sorted(present)
    return list(wanted) == list(present)


def flushed(table: str, family: Family) -> ForeignChange:
    """Return the change "this table was flushed"."""
    return ForeignChange(f"table {table} of iptables ({family.label}) was flushed by another program")


def removed(jump: Jump, family: Family) -> ForeignChange:
    """Return the change "this jump to one of our chains was removed"."""
    what = f"the jump from {jump.chain} to {jump.target}"
    return ForeignChange(f"{what} ({family.label}) was removed by another program")


def _changed(harmed: Collection[Suspect], family: Family) -> ForeignChange:
    first = next(iter(harmed))
    (table, name), service = first.place, first.service
    whose = f" of Service {'/'.join(service)}" if service is not None else f" of iptables table {table}"
    more = f", and {len(harmed) - 1} more," if len(harmed) > 1 else ""
    return ForeignChange(f"chain {name}{whose} ({family.label}){more} was changed by another program")
