"""Removes what userspace mode left on a node."""

from __future__ import annotations

from kubeproxy.backends.userspace.layout import TABLE
from kubeproxy.kernel import nft


def cleanup() -> list[str]:
    """Remove our tables; return what could not be removed."""
    return nft.remove_table(TABLE)
