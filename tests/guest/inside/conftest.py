"""Each test here has a network namespace of its own, and the guest's kernel has the modules of ipvs mode loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "kernel"))

from own_network import own_network

from kubeproxy.kernel.modules import ipvs_modules, release, require


@pytest.fixture(autouse=True, scope="session")
def modules() -> None:
    require(ipvs_modules("rr", release()), "the test")


@pytest.fixture(autouse=True)
def netns(modules: None) -> Iterator[None]:
    with own_network():
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
