"""An event loop that resolves host names in threads of their own.

getaddrinfo(3) cannot be cancelled, and without an answering name server it takes half a minute and more. In the loop's
own threads, which are few and also do the kernel's work, it would delay repairs and the end of the program.
"""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from contextlib import suppress
from typing import Any, Final, NamedTuple

JOINED: Final = 10.0
"""Seconds for which equal questions share a lookup; then a new one begins, as the name servers may have changed."""


class _Lookup(NamedTuple):
    began: float
    found: asyncio.Future[list[Any] | Exception]


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose lookups have daemon threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lookups: dict[tuple[object, ...], _Lookup] = {}

    def looks_up(self, host: str) -> bool:
        """Return whether a lookup of a host is under way."""
        return any(question[0] == host for question in self._lookups)

    async def getaddrinfo(  # noqa: D102 - see asyncio
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - asyncio's name
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        question = (host, port, family, type, proto, flags)
        lookup = self._lookups.get(question)
        if lookup is None or self.time() - lookup.began >= JOINED:
            lookup = self._lookups[question] = _Lookup(self.time(), self.create_future())
            threading.Thread(target=self._look_up, args=(question, lookup), name="lookup", daemon=True).start()
        found = await asyncio.shield(lookup.found)
        if isinstance(found, Exception):
            raise copy.copy(found)
        return found

    def _look_up(self, question: tuple[Any, ...], lookup: _Lookup) -> None:
        found: list[Any] | Exception
        try:
            found = socket.getaddrinfo(*question)
        except (OSError, UnicodeError) as error:
            found = error.with_traceback(None)
        with suppress(RuntimeError):  # the loop is closed
            self.call_soon_threadsafe(self._answered, question, lookup, found)

    def _answered(self, question: tuple[Any, ...], lookup: _Lookup, found: list[Any] | Exception) -> None:
        lookup.found.set_result(found)
        if self._lookups.get(question) is lookup:
            del self._lookups[question]


def is_looked_up(host: str) -> bool:
    """Return whether the running loop has a lookup of a host under way."""
    loop = asyncio.get_running_loop()
    return isinstance(loop, Loop) and loop.looks_up(host)
