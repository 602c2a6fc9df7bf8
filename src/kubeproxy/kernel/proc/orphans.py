"""Processes whose parents ended: the kernel gives them to process 1, which is the proxy in a container.

Each stays a zombie, of which a container may have so many, until somebody takes its end. A credential plugin that
leaves others behind makes some with every token. An init before the proxy would take memory for nothing else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from kubeproxy.kernel.proc.processes import PROC

INIT: Final = 1
LOOK: Final = 2.0
"""Seconds between two looks; one without any zombie is a system call."""


class Orphans:
    """Tells orphans from our own children, whose end is for those that wait for them.

    Our children are in our session. Credential plugins are not, and are waited for at once when they end (asyncio has a
    thread for each): what was there two looks before is no plugin.
    """

    def __init__(self) -> None:
        self._seen: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Take the ends of orphans, until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            self.reap()

    def reap(self) -> int:
        """Take the ends of orphans that were there at the look before; return how many."""
        ended = frozenset(_strangers()) if _any_ended() else frozenset()
        gone = ended & self._seen
        self._seen = ended - gone
        for pid in gone:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return len(gone)


def _any_ended() -> bool:
    """Return whether any child ended whose end nobody has taken."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _strangers() -> Iterator[int]:
    """Yield the children of another session than ours that ended."""
    ours = str(os.getpid()), str(os.getsid(0))
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                words = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if words[0] == "Z" and words[1] == ours[0] and words[3] != ours[1]:
                    yield int(entry.name)
