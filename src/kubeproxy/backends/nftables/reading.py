"""Found elements of our table: endpoints, the great majority, by lookups of keys; all other sets by dumps.

The time of a dump grows faster than the set (kernel/nftables/fetch.py), and a hundred thousand elements take 30 MB of
memory. So endpoints are looked up for a few hundred Services at a time. The class of a frontend gives its possible
slots; the kernel's count of elements shows whether there are more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from kubeproxy.backends.nftables.layout import (
    BELOW,
    CLASS_MAPS,
    ENDPOINT_MAPS,
    SetId,
    parse_chain_name,
    service_key,
    slot_bytes,
)
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import Elements
from kubeproxy.errors import ApplyError
from kubeproxy.model.plan import ServiceName, ServicePlan

READS: Final = 50
PAUSE: Final = 0.01  # seconds; the kernel resizes a hash table of 100,000 elements in about 0.05 s

AT_ONCE: Final = 4096
"""Number of elements compared in one batch, about 0.5 MB."""

SERVICES: Final = 256
"""Number of Services read together."""

_Named = tuple[ServiceName, tuple[ServicePlan, ...]]

_FRONTENDS: Final[Mapping[str, tuple[SetId, ...]]] = {
    SetId.ENDPOINTS: (
        SetId.CLUSTER_SERVICES,
        SetId.EXTERNAL_SERVICES,
        SetId.POLICY_LOCAL_SERVICES,
        SetId.AFFINITY_SERVICES,
    ),
    SetId.LOCAL_ENDPOINTS: (SetId.LOCAL_SERVICES, SetId.LOCAL_AFFINITY_SERVICES),
    SetId.NODEPORT_ENDPOINTS: (SetId.EXTERNAL_NODEPORTS, SetId.POLICY_LOCAL_NODEPORTS, SetId.AFFINITY_NODEPORTS),
    SetId.LOCAL_NODEPORT_ENDPOINTS: (SetId.LOCAL_NODEPORTS, SetId.LOCAL_AFFINITY_NODEPORTS),
}
"""For each endpoint map, the maps of the frontends that pick from it."""


def frontends_and_sets(table: KernelTable, names: Iterable[str]) -> Elements:
    """Return all elements of these sets; those of endpoint maps are left empty. Raises ApplyError."""
    return {name: {} if name in ENDPOINT_MAPS else _dumped(table, name) for name in names}


class EndpointReader:
    """Reads endpoint maps, the frontends of some Services at a time, and adds their elements to `actual`."""

    def __init__(self, table: KernelTable, actual: Elements) -> None:
        self._table = table
        self._actual = actual
        self._left = {name: _slots(name, actual) for name in _FRONTENDS}
        self._unread = {name: _count(table, name) for name in _FRONTENDS}  # elements

    def ahead(self, wanted: Iterable[_Named]) -> Iterator[_Named]:
        """Yield Services with their plans after reading the endpoints of their frontends. Raises ApplyError."""
        services = iter(wanted)
        while some := list(islice(services, SERVICES)):
            self._read_frontends(
                [service_key(front.key) for _, plans in some for one in plans for front in one.frontends]
            )
            yield from some

    def _read_frontends(self, keys: Sequence[bytes]) -> None:
        for name, left in self._left.items():
            self._read_slots(name, [(key, *slots) for key in keys if (slots := left.pop(key, None)) is not None])

    def read_desired(self, desired: Elements) -> None:
        """Look up desired endpoint elements not read yet: the kernel refuses to add one twice. Raises ApplyError."""
        for name in _FRONTENDS:
            actual = self._actual[name]
            if missing := [key for key in desired.get(name, ()) if key not in actual]:
                self._keep(name, self._table.lookup(name, missing))

    def rest(self, taken: Callable[[], Mapping[str, Mapping[bytes, int]]]) -> None:
        """Read the endpoints of all other frontends, and elements that belong to no frontend. Raises ApplyError.

        `taken` returns the number of used slots of each frontend, by endpoint map.
        """
        for name, left in self._left.items():
            self._read_slots(name, [(key, *slots) for key, slots in left.items()])
            if self._unread[name]:
                self._actual[name] = self._strays(name, taken().get(name, {}))

    def _strays(self, name: str, taken: Mapping[bytes, int]) -> dict[bytes, bytes]:
        """Return the elements of an endpoint map that are in no used slot. Raises ApplyError."""
        for _ in range(READS):
            found = {
                key: data
                for pairs in self._table.pairs(name)
                for key, data in pairs
                if int.from_bytes(key[-4:], "little") >= taken.get(key[:-4], 0)
            }
            if sum(taken.values()) + len(found) == _count(self._table, name):
                return found
            time.sleep(PAUSE)
        raise _torn(name)

    def _read_slots(self, name: str, asking: list[tuple[bytes, int, int]]) -> None:
        begins = dict.fromkeys([key for key, _, _ in asking], 0)
        while asking:
            keys, going_on = [], []
            for frontend, end, most in asking:
                keys += [frontend + slot for slot in slot_bytes(end)[begins[frontend] : end]]
                going_on.append((keys[-1], frontend, end, most))
            there = self._table.lookup(name, keys)
            self._keep(name, there)
            # Used slots have no gaps. Most frontends have the fewest of their class, so each round asks an eighth more.
            asking = []
            for last, frontend, end, most in going_on:
                if end < most and last in there:
                    begins[frontend] = end
                    asking.append((frontend, min(most, end + max(1, end >> 3)), most))

    def _keep(self, name: str, found: Mapping[bytes, bytes]) -> None:
        self._actual[name].update(found)
        self._unread[name] -= len(found)


def differing(table: KernelTable, names: Iterable[str], desired: Iterable[Elements]) -> str:
    """Return the first set whose elements differ from the desired ones (one item a Service), '' for none."""
    total: Elements = {}
    counts = dict.fromkeys(_FRONTENDS, 0)
    waiting: Elements = {name: {} for name in _FRONTENDS}
    for elements in desired:
        for name, entries in elements.items():
            if name not in counts:
                total.setdefault(name, {}).update(entries)
                continue
            waiting[name].update(entries)
            if len(waiting[name]) >= AT_ONCE:
                counts[name] += len(waiting[name])
                if _differs(table, name, waiting.pop(name)):
                    return name
                waiting[name] = {}
    for name, entries in waiting.items():
        if _differs(table, name, entries) or counts[name] + len(entries) != _count(table, name):
            return name
    others = (name for name in names if name not in counts)
    return next((str(name) for name in others if _dumped(table, name) != total.get(name, {})), "")


def _differs(table: KernelTable, name: str, entries: dict[bytes, bytes]) -> bool:
    return table.lookup(name, list(entries)) != entries


def _count(table: KernelTable, name: str) -> int:
    """Return the number of elements of a set, by a dump if the kernel does not report it (before Linux 6.16)."""
    counted = table.count(name)
    return counted if counted is not None else sum(map(len, table.pairs(name)))


def _dumped(table: KernelTable, name: str) -> dict[bytes, bytes]:
    """Return the elements of a set; repeat the dump while the kernel resizes the set's hash table.

    Such a dump lists some elements twice, and omits as many (nft_rhash_walk of Linux 6.18).
    """
    for _ in range(READS):
        entries: dict[bytes, bytes] = {}
        listed = 0
        for pairs in table.pairs(name):
            listed += len(pairs)
            entries.update(pairs)
        if len(entries) == listed:
            return entries
        time.sleep(PAUSE)
    raise _torn(name)


def _torn(name: str) -> ApplyError:
    return ApplyError(f"the kernel does not list the elements of {name} completely")


def _slots(name: str, actual: Elements) -> dict[bytes, tuple[int, int]]:
    """Return the minimum and maximum number of used slots of each frontend of an endpoint map."""
    found: dict[bytes, tuple[int, int]] = {}
    known: dict[tuple[SetId, bytes], tuple[int, int]] = {}
    for source in _FRONTENDS[name]:
        for key, data in actual.get(source, {}).items():
            slots = known.get((source, data))
            if slots is None:
                slots = known[source, data] = _class_slots(data) if source in CLASS_MAPS else _chain_slots(data)
            if slots[1] > found.get(key, (0, 0))[1]:
                found[key] = slots
    return found


def _class_slots(data: bytes) -> tuple[int, int]:
    most = int.from_bytes(data, "big")
    return BELOW.get(most, 0) + 1, most


def _chain_slots(data: bytes) -> tuple[int, int]:
    chain = parse_chain_name(data.decode(errors="replace"))
    return (chain.endpoints, chain.endpoints) if chain is not None else (0, 0)
