"""How long the program runs: its parts, the signals that end it, and the exit code. Knows nothing of what the parts do.

It ends when a part fails, when it is stopped, or by a signal; a second signal does not wait for an orderly end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("kubeproxy.app")


class Lifetime:
    """The life of one program on the running event loop; `last_words` is called before it ends at once."""

    def __init__(self, last_words: Callable[[], None]) -> None:
        self._last_words = last_words
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._parts: list[asyncio.Task[None]] = []

    def heed_signals(self) -> None:
        """End by SIGTERM and SIGINT; pass over SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(
            signal.SIGHUP, log.info, "Ignored SIGHUP: a changed configuration file is noticed anyway"
        )

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a part; one that ends with an error ends the program, for the supervisor to start it anew."""
        task = asyncio.get_running_loop().create_task(work, name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # by something else than `cancel_parts`, which comes when the end is known
                self.fail(RuntimeError(f"{name} was cancelled"))
            elif (error := task.exception()) is not None:
                self.fail(error)

        task.add_done_callback(ended)
        self._parts.append(task)

    def stop(self, code: int) -> None:
        """End with an exit code, unless the end is known already."""
        if not self._end.done():
            self._end.set_result(code)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless the end is known already."""
        if not self._end.done():
            self._end.set_exception(error)

    async def end(self) -> int:
        """Return the exit code when it is time to end. Raises what a part failed with."""
        return await self._end

    async def cancel_parts(self) -> None:
        """Cancel all parts and wait for them; to be called when the end is known."""
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
