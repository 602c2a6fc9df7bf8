"""Monitors changes of nf_tables by other programs, which the kernel announces at the end of each transaction. The
monitor counts our own transactions and filters out their announcements. Every transaction increments the ruleset's
generation number. If this number grows by more than our own and the announced transactions, an announcement was missed.
Source: nf_tables_commit and the notify functions of net/netfilter/nf_tables_api.c of Linux 6.18."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.announcements import Announcements, keeping_any, without_senders
from kubeproxy.kernel.netlink.protocol import Message, attributes, messages, parts, text_attribute, understood
from kubeproxy.kernel.nftables import nfnetlink, nfta

_GROUP: Final = 7  # NFNLGRP_NFTABLES
_RECEIVE_BUFFER: Final = 8 << 20  # about 50,000 elements; an empty buffer uses no memory
_HEADER_SIZE: Final = 4  # struct nfgenmsg
_KIND: Final = 4  # the offset of nlmsg_type in struct nlmsghdr
_ATTRIBUTES: Final = 20  # the offset of the first attribute, the table's name, in a message
_NEW_GENERATION: Final = (nfnetlink.SUBSYSTEM << 8 | 15).to_bytes(2, sys.byteorder)
_NAMES: Final = {
    nfnetlink.NEW_ELEMENT: nfta.SET_ELEM_LIST_SET,
    nfnetlink.DELETE_ELEMENT: nfta.SET_ELEM_LIST_SET,
    nfnetlink.NEW_CHAIN: nfta.CHAIN_NAME,
    nfnetlink.DELETE_CHAIN: nfta.CHAIN_NAME,
    nfnetlink.NEW_RULE: nfta.RULE_CHAIN,
    nfnetlink.DELETE_RULE: nfta.RULE_CHAIN,
}
"""The attribute with the name of the set or chain, by kind of message."""
_LAST_NAME: Final = max(_NAMES.values())
_ELEMENTS: Final = frozenset({nfnetlink.NEW_ELEMENT, nfnetlink.DELETE_ELEMENT})
_DELETIONS: Final = frozenset({nfnetlink.DELETE_TABLE, nfnetlink.DELETE_CHAIN, nfnetlink.DELETE_RULE})
_CHAINS: Final = _DELETIONS | {nfnetlink.NEW_TABLE, nfnetlink.NEW_CHAIN, nfnetlink.NEW_RULE}
_GENERATIONS: Final = 0xFFFFFFFF  # a generation's number has 32 bits
_LATE: Final = (0.0, 0.002, 0.02)
"""Seconds to wait before each read, because the kernel announces a transaction after it increments the generation."""
_SLOWEST: Final = 10.0  # maximum seconds between increment and announcement, for 100,000 elements under load


class ChainChange(NamedTuple):
    """The creation or deletion of a chain or of a rule in it; `chain` is '' for a change of the table itself."""

    table: str
    chain: str
    deleted: bool


class Interest(NamedTuple):
    """Selects the changes to report. With `table`, only changes to this table in messages that contain `word` are
    reported. Without `table`, changes to chains are reported if `concerns` returns True for them. Messages that do not
    contain `word` are searched only for deletions."""

    word: bytes
    table: str = ""
    concerns: Callable[[ChainChange], bool] = lambda _: True

    def wanted(self) -> tuple[bytes, ...]:
        """Return a filter for buffers about `table`, because programs may load 100,000 elements into other tables."""
        if not self.table:
            return ()
        name = text_attribute(nfta.TABLE_NAME, self.table)[:8]  # the attribute's header, and the name's first letters
        table = [(_ATTRIBUTES, name[:4]), (_ATTRIBUTES + 4, name[4:])]
        return (keeping_any([(_KIND, _NEW_GENERATION)], table),)


class ForeignChanges(NamedTuple):
    """Changes by other programs in one family since the last reset: the sets with changed `elements`, and whether
    chains or `rules` were changed. `complete`: no change was missed. `by`: names of the programs, if known. `chains`:
    pairs of a table and a changed chain ('' means the table itself). `pending`: the changes are incomplete only because
    a transaction of some program is in progress."""

    complete: bool
    elements: frozenset[str] = frozenset()
    rules: bool = False
    by: frozenset[str] = frozenset()
    chains: frozenset[tuple[str, str]] = frozenset()
    pending: bool = False

    @property
    def nothing(self) -> bool:
        """Whether the table is certainly unchanged."""
        return self.complete and not self.elements and not self.rules

    @property
    def nothing_yet(self) -> bool:
        """Whether a transaction is in progress, and none that was announced so far changed the table."""
        return self.pending and self._replace(complete=True).nothing


class _Found:
    def __init__(self) -> None:
        self.complete = True
        self.elements: set[str] = set()
        self.chains: set[tuple[str, str]] = set()
        self.by: set[str] = set()

    def changes(self, *, complete: bool, pending: bool) -> ForeignChanges:
        pending = pending and self.complete
        elements, chains, by = frozenset(self.elements), frozenset(self.chains), frozenset(self.by)
        return ForeignChanges(self.complete and complete, elements, bool(chains), by, chains, pending)


class ChangeMonitor:
    """Monitors the changes in a network namespace, in all families and by all sockets; thread-safe. `monitor` opens it.
    The methods' argument `generation` is a function that reads the current generation number from the kernel."""

    def __init__(self, announced: Announcements, namespace: int, interest: Interest) -> None:
        self.users = 0
        self._announced = announced
        self._namespace = namespace
        self._interest = interest
        self._lock = threading.RLock()
        self._ports: set[int] = set()
        self._families: dict[int, _Found] = {}
        self._open_transaction: set[tuple[int, int, str, str]] = set()  # changes of a transaction until its end is read
        self._counted = 0  # our own and announced transactions
        self._began = 0  # the generation before the first counted transaction
        self._since = 0  # announcements up to this generation are incomplete, so they are not counted
        self._lost = False  # whether the kernel dropped announcements since `_begin`
        self._pauses = 0
        self._late_since: float | None = None  # when a check first found the transaction in progress

    def close(self) -> None:
        """Close the socket when all callers of `monitor` have called `close`."""
        with self._lock:
            self.users -= 1
            if self.users == 0:
                self._announced.close()
                _monitors.pop((self._namespace, self._interest.word), None)

    def ignore(self, port: int) -> None:
        """Filter out the transactions of the socket with this netlink port; the caller counts them with `count_own`."""
        with self._lock:
            self._ports.add(port)
            try:
                self._announced.attach(without_senders(self._ports, *self._interest.wanted()))
            except OSError:  # net.core.optmem_max is below 128 KiB, the default before Linux 6.7
                self._announced.attach(without_senders(self._ports))

    def count_own(self, transactions: int = 1) -> None:
        """Count transactions of this process."""
        with self._lock:
            self._counted += transactions

    def reset(self, family: int, generation: Callable[[], int]) -> None:
        """Discard the changes of a family; the caller then reads the whole table. Raises ApplyError."""
        with self._lock:
            self._catch_up(generation)
            self._families[family] = _Found()

    def changes(self, family: int, generation: Callable[[], int]) -> ForeignChanges:
        """Return the changes of a family since `reset`. Raises ApplyError."""
        with self._lock:
            complete = self._catch_up(generation)
            found = self._families.get(family)
            if found is None:
                return ForeignChanges(complete=False)
            return found.changes(complete=complete, pending=self._late_since is not None)

    def announced(self, family: int) -> bool:
        """Return whether a change since `reset` was announced. Unlike `changes`, do not wait for late announcements."""
        with self._lock:
            self._read()
            found = self._families.get(family)
            return found is not None and bool(found.elements or found.chains)

    def take(self, family: int, generation: Callable[[], int]) -> ForeignChanges:
        """Return the changes of a family, and discard them. Raises ApplyError."""
        with self._lock:
            found = self.changes(family, generation)
            self._families[family] = _Found()
            return found

    def mark_incomplete(self, family: int) -> None:
        """Mark the changes of a family as incomplete until `reset`."""
        with self._lock:
            self._families.setdefault(family, _Found()).complete = False

    @contextmanager
    def paused(self, generation: Callable[[], int]) -> Iterator[None]:
        """Receive no announcements while the `with` body makes another program change tables, or changes very many
        elements. The generation number shows at the end whether other programs changed tables. Raises ApplyError."""
        with self._lock:
            if self._pauses == 0:
                self._read()
                self._announced.leave(_GROUP)
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if self._pauses == 0:
                    self._announced.join(_GROUP)
                    # If the kernel is announcing a transaction now, the socket receives only the end of the
                    # announcement.
                    now = generation()
                    if self._unannounced(now):
                        self._mark_all_incomplete()
                    self._begin(now)

    def _catch_up(self, generation: Callable[[], int]) -> bool:
        """Read the announcements; if an announcement is missing, mark the changes of all families as incomplete. Return
        False while a transaction is in progress, and during a pause, when the number of our transactions is unknown. At
        most one transaction is not announced yet, because the kernel counts and announces it under one mutex."""
        late, self._late_since = self._late_since, None
        if self._pauses:
            return False
        now = missing = 0
        for pause in _LATE if self._families else _LATE[:1]:
            time.sleep(pause)
            now = generation()
            self._read()
            missing = self._unannounced(now)
            if missing == 0 or (missing < 0 <= self._unannounced(generation())):
                return True
        late = time.monotonic() if late is None else late
        if missing == 1 and self._families and not self._lost and time.monotonic() - late < _SLOWEST:
            self._late_since = late
            return False
        self._mark_all_incomplete()
        self._begin(now)
        return True

    def _unannounced(self, now: int) -> int:
        """Return the number of transactions up to a generation, minus our own and the announced transactions."""
        missing = (now - self._began - self._counted) & _GENERATIONS
        return missing if missing <= _GENERATIONS >> 1 else missing - _GENERATIONS - 1

    def _begin(self, now: int) -> None:
        self._began, self._counted, self._since, self._lost = now, 0, now, False

    def _mark_all_incomplete(self) -> None:
        for found in self._families.values():
            found.complete = False

    @understood("changes of nf_tables")
    def _read(self) -> None:
        lost = self._announced.lost
        for data in self._announced.waiting():
            # The message that ends a transaction arrives in a separate buffer. Buffers about other tables are not
            # parsed, because they may contain 100,000 messages.
            if data.startswith(_NEW_GENERATION, _KIND):
                for at in messages(data):
                    self._end_transaction(parts(data, at.start + _HEADER_SIZE, at.end))
            elif self._interest.word in data or not self._interest.table:
                kinds = _CHAINS if self._interest.word in data else _DELETIONS
                for at in messages(data):
                    if self._interest.table or at.kind in kinds:
                        self._add(data, at)
        if self._announced.lost != lost:
            self._lost = True
            self._mark_all_incomplete()

    def _add(self, data: bytes, at: Message) -> None:
        names = {}
        for kind, start, end in attributes(data, at.start + _HEADER_SIZE, at.end):
            if kind > _LAST_NAME:
                break  # names come first
            names[kind] = data[start : end - 1].decode(errors="replace")
        # The attribute with the table's name has the same number in each kind of message.
        table, name = names.get(nfta.TABLE_NAME, ""), names.get(_NAMES.get(at.kind, 0), "")
        wanted = self._interest.table
        if table == wanted if wanted else self._interest.concerns(ChainChange(table, name, at.kind in _DELETIONS)):
            self._open_transaction.add((data[at.start], at.kind, table, name))

    def _end_transaction(self, end: dict[int, bytes]) -> None:
        ahead = (int.from_bytes(end[nfta.GEN_ID], "big") - self._since) & _GENERATIONS
        if 0 < ahead <= _GENERATIONS >> 1:
            self._counted += 1
        by = _printable(end.get(nfta.GEN_PROC_NAME, b""))
        for family, kind, table, name in self._open_transaction:
            if (found := self._families.get(family)) is not None:
                if kind in _ELEMENTS:
                    found.elements.add(name)
                else:
                    found.chains.add((table, name))
                found.by.add(by)
        self._open_transaction = set()


_monitors: dict[tuple[int, bytes], ChangeMonitor] = {}
"""The monitors by network namespace and word."""
_opening = threading.Lock()


def monitor(interest: Interest) -> ChangeMonitor:
    """Return the monitor of the caller's network namespace for an interest. Callers share the monitor, and each calls
    `close`. Needs CAP_NET_ADMIN. Raises NetlinkError."""
    with _opening:
        key = Path("/proc/thread-self/ns/net").stat().st_ino, interest.word
        if key not in _monitors:
            opened = Announcements.open("nf_tables", (_GROUP,), _RECEIVE_BUFFER)
            _monitors[key] = ChangeMonitor(opened, key[0], interest)
        _monitors[key].users += 1
        return _monitors[key]


def monitor_table(table: str) -> ChangeMonitor:
    """Return the monitor of the tables with this name, in both families."""
    return monitor(Interest(table.encode() + b"\0", table))


def _printable(program: bytes) -> str:
    """Return a program's name without control characters, since programs set their names; 'unknown' if the program has
    no name."""
    name = program.rstrip(b"\0").decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in name) or "unknown"
