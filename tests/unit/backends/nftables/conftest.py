"""The ground of these tests is the fake kernel; tests/kernel/nftables runs them on the real one."""

import pytest

from support.nftables_ground import FakeGround


@pytest.fixture(scope="session")
def new_ground():
    """Return a context manager that makes a ground."""
    return FakeGround.fresh


@pytest.fixture
def ground(new_ground):
    """Return a separate ground for the test."""
    with new_ground() as made:
        yield made
