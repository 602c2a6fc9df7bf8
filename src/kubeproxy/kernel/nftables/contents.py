"""The dump of a set or map of nf_tables as pairs of key and data: 100,000 elements take some tenths of a second.

Nearly always all elements of a set are packed alike, which is checked; then a buffer is taken apart at C speed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

from kubeproxy.kernel.netlink.protocol import ATTRIBUTE, Netlink, attributes
from kubeproxy.kernel.nftables.nfnetlink import element_lists, element_of

_HEADS = 3 * ATTRIBUTE.size  # of the element, its key and the key's value
_BETWEEN = 2 * ATTRIBUTE.size  # the heads of the data and its value


Pairs = Sequence[tuple[bytes, bytes]]
"""Elements as key and data; the data of a plain set's element is empty."""


def pairs(family: int, table: str, name: str, link: Netlink | None = None) -> Iterator[Pairs]:
    """Yield the elements of a set, a buffer of the dump at a time; one may be listed twice (nft_rhash_walk).

    Raises NetlinkError, with code ENOENT when the set is missing.
    """
    for data, start, end in element_lists(family, table, name, link):
        alike = _alike(data, start, end)
        if alike is None:
            alike = [element_of(data, first, last)[:2] for _, first, last in attributes(data, start, end)]
        yield alike


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
