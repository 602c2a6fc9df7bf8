"""What the counters of a map's elements have counted, asked for by key over netlink.

A dump would begin at the first element again for each of its buffers, and pass over some while others change the map.
Source: nf_tables_getsetelem of net/netfilter/nf_tables_api.c and nft_counter_do_dump of nft_counter.c, Linux 6.18.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import NLA_F_NESTED, Netlink, NetlinkError, attribute, attributes, understood
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.elements import Packer
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_ELEMENT, in_set

AT_ONCE: Final = 100
"""Elements that are best asked for together: that takes about 0.6 ms."""

_NUMBER: Final = struct.Struct(">Q").unpack_from


class Count(NamedTuple):
    """What an element of a map has counted; key and data are packed as the element has them."""

    key: bytes
    data: bytes
    packets: int
    bytes: int


@understood("counters of nf_tables")
def counts(family: int, table: str, name: str, keys: Sequence[bytes], link: Netlink) -> list[Count]:
    """Return what those of these elements have counted that there are and that have a counter. Raises NetlinkError.

    All keys have one length, as they are of one map.
    """
    where = in_set(family, table, name)
    found: list[Count] = []
    layouts: dict[int, _Layout | None] = {}
    packer = Packer.of(len(keys[0]) if keys else 0, 0)
    left = list(keys)
    while left:
        asked = b"".join([packer.pack(key, b"") for key in left[:AT_ONCE]])
        payload = where + attribute(nfta.SET_ELEM_LIST_ELEMENTS | NLA_F_NESTED, asked)
        ((code, answers),) = link.inquire(GET_ELEMENT, [payload], f"counters of {name}")
        if code and code != errno.ENOENT:
            raise NetlinkError(code, f"cannot read the counters of {name}")
        # It answers element by element, up to the first that is not there.
        for key, (data, start, end) in zip(left, answers, strict=False):
            if end - start not in layouts:
                layouts[end - start] = _learned(data, start, end)
            layout = layouts[end - start]
            if layout is not None:
                packets, octets = _NUMBER(data, start + layout.packets)[0], _NUMBER(data, start + layout.bytes)[0]
                found.append(Count(key, data[start + layout.data : start + layout.data_end], packets, octets))
        del left[: len(answers) + 1 if code else AT_ONCE]
    return found


class _Layout(NamedTuple):
    """Where parts of an answer are, from its beginning; answers of one length are alike."""

    data: int
    data_end: int
    packets: int
    bytes: int


def _learned(data: bytes, start: int, end: int) -> _Layout | None:
    """Return where an answer has what is asked for, None when its element has no counter."""
    for kind, first, last in attributes(data, start + GENERIC.size, end):
        if kind == nfta.SET_ELEM_LIST_ELEMENTS:
            for _, s, e in attributes(data, first, last):
                parts = {kind: (a, b) for kind, a, b in attributes(data, s, e)}
                if nfta.SET_ELEM_EXPR in parts and nfta.SET_ELEM_DATA in parts:
                    expression = {kind: (a, b) for kind, a, b in attributes(data, *parts[nfta.SET_ELEM_EXPR])}
                    numbers = {kind: a for kind, a, _ in attributes(data, *expression[nfta.EXPR_DATA])}
                    # Data is one attribute; what has none is of a layout that is not known, as what lacks others.
                    *_, (_, value, value_end) = attributes(data, *parts[nfta.SET_ELEM_DATA])
                    packets, octets = numbers[nfta.COUNTER_PACKETS], numbers[nfta.COUNTER_BYTES]
                    return _Layout(value - start, value_end - start, packets - start, octets - start)
    return None
