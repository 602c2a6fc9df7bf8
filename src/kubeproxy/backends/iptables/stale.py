"""Chains of Services that are gone: removed, but for those to which a rule of another program leads.

Iptables refuses to remove such a chain, and with it all else that a restore says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from kubeproxy.backends.iptables.restores import declarations, removals
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible, target_of

log = logging.getLogger("kubeproxy.iptables")


class Removal(Enum):
    """When stale chains go: in the restore that ends their use, or when it is done and who uses them is known."""

    TOGETHER = "together"
    AFTERWARDS = "afterwards"


class Stale:
    """The stale chains of one family; `used` are those that had to stay."""

    def __init__(self, commands: Commands, at_once: int, restore: Callable[[str], None]) -> None:
        self.used: frozenset[str] = frozenset()
        self._commands = commands
        self._at_once = at_once
        self._restore = restore

    def remove(self, chains: Sequence[str]) -> None:
        """Empty chains, and remove those to which no rule leads; what stays is told once. Raises ApplyError."""
        if not chains:
            self.used = frozenset()
            return
        self._each(chains, declarations)
        wanted = frozenset(chains)
        try:
            lines = [line for line in self._commands.saved("nat") if line[:1] == "-"]
        except Incompatible:  # removing them tells
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
