"""Limits rates (delays that double after failures, a token bucket), and runs long work without blocking the event loop:
in turns of 10 ms, or in a thread."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, ParamSpec, TypeVar

from msgspec import Struct

from kubeproxy.model.events import Event, Rejected, Upserted
from kubeproxy.model.objects import Node, ServiceCIDR
from kubeproxy.model.planner import Planner

Clock = Callable[[], float]  # returns seconds of a monotonic clock


class Backoff(Struct):
    """Delays in seconds between failed attempts: the first is `first`, and each failure doubles the delay, up to
    `slowest`. Each delay is changed at random, by up to `spread` times its length, so that nodes do not retry at the
    same time. After `healthy` seconds without a failure the next delay is `first` again. `jitter` returns numbers in
    [0, 1). `failures` is the number of consecutive failures."""

    first: float
    slowest: float
    spread: float = 0.25
    healthy: float = math.inf
    clock: Clock = time.monotonic
    jitter: Callable[[], float] = random.random
    failures: int = 0
    until: float = 0.0

    def failed(self) -> float:
        """Count a failure; return the seconds to wait."""
        now = self.clock()
        if now - self.until > self.healthy:
            self.failures = 0
        delay = min(self.slowest, self.first * 2.0 ** min(self.failures, 32))
        delay *= 1 + self.spread * (2 * self.jitter() - 1)
        self.failures += 1
        self.until = now + delay
        return delay

    def succeeded(self) -> None:
        """Make the next delay `first`."""
        self.failures = 0


class TokenBucket:
    """A token bucket with at most `burst` tokens, which gains `rate` tokens per second."""

    def __init__(self, rate: float, burst: int, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at = clock()

    def take(self) -> bool:
        """Take a token if one is available; return whether a token was taken."""
        self._refill()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def reserve(self) -> float:
        """Take a token in advance; return the seconds until the token is available."""
        self._refill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now


async def wait_briefly(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event for at most `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


P = ParamSpec("P")
T = TypeVar("T")

HOLD: Final = 0.01
"""Seconds for which work may block the event loop; health checks, watches and requests must not wait longer."""


def end_of_turn() -> float:
    """Return the time, in seconds of time.monotonic(), at which a turn that begins now ends."""
    return time.monotonic() + HOLD


async def in_turns(steps: Iterable[T]) -> AsyncIterator[T]:
    """Yield the results of steps of work; let the event loop run between turns."""
    end = end_of_turn()
    for step in steps:
        yield step
        if time.monotonic() > end:
            await asyncio.sleep(0)
            end = end_of_turn()


async def exhaust(transactions: Iterator[int]) -> None:
    """Run an iterator of transactions in a thread, because another program may hold the kernel's locks for seconds. If
    the caller is cancelled, the running transaction is completed, and no further transaction begins. At the end the
    iterator is closed, if it is a generator."""
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
    """Call a function in a thread; return its result. A cancelled caller waits for the end of the call, because a
    thread cannot be stopped, and because the caller closes the call's sockets afterwards."""
    return await _in_thread(partial(work, *args, **kwargs), lambda: None)


async def _in_thread(work: Callable[[], T], cancelled: Callable[[], None]) -> T:
    doing = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.wait([doing])
        return doing.result()
    except asyncio.CancelledError:
        cancelled()
        while not doing.done():
            with suppress(asyncio.CancelledError):  # if the caller is cancelled again, the wait continues
                await asyncio.wait([doing])
        doing.exception()  # marks the exception as retrieved
        raise
    finally:
        del doing  # breaks the reference cycle of the exception and this frame


class Intake:
    """Applies events to a planner: a few events in one turn, a long list in several turns. `reject` receives unusable
    objects and entries. Events that arrive after a list wait until the list is applied, except events of Nodes and
    ServiceCIDRs, which other parts of the program also read."""

    def __init__(self, planner: Planner, reject: Callable[[Rejected], None]) -> None:
        self._planner = planner
        self._reject = reject
        self._waiting: deque[Iterator[list[Rejected]]] = deque()  # the first iterator is running

    @property
    def is_empty(self) -> bool:
        """Whether all events have been applied to the planner."""
        return not self._waiting

    def arrive(self, events: Sequence[Event]) -> bool:
        """Apply events of Nodes and ServiceCIDRs, and queue other events; return whether any event was applied."""
        about_node = [event for event in events if _is_about_node(event)]
        if about_node:
            self._reject_all(self._planner.apply(about_node))
            events = [event for event in events if not _is_about_node(event)]
        self._waiting.append(self._planner.applying(events))
        if len(self._waiting) == 1:
            self.digest()
        return bool(about_node)

    def digest(self) -> None:
        """Apply waiting events for the duration of one turn."""
        end = end_of_turn()
        while self._waiting:
            try:
                for rejected in self._waiting[0]:
                    self._reject_all(rejected)
                    if time.monotonic() > end:
                        return
            except BaseException:
                self._waiting.popleft()
                raise
            self._waiting.popleft()

    def _reject_all(self, rejected: Sequence[Rejected]) -> None:
        for one in rejected:
            self._reject(one)


def _is_about_node(event: Event) -> bool:
    if isinstance(event, Upserted):
        return isinstance(event.object, Node | ServiceCIDR)
    return event.resource in {"nodes", "servicecidrs"}
