"""Reads the chains of all programs, in nf_tables and in both variants of iptables. Changes nothing. nf_tables, which
also contains the rules of iptables-nft, is read over netlink. A table of legacy iptables is read only if the kernel
lists the table, because reading a missing table would create it. Source: include/uapi/linux/netfilter of Linux 6.18."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.tables import HOOKS, INGRESS, TABLE_FAMILIES, ListedChain, listed_chains
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family

IP_FAMILIES: Final = {"ip": Family.IPV4, "ip6": Family.IPV6}
_FAMILIES: Final = frozenset({"inet", *IP_FAMILIES})
_IPTABLES: Final = frozenset({"filter", "nat", "mangle", "raw", "security"})
_LEGACY_TABLES: Final = {"ip": "ip_tables_names", "ip6": "ip6_tables_names"}
LEGACY: Final = {"ip": "iptables-legacy", "ip6": "ip6tables-legacy"}
"""The commands of legacy iptables by family."""
NFT: Final = {"ip": "iptables-nft", "ip6": "ip6tables-nft"}


class Chain(NamedTuple):
    """A chain: its family (inet, ip, ip6), table and name, and its hook if the chain is a base chain."""

    family: str
    table: str
    name: str
    hook: str = ""


def chains(families: Collection[str] = _FAMILIES) -> list[Chain]:
    """Return the chains of all nf_tables tables of some families, by default inet, ip and ip6. Raises NetlinkError."""
    with Netlink.open() as link:
        there = listed_chains(link)
    return [
        Chain(TABLE_FAMILIES[one.family], one.table, one.name, _hook(one))
        for one in there
        if TABLE_FAMILIES.get(one.family) in families
    ]


def unevaluated() -> list[Chain]:
    """Return the base chains of netdev and bridge, which this program does not evaluate. Raises NetlinkError."""
    return [one for one in chains({"netdev", "bridge"}) if one.hook]


def _hook(one: ListedChain) -> str:
    hook = one.hook
    if hook is None:
        return ""
    return HOOKS[hook.number] if hook.number < len(HOOKS) else INGRESS


class RuleChain(NamedTuple):
    """A chain of iptables: its variant ('nft', 'legacy'), family, table and name."""

    variant: str
    family: Family
    table: str
    name: str


def iptables_nft_chains(known: Iterable[Chain]) -> list[RuleChain]:
    """Return the chains of iptables-nft among the known chains of nf_tables."""
    return [
        RuleChain("nft", IP_FAMILIES[chain.family], chain.table, chain.name)
        for chain in known
        if chain.family in IP_FAMILIES and chain.table in _IPTABLES
    ]


def iptables_chains(known: Iterable[Chain]) -> list[RuleChain]:
    """Return the chains of iptables; the chains of variant nft are selected from `known`. Raises ApplyError."""
    found = iptables_nft_chains(known)
    for family, number in IP_FAMILIES.items():
        if LEGACY[family] not in xtables.installed():
            continue
        for table in legacy_tables(family):
            for line in xtables.commands(LEGACY[family]).saved(table):
                if line.startswith("-A "):  # the chains are complete; the rules follow, often many
                    break
                if line.startswith(":"):
                    found.append(RuleChain("legacy", number, table, line[1:].split(" ", 1)[0]))
    return found


def legacy_tables(family: str) -> list[str]:
    """Return the names of the legacy iptables tables of a family ('ip' or 'ip6'); [] if the modules are not loaded."""
    try:
        return Path("/proc/thread-self/net", _LEGACY_TABLES[family]).read_text(encoding="ascii").split()
    except OSError:
        return []
