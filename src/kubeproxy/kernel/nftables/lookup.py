"""Elements of nf_tables' sets as they are while others change them: one pass over a set, and single ones by key.

For programs that read a table while another one writes it. Source: nf_tables_getsetelem, nf_tables_fill_setelem and
nft_rhash_walk in net/netfilter of Linux 6.18.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from kubeproxy.kernel.netlink.protocol import Netlink, NetlinkError, attributes, messages, nested, understood
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.contents import decoded
from kubeproxy.kernel.nftables.elements import interval_element, plain_element
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_ELEMENT, NEW_ELEMENT, in_set

Entries = dict[bytes, bytes]
"""Key to data: a value, a verdict's chain, or b''. The key of an interval is its first value and its last one."""


@understood("elements of nf_tables")
def glance(family: int, table: str, name: str, link: Netlink) -> Entries:
    """Return the elements of a set as one pass over it shows them. Raises NetlinkError.

    While others change the set some are passed over: the kernel goes on by counting, from the beginning each time.
    """
    found: Entries = {}
    for data in link.dump_once(GET_ELEMENT, in_set(family, table, name), f"elements of {name}"):
        for at in messages(data):
            if at.kind == NEW_ELEMENT:
                _read(data, at.start, at.end, found)
    return found


@understood("elements of nf_tables")
def lookup(family: int, table: str, name: str, keys: Iterable[bytes], link: Netlink, *, ranges: bool) -> Entries:
    """Return those of these elements that a set has; each is asked for by its key. Raises NetlinkError."""
    where = in_set(family, table, name)
    pack = interval_element if ranges else plain_element
    payloads = [where + nested(nfta.SET_ELEM_LIST_ELEMENTS, pack(key)) for key in keys]
    found: Entries = {}
    for code, buffers in link.inquire(GET_ELEMENT, payloads, f"elements of {name}"):
        if code and code != errno.ENOENT:
            raise NetlinkError(code, f"cannot read elements of {name}")
        for data, start, end in buffers:
            _read(data, start, end, found)
    return found


def _read(data: bytes, start: int, end: int, found: Entries) -> None:
    """Add the elements in a message's payload, data[start:end], to those that were found."""
    for kind, first, last in attributes(data, start + GENERIC.size, end):
        if kind == nfta.SET_ELEM_LIST_ELEMENTS:
            found.update(decoded(data, first, last))
