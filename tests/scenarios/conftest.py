"""Clusters for scenarios: `live` is shared by a module and has a running proxy, `bare` is a test's own and has none.

Under xdist each worker has clusters of its own; their names are random, so they live side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.cluster import LabCluster
from support.live import Live, leftovers


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, loop) -> Iterator[Live]:
    """A cluster with pods and a ready proxy; the module's PROXY replaces fields of its configuration."""
    made = _up(loop)
    try:
        loop.run(made.start(getattr(request.module, "PROXY", None)))
        yield made
    finally:
        _down(loop, made)


@pytest.fixture
def bare(loop) -> Iterator[Live]:
    """A cluster with pods, for tests that start and end proxies themselves or harm the API server."""
    made = _up(loop)
    try:
        yield made
    finally:
        _down(loop, made)


def _up(loop) -> Live:
    made = Live(LabCluster())
    loop.run(made.cluster.__aenter__())
    try:
        loop.run(made.add_pods())
    except BaseException:
        _down(loop, made)
        raise
    return made


def _down(loop, made: Live) -> None:
    loop.run(made.cluster.__aexit__(None, None, None))
    assert leftovers(made) == []
