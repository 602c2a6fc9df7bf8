"""Controls the demo's clients that send requests without pause (load.py): starts them, directs them, and reads their
results.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from kubeproxy.errors import KubeProxyError
from lab.cluster import NotInTimeError
from lab.probes import NoAnswer

_FIRST_PORTS = itertools.cycle(range(1100, 31000, 3000))
_NO_ANSWERS = frozenset(n.value for n in NoAnswer)


@dataclass(frozen=True, slots=True)
class Sighting:
    """The first answer of a kind: the pod or failure, and the times of request and answer in monotonic seconds."""

    who: str
    sent: float
    heard: float


@dataclass(frozen=True, slots=True)
class Total:
    """A client's totals: the number of answers of each pod, the number of each failure, and the time of each pod's last
    request.
    """

    asked: int = 0
    pods: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    last_sent: dict[str, float] = field(default_factory=dict)


class Traffic:
    """One client, an async context manager. `proto` as in probes: tcp connects one after the other, udp sends in a
    steady stream.
    """

    def __init__(self, namespace: str, proto: Literal["tcp", "udp"]) -> None:
        self._argv = ["ip", "netns", "exec", namespace, sys.executable, "-m", "lab.demo.load", proto]
        self._argv.append(str(next(_FIRST_PORTS)))
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._done: asyncio.Queue[None] = asyncio.Queue()
        self._sightings: dict[str, Sighting] = {}
        self._news = asyncio.Event()
        self._total = Total()

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        # The client has its own session: Ctrl-C reaches only the demo, which ends the client in order.
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=pipe, stdout=pipe, start_new_session=True
        )
        self._reader = asyncio.create_task(self._read(self._process))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is None or self._reader is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 3)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._reader

    async def aim(self, address: str, port: int) -> None:
        """Send all further requests to this address."""
        await self._command(f"aim {address} {port}")
        await self.mark()

    async def rest(self) -> None:
        """Send no requests. Unneeded requests would fill conntrack and use CPU time."""
        await self._command("rest")

    async def mark(self) -> None:
        """Forget the answers so far, so that first_answer() returns a later answer."""
        await self._command("mark")

    async def saw(self, who: str, timeout: float) -> Sighting:
        """Wait for the first answer from a pod, or for "refused", since the mark. Raises NotInTimeError."""
        deadline = time.monotonic() + timeout
        while who not in self._sightings:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())
            except TimeoutError:
                seen = ", ".join(sorted(self._sightings)) or "nothing"
                raise NotInTimeError(f"no answer from {who} within {timeout:g} s, only from: {seen}") from None
        return self._sightings[who]

    async def saw_a_pod(self, timeout: float) -> Sighting:
        """Wait for the first answer from any pod since the mark. Raises NotInTimeError."""
        deadline = time.monotonic() + timeout
        while not (found := [s for s in self._sightings.values() if s.who not in _NO_ANSWERS]):
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())
            except TimeoutError:
                seen = ", ".join(sorted(self._sightings)) or "nothing"
                raise NotInTimeError(f"no answer within {timeout:g} s, only: {seen}") from None
        return min(found, key=lambda s: s.heard)

    async def stop(self) -> Total:
        """End the client; return its totals."""
        await self.__aexit__()
        return self._total

    async def _command(self, line: str) -> None:
        if self._process is None or self._process.stdin is None or self._process.returncode is not None:
            raise KubeProxyError("a client of the demo ended early")
        self._process.stdin.write(line.encode() + b"\n")
        try:
            await asyncio.wait_for(self._done.get(), 5)
        except TimeoutError:
            raise KubeProxyError("a client of the demo does not answer") from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            return
        while raw := await process.stdout.readline():
            line: dict[str, Any] = json.loads(raw)
            if "done" in line:
                if line["done"] == "mark":
                    self._sightings.clear()
                self._done.put_nowait(None)
            elif "who" in line:
                self._sightings.setdefault(line["who"], Sighting(**line))
                self._news.set()
            else:
                self._total = _total(line["total"])


def _total(said: dict[str, Any]) -> Total:
    counts: dict[str, int] = said["counts"]
    return Total(
        said["asked"],
        {who: n for who, n in counts.items() if who not in _NO_ANSWERS},
        {who: n for who, n in counts.items() if who in _NO_ANSWERS},
        said["last_sent"],
    )
