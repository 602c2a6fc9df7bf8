"""Removes what userspace mode left on a node."""

from __future__ import annotations

from kubeproxy.backends.leftovers import table_traces
from kubeproxy.backends.mode import Keeps, Owns, Sight, Trace, keeps_nothing
from kubeproxy.backends.userspace.layout import TABLE
from kubeproxy.kernel.nftables.presence import remove_table


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:  # noqa: ARG001 - no chains of iptables
    """Remove our tables; return what could not be removed."""
    return remove_table(TABLE)


def traces(sight: Sight, owns: Owns) -> list[Trace]:  # noqa: ARG001 - no chains of iptables
    """Return the tables that are there."""
    return table_traces(sight, TABLE)
