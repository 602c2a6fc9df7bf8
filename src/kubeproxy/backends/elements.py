"""Tables of nf_tables with sets and maps: what differs between two states of them, and how they are inspected.

Pure; what the elements mean is a mode's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kubeproxy.backends.mode import Depth, Difference

Elements = dict[str, dict[bytes, bytes]]
"""Set to key to data, b'' in plain sets."""


class Delta(NamedTuple):
    """What to remove and what to add, set by set."""

    removed: dict[str, list[bytes]]
    added: dict[str, list[tuple[bytes, bytes]]]


def difference(before: Elements, after: Elements) -> Delta:
    """Return the smallest change from one to the other; an element whose data changes is removed and added."""
    removed: dict[str, list[bytes]] = {}
    added: dict[str, list[tuple[bytes, bytes]]] = {}
    for set_id in before.keys() | after.keys():
        old, new = before.get(set_id, {}), after.get(set_id, {})
        if old == new:
            continue
        gone = [key for key, data in old.items() if new.get(key) != data]
        come = [(key, data) for key, data in new.items() if old.get(key) != data]
        if gone:
            removed[set_id] = gone
        if come:
            added[set_id] = come
    return Delta(removed, added)


def inspected(
    table: str, depth: Depth, is_altered: Callable[[], bool], changed: Callable[[], str]
) -> Difference | None:
    """Return what another program did to a table; None where nothing shows at this depth.

    `is_altered` says whether chains or rules are others now, `changed` which set or map has other elements, '' for
    none; that reads all of them, so it is asked last.
    """
    if is_altered():
        return Difference(altered(table))
    if depth is Depth.QUICK:
        return None
    if which := changed():
        return Difference(f"elements of {which} in table {table} were changed by another program", certain=False)
    return None


def altered(table: str) -> str:
    """Return what is said of a table whose chains or rules are others now."""
    return f"chains or rules of table {table} were changed by another program"
