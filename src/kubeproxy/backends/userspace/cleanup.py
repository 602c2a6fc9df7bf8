"""Removes what userspace mode left on a node."""

from __future__ import annotations

from kubeproxy.backends.mode import Keeps, keeps_nothing
from kubeproxy.backends.userspace.layout import TABLE
from kubeproxy.kernel import nft


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:  # noqa: ARG001 - no chains of iptables
    """Remove our tables; return what could not be removed."""
    return nft.remove_table(TABLE)
