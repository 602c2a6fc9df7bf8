"""A network namespace for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.own_network import own_network


@pytest.fixture
def netns() -> Iterator[None]:
    """Give a test its own network namespace, alone with the real kernel."""
    with own_network():
        yield
