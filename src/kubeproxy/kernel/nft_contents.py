"""All elements of a set or map of nf_tables, as keys and what they lead to: some 100,000 of them in tenths of a second.

In one set nearly always all are packed alike, which is checked; then they are taken apart at C speed, else one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Self

from kubeproxy.kernel.netlink import ATTRIBUTE, Netlink, attributes
from kubeproxy.kernel.nfnetlink import Element, element_lists, element_of

_HEADS = 3 * ATTRIBUTE.size  # of the element, its key and the key's value
_BETWEEN = 2 * ATTRIBUTE.size  # the heads of the data and its value


class Contents(NamedTuple):
    """How many elements a dump listed, and those by key: fewer when it listed one twice."""

    listed: int
    entries: dict[bytes, bytes]

    @classmethod
    def of(cls, elements: Iterable[Element]) -> Self:
        """Return the contents that elements make up."""
        known = list(elements)
        return cls(len(known), {element.key: element.data for element in known})


def contents(family: int, table: str, name: str, link: Netlink | None = None) -> Contents:
    """Return the elements of a set. Raises NetlinkError, with code ENOENT when the set is missing."""
    entries: dict[bytes, bytes] = {}
    listed = 0
    for data, start, end in element_lists(family, table, name, link):
        alike = _alike(data, start, end)
        if alike is None:
            alike = [element_of(data, first, last)[:2] for _, first, last in attributes(data, start, end)]
        listed += len(alike)
        entries.update(alike)
    return Contents(listed, entries)


@lru_cache(maxsize=64)
def _layout(key: int, value: int) -> struct.Struct:
    return struct.Struct(f"{_HEADS}x{key}s{_BETWEEN}x{value}s" if value else f"{_HEADS}x{key}s")


def _alike(data: bytes, start: int, end: int) -> list[tuple[bytes, bytes]] | None:
    """Return the keys and values of a list of elements; None when some are packed otherwise than the first one."""
    if end - start < ATTRIBUTE.size:
        return []
    size = ATTRIBUTE.unpack_from(data, start)[0]
    if size < _HEADS or (end - start) % size:
        return None
    first = element_of(data, start + ATTRIBUTE.size, start + size)
    layout = _layout(len(first.key), len(first.data))
    if layout.size != size or layout.unpack_from(data, start) != (
        (first.key, first.data) if first.data else (first.key,)
    ):
        return None
    body = data[start:end]
    count = len(body) // size
    between = range(_HEADS + len(first.key), _HEADS + len(first.key) + (_BETWEEN if first.data else 0))
    for at in (*range(_HEADS), *between):
        if body[at::size].count(body[at]) < count:
            return None
    found = layout.iter_unpack(body)
    return list(found) if first.data else [(key, b"") for (key,) in found]
