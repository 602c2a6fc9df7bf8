"""Backends for the tests of this folder, each test in a network namespace of its own."""

import pytest

from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from support.nftables_table import WORLD


@pytest.fixture
def start(netns):
    """Return a function that makes backends, which are closed at the end."""
    made = []

    def make(globals_=WORLD):
        (family,) = globals_.families
        backend = NftablesBackend(KernelTable.open(family), globals_)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()
