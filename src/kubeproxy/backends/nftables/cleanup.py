"""Removal of the tables of nftables mode, ours or those of the Go kube-proxy: both have the same names."""

from __future__ import annotations

from kubeproxy.backends.leftovers import table_traces
from kubeproxy.backends.mode import Keeps, Owns, Sight, Trace, keeps_nothing
from kubeproxy.backends.nftables.decisions import decision
from kubeproxy.backends.nftables.layout import SCRATCH, TABLE
from kubeproxy.kernel.nftables.presence import remove_table

__all__ = ["cleanup", "decision", "traces"]


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:  # noqa: ARG001 - no chains of iptables
    """Remove the tables; return what could not be removed."""
    return remove_table(TABLE) + remove_table(SCRATCH)


def traces(sight: Sight, owns: Owns) -> list[Trace]:  # noqa: ARG001 - no chains of iptables
    """Return the tables found."""
    return table_traces(sight, TABLE)
