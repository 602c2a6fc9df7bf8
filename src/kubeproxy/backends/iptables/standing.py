"""What stands in a table already, so that a full sync writes only what differs from it.

A table is read once, as iptables-save prints it. Of the chains of Services nothing is kept but a number for the rules
of each. What cannot be read, or is printed in another way than is expected (audit.as_saved), counts as different.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kubeproxy.backends.iptables.audit import as_saved, by_chain
from kubeproxy.backends.iptables.restores import Chains
from kubeproxy.backends.iptables.skeleton import CANARY_TABLES, JUMPS, OWN_CHAINS, Present
from kubeproxy.backends.iptables.watch import Watch
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family

log = logging.getLogger("kubeproxy.iptables")

_NO_RULES: Final = hash("")


class Standing(NamedTuple):
    """One table: `numbers` by chain, of those that could be read; `rules` of those that no single Service has."""

    family: Family
    present: Present
    numbers: dict[str, int]
    rules: dict[str, list[str]]

    def holds(self, chain: str, rules: str) -> bool:
        """Return whether a chain has exactly these rules."""
        return self.numbers.get(chain) == hash(as_saved(rules, self.family))

    def holds_in_any_order(self, chain: str, blocks: Iterable[str], last: str) -> bool:
        """Return whether a chain has exactly these blocks of rules, in any order, and `last` at its end."""
        if chain not in self.numbers:
            return False
        there, ending = self.rules.get(chain, []), _lines(last, self.family)
        body = there[: len(there) - len(ending)]
        printed = [_lines(block, self.family) for block in blocks]
        if there[len(body) :] != ending or sorted(body) != sorted([line for lines in printed for line in lines]):
            return False
        at = {line: number for number, line in enumerate(body)}
        return all(at[first] <= at[second] for lines in printed for first, second in pairwise(lines))

    def different(self, service: Mapping[str, str]) -> Chains | None:
        """Return those of the chains of a Service that are not there as they should be, None for none."""
        found = {chain: rules for chain, rules in service.items() if not self.holds(chain, rules)}
        return Chains(found.keys(), "".join(found.values())) if found else None


def read(commands: Commands, watch: Watch) -> dict[str, Standing]:
    """Return what stands in each table. What others change meanwhile, the watch notices. Raises ApplyError."""
    with watch.reading():
        return {table: _table(commands, watch, table) for table in CANARY_TABLES}


def _table(commands: Commands, watch: Watch, table: str) -> Standing:
    try:
        return _read(commands, table)
    except ApplyError as error:
        log.info("Writing all of table %s, as it cannot be read: %s", table, error)
        return Standing(commands.family, watch.present(table), {}, {})


def _read(commands: Commands, table: str) -> Standing:
    numbers: dict[str, int] = {}
    kept: dict[str, list[str]] = {}
    wanted = OWN_CHAINS | {jump.chain for jump in JUMPS if jump.table == table}
    built_in: list[str] = []
    for chain, rules in by_chain(commands.saved(table)):
        if rules is None:
            numbers[chain] = _NO_RULES
            continue
        numbers[chain] = hash("".join(rules))
        if chain in wanted:
            kept[chain] = rules
            built_in += [rule.rstrip("\n") for rule in rules]
    return Standing(commands.family, Present(frozenset(numbers), frozenset(built_in)), numbers, kept)


def _lines(rules: str, family: Family) -> Sequence[str]:
    return as_saved(rules, family).splitlines(keepends=True)
