"""Runs processes of this program beside the proxy, for work that would block its event loop: one for the checks and
the connections of open pages, one for each question to `kube-proxy why`.

Such a process reads lines from its standard input and ends at the end of the input: so it also ends when the proxy is
killed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from kubeproxy.engine.pacing import Backoff
from kubeproxy.errors import KubeProxyError

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


QUESTION_SECONDS: Final = 10.0
"""Timeout of a question in seconds, including the wait for earlier questions."""


class UnansweredError(KubeProxyError):
    """A question was not answered; the message has the reason."""


class FormQuestions:
    """Answers one question at a time. `socket` is the path of this proxy's control socket, '' for none."""

    def __init__(self, socket: str, command: Callable[[], list[str]] = ourselves) -> None:
        self._socket = socket
        self._command = command
        self._turn = asyncio.Lock()

    async def why(self, question: Mapping[str, str]) -> bytes:
        """Return an answer, as JSON. Raises UnansweredError."""
        if not self._socket:
            raise UnansweredError("this proxy has no control socket: remove --control-socket, or give it a path")
        try:
            async with asyncio.timeout(QUESTION_SECONDS), self._turn:
                answer = await self._once(msgspec.json.encode(question))
        except TimeoutError:
            raise UnansweredError(f"the process beside the proxy took longer than {QUESTION_SECONDS:.0f} s") from None
        except OSError as error:
            raise UnansweredError(f"the process beside the proxy cannot be started: {error.strerror}") from error
        if answer.startswith(b'{"error"'):
            raise UnansweredError(msgspec.json.decode(answer)["error"])
        return answer

    async def _once(self, question: bytes) -> bytes:
        words = [*self._command(), "companion", "question", "--control-socket", self._socket]
        process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        try:
            answer, _ = await process.communicate(question + b"\n")
        finally:
            await end(process)
        if process.returncode or not answer:
            raise UnansweredError(f"the process beside the proxy ended with exit code {process.returncode}")
        return answer
