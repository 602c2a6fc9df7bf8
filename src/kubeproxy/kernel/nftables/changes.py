"""Which chains other programs' nf_tables transactions touched, as the kernel announces it.

What a change means is a backend's affair. Every transaction ends with the number of the generation that it made, so
whoever knows the present one can tell whether any announcement was missed. Source: net/netfilter/nf_tables_api.c of
Linux 6.18, nf_tables_commit and the functions named notify; NFNLGRP_NFTABLES in
include/uapi/linux/netfilter/nfnetlink.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink import announcements
from kubeproxy.kernel.netlink.protocol import HEADER, Message, attributes, understood
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import (
    DELETE_CHAIN,
    DELETE_RULE,
    DELETE_TABLE,
    NEW_CHAIN,
    NEW_RULE,
    NEW_TABLE,
    SUBSYSTEM,
)

_GROUP: Final = 7  # NFNLGRP_NFTABLES
_LENGTH_AND_KIND: Final = struct.Struct("=IH")  # what a header begins with
_RECEIVE_BUFFER: Final = 1 << 20  # some thousand rules; reading more would hold the event loop
_GENERIC_SIZE: Final = 4  # struct nfgenmsg
_NEW_GENERATION: Final = SUBSYSTEM << 8 | 15
_NO_CHAIN: Final = 0  # a table's message names none
_NAME_OF_CHAIN: Final = {
    NEW_TABLE: _NO_CHAIN,
    DELETE_TABLE: _NO_CHAIN,
    NEW_CHAIN: nfta.CHAIN_NAME,
    DELETE_CHAIN: nfta.CHAIN_NAME,
    NEW_RULE: nfta.RULE_CHAIN,
    DELETE_RULE: nfta.RULE_CHAIN,
}
"""The attribute with the chain's name in each kind of message that is looked at."""
_NAME_OF_TABLE: Final = nfta.TABLE_NAME  # as CHAIN_TABLE and RULE_TABLE
_LAST_NAME: Final = max(_NAME_OF_CHAIN.values())
_DELETIONS: Final = frozenset({DELETE_TABLE, DELETE_CHAIN, DELETE_RULE})
_LONGEST: Final = 10_000  # transactions that are remembered


class ChainChange(NamedTuple):
    """A chain or a rule of it was made or deleted; `chain` is '' when it was the table."""

    family: int
    table: str
    chain: str
    deleted: bool


class Changes:
    """Listens in one network namespace, for all who watch there; `listen` makes it.

    `concerns` says of a change whether it is to be remembered; if it is no deletion, some name near it has the word.
    """

    def __init__(self, opened: socket.socket, where: int, concerns: Callable[[ChainChange], bool], word: bytes) -> None:
        self.users = 0
        self._socket = opened
        self._where = where
        self._concerns = concerns
        self._word = word
        self._found: dict[int, frozenset[ChainChange]] = {}  # by generation
        self._so_far: set[ChainChange] = set()  # in the transaction whose end was not read yet
        self._lost = False  # of that transaction

    def close(self) -> None:
        """Stop listening, with the last of those who do."""
        self.users -= 1
        if self.users == 0:
            self._socket.close()
            _listening.pop(self._where, None)

    def between(self, after: int, until: int) -> frozenset[ChainChange] | None:
        """Return what matters of all transactions after a generation, until another; None when some were missed."""
        self._read()
        wanted = range(after + 1, until + 1)
        if after - until > _LONGEST:  # the kernel counts with 32 bits
            return None
        if len(wanted) > _LONGEST or any(generation not in self._found for generation in wanted):
            return None
        return frozenset(change for generation in wanted for change in self._found[generation])

    @contextmanager
    def own(self, before: int, commits: int) -> Iterator[None]:
        """Do not listen to what the body does, in so many transactions after a generation: it may be 100,000 rules."""
        self._read()
        announcements.leave(self._socket, _GROUP)
        try:
            yield
            # When others were in between, the last ones of all these are missed, and nobody takes it for complete.
            for generation in range(before + 1, before + commits + 1):
                self._remember(generation, frozenset())
        finally:
            self._read()  # what was announced before it was not listened
            self._so_far, self._lost = set(), False
            announcements.join(self._socket, _GROUP)

    def _remember(self, generation: int, changes: frozenset[ChainChange]) -> None:
        self._found.pop(generation, None)
        self._found[generation] = changes
        if len(self._found) > _LONGEST:
            del self._found[next(iter(self._found))]

    @understood("changes of nf_tables")
    def _read(self) -> None:
        overflowed = False

        def lost() -> None:
            # Some were lost: later than what is still to be read, nobody knows how many.
            nonlocal overflowed
            self._found.clear()
            overflowed = self._lost = True

        for data in announcements.waiting(self._socket, "nf_tables", lost):
            for at in _interesting(data, self._word):
                if at.kind == _NEW_GENERATION:
                    if not self._lost:
                        generation = _generation(data, at.start + _GENERIC_SIZE, at.end)
                        self._remember(generation, frozenset(self._so_far))
                    self._so_far, self._lost = set(), overflowed
                else:
                    change = _change(data, at.kind, at.start, at.end)
                    if self._concerns(change):
                        self._so_far.add(change)


def _interesting(data: bytes, word: bytes) -> Iterator[Message]:
    """Yield the ends of transactions, deletions, and what else is in a buffer with the word: others' may be many."""
    kinds = _NAME_OF_CHAIN.keys() if word in data else _DELETIONS
    offset, size = 0, len(data)
    while offset + HEADER.size <= size:
        length, kind = _LENGTH_AND_KIND.unpack_from(data, offset)
        if length < HEADER.size:
            raise ApplyError(f"malformed netlink message of type {kind}: length {length}")
        if kind == _NEW_GENERATION or kind in kinds:
            yield Message(kind, 0, 0, offset + HEADER.size, offset + length)
        offset += (length + 3) & ~3


_listening: dict[int, Changes] = {}
"""By network namespace."""


def listen(concerns: Callable[[ChainChange], bool], word: bytes) -> Changes:
    """Return what listens in the caller's network namespace (see Changes), the same for all, who are to close it.

    The kernel wants CAP_NET_ADMIN. Raises ApplyError.
    """
    here = announcements.here()
    if here not in _listening:
        opened = announcements.listening("nf_tables", _RECEIVE_BUFFER, _GROUP)
        _listening[here] = Changes(opened, here, concerns, word)
    _listening[here].users += 1
    return _listening[here]


def _generation(data: bytes, start: int, end: int) -> int:
    found = attributes(data, start, end)
    return next((int.from_bytes(data[s:e], "big") for kind, s, e in found if kind == nfta.GEN_ID), 0)


def _change(data: bytes, kind: int, start: int, end: int) -> ChainChange:
    name = _NAME_OF_CHAIN[kind]
    found = {k: data[s : e - 1].decode(errors="replace") for k, s, e in _first(data, start + _GENERIC_SIZE, end)}
    chain = "" if name == _NO_CHAIN else found.get(name, "")
    return ChainChange(data[start], found.get(_NAME_OF_TABLE, ""), chain, kind in _DELETIONS)


def _first(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the attributes with names of tables and chains, which come first."""
    for kind, begin, finish in attributes(data, start, end):
        if kind > _LAST_NAME:
            return
        yield kind, begin, finish
