"""How far a full sync is, for who watches a large cluster come up: in the log, and in what systemd shows."""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Final, Self

from kubeproxy.backends.mode import Backend

log = logging.getLogger("kubeproxy.engine")

EVERY: Final = 5.0
"""Seconds of a full sync before the first word, and between two."""


class Progress:
    """A full sync of one family that is under way, of so many Services; as a context, it is told of in the log."""

    def __init__(self, backend: Backend, services: int) -> None:
        self._backend = backend
        self._services = services
        self._began = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def __str__(self) -> str:
        """Return it as people read it."""
        done = self._programmed()
        of = f"{self._services:,} Services" if done is None else f"{done:,} of {self._services:,} Services"
        return f"Programming {of}, {self._backend.family.label}"

    def __enter__(self) -> Self:
        """Tell of it from now on."""
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._tell)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Tell of it no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _programmed(self) -> int | None:
        programmed = self._backend.abilities.programmed
        return min(programmed(), self._services) if programmed else None

    def _tell(self) -> None:
        seconds = time.monotonic() - self._began
        log.info("%s seconds=%.0f", self, seconds)
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._tell)
