"""Runs a process of this program beside the proxy, for work that would block its event loop.

The process reads lines from its standard input and ends at the end of the input: so it also ends when the proxy is
killed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kubeproxy.engine.pacing import Backoff

log = logging.getLogger("kubeproxy.page")

FIRST_RETRY: Final = 2.0
SLOWEST_RETRY: Final = 300.0
PATIENCE: Final = 2.0
"""Seconds to wait for the end of the process before it is killed."""
_LONGEST: Final = 1 << 20
"""Maximum bytes of a line of its output, and of its unread input."""


def ourselves() -> list[str]:
    """Return the command that starts this program again, whether it is installed or one file (a zipapp)."""
    from zipfile import is_zipfile  # noqa: PLC0415 - not loaded by a proxy without an open page

    program = Path(sys.argv[0])
    if program.is_file() and is_zipfile(program):
        return [sys.executable, str(program.resolve())]
    return [sys.executable, "-P", "-m", "kubeproxy.cli"]  # -P: no modules from the working directory


class Companion:
    """Runs `kube-proxy companion ...` until cancelled, and restarts it when it ends.

    `said` gets each line of its output, `ended` a sentence when it ends by itself. `greet` yields its first input.
    """

    def __init__(
        self,
        words: Sequence[str],
        said: Callable[[bytes], None],
        ended: Callable[[str], None],
        greet: Callable[[], AsyncIterator[bytes]] | None = None,
        command: Callable[[], list[str]] = ourselves,
    ) -> None:
        self._words = words
        self._said = said
        self._ended = ended
        self._greet = greet
        self._command = command
        self._process: Process | None = None
        self._greeted = False

    def tell(self, line: bytes) -> None:
        """Send a line to the process; one that is not ready yet gets the same information from `greet`."""
        process = self._process
        if process is None or process.stdin is None or not self._greeted or process.stdin.is_closing():
            return
        if process.stdin.transport.get_write_buffer_size() > _LONGEST:  # it does not read
            self._greeted = False
            process.kill()
            return
        process.stdin.write(line)

    async def run(self) -> None:
        """Keep the process running until cancelled; it has ended on return."""
        backoff = Backoff(FIRST_RETRY, SLOWEST_RETRY)
        while True:
            try:
                why = await self._once()
            except OSError as error:
                why = f"cannot be started: {error.strerror}"
            self._ended(f"the process beside the proxy ({' '.join(self._words[:1])}) {why}; it is tried again")
            await asyncio.sleep(backoff.failed())

    async def _once(self) -> str:
        """Run the process once; return the reason of its end."""
        words = [*self._command(), "companion", *self._words]
        process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, limit=_LONGEST)
        self._process = process
        try:
            await asyncio.gather(self._tell_all(process), self._listen(process))
            return f"ended with exit code {await process.wait()}"
        except ValueError:
            return "said too much"
        finally:
            self._process, self._greeted = None, False
            await end(process)

    async def _tell_all(self, process: Process) -> None:
        assert process.stdin is not None  # noqa: S101 - a pipe was asked for
        with suppress(ConnectionError):
            if self._greet is not None:
                async for line in self._greet():
                    process.stdin.write(line)
                    await process.stdin.drain()
            self._greeted = True

    async def _listen(self, process: Process) -> None:
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        while line := await process.stdout.readline():
            self._said(line.rstrip())


async def end(process: Process) -> None:
    """Terminate a process, and wait for its end."""
    if process.stdin is not None:
        process.stdin.close()
    for stop in (process.terminate, process.kill):
        if process.returncode is None:
            with suppress(ProcessLookupError):
                stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while process.stdout is not None and await process.stdout.read(_LONGEST):
                    pass  # a pipe must be read to its end before it closes
                await process.wait()
                return
