"""Clusters for scenarios: `live` is shared by a module and has a running proxy, `bare` belongs to one test and has
none.

Under xdist each worker has separate clusters; their names are random, so they can run at the same time.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.cluster import LabCluster
from support.live import Live, leftovers
from support.modes import GUEST, MODES, NFTABLES, ScenarioMode, translate_bridged_packets
from support.three_nodes import ThreeNodes

DRAWS = {"iptables-legacy": 3}
"""The weight of a mode in the quick set, where other modes have weight 1: few scenarios support this mode."""


@pytest.fixture(autouse=True, scope="session")
def bridged_packets_are_translated() -> None:
    translate_bridged_packets()


@pytest.fixture(scope="module")
def mode(request: pytest.FixtureRequest) -> ScenarioMode:
    """The mode of the clusters' proxies: nftables, unless a test's mark names others (support.modes)."""
    return MODES[getattr(request, "param", NFTABLES.name)]


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, loop, mode: ScenarioMode) -> Iterator[Live]:
    """A cluster with pods and a ready proxy; the module's PROXY replaces fields of its configuration."""
    made = _up(loop, mode)
    try:
        loop.run(made.start(getattr(request.module, "PROXY", None)))
        yield made
    finally:
        _down(loop, made)


@pytest.fixture(scope="module")
def nodes(loop, live: Live) -> ThreeNodes:
    """Three nodes with a proxy on each, in the cluster of `live`, whose own proxy is stopped."""
    made = ThreeNodes(live)
    loop.run(live.proxy.stop())
    loop.run(made.up())
    return made


@pytest.fixture
def bare(loop, mode: ScenarioMode) -> Iterator[Live]:
    """A cluster with pods, for tests that start and end proxies themselves or disturb the API server."""
    made = _up(loop, mode)
    try:
        yield made
    finally:
        _down(loop, made)


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark a scenario slow in all of its modes except one; under the guest's kernel deselect all modes except ipvs."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if not GUEST:
        _one_mode_is_quick(ours)
        return
    elsewhere = {item for item in ours if _mode_of(item) != "ipvs"}
    config.hook.pytest_deselected(items=list(elsewhere))
    items[:] = [item for item in items if item not in elsewhere]


def _one_mode_is_quick(items: list[pytest.Item]) -> None:
    """The module's name determines the mode in which `make test` runs its scenarios: each mode needs its own cluster.

    A scenario that does not support the module's first mode runs in the next one of the module's order.
    """
    variants: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mode := _mode_of(item)) in MODES:
            variants[item.nodeid.replace(mode, "")].append(item)
    for found in variants.values():
        found.sort(key=_place)
        for item in found[1:]:
            item.add_marker(pytest.mark.slow("runs in another mode in the quick set"))


def _place(item: pytest.Item) -> int:
    """Return the position of a scenario's mode in the order of its module: the smallest number is first."""
    mode = _mode_of(item)
    return min(zlib.crc32(f"{item.path.stem} {mode} {n}".encode()) for n in range(DRAWS.get(mode, 1)))


def _mode_of(item: pytest.Item) -> str:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return params.get("mode") or params.get("two_nodes", "")  # from e2e/conftest.py


def _up(loop, mode: ScenarioMode) -> Live:
    made = Live(LabCluster(), mode)
    loop.run(made.cluster.__aenter__())
    try:
        loop.run(made.choose_variant(mode.variant))
        loop.run(made.add_pods())
    except BaseException:
        _down(loop, made)
        raise
    return made


def _down(loop, made: Live) -> None:
    loop.run(made.cluster.__aexit__(None, None, None))
    assert leftovers(made) == []
