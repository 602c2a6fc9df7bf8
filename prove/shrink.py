"""Delta debugging: finds a small part of a list that still fails, by leaving out ever smaller pieces. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def smaller(items: Sequence[T], fails: Callable[[Sequence[T]], Awaitable[bool]]) -> list[T]:
    """Return a failing part of a list in which every piece is necessary; the whole list must fail.

    If `fails` returns False from some moment on, the search ends with the best part so far.
    """
    best = list(items)
    size = max(1, len(best) // 2)
    while best:
        at, shorter = 0, False
        while at < len(best):
            candidate = best[:at] + best[at + size :]
            if candidate != best and await fails(candidate):
                best, shorter = candidate, True
            else:
                at += size
        if size == 1 and not shorter:
            break
        size = size if shorter and size == 1 else max(1, size // 2)
    return best
