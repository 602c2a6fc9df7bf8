"""What a kube-proxy of another mode left on the node: its iptables rules would go on serving what is long gone.

Removed once our own rules are in place, so that nothing is ever without. Kubelet's chains are left alone, and so are
those of others whose names begin with KUBE- as well. Source: REFERENCE "Start" 2; kube-proxy v1.36 CleanupLeftovers
of iptables and ipvs mode.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from kubeproxy.errors import ApplyError
from kubeproxy.kernel import xtables

log = logging.getLogger("kubeproxy.backends")

CHAINS: Final = frozenset(
    {
        "KUBE-SERVICES",
        "KUBE-EXTERNAL-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-POSTROUTING",
        "KUBE-FORWARD",
        "KUBE-PROXY-FIREWALL",
        "KUBE-PROXY-CANARY",
        # ipvs mode
        "KUBE-NODE-PORT",
        "KUBE-LOAD-BALANCER",
        "KUBE-SOURCE-RANGES-FIREWALL",
        "KUBE-IPVS-FILTER",
        "KUBE-IPVS-OUT-FILTER",
    }
)
PREFIXES: Final = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-")


TableChain = tuple[str, str]
"""The names of a table and of a chain in it."""


def remove_iptables_rules(kept: Collection[TableChain] = ()) -> list[str]:
    """Remove them from every variant that is installed, but the chains that the current mode uses itself.

    Returns what could not be removed.
    """
    failures = []
    for variant in xtables.installed():
        try:
            text = removal(xtables.tables(variant), kept)
            if text:
                xtables.restore(variant, text)
                log.info("Removed the rules of another kube-proxy mode variant=%s", variant)
        except ApplyError as error:
            failures.append(str(error))
    return failures


def removal(tables: Iterable[xtables.Table], kept: Collection[TableChain] = ()) -> str:
    """Return the restore text that removes what is a kube-proxy's: jumps first, then chains. '' for nothing."""
    lines = []
    for table in tables:
        ours = [
            chain
            for chain in table.chains
            if (chain in CHAINS or chain.startswith(PREFIXES)) and (table.name, chain) not in kept
        ]
        if not ours:
            continue
        gone = frozenset(ours)
        jumps = [rule for rule in table.rules if xtables.chain_of(rule) not in gone and xtables.target_of(rule) in gone]
        lines.append(f"*{table.name}")
        lines += (f":{chain} - [0:0]" for chain in ours)
        lines += (f"-D {rule.removeprefix('-A ')}" for rule in jumps)
        lines += (f"-X {chain}" for chain in ours)
        lines.append("COMMIT")
    return "\n".join(lines) + "\n" if lines else ""
