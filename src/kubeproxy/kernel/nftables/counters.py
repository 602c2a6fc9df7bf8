"""Named counters of an nf_tables table, read over netlink.

Source: include/uapi/linux/netfilter/nf_tables.h and net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

from kubeproxy.kernel.netlink.protocol import Netlink, attribute, attributes, messages, understood
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_OBJECT, NEW_OBJECT


@understood("counters of nf_tables")
def packets(family: int, table: str, link: Netlink) -> dict[str, int]:
    """Return the packets that each named counter of a table has counted; empty for no such table. Raises ApplyError."""
    header = GENERIC.pack(family, 0, 0)
    name = table.encode() + b"\0"
    found: dict[str, int] = {}
    for data in link.dump_all(GET_OBJECT, header + attribute(nfta.OBJ_TABLE, name), f"the counters of table {table}"):
        for at in messages(data):
            if at.kind != NEW_OBJECT:
                continue
            parts = {kind: (start, end) for kind, start, end in attributes(data, at.start + len(header), at.end)}
            if nfta.OBJ_DATA not in parts or data[slice(*parts[nfta.OBJ_TABLE])] != name:
                continue
            for kind, start, end in attributes(data, *parts[nfta.OBJ_DATA]):
                if kind == nfta.COUNTER_PACKETS:
                    counter = data[slice(*parts[nfta.OBJ_NAME])].rstrip(b"\0").decode(errors=nfta.NOT_TEXT)
                    found[counter] = int.from_bytes(data[start:end], "big")
    return found
