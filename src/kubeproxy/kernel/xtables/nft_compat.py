"""Changing the rules of iptables-nft without running it: the same rules, committed over netlink.

An iptables-nft-restore reads all chains of the table before it changes one, and starts as a process. What it would
write is known (xt_rules), so that only input with anything else in it is left to it, and what the kernel refuses: it
makes tables that are missing, and says best what is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Self

from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables.nfnetlink import Transactions
from kubeproxy.kernel.xtables import xt_rules
from kubeproxy.kernel.xtables.xtables import Commands, Writer
from kubeproxy.kernel.xtables.xtables_lock import NOT_WAITED, Waited

_CHAIN: Final = 4096
"""Bytes of the messages of a chain and its rules: 1,200 for an endpoint, more only for chains with many rules."""

_END: Final = "COMMIT\n"

log = logging.getLogger("kubeproxy.iptables")


class NftCompat:
    """An xtables.Writer for a variant that uses nf_tables."""

    def __init__(self, commands: Commands, transactions: Transactions) -> None:
        self._commands = commands
        self._transactions = transactions

    @classmethod
    def open(cls, commands: Commands) -> Self:
        """Return one for the network namespace of the caller. Raises NetlinkError."""
        return cls(commands, Transactions.open())

    @property
    def chains_at_once(self) -> int:
        """See Writer: about 0.4 s. At the end of each transaction the kernel walks all rules of the table."""
        return min(10_000, max(1, self._transactions.room // _CHAIN))

    def close(self) -> None:
        """Close the socket."""
        self._transactions.close()

    def prepared(self, text: str) -> Callable[[], Waited]:
        """See Writer."""
        try:
            tables = xt_rules.encode(text, self._commands.family)
        except xt_rules.Unknown as unknown:
            log.debug("Left to %s: %s", self._commands.name, unknown)
            return self._commands.prepared(text)
        return partial(self._commit, tables, text)

    def _commit(self, tables: list[list[bytes]], text: str) -> Waited:
        done = 0
        try:
            for messages in tables:
                self._transactions.commit(messages)
                done += 1
        except NetlinkError as error:
            log.debug("Left to %s: %s", self._commands.name, error)
            # Without what is done: as many transactions as were announced to whoever counts them.
            return self._commands.restore(text.split(_END, done)[-1:])
        return NOT_WAITED


def writer_of(commands: Commands) -> Writer:
    """Return what changes a variant's rules fastest. Raises NetlinkError."""
    return NftCompat.open(commands) if commands.uses_nft else commands
