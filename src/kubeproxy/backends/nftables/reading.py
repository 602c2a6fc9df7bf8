"""Reads the elements of our table back: endpoints, which nearly all are, by their keys, what leads to them by dumps.

A dump takes longer for each element the larger the set is (kernel/nft_fetch.py). Which endpoints a frontend may have
follows from its class; that no others are there shows in how many elements the kernel counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from kubeproxy.backends.nftables.layout import BELOW, CLASS_MAPS, ENDPOINT_MAPS, SetId, parse_chain_name, slot_bytes
from kubeproxy.backends.nftables.render import Elements
from kubeproxy.backends.nftables.table import Table
from kubeproxy.errors import ApplyError

READS: Final = 50
PAUSE: Final = 0.01  # seconds; resizing a hash table of 100,000 elements takes some 0.05

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
"""Where the frontends are that pick from a map of endpoints."""


def elements(table: Table, names: Iterable[str]) -> Elements:
    """Return all elements of these sets. Raises ApplyError."""
    wanted = list(names)
    read = {name: _dumped(table, name) for name in wanted if name not in ENDPOINT_MAPS}
    found: Elements = {}
    for name in wanted:
        by_key = _by_key(table, name, read) if name in ENDPOINT_MAPS else read[name]
        found[name] = _dumped(table, name) if by_key is None else by_key
    return found


def _dumped(table: Table, name: str) -> dict[bytes, bytes]:
    """Return the elements of a set, read again while the kernel's hash table is being resized.

    Such a dump counts entries, not keys: it lists some twice and as many not at all (nft_rhash_walk of Linux 6.18).
    """
    for _ in range(READS):
        listed, entries = table.contents(name)
        if len(entries) == listed:
            return entries
        time.sleep(PAUSE)
    raise ApplyError(f"the kernel does not list the elements of {name} completely")


def _by_key(table: Table, name: str, read: Elements) -> dict[bytes, bytes] | None:
    """Return the elements of a map of endpoints, None when those of its frontends are not all that it has."""
    count = table.count(name)
    if count is None:
        return None
    found: dict[bytes, bytes] = {}
    asking = list(_frontends(name, read))
    while asking and len(found) < count:
        keys, going_on = [], []
        for frontend, begin, end, most in asking:
            keys += [frontend + slot for slot in slot_bytes(end)[begin:end]]
            going_on.append((keys[-1], frontend, end, most))
        there = table.lookup(name, keys)
        found.update(there)
        # Slots are taken without a gap; an eighth more is asked for at a time, as most have no more than they must.
        asking = [
            (frontend, end, min(most, end + max(1, end >> 3)), most)
            for last, frontend, end, most in going_on
            if end < most and last in there
        ]
    return found if len(found) == count else None


def _frontends(name: str, read: Elements) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield the frontends that pick from a map: key, first slot, where those end that are taken, and that may be."""
    for source in _FRONTENDS[name]:
        is_class = source in CLASS_MAPS
        for key, data in read.get(source, {}).items():
            if is_class:
                most = int.from_bytes(data, "big")
                certain = BELOW.get(most, 0) + 1
            else:
                chain = parse_chain_name(data.decode(errors="replace"))
                certain = most = chain.endpoints if chain is not None else 0
            if most:
                yield key, 0, certain, most
