"""The objects of the measurements are complete, valid, and parsed without a complaint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import change, objects, proxy
from bench.objects import Size
from kubeproxy.api.decode import WatchDecoder
from kubeproxy.model.events import Replaced
from kubeproxy.model.planner import Planner


@pytest.mark.parametrize("text", ["100x10", "1kx10", "44kx10", "1x5000"])
def test_a_size_reads_back_as_it_is_written(text):
    assert str(objects.parse_size(text)) == text


@given(st.integers(0, 100_000), st.integers(0, 250))
def test_lists_are_complete_and_in_pages(services, endpoints):
    size = Size(services % 1200, endpoints % 3)
    pages = [json.loads(page) for page in objects.service_pages(size)]
    assert sum(len(page["items"]) for page in pages) == size.services
    assert all(len(page["items"]) <= objects.PAGE for page in pages)
    assert [bool(page["metadata"].get("continue")) for page in pages] == [True] * (len(pages) - 1) + [False] * bool(
        pages
    )


@pytest.mark.parametrize("size", [Size(3, 0), Size(3, 1), Size(3, 10), Size(2, 250)])
def test_every_endpoint_is_planned(size):
    planner = Planner(proxy.world())
    services = proxy.decoded("services", objects.service_pages(size))
    slices = proxy.decoded("endpointslices", objects.slice_pages(size))
    assert planner.apply([Replaced("services", services), Replaced("endpointslices", slices)]) == []
    changes = planner.take()
    assert [problem for change_ in changes for problem in change_.after.problems] == []
    pools = [plan.cluster for change_ in changes for plan in change_.after.plans]
    assert [len(pool) for pool in pools] == [size.endpoints] * size.services
    assert len({destination for pool in pools for destination in pool}) == size.services * size.endpoints


def test_changes_are_undone_so_that_they_can_be_replayed():
    size = Size(20, 10)
    planner = Planner(proxy.world())
    planner.apply([Replaced("services", proxy.decoded("services", objects.service_pages(size)))])
    planner.apply([Replaced("endpointslices", proxy.decoded("endpointslices", objects.slice_pages(size)))])
    planner.take()
    before = dict(planner.compiled)
    streams = {"services": WatchDecoder("services"), "endpointslices": WatchDecoder("endpointslices")}
    for step in change.steps(size, pairs=15):
        planner.apply([event for resource, line in step.lines for event in streams[resource].feed(line).events])
        assert len(planner.take()) == 1, step.case
    assert planner.compiled == before
