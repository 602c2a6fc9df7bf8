"""The speed of the interpreter: the duration of a fixed piece of Python on this machine, at this moment.

The proxy's time outside the kernel is spent in Python; its ratio to the kernel's time depends on the processor, and
changes from moment to moment. So the gate measures the proxy's own time in yardsticks of the same run.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from bench.figures import median

_ENTRIES = 30_000
_TOUCHED = 40


class _Entry(NamedTuple):
    """Like the objects of the proxy: small, many, and spread over memory."""

    address: bytes
    port: int
    name: str


class Yardstick:
    """A fixed piece of work like that of a change: it finds, creates, compares, sorts and packs objects.

    It has the size of a cluster, because a proxy's objects are outside the CPU caches as well.
    """

    def __init__(self) -> None:
        draw = random.Random(1)
        self._entries = {f"namespace-{n % 50}/service-{n}": _entry(n) for n in range(_ENTRIES)}
        names = list(self._entries)
        self._turns = [[draw.choice(names) for _ in range(_TOUCHED)] for _ in range(256)]
        self.taken: list[float] = []
        """Seconds of each measurement."""

    def measure(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Do the work once, and record its duration by `clock`, which returns seconds."""
        names = self._turns[len(self.taken) % len(self._turns)]
        began = clock()
        _work(self._entries, names)
        self.taken.append(clock() - began)

    @property
    def seconds(self) -> float:
        """Return the median of the durations. Raises ValueError before the first measurement."""
        return median(self.taken)


def _entry(number: int) -> _Entry:
    return _Entry(number.to_bytes(4, "big"), number & 0xFFFF, f"endpoint-{number}")


def _work(entries: dict[str, _Entry], names: list[str]) -> int:
    before = {name: entries[name] for name in names}
    after = {name: entry._replace(port=entry.port ^ 1) for name, entry in before.items()}
    changed = sorted(name for name, entry in after.items() if before[name] != entry)
    parts = []
    for slot, name in enumerate(changed):
        entry = after[name]
        parts.append(struct.pack(">4sHHI", entry.address, entry.port, 17, slot))
    return len(b"".join(parts))
