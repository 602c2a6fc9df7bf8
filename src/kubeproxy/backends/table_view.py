"""A table of nf_tables with sets and maps: read beside the proxy, and inspected by it. Each mode has its own elements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from kubeproxy.backends.examination import Finding, Kind
from kubeproxy.backends.mode import Depth, ForeignChange
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import lookup, nfnetlink, tables
from kubeproxy.kernel.nftables.lookup import Entries
from kubeproxy.kernel.nftables.tables import Chain
from kubeproxy.model.addresses import Family, unpack

Rules = Mapping[str, Chain]
"""The chains of a table by name."""


class ElementsView(Protocol):
    """One family's table, as far as its sets go. All calls raise ApplyError."""

    family: Family

    def elements(self, name: str) -> Entries:
        """Return the elements of a set; while others change it some may lack."""

    def lookup(self, name: str, keys: Iterable[bytes]) -> Entries:
        """Return those of these elements that a set has."""

    def close(self) -> None:
        """Let go of the kernel."""


class TableView:
    """The table of a name in the network namespace of a socket, which others may use too, but not at the same time.

    `ranges` are the names of its sets of intervals.
    """

    def __init__(self, family: Family, table: str, ranges: Collection[str], link: Netlink) -> None:
        self.family = family
        self._table = table
        self._ranges = ranges
        self._link = link

    def close(self) -> None:
        """See ElementsView."""
        self._link.close()

    def header(self) -> nfnetlink.TableHeader | None:
        """Return the table's handle, comment and state, None when it is missing."""
        return nfnetlink.table(self.family, self._table, self._link)

    def sets(self) -> Collection[str]:
        """Return the names of sets and maps."""
        return tables.read_sets(self.family, self._table, self._link)

    def contents(self) -> tables.TableContents:
        """Return all of the table but the elements of its named sets."""
        return tables.read(self.family, self._table, self._link)

    def rules(self) -> Rules:
        """Return the chains with their rules."""
        return self.contents().chains

    def elements(self, name: str) -> Entries:
        """See ElementsView."""
        return lookup.glance(self.family, self._table, name, self._link)

    def lookup(self, name: str, keys: Iterable[bytes]) -> Entries:
        """See ElementsView."""
        return lookup.lookup(self.family, self._table, name, keys, self._link, ranges=name in self._ranges)


def complete(
    actual: Mapping[str, Entries],
    elements: Iterable[tuple[str, bytes]],
    lookup: Callable[[str, Iterable[bytes]], Entries],
) -> None:
    """Add those of these elements, by set and key, that one pass over the sets did not show although they are there."""
    missing: dict[str, list[bytes]] = {}
    for set_id, key in elements:
        if key not in actual[set_id]:
            missing.setdefault(set_id, []).append(key)
    for set_id, keys in missing.items():
        actual[set_id].update(lookup(set_id, keys))


def rule_findings(wanted: Rules, present: Rules, where: str) -> Iterator[Finding]:
    """Yield in which chains a table has other rules than it should."""
    for chain in sorted(wanted.keys() | present.keys()):
        ours, theirs = wanted.get(chain), present.get(chain)
        if ours is None or theirs is None:
            yield Finding(None, Kind.EXTRA if ours is None else Kind.MISSING, f"chain {chain}", where)
        elif ours.hook != theirs.hook:
            yield Finding(None, Kind.DIFFERENT, f"hook, priority or policy of chain {chain}", where)
        elif ours.rules != theirs.rules:
            counts = (f"{len(each.rules)} rules" for each in (ours, theirs))
            yield Finding(None, Kind.DIFFERENT, f"the rules of chain {chain}", where, *counts)


def nodeport_findings(wanted: AbstractSet[bytes], present: AbstractSet[bytes], where: str) -> Iterator[Finding]:
    """Yield in which packed addresses the set of those that NodePorts answer on differs."""
    for kind, addresses in ((Kind.MISSING, wanted - present), (Kind.EXTRA, present - wanted)):
        for address in sorted(addresses):
            yield Finding(None, kind, f"{unpack(address)}, on which NodePorts answer", where)


def inspected(
    table: str, depth: Depth, is_altered: Callable[[], bool], changed: Callable[[], str]
) -> ForeignChange | None:
    """Return what another program did to a table; None where nothing shows at this depth.

    `is_altered` returns whether chains or rules differ, `changed` the set or map whose elements differ, '' for none;
    that reads all of them, so it is called last.
    """
    if is_altered():
        return ForeignChange(altered(table))
    if depth is Depth.QUICK:
        return None
    if which := changed():
        return ForeignChange(f"elements of {which} in table {table} were changed by another program", certain=False)
    return None


def altered(table: str) -> str:
    """Return the message about a table whose chains or rules differ."""
    return f"chains or rules of table {table} were changed by another program"
