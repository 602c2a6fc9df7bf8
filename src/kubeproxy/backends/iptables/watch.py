"""Cheap detection of other programs' changes to our rules, and the chains of a table that cannot be listed.

nf_tables counts its transactions; legacy tables have a size and a lock. These are read each second. Only if they differ
from their state after our own last change, chains are checked, and then an audit reads their rules. The Go kube-proxy
checks only its canary in mangle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol, Self

from kubeproxy.backends.iptables.audit import flushed, removed
from kubeproxy.backends.iptables.found import MOST_PLACES, FoundTable
from kubeproxy.backends.iptables.names import SERVICE_PREFIXES
from kubeproxy.backends.iptables.skeleton import CANARY, CANARY_TABLES, JUMPS, KUBELET_FIREWALL, OWN_CHAINS, Place
from kubeproxy.backends.mode import ForeignChange
from kubeproxy.backends.rules import Jump
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.changes import ChainChange, ChangeMonitor, Interest, monitor
from kubeproxy.kernel.xtables import xtables, xtables_lock
from kubeproxy.kernel.xtables.lock_watch import LockWatch, TableInfo, lock_watch
from kubeproxy.kernel.xtables.nft_compat import has_jump
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible, chain_of

REST: Final = 20.0
"""Pause after an audit, in durations of that audit, because it reads all rules."""
FAINT_REST: Final = 200.0
"""The pause if the table's size is unchanged, but another program took the lock, mostly to list rules."""


class Watch(Protocol):
    """Detects changes by other programs in one family's tables.

    After `inspect`, `rest` is the pause before an audit (REST or FAINT_REST), `places` the changed chains, None if
    unknown.
    """

    rest: float
    places: frozenset[Place] | None

    def present(self, table: str) -> FoundTable:
        """Return the chains of a table that cannot be listed, and the rules of built-in ones. Raises ApplyError."""

    def reading(self) -> AbstractContextManager[None]:
        """Compare later states of the tables with the one that the body reads; it reads every table."""

    def own_change(self, commits: int) -> AbstractContextManager[None]:
        """Ignore the changes that the body makes, in `commits` transactions: they are our own."""

    def touched(self) -> bool:
        """Return whether another program may have changed something."""

    def inspect(self) -> ForeignChange | None:
        """Return a change by another program that shows without reading all rules; reset `touched` if there is none.

        Raises ApplyError.
        """

    def close(self) -> None:
        """Close the sockets."""


def watch(commands: Commands) -> Watch:
    """Return the watch for the variant of these commands."""
    return NftWatch.open(commands) if commands.uses_nft else LegacyWatch.open(commands)


def _with_jumps(table: str) -> set[str]:
    """Return the chains of a table that have some rules of ours: built-in ones and kubelet's."""
    return {jump.chain for jump in JUMPS if jump.table == table} | {KUBELET_FIREWALL}


class NftWatch:
    """Watches the tables of iptables-nft by netlink; changes of other programs' own chains cost nothing."""

    rest = REST

    def __init__(self, commands: Commands, transactions: nfnetlink.Transactions, others: ChangeMonitor) -> None:
        self._commands = commands
        self._family = commands.family
        self._transactions = transactions
        self._others = others
        self._noted: set[Place] = set()
        self._unknown = False  # there may be changes that are not in `_noted`
        self.places: frozenset[Place] | None = None

    @classmethod
    def open(cls, commands: Commands) -> Self:
        """Return a watch for the network namespace of the caller. Raises ApplyError."""
        return cls(commands, nfnetlink.Transactions.open(), monitor(Interest(b"KUBE-", concerns=_concerns)))

    def close(self) -> None:
        """See Watch."""
        self._transactions.close()
        self._others.close()

    def present(self, table: str) -> FoundTable:
        """See Watch."""
        chains = nfnetlink.chain_names(self._family, table)
        kept: dict[str, list[str]] = {}
        for chain in sorted(_with_jumps(table) & chains):
            try:
                kept[chain] = [f"{rule}\n" for rule in self._commands.rules(table, chain) or ()]
            except Incompatible:
                there = (jump for jump in JUMPS if jump[:2] == (table, chain) and self._has(jump))
                kept[chain] = [f"-A {jump.rule}\n" for jump in there]
        return FoundTable(self._family, chains, {}, kept)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See Watch."""
        self._others.reset(self._family, self._transactions.generation)
        self._noted, self._unknown = set(), False
        yield

    @contextmanager
    def own_change(self, commits: int) -> Iterator[None]:
        """See Watch."""
        with self._others.paused(self._transactions.generation):
            yield
            self._others.count_own(commits)  # each table is a transaction

    def touched(self) -> bool:
        """See Watch."""
        self._note()
        return self._unknown or bool(self._noted)

    def _note(self) -> None:
        """Record the chains that other programs changed so far."""
        heard = self._others.take(self._family, self._transactions.generation)
        if not heard.complete or any(not chain for _, chain in heard.chains):
            self._unknown = True
        self._noted |= heard.chains

    def inspect(self) -> ForeignChange | None:
        """See Watch."""
        self._note()
        unknown = self._unknown or len(self._noted) > MOST_PLACES
        for table in CANARY_TABLES if unknown else ():
            if not nfnetlink.has_chain(self._family, table, CANARY):
                return flushed(table, self._family)
        for jump in JUMPS:
            if (unknown or jump[:2] in self._noted) and not self._has(jump):
                return removed(jump, self._family)
        self.places = None if unknown else frozenset(self._noted)
        self._noted, self._unknown = set(), False
        return None

    def _has(self, jump: Jump) -> bool:
        return has_jump(self._family, jump.table, jump.chain, jump.target)


def _concerns(change: ChainChange) -> bool:
    """Return whether a change may concern us: in a chain of ours, or a deletion in a built-in chain with our jump."""
    if change.table not in CANARY_TABLES:
        return False
    if change.deleted and not change.chain.startswith("KUBE-"):
        return not change.chain or any(jump[:2] == (change.table, change.chain) for jump in JUMPS)
    return change.chain.startswith(SERVICE_PREFIXES) or change.chain in OWN_CHAINS


class LegacyWatch:
    """Watches the tables of iptables-legacy by their size and their lock, which do not show the changed chain.

    Our own changes are made while we hold the lock, and the sizes are read before and after: the difference is ours.
    (Versions before 1.8.6 take the lock themselves; a change that another program makes at that time counts as ours.)
    """

    places: frozenset[Place] | None = None

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
        """See Watch."""
        self._info.close()

    def present(self, table: str) -> FoundTable:
        """See Watch."""
        found = self._commands.table(table)
        chains, rules = (found.chains, found.rules) if found is not None else ((), ())
        kept = {name: [f"{rule}\n" for rule in rules if chain_of(rule) == name] for name in _with_jumps(table)}
        return FoundTable(self._commands.family, frozenset(chains), {}, kept)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See Watch."""
        self._taken = self._lock.taken()
        before = self._look()
        yield
        self._known = before  # a change in the meantime is visible as another size of the table

    @contextmanager
    def own_change(self, commits: int) -> Iterator[None]:  # noqa: ARG002 - sizes are read instead
        """See Watch."""
        alone = self._commands.obeys_lock
        with xtables_lock.lock().held(xtables.LOCK_PATIENCE) if alone else nullcontext():
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
        """See Watch."""
        return self._lock.taken() != self._taken or self._look() != self._known

    def inspect(self) -> ForeignChange | None:
        """See Watch. Always None: sizes and the lock only say when an audit is due."""
        self._taken = self._lock.taken()
        sizes = self._look()
        self.rest = REST if sizes != self._known else FAINT_REST
        self._known = sizes
        return None

    def _look(self) -> list[tuple[int, ...]] | None:
        try:
            return [self._info.info(table) for table in CANARY_TABLES]
        except ApplyError:
            return None
