"""What it costs to have the kernel look through all tracked connections, to choose the cheapest way. Pure.

It has no index of them by what a proxy knows: each request walks the whole hash table. Times are those of one machine
(2 cores, Linux 6.18, 262,144 buckets); only how they compare to each other decides, which was alike on others.
"""

from __future__ import annotations

from typing import Final, NamedTuple

USUAL_BUCKETS: Final = 262_144
"""What Linux makes on a machine of more than 4 GB, and on a smaller one of more than 1 GB a quarter of it."""

# A dump locks each bucket, also an empty one: 3.7 ms for all. A deletion passes over empty ones, in 0.17 ms when the
# table is in the caches, and 1 ms when it is not; but it lets packets through after each of the others: 1.4 ms with
# 10,000 entries, where a dump takes 4.2.
_DUMPED_BUCKET: Final = 14.0  # ns
_DUMPED_ENTRY: Final = 80.0
_DELETED_BUCKET: Final = 1.2
_DELETED_ENTRY: Final = 125.0
_TAKEN_ENTRY: Final = 1200.0
"""An entry that is sent and read: 2.4 us, if it is one of UDP; at least half of them are taken for such."""


class Table(NamedTuple):
    """How large the hash table is, and how many entries there are."""

    buckets: int
    entries: int

    def deletions(self, count: int) -> float:
        """Return what so many deletions by a filter take, in nanoseconds."""
        return count * (self.buckets * _DELETED_BUCKET + self.entries * _DELETED_ENTRY)

    def dumps(self, count: int) -> float:
        """Return what so many dumps by a filter take that hardly any entry passes."""
        return count * (self.buckets * _DUMPED_BUCKET + self.entries * _DUMPED_ENTRY)

    def everything(self) -> float:
        """Return what a dump of all UDP flows takes, and reading it."""
        return self.buckets * _DUMPED_BUCKET + self.entries * _TAKEN_ENTRY
