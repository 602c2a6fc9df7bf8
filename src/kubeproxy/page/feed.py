"""Sends events to open pages. All pages get the same messages, at most four per second. The first open page starts the
tasks, which end LINGER seconds after the last page closes. A page that misses messages, because it does not read its
connection, gets a new greeting and loads everything again."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from kubeproxy.engine.observer import Audience
from kubeproxy.engine.pacing import wait_briefly
from kubeproxy.model.events import Event
from kubeproxy.model.planner import Change
from kubeproxy.page.beside import Flows, Problems, Tell
from kubeproxy.page.news import News

log = logging.getLogger("kubeproxy.page")

MOST_PAGES: Final = 8
PAUSE: Final = 0.25  # minimum seconds between two messages
IDLE: Final = 1.0  # maximum seconds between two messages
ALIVE: Final = 15.0
"""Seconds without an event after which a page gets a comment. The comment makes HTTP proxies keep the connection."""
LINGER: Final = 3.0
"""Seconds for which the tasks continue after the last page, for a page that reloads."""
WAITING: Final = 8  # messages in a page's queue

_RETRY: Final = b"retry: 1000\n\n"
_COMMENT: Final = b":\n\n"


def event(kind: str, data: bytes) -> bytes:
    """Encode a server-sent event; `data` is JSON without newlines."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class OpenPage:
    """The queued messages of an open page; `behind` means that the page has missed messages."""

    def __init__(self) -> None:
        self.behind = False
        self._pieces: deque[bytes] = deque()
        self._woken = asyncio.Event()

    def put(self, piece: bytes) -> None:
        """Queue a message; if the queue is full, empty the queue and set `behind`."""
        if len(self._pieces) >= WAITING:
            self._pieces.clear()
            self.behind = True
        if not self.behind:
            self._pieces.append(piece)
        self._woken.set()

    async def take(self) -> bytes:
        """Return the next messages; b'' if the page has missed messages, and a comment if no message arrives in ALIVE
        seconds."""
        await wait_briefly(self._woken, ALIVE)
        self._woken.clear()
        pieces = b"".join(self._pieces)
        self._pieces.clear()
        return pieces or (b"" if self.behind else _COMMENT)


class Feed:
    # ruff: noqa: D102 - observer.Audience documents its methods
    """Sends events to pages. While a page is open, the Feed is the `audience` of the Journal. All calls must be on the
    event loop's thread.

    `facts` returns the facts for a greeting. `listen` sets this audience, or removes it (None). `looks` creates the
    companions for counts and checks."""

    def __init__(
        self,
        news: News,
        facts: Callable[[], dict[str, Any]],
        listen: Callable[[Audience | None], None],
        looks: Callable[[Tell], tuple[Flows, Problems]],
    ) -> None:
        self.news = news
        self._facts = facts
        self._listen = listen
        self._flows, self._problems = looks(self.tell)
        self._pages: set[OpenPage] = set()
        self._stirred = asyncio.Event()
        self._kept: dict[str, bytes] = {}
        self._pending: dict[str, bytes] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._linger: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of pages is open."""
        return len(self._pages) >= MOST_PAGES

    @property
    def is_open(self) -> bool:
        """Whether the tasks for pages are running."""
        return bool(self._tasks)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of a page's event stream while the page is open."""
        if self.is_full:
            return
        page = OpenPage()
        self._pages.add(page)
        self._open()
        try:
            yield _RETRY + self._greeting()
            while True:
                piece = await page.take()
                if page.behind:
                    page.behind = False
                    piece = self._greeting()
                yield piece
        finally:
            self._pages.discard(page)
            self._close_later()

    def tell(self, kind: str, message: Any) -> None:
        """Add an event to the next message. Pages that open later also get the last event of the kind "problems"."""
        data = event(kind, message if isinstance(message, bytes) else msgspec.json.encode(message))
        self._pending[kind] = data
        if kind == "problems":
            self._kept[kind] = data
        self._stirred.set()

    def arrived(self, events: Sequence[Event]) -> None:
        self.news.arrived(events)
        self._stirred.set()

    def settled(self, changes: Sequence[Change]) -> None:
        self.news.settled(changes)
        self._flows.settled(changes)
        self._stirred.set()

    def look_again(self) -> float | None:
        """Request a check for problems; return the seconds until its start, or None while no page is open."""
        return self._problems.look_again() if self.is_open else None

    async def close(self) -> None:
        """End the tasks for pages, and wait for their end. The streams end with the connections of the pages."""
        if self._linger is not None:
            self._linger.cancel()
        self._end()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _greeting(self) -> bytes:
        hello = {"facts": self._facts(), "revision": self.news.revision}
        return event("hello", msgspec.json.encode(hello)) + b"".join(self._kept.values())

    def _open(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self.is_open:
            return
        self.news.begin()
        self._listen(self)
        self._tasks = [self._start(each.run()) for each in (self, self._flows, self._problems)]

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("A task for the open pages failed", exc_info=error)

        task.add_done_callback(ended)
        return task

    def _close_later(self) -> None:
        if not self._pages and self.is_open and self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(LINGER, self._end)

    def _end(self) -> None:
        self._linger = None
        self._listen(None)
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._kept.clear()
        self._pending.clear()

    async def run(self) -> None:
        """Send messages until cancelled: shortly after each event, and after IDLE seconds without an event."""
        while True:
            await wait_briefly(self._stirred, IDLE - PAUSE)
            self._stirred.clear()
            try:
                data = self._message()
            except Exception:  # an error must not end this task, because pages would show no changes
                log.exception("The message to the open pages could not be built")
            else:
                for page in self._pages:
                    page.put(data)
            await asyncio.sleep(PAUSE)

    def _message(self) -> bytes:
        troubles = self.news.troubles
        message = msgspec.json.encode(self.news.take())
        if self.news.troubles != troubles:
            self._problems.look_soon()
        pieces, self._pending = [*self._pending.values()], {}
        return b"".join([event("now", message), *pieces])
