"""How long answers, lists and watches are waited for: by what they get on, not by whether anything comes.

Rules and clocks only: who waits is connection.py for an answer, watch.py for a stream.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from kubeproxy.api.decode import WatchChanges
from kubeproxy.api.source import ListPace
from kubeproxy.api.status import NoInitialEnd, OutOfStep
from kubeproxy.errors import SourceError

LEAST_PROGRESS: Final = 16 << 10
"""Bytes in which an answer that is no watch must get on, within the patience for it: 0.5 KB/s with that of http.py."""


class AnswerProgress:
    """Whether an answer gets on: its beginning, its end or LEAST_PROGRESS more bytes within `patience` seconds.

    Silence alone is no measure: a peer that sends a byte each second would hold whoever waits for ever.
    """

    __slots__ = ("_due", "least", "patience", "until")

    def __init__(self, patience: float, now: float) -> None:
        self.patience = patience
        self.least = LEAST_PROGRESS
        self.until = now + patience
        self._due = 1

    def received(self, count: int, now: float) -> None:
        """So many bytes came."""
        self._due -= count
        if self._due <= 0:
            self._due = self.least
            self.until = now + self.patience


class Silence:
    """How long watches may say nothing, in seconds, before their silence is not believed any more.

    An API server sends a bookmark each minute. None for minutes means that the watch is dead behind an open connection,
    or that the server was restored from a backup and has not reached the version from which on we watch. From servers
    that send no bookmarks silence says less: the patience doubles whenever a list had to be asked for.
    """

    def __init__(self, pace: ListPace) -> None:
        self._pace = pace
        self._patience = pace.silence
        self._left = self._draw()

    def _draw(self) -> float:
        return self._patience * random.uniform(1.0, 1.25)  # noqa: S311 - nodes shall not list together

    @property
    def left(self) -> float:
        """The seconds of silence that are left, over all watches since the last word."""
        return self._left

    def passed(self, seconds: float) -> None:
        """A watch was silent for so long, and ended."""
        self._left = max(0.0, self._left - seconds)

    def broken(self) -> None:
        """Something was said."""
        self._left = self._draw()

    def broken_by_bookmark(self) -> None:
        """The server has nothing new, and says so."""
        self._patience = self._pace.silence
        self._left = self._draw()

    def ran_out(self) -> None:
        """A list was asked for because of silence."""
        self._patience = min(2 * self._patience, self._pace.longest_silence)
        self._left = self._draw()


class StreamClock:
    """When a stream is given up: a list that is silent or trickles, or a watch that is silent for too long."""

    def __init__(self, pace: ListPace, silence: Silence) -> None:
        self.deadline = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._quiet = pace.quiet
        self._silence = silence
        self._progress = AnswerProgress(pace.trickle, self._loop.time())
        self._silent_since: float | None = None

    def opened(self, *, listing: bool) -> None:
        """The server accepted."""
        if listing:
            self.deadline.reschedule(self._loop.time() + self._quiet)
        else:
            self._watch_on()

    def received(self, count: int, changes: WatchChanges, *, listing: bool) -> None:
        """So many bytes came, which completed lines that say this; `listing` tells whether the list is still open."""
        now = self._loop.time()
        if listing:
            self._progress.received(count, now)
            self.deadline.reschedule(min(now + self._quiet, self._progress.until))
        elif changes.events or self._silent_since is None:  # or this is the end of the list
            self._silence.broken()
            self._watch_on()
        elif changes.version:
            self._silence.broken_by_bookmark()
            self._watch_on()

    def ended(self) -> None:
        """The stream is over."""
        if self._silent_since is not None:
            self._silence.passed(self._loop.time() - self._silent_since)

    def error(self) -> SourceError:
        """Return what the passing of the deadline means."""
        if self._silent_since is not None:
            silent = self._loop.time() - self._silent_since
            self._silence.ran_out()
            self._silent_since = None
            return OutOfStep(f"its watch is open, but said nothing for {silent:.0f} s")
        if self._loop.time() >= self._progress.until:
            return SourceError(
                f"the list comes too slowly: less than {self._progress.least} bytes in {self._progress.patience:.0f} s"
            )
        return NoInitialEnd(f"no end of the initial events within {self._quiet:.0f} s of silence")

    def _watch_on(self) -> None:
        self._silent_since = self._loop.time()
        self.deadline.reschedule(self._silent_since + self._silence.left)
