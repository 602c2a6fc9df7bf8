"""Shared by all tests: one event loop in a separate thread, which runs fixtures and `async def` tests.

A cluster must continue to serve its API while a test blocks, so the loop never runs in the test's own thread. Tests
that call asyncio.run() themselves are not affected.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
from collections.abc import Coroutine, Iterator
from itertools import islice
from typing import Any, TypeVar

import pytest

pytest.register_assert_rewrite("support")  # pytest shows compared values of its checks, as in tests
from support.effort import mark_others_slow, register_profiles  # noqa: E402 # no earlier import of its modules

register_profiles()

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until stop(), created at its first use."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result; it is cancelled when the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="test loop", daemon=True)
            self._thread.start()
        return self._loop

    def stop(self) -> None:
        """End the loop with all tasks that still run in it."""
        if self._loop is None or self._thread is None:
            return
        self.run(_end_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None


async def _end_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


_LOOP = pytest.StashKey[LoopThread]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LOOP] = LoopThread()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_LOOP].stop()


@pytest.fixture(scope="session")
def loop(pytestconfig: pytest.Config) -> LoopThread:
    """The loop, for fixtures: loop.run(coroutine)."""
    return pytestconfig.stash[_LOOP]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def` tests in the loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    pyfuncitem.config.stash[_LOOP].run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Exclude the collected tests from garbage collections, which take a third of the unit tests' CPU time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests that the quick set omits, before pytest applies -m; finally order the remaining tests."""
    mark_others_slow(items)
    yield
    _begin_with_long(items)


def _begin_with_long(items: list[pytest.Item]) -> None:
    """Make each worker of xdist begin with long tests: a long test that begins late runs alone, after all others.

    With --dist worksteal a worker's first share is a consecutive part of the tests, and all shares have the same size.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    seconds = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("long"))}
    long = sorted(seconds, key=lambda item: (-seconds[item], item.nodeid))
    rest = iter([item for item in items if item not in seconds])
    dealt: list[pytest.Item] = []
    for at in range(workers):
        size = (len(items) - len(dealt)) // (workers - at)
        share = long[at::workers]
        dealt += share + list(islice(rest, size - len(share)))
    items[:] = [*dealt, *rest]
