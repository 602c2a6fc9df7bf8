"""What a kube-proxy of another mode left on the node: its iptables rules would go on serving what is long gone.

Removed once our own rules are in place, so that nothing is ever without. Kubelet's chains are left alone, and so are
those of others whose names begin with KUBE- as well. Source: docs/reference.md "Start" 2; kube-proxy v1.36
CleanupLeftovers of iptables and ipvs mode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from kubeproxy.backends.mode import Keeps, keeps_nothing
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel import xtables

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
PREFIXES: Final = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-")


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
        ours = [c for c in table.chains if (c in CHAINS or c.startswith(PREFIXES)) and not keeps(table.name, c)]
        gone = frozenset(ours)
        jumps = [rule for rule in table.rules if xtables.chain_of(rule) not in gone and xtables.target_of(rule) in gone]
        text += xtables.removal(table.name, ours, jumps)
    return text
