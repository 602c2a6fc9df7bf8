"""The kernel's side of nftables mode: one family's table, as the rest of this room speaks to it.

`Table` is what the room needs of the kernel; `KernelTable` is the real one. What chains and elements mean does not
live here.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import Protocol, Self

from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink, NetlinkError
from kubeproxy.kernel.nftables import fetch, nfnetlink, shapes, tables
from kubeproxy.kernel.nftables.contents import Pairs, pairs
from kubeproxy.kernel.nftables.others import Heard, Others, listen_to_table
from kubeproxy.kernel.nftables.shapes import ChainShape
from kubeproxy.kernel.nftables.tables import TableContents
from kubeproxy.model.addresses import Family


class Table(Protocol):
    """Transactions, and reading back. All calls block shortly and raise ApplyError."""

    family: Family

    def close(self) -> None:
        """Let go of the kernel; the table stays."""

    def commit(self, messages: Sequence[bytes]) -> None:
        """Commit netlink messages as one transaction. Raises NetlinkError when the kernel refuses, with its errno."""

    @property
    def room(self) -> int:
        """Return how many bytes a transaction may have."""

    def afresh(self) -> None:
        """Forget what others did so far: the table is about to be looked at whole."""

    def miss(self) -> None:
        """Take that something of what others did may have been missed, until `afresh`."""

    def heard(self) -> Heard:
        """Return what other programs did to our table since `afresh`, as far as the kernel told."""

    def not_listening(self) -> AbstractContextManager[None]:
        """Do not listen to what the body commits, as it is much: each element would be told."""

    def header(self) -> nfnetlink.TableHeader | None:
        """Return our table's handle, comment and state, None when it is missing."""

    def rule_handles(self) -> tuple[int, ...]:
        """Return the handles of our table's rules: none is ever used again."""

    def chains(self) -> Mapping[str, ChainShape]:
        """Return our table's chains by name."""

    def contents(self) -> TableContents:
        """Return all of our table but the elements of its named sets."""

    def sets(self) -> Collection[str]:
        """Return the names of our table's sets and maps."""

    def elements(self, name: str) -> Iterable[nfnetlink.Element]:
        """Return the elements of one of our table's sets. Raises NetlinkError with code ENOENT when it is missing."""

    def pairs(self, name: str) -> Iterable[Pairs]:
        """Yield the elements of one of our table's sets, part by part, as key and data. Raises as `elements`."""

    def count(self, name: str) -> int | None:
        """Return how many elements one of our table's sets has; None where the kernel does not say so."""

    def has_catch_all(self, name: str) -> bool:
        """Return whether one of our table's sets has an element that matches what no other one does."""

    def lookup(self, name: str, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return what those of these keys lead to that one of our table's maps has. Raises NetlinkError."""


class KernelTable:
    """The table of the network namespace that it was opened in. Closing a netfilter socket makes the next transaction
    of anybody wait 10 to 30 ms (nft_rcv_nl_event of Linux 6.18), so all are kept for the life of a backend.
    """

    def __init__(
        self, family: Family, transactions: nfnetlink.Transactions, reads: Netlink, fetcher: fetch.Fetcher
    ) -> None:
        self.family = family
        self._transactions = transactions
        self._reads = reads
        self._fetcher = fetcher
        self._others: Others | None = None  # from when the table is first looked at

    @classmethod
    def open(cls, family: Family) -> Self:
        """Open the sockets. Raises NetlinkError."""
        with ExitStack() as opened:
            transactions = opened.enter_context(closing(nfnetlink.Transactions.open()))
            reads = opened.enter_context(closing(Netlink.open(NETLINK_NETFILTER)))
            table = cls(family, transactions, reads, fetch.Fetcher.open())
            opened.pop_all()
            return table

    def close(self) -> None:
        """See Table."""
        if self._others is not None:
            self._others.close()
        self._transactions.close()
        self._reads.close()
        self._fetcher.close()

    def commit(self, messages: Sequence[bytes]) -> None:
        """See Table."""
        try:
            self._transactions.commit(messages)
        except NetlinkError as error:
            header = self.header() if error.code == errno.EPERM else None
            if header is None or not header.owner:
                raise
            raise ApplyError(
                f"the table {TABLE} of {self.family.label} belongs to another program (flags owner), the one with the"
                f" netlink port or process id {header.owner}: end that program, and the table goes with it"
            ) from error
        if self._others is not None:
            self._others.ours()

    @property
    def room(self) -> int:
        """See Table."""
        return self._transactions.room

    def generation(self) -> int:
        """Return the number of the ruleset's generation: each transaction of any program adds one."""
        return self._transactions.generation()

    def afresh(self) -> None:
        """See Table."""
        if self._others is None:
            self._others = listen_to_table(TABLE)
            self._others.leave_out(self._transactions.port)
        self._others.afresh(self.family, self.generation)

    def miss(self) -> None:
        """See Table."""
        if self._others is not None:
            self._others.miss(self.family)

    def heard(self) -> Heard:
        """See Table."""
        return self._others.heard(self.family, self.generation) if self._others is not None else Heard(complete=False)

    def not_listening(self) -> AbstractContextManager[None]:
        """See Table."""
        return self._others.not_listening(self.generation) if self._others is not None else nullcontext()

    def header(self) -> nfnetlink.TableHeader | None:
        """See Table."""
        return nfnetlink.table(self.family, TABLE, self._reads)

    def rule_handles(self) -> tuple[int, ...]:
        """See Table."""
        return nfnetlink.rule_handles(self.family, TABLE, self._reads)

    def chains(self) -> Mapping[str, ChainShape]:
        """See Table."""
        return shapes.chains(self.family, TABLE, self._reads)

    def contents(self) -> TableContents:
        """See Table."""
        return tables.read(self.family, TABLE, self._reads)

    def sets(self) -> Collection[str]:
        """See Table."""
        return tables.read_sets(self.family, TABLE, self._reads)

    def elements(self, name: str) -> Iterable[nfnetlink.Element]:
        """See Table."""
        return nfnetlink.elements(self.family, TABLE, name, self._reads)

    def pairs(self, name: str) -> Iterable[Pairs]:
        """See Table."""
        return pairs(self.family, TABLE, name, self._reads)

    def count(self, name: str) -> int | None:
        """See Table."""
        return self._fetcher.count(self.family, TABLE, name)

    def has_catch_all(self, name: str) -> bool:
        """See Table."""
        return self._fetcher.has_catch_all(self.family, TABLE, name)

    def lookup(self, name: str, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """See Table."""
        return self._fetcher.fetch(self.family, TABLE, name, keys)
