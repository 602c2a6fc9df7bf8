"""The question of `kube-proxy flows`: connections of Services that are open now, and those that begin in between."""

from __future__ import annotations

import time
from collections.abc import Iterator

from msgspec import Struct

from kubeproxy.ask.flows.ground import Ground
from kubeproxy.ask.flows.sampling import Sampled
from kubeproxy.ask.flows.users import Census, ServedPorts
from kubeproxy.kernel.conntrack.events import Events, announced
from kubeproxy.kernel.conntrack.tracked import ANSWERED, EVERYTHING, Tracked, Wanted, entries
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink

MOST_SILENT = 1 << 17
"""Maximum number of unanswered connections to remember; beyond it `unanswered` includes new connections."""


class Cost(Struct, frozen=True, rename="camel"):
    """The cost of a reading: `seconds` of listening, `processor_seconds` in total, and the connections read.

    If the kernel sends no announcements (`announced` is False), new connections are not counted.
    """

    seconds: float
    processor_seconds: float
    connections: int
    new: int
    left_out: int
    lost: int
    announced: bool


class Look:
    """One reading of connection tracking: the entries at its end, and the connections that began during it."""

    def __init__(self, where: Ground, served: ServedPorts) -> None:
        self._where = where
        self._census = Census(served, where.own)
        self.seconds = 0.0
        self._read = 0
        self._spent = 0.0
        self._events = (0, 0, 0)

    def take(self, seconds: float) -> None:
        """Listen for `seconds`, then read all entries. Raises ApplyError."""
        spent = time.process_time()
        with Netlink.open(NETLINK_NETFILTER) as link:
            silent = self._silent(link)
            self._listen(seconds)
            wanted = EVERYTHING if self._where.own is not None else self._where.wanted
            for entry in self._entries(link, wanted):
                self._read += 1
                unanswered = not entry.answered and (silent is None or entry.mark in silent)
                self._census.add(entry, silent=unanswered)
        self._spent = time.process_time() - spent

    def cost(self) -> Cost:
        """Return the cost of the reading."""
        return Cost(self.seconds, self._spent, self._read, *self._events, announced())

    def _entries(self, link: Netlink, wanted: Wanted) -> Iterator[Tracked]:
        for family in self._where.facts.world.families:
            yield from entries(link, family, wanted)

    def _silent(self, link: Netlink) -> frozenset[bytes] | None:
        """Return the marks of unanswered entries, None if there are too many."""
        clients = 0 if self._where.own is not None else self._where.mode.tracked_as
        found = set()
        for entry in self._entries(link, Wanted(clients, clients | ANSWERED)):
            found.add(entry.mark)
            if len(found) > MOST_SILENT:
                return None
        return frozenset(found)

    def _listen(self, seconds: float) -> None:
        began = time.monotonic()
        own = self._where.own is not None
        with Events.open(EVERYTHING if own else self._where.wanted) as events:
            sampled = Sampled(events)
            while time.monotonic() < began + seconds:
                for event, weight in sampled.for_a_while(began + seconds):
                    if not event.ended:
                        self._census.began(event.entry, weight)
            self._events = sampled.heard, sampled.left_out, sampled.lost
        self.seconds = time.monotonic() - began
