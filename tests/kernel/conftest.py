"""A network namespace for each test that asks for one, and the builders of objects and of random plans."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_network import own_network

for _room in ("model", "nftables", "iptables"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / _room))

pytest.register_assert_rewrite("nftables_table")  # its checks show what they compared, as tests do


@pytest.fixture
def netns() -> Iterator[None]:
    """Give a test its own network namespace, alone with the real kernel."""
    with own_network():
        yield
