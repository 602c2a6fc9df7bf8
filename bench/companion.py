"""A process that executes JSON commands for a measurement, one per line, and answers each with one line of JSON."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.report import ROOT


class Companion:
    """The parent's side, which sends commands; `inherit` are the file descriptors that the process inherits.

    The process ends with its parent. Raises EOFError if the process has ended.
    """

    def __init__(self, module: str, *arguments: str, inherit: Sequence[int] = ()) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=inherit
        )
        self.pid = self._child.pid
        self.hello = self.answer()

    def tell(self, do: str, **more: Any) -> None:
        """Send a command; its answer can be read later."""
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode({"do": do, **more}) + b"\n")
        self._child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the oldest unanswered command."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise EOFError(f"the process of {self._child.args!r} ended")
        return msgspec.json.decode(line, type=dict[str, Any])

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.tell(do, **more)
        return self.answer()

    def close(self) -> None:
        """Stop the process."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


def say(**answer: Any) -> None:
    """Execute commands, inside the companion process."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
