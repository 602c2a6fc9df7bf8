"""Starts proxies by fork, from a process that has imported them already: that saves most of what a start costs.

`python -m prove.forking`, run where the proxies are to be, reads requests and writes what became of them, as lines of
JSON: {"argv": [...], "log": FILE} is answered by {"pid": N}, and {"pid": N, "status": S} follows when that ends. Each
child is a process like any other, with the launcher's faults; it dies with its parent, and that with standard input.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import random
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prove import launcher, mutating

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, linux/prctl.h


class Forked:
    """One process, as asyncio has those that it started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._over = asyncio.Event()

    async def wait(self) -> int:
        """Wait until it ends; return its exit status, negative after a signal."""
        await self._over.wait()
        return int(self.returncode or 0)

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def ended(self, status: int) -> None:
        """Take how it ended."""
        self.returncode = status
        self._over.set()


class Forking:
    """An async context manager: the process that forks, in a network namespace of iproute2."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._asked: asyncio.Queue[Forked] = asyncio.Queue()
        self._running: dict[int, Forked] = {}
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        command = ["ip", "netns", "exec", self._namespace, sys.executable, "-m", "prove.forking"]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        await self._process.wait()
        await self._reader

    async def start(self, argv: Sequence[str], log: Path) -> Forked:
        """Fork a process that does what the launcher does with these arguments."""
        await asyncio.to_thread(log.touch)  # read before the child may have opened it
        async with self._lock:
            self._process.stdin.write(json.dumps({"argv": list(argv), "log": str(log)}).encode() + b"\n")
            return await self._asked.get()

    async def _read(self) -> None:
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            pid = said["pid"]
            if "status" in said:
                self._running.pop(pid).ended(said["status"])
            else:
                self._running[pid] = Forked(pid)
                self._asked.put_nowait(self._running[pid])
        for process in self._running.values():
            process.ended(-signal.SIGKILL)


def main() -> int:
    """Fork until standard input ends. Returns in each child too, with the launcher's exit code."""
    if mutation := os.environ.pop(launcher.MUTATION, ""):
        mutating.apply(mutation)
    _import_all()
    gc.freeze()  # a collection in a child would copy every page of what is imported
    request = _serve()
    return 0 if request is None else launcher.main(request["argv"])


def _import_all() -> None:
    import kubeproxy  # noqa: PLC0415 - after a mutation was applied

    for module in pkgutil.walk_packages(kubeproxy.__path__, "kubeproxy."):
        if ".commands" not in module.name and ".page" not in module.name:
            importlib.import_module(module.name)


def _serve() -> dict[str, Any] | None:
    """Return None when standard input ends, and in a child what it is asked for."""
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffered = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap()
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            return None
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            request: dict[str, Any] = json.loads(line)
            if not (pid := os.fork()):
                _become(request, (wake, woken))
                return request
            _say({"pid": pid})


def _reap() -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _say({"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _say(what: dict[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _become(request: dict[str, Any], ours: Sequence[int]) -> None:
    """Make a child what a process is that was just started."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number in ours:
        os.close(number)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, wanted in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(number, wanted)
    os.close(log)
    os.close(nothing)
    random.seed()


if __name__ == "__main__":
    sys.exit(main())
