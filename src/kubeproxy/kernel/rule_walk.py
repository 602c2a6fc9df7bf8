"""Whether a chain drops a packet, as far as that hangs on addresses, protocol and port.

Rules are walked as by the kernel. Where anything else decides (marks, interfaces, sets), nobody is sure. Source:
nft_do_chain of net/netfilter/nf_tables_core.c, and include/uapi/linux/netfilter/nf_tables.h, of Linux 6.18.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import attributes
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.fields import NETWORK, TRANSPORT

_NFPROTO, _L4PROTO = 15, 16  # NFT_META_...
_EQUAL, _UNEQUAL = 0, 1  # NFT_CMP_...
_KNOWN: Final = frozenset({x.DROP, x.ACCEPT, x.JUMP, x.GOTO, x.RETURN})
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
            if rule.fit is _Fit.NO or not rule.ends or (rule.fit is _Fit.MAYBE and rule.code == x.DROP):
                continue
            if rule.fit is _Fit.MAYBE or rule.code is None:
                return Fate.UNSURE
            if rule.code in {x.DROP, x.ACCEPT}:
                return Fate.DROPPED if rule.code == x.DROP else Fate.PASSES
            if rule.code == x.RETURN:
                return None
            found = self.through(rule.target)
            if found is not None or rule.code == x.GOTO:
                return found
        return None


def read(raw: bytes, aim: Aim) -> _Rule:
    """Return what the expressions of a rule say of a packet."""
    fit, ends, code, target = _Fit.YES, False, None, ""
    registers: Registers = {}
    for one in x.parse(raw):
        match one:
            case x.Immediate(value=x.RuleVerdict(code=verdict, chain=chain)):
                ends, code, target = verdict != x.CONTINUE, verdict if verdict in _KNOWN else None, chain
            case x.Reject():
                ends, code, target = True, x.DROP, ""
            case x.Opaque(name, body) if name == "target" or name in _TAKING:
                ends, code, target = _taken(name, body)
            case x.Payload() | x.Meta() | x.Ct() | x.Bitwise() | x.Immediate():
                if one.dreg is not None:
                    registers[one.dreg] = _loaded(one, aim, registers)
            case _ if (one.name if isinstance(one, x.Opaque) else one.KIND) in _SILENT:
                pass
            case _:
                found = _compared(one, registers) if isinstance(one, x.Compare) else _matched(one)
                fit = found if fit is not _Fit.NO and found is not _Fit.YES else fit
                if not isinstance(one, x.Compare):
                    registers.clear()  # what it may have loaded is not known
    return _Rule(fit, ends, code, target)


Registers = dict[int, bytes | None]
"""What was loaded, None where that is not known."""


def _loaded(one: x.Expression, aim: Aim, registers: Registers) -> bytes | None:
    """Return what an expression puts into its register."""
    found: Header = [None]
    match one:
        case x.Bitwise(sreg=sreg, mask=mask, xor=xor):
            value = registers.get(sreg)
            if value is not None and len(mask) == len(xor) == len(value):
                found = [v & m ^ b for v, m, b in zip(value, mask, xor, strict=True)]
        case x.Payload(base, offset, length):
            header = {NETWORK: aim.network, TRANSPORT: aim.transport}.get(base, ())
            found = header[offset : offset + length] if offset + length <= len(header) else found
        case x.Meta(key):
            found = [{_NFPROTO: 2 if len(aim.destination) == 4 else 10, _L4PROTO: aim.protocol}.get(key)]
        case x.Ct(key=0) if aim.state is not None:
            found = list(aim.state.to_bytes(4, sys.byteorder))
        case x.Immediate(value=bytes(value)):
            found = list(value)
    known = [byte for byte in found if byte is not None]
    return bytes(known) if len(known) == len(found) else None


def _compared(one: x.Compare, registers: Registers) -> _Fit:
    value = registers.get(one.sreg)
    if value is None or one.op not in {_EQUAL, _UNEQUAL} or len(one.value) != len(value):
        return _Fit.MAYBE
    return _Fit.YES if (value == one.value) is (one.op == _EQUAL) else _Fit.NO


def _matched(one: x.Expression) -> _Fit:
    if not isinstance(one, x.Opaque) or one.name != "match":
        return _Fit.MAYBE
    kind, info = extension(one.raw)
    if kind == "conntrack" and is_established(info):
        return _Fit.NO
    return _Fit.YES if kind in _SILENT else _Fit.MAYBE


def is_established(info: bytes) -> bool:
    """Return whether a match of iptables is for connections that there are: struct xt_conntrack_mtinfo3."""
    if len(info) < _STATES.size:
        return False
    flags, mask = _STATES.unpack_from(info)
    return bool(flags & 1 and not mask & NEW)


def _taken(name: str, body: bytes) -> tuple[bool, int | None, str]:
    """Return whether what takes a packet ends a rule, with which code, and that it leads to no chain."""
    if name in _TAKING:
        return True, None, ""
    kind, _ = extension(body)
    return kind not in _SPEECHLESS, x.DROP if kind == "REJECT" else None, ""


def extension(body: bytes) -> tuple[str, bytes]:
    """Return the name of a match or target of iptables in nf_tables, and its parameters."""
    parts = {kind: body[first:last] for kind, first, last in attributes(body, 0, len(body))}
    return parts[nfta.MATCH_NAME].rstrip(b"\0").decode(errors="replace"), parts.get(nfta.MATCH_INFO, b"")
