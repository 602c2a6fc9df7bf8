"""Starts processes by fork from a process that has imported all modules; this saves most of the cost of a start.

`python -m prove.forking [MUTATION]` reads requests and writes results over one socket, its standard input and output,
as lines of JSON. The first line is {"namespace": NAME, "environment": {...}}, with the network namespace of iproute2
for all children, "" for the present one. The answer to {"call": "module:function", "argv": [...], "output": FILE, ...}
is {"pid": N}; {"pid": N, "status": S} follows when the child ends. Each child gets a signal when its parent dies.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from lab.forking import begin_anew, end_with, ended_children, import_all, wake_for_children
from lab.netns import settle_in
from prove import mutating


class ForkingError(Exception):
    """The forking process ended, for example because a mutation does not exist; its output contains the reason."""


class Forked:
    """A child process, with the interface of asyncio's processes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._over = asyncio.Event()

    async def wait(self) -> int:
        """Wait until the process ends; return its exit status, negative after a signal."""
        await self._over.wait()
        return int(self.returncode or 0)

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        os.kill(self.pid, number)

    def ended(self, status: int) -> None:
        """Store the exit status."""
        self.returncode = status
        self._over.set()


class Forking:
    """An async context manager: the forking process, in a network namespace of iproute2 if one is given.

    With a mutation, a line of the proxy is changed in this process.
    """

    def __init__(self, namespace: str = "", mutation: str = "") -> None:
        self._namespace = namespace
        self._mutation = mutation
        self._asked: asyncio.Queue[Forked | None] = asyncio.Queue()  # None: the forking process has ended
        self._running: dict[int, Forked] = {}
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._pid, ours = _PREPARED.pop() if _PREPARED and not self._mutation else (0, None)
        if ours is None:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "prove.forking", *filter(None, [self._mutation])]
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True
                )
        self._from, self._to = await asyncio.open_connection(sock=ours)
        self._say({"namespace": self._namespace, "environment": dict(os.environ)})
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._reader.done():
            self._to.write_eof()
        await self._reader
        self._to.close()
        await (asyncio.to_thread(os.waitpid, self._pid, 0) if self._pid else self._process.wait())

    async def start(
        self,
        call: str,
        argv: Sequence[str],
        output: str,
        *,
        errors: bool = True,
        orphaned: signal.Signals = signal.SIGKILL,
    ) -> Forked:
        """Fork a process that calls `module:function` with arguments; the result of the call is the exit status.

        Its output is appended to a file, with its standard error unless `errors` is false. It gets the signal
        `orphaned` when its parent dies. Raises ForkingError.
        """
        async with self._lock:
            if self._reader.done():
                raise ForkingError("the process that forks has ended")
            self._say({"call": call, "argv": list(argv), "output": output, "errors": errors, "orphaned": orphaned})
            forked = await self._asked.get()
        if forked is None:
            raise ForkingError("the process that forks has ended")
        return forked

    def _say(self, what: Mapping[str, Any]) -> None:
        self._to.write(json.dumps(what).encode() + b"\n")

    async def _read(self) -> None:
        with suppress(ConnectionError):
            while line := await self._from.readline():
                said = json.loads(line)
                pid = said["pid"]
                if "status" in said:
                    self._running.pop(pid).ended(said["status"])
                else:
                    self._running[pid] = Forked(pid)
                    self._asked.put_nowait(self._running[pid])
        self._asked.put_nowait(None)
        for process in self._running.values():
            process.ended(-signal.SIGKILL)


_PREPARED: list[tuple[int, socket.socket]] = []


def prepare() -> None:
    """Fork a process in advance for the next Forking without a mutation: the present process has imported everything.

    The present process has neither threads nor an event loop yet.
    """
    ours, theirs = socket.socketpair()
    if pid := os.fork():
        theirs.close()
        _PREPARED.append((pid, ours))
        return
    ours.close()
    for number in (0, 1):
        os.dup2(theirs.fileno(), number)
    theirs.close()
    end_with(lambda: main([]))


def main(argv: Sequence[str]) -> int:
    """Fork on request until standard input ends. Returns in each child too, with the result of the called function."""
    if argv:
        mutating.apply(argv[0])
    import_all((".commands", ".page"))
    request = _serve()
    if request is None:
        return 0
    module, _, function = request["call"].partition(":")
    called: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return called(request["argv"])


def _serve() -> dict[str, Any] | None:
    """Return None when standard input ends, and in a child the request."""
    wake, woken = wake_for_children()
    buffered = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            for pid, status in ended_children():
                _say({"pid": pid, "status": status})
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            return None
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            request: dict[str, Any] = json.loads(line)
            if "namespace" in request:
                _settle(request)
                continue
            # The file is opened before the answer: the caller may then read the file, or close the pipe.
            output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not (pid := os.fork()):
                errors = output if request["errors"] else None
                begin_anew(output, errors, (wake, woken), orphaned=request["orphaned"])
                return request
            os.close(output)
            _say({"pid": pid})


def _settle(request: Mapping[str, Any]) -> None:
    """Enter the network namespace of the children: that of a node for proxies, the present one for worlds."""
    os.environ.update(request["environment"])
    if request["namespace"]:
        settle_in(request["namespace"])
    from kubeproxy.backends.nftables.ruleset import Ruleset  # noqa: PLC0415 - after a mutation
    from kubeproxy.model.addresses import Family  # noqa: PLC0415 - after a mutation
    from kubeproxy.model.plan import Globals  # noqa: PLC0415 - after a mutation

    for family in Family:  # children inherit the compiled rules of every table
        Ruleset(family, Globals("")).definition(())
    gc.freeze()  # a collection in a child would copy every page of the imported modules


def _say(what: dict[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
