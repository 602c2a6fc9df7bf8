"""What a kube-proxy of another mode left on the node: its iptables rules would go on serving what is long gone.

Removed once our own rules are in place, so that nothing is ever without. Kubelet's chains are left alone, and so are
those of others whose names begin with KUBE- as well. Source: docs/reference.md "Start" 2; kube-proxy v1.36
CleanupLeftovers of iptables and ipvs mode.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from kubeproxy.backends.mode import Keeps, Sight, Trace, keeps_nothing
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.firewalls import RuleChain
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family

log = logging.getLogger("kubeproxy.backends")

IPVS_CHAINS: Final = frozenset(
    {
        "KUBE-NODE-PORT",
        "KUBE-LOAD-BALANCER",
        "KUBE-SOURCE-RANGES-FIREWALL",
        "KUBE-IPVS-FILTER",
        "KUBE-IPVS-OUT-FILTER",
    }
)
"""What only ipvs mode has."""
CHAINS: Final = IPVS_CHAINS | {
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-POSTROUTING",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-PROXY-CANARY",
}
MARK: Final = "KUBE-MARK-MASQ"
"""Of a kube-proxy since Kubernetes 1.28; others may lead packets there, as the CNI plugin portmap can be told to."""
PREFIXES: Final = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-")


def is_ours(chain: str) -> bool:
    """Return whether a chain of iptables is a kube-proxy's, by its name."""
    return chain in CHAINS or chain.startswith(PREFIXES)


def chain_traces(chains: Iterable[RuleChain]) -> list[Trace]:
    """Return how many chains there are of each family in each variant of iptables."""
    counts = Counter((chain.variant, chain.family) for chain in chains)
    return [
        Trace(f"{count} chains KUBE-... of {xtables.NAMES[family]}-{variant}", family)
        for (variant, family), count in sorted(counts.items())
    ]


def table_traces(sight: Sight, table: str) -> list[Trace]:
    """Return the tables of a name, of those that have chains."""
    families = {chain.family for chain in sight.nf_tables if chain.table == table}
    known = {"ip": Family.IPV4, "ip6": Family.IPV6}
    return [Trace(f"nf_tables table {family} {table}", known.get(family)) for family in sorted(families)]


def remove_iptables_rules(keeps: Keeps = keeps_nothing) -> list[str]:
    """Remove them from every variant that is installed; return what could not be removed.

    `keeps` says of which chains, given with their table, the running mode is the owner.
    """
    failures = []
    names = xtables.installed()
    if not names:
        log.info("iptables is not installed here: rules of a kube-proxy in iptables or ipvs mode were not looked for")
    for name in names:
        try:
            commands = xtables.commands(name)
            text = removal(xtables.tables(name), partial(keeps, commands))
            if text:
                xtables.restore(name, text)
                log.info("Removed the rules of another kube-proxy mode variant=%s", name)
        except (ApplyError, Unsupported) as error:  # `keeps` may have to look which variant is in use
            failures.append(str(error))
    return failures


def removal(tables: Iterable[xtables.Table], keeps: Callable[[str, str], bool]) -> str:
    """Return the restore text that removes what is a kube-proxy's: jumps first, then chains. '' for nothing."""
    text = ""
    for table in tables:
        ours = [c for c in table.chains if is_ours(c) and not keeps(table.name, c)]
        gone = frozenset(ours)
        others = [rule for rule in table.rules if xtables.chain_of(rule) not in gone]
        jumps = [rule for rule in others if xtables.target_of(rule) in gone]
        marked = MARK in map(xtables.target_of, others)
        if MARK in table.chains and not marked and not keeps(table.name, MARK):
            ours.append(MARK)
        text += xtables.removal(table.name, ours, jumps)
    return text
