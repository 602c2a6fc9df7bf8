"""Where the chains of a table of nf_tables hang, and what its sets are: what two tables that are alike have in common.

As that is only compared, it is as the kernel sends it. Source: nf_tables_fill_chain_info and nf_tables_fill_set in
net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import Netlink, attributes, messages, understood
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_CHAIN, GET_SET, SUBSYSTEM, element_lists, text_attribute

_BASE: Final = (nfta.CHAIN_HOOK, nfta.CHAIN_TYPE, nfta.CHAIN_POLICY)
_TYPE: Final = (nfta.SET_FLAGS, nfta.SET_KEY_LENGTH, nfta.SET_DATA_LENGTH)
_ANONYMOUS: Final = re.compile(rb"\b__(?:set|map)\d+(?=\0)")


class ChainShape(NamedTuple):
    """A chain's handle, and its hook, type and policy as they were sent, b'' for one that hangs nowhere.

    One that is made anew has another handle; its policy may be changed without that.
    """

    handle: int
    base: bytes


def chains(family: int, table: str, link: Netlink) -> dict[str, ChainShape]:
    """Return a table's chains by name. Raises NetlinkError."""
    found = {}
    with understood("chains of nf_tables"):
        for parts in _parts(GET_CHAIN, family, table, b"", "nf_tables chains", link):
            base = b"".join([parts.get(kind, b"") for kind in _BASE])
            found[_name(parts[nfta.CHAIN_NAME])] = ChainShape(int.from_bytes(parts[nfta.CHAIN_HANDLE], "big"), base)
    return found


def sets(family: int, table: str, link: Netlink) -> dict[str, bytes]:
    """Return a table's sets and maps by name, those of its rules (anonymous ones) among them: flags and sizes, as sent.

    Raises NetlinkError, with code ENOENT when the table is missing.
    """
    request = text_attribute(nfta.SET_TABLE, table)
    with understood("sets of nf_tables"):
        return {
            _name(parts[nfta.SET_NAME]): b"".join([parts.get(kind, b"") for kind in _TYPE])
            for parts in _parts(GET_SET, family, table, request, "nf_tables sets", link)
        }


def within(expressions: bytes) -> list[str]:
    """Return the names of the anonymous sets in a rule, of `Rule.raw`: they belong to it, and change with it alone."""
    return [name.decode() for name in _ANONYMOUS.findall(expressions)]


@understood("elements of nf_tables")
def listed(family: int, table: str, name: str, link: Netlink) -> frozenset[bytes]:
    """Return the elements of a set as they were sent. Raises NetlinkError, with code ENOENT when it is missing."""
    lists = element_lists(family, table, name, link)
    return frozenset([data[s:e] for data, start, end in lists for _, s, e in attributes(data, start, end)])


def _parts(kind: int, family: int, table: str, request: bytes, what: str, link: Netlink) -> Iterator[dict[int, bytes]]:
    # The table's name is the first attribute of chains and of sets; others may have 10,000 of them.
    first = text_attribute(nfta.SET_TABLE, table)
    for data in link.dump_all(kind, GENERIC.pack(family, 0, 0) + request, what):
        for at in messages(data):
            start = at.start + GENERIC.size
            if at.kind >> 8 == SUBSYSTEM and data.startswith(first, start):
                yield {number: data[s:e] for number, s, e in attributes(data, start, at.end)}


def _name(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")
