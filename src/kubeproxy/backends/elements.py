"""What differs between two states of the sets and maps of a table. Pure; what the elements mean is a mode's affair."""

from __future__ import annotations

from typing import NamedTuple

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
