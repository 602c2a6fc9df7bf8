"""Removes what nftables mode, ours or the Go kube-proxy's, left on a node: their tables have the same names."""

from __future__ import annotations

from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.kernel import nft


def cleanup() -> list[str]:
    """Remove the tables; return what could not be removed."""
    return nft.remove_table(TABLE)
