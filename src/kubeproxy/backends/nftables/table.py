"""Access to one family's table in the kernel: transactions, dumps, lookups, and announcements of other programs."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Self

from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import Netlink, NetlinkError
from kubeproxy.kernel.nftables import fetch, nfnetlink
from kubeproxy.kernel.nftables.changes import ChangeMonitor, ForeignChanges, monitor_table
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.model.addresses import Family


class KernelTable(TableReader):
    """The table `kube-proxy` of one family, in the network namespace of the sockets. All calls block for a short time
    and raise ApplyError. The sockets stay open for the life of a backend, because the close of a netfilter socket
    delays the next transaction of any program by 10 to 30 ms (nft_rcv_nl_event of Linux 6.18)."""

    family: Family

    def __init__(
        self,
        family: Family,
        transactions: nfnetlink.Transactions,
        reads: Netlink,
        fetcher: fetch.Fetcher,
        others: ChangeMonitor,
    ) -> None:
        super().__init__(family, TABLE, reads)
        self._transactions = transactions
        self._fetcher = fetcher
        self._others = others

    @classmethod
    def open(cls, family: Family) -> Self:
        """Open the sockets. Raises NetlinkError."""
        with ExitStack() as opened:
            transactions = opened.enter_context(closing(nfnetlink.Transactions.open()))
            sockets = opened.enter_context(Netlink.open()), opened.enter_context(fetch.Fetcher.open())
            table = cls(family, transactions, *sockets, monitor_table(TABLE))
            opened.pop_all()
        table._others.ignore(transactions.port)
        return table

    def close(self) -> None:
        """Close the sockets; the table is not removed."""
        for each in (self._others, self._transactions, self._link, self._fetcher):
            each.close()

    def commit(self, messages: Sequence[bytes]) -> None:
        """Commit netlink messages as one transaction. Raises NetlinkError with the errno of the kernel's refusal,
        ApplyError if another program owns the table."""
        try:
            self._transactions.commit(messages)
        except NetlinkError as error:
            header = self.header() if error.code == errno.EPERM else None
            if header is None or not header.owner:
                raise
            raise ApplyError(
                f"the table {TABLE} of {self.family.label} belongs to the program with the netlink port or process id"
                f" {header.owner} (flags owner): end that program, so that the kernel removes the table"
            ) from error
        self._others.count_own()

    @property
    def room(self) -> int:
        """Return the largest size of a transaction in bytes."""
        return self._transactions.room

    def generation(self) -> int:
        """Return the generation of the ruleset: a number that each transaction of any program increases by one."""
        return self._transactions.generation()

    def reset_changes(self) -> None:
        """Discard the recorded changes of other programs: the caller is about to read the whole table."""
        self._others.reset(self.family, self.generation)

    def mark_incomplete(self) -> None:
        """Mark the record of other programs' changes as incomplete until `reset_changes`."""
        self._others.mark_incomplete(self.family)

    def changes(self) -> ForeignChanges:
        """Return the announced changes of other programs after the last `reset_changes`."""
        return self._others.changes(self.family, self.generation)

    def disturbed(self) -> bool:
        """Return whether a change by another program was announced since `reset_changes`. Any thread may call it."""
        return self._others.announced(self.family)

    def not_listening(self) -> AbstractContextManager[None]:
        """Ignore announcements while the `with` body commits, because for a large commit the kernel announces each
        element."""
        return self._others.paused(self.generation)

    elements = TableReader.all_elements
    counters = TableReader.element_counts

    def lookup(self, name: str, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return the data of each given key that exists in a map. Raises NetlinkError."""
        return self._fetcher.fetch(self.family, TABLE, name, keys)
