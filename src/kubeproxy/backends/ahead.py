"""Commits one batch in a thread while the caller computes the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

Work = TypeVar("Work")


class Ahead(Generic[Work]):
    """Commits batches in a separate thread while the caller continues, because a system call releases the interpreter
    lock. A context manager. At each yield, and at the end, no commit is in progress."""

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
        """Wait for the previous batch and yield its result; start to commit the next batch. Raises ApplyError."""
        yield from self.settled()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        self._running = self._thread.submit(self._commit, work)

    def settled(self) -> Iterator[int]:
        """Wait for the commit in progress, if any; yield its result. Raises ApplyError."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            result = running.result()
        finally:
            # An error's traceback refers to this frame. A reference from the frame to the error would keep the batch in
            # memory.
            del running
        yield result
