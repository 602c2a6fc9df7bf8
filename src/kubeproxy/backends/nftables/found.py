"""Found elements of our table, and the slots and numbers that plans already have there. Reads only.

The elements of endpoints, which are by far the most, are read by lookups of keys, for a few hundred Services at a time.
All other sets are read by dumps. Endpoints are not dumped, because the time of a dump grows faster than the set
(kernel/nftables/fetch.py), and a hundred thousand elements take 30 MB of memory. The class of a frontend gives its
possible slots; the kernel's count of elements shows whether there are further elements.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Final

from kubeproxy.backends.nftables.layout import (
    BELOW,
    CLASS_MAPS,
    ENDPOINT_MAPS,
    NUMBER_MAPS,
    PADDING,
    POOL_MAPS,
    SHARED,
    SetId,
    parse_chain_name,
    pool_number,
    protocol_field,
    service_key,
    service_port_number,
    slot_bytes,
    slot_keys,
)
from kubeproxy.backends.nftables.packing import Users
from kubeproxy.backends.nftables.render import Identities, Numbers, Parts, Placed, list_key
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import Difference, Elements, diff
from kubeproxy.errors import ApplyError
from kubeproxy.model.plan import FrontendKind, Policy, Pool, ServiceName, ServicePlan

READS: Final = 50
PAUSE: Final = 0.01  # seconds between dumps; the kernel resizes a hash table of 100,000 elements in about 0.05 s

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

_NONE: Final = repeat(None)


def numbers(actual: Elements) -> Iterator[int]:
    """Yield the numbers that service ports, lists of source ranges and endpoints with affinity have in the kernel."""
    for numbered in NUMBER_MAPS:
        yield from map(service_port_number, actual[numbered].values())
    # A new list with a number in use would get the ranges that another program added under this number.
    for key in actual[SetId.FIREWALL_ALLOW]:
        yield service_port_number(key[: len(key) // 4])
    for packed in {*actual[SetId.SESSION_SLOTS].values(), *(key[:-4] for key in actual[SetId.SESSION_ENDPOINTS])}:
        yield int.from_bytes(packed, "big")


def ranges_by_list(actual: Elements) -> dict[bytes, list[bytes]]:
    """Return the element keys of the allowed source ranges, by the packed number of their list."""
    ranges: dict[bytes, list[bytes]] = {}
    for key in actual[SetId.FIREWALL_ALLOW]:
        ranges.setdefault(key[: len(key) // 4], []).append(key)
    return ranges


def recall(plan: ServicePlan, actual: Elements, known: Numbers) -> Placed:
    """Return a plan with the slots and numbers that its endpoints have in the kernel. If this is passed to
    `render.place`, the result differs from the kernel only where a resync must write.
    """
    cluster: Pool = ()
    local: Pool = ()
    number = ranges = 0
    endpoints: Identities = {}
    for frontend in plan.frontends:
        nodeport, key = not frontend.address, service_key(frontend.key)
        if plan.affinity:
            number = number or _number(actual, POOL_MAPS, key)
        if plan.source_ranges is not None:
            ranges = ranges or _number(actual, (SetId.FIREWALL_LISTS,), key)
        wide = actual[SetId.NODEPORT_ENDPOINTS if nodeport else SetId.ENDPOINTS]
        # With internalTrafficPolicy Local a cluster IP picks from the local pool, which is in the map `endpoints`.
        if frontend.kind is FrontendKind.CLUSTER and plan.policies.internal is Policy.LOCAL:
            local = local or _in_slots(wide, key, len(plan.local))
        else:
            cluster = cluster or _in_slots(wide, key, len(plan.cluster))
        near = actual[SetId.LOCAL_NODEPORT_ENDPOINTS if nodeport else SetId.LOCAL_ENDPOINTS]
        local = local or _in_slots(near, key, len(plan.local))
    number = known.recall(plan.key, number) if plan.affinity else 0
    ranges = known.recall(list_key(plan.key), ranges) if plan.source_ranges is not None else 0
    if number:
        pools, endpoints = _sticky(plan, number, actual, known)
        cluster, local = pools[Policy.CLUSTER] or cluster, pools[Policy.LOCAL] or local
    return Placed(plan, cluster, local, number, ranges, endpoints=endpoints)


def _sticky(
    plan: ServicePlan, number: int, actual: Elements, known: Numbers
) -> tuple[Mapping[Policy, Pool], Identities]:
    """Return the pools of a plan with session affinity, and the numbers of their endpoints, as they are
    in the kernel.
    """
    slots, owners = actual[SetId.SESSION_SLOTS], actual[SetId.SESSION_ENDPOINTS]
    protocol = protocol_field(plan.key.protocol)
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


def _number(actual: Elements, maps: Iterable[SetId], frontend: bytes) -> int:
    found = (actual[name].get(frontend) for name in maps)
    return next((service_port_number(packed) for packed in found if packed is not None), 0)


def _in_slots(entries: dict[bytes, bytes], key: bytes, likely: int, padding: int = 2) -> Pool:
    """Return the entries of a pool up to its first free slot, without padding; `likely` is their probable number."""
    there = list(map(entries.get, slot_keys(key, likely + 1)))
    while None not in there:
        there.append(entries.get(key + slot_bytes(len(there) + 1)[len(there)]))
    return tuple([entry[: len(entry) - padding] for entry in there[: there.index(None)] if entry])


class FoundElements:
    """The elements of some sets and maps; endpoint maps are read for some Services at a time. Raises ApplyError.

    `left` has those read elements that no Service needed so far.
    """

    def __init__(self, table: KernelTable, names: Iterable[str]) -> None:
        self.left: Elements = {name: {} if name in ENDPOINT_MAPS else _dumped(table, name) for name in names}
        self._table = table
        self._ranges = ranges_by_list(self.left)
        self._frontends = {name: _slots(name, self.left) for name in _FRONTENDS}
        self._unread = {name: _count(table, name) for name in _FRONTENDS}  # elements

    def take(self, desired: Parts) -> Difference[str, bytes, bytes]:
        """Return the elements to write for a Service, and remove its elements from `left`. Raises ApplyError."""
        present: Elements = {}
        wanted: Elements = {}
        for set_id, entries in desired.elements.items():
            take = self.left[set_id].get if set_id in SHARED else self.left[set_id].pop
            found = {key: data for key in entries if (data := take(key, None)) is not None}
            if found != entries:
                present[set_id], wanted[set_id] = found, entries
        for (set_id, key), pool in desired.pools.items():
            keys = slot_keys(key, len(pool))
            there = list(map(self.left[set_id].pop, keys, _NONE))
            slots = [entry + PADDING[set_id] for entry in pool]
            if there != slots:
                found = {slot: data for slot, data in zip(keys, there, strict=True) if data is not None}
                present.setdefault(set_id, {}).update(found)
                wanted.setdefault(set_id, {}).update(zip(keys, slots, strict=True))
        for name in wanted.keys() & _FRONTENDS.keys():
            # The kernel refuses to add an element twice, so desired elements that were not read yet are looked up.
            more = self._looked_up(name, [key for key in wanted[name] if key not in present[name]])
            present[name].update(more)
        # The kernel refuses a range that overlaps an unplanned range of its list, so the same transaction removes the
        # unplanned one.
        for number in set(desired.elements.get(SetId.FIREWALL_LISTS, {}).values()):
            for span in self._ranges.get(number, ()):
                if self.left[SetId.FIREWALL_ALLOW].pop(span, None) is not None:
                    present.setdefault(SetId.FIREWALL_ALLOW, {})[span] = b""
        return diff(present, wanted)

    def ahead(self, wanted: Iterable[_Named]) -> Iterator[_Named]:
        """Yield Services with their plans after reading the endpoints of their frontends. Raises ApplyError."""
        services = iter(wanted)
        while some := list(islice(services, SERVICES)):
            self._read_frontends(
                [service_key(front.key) for _, plans in some for one in plans for front in one.frontends]
            )
            yield from some

    def _read_frontends(self, keys: Sequence[bytes]) -> None:
        for name, left in self._frontends.items():
            self._read_slots(name, [(key, *slots) for key in keys if (slots := left.pop(key, None)) is not None])

    def rest(self, services: Iterable[Iterable[Placed]]) -> None:
        """Read the endpoints of frontends that belong to none of these Services, and elements without a frontend."""
        for name, left in self._frontends.items():
            self._read_slots(name, [(key, *slots) for key, slots in left.items()])
        taken: dict[str, dict[bytes, int]] = {name: {} for name in _FRONTENDS}  # frontend : number of used slots
        if any(self._unread.values()):
            for (name, key), pool in chain.from_iterable(Parts(placed).pools.items() for placed in services):
                if name in taken:
                    taken[name][key] = len(pool)
        for name, slots_in_use in taken.items():
            if self._unread[name]:
                self.left[name] = self._unowned(name, slots_in_use)

    def first_difference(self, services: Mapping[ServiceName, tuple[Placed, ...]], users: Users) -> str:
        """Return the first set with other elements than these Services need, '' for none.

        `users` counts the Services of each shared element. Raises ApplyError.
        """
        for name, _ in self.ahead((name, tuple([item.plan for item in its])) for name, its in services.items()):
            delta = self.take(Parts(services[name]))
            if any(delta):
                return next(iter(delta.removed or delta.added))
        shared = {name: entries.keys() for name, entries in users.items()}
        return next(
            (n for n, found in self.left.items() if self._unread.get(n) or found.keys() - shared.get(n, ())), ""
        )

    def _unowned(self, name: str, taken: Mapping[bytes, int]) -> dict[bytes, bytes]:
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
            there = self._looked_up(name, keys)
            self.left[name].update(there)
            # Used slots have no gaps. Most frontends use few more slots than the minimum of their class, so each round
            # looks up an eighth more slots than the round before.
            asking = []
            for last, frontend, end, most in going_on:
                if end < most and last in there:
                    begins[frontend] = end
                    asking.append((frontend, min(most, end + max(1, end >> 3)), most))

    def _looked_up(self, name: str, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        found = self._table.lookup(name, keys) if keys else {}
        self._unread[name] -= len(found)
        return found


def _count(table: KernelTable, name: str) -> int:
    """Return the number of elements of a set, by a dump if the kernel does not report it (before Linux 6.16)."""
    counted = table.count(name)
    return counted if counted is not None else sum(map(len, table.pairs(name)))


def _dumped(table: KernelTable, name: str) -> dict[bytes, bytes]:
    """Return the elements of a set; repeat the dump while the kernel resizes the set's hash table.

    Such a dump lists some elements twice, and omits equally many (nft_rhash_walk of Linux 6.18).
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
    return (chain.size, chain.size) if chain is not None else (0, 0)
