"""Parts of nf_tables rules: values of registers, interfaces by name or index, and iptables extensions.

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
"""iptables targets after which the next rule is evaluated, with an unknown mark."""
_STATES: Final = struct.Struct("=146x3H")  # match_flags, invert_flags, state_mask of struct xt_conntrack_mtinfo3
_KNOWN_STATES: Final = 0x1BF  # all but XT_CONNTRACK_STATE_SNAT


class Term(NamedTuple):
    """The value of a register: the first `size` bytes of a field, masked and xored; or data found in a map.

    It may also be a constant: its possible values, one after the other.
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
    """Return the interface name or pattern with which a term is compared; '' if no interface has the index."""
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
    """Return the operations of an iptables extension; `kind` is match or target, `raw` has its name and parameters."""
    parts = {number: raw[first:last] for number, first, last in attributes(raw, 0, len(raw))}
    name = parts[nfta.MATCH_NAME].rstrip(b"\0").decode(errors="replace")
    if kind == "target":
        if name == "REJECT":
            return (Op.REFUSE,), (Op.VERDICT, DROP, "")
        if name == "NOTRACK" or (name == "CT" and parts[nfta.MATCH_INFO][:1] == b"\1"):
            return ((Op.UNTRACK, f"notrack in {where}"),)
        return () if name in _TARGETS else ((Op.UNKNOWN, f"target {name} in {where}"), (Op.VERDICT, ACCEPT, ""))
    info = parts.get(nfta.MATCH_INFO, b"")
    if name == "conntrack" and len(info) >= _STATES.size:
        flags, inverted, mask = _STATES.unpack_from(info)
        if flags == 1 and not mask & ~_KNOWN_STATES:
            return ((Op.VALUE, Property.STATES, mask, 0, 1, mask, bool(inverted & 1)),)
    if name != "comment":
        raise UnknownRuleError(f"match {name}")
    return ()
