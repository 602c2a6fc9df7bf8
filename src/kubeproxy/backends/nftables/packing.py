"""Transactions: groups of Services that change together, and elements packed into netlink messages. Pure. Packing is
the hot path of a full sync. Functions written in C pack a pool of endpoints as one piece, and at the end the pieces of
a set are divided into messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from kubeproxy.backends.nftables import layout
from kubeproxy.backends.nftables.layout import PADDING, POOL_SETS, ChainName, Packing, SetId, slot_bytes
from kubeproxy.backends.nftables.render import Parts, Placed, shared_elements
from kubeproxy.backends.state import Difference, NamedPlans, diff
from kubeproxy.kernel.nftables.elements import Packer, element_messages, goto_frame, interval_element
from kubeproxy.kernel.nftables.nfnetlink import DELETE_ELEMENT, NEW_ELEMENT
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Pool, ServiceName

Users = dict[str, Counter[bytes]]
"""For each shared set, the number of Services that use each element."""

_VERDICT, _INTERVAL = Packing.VERDICT, Packing.INTERVAL
_NOTHING: Mapping[str, Sequence[bytes]] = MappingProxyType({})
_FRONTENDS = frozenset[str]((*layout.CLASS_MAPS, *layout.VERDICT_MAPS))
_LEADING = frozenset[str]((*layout.VERDICT_MAPS, *layout.RANGE_MAPS, SetId.FIREWALL_IPS, SetId.SESSION_ENDPOINTS))
_LOOKED_UP = _FRONTENDS | _LEADING
_NUMBERED = frozenset[str]((*layout.SESSION_SETS, SetId.RANGE_ENDPOINTS))


def changed(before: Iterable[Placed], after: Iterable[Placed]) -> Difference[str, bytes, bytes]:
    """Return the smallest change of the elements of a Service. Each pool is compared once for all its frontends, and
    unchanged placements are not converted to elements."""
    was, now = {id(item): item for item in before}, {id(item): item for item in after}
    old = Parts(item for at, item in was.items() if at not in now)
    new = Parts(item for at, item in now.items() if at not in was)
    owned, wanted = (
        {(str(name), key) for name in layout.SHARED for key in parts.elements.get(name, ())} for parts in (old, new)
    )
    moving = owned ^ wanted
    for at in was.keys() & now.keys() if moving else ():
        for shared in moving.intersection(shared_elements(was[at].plan)):
            old.entry(*shared, b"")
            new.entry(*shared, b"")
    delta = diff(old.elements, new.elements)
    compared: dict[tuple[int, int], _Slots] = {}
    for where in old.pools.keys() | new.pools.keys():
        pools = old.pools.get(where, ()), new.pools.get(where, ())
        slots = compared.get((id(pools[0]), id(pools[1])))
        set_id, key = where
        if slots is None:
            slots = compared[id(pools[0]), id(pools[1])] = _changed_slots(*pools, PADDING[set_id])
        if slots.gone:
            delta.removed.setdefault(set_id, []).extend([key + slot for slot in slots.gone])
        if slots.come:
            delta.added.setdefault(set_id, []).extend([(key + slot, data) for slot, data in slots.come])
    return delta


def former(delta: Difference[str, bytes, bytes], *, alone: bool = True) -> dict[str, list[bytes]]:
    """Return the keys of a Service's elements that must remain until its new elements are committed; {} for most
    changes. If other Services change in the same transaction (not `alone`), only elements with this Service's own
    numbers remain, because the other Services may add keys that this Service removes.

    A packet is processed by the rules of one generation, but each of its lookups uses the elements that are current at
    the time of the lookup (nft_genmask_cur in net/netfilter/nft_set_hash.c of Linux 6.18). If a commit between two
    lookups removed the former elements, the packet would miss a frontend that moves to a map whose lookup is already
    over. The packet would also miss the target of an element that it found before: the pool of a chain, a list of
    source ranges, or an endpoint's number. A packet that misses a removed slot gets the first slot."""
    if not alone:
        return _only_removed(delta, _NUMBERED)
    if _LOOKED_UP.isdisjoint(delta.removed):
        return {}
    present = {key for set_id in _FRONTENDS & delta.added.keys() for key, _ in delta.added[set_id]}
    moved = any(not present.isdisjoint(keys) for keys in _only_removed(delta, _FRONTENDS).values())
    if not moved and _LEADING.isdisjoint(delta.removed):
        return {}
    # The kernel refuses a range of ports, or of clients, that overlaps a present range.
    overlapping = {*layout.INTERVALS, SetId.FIREWALL_ALLOW} & delta.added.keys()
    return _only_removed(delta, delta.removed.keys() - {*layout.SHARED, *overlapping})


def _only_removed(delta: Difference[str, bytes, bytes], names: AbstractSet[str]) -> dict[str, list[bytes]]:
    found = {}
    for set_id in names & delta.removed.keys():
        come = {key for key, _ in delta.added.get(set_id, ())}
        if left := [key for key in delta.removed[set_id] if key not in come]:
            found[set_id] = left
    return found


class _Slots(NamedTuple):
    gone: Sequence[bytes]
    come: Sequence[tuple[bytes, bytes]]


def _changed_slots(was: Pool, now: Pool, padding: bytes) -> _Slots:
    if was == now:
        return _Slots((), ())
    names = slot_bytes(max(len(was), len(now)))
    common = min(len(was), len(now))
    other = [at for at, (one, two) in enumerate(zip(was, now, strict=False)) if one != two]
    gone = [names[at] for at in (*other, *range(common, len(was)))]
    come = [(names[at], now[at] + padding) for at in (*other, *range(common, len(now)))]
    return _Slots(gone, come)


class Packers:
    """Functions that pack elements, one per set of a family."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.kinds = {str(name): name.packing for name in SetId}
        self.key_sizes = {str(name): name.key_size(family) for name in SetId}
        self.new = {str(name): Packer.of(name.key_size(family), name.data_size(family)) for name in SetId}
        self.old = {set_id: Packer.of(size, 0) for set_id, size in self.key_sizes.items()}
        plain = [set_id for set_id, kind in self.kinds.items() if kind is Packing.PLAIN]
        self.before_plain = {set_id: self.new[set_id].before_key for set_id in plain}
        self._slots: dict[str, list[bytes]] = {set_id: [] for set_id in POOL_SETS}

    def slots(self, set_id: str, count: int) -> list[bytes]:
        """Return one value for each slot, for at least `count` slots: the packed slot number, followed by the bytes
        between key and data."""
        slots = self._slots[set_id]
        if len(slots) < count:
            between = self.new[set_id].before_data
            slots[:] = [slot + between for slot in slot_bytes(count)[: 2 * count]]
        return slots


class Transaction:
    """The removed and added elements of one transaction; `elements` is their total number. render.translate passes new
    elements to the transaction. A shared element is added only for its first user."""

    def __init__(self, packers: Packers, users: Users, asked: Iterable[tuple[str, bytes]] = ()) -> None:
        self.elements = 0
        self._packers = packers
        self._users = users
        self._before_plain = packers.before_plain
        self._added: defaultdict[str, list[bytes]] = defaultdict(list)
        self._removed: defaultdict[str, list[bytes]] = defaultdict(list)
        self._verdicts: set[bytes] = set()
        self.later: dict[str, list[bytes]] = {}
        """The keys that later transactions must remove, by set; `elements` includes their number."""
        self.asked = set(asked)
        """Shared elements that the current Service uses; a previous transaction may have added them."""

    def next_service(self) -> None:
        """Begin the next Service. All ports of a Service together count as one user of a shared element."""
        self.asked.clear()

    def entry(self, set_id: str, key: bytes, data: bytes) -> None:
        """Add an element of a Service, unless the element is shared and another Service has added it."""
        users = self._users.get(set_id)
        if users is not None:
            if (set_id, key) in self.asked:
                return
            self.asked.add((set_id, key))
            users[key] = known = users.get(key, 0) + 1
            if known > 1:
                return
        before = self._before_plain.get(set_id)
        if before is None:
            self.add(set_id, key, data)
            return
        self._added[set_id].append(before + key)  # the common case
        self.elements += 1

    def pool(self, set_id: str, key: bytes, pool: Pool) -> None:
        """Add the entries of a pool."""
        head, padding = self._packers.new[set_id].before_key + key, PADDING[set_id]
        pieces = map(add, self._packers.slots(set_id, len(pool)), pool)
        self._added[set_id].append(head + (padding + head).join(pieces) + padding)
        self.elements += len(pool)

    def add(self, set_id: str, key: bytes, data: bytes) -> None:
        """Add an element."""
        kind = self._packers.kinds[set_id]
        if kind is _VERDICT:
            head, tail = goto_frame(self._packers.key_sizes[set_id], data)
            self._verdicts.add(data)
            packed = head + key + tail
        elif kind is _INTERVAL:
            packed = interval_element(key, data)
        else:
            packed = self._packers.new[set_id].pack(key, data)
        self._added[set_id].append(packed)
        self.elements += 1

    def remove(self, set_id: str, key: bytes) -> None:
        """Remove an element."""
        interval = self._packers.kinds[set_id] is _INTERVAL
        packed = interval_element(key) if interval else self._packers.old[set_id].pack(key, b"")
        self._removed[set_id].append(packed)
        self.elements += 1

    def change(self, delta: Difference[str, bytes, bytes], later: Mapping[str, Sequence[bytes]] = _NOTHING) -> None:
        """Remove and add elements of a Service; the keys in `later` are removed after this transaction."""
        for set_id, keys in later.items():
            self.later.setdefault(set_id, []).extend(keys)
            self.elements += len(keys)
        for set_id, keys in delta.removed.items():
            remaining = frozenset(later[set_id]) if set_id in later else ()
            for key in keys:
                if key not in remaining:
                    self.release(set_id, key)
        for set_id, entries in delta.added.items():
            for key, data in entries:
                self.entry(set_id, key, data)

    def release(self, set_id: str, key: bytes) -> None:
        """Remove an element of a Service, unless the element is shared and another Service still uses it."""
        users = self._users.get(set_id)
        if users is not None:
            users[key] -= 1
            if users[key] > 0:
                return
            del users[key]
        self.remove(set_id, key)

    def chains(self) -> set[ChainName]:
        """Return the target chains of the added verdicts."""
        found = (layout.parse_chain_name(verdict.decode()) for verdict in self._verdicts)
        return {name for name in found if name is not None}

    def messages(self) -> list[bytes]:
        """Return the messages, removals first, because an element with new data is removed and added again."""
        return [*self._messages(DELETE_ELEMENT, self._removed), *self._messages(NEW_ELEMENT, self._added)]

    def _messages(self, kind: int, sets: dict[str, list[bytes]]) -> Iterator[bytes]:
        for set_id, pieces in sets.items():
            yield from element_messages(
                kind, self._packers.family, layout.TABLE, set_id, pieces, self._size(set_id, is_new=kind == NEW_ELEMENT)
            )

    def _size(self, set_id: str, *, is_new: bool) -> int:
        """Return the size of each element of a set in bytes; 0 if the sizes differ."""
        packing = self._packers.kinds[set_id]
        if packing is Packing.INTERVAL or (packing is Packing.VERDICT and is_new):
            return 0
        return (self._packers.new if is_new else self._packers.old)[set_id].size


def groups(
    changes: Iterable[NamedPlans], placed: Mapping[ServiceName, Sequence[Placed]]
) -> Iterable[Sequence[NamedPlans]]:
    """Return the changes grouped by transaction; a group has the position of its first member.

    If an address and port moves from one Service to another, the two Services must change in one transaction, which
    removes the key and adds it again without a gap. With two transactions the second could remove the key that the
    first added, or the kernel could refuse a key that still exists. `placed` contains the placement of each Service in
    the kernel. Shared elements need no group, because their users are counted."""
    ordered = list(changes)
    lost: dict[bytes, ServiceName] = {}
    gained: list[tuple[bytes, ServiceName]] = []
    if placed and len(ordered) > 1:
        for name, plans in ordered:
            before = [item.plan.all_frontends for item in placed.get(name, ())]
            after = [plan.all_frontends for plan in plans]
            if before != after:
                had = {frontend for frontends in before for frontend in frontends}
                has = {frontend for frontends in after for frontend in frontends}
                lost.update({frontend.handover_key: name for frontend in had - has})
                gained += [(frontend.handover_key, name) for frontend in has - had]
    together: dict[ServiceName, set[ServiceName]] = {}
    for key, name in gained:
        giver = lost.get(key)
        if giver is not None:
            _join(together, giver, name)
    if not together:
        return [(change,) for change in ordered]
    found: dict[ServiceName, list[NamedPlans]] = {}
    first: dict[ServiceName, ServiceName] = {}
    for change in ordered:
        name = change[0]
        for member in together.get(name, ()):
            first.setdefault(member, name)
        found.setdefault(first.get(name, name), []).append(change)
    return found.values()


def _join(together: dict[ServiceName, set[ServiceName]], one: ServiceName, other: ServiceName) -> None:
    larger, smaller = (together.setdefault(name, {name}) for name in (one, other))
    if larger is smaller:
        return
    if len(larger) < len(smaller):
        larger, smaller = smaller, larger
    larger |= smaller
    for member in smaller:
        together[member] = larger
