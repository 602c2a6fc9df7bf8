"""Deadlines of lists and watches: rules and clocks; watch.py applies them."""

from __future__ import annotations

import asyncio
import random

from kubeproxy.api.connection import LEAST_PROGRESS, AnswerProgress
from kubeproxy.api.decode import WatchChanges
from kubeproxy.api.source import ListPace
from kubeproxy.api.status import NoInitialEnd, OutOfStep
from kubeproxy.errors import SourceError


class Silence:
    """The seconds for which watches may be silent, all together, before the resource is listed again.

    An API server sends a bookmark each minute. None for minutes means that the watch is dead behind an open connection,
    or that the server was restored from a backup and has not reached the watched version. Silence of a server that
    sends no bookmarks proves less: the patience doubles with each list that it causes.
    """

    def __init__(self, pace: ListPace) -> None:
        self._pace = pace
        self._patience = pace.silence
        self.broken()

    def broken(self) -> None:
        """Start again after an event."""
        self.left = self._patience * random.uniform(1.0, 1.25)  # noqa: S311 - nodes shall not list together

    def broken_by_bookmark(self) -> None:
        """Start again after a bookmark: this server sends them."""
        self._patience = self._pace.silence
        self.broken()

    def passed(self, seconds: float) -> None:
        """Count the silence of a watch that ended."""
        self.left = max(0.0, self.left - seconds)

    def ran_out(self) -> None:
        """Start again after a list that silence has caused."""
        self._patience = min(2 * self._patience, self._pace.longest_silence)
        self.broken()


class StreamClock:
    """The deadline of a stream: of a list that is silent or slow, or of a silent watch."""

    def __init__(self, pace: ListPace, silence: Silence) -> None:
        self.deadline = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._quiet = pace.quiet
        self._silence = silence
        self._progress = AnswerProgress(pace.trickle, self._loop.time())
        self._silent_since: float | None = None

    def opened(self, *, listing: bool) -> None:
        """Start after the server has accepted the request."""
        if listing:
            self.deadline.reschedule(self._loop.time() + self._quiet)
        else:
            self._watch_on()

    def received(self, count: int, changes: WatchChanges, *, listing: bool) -> None:
        """Count bytes, and the changes that they completed; `listing`: the list is not complete yet."""
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
        """Stop at the end of the stream."""
        if self._silent_since is not None:
            self._silence.passed(self._loop.time() - self._silent_since)

    def error(self) -> SourceError:
        """Return the error of a deadline that has passed."""
        if self._silent_since is not None:
            silent = self._loop.time() - self._silent_since
            self._silence.ran_out()
            self._silent_since = None
            return OutOfStep(f"its watch is open, but was silent for {silent:.0f} s")
        if self._loop.time() >= self._progress.until:
            rate = f"less than {LEAST_PROGRESS} bytes in {self._progress.patience:.0f} s"
            return SourceError(f"the list arrives too slowly: {rate}")
        return NoInitialEnd(f"no end of the initial events within {self._quiet:.0f} s of silence")

    def _watch_on(self) -> None:
        self._silent_since = self._loop.time()
        self.deadline.reschedule(self._silent_since + self._silence.left)
