"""How long pieces of work share the event loop with everybody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import suppress
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


async def exhaust(transactions: Iterator[int], *, in_thread: bool) -> None:
    """Commit one transaction after the other, letting the loop run in between.

    What may wait for long is done in a thread, so that health is answered meanwhile. Who is cancelled leaves no
    transactions half done: what a generator does at its end, it has done.
    """
    try:
        if in_thread:
            while await to_its_end(next, transactions, None) is not None:
                pass
            return
        next(transactions, None)
        for _ in transactions:
            await asyncio.sleep(0)
    finally:
        if isinstance(transactions, Generator):
            transactions.close()


async def to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do in a thread what speaks to the kernel. Who is cancelled waits for its end all the same.

    A thread cannot be stopped, and what it works with, sockets and other threads, is closed when nobody waits any more.
    """
    doing = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs))
    try:
        await asyncio.wait([doing])
        return doing.result()
    except asyncio.CancelledError:
        while not doing.done():
            with suppress(asyncio.CancelledError):  # once more: it is on its way already
                await asyncio.wait([doing])
        doing.exception()  # nobody else asks for it
        raise
    finally:
        del doing  # an error's traceback has this frame, and this the error
