"""The ground of these tests is the real kernel, in a network namespace for each of them."""

import pytest

from support.nftables_ground import KernelGround


@pytest.fixture(scope="session")
def new_ground():
    """Return what makes a ground, as a context manager."""
    return KernelGround.fresh


@pytest.fixture
def ground(new_ground):
    """Return a ground of the test's own."""
    with new_ground() as made:
        yield made
