"""Removes what nftables mode, ours or the Go kube-proxy's, left on a node: their tables have the same names."""

from __future__ import annotations

from kubeproxy.backends.mode import Keeps, keeps_nothing
from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.kernel import nft


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:  # noqa: ARG001 - no chains of iptables
    """Remove the tables; return what could not be removed."""
    return nft.remove_table(TABLE)
