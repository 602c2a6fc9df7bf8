"""Committing one piece of work while the next one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

Work = TypeVar("Work")


class Ahead(Generic[Work]):
    """Commits in a thread of its own while the caller goes on: the kernel works without our interpreter.

    A context manager. Whenever it yields, and at its end, nothing is under way. No thread before the first commit.
    """

    def __init__(self, commit: Callable[[Work], int]) -> None:
        self._commit = commit
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def commit(self, work: Work) -> Iterator[int]:
        """Start to commit a piece of work; yield what the one before it, done by then, came to. Raises ApplyError."""
        yield from self.settled()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        self._running = self._thread.submit(self._commit, work)

    def settled(self) -> Iterator[int]:
        """Wait for what is under way; yield what it came to. Raises ApplyError."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            result = running.result()
        finally:
            # An error's traceback has this frame: with a way back to the error, what was to be committed would stay.
            del running
        yield result
