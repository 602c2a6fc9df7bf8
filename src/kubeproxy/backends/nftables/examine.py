"""Examination of nftables mode: compares the table with plans, element by element, while the proxy runs. A difference
is a change that a resync would write. Therefore each plan is compared in the slots and with the numbers that it has in
the kernel. A dump may lack elements while the proxy writes, so missing elements are looked up by key."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, Final

from kubeproxy.backends.nftables import audit, layout
from kubeproxy.backends.nftables.affinity import client_number
from kubeproxy.backends.nftables.found import numbers, overlapping, recall
from kubeproxy.backends.nftables.gone import GONE, endpoint_key
from kubeproxy.backends.nftables.layout import (
    OF_NUMBERS,
    POOL_MAPS,
    SERVICE_CIDRS,
    TRANSPORTS,
    Layout,
    SetId,
    slot_keys,
)
from kubeproxy.backends.nftables.localhost import LOOPBACK, relay_targets
from kubeproxy.backends.nftables.port_ranges import needed_sets
from kubeproxy.backends.nftables.render import Numbers, Parts, place_all
from kubeproxy.backends.nftables.ruleset import COMMENT, Ruleset
from kubeproxy.backends.nftables.wording import SOCKETS, ElementWords
from kubeproxy.backends.state import Elements, Examiner, Finding, Kind, Plans, findings, of_family
from kubeproxy.backends.table_view import CHAINS, TableView, complete
from kubeproxy.features import RESETS
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.proc.processes import Listening, listening
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, endpoint_id, pack, unpack
from kubeproxy.model.claims import ranges_of
from kubeproxy.model.plan import FamilyGlobals, FrontendKind, Globals, Loopback, Policy, Pool, ServiceName, ServicePlan

_PAD: Final = b"\0\0"
_BEYOND: Final = (4, 256)
"""Minimum and maximum number of slots that are examined after a pool's last slot. Between these limits, as many slots
are examined as the pool has."""

_Desired = dict[ServiceName | None, dict[str, Any]]
"""The desired state of each Service, and of the node."""


class NftablesView(TableView):
    """Examines our table in the network namespace of a socket."""

    def __init__(self, family: Family, link: Netlink) -> None:
        super().__init__(family, layout.TABLE, (*layout.INTERVALS, SetId.FIREWALL_ALLOW), link)


class NftablesExaminer(Examiner):
    """See backends.state.Examiner."""

    def __init__(self, view: NftablesView, world: Globals) -> None:
        super().__init__(view.family, view.close)
        self._view = view
        self._world = world
        self._ours = world.of(self.family) or FamilyGlobals()
        self._ruleset = Ruleset(self.family, world)

    @property
    def _layout(self) -> Layout:
        return self._ruleset.layout

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner. Looks up each element that these Services need or could have."""
        ours = of_family(plans, self.family)
        self._ruleset = self._ruleset.having(needed_sets(ours.values()))
        if (harm := self._harm()) is not None:
            yield harm
            return
        found = self._looked_up(ours)
        yield from self._compared(ours, self._placed(ours, found, set(self._numbers_of_others(ours))), found, {}, {})

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        ours = of_family(wanted, self.family)
        self._ruleset = self._ruleset.having(needed_sets(ours.values()))
        if (harm := self._harm()) is not None:
            yield harm
            return
        found: Elements = {name: dict(self._view.elements(name)) for name in self._layout.sets}
        yield from self._compared(ours, self._placed(ours, found), found, *self._of_node())

    def _placed(self, plans: Plans, found: Elements, taken: Iterable[int] = ()) -> dict[ServiceName, Parts]:
        """Return the desired elements, in the slots that they have in the kernel; look up elements that the dumps
        lack."""
        parts = _parts(plans, found, taken)
        if complete(found, chain.from_iterable(map(_places, parts.values())), self._view.lookup):
            parts = _parts(plans, found, taken)
        return parts

    def remembered(self, plan: ServicePlan, client: bytes, policy: Policy) -> Iterator[bytes]:
        """See Examiner."""
        hashed, protocol = client_number(client), layout.protocol_field(plan.key.protocol)
        fronts = list(_fronts([plan]))
        found = (self._view.lookup(name, self._fitting(name, fronts)) for name in POOL_MAPS)
        numbers = {number for pools in found for number in pools.values() if number[-1] & 1 == policy}
        known = self._view.lookup(layout.CLIENTS, [hashed + number for number in sorted(numbers)])
        there = self._view.lookup(SetId.SESSION_ENDPOINTS, [endpoint + protocol for endpoint in known.values()])
        yield from {destination[: -len(_PAD)] for destination in there.values()}

    def _fitting(self, name: str, fronts: Iterable[bytes]) -> list[bytes]:
        size = SetId(name).key_size(self.family)
        return [key for key in fronts if len(key) == size]

    # -- found state ----------------------------------------------------------------------------------------------

    def _looked_up(self, plans: Plans) -> Elements:
        keys: defaultdict[str, set[bytes]] = defaultdict(set)
        found: Elements = {name: {} for name in self._layout.sets}
        for part in _parts(plans, found).values():
            for set_id, key in _places(part):
                keys[set_id].add(key)
            for (set_id, key), pool in part.pools.items():
                keys[set_id].update(slot_keys(key, _most_slots(len(pool))))
        fronts = list(_fronts(chain.from_iterable(plans.values())))
        for each in SetId:
            if each not in (SetId.SESSION_OWN, *layout.INTERVALS) and each.fields[-1] == "port":
                keys[each].update(self._fitting(each, fronts))
        restricted = keys.pop(SetId.FIREWALL_ALLOW, None) is not None
        # The elements of these sets are read below: their keys contain numbers or ranges that may differ in the kernel.
        for name in (*layout.SESSION_SETS, *layout.OF_RANGES):
            keys.pop(name, None)
        found |= {name: dict(self._view.lookup(name, asked)) for name, asked in keys.items()}
        for of_ranges in found.keys() & layout.INTERVALS:
            found[of_ranges] = self._ranges_of(of_ranges, plans)
        self._read_pools(found)
        lists = {*found[SetId.FIREWALL_LISTS].values(), *found.get(SetId.FIREWALL_RANGES, {}).values()}
        if restricted or lists:
            # Another program may have added ranges to a list; these ranges are not among the planned keys.
            spans = self._view.elements(SetId.FIREWALL_ALLOW)
            found[SetId.FIREWALL_ALLOW] = {key: b"" for key in spans if key[: self.family.address_size] in lists}
        return found

    def _ranges_of(self, name: str, plans: Plans) -> dict[bytes, bytes]:
        """Return the found ranges of ports that are at a cluster IP of these Services or overlap a desired range."""
        own, size = [*self._range_keys(plans)], self.family.address_size
        spans = [span for its in plans.values() for span in ranges_of(its, self.family)]
        cluster_ips = {span.address for span in spans if span.kind is FrontendKind.CLUSTER}
        found = self._view.elements(name).items()
        return {k: data for k, data in found if k[:size] in cluster_ips or any(overlapping(k, each) for each in own)}

    def _read_pools(self, found: Elements) -> None:
        """Add to `found` the elements of the pools to which frontends or ranges of ports in `found` refer by
        number."""
        numbers = {number for name in (*POOL_MAPS, *layout.RANGE_POOLS) for number in found.get(name, {}).values()}
        size = self.family.address_size
        for name in OF_NUMBERS if numbers else ():
            if name in found:
                elements = self._view.elements(name).items()
                found[name] = {key: data for key, data in elements if key[:size] in numbers}
            if name == SetId.SESSION_SLOTS:
                numbers |= set(found[name].values())

    def _numbers_of_others(self, plans: Plans) -> Iterator[int]:
        all_plans = [plan for its in plans.values() for plan in its]
        if any(plan.numbered or plan.source_ranges is not None for plan in all_plans):
            own = {*_fronts(all_plans), *self._range_keys(plans)}
            for set_id in (*layout.NUMBER_MAPS, *(self._layout.sets.keys() & layout.RANGE_MAPS)):
                others = (number for key, number in self._view.elements(set_id).items() if key not in own)
                yield from map(layout.service_port_number, others)

    def _range_keys(self, plans: Plans) -> Iterator[bytes]:
        return (layout.range_key(span) for its in plans.values() for span in ranges_of(its, self.family))

    def _of_node(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two values: the found and the desired state of chains, rules, and sets that belong to no Service."""
        present = self._view.contents()
        cidrs = ", ".join(f"{unpack(a)} to {unpack(b)}" for a, b in self._ours.service_cidrs) or "none"
        edges = frozenset(self._view.elements(SERVICE_CIDRS)) - {bytes(self.family.address_size)}
        protocols = {key[0] for key in self._view.elements(TRANSPORTS)}
        right = edges == {key for key, _ in audit.edges(self._ours.service_cidrs)}
        served = "TCP, UDP, SCTP" if protocols == PROTOCOL_NAMES.keys() else "others"
        found: dict[str, Any] = {
            CHAINS: present.chains,
            SERVICE_CIDRS: {"the ServiceCIDRs": cidrs if right else "others"},
            TRANSPORTS: {"the protocols that the proxy serves": served},
        }
        desired: dict[str, Any] = {
            CHAINS: audit.wanted(self._ruleset, present).chains,
            SERVICE_CIDRS: {"the ServiceCIDRs": cidrs},
            TRANSPORTS: {"the protocols that the proxy serves": "TCP, UDP, SCTP"},
            SetId.NODEPORT_IPS: dict.fromkeys(self._ours.nodeport_ips or (), b""),
        }
        return found, desired

    def _harm(self) -> Finding | None:
        header, where = self._view.header(), f"table {self._ruleset.name}"
        if header is None:
            return Finding(None, Kind.MISSING, "the whole table: no Service is served", where)
        if header.dormant:
            return Finding(None, Kind.DIFFERENT, "the table is dormant: no Service is served", where)
        if not header.comment.startswith(COMMENT):
            what = "the table is another program's"
            return Finding(None, Kind.DIFFERENT, what, where, COMMENT, header.comment or "no comment")
        if missing := self._layout.sets.keys() - self._view.sets():
            return Finding(None, Kind.MISSING, f"sets of the table: {', '.join(sorted(missing))}", where)
        return None

    # -- comparison -----------------------------------------------------------------------------------------------

    def _compared(
        self,
        plans: Plans,
        parts: Mapping[ServiceName, Parts],
        elements: Elements,
        node_found: dict[str, Any],
        node_desired: dict[str, Any],
    ) -> Iterator[Finding]:
        owners = {key: name for name, its in plans.items() for key in (*_fronts(its), *self._range_keys({name: its}))}
        owners |= {key[: len(key) // 2 - 4]: owners[key] for key in self._range_keys(plans)}
        lists = elements[SetId.FIREWALL_LISTS] | elements.get(SetId.FIREWALL_RANGES, {})
        owners |= {lists[key]: name for key, name in owners.items() if key in lists}
        owners |= _owners_of_pools(elements, owners)
        for part in parts.values():
            numbers: dict[bytes, bytes] = {}
            for (set_id, key), pool in part.pools.items():
                if set_id == SetId.SESSION_SLOTS:
                    numbers |= zip(slot_keys(key, len(pool)), pool, strict=True)
            owners |= _owners_of_pools(part.elements | {SetId.SESSION_SLOTS: numbers}, owners)
        unplanned: dict[bytes, ServiceName] = {}  # key: address of an unplanned endpoint; value: its Service
        found: dict[str, Any] = elements | node_found
        desired: _Desired = {}
        for name, part in parts.items():
            state: dict[str, Any] = dict(part.elements)
            for (set_id, key), pool in part.pools.items():
                if set_id == SetId.SESSION_SLOTS:
                    state.setdefault(set_id, {}).update(zip(slot_keys(key, len(pool)), pool, strict=True))
                    continue
                present, wanted = _normalised(key, pool, found[set_id])
                found[set_id] |= present
                state.setdefault(set_id, {}).update(wanted)
                unplanned |= {extra[len(key) : -4]: name for extra in present.keys() - wanted.keys()}
            desired[name] = state | self._sockets(plans[name])
        for key, data in chain.from_iterable(found[set_id].items() for set_id in layout.ENDPOINT_MAPS):
            if isinstance(data, bytes) and key[:-4] in owners:  # in a slot after the planned slots
                unplanned[data[:-4]] = owners[key[:-4]]
        if node_desired:
            desired[None] = node_desired
        found |= {GONE: self._gone(plans), SOCKETS: self._listening(desired)}
        yield from findings(found, desired, ElementWords(self._layout, owners, unplanned))

    def _gone(self, plans: Plans) -> dict[tuple[ServiceName, bytes], bytes]:
        if not RESETS.value(self._world) or not (gone := set(map(endpoint_key, self._view.elements(GONE)))):
            return {}
        return {
            (name, destination): b""
            for name, its in plans.items()
            for plan in its
            for destination in plan.serving
            if endpoint_id(destination, plan.key.protocol) in gone
        }

    def _sockets(self, plans: Iterable[ServicePlan]) -> dict[str, Any]:
        if self._ours.loopback is not Loopback.RELAYED:
            return {}
        return {SOCKETS: {(LOOPBACK[self.family], port): b"" for port, _ in relay_targets(plans)}}

    def _listening(self, desired: _Desired) -> dict[tuple[str, int], bytes]:
        asked = {key for state in desired.values() for key in state.get(SOCKETS, ())}
        there = listening(self.family, socket.IPPROTO_TCP) if asked else frozenset()
        return {(at, port): b"" for at, port in asked if Listening(pack(at) or b"", port) in there}


def _owners_of_pools(state: Elements, owners: Mapping[bytes, ServiceName]) -> dict[bytes, ServiceName]:
    """Return the Service of each number that identifies a pool, or an endpoint of a pool with session affinity."""
    found: dict[bytes, ServiceName] = {}
    for name in (*POOL_MAPS, *layout.RANGE_POOLS):
        found |= {number: owners[key] for key, number in state.get(name, {}).items() if key in owners}
    slots = state.get(SetId.SESSION_SLOTS, {}).items()
    return found | {endpoint: found[key[:-4]] for key, endpoint in slots if key[:-4] in found}


def _parts(plans: Plans, found: Elements, taken: Iterable[int] = ()) -> dict[ServiceName, Parts]:
    known = Numbers(taken)
    known.read((*numbers(found), *taken))
    return {
        name: Parts(place_all(its, [recall(plan, found, known) for plan in its], known)) for name, its in plans.items()
    }


def _places(part: Parts) -> Iterator[tuple[str, bytes]]:
    for set_id, entries in part.elements.items():
        yield from zip(repeat(set_id), entries)
    for (set_id, key), pool in part.pools.items():
        yield from zip(repeat(set_id), slot_keys(key, len(pool)))


def _fronts(plans: Iterable[ServicePlan]) -> Iterator[bytes]:
    return (layout.service_key(frontend.key) for plan in plans for frontend in plan.frontends)


def _most_slots(planned: int) -> int:
    least, most = _BEYOND
    return planned + min(max(planned, least), most)


def _normalised(key: bytes, pool: Pool, elements: dict[bytes, Any]) -> tuple[dict[bytes, Any], dict[bytes, Any]]:
    """Remove a pool from the found elements of its map; return its found and desired state if they differ, else two
    empty states. A state contains the number of slots of each endpoint (key: frontend and destination), so if one
    endpoint is removed, only this endpoint differs, although the last endpoint moves to another slot. If only the order
    of the slots differs, a state has one entry: the endpoints in slot order (key: frontend)."""
    slots = slot_keys(key, _most_slots(len(pool)))
    there = list(map(elements.pop, slots[: len(pool)], repeat(None)))
    wanted = [destination + _PAD for destination in pool]
    if there == wanted:
        return {}, {}
    there += map(elements.pop, slots[len(pool) :], repeat(None))
    had, asked = Counter(d for d in there if d is not None), Counter(wanted)
    if had == asked:
        return {key: tuple([d and d[: -len(_PAD)] for d in there[: len(pool)]])}, {key: pool}
    return {key + d: count for d, count in had.items()}, {key + d: count for d, count in asked.items()}
