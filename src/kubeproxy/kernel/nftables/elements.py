"""Elements of nf_tables' sets and maps: packs them for a transaction, and reads them and their counters. Sources:
nf_tables_newsetelem, nf_tables_getsetelem, nf_tables_fill_setelem of net/netfilter/nf_tables_api.c, nft_rhash_walk and
nft_counter_do_dump of Linux 6.18."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.nftables import nfnetlink, nfta
from kubeproxy.kernel.nftables.expressions import GOTO, RuleVerdict, pack_value, parse_value
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, NEW_ELEMENT, names, nft_message

_INTERVAL_END: Final = 1  # NFT_SET_ELEM_INTERVAL_END
_CATCH_ALL: Final = 2  # NFT_SET_ELEM_CATCHALL
# The length of a nested attribute is a number of 16 bits.
_LIST_LIMIT: Final = 60_000


# -- packing -----------------------------------------------------------------------------------------------------------


def element_messages(
    kind: int, family: int, table: str, name: str, elements: Sequence[bytes], size: int = 0, set_id: int = 0
) -> list[bytes]:
    """Return the messages that add (NEW_ELEMENT) or remove (DELETE_ELEMENT) packed elements of one set. With `size`,
    all elements have this number of bytes, and `elements` may contain any pieces of the joined elements. `set_id` is
    the number by which the transaction refers to an anonymous set that it creates."""
    where = names(table, name)
    if set_id:
        where += nl.number_attribute(nfta.SET_ELEM_LIST_SET_ID, set_id)
    joined = b"".join(elements)
    chunks = [joined] if 0 < len(joined) <= _LIST_LIMIT else _cut(joined, size) if size else _chunks(elements)
    payloads = (where + nl.attribute(nfta.SET_ELEM_LIST_ELEMENTS | nl.NLA_F_NESTED, chunk) for chunk in chunks)
    flags = nfnetlink.CREATE if kind == NEW_ELEMENT else nl.NLM_F_REQUEST
    return [nft_message(kind, family, payload, flags) for payload in payloads]


def _cut(joined: bytes, size: int) -> Iterator[bytes]:
    step = _LIST_LIMIT // size * size
    for start in range(0, len(joined), step):
        yield joined[start : start + step]


def _chunks(elements: Sequence[bytes]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    used = 0
    for element in elements:
        if used + len(element) > _LIST_LIMIT:
            yield b"".join(chunk)
            chunk, used = [], 0
        chunk.append(element)
        used += len(element)
    if chunk:
        yield b"".join(chunk)


class Packer(NamedTuple):
    """Packs the elements of one set from the constant bytes around key and data. `size` is the size of an element."""

    before_key: bytes
    before_data: bytes
    after_data: bytes
    size: int

    @classmethod
    def of(cls, key_size: int, data_size: int) -> Packer:
        """Return the packer of a set or map, from the sizes in bytes of key and data. The size of data is 0 for a plain
        set, or to remove elements."""
        data = _value(nfta.SET_ELEM_DATA, bytes(data_size)) if data_size else b""
        element = nl.nested(nfta.LIST_ELEM, _value(nfta.SET_ELEM_KEY, bytes(key_size)), data)
        padding = bytes(-data_size % 4)
        before_data = data[: len(data) - data_size - len(padding)]
        return cls(element[: len(element) - len(data) - key_size], before_data, padding, len(element))

    def pack(self, key: bytes, data: bytes) -> bytes:
        """Return one element. The key is padded to a multiple of four bytes, as in the kernel's registers."""
        return self.before_key + key + self.before_data + data + self.after_data


@lru_cache(maxsize=4096)
def goto_frame(key_size: int, chain: bytes) -> tuple[bytes, bytes]:
    """Return the bytes before and after the key in an element of a verdict map with `goto chain`."""
    verdict = nl.nested(nfta.SET_ELEM_DATA, pack_value(RuleVerdict(GOTO, chain.decode())))
    element = nl.nested(nfta.LIST_ELEM, _value(nfta.SET_ELEM_KEY, bytes(key_size)), verdict)
    return element[: len(element) - len(verdict) - key_size], verdict


def interval_element(key: bytes, data: bytes = b"") -> bytes:
    """Return an element of a concatenated interval set or map; `key` is the interval's first key, then the last key."""
    half = len(key) // 2
    first, last = _value(nfta.SET_ELEM_KEY, key[:half]), _value(nfta.SET_ELEM_KEY_END, key[half:])
    return nl.nested(nfta.LIST_ELEM, first, last, _value(nfta.SET_ELEM_DATA, data) if data else b"")


def plain_element(key: bytes, data: bytes | RuleVerdict = b"", *more: bytes) -> bytes:
    """Return the element of a set, or of a map to values or verdicts; `more` are further packed attributes."""
    value = nl.nested(nfta.SET_ELEM_DATA, pack_value(data)) if data else b""
    return nl.nested(nfta.LIST_ELEM, _value(nfta.SET_ELEM_KEY, key), value, *more)


def catch_all_element() -> bytes:
    """Return the catch-all element, `*` in nft, which has no key and matches if no other element matches."""
    return nl.nested(nfta.LIST_ELEM, nl.number_attribute(nfta.SET_ELEM_FLAGS, _CATCH_ALL))


def timed_element(key: bytes, timeout: int, expires: int, data: bytes = b"") -> bytes:
    """Return an element of a set or map with timeouts. Timeout and expiration are in milliseconds. A timeout of 0 means
    the set's timeout, which dumps omit since Linux 6.12. The kernel refuses a timeout of 0 with an expiration."""
    lasts = nl.number_attribute(nfta.SET_ELEM_TIMEOUT, timeout, 8) if timeout else b""
    ends = nl.number_attribute(nfta.SET_ELEM_EXPIRATION, expires, 8)
    return plain_element(key, data, lasts, ends)


def _value(kind: int, value: bytes) -> bytes:
    return nl.nested(kind, nl.attribute(nfta.DATA_VALUE, value))


# -- parsing -----------------------------------------------------------------------------------------------------------


class Element(NamedTuple):
    """An element: packed key and data; in a verdict map the data is the name of a chain. Times are in milliseconds; 0
    if the set has no timeouts. The key of an interval is its first value followed by its last value. If the key is a
    single field, an interval is two elements, of which the second has `ends` True, and the value after the interval as
    its key."""

    key: bytes
    data: bytes
    timeout: int
    expires: int
    ends: bool = False


Entries = dict[bytes, bytes]
"""Elements as pairs of key and data in the form of Element; the data of a plain set is empty."""
Pairs = Sequence[tuple[bytes, bytes]]
"""Elements as pairs like Entries, in a sequence that may contain duplicates."""


def element_of(data: bytes, start: int, end: int) -> Element:
    """Return the element with the attributes in data[start:end]."""
    key = end_key = value = b""
    timeout = expires = flags = 0
    for kind, s, e in nl.attributes(data, start, end):
        if kind == nfta.SET_ELEM_KEY:
            key = data[s + nl.ATTRIBUTE.size : e]
        elif kind == nfta.SET_ELEM_DATA:
            found = parse_value(data[s:e])
            value = found if isinstance(found, bytes) else found.chain.encode(errors="surrogateescape")
        elif kind == nfta.SET_ELEM_KEY_END:
            end_key = data[s + nl.ATTRIBUTE.size : e]
        elif kind == nfta.SET_ELEM_TIMEOUT:
            timeout = int.from_bytes(data[s:e], "big")
        elif kind == nfta.SET_ELEM_EXPIRATION:
            expires = int.from_bytes(data[s:e], "big")
        elif kind == nfta.SET_ELEM_FLAGS:
            flags = int.from_bytes(data[s:e], "big")
    return Element(key + end_key, value, timeout, expires, bool(flags & _INTERVAL_END))


def lists(places: Iterable[tuple[bytes, int, int]]) -> Iterator[tuple[bytes, int, int]]:
    """Yield (buffer, start, end) of each list of elements in these messages."""
    for data, start, end in places:
        for kind, first, last in nl.attributes(data, start, end):
            if kind == nfta.SET_ELEM_LIST_ELEMENTS:
                yield data, first, last


class ElementLayout(NamedTuple):
    """The byte layout of records of equal size, one record per element. `fields` unpacks a record to its key and data.
    `constant` are the offsets in a record of the bytes that must be equal in all records: the bytes before the key, the
    bytes between key and data, and the attribute header after the data."""

    fields: struct.Struct
    constant: tuple[int, ...]


def layout_of(data: bytes, origin: int, size: int, start: int, end: int) -> ElementLayout | None:
    """Return the layout of records of `size` bytes. Return None if the key is an interval, or if the data is a verdict.
    The first record begins at `origin`, and its element is data[start:end]."""
    values = {kind: first + nl.ATTRIBUTE.size for kind, first, _ in nl.attributes(data, start, end)}
    element = element_of(data, start, end)
    if nfta.SET_ELEM_KEY not in values or bool(element.data) != (nfta.SET_ELEM_DATA in values):
        return None
    key = values[nfta.SET_ELEM_KEY]
    after_key = key + len(element.key)
    value = values.get(nfta.SET_ELEM_DATA, after_key)
    after_value = value + len(element.data)
    if value < after_key or data[key:after_key] != element.key or data[value:after_value] != element.data:
        return None
    return _layout(key - origin, len(element.key), value - after_key, len(element.data), size - (after_value - origin))


@lru_cache(maxsize=64)
def _layout(before: int, key: int, between: int, value: int, rest: int) -> ElementLayout:
    used, size = before + key + between + value, before + key + between + value + rest
    following = range(used, min(used + nl.ATTRIBUTE.size, size))
    constant = (*range(before), *range(before + key, before + key + between), *following)
    return ElementLayout(struct.Struct(f"{before}x{key}s{between}x{value}s{rest}x"), constant)


def equal_columns(body: bytes, size: int, columns: Iterable[int]) -> bool:
    """Return whether all records of `size` bytes have the same bytes in these columns."""
    count = len(body) // size
    return all(body[at::size].count(body[at]) == count for at in columns)


def decoded(data: bytes, start: int, end: int) -> Pairs:
    """Return the elements of a list (NFTA_SET_ELEM_LIST_ELEMENTS) in data[start:end]. Compiled code decodes a list if
    all its elements have the same layout, as in nearly all lists."""
    alike = _alike(data, start, end)
    if alike is None:
        return [element_of(data, first, last)[:2] for _, first, last in nl.attributes(data, start, end)]
    return alike


def _alike(data: bytes, start: int, end: int) -> Pairs | None:
    if end - start < nl.ATTRIBUTE.size:
        return []
    size = nl.ATTRIBUTE.unpack_from(data, start)[0]
    if size < nl.ATTRIBUTE.size or size == end - start or (end - start) % size:
        return None
    layout = layout_of(data, start, size, start + nl.ATTRIBUTE.size, start + size)
    body = data[start:end]
    if layout is None or not equal_columns(body, size, layout.constant):
        return None
    return list(layout.fields.iter_unpack(body))


# -- counters ----------------------------------------------------------------------------------------------------------

COUNTED_AT_ONCE: Final = 100
"""The best number of elements per request of `TableReader.element_counts`; such a request takes about 0.6 ms."""


class ElementCount(NamedTuple):
    """An element's packed key and data, and the packets and bytes that its counter has counted."""

    key: bytes
    data: bytes
    packets: int
    bytes: int


def counter_places(data: bytes, start: int, end: int) -> tuple[int, int, int, int] | None:
    """Return four offsets in an answer: start of the data, end of the data, packet count, byte count; None if the
    answer contains no counts. Answers of equal length have the same layout."""
    element = nl.find(data, start + GENERIC.size, end, nfta.SET_ELEM_LIST_ELEMENTS, nfta.LIST_ELEM)
    if element is None:
        return None
    value = nl.find(data, *element, nfta.SET_ELEM_DATA)
    counter = nl.find(data, *element, nfta.SET_ELEM_EXPR, nfta.EXPR_DATA)
    if value is None or counter is None:
        return None
    *_, (_, first, last) = nl.attributes(data, *value)  # one attribute: a value or a verdict
    at = {kind: place for kind, place, _ in nl.attributes(data, *counter)}
    return first - start, last - start, at[nfta.COUNTER_PACKETS] - start, at[nfta.COUNTER_BYTES] - start
