"""Processes whose parents ended: the kernel gives them to process 1, which is the proxy in a container.

They stay zombies, for which a container has a limit, until process 1 reaps them. A credential plugin that leaves
processes behind adds some with every token. A separate init process would take memory only for this.
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
"""Seconds between two checks; a check without zombies is one system call."""


class Orphans:
    """Reaps orphans, but not our own children, which other code waits for.

    Our children are in our session, except credential plugins, which asyncio reaps at once, with a thread for each: a
    zombie that is there in two checks is no plugin.
    """

    def __init__(self) -> None:
        self._seen: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Reap orphans until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            self.reap()

    def reap(self) -> int:
        """Reap the orphans that were there at the last check too; return how many."""
        ended = frozenset(_strangers()) if _any_ended() else frozenset()
        gone = ended & self._seen
        self._seen = ended - gone
        for pid in gone:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return len(gone)


def _any_ended() -> bool:
    """Return whether any child is a zombie."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _strangers() -> Iterator[int]:
    """Yield the zombies among the children in another session."""
    ours = str(os.getpid()), str(os.getsid(0))
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                words = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if words[0] == "Z" and words[1] == ours[0] and words[3] != ours[1]:
                    yield int(entry.name)
