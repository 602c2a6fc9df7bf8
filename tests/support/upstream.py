"""Marks for tests that cover end-to-end tests of Kubernetes v1.36: which ones, and the modes that they are meant for.

The table in docs/reference.md is made of these marks; tests/unit/test_upstream_names.py compares the two.
"""

from __future__ import annotations

import pytest

EVERY_MODE = ("nftables", "iptables-nft", "iptables-legacy", "userspace", "ipvs")
SOURCE_KEPT = ("nftables", "iptables-nft")
"""Modes in which endpoints see the client's own address."""


def upstream(*names: str) -> pytest.MarkDecorator:
    """The test covers these of upstream's tests; names are upstream's own, without [sig-network]."""
    return pytest.mark.upstream(*names)


def modes(*names: str) -> pytest.MarkDecorator:
    """The scenario is meant for these modes, rather than for nftables, iptables by nft, and userspace."""
    return pytest.mark.modes(*names)
