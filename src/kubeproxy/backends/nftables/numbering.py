"""Numbers of service ports with session affinity and of lists of source ranges in the kernel. Pure.

A reused number would inherit the clients of its former service port, so numbers are unique, and each owner keeps its.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from kubeproxy.backends.nftables.layout import LARGEST_NUMBER
from kubeproxy.model.plan import ServicePortKey


def list_key(key: ServicePortKey) -> ServicePortKey:
    """Return the key of a Service's list of source ranges, from the key of any of its service ports."""
    return key._replace(port_name="", protocol=0)


class Numbers:
    """Assigns a number to each service port, from 1 on, and keeps those in the kernel during a comparison."""

    def __init__(self) -> None:
        self._unused = count(1)
        self._had: dict[ServicePortKey, int] = {}
        self._taken: set[int] = set()

    def of(self, key: ServicePortKey) -> int:
        """Return the number of a service port without one in the kernel: its former one, or a new one."""
        return self._had.pop(key, 0) or next(self._unused)

    def compare(self, had: Iterable[tuple[ServicePortKey, int]]) -> None:
        """Begin a comparison with the kernel, with the numbers of service ports before it.

        Numbers from a comparison that failed stay valid.
        """
        self._had.update(had)
        self._taken = set(self._had.values())

    def read(self, numbers: Iterable[int]) -> None:
        """Note all numbers in the kernel: new ones will be larger."""
        usable = (number for number in numbers if number <= LARGEST_NUMBER)
        self._unused = count(max(next(self._unused), max(usable, default=0) + 1))

    def recall(self, key: ServicePortKey, number: int) -> int:
        """Return the number of a service port before the comparison, or else `number`, which the kernel has for it.

        Returns 0 if the kernel has none, or one that belongs to another service port, written by another program.
        """
        if key in self._had:
            return self._had.pop(key)
        if number in self._taken or number > LARGEST_NUMBER:
            return 0
        self._taken.add(number)
        return number

    def compared(self) -> None:
        """End the comparison, and drop the numbers of service ports that no longer exist."""
        self._had.clear()
        self._taken.clear()
