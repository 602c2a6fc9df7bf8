"""The life of the program: its tasks, the signals that end it, the exit code, and pauses of the garbage collector.

It ends when a task fails, when it is stopped, or by a signal; a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("kubeproxy.app")


FIRST_SYNC_SECONDS = 300.0
"""Seconds after which garbage is collected without a first sync as well: failures make cycles of tracebacks."""


def postpone_garbage_collection() -> None:
    """Collect no garbage until `resume_garbage_collection`; then at each 50,000th new container instead of the 700th.

    The objects of the first sync stay and have no cycles: to search them takes a tenth of that sync's time at 10,000
    Services, and more at 44,000.
    """
    gc.set_threshold(50_000, 20, 50)
    gc.disable()


async def resume_garbage_collection(ready: asyncio.Event, patience: float = FIRST_SYNC_SECONDS) -> None:
    """Wait for the first sync; exempt its objects from collection and enable the collector."""
    try:
        await asyncio.wait_for(ready.wait(), patience)
    except TimeoutError:
        gc.enable()
        await ready.wait()
    gc.freeze()
    gc.enable()


class Lifetime:
    """The life of one program on the running event loop; `last_words` is called before an immediate end."""

    def __init__(self, last_words: Callable[[], None]) -> None:
        self._last_words = last_words
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._parts: list[asyncio.Task[None]] = []

    def heed_signals(self) -> None:
        """End by SIGTERM and SIGINT; ignore SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(
            signal.SIGHUP, log.info, "Ignored SIGHUP: a changed configuration file is noticed anyway"
        )

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; its error ends the program, and the supervisor restarts it."""
        task = asyncio.get_running_loop().create_task(work, name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # not by `cancel_parts`, as the end is set before that
                self.fail(RuntimeError(f"{name} was cancelled"))
            elif (error := task.exception()) is not None:
                self.fail(error)

        task.add_done_callback(ended)
        self._parts.append(task)

    def stop(self, code: int) -> None:
        """End with an exit code, unless the end is set already."""
        if not self._end.done():
            self._end.set_result(code)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless the end is set already."""
        if not self._end.done():
            self._end.set_exception(error)

    async def end(self) -> int:
        """Wait for the end; return the exit code. Raises the error of a task."""
        return await self._end

    async def cancel_parts(self) -> None:
        """Cancel all tasks and wait for them; to be called after the end is set."""
        for task in self._parts:
            task.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)

    def _signalled(self, number: signal.Signals) -> None:
        if self._end.done():
            log.warning("Ending at once signal=%s", number.name)
            self._last_words()
            os._exit(1)
        log.info("Stopping, the rules stay signal=%s", number.name)
        self.stop(0)
