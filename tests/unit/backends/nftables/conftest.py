"""The ground of these tests is the fake kernel; tests/kernel/nftables runs them on the real one."""

import pytest

from support.nftables_ground import FakeGround


@pytest.fixture(scope="session")
def new_ground():
    """Return what makes a ground, as a context manager."""
    return FakeGround.fresh


@pytest.fixture
def ground(new_ground):
    """Return a ground of the test's own."""
    with new_ground() as made:
        yield made
