"""Whether a chain drops a packet, as far as that hangs on addresses, protocol and port.

Rules are walked as by the kernel. Where anything else decides (marks, interfaces, sets), nobody is sure. Source:
nft_do_chain of net/netfilter/nf_tables_core.c, and include/uapi/linux/netfilter/nf_tables.h, of Linux 6.18.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from kubeproxy.kernel import nfta
from kubeproxy.kernel.netlink import attributes

_NETWORK, _TRANSPORT = 1, 2  # NFT_PAYLOAD_..._HEADER
_NFPROTO, _L4PROTO = 15, 16  # NFT_META_...
_EQUAL, _UNEQUAL = 0, 1  # NFT_CMP_...
_DROP, _ACCEPT, _JUMP, _GOTO, _RETURN = 0, 1, -3, -4, -5
_STATES: Final = struct.Struct("=146xH2xH")  # match_flags, of which 1 is for the state, and state_mask
NEW: Final = 8  # NF_CT_STATE_BIT(IP_CT_NEW)
_SILENT: Final = frozenset({"counter", "log", "comment"})
"""Expressions, and matches of iptables, that neither choose packets nor are a verdict."""
_TAKING: Final = frozenset({"queue", "synproxy"})
"""Expressions that hand a packet over to somebody else."""
_SPEECHLESS: Final = frozenset({"LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS"})
"""Targets of iptables after which the next rule comes."""
_MOST_RULES: Final = 2000

Header = Sequence[int | None]
"""The bytes of a header, None for those that are not known."""


class Aim(NamedTuple):
    """A packet that begins a connection: packed source (None if unknown) and destination, protocol, port.

    `state` is what connection tracking says of it, None before it was tracked.
    """

    source: bytes | None
    destination: bytes
    protocol: int
    port: int
    state: int | None = NEW

    @property
    def network(self) -> Header:
        """The network header."""
        size = len(self.destination)
        ends = [*(self.source or [None] * size), *self.destination]
        if size == 4:
            return [*[None] * 9, self.protocol, None, None, *ends]
        return [*[None] * 6, self.protocol, None, *ends]

    @property
    def transport(self) -> Header:
        """The beginning of the transport header."""
        return [None, None, *self.port.to_bytes(2, "big")]


class Fate(Enum):
    """What becomes of a packet in a chain. DROPPED is sure, and so is PASSES."""

    DROPPED = "dropped"
    PASSES = "passes"
    UNSURE = "unsure"


class _Fit(Enum):
    YES = "yes"
    NO = "no"
    MAYBE = "maybe"


class _Rule(NamedTuple):
    """Whether a rule takes a packet, and what it does: a code of the kernel, None for nothing that is known, and where
    it leads. `ends` says whether it has a verdict at all.
    """

    fit: _Fit
    ends: bool
    code: int | None
    target: str


Rules = Callable[[str], Iterable[bytes]]
"""Returns the expressions of each rule of a chain."""


def fate(chain: str, policy: str, rules: Rules, aim: Aim) -> Fate:
    """Return what becomes of a packet in a base chain with this policy ('accept', 'drop')."""
    found = _Walk(rules, aim).through(chain)
    if found is not None:
        return found
    return Fate.DROPPED if policy == "drop" else Fate.PASSES


class _Walk:
    def __init__(self, rules: Rules, aim: Aim) -> None:
        self._rules = rules
        self._aim = aim
        self._left = _MOST_RULES

    def through(self, chain: str) -> Fate | None:
        """Return how a chain ends the way of the packet, None where it returns."""
        for raw in self._rules(chain):
            self._left -= 1
            if self._left < 0:
                return Fate.UNSURE
            rule = read(raw, self._aim)
            if rule.fit is _Fit.NO or not rule.ends or (rule.fit is _Fit.MAYBE and rule.code == _DROP):
                continue
            if rule.fit is _Fit.MAYBE or rule.code is None:
                return Fate.UNSURE
            if rule.code in {_DROP, _ACCEPT}:
                return Fate.DROPPED if rule.code == _DROP else Fate.PASSES
            if rule.code == _RETURN:
                return None
            found = self.through(rule.target)
            if found is not None or rule.code == _GOTO:
                return found
        return None


def read(raw: bytes, aim: Aim) -> _Rule:
    """Return what the expressions of a rule say of a packet."""
    fit, ends, code, target = _Fit.YES, False, None, ""
    registers: dict[bytes, bytes | None] = {}
    for _, expression in _parts(raw):
        parts = dict(_parts(expression))
        name, body = _text(parts[nfta.EXPR_NAME]), dict(_parts(parts.get(nfta.EXPR_DATA, b"")))
        if name in {"immediate", "reject", "target", *_TAKING}:
            ends, code, target = _verdict(name, body)
        elif name in {"payload", "meta", "ct", "bitwise"}:
            _load(name, body, aim, registers)
        elif name not in _SILENT and fit is not _Fit.NO:
            found = _compared(body, registers) if name == "cmp" else _matched(name, body)
            fit = found if found is not _Fit.YES else fit
    return _Rule(fit, ends, code, target)


def _load(name: str, body: Mapping[int, bytes], aim: Aim, registers: dict[bytes, bytes | None]) -> None:
    """Note what an expression puts into a register, None where that is not known."""
    if name == "bitwise":
        value = registers.get(body[nfta.BITWISE_SREG])
        mask, xor = (dict(_parts(body.get(which, b""))).get(nfta.DATA_VALUE, b"") for which in (4, 5))
        known = value is not None and len(mask) == len(xor) == len(value)
        made = bytes(v & m ^ x for v, m, x in zip(value or b"", mask, xor, strict=False)) if known else None
        registers[body[nfta.BITWISE_DREG]] = made
    elif name == "payload" and nfta.PAYLOAD_DREG in body:
        base, offset, length = (int.from_bytes(body[which], "big") for which in (2, 3, 4))
        header = {_NETWORK: aim.network, _TRANSPORT: aim.transport}.get(base, ())
        piece = header[offset : offset + length]
        known = len(piece) == length and None not in piece
        registers[body[nfta.PAYLOAD_DREG]] = bytes(byte or 0 for byte in piece) if known else None
    elif name == "meta" and nfta.META_DREG in body:
        values = {_NFPROTO: 2 if len(aim.destination) == 4 else 10, _L4PROTO: aim.protocol}
        number = values.get(int.from_bytes(body[nfta.META_KEY], "big"))
        registers[body[nfta.META_DREG]] = bytes([number]) if number is not None else None
    elif name == "ct" and nfta.CT_DREG in body:
        known = aim.state is not None and body.get(nfta.CT_KEY) == bytes(4)
        registers[body[nfta.CT_DREG]] = (aim.state or 0).to_bytes(4, sys.byteorder) if known else None


def _compared(body: Mapping[int, bytes], registers: Mapping[bytes, bytes | None]) -> _Fit:
    value = registers.get(body[nfta.CMP_SREG])
    operation = int.from_bytes(body[nfta.CMP_OP], "big")
    wanted = dict(_parts(body[nfta.CMP_DATA])).get(nfta.DATA_VALUE, b"")
    if value is None or operation not in {_EQUAL, _UNEQUAL} or len(wanted) != len(value):
        return _Fit.MAYBE
    return _Fit.YES if (value == wanted) is (operation == _EQUAL) else _Fit.NO


def _matched(name: str, body: Mapping[int, bytes]) -> _Fit:
    kind = _text(body[nfta.MATCH_NAME]) if name == "match" else ""
    if kind == "conntrack" and is_established(body[nfta.MATCH_INFO]):
        return _Fit.NO
    return _Fit.YES if kind in _SILENT else _Fit.MAYBE


def is_established(info: bytes) -> bool:
    """Return whether a match of iptables is for connections that there are: struct xt_conntrack_mtinfo3."""
    if len(info) < _STATES.size:
        return False
    flags, mask = _STATES.unpack_from(info)
    return bool(flags & 1 and not mask & NEW)


def _verdict(name: str, body: Mapping[int, bytes]) -> tuple[bool, int | None, str]:
    """Return whether an expression ends a rule with a verdict, its code, and the chain that it leads to."""
    if name == "target":
        kind = _text(body[nfta.MATCH_NAME])
        return kind not in _SPEECHLESS, _DROP if kind == "REJECT" else None, ""
    if name == "reject" or name in _TAKING:
        return True, _DROP if name == "reject" else None, ""
    given = dict(_parts(dict(_parts(body.get(nfta.IMMEDIATE_DATA, b""))).get(nfta.DATA_VERDICT, b"")))
    if nfta.VERDICT_CODE not in given:
        return False, None, ""  # a value for a register
    code = int.from_bytes(given[nfta.VERDICT_CODE], "big", signed=True)
    known = code in {_DROP, _ACCEPT, _JUMP, _GOTO, _RETURN}
    return code != -1, code if known else None, _text(given.get(nfta.VERDICT_CHAIN, b""))


def _parts(data: bytes) -> Iterable[tuple[int, bytes]]:
    return ((kind, data[first:last]) for kind, first, last in attributes(data, 0, len(data)))


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
