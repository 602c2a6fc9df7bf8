"""Elements of nf_tables' sets as they are while others change them: one pass over a set, and single ones by key.

For who looks at a table beside the program that writes it. Source: nf_tables_getsetelem, nf_tables_fill_setelem and
nft_rhash_walk in net/netfilter of Linux 6.18.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from typing import Final

from kubeproxy.kernel.netlink.protocol import ATTRIBUTE, Netlink, NetlinkError, attributes, messages, nested, understood
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.elements import interval_element, plain_element
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_ELEMENT, NEW_ELEMENT, element_of, in_set

_LENGTH: Final = struct.Struct("=H")

Entries = dict[bytes, bytes]
"""Key to data: a value, a verdict's chain, or b''. The key of an interval is its first value and its last one."""


@understood("elements of nf_tables")
def glance(family: int, table: str, name: str, link: Netlink) -> Entries:
    """Return the elements of a set as one pass over it shows them. Raises NetlinkError.

    While others change the set some are passed over: the kernel goes on by counting, from the beginning each time.
    """
    reader = _Reader()
    found: Entries = {}
    for data in link.dump_once(GET_ELEMENT, in_set(family, table, name), f"elements of {name}"):
        for at in messages(data):
            if at.kind == NEW_ELEMENT:
                reader.read(data, at.start, at.end, found)
    return found


@understood("elements of nf_tables")
def lookup(family: int, table: str, name: str, keys: Iterable[bytes], link: Netlink, *, ranges: bool) -> Entries:
    """Return those of these elements that a set has; each is asked for by its key. Raises NetlinkError."""
    where = in_set(family, table, name)
    pack = interval_element if ranges else plain_element
    payloads = [where + nested(nfta.SET_ELEM_LIST_ELEMENTS, pack(key)) for key in keys]
    reader = _Reader()
    found: Entries = {}
    for code, buffers in link.inquire(GET_ELEMENT, payloads, f"elements of {name}"):
        if code and code != errno.ENOENT:
            raise NetlinkError(code, f"cannot read elements of {name}")
        for data, start, end in buffers:
            reader.read(data, start, end, found)
    return found


class _Reader:
    """Reads the elements of one set. Those of one length are alike, and how is learned from the first of them.

    That takes a tenth of the time of looking at each attribute; intervals and verdicts are read by their attributes.
    """

    def __init__(self) -> None:
        self._length = 0
        self._key = self._data = slice(0, 0)

    def read(self, data: bytes, start: int, end: int, found: Entries) -> None:
        """Add the elements in a message's payload to those that were found."""
        for kind, first, last in attributes(data, start + GENERIC.size, end):
            if kind == nfta.SET_ELEM_LIST_ELEMENTS:
                self._list(data, first, last, found)

    def _list(self, data: bytes, start: int, end: int, found: Entries) -> None:
        length_of = _LENGTH.unpack_from
        key, value, learned = self._key, self._data, self._length
        while start + 4 <= end:
            length: int = length_of(data, start)[0]
            body = data[start + 4 : start + length]
            if length == learned:
                found[body[key]] = body[value]
            else:
                element = element_of(body, 0, len(body))
                found[element.key] = element.data
                if not learned and self._learn(body, element.key, element.data):
                    self._length = learned = length
                    key, value = self._key, self._data
            start += (max(length, 4) + 3) & ~3

    def _learn(self, body: bytes, key: bytes, value: bytes) -> bool:
        parts = {kind: (s, e) for kind, s, e in attributes(body, 0, len(body))}
        if nfta.SET_ELEM_KEY_END in parts:
            return False
        first = parts[nfta.SET_ELEM_KEY][0] + ATTRIBUTE.size
        self._key, self._data = slice(first, first + len(key)), slice(0, 0)
        if nfta.SET_ELEM_DATA in parts:
            first = parts[nfta.SET_ELEM_DATA][0] + ATTRIBUTE.size
            self._data = slice(first, first + len(value))
        return body[self._data] == value  # not so for verdicts
