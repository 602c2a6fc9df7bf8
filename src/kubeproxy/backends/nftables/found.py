"""Reads the elements of our table from the kernel, and derives the slots and identifying numbers of each plan. Writes
nothing.

Elements of endpoints are read by key, for a few hundred Services at a time; all other sets are read by dumps. Endpoints
are not read by dumps, because the time of a dump grows faster than the set (kernel/nftables/fetch.py), and 100,000
dumped elements take 30 MB of memory. The class of a frontend or pool determines its possible slots. If the kernel
counts more elements than were found in these slots, other elements exist."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Final

from kubeproxy.backends.nftables import layout
from kubeproxy.backends.nftables.layout import SetId, pool_number, service_key, service_port_number, slot_keys
from kubeproxy.backends.nftables.packing import Users
from kubeproxy.backends.nftables.render import Identities, Numbers, Parts, Placed, list_key
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import Difference, Elements, NamedPlans, diff
from kubeproxy.errors import ApplyError
from kubeproxy.model.plan import FrontendKind, Policy, Pool, ServiceName, ServicePlan

READS: Final = 50
PAUSE: Final = 0.01  # seconds between dumps; the kernel resizes a hash table of 100,000 elements in about 0.05 s

SERVICES: Final = 256
"""Number of Services read together."""


def _kind(name: SetId) -> tuple[bool, bool]:
    return name.startswith("local-"), "nodeport" in name


_FRONTENDS: Final[dict[str, tuple[SetId, ...]]] = {
    SetId.SESSION_SLOTS: (SetId.SESSION_CLASSES,),
    **{
        endpoints: tuple(name for name in (*layout.CLASS_MAPS, *layout.VERDICT_MAPS) if _kind(name) == _kind(endpoints))
        for endpoints in layout.ENDPOINT_MAPS
    },
}
"""For each map with keys that end with a slot: the maps of the frontends or pools that use these slots."""

_OF_POOLS: Final = (SetId.SESSION_SLOTS, SetId.SESSION_ENDPOINTS)
_READ_BY_KEY: Final[Sequence[str]] = (*layout.ENDPOINT_MAPS, *_OF_POOLS)
_NONE: Final = repeat(None)


def numbers(actual: Elements) -> Iterator[int]:
    """Yield the numbers in the kernel that identify service ports, lists of source ranges, and endpoints with session
    affinity."""
    for numbered in (*layout.NUMBER_MAPS, *layout.RANGE_MAPS):
        yield from map(service_port_number, actual.get(numbered, {}).values())
    # While the kernel contains source ranges with a list's number, the number is not free, even if no frontend refers
    # to the list. Otherwise a new list with this number would get ranges that another program added.
    for key in actual[SetId.FIREWALL_ALLOW]:
        yield service_port_number(key[: len(key) // 4])
    for packed in {*actual[SetId.SESSION_SLOTS].values(), *(key[:-4] for key in actual[SetId.SESSION_ENDPOINTS])}:
        yield int.from_bytes(packed, "big")


def ranges_by_list(actual: Elements) -> dict[bytes, list[bytes]]:
    """Return the element keys of the allowed source ranges by their list's packed number."""
    ranges: dict[bytes, list[bytes]] = {}
    for key in actual[SetId.FIREWALL_ALLOW]:
        ranges.setdefault(key[: len(key) // 4], []).append(key)
    return ranges


def recall(plan: ServicePlan, actual: Elements, known: Numbers) -> Placed:
    """Return a plan with the slots and numbers that its endpoints have in the kernel. An element of the returned plan
    differs from the kernel's element only if a resync must write the element."""
    cluster: Pool = ()
    local: Pool = ()
    endpoints: Identities = {}
    for frontend in plan.frontends:
        nodeport, key = not frontend.address, service_key(frontend.key)
        wide = actual[SetId.NODEPORT_ENDPOINTS if nodeport else SetId.ENDPOINTS]
        # With internalTrafficPolicy Local a cluster IP picks from the local pool, which is in the map `endpoints`.
        if frontend.kind is FrontendKind.CLUSTER and plan.policies.internal is Policy.LOCAL:
            local = local or _in_slots(wide, key, len(plan.local))
        else:
            cluster = cluster or _in_slots(wide, key, len(plan.cluster))
        near = actual[SetId.LOCAL_NODEPORT_ENDPOINTS if nodeport else SetId.LOCAL_ENDPOINTS]
        local = local or _in_slots(near, key, len(plan.local))
    number = ranges = 0
    if plan.source_ranges is not None:
        ranges = known.recall(
            list_key(plan.key), _number(plan, (SetId.FIREWALL_LISTS,), (SetId.FIREWALL_RANGES,), actual)
        )
    if plan.numbered and (
        number := known.recall(plan.key, _number(plan, layout.POOL_MAPS, layout.RANGE_POOLS, actual))
    ):
        pools, endpoints = _sticky(plan, number, actual, known)
        cluster, local = pools[Policy.CLUSTER] or cluster, pools[Policy.LOCAL] or local
    return Placed(plan, cluster, local, number, ranges, endpoints=endpoints)


def _sticky(
    plan: ServicePlan, number: int, actual: Elements, known: Numbers
) -> tuple[Mapping[Policy, Pool], Identities]:
    slots, owners = actual[SetId.SESSION_SLOTS], actual[SetId.SESSION_ENDPOINTS]
    protocol = layout.protocol_field(plan.key.protocol)
    pools, endpoints = {}, {}

    def owner(packed: bytes) -> bytes:
        return owners.get(packed + protocol, b"")[:-2]

    for policy, likely in ((Policy.CLUSTER, plan.cluster), (Policy.LOCAL, plan.local)):
        there = _in_slots(slots, pool_number(number, policy, plan.key.family), len(likely), 0)
        # An endpoint number without a destination leaves a free slot, which `render.assign` fills.
        pools[policy] = pool = tuple(map(owner, there))
        found = dict(zip(pool, there, strict=True))
        found.pop(b"", None)
        endpoints[policy] = known.recall_endpoints(plan.key, policy, found, owner)
    return pools, endpoints


def _number(plan: ServicePlan, maps: Iterable[SetId], intervals: Iterable[SetId], actual: Elements) -> int:
    """Return the number that `maps` contain for a frontend of a plan, or that `intervals` contain for one of the plan's
    ranges of ports; 0 if there is no number."""
    found = [actual[name].get(service_key(front.key), b"") for front in plan.frontends for name in maps]
    found += [actual.get(name, {}).get(layout.range_key(span), b"") for span in plan.port_ranges for name in intervals]
    return next(filter(None, map(service_port_number, found)), 0)


def _in_slots(entries: dict[bytes, bytes], key: bytes, likely: int, padding: int = 2) -> Pool:
    """Return the entries of a pool up to its first free slot, without padding; `likely` is the expected number of
    entries."""
    there = list(map(entries.get, slot_keys(key, likely + 1)))
    while None not in there:
        there.append(entries.get(key + layout.slot_bytes(len(there) + 1)[len(there)]))
    return tuple([entry[: len(entry) - padding] for entry in there[: there.index(None)] if entry])


class FoundElements:
    """Found elements of some sets and maps. Elements of endpoints are read for some Services at a time. Raises
    ApplyError. `left` contains the elements that were read and that no Service has needed yet."""

    def __init__(self, table: KernelTable, names: Iterable[str]) -> None:
        self.left: Elements = {name: {} if name in _READ_BY_KEY else _dumped(table, name) for name in names}
        self._table = table
        self._ranges = ranges_by_list(self.left)
        self._frontends = {name: _slots(name, self.left) for name in _FRONTENDS}
        for pool in chain.from_iterable(self.left[name].values() for name in layout.POOL_MAPS):
            # If the kernel has no class for a pool, the pool may have any number of slots.
            self._frontends[SetId.SESSION_SLOTS].setdefault(pool, (1, layout.CLASSES[-1]))
        self._taken = dict.fromkeys(_READ_BY_KEY, 0)  # number of elements that Services need

    def numbers(self) -> Iterator[int]:
        """Yield the numbers in the kernel: see `numbers`. Dumps of endpoint numbers are not stored."""
        yield from numbers(self.left)
        for pairs in self._table.pairs(SetId.SESSION_SLOTS):
            yield from (int.from_bytes(number, "big") for _, number in pairs)
        for pairs in self._table.pairs(SetId.SESSION_ENDPOINTS):
            yield from (int.from_bytes(key[:-4], "big") for key, _ in pairs)

    def take(self, desired: Parts) -> Difference[str, bytes, bytes]:
        """Return the elements to write for a Service, and remove its elements from `left`. Raises ApplyError."""
        present: Elements = {}
        wanted: Elements = {}
        for set_id, entries in desired.elements.items():
            take = self.left[set_id].get if set_id in layout.SHARED else self.left[set_id].pop
            found = {key: data for key in entries if (data := take(key, None)) is not None}
            if found != entries:
                present[set_id], wanted[set_id] = found, entries
            if set_id in self._taken:
                self._taken[set_id] += len(entries)
        for (set_id, key), pool in desired.pools.items():
            self._taken[set_id] += len(pool)
            keys = slot_keys(key, len(pool))
            there = list(map(self.left[set_id].pop, keys, _NONE))
            slots = [entry + layout.PADDING[set_id] for entry in pool]
            if there != slots:
                found = {slot: data for slot, data in zip(keys, there, strict=True) if data is not None}
                present.setdefault(set_id, {}).update(found)
                wanted.setdefault(set_id, {}).update(zip(keys, slots, strict=True))
        for name in wanted.keys() & self._taken.keys():
            # The kernel refuses an element that exists, so desired elements that were not read yet are looked up first.
            more = self._table.lookup(name, [key for key in wanted[name] if key not in present[name]])
            present[name].update(more)
        # The kernel refuses overlapping ranges in a list, so the same transaction removes unplanned ranges.
        for number in set(desired.elements.get(SetId.FIREWALL_LISTS, {}).values()):
            for span in self._ranges.get(number, ()):
                if self.left[SetId.FIREWALL_ALLOW].pop(span, None) is not None:
                    present.setdefault(SetId.FIREWALL_ALLOW, {})[span] = b""
        for name in desired.elements.keys() & layout.INTERVALS:
            # The kernel also refuses overlapping ranges of ports. Other Services may have ranges at the same address.
            spans = desired.elements[name]
            for key in [key for key in self.left[name] if any(overlapping(key, span) for span in spans)]:
                present.setdefault(name, {})[key] = self.left[name].pop(key)
        return diff(present, wanted)

    def ahead(self, wanted: Iterable[NamedPlans]) -> Iterator[NamedPlans]:
        """Yield Services with their plans, after the endpoints of their frontends are read. Raises ApplyError."""
        services = iter(wanted)
        while some := list(islice(services, SERVICES)):
            plans = [plan for _, its in some for plan in its]
            pools: dict[bytes, set[bytes]] = {}  # key: a pool's number; value: protocols of its endpoints
            for plan in plans:
                if plan.numbered and (number := _number(plan, layout.POOL_MAPS, layout.RANGE_POOLS, self.left)):
                    for policy in Policy:
                        pool = pool_number(number, policy, plan.key.family)
                        pools.setdefault(pool, set()).add(layout.protocol_field(plan.key.protocol))
            keys = [*(service_key(front.key) for plan in plans for front in plan.frontends), *pools]
            for name, unread in self._frontends.items():
                self._read_slots(name, [(key, *slots) for key in keys if (slots := unread.pop(key, None)) is not None])
            in_slots = self.left[SetId.SESSION_SLOTS].items()
            endpoints = {packed + protocol for key, packed in in_slots for protocol in pools.get(key[:-4], ())}
            left = self.left[SetId.SESSION_ENDPOINTS]
            left |= self._table.lookup(SetId.SESSION_ENDPOINTS, list(endpoints))
            yield from some

    def rest(self, services: Iterable[Iterable[Placed]]) -> None:
        """Read the endpoints of frontends that belong to none of these Services, and elements without a frontend."""
        for endpoint_map in layout.ENDPOINT_MAPS:
            frontends = self._frontends[endpoint_map].items()
            self._read_slots(endpoint_map, [(key, *slots) for key, slots in frontends])
        for of_pools in _OF_POOLS:
            # If another program wrote the number of a pool for two frontends, `left` also contains elements that
            # Services already took.
            self.left[of_pools] = {}
        unsure = [name for name, count in self._taken.items() if count + len(self.left[name]) != self._count(name)]
        # The value is the number of used slots if the key is a frontend or pool, and 1 if the key is an endpoint's
        # number.
        taken: dict[str, dict[bytes, int]] = {str(name): {} for name in _READ_BY_KEY}
        for parts in map(Parts, services) if unsure else ():
            for (name, key), pool in parts.pools.items():
                taken[name][key] = len(pool)
            taken[SetId.SESSION_ENDPOINTS] |= dict.fromkeys(parts.elements.get(SetId.SESSION_ENDPOINTS, ()), 1)
        for unread in unsure:
            self.left[unread] = self._unowned(unread, taken[unread])

    def first_difference(self, services: Mapping[ServiceName, tuple[Placed, ...]], users: Users) -> str:
        """Return the name of the first set with other elements than these Services need; '' if there is no such set.
        Raises ApplyError. `users` contains the number of Services that use each shared element."""
        for name, _ in self.ahead((name, tuple([item.plan for item in its])) for name, its in services.items()):
            delta = self.take(Parts(services[name]))
            if any(delta):
                return next(iter(delta.removed or delta.added))
        shared = {name: entries.keys() for name, entries in users.items()}
        extra = (
            set_id
            for set_id, left in self.left.items()
            if left.keys() - shared.get(set_id, ()) or self._taken.get(set_id) not in {None, self._count(set_id)}
        )
        return next(extra, "")

    def _count(self, name: str) -> int:
        counted = self._table.count(name)
        return counted if counted is not None else sum(map(len, self._table.pairs(name)))

    def _unowned(self, name: str, taken: Mapping[bytes, int]) -> dict[bytes, bytes]:
        for _ in range(READS):
            found = {
                key: data
                for pairs in self._table.pairs(name)
                for key, data in pairs
                if key not in taken and int.from_bytes(key[-4:], "little") >= taken.get(key[:-4], 0)
            }
            if sum(taken.values()) + len(found) == self._count(name):
                return found
            time.sleep(PAUSE)
        raise _torn(name)

    def _read_slots(self, name: str, asking: list[tuple[bytes, int, int]]) -> None:
        begins = dict.fromkeys([key for key, _, _ in asking], 0)
        while asking:
            keys, going_on = [], []
            for frontend, end, most in asking:
                keys += [frontend + slot for slot in layout.slot_bytes(end)[begins[frontend] : end]]
                going_on.append((keys[-1], frontend, end, most))
            there = self._table.lookup(name, keys)
            self.left[name].update(there)
            # Used slots have no gaps. Most frontends use few slots above the minimum of their class, so each round
            # looks up an eighth more slots than the round before.
            asking = []
            for last, frontend, end, most in going_on:
                if end < most and last in there:
                    begins[frontend] = end
                    asking.append((frontend, min(most, end + max(1, end >> 3)), most))


def overlapping(one: bytes, other: bytes) -> bool:
    """Return whether two intervals have a value in common. An interval is packed as its first value and its last
    value."""
    half = len(one) // 2
    return one[:half] <= other[half:] and other[:half] <= one[half:]


def _dumped(table: KernelTable, name: str) -> dict[bytes, bytes]:
    """Return the elements of a set; repeat the dump while the kernel resizes the set's hash table. A dump during a
    resize lists some elements twice, and omits equally many (nft_rhash_walk of Linux 6.18)."""
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
    found: dict[bytes, tuple[int, int]] = {}
    known: dict[tuple[SetId, bytes], tuple[int, int]] = {}
    for source in _FRONTENDS[name]:
        for key, data in actual.get(source, {}).items():
            slots = known.get((source, data))
            if slots is None and source in layout.VERDICT_MAPS:
                chain_name = layout.parse_chain_name(data.decode(errors="replace"))
                slots = (chain_name.size, chain_name.size) if chain_name is not None else (0, 0)
            elif slots is None:
                most = int.from_bytes(data, "big")
                slots = layout.BELOW.get(most, 0) + 1, most
            known[source, data] = slots
            if slots[1] > found.get(key, (0, 0))[1]:
                found[key] = slots
    return found
