"""The variant of iptables that this node uses, detected as in the Go kube-proxy's images.

The kubelet creates a hint chain in mangle in the variant that the host uses. Without one it is the variant with more
rules, and nft if there are none. Source: kubernetes-sigs/iptables-wrappers, KEP-3178.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Final, Literal

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import Commands, SavedTable
from kubeproxy.model.addresses import Family

HINTS: Final = frozenset({"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"})

_TRIED_AGAIN: Final = (0.1, 0.4)
"""Seconds before a command that could not be started, for example without memory, is started again."""

Variant = Literal["nft", "legacy", ""]


@cache
def chosen() -> Variant:
    """Return the variant to use, '' if commands are not named by variant; cached for the life of the process."""
    return detect()


def detect() -> Variant:
    """Return the variant that this node uses now."""
    counts: dict[Variant, int] = {}
    for variant in ("nft", "legacy"):
        names = [name for name in xtables.installed() if name.endswith(f"-{variant}")]
        if not names:
            continue
        rules, hinted = _survey(names)
        if hinted:
            return variant
        counts[variant] = rules
    if not counts:
        return ""
    return "legacy" if counts.get("legacy", -1) > counts.get("nft", -1) else "nft"


def commands(family: Family, variant: Variant) -> Commands:
    """Return a variant's commands. Raises ApplyError when they are missing."""
    name = xtables.NAMES[family]
    return xtables.commands(f"{name}-{variant}" if variant else name)


def in_use(family: Family, table: str, chain: str) -> Commands:
    """Return the commands of the variant in which a table has a chain, else of the one that this node uses.

    It lists that table only, and writes nothing. Raises ApplyError.
    """
    there = [found for found in map(xtables.commands, xtables.installed_for(family)) if _has(found, table, chain)]
    return there[0] if len(there) == 1 else commands(family, chosen())


def _has(found: Commands, table: str, chain: str) -> bool:
    try:
        listed = found.table(table)
    except ApplyError:
        return False
    return listed is not None and chain in listed.chains


def _survey(names: list[str]) -> tuple[int, bool]:
    """Return the number of rules, and whether there is a hint."""
    rules, hinted = 0, False
    for name in names:
        tables = _tables(name)
        rules += sum(len(table.rules) for table in tables)
        hinted = hinted or any(table.name == "mangle" and HINTS.intersection(table.chains) for table in tables)
    return rules, hinted


def _tables(name: str) -> list[SavedTable]:
    """Return the tables of a variant, none if it does not work here, for example without its kernel modules.

    The caller caches the result, so a command that could not be started is tried again.
    """
    for pause in (*_TRIED_AGAIN, None):
        try:
            return list(xtables.tables(name))
        except ApplyError as error:
            if pause is None or not isinstance(error.__cause__, OSError):
                break
            time.sleep(pause)
    return []
