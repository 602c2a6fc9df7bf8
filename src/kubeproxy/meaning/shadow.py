"""Finds lasting differences between two changing rulesets, by repeated comparisons. A proxy needs a moment to
write a change, so a difference counts only if it lasts longer than a grace period; a shorter difference is
transient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.meaning.compare import FirstPacket, Shares, Witness
from kubeproxy.model.addresses import Family


class FamilyDifference(NamedTuple):
    """Packets of a family with different outcomes in the two rulesets."""

    family: Family
    witness: Witness

    @property
    def identity(self) -> tuple[Family, FirstPacket, Shares]:
        """The packet with its present outcome in the first ruleset. Each late write of a slow proxy changes it. The
        same outcome after the grace period therefore means that a proxy has not written, or has written wrong rules."""
        return self.family, self.witness.packet, self.witness.first


class Episode(Struct, eq=False):
    """A period in which every comparison found a difference. Times are in seconds of a monotonic clock."""

    difference: FamilyDifference  # the difference in the last comparison
    first: float
    last: float
    lasts: bool = False  # the difference has lasted longer than the grace period
    ended: bool = False
    declared: str = ""  # the reason why the difference is intended; '' if it is not intended


class Shadow:
    """Finds the differences that last. `lasted` has the lasting episodes; `transient` is the number of shorter
    episodes."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._open: dict[object, Episode] = {}
        self.lasted: list[Episode] = []
        self.transient = 0

    @property
    def undecided(self) -> int:
        """The number of present differences that may still be transient."""
        return sum(not each.lasts for each in self._open.values())

    def decides(self, now: float) -> bool:
        """Return whether a comparison at `now` can decide that a difference lasts."""
        return any(not each.lasts and now - each.first > self._grace for each in self._open.values())

    def compared(self, now: float, found: Iterable[FamilyDifference]) -> list[Episode]:
        """Add all differences of a comparison at `now`; return the episodes that became lasting, and the lasting
        episodes that ended."""
        present = {each.identity: each for each in found}
        news = []
        for identity in [each for each in self._open if each not in present]:
            episode = self._open.pop(identity)
            episode.ended = True
            self.transient += not episode.lasts
            news += [episode] if episode.lasts else []
        for identity, difference in present.items():
            episode = self._open.setdefault(identity, Episode(difference, now, now))
            episode.difference, episode.last = difference, now
            if not episode.lasts and now - episode.first > self._grace:
                episode.lasts = True
                self.lasted.append(episode)
                news.append(episode)
        return news

    def interrupt(self) -> None:
        """Discard undecided differences: the objects were outdated, and the proxies receive the new objects one after
        the other."""
        self._open = {identity: each for identity, each in self._open.items() if each.lasts}
