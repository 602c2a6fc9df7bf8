"""A network namespace for each test that requests one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.own_network import own_network


@pytest.fixture
def netns() -> Iterator[None]:
    """Give a test a new network namespace of the real kernel."""
    with own_network():
        yield
