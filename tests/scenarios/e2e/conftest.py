"""Fixtures of upstream's scenarios: a shared cluster for each mode, and a separate stage in it for each scenario.

Scenarios run in all modes of this machine's kernel unless `modes` names others; under the guest's kernel only scenarios
with the mode ipvs run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.cluster import LabCluster
from support.live import leftovers
from support.modes import HERE, MODES
from support.stage import Stage
from support.two_nodes import TwoNodes

USUAL = ("nftables", "iptables-nft", "userspace")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "two_nodes" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("modes")
        chosen = [mode for mode in (marker.args if marker else USUAL) if mode in HERE]
        metafunc.parametrize("two_nodes", chosen, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect scenarios that support no mode of this kernel."""
    chosen = [item for item in items if _has_mode(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def _has_mode(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return params.get("two_nodes", "") in {"", *MODES}


@pytest.fixture(scope="session")
def two_nodes(request: pytest.FixtureRequest, loop) -> Iterator[TwoNodes]:
    """A cluster whose two nodes run the proxy in one mode."""
    made = TwoNodes(LabCluster(), request.param)
    loop.run(made.cluster.__aenter__())
    try:
        loop.run(made.up())
        yield made
    finally:
        loop.run(made.cluster.__aexit__(None, None, None))
        assert leftovers(made) == []


@pytest.fixture
def stage(two_nodes: TwoNodes, loop) -> Iterator[Stage]:
    """A separate namespace for the test in the cluster."""
    made = Stage(two_nodes)
    loop.run(made.open())
    yield made
    loop.run(made.close())
