"""The ground of these tests is the real kernel, with a network namespace for each test."""

import zlib
from collections import defaultdict

import pytest

from support.effort import all_but_one_are_slow
from support.nftables_ground import KernelGround

AGAIN = "test_nftables_on_the_kernel.py"
"""The tests of this module run on the fake kernel with all parameters. In the quick set a third of them runs here, with
one parameter.
"""


@pytest.fixture(scope="session")
def new_ground():
    """Return a context manager that makes a ground."""
    return KernelGround.fresh


@pytest.fixture
def ground(new_ground):
    """Return a separate ground for the test."""
    with new_ground() as made:
        yield made


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
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
