"""Removes the rules that iptables mode, ours or the Go kube-proxy's, left on a node."""

from __future__ import annotations

from kubeproxy.backends.leftovers import IPVS_CHAINS, chain_traces, decision, is_ours, remove_iptables_rules
from kubeproxy.backends.mode import Keeps, Owns, Sight, Trace, keeps_nothing

__all__ = ["cleanup", "decision", "traces"]


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:
    """Remove the rules, but for chains that another mode keeps; return what could not be removed."""
    return remove_iptables_rules(keeps)


def traces(sight: Sight, owns: Owns) -> list[Trace]:
    """Return the chains that are there."""
    return chain_traces(
        chain
        for chain in sight.xtables
        if is_ours(chain.name) and chain.name not in IPVS_CHAINS and not owns(chain.table, chain.name)
    )
