"""`make test` runs scenarios of every mode and family."""

import os
import re
import subprocess
import sys

import pytest

from support.places import ROOT

pytestmark = pytest.mark.timeout(600)  # ends a collection that hangs; on a busy machine a collection takes minutes

SCENARIOS = 10
"""Minimum number of a mode's scenarios in the quick set; those of ipvs run in guests and are counted separately."""


@pytest.fixture(scope="module")
def quick() -> list[str]:
    """Return the ids of scenarios, and of tests in guests, that `make test` runs."""
    plugins = ("xdist", "randomly", "cacheprovider", "cov")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not slow", "--color=no"]
    command += [*(f"-pno:{name}" for name in plugins), "tests/scenarios", "tests/guest"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return re.findall(r"^tests/.*::.*$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("mode", ["nftables", "iptables-nft", "iptables-legacy", "userspace"])
def test_each_mode_has_scenarios(quick: list[str], mode: str) -> None:
    assert sum(bool(re.search(rf"[\[-]{mode}[]-]", name)) for name in quick) >= SCENARIOS


def test_ipvs_mode_runs_in_guests(quick: list[str]) -> None:
    assert [name for name in quick if "guests_kernel[the-mode-itself]" in name]


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_each_family_has_scenarios(quick: list[str], family: str) -> None:
    assert sum(family in name for name in quick) >= SCENARIOS
