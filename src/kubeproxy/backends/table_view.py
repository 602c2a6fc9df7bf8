"""Reads an nf_tables table with its sets and maps, for the proxy's inspections and for commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from kubeproxy.backends.mode import Depth, ForeignChange
from kubeproxy.backends.state import Wording
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.elements import Entries
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.model.addresses import Family, unpack
from kubeproxy.model.plan import ServiceName
from kubeproxy.wording import counted


class TableView(TableReader):
    """A table with the elements of its sets; `ranges` are the names of its interval sets."""

    family: Family

    def __init__(self, family: Family, table: str, ranges: Collection[str], link: Netlink) -> None:
        super().__init__(family, table, link)
        self._ranges = ranges

    def elements(self, name: str) -> Entries:
        """Return the elements of a set; some may be missing if other programs change the set at the same time."""
        return self.one_pass(name)

    def lookup(self, name: str, keys: Iterable[bytes]) -> Entries:
        """Return the given elements that exist in a set."""
        return self.look_up(name, keys, ranges=name in self._ranges)


def complete(
    actual: Mapping[str, Entries],
    elements: Iterable[tuple[str, bytes]],
    lookup: Callable[[str, Iterable[bytes]], Entries],
) -> bool:
    """Look up those of `elements` that the dump `actual` lacks; add the found elements. Returns whether any exist."""
    missing: dict[str, list[bytes]] = {}
    for set_id, key in elements:
        if key not in actual[set_id]:
            missing.setdefault(set_id, []).append(key)
    found = {set_id: lookup(set_id, keys) for set_id, keys in missing.items()}
    for set_id, entries in found.items():
        actual[set_id].update(entries)
    return any(found.values())


CHAINS: Final = "chains"
"""The place of a table's chains in a state; a key is a chain's name."""


class TableWords:
    """The texts about entries that belong to no Service: chains, and the addresses on which NodePorts answer. `where`
    is the name of the table or set, for the text."""

    def __init__(self, where: str) -> None:
        self._where = where

    def owner(self, place: str, key: Any) -> ServiceName | None:  # noqa: ARG002 - see state.StateWords
        """Return None, because these entries belong to no Service."""
        return None

    def wording(self, place: str, key: Any, wanted: Any, present: Any) -> Wording:
        """See state.StateWords."""
        if place != CHAINS:
            return Wording(f"{unpack(key)}, on which NodePorts answer", self._where)
        if wanted is None or present is None:
            return Wording(f"chain {key}", self._where)
        if wanted.hook != present.hook:
            return Wording(f"hook, priority or policy of chain {key}", self._where)
        counts = (counted(len(each.rules), "rule") for each in (wanted, present))
        return Wording(f"the rules of chain {key}", self._where, *counts)


def inspected(table: str, depth: Depth, is_altered: bool, changed: Callable[[], str]) -> ForeignChange | None:
    """Return a change of a table by another program; None if an inspection of this depth finds none. `is_altered`:
    chains or rules differ. `changed` returns the set or map with differing elements, or '' if none differs; it reads
    all elements, so it is called last."""
    if is_altered:
        return ForeignChange(altered(table))
    if depth is Depth.QUICK:
        return None
    if which := changed():
        return ForeignChange(f"elements of {which} in table {table} were changed by another program", certain=False)
    return None


def altered(table: str) -> str:
    """Return the message about a table with chains or rules that differ."""
    return f"chains or rules of table {table} were changed by another program"
