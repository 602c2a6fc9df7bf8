"""The engine on a kernel that another program keeps busy: the event loop, which answers health requests, continues.

The tests count the turns of the loop during a long commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import threading
import time

import pytest

from bench.companion import Companion
from kubeproxy.backends.ipvs.backend import IpvsBackend
from kubeproxy.backends.ipvs.layout import Scheduler
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.engine.engine import Engine, Pace
from kubeproxy.model.world import Settings
from kubeproxy.registry import MetricRegistry
from kubeproxy.setup import modes
from support import iptables_kernel
from support.cluster_objects import world
from support.fake_kernel import FakeKernel
from support.staged_engine import NODE, READY, V4, Notes, endpoints, service

STRANGERS = 200_000
"""Elements that another program loads at once, repeatedly: it holds the mutex of nf_tables for that time."""
LONG = 0.25
"""Duration in seconds of a commit that has waited for another program; without waiting it takes some milliseconds."""
TURNS = 5
TRIES = 5000
LONG_COMMITS = 10
"""Number of commits that have waited. On a busy machine a commit may also wait for a CPU, like the event loop."""


class SlowKernel(FakeKernel):
    """A kernel with IPVS that blocks until the test releases it."""

    def __init__(self):
        super().__init__()
        self.free = threading.Event()
        self.free.set()

    def operate(self, operations):
        assert self.free.wait(30), "the event loop did not go on"
        super().operate(operations)


class Ticks:
    """Counts the turns of the event loop."""

    def __init__(self):
        self.count = 0
        self._task = asyncio.create_task(self._tick())

    async def _tick(self):
        while True:
            await asyncio.sleep(0.001)
            self.count += 1


@contextlib.asynccontextmanager
async def running(backend):
    """Run an engine with one Service; the returned function times a commit and returns turns and seconds."""
    notes = Notes()
    engine = Engine(Settings(node_name=NODE, families=(V4,)), [backend], notes, Pace(), lambda: {V4: []}, 0.0)
    task, ticks = asyncio.create_task(engine.run()), Ticks()

    async def commit(number, meanwhile=lambda turns: None):
        before, began, done = ticks.count, time.monotonic(), len(notes.commits)
        engine.arrive([endpoints("web", number)])
        while len(notes.commits) == done:
            assert not task.done(), task
            assert not notes.of("refused"), notes.of("refused")
            await asyncio.sleep(0.001)
            meanwhile(ticks.count - before)
        return ticks.count - before, time.monotonic() - began

    try:
        engine.arrive([*READY, service("web")])
        await engine.ready.wait()
        yield commit
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        ticks._task.cancel()
        backend.close()


def opened(mode):
    """Return a backend; for iptables by the name of the variant."""
    if mode in ("nft", "legacy"):
        return iptables_kernel.opened(mode)
    if mode == "ipvs":
        return IpvsBackend(V4, world(families=[V4]), SlowKernel(), Scheduler("rr"))
    (backend,) = (
        modes.named(mode).operations().open(KubeProxyConfiguration(mode=mode), world(families=[V4]), MetricRegistry())
    )
    return backend


@pytest.mark.slow("a large set that another program loads again and again")
@pytest.mark.parametrize("mode", ["nftables", "userspace", "nft"])
def test_the_mutex_of_nf_tables(netns, mode):
    async def main():
        async with running(opened(mode)) as commit:
            stranger = Companion("bench.stranger", str(STRANGERS))
            try:
                waited = []
                for number in range(TRIES):
                    turns, seconds = await commit(1 + number % 200)
                    if seconds > LONG:
                        waited.append(turns)
                        if turns >= TURNS or len(waited) == LONG_COMMITS:
                            break
            finally:
                stranger.close()
        assert waited, "nobody was waited for"
        assert waited[-1] >= TURNS, waited

    asyncio.run(main())


def test_the_lock_of_iptables(netns, tmp_path, monkeypatch):
    lock = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(lock))

    async def main():
        async with running(opened("legacy")) as commit:
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                turns, _ = await commit(1, lambda turns: turns > TURNS and fcntl.flock(held, fcntl.LOCK_UN))
                assert turns > TURNS

    asyncio.run(main())


def test_a_kernel_of_ipvs_that_takes_its_time():
    backend = opened("ipvs")

    async def main():
        async with running(backend) as commit:
            free = backend._kernel.free
            free.clear()
            turns, _ = await commit(1, lambda turns: turns > TURNS and free.set())
            assert turns > TURNS

    asyncio.run(main())
