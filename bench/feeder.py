"""Writes watch lines at a given rate, in place of an API server for `churn`; each line's trigger time is the time of
its write.

As a program it executes JSON commands (companion.py) and writes the lines to an inherited pipe.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import sys
import time

import msgspec

from bench import objects
from bench.companion import say
from bench.worker import die_with_parent

TRIGGER = "2026-01-01T00:00:00.000000+00:00"
"""The placeholder of the time; times have microseconds, which a proxy accepts, although Kubernetes sends seconds."""

_ADDRESS = "0.0.0.0"  # placeholder of the new endpoint's address
_POOL = 2000  # Services that change
_TICK = 0.001  # seconds between writes

Cut = tuple[bytes, bytes, bytes]
"""A line without the time and the address of its new endpoint."""


def prepared(size: objects.Size, seed: int = 1) -> list[Cut]:
    """Return the incomplete lines of the Services that change."""
    found = []
    for number in random.Random(seed).sample(range(size.services), min(_POOL, size.services)):
        addresses = [_ADDRESS, *objects.endpoints_of(number, size.endpoints)[1:]]
        line = objects.slice_line("MODIFIED", number, addresses, 1000, TRIGGER)
        head, _, rest = line.partition(TRIGGER.encode())
        middle, _, tail = rest.partition(_ADDRESS.encode())
        found.append((head, middle, tail))
    return found


class Feed:
    """Writes lines; every change has a new endpoint, so that no change reverts another."""

    def __init__(self, out: int, lines: list[Cut]) -> None:
        self._out = out
        self._lines = lines
        self._sent = 0

    def run(self, rate: int, seconds: float) -> int:
        """Write `rate` lines per second; return their number. The writer waits for a slow reader."""
        began, first, total = time.monotonic(), self._sent, self._sent + int(rate * seconds)
        while self._sent < total:
            due = min(total, first + int((time.monotonic() - began) * rate) + 1)
            now = dt.datetime.now(dt.UTC).isoformat(timespec="microseconds").encode()
            parts: list[bytes] = []
            for number in range(self._sent, due):
                head, middle, tail = self._lines[number % len(self._lines)]
                parts += (head, now, middle, objects.spare(number).encode(), tail)
            _write_all(self._out, b"".join(parts))
            self._sent = due
            time.sleep(_TICK)
        return total - first


def _write_all(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def main(out: str) -> None:
    """Execute commands until the parent has ended."""
    die_with_parent()
    say()
    feed = Feed(int(out), [])
    for line in sys.stdin.buffer:
        command = msgspec.json.decode(line)
        if command["do"] == "prepare":
            feed = Feed(int(out), prepared(objects.parse_size(command["size"])))
            say()
        else:
            say(sent=feed.run(command["rate"], command["seconds"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
