"""Where the chains of a table of nf_tables hang, and what its sets are: what two tables that are alike have in common.

As that is only compared, it is as the kernel sends it. Source: nf_tables_fill_chain_info and nf_tables_fill_set in
net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import Netlink, attributes, messages, understood
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_CHAIN, SUBSYSTEM, text_attribute

_BASE: Final = (nfta.CHAIN_HOOK, nfta.CHAIN_TYPE, nfta.CHAIN_POLICY)


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


def _parts(kind: int, family: int, table: str, request: bytes, what: str, link: Netlink) -> Iterator[dict[int, bytes]]:
    # The table's name is the first attribute of chains and of sets; others may have 10,000 of them.
    first = text_attribute(nfta.SET_TABLE, table)
    for data in link.dump_all(kind, GENERIC.pack(family, 0, 0) + request, what):
        for at in messages(data):
            start = at.start + GENERIC.size
            if at.kind >> 8 == SUBSYSTEM and data.startswith(first, start):
                yield {number: data[s:e] for number, s, e in attributes(data, start, at.end)}


def _name(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors=nfta.NOT_TEXT)
