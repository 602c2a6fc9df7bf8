"""How long pieces of work share the event loop with everybody else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

HOLD: Final = 0.01
"""Seconds that a long piece of work may hold the event loop at a time: 44,000 Services are seconds of work, and health,
watches and other programs' questions must not wait for that."""


def end_of_turn() -> float:
    """Return when a turn at the event loop that begins now is over, on time.monotonic()."""
    return time.monotonic() + HOLD


async def in_turns(steps: Iterable[T]) -> AsyncIterator[T]:
    """Yield from steps of work, letting the loop run whenever it was held long enough."""
    end = end_of_turn()
    for step in steps:
        yield step
        if time.monotonic() > end:
            await asyncio.sleep(0)
            end = end_of_turn()


async def exhaust(transactions: Iterator[int]) -> None:
    """Commit one transaction after the other, in a thread: another program may hold the kernel's locks for seconds.

    Who is cancelled waits for the transaction that is under way, and leaves none half done: what a generator does at
    its end, it has done.
    """
    stopped = threading.Event()

    def commit() -> None:
        try:
            for _ in transactions:
                if stopped.is_set():
                    return
        finally:
            if isinstance(transactions, Generator):
                transactions.close()

    await _in_thread(commit, stopped.set)


async def to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do in a thread what speaks to the kernel. Who is cancelled waits for its end all the same.

    A thread cannot be stopped, and what it works with, sockets and other threads, is closed when nobody waits any more.
    """
    return await _in_thread(partial(work, *args, **kwargs), lambda: None)


async def _in_thread(work: Callable[[], T], cancelled: Callable[[], None]) -> T:
    doing = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.wait([doing])
        return doing.result()
    except asyncio.CancelledError:
        cancelled()
        while not doing.done():
            with suppress(asyncio.CancelledError):  # once more: it is on its way already
                await asyncio.wait([doing])
        doing.exception()  # nobody else asks for it
        raise
    finally:
        del doing  # an error's traceback has this frame, and this the error
