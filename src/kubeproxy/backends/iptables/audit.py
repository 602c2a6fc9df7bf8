"""The audit: reads the rules of our chains at intervals, to find those that another program changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, islice

from kubeproxy.backends.iptables import found
from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.found import MOST, Chains, FoundTable, Suspect, as_printed
from kubeproxy.backends.iptables.names import SERVICE_PREFIXES
from kubeproxy.backends.iptables.restores import declarations, deletion
from kubeproxy.backends.iptables.skeleton import CANARY, CANARY_TABLES, JUMPS, SHARED, Place, SharedChain
from kubeproxy.backends.mode import ForeignChange
from kubeproxy.backends.rules import Jump
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible, RestoreError
from kubeproxy.model.addresses import Family


class Audit:
    """Reads the tables of one family and compares them with the rules written last. Calls block."""

    def __init__(self, commands: Commands, restore: Callable[[str], None]) -> None:
        self._commands = commands
        self._family = commands.family
        self._change = restore
        self._rest: float | None = None  # pause, in durations of the last audit; None: no audit needed
        self._places: frozenset[Place] | None = None
        self._ended = 0.0
        self._took = 0.0

    def suspect(self, rest: float, places: frozenset[Place] | None = None) -> None:
        """Request an audit: another program may have changed something in these places, None for any.

        It starts after a pause of `rest` times the duration of the last audit.
        """
        known = frozenset[Place]() if self._rest is None else self._places
        self._places = None if known is None or places is None else known | places
        self._rest = rest if self._rest is None else min(self._rest, rest)

    def due(self) -> bool:
        """Return whether an audit is requested and its pause is over."""
        return self._rest is not None and time.monotonic() >= self._ended + self._rest * self._took

    def look(self, contents: Contents, common: Mapping[Place, SharedChain]) -> ForeignChange | None:
        """Return a change by another program; `common` are the chains of no single Service. Raises ApplyError.

        None means that no audit is due before the next request.
        """
        began = time.monotonic()
        try:
            change = self._compare(contents, common)
        finally:
            self._ended = time.monotonic()
            self._took = self._ended - began
        if change is None:
            self._rest = None
        return change

    def _compare(self, contents: Contents, common: Mapping[Place, SharedChain]) -> ForeignChange | None:
        tables = {table: self._read(table) for table in CANARY_TABLES}
        for table, seen in tables.items():
            if seen.is_asked(CANARY) and CANARY not in seen.chains:
                return flushed(table, self._family)
        for jump in JUMPS:
            if not tables[jump.table].has_jump(jump):
                return removed(jump, self._family)
        nat = tables["nat"]
        has_own = nat.asked is None or any(name.startswith(SERVICE_PREFIXES) for name in nat.asked)
        own = found.own_suspects(contents, nat) if has_own else ()
        harmed = self._confirmed(list(islice(chain(found.shared_suspects(common, tables), own), MOST)), tables)
        return _changed(harmed, self._family) if harmed else None

    def _read(self, table: str) -> FoundTable:
        """Return the table, or those of its chains that may have changed; a table that cannot be read has none."""
        try:
            if self._places is None:
                return found.read(self._commands, table)
            names = frozenset(name for place, name in self._places if place == table)
            return found.read_some(self._commands, table, names, self._rules)
        except Incompatible:
            return FoundTable(self._family, asked=frozenset())

    def _rules(self, table: str, name: str) -> Sequence[str] | None:
        try:
            return self._commands.rules(table, name)
        except Incompatible:  # the watch checks jumps in built-in chains
            return [f"-A {jump.rule}" for jump in JUMPS if jump[:2] == (table, name)] or [f"-A {name} ?"]

    def _confirmed(self, suspects: list[Suspect], tables: Mapping[str, FoundTable]) -> list[Suspect]:
        """Return the chains that differ from copies of the written rules as iptables-save prints these."""
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
        except RestoreError:  # a target of the rules does not exist
            return suspects


def _is_same(place: Place, wanted: Sequence[str], present: Sequence[str]) -> bool:
    if place in SHARED:  # the order of Services depends on the order of their changes
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
