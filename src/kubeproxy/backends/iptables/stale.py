"""Chains of deleted Services: removed, except those to which a rule of another program jumps.

iptables refuses to delete such a chain, and with it the whole restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from kubeproxy.backends.iptables.restores import declarations, removals
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible, target_of

log = logging.getLogger("kubeproxy.iptables")


class Removal(Enum):
    """When stale chains are removed: in the restore that ends their use, or after it, when their users are known."""

    TOGETHER = "together"
    AFTERWARDS = "afterwards"


class Stale:
    """The stale chains of one family; `used` are those that stay because another program's rule jumps to them."""

    def __init__(self, commands: Commands, at_once: int, restore: Callable[[str], None]) -> None:
        self.used: frozenset[str] = frozenset()
        self._commands = commands
        self._at_once = at_once
        self._restore = restore

    def remove(self, chains: Sequence[str]) -> None:
        """Flush chains, and delete those to which no rule jumps; log each other chain once. Raises ApplyError."""
        if not chains:
            self.used = frozenset()
            return
        self._each(chains, declarations)
        wanted = frozenset(chains)
        try:
            lines = [line for line in self._commands.saved("nat") if line[:1] == "-"]
        except Incompatible:  # the removal of a used chain fails anyway
            lines = []
        used = wanted.intersection(target_of(line.rstrip()) for line in lines)
        for chain in sorted(used - self.used):
            log.warning(
                "Leaving an empty chain that belongs to no Service: rules of another program lead to it chain=%s "
                "family=%s",
                chain,
                self._commands.family.label,
            )
        self.used = used
        self._each([chain for chain in chains if chain not in used], removals)

    def _each(self, chains: Sequence[str], lines: Callable[[Iterable[str]], str]) -> None:
        for start in range(0, len(chains), self._at_once):
            self._restore(f"*nat\n{lines(chains[start : start + self._at_once])}COMMIT\n")
