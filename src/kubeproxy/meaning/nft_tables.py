"""Reads an nf_tables table from the kernel, with all elements of its sets. Interprets parts of its rules: values of
registers, interfaces by name or index, and iptables extensions.

Sources: net/netfilter/nft_meta.c, nft_compat.c and xt_conntrack.c of Linux 6.18."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import Netlink, attributes
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import nfta, tables
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.meaning import rules
from kubeproxy.meaning.rules import ACCEPT, DROP, TRANSLATING, UNKNOWN_TRANSLATION, Op, Operation, Property

_END: Final = 1  # NFT_SET_ELEM_INTERVAL_END


Element = tuple[bytes, bytes, bytes | x.RuleVerdict]
"""An element of a set: its first key, last key and data; a catch-all element has empty keys."""


class Elements(NamedTuple):
    """The form of a named set, and its elements.

    `matches_rest` means that other keys may match, too, because the set has a catch-all element or more elements than
    were read."""

    form: tables.SetForm
    elements: tuple[Element, ...]
    matches_rest: bool = False


class NftTable(NamedTuple):
    """A table from the kernel: its family, name, chains and sets."""

    family: int
    name: str
    chains: Mapping[str, tables.ChainContents]
    sets: Mapping[str, Elements]


def read(family: int, name: str, link: Netlink, most: int | None = None) -> NftTable:
    """Read a table from the kernel; a set with more than `most` elements is returned empty. Raises NetlinkError."""
    reader = TableReader(family, name, link)
    sets = {each: _filled(form, _elements(reader, each, form, most), most) for each, form in reader.sets().items()}
    return NftTable(family, name, reader.chain_contents(x.parse), sets)


def _filled(form: tables.SetForm, elements: Iterator[Element], most: int | None) -> Elements:
    read = list(islice(elements, most if most is None else most + 1))
    keyed = tuple([each for each in read if each[0]])
    if most is not None and len(read) > most:
        return Elements(form, (), True)
    return Elements(form, keyed, len(keyed) < len(read))


def _elements(reader: TableReader, name: str, form: tables.SetForm, most: int | None) -> Iterator[Element]:
    edges: list[tuple[bytes, bool, bytes | x.RuleVerdict]] = []
    for data, first, last in reader.element_lists(name):
        for _, start, end in attributes(data, first, last):
            parts = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
            key = parts.get(nfta.SET_ELEM_KEY, b"")[4:]
            value = x.parse_value(parts[nfta.SET_ELEM_DATA]) if nfta.SET_ELEM_DATA in parts else b""
            if nfta.SET_ELEM_KEY_END in parts:
                yield key, parts[nfta.SET_ELEM_KEY_END][4:], value
            elif key and form.flags & tables.INTERVAL and not form.lengths:
                flags = int.from_bytes(parts.get(nfta.SET_ELEM_FLAGS, b""), "big")
                edges.append((key, bool(flags & _END), value))
            else:
                yield key, key, value
        if most is not None and len(edges) > 2 * (most + 1):
            break  # more than `most` intervals
    yield from ranges(edges, form.key_length)


def ranges(edges: Iterable[tuple[bytes, bool, bytes | x.RuleVerdict]], size: int) -> Iterator[Element]:
    """Yield the intervals of a set from its edges, which are (first key, False, data) and (key after the last key,
    True, data)."""
    begin: tuple[bytes, bytes | x.RuleVerdict] | None = None
    for key, ends, value in sorted(edges, key=lambda edge: (edge[0], not edge[1])):
        if begin is not None:
            last = (int.from_bytes(key[:size], "big") - 1).to_bytes(size, "big")
            yield begin[0], last, begin[1]
        begin = None if ends else (key, value)
    if begin is not None:
        yield begin[0], b"\xff" * size, begin[1]


_TARGETS: Final = frozenset({"LOG", "NFLOG", "CONNMARK", "TCPMSS"})
"""iptables targets after which the next rule is evaluated; CONNMARK's marks are ignored."""
_TRACKED: Final = struct.Struct("=32x16s16s72xH2xH4x3H4xH")
"""The supported fields of struct xt_conntrack_mtinfo3: origdst_addr, origdst_mask, l4proto, origdst_port, match_flags,
invert_flags, state_mask, origdst_port_high."""
_STATE, _PROTO, _TARGET, _TARGET_PORT = 1, 2, 8, 0x200  # XT_CONNTRACK_STATE, _PROTO, _ORIGDST, _ORIGDST_PORT
_KNOWN_STATES: Final = 0x1BF  # all but XT_CONNTRACK_STATE_SNAT


class Term(NamedTuple):
    """The symbolic value of a register: the first `size` bytes of a field, masked and xored; or data found in a map; or
    a constant, as a sequence of its possible values."""

    field: Property | None
    size: int
    width: int = 0
    mask: int = -1
    xor: int = 0
    modulus: int = 0
    offset: int = 0
    value: bytes = b""


def interface(term: Term, value: bytes) -> str:
    """Return the interface that a rule compares with a term. `value` is an index, a name, or the beginning of names
    (returned with `*`). Returns '' if no interface has this index."""
    if term.width == 4:
        try:
            return socket.if_indextoname(int.from_bytes(value, sys.byteorder))
        except OSError:
            return ""
    name = value.rstrip(b"\0").decode(errors="replace")
    return name if len(value) == 16 or value.endswith(b"\0") else f"{name}*"


class UnknownRuleError(Exception):
    """An error for an unsupported expression."""


_RESETS: Final = {32: 7, 128: 6}
"""The number that means "TCP reset", by the number of bits of an address (enum ipt_reject_with, enum
ip6t_reject_with)."""


_NOTRACK: Final = 1  # XT_CT_NOTRACK; iptables -j NOTRACK sets another bit, too


def _tracked(name: str, info: bytes, where: str) -> Sequence[Operation]:
    """Return the operations of a target that untracks packets or assigns a zone; none for other targets. Source: struct
    xt_ct_target_info in include/uapi/linux/netfilter/xt_CT.h."""
    if name == "NOTRACK" or (name == "CT" and info[0] & _NOTRACK):
        return ((Op.UNTRACK, f"notrack in {where}"),)
    return ((Op.ZONE, f"ct zone in {where}"),) if name == "CT" and any(info[2:4]) else ()


def _conntrack_tests(info: bytes, width: int) -> Iterator[Operation]:
    address, mask, protocol, port, flags, inverted, states, last = _TRACKED.unpack_from(info)
    if flags & ~(_STATE | _PROTO | _TARGET | _TARGET_PORT) or (flags & _STATE and states & ~_KNOWN_STATES):
        raise UnknownRuleError("match conntrack")
    if flags & _STATE:
        yield Op.VALUE, Property.STATES, states, 0, 1, states, bool(inverted & _STATE)
    if flags & _TARGET:
        its, wanted = (int.from_bytes(each[:width], "big") for each in (mask, address))
        yield Op.VALUE, Property.ORIGINAL_DESTINATION, its, 0, wanted & its, wanted & its, bool(inverted & _TARGET)
    if flags & _PROTO:
        services = rules.protocol_set(protocol)
        yield Op.SERVICE, rules.EVERY & ~services if inverted & _PROTO else services
    if flags & _TARGET_PORT:
        services = rules.port_range(port, last)
        yield Op.ORIGINAL_SERVICE, rules.EVERY & ~services if inverted & _TARGET_PORT else services


def extension(kind: str, raw: bytes, where: str, bits: int) -> Sequence[Operation]:
    """Return the operations of an iptables extension. `kind` is match or target; `raw` contains its name and
    parameters."""
    parts = {number: raw[first:last] for number, first, last in attributes(raw, 0, len(raw))}
    name = parts[nfta.MATCH_NAME].rstrip(b"\0").decode(errors="replace")
    if kind == "target":
        if name == "REJECT":
            by_reset = int.from_bytes(parts[nfta.MATCH_INFO][:4], sys.byteorder) == _RESETS[bits]
            return (Op.REFUSE, by_reset), (Op.VERDICT, DROP, "")
        if name == "MARK":
            value, mask = struct.unpack_from("=2I", parts[nfta.MATCH_INFO])  # xt_mark_tginfo2
            return ((Op.MARK, ~mask & 0xFFFFFFFF, value),)
        if tracked := _tracked(name, parts[nfta.MATCH_INFO], where):
            return tracked
        end = UNKNOWN_TRANSLATION if name in TRANSLATING else ((Op.VERDICT, ACCEPT, ""),)
        return () if name in _TARGETS else ((Op.UNKNOWN, f"target {name} in {where}"), *end)
    info = parts.get(nfta.MATCH_INFO, b"")
    if name == "conntrack" and len(info) >= _TRACKED.size:
        return tuple(_conntrack_tests(info, bits // 8))
    if name != "comment":
        raise UnknownRuleError(f"match {name}")
    return ()
