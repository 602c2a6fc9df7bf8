"""What is wrong with a source at the moment, said in the log when it changes and once a minute while it lasts.

Kept as text, so that readiness, /statusz and the log give the same reason. Knows no cause and no remedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

REPEAT: Final = 60.0
"""Seconds after which the same trouble is said again: who looks at the end of a log must find it there."""


class Trouble:
    """One trouble at a time. `say` gets the text to log; `clock` gives seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.text = ""
        self._say = say
        self._clock = clock
        self._since = 0.0
        self._said_at = 0.0

    def met(self, text: str) -> None:
        """Take note of a trouble, met just now; every failed attempt may call this."""
        now = self._clock()
        if text != self.text:
            if not self.text:
                self._since = now
            self.text = text
            self._said_at = now
            self._say(text)
        elif now - self._said_at >= REPEAT:
            self._said_at = now
            self._say(f"{text} (for {now - self._since:.0f} s now)")

    def over(self) -> bool:
        """Forget it; return whether there was one."""
        was, self.text = bool(self.text), ""
        return was
