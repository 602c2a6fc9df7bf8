"""The ground of these tests is the real kernel, in a network namespace for each of them."""

import zlib
from collections import defaultdict

import pytest

from support.effort import all_but_one_are_slow
from support.nftables_ground import KernelGround

AGAIN = "test_nftables_on_the_kernel.py"
"""Its tests run on the fake kernel with all their parameters; of the quick set a third run here, with one of them."""


@pytest.fixture(scope="session")
def new_ground():
    """Return what makes a ground, as a context manager."""
    return KernelGround.fresh


@pytest.fixture
def ground(new_ground):
    """Return a ground of the test's own."""
    with new_ground() as made:
        yield made


@pytest.hookimpl(tryfirst=True)  # before -m decides
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    variants: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.name == AGAIN:
            variants[item.nodeid.partition("[")[0]].append(item)
    for name, found in variants.items():
        if zlib.crc32(name.encode()) % 3:
            for item in found:
                item.add_marker(pytest.mark.slow("runs on the fake kernel in the quick set"))
        else:
            all_but_one_are_slow(name, sorted(found, key=lambda item: item.nodeid))
