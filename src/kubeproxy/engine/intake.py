"""Events on their way into the planner: few at once, a long list bit by bit. Knows no loop.

Whatever comes after a list waits for its turn, except the Node and the ServiceCIDRs, which others than the engine look
at.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kubeproxy.engine.turns import end_of_turn
from kubeproxy.model.events import Event, Rejected, Upserted
from kubeproxy.model.objects import Node, ServiceCIDR
from kubeproxy.model.planner import Planner


class Intake:
    """Feeds a planner; `reject` gets what cannot be used."""

    def __init__(self, planner: Planner, reject: Callable[[Rejected], None]) -> None:
        self._planner = planner
        self._reject = reject
        self._waiting: deque[Iterator[list[Rejected]]] = deque()  # the first is being taken in

    @property
    def is_empty(self) -> bool:
        """Return whether everything that arrived is in the planner."""
        return not self._waiting

    def arrive(self, events: Sequence[Event]) -> bool:
        """Take events in, or have them wait; return whether some concern the node, which never wait."""
        about_node = [event for event in events if _is_about_node(event)]
        if about_node:
            self._reject_all(self._planner.apply(about_node))
            events = [event for event in events if not _is_about_node(event)]
        self._waiting.append(self._planner.applying(events))
        if len(self._waiting) == 1:
            self.digest()
        return bool(about_node)

    def digest(self) -> None:
        """Take in what waits, for one turn at the loop."""
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
    """Return whether an event may change what holds for all Services."""
    if isinstance(event, Upserted):
        return isinstance(event.object, Node | ServiceCIDR)
    return event.resource in {"nodes", "servicecidrs"}
