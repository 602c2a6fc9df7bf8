"""What the counters of a map's elements have counted, read over netlink buffer by buffer.

Source: nf_tables_fill_setelem of net/netfilter/nf_tables_api.c and nft_counter_do_dump of nft_counter.c, Linux 6.18.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from kubeproxy.kernel import nfta
from kubeproxy.kernel.netlink import DumpInterruptedError, Netlink, attribute, attributes, messages
from kubeproxy.kernel.nfnetlink import GET_ELEMENT, NEW_ELEMENT, element_of

_GENERIC: Final = struct.Struct("=BBH")  # struct nfgenmsg
_LENGTH: Final = struct.Struct("=H")
_NUMBER: Final = struct.Struct(">Q")


class Count(NamedTuple):
    """What an element of a map has counted; key and data are packed as the element has them."""

    key: bytes
    data: bytes
    packets: int
    bytes: int


def counts(family: int, table: str, name: str, link: Netlink) -> Iterator[list[Count]]:
    """Yield the elements that have counted anything, a buffer at a time. Raises NetlinkError.

    A buffer has some 250 elements and takes about 1 ms; the caller may do other things in between, but not with `link`.
    While others change the map some elements are passed over.
    """
    where = (
        _GENERIC.pack(family, 0, 0)
        + attribute(nfta.SET_ELEM_LIST_TABLE, table.encode() + b"\0")
        + attribute(nfta.SET_ELEM_LIST_SET, name.encode() + b"\0")
    )
    places: dict[int, int | None] = {}
    with suppress(DumpInterruptedError):
        for data in link.dump(GET_ELEMENT, where, f"counters of {name}"):
            yield list(_counted(data, places))


def _counted(data: bytes, places: dict[int, int | None]) -> Iterator[Count]:
    """Yield what has been counted. `places` says where in an element of a length the packets are; it is added to."""
    for at in messages(data):
        if at.kind != NEW_ELEMENT:
            continue
        for kind, start, end in attributes(data, at.start + _GENERIC.size, at.end):
            if kind == nfta.SET_ELEM_LIST_ELEMENTS:
                yield from _of_list(data, start, end, places)


def _of_list(data: bytes, start: int, end: int, places: dict[int, int | None]) -> Iterator[Count]:
    length_at, number_at = _LENGTH.unpack_from, _NUMBER.unpack_from
    while start + 4 <= end:
        length: int = length_at(data, start)[0]
        if length not in places:
            found = _counter(data, start + 4, start + length)
            places[length] = found[nfta.COUNTER_PACKETS] - start if found else None
        place = places[length]
        if place is not None and number_at(data, start + place)[0]:
            counter = _counter(data, start + 4, start + length)
            element = element_of(data, start + 4, start + length)
            packets, octets = (number_at(data, counter[kind])[0] for kind in (nfta.COUNTER_PACKETS, nfta.COUNTER_BYTES))
            yield Count(element.key, element.data, packets, octets)
        start += (max(length, 4) + 3) & ~3


def _counter(data: bytes, start: int, end: int) -> dict[int, int]:
    """Return where the numbers of an element's counter begin, by their attributes; empty for none."""
    for kind, first, last in attributes(data, start, end):
        if kind == nfta.SET_ELEM_EXPR:
            for inner, s, e in attributes(data, first, last):
                if inner == nfta.EXPR_DATA:
                    return {number: place for number, place, _ in attributes(data, s, e)}
    return {}
