"""Parts of rules of nf_tables: what a register holds, interfaces by name or index, and extensions of iptables.

Sources: net/netfilter/nft_meta.c, nft_compat.c and xt_conntrack.c of Linux 6.18.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import attributes
from kubeproxy.kernel.nftables import nfta
from kubeproxy.meaning.rules import ACCEPT, DROP, Op, Operation, Property

_TARGETS: Final = frozenset({"LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS"})
"""Targets of iptables after which the next rule comes, with the mark unknown."""
_STATES: Final = struct.Struct("=146x3H")  # match_flags, invert_flags, state_mask of struct xt_conntrack_mtinfo3
_KNOWN_STATES: Final = 0x1BF  # all but XT_CONNTRACK_STATE_SNAT


class Term(NamedTuple):
    """What a register holds: `size` first bytes of a field, masked and xored; data found in a map; a constant, or all
    values that it may have, one after the other.
    """

    field: Property | None
    size: int
    width: int = 0
    mask: int = -1
    xor: int = 0
    modulus: int = 0
    offset: int = 0
    value: bytes = b""
    table: int = -1


def interface(term: Term, value: bytes) -> str:
    """Return the name, or the pattern of names, with which an interface is compared; '' for none that exists."""
    if term.width == 4:
        try:
            return socket.if_indextoname(int.from_bytes(value, sys.byteorder))
        except OSError:
            return ""
    name = value.rstrip(b"\0").decode(errors="replace")
    return name if len(value) == 16 or value.endswith(b"\0") else f"{name}*"


class UnknownRuleError(Exception):
    """An expression is not understood."""


def extension(kind: str, raw: bytes, where: str) -> Sequence[Operation]:
    """Return the operations of a match or target of iptables, as `kind` says, by its name and parameters."""
    parts = {number: raw[first:last] for number, first, last in attributes(raw, 0, len(raw))}
    name = parts[nfta.MATCH_NAME].rstrip(b"\0").decode(errors="replace")
    if kind == "target":
        if name == "REJECT":
            return (Op.REFUSE,), (Op.VERDICT, DROP, "")
        return () if name in _TARGETS else ((Op.UNKNOWN, f"target {name} in {where}"), (Op.VERDICT, ACCEPT, ""))
    info = parts.get(nfta.MATCH_INFO, b"")
    if name == "conntrack" and len(info) >= _STATES.size:
        flags, inverted, mask = _STATES.unpack_from(info)
        if flags == 1 and not mask & ~_KNOWN_STATES:
            return ((Op.VALUE, Property.STATES, mask, 0, 1, mask, bool(inverted & 1)),)
    if name != "comment":
        raise UnknownRuleError(f"match {name}")
    return ()
