"""Another kube-proxy on this node: which process holds a port of ours, and who says so to the one that holds it.

Whoever finds a port taken asks there for the mode (/proxyMode, as any kube-proxy answers) and names itself in the
request, so that both say that there are two of them. What others send is only ever read as digits and lower-case
letters. Nothing here decides what becomes of a port that is taken.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections.abc import Callable
from typing import Final

from kubeproxy import __version__
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.port_holder import Process, holder

COMMAND: Final = "kube-proxy"
PAUSE: Final = 60.0
"""Seconds between two messages about the same trouble."""

_ANSWER_SECONDS: Final = 2.0
_MOST_ANSWERED: Final = 4096
_ANSWER: Final = re.compile(rb"HTTP/1\.[01] 200 .*?\r\n\r\n([a-z]{1,20})\s*", re.S)
_AGENT: Final = re.compile(r"kube-proxy/[\w.+-]{1,40} \(pid ([0-9]{1,10}); mode ([a-z]{1,20})\)")
_WILDCARDS: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared

Clock = Callable[[], float]


def user_agent(pid: int, mode: str) -> str:
    """Return how a proxy names itself to the one that holds its port."""
    return f"kube-proxy/v{__version__} (pid {pid}; mode {mode})"


class Neighbours:
    """The other kube-proxies of this node, as far as they show. `say` gets a sentence for people.

    `mode` is our own, `page` (host, port) where a kube-proxy is asked for its mode.
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
        self._pause = _Pause(clock)

    def asked_by(self, agent: str) -> None:
        """Take note of a request for our mode from this node, with this User-Agent header; said once a minute."""
        named = _AGENT.fullmatch(agent)
        if named is None or int(named[1]) == os.getpid() or not self._pause.over():
            return
        self._say(
            f"another kube-proxy (pid {named[1]} as it says, in mode {named[2]}) runs on this node and wants the ports "
            f"of this one (pid {os.getpid()}, in mode {self._mode}): {_advice(self._mode, named[2])}"
        )

    async def holding(self, port: int) -> str:
        """Return who listens on a port of ours, in words."""
        process = await asyncio.to_thread(self._find, port, COMMAND)
        page = process if port == self._page[1] else await asyncio.to_thread(self._find, self._page[1], COMMAND)
        mode = "" if page is not None and page.pid == os.getpid() else await self._ask_mode()
        who = (
            f"process {process.command} (pid {process.pid}) has it"
            if process is not None
            else "which process has it cannot be seen from here (it has other rights, or lives in a container)"
        )
        if not mode:
            return who
        same = process is not None and page is not None and process.pid == page.pid
        what = f", a kube-proxy in mode {mode}" if same else f"; a kube-proxy in mode {mode} answers on {self._page[1]}"
        return f"{who}{what}: {_advice(self._mode, mode)}"

    async def _ask_mode(self) -> str:
        """Return the mode that the kube-proxy says which holds the page, '' when there is none."""
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
    """What is said of a port that cannot be listened on: at once, and once a minute for as long as that lasts.

    `say` gets the sentence. All on the event loop's thread.
    """

    def __init__(
        self, neighbours: Neighbours, port: int, say: Callable[[str], None], clock: Clock = time.monotonic
    ) -> None:
        self._neighbours = neighbours
        self._port = port
        self._say = say
        self._pause = _Pause(clock)
        self._looking: asyncio.Task[None] | None = None

    def failed(self, error: ApplyError) -> None:
        """Take note of an attempt that failed."""
        if not self._pause.over():
            return
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            self._looking = asyncio.get_running_loop().create_task(self._explain(error))
        else:
            self._say(str(error))

    async def _explain(self, error: ApplyError) -> None:
        self._say(f"{error}; {await self._neighbours.holding(self._port)}")


class _Pause:
    """Whether it is time to say something again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said: float | None = None

    def over(self) -> bool:
        """Return whether it is; then the next pause begins."""
        now = self._clock()
        if self._said is not None and now - self._said < PAUSE:
            return False
        self._said = now
        return True


def _advice(ours: str, theirs: str) -> str:
    if ours == theirs:
        return "stop one of them"
    return "both write rules for the same Services, stop one of them"
