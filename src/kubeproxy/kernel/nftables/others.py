"""What other programs did to our tables, chains and sets of nf_tables, as the kernel announces it.

What a change means is a backend's affair. Our own transactions are filtered out, or not listened to, but counted: with
those of others that were announced they make the number of the ruleset's generation, unless any was missed. Source:
net/netfilter/nf_tables_api.c of Linux 6.18, nf_tables_commit and the functions named notify, which tell at the end of
each transaction what it did, and then whose it was.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink import announcements
from kubeproxy.kernel.netlink.protocol import Message, attributes, messages, understood
from kubeproxy.kernel.netlink.socket_filter import attach, without_senders
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import (
    DELETE_CHAIN,
    DELETE_ELEMENT,
    DELETE_RULE,
    DELETE_TABLE,
    NEW_CHAIN,
    NEW_ELEMENT,
    NEW_RULE,
    NEW_TABLE,
    SUBSYSTEM,
)

_GROUP: Final = 7  # NFNLGRP_NFTABLES
_RECEIVE_BUFFER: Final = 8 << 20  # some 50,000 elements at once; memory is only taken by what is there
_GENERIC_SIZE: Final = 4  # struct nfgenmsg
_NEW_GENERATION: Final = SUBSYSTEM << 8 | 15
_KIND: Final = 4  # where nlmsg_type is in struct nlmsghdr
_NEW_GENERATION_BYTES: Final = _NEW_GENERATION.to_bytes(2, sys.byteorder)
_NAME_OF_TABLE: Final = nfta.TABLE_NAME  # the same number in each kind of message
_NAMES: Final = {
    NEW_ELEMENT: nfta.SET_ELEM_LIST_SET,
    DELETE_ELEMENT: nfta.SET_ELEM_LIST_SET,
    NEW_CHAIN: nfta.CHAIN_NAME,
    DELETE_CHAIN: nfta.CHAIN_NAME,
    NEW_RULE: nfta.RULE_CHAIN,
    DELETE_RULE: nfta.RULE_CHAIN,
}
"""The attribute with the set's or chain's name in each kind of message that has one."""
_LAST_NAME: Final = max(_NAMES.values())
_ELEMENTS: Final = frozenset({NEW_ELEMENT, DELETE_ELEMENT})
_DELETIONS: Final = frozenset({DELETE_TABLE, DELETE_CHAIN, DELETE_RULE})
_CHAINS: Final = _DELETIONS | {NEW_TABLE, NEW_CHAIN, NEW_RULE}
_GENERATIONS: Final = 0xFFFFFFFF  # they are counted in 32 bits
_LATE: Final = (0.0, 0.002, 0.02)
"""Seconds after which what was committed is looked for again: it is announced a little later than it counts."""


class ChainChange(NamedTuple):
    """A chain or a rule of it was made or deleted; `chain` is '' when it was the table."""

    table: str
    chain: str
    deleted: bool


class Interest(NamedTuple):
    """Which changes matter: those in whose neighbourhood is a `word`, and which are of the `table` of this name, or,
    without one, changes of chains that `concerns` says it of; of chains deletions count wherever they are.
    """

    word: bytes
    table: str = ""
    concerns: Callable[[ChainChange], bool] = lambda _: True


class Heard(NamedTuple):
    """What others did to a family's table since it was looked at: `elements` of these sets, or to `rules` and the rest.

    `complete` says that nothing was missed; `by` names who did it, as far as that is known. `chains` are names of
    tables with those of their chains, '' for the table itself.
    """

    complete: bool
    elements: frozenset[str] = frozenset()
    rules: bool = False
    by: frozenset[str] = frozenset()
    chains: frozenset[tuple[str, str]] = frozenset()

    @property
    def nothing(self) -> bool:
        """Whether the table is known to be as it was."""
        return self.complete and not self.elements and not self.rules


class _Findings:
    """What was heard of one family."""

    def __init__(self) -> None:
        self.complete = True
        self.elements: set[str] = set()
        self.chains: set[tuple[str, str]] = set()
        self.by: set[str] = set()

    def heard(self, *, caught_up: bool) -> Heard:
        elements, chains, by = frozenset(self.elements), frozenset(self.chains), frozenset(self.by)
        return Heard(self.complete and caught_up, elements, bool(chains), by, chains)


class Others:
    """Listens in one network namespace, for all families and sockets there; `listen` makes it. For several threads."""

    def __init__(self, opened: socket.socket, where: int, interest: Interest) -> None:
        self.users = 0
        self._socket = opened
        self._where = where
        self._interest = interest
        self._lock = threading.RLock()
        self._ports: set[int] = set()
        self._families: dict[int, _Findings] = {}
        self._so_far: set[tuple[int, int, str, str]] = set()  # in the transaction whose end was not read yet
        self._counted = 0  # transactions: ours, and others' that were heard
        self._began = 0  # the generation before the first of these
        self._since = 0  # the last generation that may be announced in part, or was given up on
        self._not_listening = 0

    def close(self) -> None:
        """Stop listening, with the last of those who do."""
        with self._lock:
            self.users -= 1
            if self.users == 0:
                self._socket.close()
                _listening.pop((self._where, self._interest.word), None)

    def leave_out(self, port: int) -> None:
        """Take that the socket with this netlink port is ours: whoever commits by it says so to `ours`."""
        with self._lock:
            self._ports.add(port)
            attach(self._socket, without_senders(self._ports))

    def ours(self, transactions: int = 1) -> None:
        """Count transactions of ours."""
        with self._lock:
            self._counted += transactions

    def afresh(self, family: int, generation: Callable[[], int]) -> None:
        """Forget what was heard of a family: its table is about to be looked at whole. Raises ApplyError."""
        with self._lock:
            self._catch_up(generation)
            self._families[family] = _Findings()

    def heard(self, family: int, generation: Callable[[], int]) -> Heard:
        """Return what was heard of a family since `afresh`. Raises ApplyError.

        `generation` asks the kernel for the number of the present one.
        """
        with self._lock:
            caught_up = self._catch_up(generation)
            found = self._families.get(family)
            return found.heard(caught_up=caught_up) if found is not None else Heard(complete=False)

    def taken(self, family: int, generation: Callable[[], int]) -> Heard:
        """Return what was heard of a family, and forget it. Raises ApplyError."""
        with self._lock:
            heard = self.heard(family, generation)
            self._families[family] = _Findings()
            return heard

    def miss(self, family: int) -> None:
        """Take that something may have been missed of a family."""
        with self._lock:
            self._families.setdefault(family, _Findings()).complete = False

    @contextmanager
    def not_listening(self, generation: Callable[[], int]) -> Iterator[None]:
        """Do not listen to what the body does, by another program or to 100,000 elements; that others did something
        meanwhile shows in the next generation's number. Raises ApplyError.
        """
        with self._lock:
            if self._not_listening == 0:
                self._read()
                announcements.leave(self._socket, _GROUP)
            self._not_listening += 1
        try:
            yield
        finally:
            with self._lock:
                self._not_listening -= 1
                if self._not_listening == 0:
                    announcements.join(self._socket, _GROUP)
                    # What counts by now may be in the middle of being announced, its end alone still to come.
                    self._since = generation()

    def _catch_up(self, generation: Callable[[], int]) -> bool:
        """Read what was announced; when a transaction is missing, all is taken to have been touched.

        False while nobody listens: how many transactions are ours is not known before their end.
        """
        if self._not_listening:
            return False
        now = 0
        for pause in _LATE if self._families else _LATE[:1]:
            time.sleep(pause)
            self._read()
            now = generation()
            if (self._began + self._counted - now) & _GENERATIONS == 0:
                return True
        self._miss_all()
        self._began, self._counted, self._since = now, 0, now
        return True

    def _miss_all(self) -> None:
        for found in self._families.values():
            found.complete = False

    @understood("changes of nf_tables")
    def _read(self) -> None:
        for data in announcements.waiting(self._socket, "nf_tables", self._miss_all):
            # The end of a transaction comes alone; what is said of others' tables may be 100,000 messages.
            if data.startswith(_NEW_GENERATION_BYTES, _KIND):
                for at in messages(data):
                    start = at.start + _GENERIC_SIZE
                    self._end_of_transaction({kind: data[s:e] for kind, s, e in attributes(data, start, at.end)})
            elif self._interest.word in data or not self._interest.table:
                kinds = _CHAINS if self._interest.word in data else _DELETIONS
                for at in messages(data):
                    if self._interest.table or at.kind in kinds:
                        self._take(data, at)

    def _take(self, data: bytes, at: Message) -> None:
        names = {}
        for kind, start, end in attributes(data, at.start + _GENERIC_SIZE, at.end):
            if kind > _LAST_NAME:
                break  # names come first
            names[kind] = data[start : end - 1].decode(errors="replace")
        table, name = names.get(_NAME_OF_TABLE, ""), names.get(_NAMES.get(at.kind, 0), "")
        wanted = self._interest.table
        if table == wanted if wanted else self._interest.concerns(ChainChange(table, name, at.kind in _DELETIONS)):
            self._so_far.add((data[at.start], at.kind, table, name))

    def _end_of_transaction(self, told: Mapping[int, bytes]) -> None:
        ahead = (int.from_bytes(told[nfta.GEN_ID], "big") - self._since) & _GENERATIONS
        if 0 < ahead <= _GENERATIONS >> 1:
            self._counted += 1
        by = _printable(told.get(nfta.GEN_PROC_NAME, b""))
        for family, kind, table, name in self._so_far:
            if (found := self._families.get(family)) is not None:
                if kind in _ELEMENTS:
                    found.elements.add(name)
                else:
                    found.chains.add((table, name))
                found.by.add(by)
        self._so_far = set()


_listening: dict[tuple[int, bytes], Others] = {}
"""By network namespace and word."""
_opening = threading.Lock()


def listen(interest: Interest) -> Others:
    """Return what listens in the caller's network namespace to what others do, the same for all with this interest.

    Each is to close it. The kernel wants CAP_NET_ADMIN. Raises NetlinkError.
    """
    with _opening:
        key = announcements.here(), interest.word
        if key not in _listening:
            opened = announcements.listening("nf_tables", _RECEIVE_BUFFER, _GROUP)
            _listening[key] = Others(opened, key[0], interest)
        _listening[key].users += 1
        return _listening[key]


def listen_to_table(table: str) -> Others:
    """Return what listens to what others do to tables of this name."""
    return listen(Interest(table.encode() + b"\0", table))


def _printable(program: bytes) -> str:
    """Return the name of a program, 'unknown' for none; any program may call itself anything."""
    name = program.rstrip(b"\0").decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in name) or "unknown"
