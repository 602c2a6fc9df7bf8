"""Rules of iptables-nft, read and written over netlink without its commands.

An iptables-nft-restore reads all chains of the table before it changes one, and starts as a process. xt_rules encodes
the rules that it would write; input with any other rule, or that the kernel refuses, is left to the command: it also
creates missing tables, and has the better error messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Self

from kubeproxy.kernel.netlink.protocol import NetlinkError, understood
from kubeproxy.kernel.nftables.expressions import PacketCount, Rule, parse
from kubeproxy.kernel.nftables.nfnetlink import Transactions, rules
from kubeproxy.kernel.xtables import xt_rules
from kubeproxy.kernel.xtables.xtables import Commands, Writer
from kubeproxy.kernel.xtables.xtables_lock import NOT_WAITED, Waited

_CHAIN: Final = 4096
"""Bytes of the messages of a chain and its rules: 1,200 for an endpoint; only chains with many rules have more."""

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
        """See Writer: they take about 0.4 s. At the end of a transaction the kernel walks all rules of the table."""
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
            # Only the rest: the caller counts each table as one transaction.
            return self._commands.restore(text.split(_END, done)[-1:])
        return NOT_WAITED


def writer_of(commands: Commands) -> Writer:
    """Return what changes a variant's rules fastest. Raises NetlinkError."""
    return NftCompat.open(commands) if commands.uses_nft else commands


def expressions(family: int, table: str, chain: str) -> Iterator[bytes]:
    """Yield the packed expressions of each rule of a chain; none if it is missing. Raises NetlinkError."""
    return (rule.raw for rule in rules(family, table, chain=chain))


def leads_to(rule: bytes, target: str) -> bool:
    """Return whether a rule, as packed expressions, leads to a chain."""
    return target.encode() + b"\0" in rule


def has_jump(family: int, table: str, chain: str, target: str) -> bool:
    """Return whether a rule of a chain leads to a target chain. Raises NetlinkError."""
    return any(leads_to(rule, target) for rule in expressions(family, table, chain))


@understood("rules of nf_tables")
def uncounted(rule: bytes) -> Rule:
    """Return a rule without the expressions that count packets."""
    return tuple(expression for expression in parse(rule) if not isinstance(expression, PacketCount))
