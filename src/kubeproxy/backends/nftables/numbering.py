"""The numbers by which the kernel knows service ports with session affinity, and lists of source ranges. Pure.

A number that had been another's would bring its clients along, so none is given twice, and who has one keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from kubeproxy.backends.nftables.layout import LARGEST_NUMBER
from kubeproxy.model.plan import ServicePortKey


def list_key(key: ServicePortKey) -> ServicePortKey:
    """Return what stands for a Service's list of source ranges, given any of its service ports: one of no protocol."""
    return key._replace(port_name="", protocol=0)


class Numbers:
    """Gives each service port a number, from 1 on: a new one, unless it had one before the table was compared."""

    def __init__(self) -> None:
        self._unused = count(1)
        self._had: dict[ServicePortKey, int] = {}
        self._taken: set[int] = set()

    def of(self, key: ServicePortKey) -> int:
        """Return the number of a service port that has none in the kernel."""
        return self._had.pop(key, 0) or next(self._unused)

    def compare(self, had: Iterable[tuple[ServicePortKey, int]]) -> None:
        """Begin to compare the table with what is wanted: service ports had these numbers.

        Those of a comparison that failed count too.
        """
        self._had.update(had)
        self._taken = set(self._had.values())

    def read(self, numbers: Iterable[int]) -> None:
        """Take note of all numbers that the kernel has: whoever is new gets larger ones."""
        usable = (number for number in numbers if number <= LARGEST_NUMBER)
        self._unused = count(max(next(self._unused), max(usable, default=0) + 1))

    def recall(self, key: ServicePortKey, number: int) -> int:
        """Return the number that a service port had, or else the one that the kernel has for it.

        That is 0 if it has none there, or what another one has, as after another program wrote it.
        """
        if key in self._had:
            return self._had.pop(key)
        if number in self._taken or number > LARGEST_NUMBER:
            return 0
        self._taken.add(number)
        return number

    def compared(self) -> None:
        """End the comparison: what is not wanted any more had its number."""
        self._had.clear()
        self._taken.clear()
