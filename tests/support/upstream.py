"""Marks for tests that cover end-to-end tests of Kubernetes v1.36: the covered tests, and the intended modes.

These marks determine the table in docs/reference.md; tests/unit/test_upstream_names.py compares the two.
"""

from __future__ import annotations

import pytest

EVERY_MODE = ("nftables", "iptables-nft", "iptables-legacy", "userspace", "ipvs")
SOURCE_KEPT = ("nftables", "iptables-nft")
"""Modes in which endpoints see the client's own address."""


def upstream(*names: str) -> pytest.MarkDecorator:
    """Mark the upstream tests that a test covers; names are upstream's own, without [sig-network]."""
    return pytest.mark.upstream(*names)


def modes(*names: str) -> pytest.MarkDecorator:
    """Mark the modes of a scenario, instead of nftables, iptables by nft, and userspace."""
    return pytest.mark.modes(*names)
