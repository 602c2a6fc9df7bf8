"""Answers the page's questions as `kube-proxy why` does, each in a process of its own.

Reading the kernel and probing endpoints would block the proxy's event loop.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kubeproxy.errors import KubeProxyError
from kubeproxy.page.companion import end, ourselves

PATIENCE: Final = 10.0
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
            async with asyncio.timeout(PATIENCE), self._turn:
                answer = await self._once(msgspec.json.encode(question))
        except TimeoutError:
            raise UnansweredError(f"the process beside the proxy took longer than {PATIENCE:.0f} s") from None
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
