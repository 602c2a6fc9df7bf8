"""Checks for problems run at the start, seldom without a page, and at a page's request, with a limited rate."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest

from kubeproxy.model.objects import Annotations
from kubeproxy.model.plan import Compiled
from kubeproxy.model.planner import Change
from kubeproxy.page import beside as module
from kubeproxy.page.beside import Flows, Problems
from support.nftables_plans import plans_of


class FakeCompanion:
    """Answers each check at once, as if the check cost nothing."""

    def __init__(self, words, on_line, ended, greet):
        self.on_line = on_line

    async def run(self):
        await asyncio.Event().wait()

    def tell(self, line):
        assert line == b"look\n"
        self.on_line(json.dumps({"processorSeconds": 0.0, "findings": [], "unknown": []}).encode())


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(module, "Companion", FakeCompanion)
    monkeypatch.setattr(module, "LEAST", 0.02)
    monkeypatch.setattr(module, "SOON", 0.01)


def play(scene, socket="/run/s"):
    told = []
    problems = Problems(SimpleNamespace(compiled={}, slices={}), socket, lambda _, message: told.append(message))

    async def main():
        async with asyncio.timeout(20):
            task = asyncio.create_task(problems.run())
            try:
                await scene(problems, told)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    asyncio.run(main())


async def looked(told, times):
    while sum(not message["looking"] for message in told) < times:  # noqa: ASYNC110 - the companion has no event
        await asyncio.sleep(0.001)


def test_a_check_starts_at_once_and_reports_its_time():
    async def scene(_, told):
        await looked(told, 1)
        assert [(message["looking"], message["lookedAt"] is None) for message in told] == [(True, True), (False, False)]
        assert told[-1]["every"] == module.EACH

    play(scene)


@pytest.mark.parametrize("socket", ["/run/s", ""])
def test_frequent_requests_get_one_check_after_a_pause(socket, monkeypatch):
    monkeypatch.setattr(module, "LEAST", 0.5)  # longer than a busy machine delays a test

    async def scene(problems, told):
        await looked(told, 1)
        first = told[-1]["lookedAt"]
        assert all(0.0 < problems.look_again() <= module.LEAST for _ in range(5))
        await looked(told, 2)
        assert told[-1]["lookedAt"] > first
        await asyncio.sleep(3 * module.LEAST)
        assert sum(not message["looking"] for message in told) == 2

    play(scene, socket)


def test_changed_ranges_of_ports_are_passed_on_for_counting():
    told, flows = [], Flows("nftables", SimpleNamespace(), lambda *_: None)
    flows._companion.tell = told.append
    states = [
        Compiled(plans_of("a", 1, annotations=Annotations(port_ranges=text))) for text in (None, "7/udp", "7/udp")
    ]
    for before, after in pairwise(states):
        flows.settled([Change(("default", "a"), before, after)])
    (line,) = told
    assert "7/UDP/IPv4" in json.loads(line)[1]


def test_a_familys_trouble_is_looked_into():
    async def scene(problems, told):
        await looked(told, 1)
        problems.look_soon()
        await looked(told, 2)

    play(scene)
