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
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.kernel.xtables.xtables_lock import NOT_WAITED, Waited

_CHAIN: Final = 4096
"""Bytes of the messages of a chain and its rules: 1,200 for an endpoint; only chains with many rules have more."""

_END: Final = "COMMIT\n"

log = logging.getLogger("kubeproxy.iptables")


class RuleWriter:
    """Changes the rules of one variant and family; `transactions` is None for the legacy variant."""

    def __init__(self, commands: Commands, transactions: Transactions | None) -> None:
        self._commands = commands
        self._transactions = transactions

    @classmethod
    def open(cls, commands: Commands) -> Self:
        """Return one for the network namespace of the caller. Raises NetlinkError."""
        return cls(commands, Transactions.open() if commands.uses_nft else None)

    @property
    def chains_at_once(self) -> int:
        """Return the best number of chains to change together.

        They take about 0.4 s by netlink: at the end of a transaction the kernel walks all rules of the table.
        """
        return min(10_000, max(1, self._transactions.room // _CHAIN)) if self._transactions is not None else 1000

    def close(self) -> None:
        """Close the socket."""
        if self._transactions is not None:
            self._transactions.close()

    def prepared(self, text: str) -> Callable[[], Waited]:
        """Return a function that applies the input of iptables-restore --noflush.

        It changes each table in one step; chains that the text does not name stay. It returns how long it waited for
        another program, and raises RestoreError, or ApplyError.
        """
        if self._transactions is not None:
            try:
                tables = xt_rules.encode(text, self._commands.family)
                return partial(self._commit, self._transactions, tables, text)
            except xt_rules.Unknown as unknown:
                log.debug("Left to %s: %s", self._commands.name, unknown)
        return partial(self._commands.restore, [text])

    def _commit(self, transactions: Transactions, tables: list[list[bytes]], text: str) -> Waited:
        done = 0
        try:
            for messages in tables:
                transactions.commit(messages)
                done += 1
        except NetlinkError as error:
            log.debug("Left to %s: %s", self._commands.name, error)
            # Only the rest: the caller counts each table as one transaction.
            return self._commands.restore(text.split(_END, done)[-1:])
        return NOT_WAITED


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
