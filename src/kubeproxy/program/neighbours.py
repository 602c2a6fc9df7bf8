"""Detection of another kube-proxy on this node, which holds a port of this one.

A proxy that finds a port taken requests /proxyMode, which every kube-proxy answers, and names itself in the User-Agent:
so both report the other. Only digits and lower-case letters of the other's text are used.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections.abc import Callable
from typing import Final

from kubeproxy.engine.pacing import Clock, TokenBucket
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.processes import Process, holder
from kubeproxy.release import NUMBER

COMMAND: Final = "kube-proxy"
PAUSE: Final = 60.0  # seconds between two messages about the same problem
_ANSWER_SECONDS: Final = 2.0
_MOST_ANSWERED: Final = 4096
_ANSWER: Final = re.compile(rb"HTTP/1\.[01] 200 .*?\r\n\r\n([a-z]{1,20})\s*", re.S)
_AGENT: Final = re.compile(r"kube-proxy/[\w.+-]{1,40} \(pid ([0-9]{1,10}); mode ([a-z]{1,20})\)")
_WILDCARDS: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared


def user_agent(pid: int, mode: str) -> str:
    """Return the User-Agent header that a proxy sends to the holder of its port."""
    return f"kube-proxy/v{NUMBER} (pid {pid}; mode {mode})"


class Neighbours:
    """The other kube-proxies of this node; `say` gets a sentence about one.

    `mode` is the mode of this proxy, `page` (host, port) the metrics port, at which another one is asked for its mode.
    """

    def __init__(
        self,
        mode: str,
        page: tuple[str, int],
        say: Callable[[str], None],
        find: Callable[[int, str], Process | None] = holder,
        clock: Clock = time.monotonic,
    ) -> None:
        self._mode = mode
        self._page = _WILDCARDS.get(page[0], page[0]), page[1]
        self._say = say
        self._find = find
        self._messages = TokenBucket(1 / PAUSE, 1, clock)

    def asked_by(self, agent: str) -> None:
        """Report the sender of a request for the mode from this node, by its User-Agent header; once a minute."""
        named = _AGENT.fullmatch(agent)
        if named is None or int(named[1]) == os.getpid() or not self._messages.take():
            return
        self._say(
            f"another kube-proxy (pid {named[1]} as it reports, in mode {named[2]}) runs on this node and wants the "
            f"ports of this one (pid {os.getpid()}, in mode {self._mode}): {_advice(self._mode, named[2])}"
        )

    async def holding(self, port: int) -> str:
        """Return a text about the process that listens on a port of this proxy."""
        process = await asyncio.to_thread(self._find, port, COMMAND)
        page = process if port == self._page[1] else await asyncio.to_thread(self._find, self._page[1], COMMAND)
        mode = "" if page is not None and page.pid == os.getpid() else await self._ask_mode()
        holder_text = (
            f"process {process.command} (pid {process.pid}) has it"
            if process is not None
            else "the process that has it is not visible from here (it has other rights, or is in a container)"
        )
        if not mode:
            return holder_text
        same = process is not None and page is not None and process.pid == page.pid
        other = (
            f", a kube-proxy in mode {mode}" if same else f"; a kube-proxy in mode {mode} answers on {self._page[1]}"
        )
        return f"{holder_text}{other}: {_advice(self._mode, mode)}"

    async def _ask_mode(self) -> str:
        """Return the mode of the kube-proxy that holds the metrics port, '' without one."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reader, writer = await asyncio.open_connection(*self._page, limit=_MOST_ANSWERED)
                try:
                    agent = user_agent(os.getpid(), self._mode)
                    head = f"GET /proxyMode HTTP/1.0\r\nHost: localhost\r\nUser-Agent: {agent}\r\n\r\n"
                    writer.write(head.encode("ascii"))
                    answered = b""
                    while len(answered) < _MOST_ANSWERED and (piece := await reader.read(_MOST_ANSWERED)):
                        answered += piece
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError):
            return ""
        found = _ANSWER.fullmatch(answered)
        return found[1].decode("ascii") if found is not None else ""


class TakenPort:
    """Messages about a port that cannot be opened: at the first failure and once a minute. `say` gets the sentence."""

    def __init__(
        self, neighbours: Neighbours, port: int, say: Callable[[str], None], clock: Clock = time.monotonic
    ) -> None:
        self._neighbours = neighbours
        self._port = port
        self._say = say
        self._messages = TokenBucket(1 / PAUSE, 1, clock)
        self._looking: asyncio.Task[None] | None = None

    def failed(self, error: ApplyError) -> None:
        """Report a failed attempt."""
        if not self._messages.take():
            return
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            self._looking = asyncio.get_running_loop().create_task(self._explain(error))
        else:
            self._say(str(error))

    async def _explain(self, error: ApplyError) -> None:
        self._say(f"{error}; {await self._neighbours.holding(self._port)}")


def _advice(ours: str, theirs: str) -> str:
    if ours == theirs:
        return "stop one of them"
    return "both write rules for the same Services, stop one of them"
