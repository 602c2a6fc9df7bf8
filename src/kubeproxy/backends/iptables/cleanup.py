"""Removes leftover rules of iptables mode, of this program or of the Go kube-proxy, from a node."""

from __future__ import annotations

from kubeproxy.backends.leftovers import IPVS_CHAINS, chain_traces, decision, is_ours, remove_iptables_rules
from kubeproxy.backends.mode import Keeps, Owns, Sight, Trace, keeps_nothing

__all__ = ["cleanup", "decision", "traces"]


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:
    """Remove the rules, except chains that another mode keeps; return the failures."""
    return remove_iptables_rules(keeps)


def traces(sight: Sight, owns: Owns) -> list[Trace]:
    """Return the chains of iptables mode in the kernel."""
    return chain_traces(
        chain
        for chain in sight.xtables
        if is_ours(chain.name) and chain.name not in IPVS_CHAINS and not owns(chain.table, chain.name)
    )
