"""The rules of one family as one may look at them who must not write, and how the node's iptables prints ours.

Legacy tables are read whole: its other commands take the lock, which the proxy would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from kubeproxy.backends.iptables.audit import MOST_PLACES, by_chain
from kubeproxy.backends.iptables.render import INVALID_COUNTER, LOCALHOST_COUNTER
from kubeproxy.backends.iptables.restores import declarations
from kubeproxy.backends.iptables.skeleton import CANARY
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.empty_network import in_empty_network
from kubeproxy.kernel.xtables import iptables_variant, nfacct, xtables
from kubeproxy.kernel.xtables.xtables import Commands, target_of
from kubeproxy.kernel.xtables.xtables_lock import nobodys_lock
from kubeproxy.model.addresses import Family

Chains = Mapping[str, list[str]]
"""Chains and their rules, each '-A CHAIN ...' with the end of its line."""


class Reading(Protocol):
    """One family's tables, to be read. All calls raise ApplyError."""

    family: Family

    def everything(self, table: str) -> Chains:
        """Return all chains of a table."""

    def some(self, table: str, names: Collection[str]) -> Chains:
        """Return at least these chains, as far as they are there."""


class CommandsReading:
    """Reads by the commands of a variant."""

    def __init__(self, commands: Commands) -> None:
        self.family = commands.family
        self._saved: Callable[[str], Iterator[str]] = commands.saved
        self._rules = commands.rules if commands.uses_nft else None

    def everything(self, table: str) -> Chains:
        """See Reading."""
        found: dict[str, list[str]] = {}
        for chain, rules in by_chain(self._saved(table)):
            if rules is None:
                found.setdefault(chain, [])
            else:
                found.setdefault(chain, []).extend(rules)
        return found

    def some(self, table: str, names: Collection[str]) -> Chains:
        """See Reading."""
        if self._rules is None or len(names) > 2 * MOST_PLACES:
            return self.everything(table)
        read = {name: self._rules(table, name) for name in names}
        return {name: [f"{rule}\n" for rule in rules] for name, rules in read.items() if rules is not None}


Printer = Callable[[str, Mapping[str, str]], Chains]
"""Returns how chains of a table are printed, of their names and rules as we write them. Raises Unsupported."""


def printer(commands: Commands) -> Printer:
    """Return what prints rules by writing them in a network namespace that nobody else is in."""

    def printed(table: str, chains: Mapping[str, str]) -> Chains:
        rules = "".join(chains.values())
        targets = {target_of(line) for line in rules.splitlines()}
        names = chains.keys() | {target for target in targets if target.startswith("KUBE-")}
        text = f"*{table}\n{declarations(sorted(names))}{rules}COMMIT\n"

        def write() -> Chains:
            for counter in (INVALID_COUNTER, LOCALHOST_COUNTER):
                nfacct.ensure(counter)
            commands.restore([text])
            return CommandsReading(commands).everything(table)

        with nobodys_lock():
            return in_empty_network(write)

    return printed


def in_use(family: Family) -> Commands:
    """Return the commands of the variant that has our chains, else of the one that this node uses. Raises ApplyError.

    Cheap where there are many rules: it looks at a single chain.
    """
    there = [c for c in map(xtables.commands, xtables.installed_for(family)) if CANARY in _names(c)]
    return there[0] if len(there) == 1 else iptables_variant.commands(family, iptables_variant.chosen())


def _names(commands: Commands) -> Collection[str]:
    """Return the chains of a small table in which a proxy has one."""
    try:
        table = commands.table("mangle")
    except ApplyError:
        return ()
    return table.chains if table is not None else ()
