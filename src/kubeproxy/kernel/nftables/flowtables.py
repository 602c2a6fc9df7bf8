"""Messages of nf_tables about flowtables: which interfaces one takes packets from.

Source: include/uapi/linux/netfilter/nf_tables.h of Linux 6.18, nf_tables_parse_netdev_hooks of net/netfilter.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import Final

from kubeproxy.kernel.netlink.protocol import (
    HEADER,
    NLM_F_REQUEST,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
    messages,
    nested,
    understood,
)
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import (
    DELETE_FLOWTABLE,
    GENERIC,
    GET_FLOWTABLE,
    NEW_FLOWTABLE,
    NLM_F_CREATE,
    SUBSYSTEM,
    text_attribute,
)

_TABLE, _NAME, _HOOK = 1, 2, 3
_HOOK_NUMBER, _HOOK_PRIORITY, _HOOK_DEVICES = 1, 2, 3
_DEVICE: Final = 1
_INGRESS: Final = 0  # NF_NETDEV_INGRESS
MOST_DEVICES: Final = 256
"""Interfaces that one message may name: NFT_NETDEVICE_MAX."""


def names(family: int, table: str, link: Netlink) -> frozenset[str]:
    """Return the names of a table's flowtables; none where the kernel has no such thing. Raises NetlinkError."""
    found = set()
    try:
        dump = link.dump_all(GET_FLOWTABLE, GENERIC.pack(family, 0, 0) + text_attribute(_TABLE, table), "flowtables")
    except NetlinkError as error:
        if error.code != errno.EOPNOTSUPP:
            raise
        return frozenset()
    with understood("flowtables of nf_tables"):
        for data in dump:
            for at in messages(data):
                if at.kind >> 8 == SUBSYSTEM:
                    parts = {kind: data[s:e] for kind, s, e in attributes(data, at.start + GENERIC.size, at.end)}
                    if parts[_TABLE] == table.encode() + b"\0":
                        found.add(parts[_NAME].rstrip(b"\0").decode(errors=nfta.NOT_TEXT))
    return frozenset(found)


def flowtable_removal(family: int, table: str, name: str) -> bytes:
    """Return the message that removes a flowtable, to which no rule refers any more."""
    payload = GENERIC.pack(family, 0, 0) + text_attribute(_TABLE, table) + text_attribute(_NAME, name)
    return HEADER.pack(HEADER.size + len(payload), DELETE_FLOWTABLE, NLM_F_REQUEST, 0, 0) + payload


def flowtable_message(family: int, table: str, name: str, devices: Sequence[str]) -> bytes:
    """Return the message that makes a flowtable, or adds interfaces to one; those that it has are fine.

    The kernel refuses all when it does not have one of them, and takes those that go out by itself.
    """
    named = b"".join(text_attribute(_DEVICE, device) for device in devices)
    hook = nested(
        _HOOK,
        attribute(_HOOK_NUMBER, struct.pack(">I", _INGRESS)),
        attribute(_HOOK_PRIORITY, struct.pack(">i", 0)),
        nested(_HOOK_DEVICES, named) if devices else b"",
    )
    payload = GENERIC.pack(family, 0, 0) + text_attribute(_TABLE, table) + text_attribute(_NAME, name) + hook
    return HEADER.pack(HEADER.size + len(payload), NEW_FLOWTABLE, NLM_F_REQUEST | NLM_F_CREATE, 0, 0) + payload
