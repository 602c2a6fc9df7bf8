"""Elements of a set or map of nf_tables as pairs of key and data: 100,000 elements take some tenths of a second.

Nearly always all elements of a set are packed alike, which is checked; then a list of them is decoded at C speed.
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
        yield decoded(data, start, end)


def decoded(data: bytes, start: int, end: int) -> Pairs:
    """Return the elements of the list (NFTA_SET_ELEM_LIST_ELEMENTS) in data[start:end].

    The key of an interval is its first value followed by its last one; a verdict's data is the name of its chain.
    """
    alike = _alike(data, start, end)
    if alike is None:
        return [element_of(data, first, last)[:2] for _, first, last in attributes(data, start, end)]
    return alike


@lru_cache(maxsize=64)
def _layout(key: int, value: int, rest: int) -> struct.Struct:
    """Return where key and data are in an element; `rest` is the size of what follows them, such as timeouts."""
    return struct.Struct(f"{_HEADS}x{key}s{_BETWEEN}x{value}s{rest}x" if value else f"{_HEADS}x{key}s{rest}x")


def _alike(data: bytes, start: int, end: int) -> list[tuple[bytes, bytes]] | None:
    """Return the keys and values of a list of several elements; None when one is packed otherwise than the first."""
    if end - start < ATTRIBUTE.size:
        return []
    size = ATTRIBUTE.unpack_from(data, start)[0]
    if size < _HEADS or size == end - start or (end - start) % size:
        return None
    first = element_of(data, start + ATTRIBUTE.size, start + size)
    used = _HEADS + len(first.key) + (_BETWEEN + len(first.data) if first.data else 0)
    if used > size or len(first.key) % 4:
        return None
    layout = _layout(len(first.key), len(first.data), size - used)
    if layout.unpack_from(data, start) != ((first.key, first.data) if first.data else (first.key,)):
        return None
    body = data[start:end]
    count = len(body) // size
    after_key = _HEADS + len(first.key)
    between = range(after_key, after_key + _BETWEEN) if first.data else ()
    for at in (*range(_HEADS), *between, *range(used, min(used + ATTRIBUTE.size, size))):
        if body[at::size].count(body[at]) < count:
            return None
    found = layout.iter_unpack(body)
    return list(found) if first.data else [(key, b"") for (key,) in found]
