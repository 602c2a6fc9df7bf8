"""Each test here has a separate network namespace, and the guest's kernel has the modules of ipvs mode loaded."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from kubeproxy.kernel.proc.modules import ipvs_modules, release, require
from support.own_network import own_network


@pytest.fixture(autouse=True, scope="session")
def modules() -> None:
    require(ipvs_modules(release()), "the test")


@pytest.fixture(autouse=True)
def netns(modules: None) -> Iterator[None]:
    with own_network():
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
