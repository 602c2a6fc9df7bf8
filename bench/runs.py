"""What every benchmark is given: how long it may take, who the peer is, and how measurements are started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import worker


class Run:
    """One call of `python -m bench`."""

    def __init__(
        self, quick: bool, progress: Callable[[str], None], peer: str | None = None, peer_mode: str = "nftables"
    ) -> None:
        self.quick = quick
        self.peer = peer
        self.peer_mode = peer_mode
        self._progress = progress

    def measure(self, what: str, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run one measurement in a process of its own, telling the user what it is."""
        self._progress(what)
        return worker.measure(function, **arguments)
