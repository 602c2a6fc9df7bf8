"""The parameters of every benchmark: its extent, the peer, and functions that start measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from bench import worker

Kind = TypeVar("Kind")


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
        """Run one measurement in a separate process, and show its description to the user."""
        self._progress(what)
        return worker.measure(function, **arguments)

    def in_turns(
        self, kinds: Iterable[Kind], count: int, once: Callable[[Kind, str], dict[str, float]], case: str = ""
    ) -> dict[Kind, list[dict[str, float]]]:
        """Measure several kinds `count` times in turns, so that disturbances by the machine affect them alike.

        `once` measures a kind; its second argument is the description for the user.
        """
        runs: dict[Kind, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for turn in range(count):
            for kind, found in runs.items():
                found.append(once(kind, f"{case} {kind}, run {turn + 1}/{count}".lstrip()))
        return runs
